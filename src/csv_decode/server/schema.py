"""What clients may ask, as the OpenAI interface has it. Fields that it has and we do not know are ignored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..grammar import Grammar

__all__ = ["ChatRequest", "CompletionRequest", "Sampling"]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore")

    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(BaseModel):
    """What completions and chats have in common; top_k and min_p are ours, grammar (GBNF) and json_schema those of
    llama.cpp's server."""

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
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(default=None, min_length=1)
    json_schema: dict[str, Any] | None = None

    @field_validator("temperature", "top_p", "min_p")
    @classmethod
    def _finite(cls, value: float) -> float:
        if value != value:
            raise ValueError("not a number")
        return value

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    def obeys(self) -> Grammar | None:
        """The grammar that the text obeys. Raises ValueError where it is none, or where there are several."""
        form = self.response_format
        schema = None if form is None or form.type == "text" else {"type": "object"}
        if form is not None and form.type == "json_schema":
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise ValueError("response_format has no json_schema.schema")
            schema = form.json_schema.schema_
        asked = [given for given in (self.grammar, self.json_schema, schema) if given is not None]
        if len(asked) > 1:
            raise ValueError(
                "grammar, json_schema and response_format each say what the text is to be; give one of them"
            )
        if not asked:
            return None
        return Grammar.gbnf(asked[0]) if isinstance(asked[0], str) else Grammar.json_schema(asked[0])


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
