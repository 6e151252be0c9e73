"""Exact comparison of scores, for the rare rows that float64 cannot tell apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .spec import HeadSpec

__all__ = ["Race", "exact_scores", "gaps", "precedes", "rank", "stock_gap"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bias = NDArray[np.float32] | None


def _integers(x: F64) -> tuple[list[int], list[int]]:
    """Mantissas and exponents with x = mantissa * 2^exponent, exactly."""
    fraction, exponent = np.frexp(x)
    return (fraction * 2.0**53).astype(np.int64).tolist(), (exponent.astype(np.int64) - 53).tolist()


@dataclass(frozen=True)
class Race:
    """The terms of a sampling race, ``scale * score + temperature * noise``, noise (n,) in the order of the rows."""

    scale: float
    temperature: float
    noise: F64


def _product(a: float, b: float) -> tuple[int, int]:
    (x, y), (p, q) = _integers(np.array([a, b]))
    return x * y, p + q


def exact_scores(rows: NDArray[np.float32], h: F64, bias: Bias, race: Race | None = None) -> list[int]:
    """``<w_i, h> + b_i`` of rows (n, d) with h (d,), or the race's sums of them, as integers in one common unit: their
    order is exact.

    About 0.2 ms a row; rows that are equal where h is not zero are computed once.
    """
    return _sums(rows, h, bias, race)[0]


def gaps(rows: NDArray[np.float32], h: F64, bias: Bias, unit: float) -> tuple[F64, F64]:
    """How far each score is below the largest of them, in `unit`, and the scores: (n,) each, rounded to float64 once
    (infinity beyond it)."""
    live = h != 0
    score, exponent = _sums(rows[:, live], h[live], bias, None)
    largest = max(score)
    return _rounded([largest - x for x in score], exponent, unit), _rounded(score, exponent, 1.0)


def _rounded(numbers: list[int], exponent: int, unit: float) -> F64:
    """``number * 2^exponent / unit``; the division of two integers rounds once."""
    a, b = Fraction(unit).as_integer_ratio()
    up, down = (b << exponent, a) if exponent >= 0 else (b, a << -exponent)
    out = np.empty(len(numbers))
    for i, x in enumerate(numbers):
        try:
            out[i] = x * up / down
        except OverflowError:
            out[i] = np.inf if x > 0 else -np.inf
    return out


def precedes(ids: I64, token: int, h: F64, rows: Callable[[I64], NDArray[np.float32]], bias: Bias) -> NDArray[np.bool_]:
    """Which of ids (n,) come before `token`: larger score, then smaller id, exactly."""
    every, live = np.append(ids, token), h != 0
    some = rows(every)[:, live] if live.any() else np.zeros((len(every), 0), np.float32)
    *score, mine = exact_scores(some, h[live], None if bias is None else bias[every])
    return np.array([x > mine or (x == mine and i < token) for x, i in zip(score, ids.tolist(), strict=True)], bool)


def _sums(rows: NDArray[np.float32], h: F64, bias: Bias, race: Race | None) -> tuple[list[int], int]:
    """Integers and the exponent of two that is their common unit."""
    h_mantissa, h_exponent = _integers(h)
    parts: list[tuple[int, int]] = []
    seen: dict[bytes, tuple[int, int]] = {}
    for i in range(len(rows)):
        key = rows[i].tobytes() + (b"" if bias is None else bias[i].tobytes())
        if key not in seen:
            mantissa, exponent = _integers(rows[i].astype(np.float64))
            terms = [
                (a * b, p + q) for a, b, p, q in zip(mantissa, h_mantissa, exponent, h_exponent, strict=True) if a and b
            ]
            if bias is not None and bias[i]:
                (m,), (e,) = _integers(bias[i : i + 1].astype(np.float64))
                terms.append((m, e))
            low = min((e for _, e in terms), default=0)
            seen[key] = (sum(m << (e - low) for m, e in terms), low)
        parts.append(seen[key])
    if race is not None:
        (factor,), (unit,) = _integers(np.array([race.scale]))
        for i, (m, e) in enumerate(parts):
            noise, at = _product(race.temperature, float(race.noise[i]))
            low = min(e + unit, at)
            parts[i] = ((m * factor << (e + unit - low)) + (noise << (at - low)), low)
    low = min(e for _, e in parts)
    return [m << (e - low) for m, e in parts], low


def rank(
    ids: I64,
    value: F64,
    error: F64,
    k: int,
    h: F64,
    rows: Callable[[I64], NDArray[np.float32]],
    bias: Bias,
    race: Race | None = None,
) -> I64:
    """The exact order of the k best of n scored rows.

    Args:
        ids: (n,) token ids. value, error: (n,) scores with ``|value - true score| <= error``.
        h: (d,) the state. rows: gives rows (m, d) by id. bias: the head's bias by id, or None. race: the values are
            those of this race, in any unit.

    Returns positions in `ids`, best first (larger score, then smaller id), of the k best rows and of every row tied
    with the k-th exactly.
    """
    lower, upper = value - error, value + error
    bar = np.partition(lower, len(lower) - k)[len(lower) - k]
    at = np.nonzero(upper >= bar)[0]
    at = at[np.lexsort((ids[at], -value[at]))]
    # Chains of rows whose intervals overlap; between two chains the order is proved by the intervals.
    low = np.minimum.accumulate(lower[at])
    high = np.maximum.accumulate(upper[at][::-1])[::-1]
    starts = np.concatenate([[0], np.nonzero(low[:-1] > high[1:])[0] + 1, [len(at)]])
    out: list[int] = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if len(out) >= k:
            break
        chain = at[first:last]
        if len(chain) == 1:
            out.append(int(chain[0]))
            continue
        token = ids[chain]
        # A state of zeros ties the whole vocabulary: only the coordinates that count are looked at.
        live = h != 0
        some = rows(token)[:, live] if live.any() else np.zeros((len(token), 0), np.float32)
        noise = None if race is None else Race(race.scale, race.temperature, race.noise[chain])
        score = exact_scores(some, h[live], None if bias is None else bias[token], noise)
        order = sorted(range(len(chain)), key=lambda i: (-score[i], int(token[i])))
        need = k - len(out)
        kept = [i for j, i in enumerate(order) if j < need or score[i] == score[order[need - 1]]]
        out += [int(chain[i]) for i in kept]
    return np.array(out, dtype=np.int64)


def stock_gap(spec: HeadSpec, h: NDArray[np.float32], mine: int, theirs: int) -> tuple[float, float]:
    """Exact score of my token over theirs, and how far the rounding of the stock head can move the two together.

    Summation in float32 errs by at most d 2^-24 sum |w_j h_j|; a bfloat16 result is rounded once more, to 2^-9.
    """
    rows = spec.rows.float32(np.array([mine, theirs])).astype(np.float64)
    bias = np.zeros(2) if spec.bias32 is None else spec.bias32[[mine, theirs]].astype(np.float64)
    score = rows @ h.astype(np.float64) + bias
    magnitude = np.abs(rows) @ np.abs(h.astype(np.float64)) + np.abs(bias)
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9}.get(spec.rows.kind, 2.0**-24)
    rounding = magnitude * (spec.width + 2) * 2.0**-24 + np.abs(score) * unit
    return float(score[0] - score[1]), float(rounding.sum())
