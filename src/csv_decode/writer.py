"""Texts from a model and a certified head: what a user of llama.cpp or an OpenAI client expects around the steps."""

from __future__ import annotations

import codecs
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .certificate import Certificate
from .choice import Choice, choose
from .grammar import Grammar, Tokens
from .head import CertifiedHead
from .lookup import Lookup
from .spec import Array, flag, one_of, whole

__all__ = ["CONTEXT", "SEQUENCES", "Generation", "Step", "Vocabulary", "Writer", "shared_start"]

#: Positions, where nothing else is asked for and the model has as many.
CONTEXT = 4096
#: Texts that are written together.
SEQUENCES = 4
#: Positions of a text that are read at once, apart from its end, and that may serve another text.
CHUNK = 64
#: Of the tokens before a draft, those that are tried in its place.
RECENT = 64


@dataclass(frozen=True)
class Step:
    """One new token. text: what can be shown now (a token may hold a part of a character, or of a stop string).
    logit: exact to float64. certificate: of the step. state: (d,) that it was decided from."""

    token: int
    text: str
    logit: float
    certificate: Certificate
    state: NDArray[np.float32]


@dataclass(eq=False)
class Generation:
    """A text that `Writer.generate` will write, step by step: iterate over it, or call `run`; with others at once:
    `Writer.together`.

    finish: "stop" at a token that ends the text or at a stop string, "length" at max_tokens or the end of the context,
    None before. drafted, accepted: tokens of speculation.
    """

    writer: Writer = field(repr=False)
    prompt_tokens: int
    seed: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    drafted: int = 0
    accepted: int = 0
    _work: _Work | None = field(default=None, repr=False)
    _steps: Iterator[Step] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Step]:
        if self._steps is None:
            self._steps = (step for _, step in self.writer.together([self]))
        return self._steps

    def run(self) -> Generation:
        """To the end."""
        for _ in self:
            pass
        return self


@dataclass(eq=False)
class _Work:
    """What it takes to go on with a text. tokens: all so far, less what a full context has dropped. draft: tokens to
    try behind them."""

    tokens: list[int]
    choice: Choice
    text: _Text
    max_tokens: int
    lookup: Lookup | None
    allowed: Callable[[list[int]], Array | None] | None
    draft: list[int] = field(default_factory=list)


