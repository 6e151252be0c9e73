"""How states become tokens: the settings of a text, and one call of the head for all texts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .certificate import Certificate
from .head import CertifiedHead
from .noise import gumbel
from .scan import allowed_bits
from .spec import Array, positive, whole

__all__ = ["Choice", "choose"]

#: Ids (n,), exact logits (n,) and certificates of some states.
Chosen = tuple[NDArray[np.int64], NDArray[np.float64], list[Certificate]]
#: The settings of a text, states (n, d), the position of the first one, a mask for all of them, the tokens that the
#: states after the first one suppose (n - 1), and others that may well come next.
Asked = tuple["Choice", NDArray[np.float32], int, Array | None, list[int], list[int]]


class Choice:
    """What `Writer.generate` was told about its tokens."""

    def __init__(
        self,
        head: CertifiedHead,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stream: int,
        bias: Mapping[int, float],
        temperature_last: bool,
    ) -> None:
        self.temperature = positive("temperature", temperature) if temperature != 0 else 0.0
        self.filters = (top_k, top_p, min_p)
        self.filter_temperature = 1.0 if temperature_last else self.temperature
        self.seed, self.stream = seed, whole("stream", stream, 0, 2**32 - 1)
        rows = head.spec.n_rows
        for token, value in bias.items():
            whole("a token of bias", token, 0, rows - 1)
            if not value < np.inf:
                raise ValueError(f"bias of token {token} is {value}, expected a number or minus infinity")
        some = sorted((token, value) for token, value in bias.items() if value > -np.inf)
        self.biased = np.array([token for token, _ in some], np.int64)
        self.bias = np.array([value for _, value in some], np.float64)
        if self.temperature and len(some) and self.filters != (0, 1.0, 0.0):
            raise ValueError(
                "bias goes with temperature alone, not with top_k, top_p or min_p; ban with minus infinity"
            )
        if len(bias) >= rows:
            raise ValueError("bias names every token; leave at least one out")
        #: Tokens that the head is not to choose: those banned, and those whose logit is changed.
        self.apart = np.array(sorted(bias), np.int64)

    def candidates(self, bits: NDArray[np.uint32] | None) -> NDArray[np.int64]:
        """Those tokens with another logit that a mask allows."""
        if bits is None:
            return np.arange(len(self.biased))
        return np.nonzero(bits[self.biased // 32] >> (self.biased % 32).astype(np.uint32) & 1)[0]

    def mask(self, allowed: Array | None, rows: int) -> NDArray[np.uint32] | None:
        """The mask as words, less the tokens apart; None allows all. If only such tokens are allowed, they stay."""
        bits = allowed_bits(allowed, 1, rows)[0]
        if not len(self.apart):
            return bits
        left = np.full(-(-rows // 32), 2**32 - 1, np.uint32) if bits is None else bits.copy()
        np.bitwise_and.at(left, self.apart // 32, ~(np.uint32(1) << (self.apart % 32).astype(np.uint32)))
        if bits is not None and not left.any():
            some = self.biased[self.candidates(bits)]
            if not len(some):
                raise ValueError("bias bans every token that the mask or the grammar allows here")
            np.bitwise_or.at(left, some // 32, np.uint32(1) << (some % 32).astype(np.uint32))
        return left

    def with_biased(
        self, head: CertifiedHead, states: NDArray[np.float32], position: int, allowed: Array | None, found: Chosen
    ) -> Chosen:
        """The allowed tokens with a bias against the winners among all others: exact scores of both, in float64."""
        ids, logits, certificates = found
        some = self.candidates(allowed_bits(allowed, 1, head.spec.n_rows)[0])
        if not len(some):
            return found
        out, values = ids.copy(), logits.copy()
        for i, state in enumerate(states):
            every = self.biased[some]
            value = np.asarray(head.scores(state, every[None]).logits)[0] + self.bias[some]
            if ids[i] not in every:
                every, value = np.append(every, ids[i]), np.append(value, logits[i])
            key = value
            if self.temperature:
                key = value + self.temperature * gumbel(self.seed, self.stream, position + i, every)
            best = int(np.lexsort((every, -key))[0])
            out[i], values[i] = every[best], value[best]
        return out, values, certificates


def choose(head: CertifiedHead, texts: Sequence[Asked]) -> list[Chosen]:
    """Tokens of several texts. Greedy texts are one call of the head, sampled ones another. A greedy text may get fewer
    than it has states: none behind a draft that is seen to be wrong."""
    out = dict[int, Chosen]()
    for greedy in (True, False):
        numbers = [i for i, (choice, *_) in enumerate(texts) if (choice.temperature == 0) == greedy]
        if not numbers:
            continue
        some = [texts[i] for i in numbers]
        guesses = [_guess(head, text) if greedy else None for text in some]
        sizes = [len(states if g is None else g) for g, (_, states, *_) in zip(guesses, some, strict=True)]
        found = _best(head, some, sizes, guesses) if greedy else _draw(head, some, sizes)
        first = 0
        for i, size, (choice, states, position, allowed, *_) in zip(numbers, sizes, some, strict=True):
            part = slice(first, first + size)
            out[i] = (found[0][part], found[1][part], found[2][part])
            if len(choice.biased):
                out[i] = choice.with_biased(head, states[:size], position, allowed, out[i])
            first += size
    return [out[i] for i in range(len(texts))]


def _guess(head: CertifiedHead, text: Asked) -> NDArray[np.int64] | None:
    """For the states of a draft the best of the tokens that may well come next, up to the first state in which that is
    not the drafted one: what is behind it supposes another text."""
    choice, states, *_, draft, recent = text
    if not draft or len(choice.apart):
        return None
    ids = np.array(sorted({*draft, *recent}))
    best = ids[np.argmax(np.asarray(head.scores(states, ids[None]).logits), axis=1)]
    wrong = np.nonzero(best[:-1] != draft)[0]
    return best[: wrong[0] + 1] if len(wrong) else best


def _joined(texts: Sequence[Asked], sizes: Sequence[int]) -> NDArray[np.float32]:
    """The first states of each text."""
    parts = [states[:size] for (_, states, *_), size in zip(texts, sizes, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _masks(rows: int, texts: Sequence[Asked], sizes: Sequence[int]) -> NDArray[np.uint32] | None:
    """(n, V / 32) words for the first states of each text, or None."""
    masks = [choice.mask(allowed, rows) for choice, _, _, allowed, *_ in texts]
    if all(mask is None for mask in masks):
        return None
    full = np.full(-(-rows // 32), 2**32 - 1, np.uint32)
    return np.repeat(np.stack([full if mask is None else mask for mask in masks]), sizes, axis=0)


def _best(
    head: CertifiedHead,
    texts: Sequence[Asked],
    sizes: Sequence[int],
    guesses: Sequence[NDArray[np.int64] | None],
) -> Chosen:
    guess = None
    if sum(sizes) > 1 and any(g is not None for g in guesses):  # a state alone waits for the codes, whatever is known
        guess = np.concatenate([np.full(size, -1) if g is None else g for size, g in zip(sizes, guesses, strict=True)])
    top = head.top_k(_joined(texts, sizes), 1, allowed=_masks(head.spec.n_rows, texts, sizes), guess=guess)
    return np.asarray(top.ids)[:, 0], np.asarray(top.logits)[:, 0], list(top.certificates)


def _draw(head: CertifiedHead, texts: Sequence[Asked], counts: Sequence[int]) -> Chosen:
    def each(values: Sequence[Any], dtype: Any = None) -> Any:
        """A value of each text, for each of its states."""
        return values[0] if len(values) == 1 else np.repeat(np.array(values, dtype), counts)

    choices = [choice for choice, *_ in texts]
    streams = [choice.stream for choice in choices]
    positions = [np.arange(at, at + len(states)) for _, states, at, *_ in texts]
    draw = head.sample(
        _joined(texts, counts),
        each([choice.temperature for choice in choices]),
        each([choice.filters[0] for choice in choices]),
        each([choice.filters[1] for choice in choices]),
        each([choice.filters[2] for choice in choices]),
        seed=each([choice.seed for choice in choices], np.uint64),
        position=np.concatenate(positions) if len(positions) > 1 else positions[0],
        stream=streams[0] if sum(counts) == 1 else np.repeat(streams, counts),
        allowed=_masks(head.spec.n_rows, texts, counts),
        filter_temperature=each([choice.filter_temperature for choice in choices]),
    )
    return draw.ids, draw.logits, list(draw.certificates)
