"""A GGUF model that decodes exactly: llama.cpp's body, our head."""

from __future__ import annotations

import codecs
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache import get_index, newest_index
from ..calibration import DEFAULT_STATES
from ..certificate import Certificate
from ..head import CertifiedHead
from ..index import Index
from ..kernels import thread_count
from ..models import ModelError
from ..noise import gumbel
from ..scan import allowed_bits, allowed_ids
from ..spec import Array, flag, one_of, positive, whole
from .body import Body, Vocabulary
from .calibrate import collect_states, embed
from .files import open_gguf
from .lookup import Lookup

__all__ = ["Generation", "LlamaModel", "Step"]

_CONTEXT = 4096


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
    """What `LlamaModel.generate` gives, step by step: iterate over it, or call `run`.

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


class LlamaModel:
    """A .gguf file, ready to write.

    Args:
        path: of the file. index: of its head; None: from the cache, or calibrated and built now.
        context: positions; None: 4096, or fewer where the model was trained for fewer.
        threads: of llama.cpp and of the head, which take turns. progress: called as progress(stage, done, total).
        verbose: show what llama.cpp prints.

    Raises ModelError for files that cannot be run so.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        index: Index | None = None,
        *,
        context: int | None = None,
        threads: int | None = None,
        calibration_states: int = DEFAULT_STATES,
        progress: Callable[[str, int, int], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self.threads = thread_count(threads)
        self.parts = parts = open_gguf(path)
        self.vocabulary = Vocabulary(parts.path, verbose)
        if self.vocabulary.size > parts.spec.n_rows:
            raise ModelError(
                f"{parts.path.name} has {self.vocabulary.size} tokens but {parts.spec.n_rows} rows of its output layer"
            )
        trained = parts.context or _CONTEXT
        self.context = min(trained, _CONTEXT) if context is None else whole("context", context, 8, 2**24)
        if index is None:
            index = self._index(calibration_states, progress)
        self.head = CertifiedHead(index, parts.spec, threads=self.threads, engine="llama_cpp")
        self.body = Body(parts.body, parts.width, self.context, 1, self.threads, verbose=verbose)
        self._held: list[int] = []  # tokens whose positions the body remembers

    def _index(self, count: int, progress: Callable[[str, int, int], None] | None) -> Index:
        found = newest_index(self.parts.spec, self.parts.source)
        if found is not None:
            return found[1]

        def collect() -> Any:
            report = (lambda done, total: progress("calibrating", done, total)) if progress else None
            return collect_states(self.parts, self.vocabulary, count, self.threads, progress=report)

        key = f"llama-{count}"
        return get_index(self.parts.spec, collect, key=key, source=self.parts.source, progress=progress)

    def close(self) -> None:
        """Frees llama.cpp's memory."""
        self.body.close()
        self.vocabulary.close()

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the file's own chat template."""
        template = self.vocabulary.chat_template()
        if template is None:
            raise ModelError(f"{self.parts.path.name} has no chat template; give it a text to continue")
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        names = [self.vocabulary.piece(t, True).decode() for t in (self.vocabulary.end, self.vocabulary.begin)]
        prompt = Jinja2ChatFormatter(template, names[0], names[1])(messages=list(messages)).prompt
        # a template usually writes the first token itself
        return self.vocabulary.encode(prompt, begin=not prompt.startswith(names[1]))

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
        bad = [token for token in ids if not 0 <= token < self.parts.spec.n_rows]
        if bad:
            raise ValueError(f"the prompt has token {bad[0]}, expected ids from 0 to {self.parts.spec.n_rows - 1}")
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
        speculate = flag("speculate", speculate) and allowed is None
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

    def _evaluate(self, tokens: list[int], draft: list[int]) -> NDArray[np.float32]:
        """States after the last token, and after each drafted one. What the body remembers is not computed again."""
        every = tokens + draft
        same = 0
        for mine, other in zip(self._held, every[: len(tokens) - 1], strict=False):
            if mine != other:
                break
            same += 1
        if same < len(self._held):
            self.body.drop(0, same)
        new = every[same:]
        self._held = every[:same]
        wanted = list(range(len(new) - len(draft) - 1, len(new)))
        states = self.body.evaluate(embed(self.parts, new), list(range(same, len(every))), [0] * len(new), wanted)
        self._held = every
        return states

    def _shorten(self, tokens: list[int]) -> list[int]:
        """Drops the older half of what is behind the first token, as llama.cpp's own programs do; the list as it is,
        where the body cannot."""
        if not self.body.can_shift:
            return tokens
        gone = (len(tokens) - 1) // 2
        self.body.drop(0, 1, 1 + gone)
        self.body.shift(0, 1 + gone, -gone)
        self._held = self._held[:1] + self._held[1 + gone :]
        return tokens[:1] + tokens[1 + gone :]


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
