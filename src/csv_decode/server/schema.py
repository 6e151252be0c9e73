"""What clients may ask, as the OpenAI interface has it. Fields that it has and we do not know are ignored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["ChatRequest", "CompletionRequest", "Sampling"]


class Sampling(BaseModel):
    """What completions and chats have in common; top_k and min_p are ours."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    n: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None

    @field_validator("temperature", "top_p", "min_p")
    @classmethod
    def _finite(cls, value: float) -> float:
        if value != value:
            raise ValueError("not a number")
        return value

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        alone = [part for part in self.prompt if isinstance(part, int)]
        return [alone] if alone else [part for part in self.prompt if not isinstance(part, int)]


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """Parts of a content that has several, joined."""
        if isinstance(self.content, str):
            return self.content
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in self.content):
            raise ValueError("messages may hold text only")
        return "".join(part["text"] for part in self.content)


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
