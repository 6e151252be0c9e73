"""Texts from a model and a certified head: what a user of llama.cpp or an OpenAI client expects around the steps."""

from __future__ import annotations

import codecs
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .certificate import Certificate
from .head import CertifiedHead
from .lookup import Lookup
from .noise import gumbel
from .scan import allowed_bits, allowed_ids
from .spec import Array, flag, one_of, positive, whole

__all__ = ["CONTEXT", "Generation", "Step", "Vocabulary", "Writer", "shared_start"]

#: Positions, where nothing else is asked for and the model has as many.
CONTEXT = 4096


@dataclass(frozen=True)
class Step:
    """One new token. text: what can be shown now (a token may hold a part of a character, or of a stop string).
    logit: exact to float64. certificate: of the step. state: (d,) that it was decided from."""

    token: int
    text: str
    logit: float
    certificate: Certificate
    state: NDArray[np.float32]


@dataclass
class Generation:
    """What `Writer.generate` gives, step by step: iterate over it, or call `run`.

    finish: "stop" at a token that ends the text or at a stop string, "length" at max_tokens or the end of the context,
    None before. drafted, accepted: tokens of speculation.
    """

    steps: Iterator[Step]
    prompt_tokens: int
    seed: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    drafted: int = 0
    accepted: int = 0

    def __iter__(self) -> Iterator[Step]:
        return self.steps

    def run(self) -> Generation:
        """To the end."""
        for _ in self.steps:
            pass
        return self


def shared_start(a: list[int], b: list[int]) -> int:
    """How many tokens two texts have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Vocabulary(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str, begin: bool = True, special: bool = True) -> list[int]:
        """Token ids. begin: with the tokens that the model wants in front; special: read names of special tokens."""

    def piece(self, token: int, special: bool = False) -> bytes:
        """What a token stands for; special tokens stand for nothing unless `special`."""

    def ends(self, token: int) -> bool:
        """Whether a text ends with this token."""


class Writer(ABC):
    """A model that goes on from texts: subclasses compute hidden states.

    head: decides the tokens. vocabulary: its texts. context: positions. can_draft: whether states of drafted tokens
    can be taken back.
    """

    head: CertifiedHead
    vocabulary: Vocabulary
    context: int
    can_draft = True

    @abstractmethod
    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's own chat template. Raises ModelError without one."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the model holds."""

    @abstractmethod
    def _evaluate(self, tokens: list[int], draft: list[int]) -> NDArray[np.float32]:
        """States (1 + len(draft), d) after the last token, and after each drafted one."""

    def _shorten(self, tokens: list[int]) -> list[int]:
        """Makes room in a full context; the list as it is, where that cannot be."""
        return tokens

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stream: int = 0,
        order: str = "transformers",
        stop: Sequence[str] = (),
        speculate: bool = False,
        bias: Mapping[int, float] | None = None,
        allowed: Callable[[list[int]], Array | None] | None = None,
    ) -> Generation:
        """Goes on from a text, or from token ids.

        temperature: 0 is greedy search; above, tokens are drawn as `CertifiedHead.sample` says, with its top_k, top_p,
        min_p, seed and stream. order: "llama.cpp" takes the temperature last, behind top-k, top-p and min-p. stop:
        texts at which it ends; they are not part of the result. speculate: look up what followed the last tokens before
        and check several at once, where that pays by what was right so far; the ids are the same as without, except
        where llama.cpp rounds a batch differently.
        bias: added to the logits of some tokens, minus infinity bans one; finite ones go with temperature alone.
        allowed: gives the mask of `CertifiedHead.top_k` for the tokens so far.
        """
        ids = self.vocabulary.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ValueError("the prompt has no token; give it at least one word")
        bad = [token for token in ids if not 0 <= token < self.head.spec.n_rows]
        if bad:
            raise ValueError(f"the prompt has token {bad[0]}, expected ids from 0 to {self.head.spec.n_rows - 1}")
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context {self.context} positions; make it shorter, or raise "
                "context"
            )
        max_tokens = whole("max_tokens", max_tokens, 1, 2**31 - 1)
        if temperature != 0:
            temperature = positive("temperature", temperature)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {stop!r}, expected texts that are not empty")
        seed = secrets.randbits(63) if seed is None else whole("seed", seed, 0, 2**64 - 1)
        speculate = flag("speculate", speculate) and self.can_draft and allowed is None
        last = one_of("order", order, ("transformers", "llama.cpp")) == "llama.cpp"
        choice = _Choice(self.head, temperature, top_k, top_p, min_p, seed, stream, dict(bias or {}), last)
        out = Generation(iter(()), len(ids), seed)
        out.steps = self._steps(out, ids, max_tokens, choice, stop, speculate, allowed)
        return out

    def _steps(
        self,
        out: Generation,
        prompt: list[int],
        max_tokens: int,
        choice: _Choice,
        stop: tuple[str, ...],
        speculate: bool,
        allowed: Callable[[list[int]], Array | None] | None,
    ) -> Iterator[Step]:
        text = _Text(stop)
        tokens, draft = list(prompt), list[int]()
        lookup = Lookup(tokens) if speculate else None
        while out.finish is None:
            states = self._evaluate(tokens, draft)
            mask = None if allowed is None else allowed(tokens)
            # not len(tokens): a shifted context must not see the same noise twice
            found, logits, certificates = choice(states, out.prompt_tokens + len(out.ids), mask)
            for i, token in enumerate(found.tolist()):
                tokens.append(token)
                if lookup:
                    lookup.add(token)
                out.ids.append(token)
                if self.vocabulary.ends(token):
                    out.finish, shown = "stop", text.close()
                else:
                    shown, stopped = text.add(self.vocabulary.piece(token))
                    if stopped:
                        out.finish = "stop"
                    elif len(out.ids) >= max_tokens:
                        out.finish, shown = "length", shown + text.close()
                out.text += shown
                out.accepted += i < len(draft) and draft[i] == token
                yield Step(token, shown, float(logits[i]), certificates[i], states[i])
                if out.finish is not None or i == len(draft) or draft[i] != token:
                    break
            if out.finish is None and len(tokens) >= self.context:
                tokens = self._shorten(tokens)
                if lookup:
                    lookup.reset(tokens)
                if len(tokens) >= self.context:
                    out.finish = "length"
            draft = lookup.draft(min(max_tokens - len(out.ids), self.context - len(tokens)) - 1) if lookup else []
            out.drafted += len(draft)


