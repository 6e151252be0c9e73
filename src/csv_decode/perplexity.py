"""Perplexity of a text, with an error bar that is proved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bounds.rounding import RELATIVE, gamma
from .kernels import require_ieee
from .spec import Array, HeadSpec, _to_numpy, as_states

__all__ = ["Perplexity", "perplexity"]

F64 = NDArray[np.float64]
_ROWS = 4096


@dataclass(frozen=True)
class Perplexity:
    """exp of minus the mean log-probability of `tokens` tokens: it lies in [low, high]."""

    low: float
    high: float
    tokens: int

    @property
    def value(self) -> float:
        return (self.low + self.high) / 2

    @property
    def relative_width(self) -> float:
        return (self.high - self.low) / self.low


def perplexity(
    spec: HeadSpec | Array,
    hidden: Array,
    targets: Array,
    batch: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of tokens `targets` (N,) after the states `hidden` (N, d), by the real logits of the stored weights.

    Hundreds of states meet every row at once here, so there is nothing to gain by leaving rows out: the products are
    dense, in float64, and the interval accounts for their rounding and that of the exponentials
    (docs/mathematics.md, section 10). For a state at a time there is `CertifiedHead.log_probs`.

    >>> perplexity(head_spec(model), states[:-1], ids[1:]).value
    """
    require_ieee()
    spec = HeadSpec.of(spec)
    if spec.softcap is not None:
        raise ValueError("perplexity does not know a soft cap")
    h = as_states(hidden, spec.width)
    wanted = _to_numpy(targets)[0]
    if wanted.shape != (len(h),) or wanted.dtype.kind not in "iu":
        raise ValueError(
            f"targets have shape {wanted.shape} and dtype {wanted.dtype}, expected whole numbers ({len(h)},)"
        )
    if wanted.min() < 0 or wanted.max() >= spec.n_rows:
        raise ValueError(f"targets go from {wanted.min()} to {wanted.max()}, expected 0 to {spec.n_rows - 1}")
    spec.require_finite()
    lows, highs = [], []
    for first in range(0, len(h), batch):
        part = slice(first, first + batch)
        some_low, some_high = _log_probs(spec, h[part], wanted[part])
        lows.append(some_low)
        highs.append(some_high)
        if progress:
            progress(min(first + batch, len(h)), len(h))
    low, high = math.fsum(np.concatenate(lows)) / len(h), math.fsum(np.concatenate(highs)) / len(h)
    edge = 2.0**-50 * (1 + abs(low) + abs(high))
    with np.errstate(over="ignore", under="ignore"):
        ends = np.exp([-high - edge, -low + edge]) * [1 - edge - 2.0**-50, 1 + edge + 2.0**-50]
    return Perplexity(max(0.0, float(ends[0])), float(ends[1]), len(h))


def _log_probs(spec: HeadSpec, h: F64, targets: NDArray[np.int64]) -> tuple[F64, F64]:
    """Intervals of the log-probabilities (B,), from running maxima and sums over blocks of rows."""
    n = len(h)
    top, total, error, logit = np.full(n, -np.inf), np.zeros(n), np.zeros(n), np.zeros(n)
    factor = gamma(spec.width + 2)
    size = np.abs(h)
    for first in range(0, spec.n_rows, _ROWS):
        rows = spec.rows.float32(slice(first, min(first + _ROWS, spec.n_rows))).astype(np.float64)
        value = h @ rows.T
        # |<w, h>| by the largest weight of each column bounds the magnitude of every row of the block
        magnitude = size @ np.abs(rows).max(axis=0)
        if spec.bias32 is not None:
            bias = spec.bias32[first : first + len(rows)].astype(np.float64)
            value += bias
            magnitude = magnitude + np.abs(bias).max()
        value *= spec.scale
        error = np.maximum(error, (magnitude * (factor + RELATIVE) + spec.width * 2.0**-1070) * spec.scale)
        here = (targets >= first) & (targets < first + len(rows))
        logit[here] = value[here, targets[here] - first]
        peak = np.maximum(top, value.max(axis=1))
        with np.errstate(invalid="ignore", under="ignore"):
            total = total * np.exp(np.where(np.isinf(top), 0.0, top - peak)) + np.exp(value - peak[:, None]).sum(axis=1)
        top = peak
    # exp and its argument, for at most 2^19 terms in 2^7 blocks: far within 2^-38 of the sum, whose log moves as much
    slack = 2.0**-38 + 2.0**-50 * (np.abs(top) + np.abs(logit)) + 2.0**-50 * np.abs(top) * 4
    middle = logit - (top + np.log(total))
    return middle - 2 * error - slack, middle + 2 * error + slack