def shared_start(a: list[int], b: list[int]) -> int:
    """How many tokens two texts have in common from the start."""
    if a == b[: len(a)]:
        return len(a)
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

    head: decides the tokens. vocabulary: its texts. context: positions, for all texts at work together. can_draft:
    whether states of drafted tokens can be taken back. sequences: how many texts may be at work.

    Engines round a token by how many others are computed with it. For a text to depend on nothing but what was asked,
    never on who asked before, it is read in chunks, and only whole chunks are taken over from other texts.
    """

    head: CertifiedHead
    vocabulary: Vocabulary
    context: int
    can_draft = True

    def __init__(self, sequences: int = 1) -> None:
        self.sequences = sequences
        self._held: list[list[int]] = [[] for _ in range(sequences)]  # tokens whose positions the model remembers
        self._chunks: list[list[int]] = [[] for _ in range(sequences)]  # of these, the first ones, read in whole chunks
        #: Sequences whose context was shifted: what they remember does not follow from their tokens.
        self._shifted: set[int] = set()
        self._tokens_of_grammars: Tokens | None = None

    @abstractmethod
    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's own chat template. Raises ModelError without one."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the model holds."""

    @abstractmethod
    def _evaluate(self, texts: Sequence[tuple[int, list[int], list[int]]]) -> list[NDArray[np.float32]]:
        """For texts of (sequence, tokens, draft), the sequence a number below `sequences` that no other has: states
        (1 + len(draft), d) after the last token, and after each drafted one. What a sequence remembers of its text is
        not computed again; `_held` has all of it then."""

    @abstractmethod
    def _forget(self, sequence: int, start: int) -> None:
        """Forgets what a sequence remembers from a position on, or all of it where that cannot be."""

    def _copy(self, source: int, sequence: int, count: int) -> None:
        """Takes over the first positions of another sequence."""
        raise NotImplementedError  # with one sequence there is no other

    def _drop(self, sequence: int, start: int = 0) -> None:
        """`_forget`, and what is known of it."""
        if start < len(self._held[sequence]):
            self._forget(sequence, start)
            del self._held[sequence][start:]
        del self._chunks[sequence][start // CHUNK * CHUNK :]
        if not start:
            self._shifted.discard(sequence)

    def forget(self) -> None:
        """Forgets all texts, so that each is read from its start."""
        for sequence in range(self.sequences):
            self._forget(sequence, 0)
            self._held[sequence], self._chunks[sequence] = [], []
        self._shifted.clear()

    def _states(self, texts: Sequence[tuple[int, list[int], list[int]]]) -> list[NDArray[np.float32]]:
        """`_evaluate`, after whose failure nothing is known of what the model remembers."""
        try:
            return self._evaluate(texts)
        except BaseException:
            self.forget()
            raise

    def _shorten(self, sequence: int, tokens: list[int]) -> list[int]:
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
        grammar: Grammar | None = None,
        allowed: Callable[[list[int]], Array | None] | None = None,
    ) -> Generation:
        """Goes on from a text, or from token ids.

        temperature: 0 is greedy search; above, tokens are drawn as `CertifiedHead.sample` says, with its top_k, top_p,
        min_p, seed and stream. order: "llama.cpp" takes the temperature last, behind top-k, top-p and min-p. stop:
        texts at which it ends; they are not part of the result. speculate: look up what followed the last tokens before
        and check several at once, where that pays by what was right so far; the ids are the same as without, except
        where llama.cpp rounds a batch differently.
        bias: added to the logits of some tokens, minus infinity bans one; finite ones go with temperature alone.
        grammar: that the new text obeys; each token is the best, or drawn, of those that it allows. allowed: gives the
        mask of `CertifiedHead.top_k` for the tokens so far. Neither goes with speculation, which is then left out.
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
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {stop!r}, expected texts that are not empty")
        seed = secrets.randbits(63) if seed is None else whole("seed", seed, 0, 2**64 - 1)
        last = one_of("order", order, ("transformers", "llama.cpp")) == "llama.cpp"
        choice = Choice(self.head, temperature, top_k, top_p, min_p, seed, stream, dict(bias or {}), last)
        if grammar is not None:
            if allowed is not None:
                raise ValueError("grammar and allowed are both masks; give one of them")
            if self._tokens_of_grammars is None:
                self._tokens_of_grammars = Tokens(self.vocabulary, self.head.spec.n_rows)
            allowed = grammar.follow(self._tokens_of_grammars)
        lookup = Lookup(ids) if flag("speculate", speculate) and self.can_draft and allowed is None else None
        # what the prompt itself suggests is read with it
        draft = lookup.draft(min(max_tokens, self.context - len(ids)) - 1) if lookup else []
        work = _Work(list(ids), choice, _Text(stop), max_tokens, lookup, allowed, draft)
        return Generation(self, len(ids), seed, drafted=len(draft), _work=work)

    def together(self, runs: Sequence[Generation]) -> Iterator[tuple[int, Step]]:
        """The steps of several texts, each as (number of the text, step). At most `sequences` of them, and as many as
        the context has room for, go through body and head together; the others wait for their turn.

        The ids are those that each text has alone, except where llama.cpp rounds a batch differently; the same texts
        together always have the same ids.
        """
        waiting = deque[tuple[int, Generation, _Work]]()
        for number, run in enumerate(runs):
            if run.writer is not self or run._work is None:
                raise ValueError(f"text {number} has been begun already, or belongs to another model")
            waiting.append((number, run, run._work))
            run._work = None
        return self._together(waiting) if len(waiting) < 2 else self._afresh(waiting)

    def _afresh(self, waiting: deque[tuple[int, Generation, _Work]]) -> Iterator[tuple[int, Step]]:
        """Where several texts lie in an engine's memory depends on what was there before, and so may their rounding."""
        self.forget()
        try:
            yield from self._together(waiting)
        finally:
            self.forget()

    def _together(self, waiting: deque[tuple[int, Generation, _Work]]) -> Iterator[tuple[int, Step]]:
        active: dict[int, tuple[int, Generation, _Work]] = {}  # by sequence, the oldest first
        while active or waiting:
            room = self.context - sum(len(work.tokens) + len(work.draft) for *_, work in active.values())
            while room < 0 and len(active) > 1:  # the latest text waits again, and what it had is computed once more
                sequence = next((at for at in reversed(active) if at not in self._shifted), next(reversed(active)))
                late = active.pop(sequence)
                self._drop(sequence)
                waiting.appendleft(late)
                room += len(late[2].tokens) + len(late[2].draft)
            while waiting and len(active) < self.sequences:
                work = waiting[0][2]
                length = len(work.tokens) + len(work.draft)
                if active and length > room:
                    break
                sequence = next(at for at in range(self.sequences) if at not in active)
                self._begin(sequence, work.tokens, active)
                active[sequence] = waiting.popleft()
                room -= length
            states = self._states([(at, work.tokens, work.draft) for at, (_, _, work) in active.items()])
            asked = [
                # not len(tokens): a shifted context must not see the same noise twice
                (
                    work.choice,
                    found,
                    run.prompt_tokens + len(run.ids),
                    work.allowed and work.allowed(work.tokens),
                    work.draft,
                    work.tokens[-RECENT:] if work.draft else [],
                )
                for (_, run, work), found in zip(active.values(), states, strict=True)
            ]
            chosen = choose(self.head, asked)
            for (at, (number, run, work)), found, (ids, logits, certificates) in zip(
                list(active.items()), states, chosen, strict=True
            ):
                for i, token in enumerate(ids.tolist()):
                    shown = self._add(run, work, token)
                    right = i < len(work.draft) and work.draft[i] == token
                    run.accepted += right
                    yield number, Step(token, shown, float(logits[i]), certificates[i], found[i])
                    if run.finish is not None or not right:
                        break
                if run.finish is None:
                    self._look_ahead(at, run, work, len(active) + len(waiting) - 1)
                if run.finish is not None:
                    del active[at]
                    if active:
                        self._drop(at)

    def _begin(self, sequence: int, tokens: list[int], active: Container[int]) -> None:
        """Reads the whole chunks of a text, but for those that are remembered. Sequences that are not active then
        forget: the context may have no room for them."""
        before = tokens[:-1]
        shared = [shared_start(chunks, before) // CHUNK * CHUNK for chunks in self._chunks]
        most = max(range(self.sequences), key=shared.__getitem__)
        if shared[most] > shared[sequence]:
            self._drop(sequence)
            self._copy(most, sequence, shared[most])
            self._held[sequence] = self._held[most][: shared[most]]
            self._chunks[sequence] = self._held[sequence].copy()
        for other in range(self.sequences):
            if other not in active:
                self._drop(other, shared[most] if other == sequence else 0)
        for end in range(len(self._held[sequence]) + CHUNK, len(before) + 1, CHUNK):
            self._states([(sequence, tokens[:end], [])])
            self._chunks[sequence] = tokens[:end]

    def _add(self, run: Generation, work: _Work, token: int) -> str:
        """One more token of a text; what it shows."""
        work.tokens.append(token)
        if work.lookup:
            work.lookup.add(token)
        run.ids.append(token)
        if self.vocabulary.ends(token):
            run.finish, shown = "stop", work.text.close()
        else:
            shown, stopped = work.text.add(self.vocabulary.piece(token))
            if stopped:
                run.finish = "stop"
            elif len(run.ids) >= work.max_tokens:
                run.finish, shown = "length", shown + work.text.close()
        run.text += shown
        return shown

    def _look_ahead(self, sequence: int, run: Generation, work: _Work, others: int) -> None:
        """Room for the next tokens of a text, and a draft of them."""
        if len(work.tokens) >= self.context:
            before, work.tokens = work.tokens, self._shorten(sequence, work.tokens)
            if work.tokens is not before:
                self._shifted.add(sequence)
            if work.lookup:
                work.lookup.reset(work.tokens)
            if len(work.tokens) >= self.context:
                run.finish = "length"
                return
        if work.lookup:
            room = min(work.max_tokens - len(run.ids), self.context - len(work.tokens)) - 1
            work.draft = work.lookup.draft(room, min(others, self.sequences - 1))
            run.drafted += len(work.draft)


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