class _Choice:
    """How a state becomes a token."""

    def __init__(
        self,
        head: CertifiedHead,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stream: int,
        bias: dict[int, float],
        temperature_last: bool,
    ) -> None:
        self.head, self.temperature = head, temperature
        self.filters = (top_k, top_p, min_p)
        self.filter_temperature = 1.0 if temperature_last else None
        self.seed, self.stream = seed, whole("stream", stream, 0, 2**32 - 1)
        rows = head.spec.n_rows
        for token, value in bias.items():
            whole("a token of bias", token, 0, rows - 1)
            if not value < np.inf:
                raise ValueError(f"bias of token {token} is {value}, expected a number or minus infinity")
        self.bans = np.array([token for token, value in bias.items() if value == -np.inf], np.int64)
        some = sorted((token, value) for token, value in bias.items() if value > -np.inf)
        self.biased = np.array([token for token, _ in some], np.int64)
        self.bias = np.array([value for _, value in some], np.float64)
        if temperature and len(some) and self.filters != (0, 1.0, 0.0):
            raise ValueError(
                "bias goes with temperature alone, not with top_k, top_p or min_p; ban with minus infinity"
            )
        if len(self.bans) + len(some) >= rows:
            raise ValueError("bias names every token; leave at least one out")

    def __call__(
        self, states: NDArray[np.float32], position: int, allowed: Array | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], Any]:
        """Ids (n,), logits and certificates for states at positions from this on."""
        if len(self.bans) or len(self.biased):
            allowed = self._without(allowed)
        ids, logits, certificates = self._choose(states, position, allowed)
        if len(self.biased):
            ids, logits = self._with_biased(states, position, ids, logits)
        return ids, logits, certificates

    def _without(self, allowed: Array | None) -> NDArray[np.bool_]:
        """The mask less the tokens whose logit is changed."""
        rows = self.head.spec.n_rows
        bits = allowed_bits(allowed, 1, rows)[0]
        mask = np.ones(rows, bool) if bits is None else np.isin(np.arange(rows), allowed_ids(bits, rows))
        mask[self.bans] = mask[self.biased] = False
        return mask

    def _with_biased(
        self, states: NDArray[np.float32], position: int, ids: NDArray[np.int64], logits: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens with a bias against the winners among all others: exact scores of both, in float64."""
        out, values = ids.copy(), logits.copy()
        for i, state in enumerate(states):
            every = np.append(self.biased, ids[i])
            value = np.append(np.asarray(self.head.scores(state, self.biased[None]).logits)[0] + self.bias, logits[i])
            key = value
            if self.temperature:
                key = value + self.temperature * gumbel(self.seed, self.stream, position + i, every)
            best = int(np.lexsort((every, -key))[0])
            out[i], values[i] = every[best], value[best]
        return out, values

    def _choose(
        self, states: NDArray[np.float32], position: int, allowed: Array | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], Any]:
        if not self.temperature:
            top = self.head.top_k(states, 1, allowed=allowed)
            return np.asarray(top.ids)[:, 0], np.asarray(top.logits)[:, 0], top.certificates
        positions = np.arange(position, position + len(states))
        streams = np.full(len(states), self.stream)
        draw = self.head.sample(
            states,
            self.temperature,
            *self.filters,
            seed=self.seed,
            position=positions,
            stream=streams,
            allowed=allowed,
            filter_temperature=self.filter_temperature,
        )
        return draw.ids, draw.logits, draw.certificates


class _Text:
    """Bytes of tokens on their way to text: whole characters, and nothing that may be the start of a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = ""

    def add(self, piece: bytes) -> tuple[str, bool]:
        """What may be shown, and whether a stop string was met."""
        self._kept += self._decoder.decode(piece)
        met = [at for at in (self._kept.find(text) for text in self._stop) if at >= 0]
        if met:
            shown, self._kept = self._kept[: min(met)], ""
            return shown, True
        hold = max((n for text in self._stop for n in range(1, len(text)) if self._kept.endswith(text[:n])), default=0)
        cut = len(self._kept) - hold
        shown, self._kept = self._kept[:cut], self._kept[cut:]
        return shown, False

    def close(self) -> str:
        """What is left."""
        rest = self._kept + self._decoder.decode(b"", final=True)
        self._kept = ""
        return rest
