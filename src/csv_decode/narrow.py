"""What a head in float32, float16 or bfloat16 returns, from bounds on its arithmetic. docs/mathematics.md, section 11.

The model's logit is z_i = round(a_i), where a_i is a sum of float32 operations: the d products, each rounded at most
once, added in any order and any blocking, without or with fused multiply-add, subnormal numbers kept or flushed, those
of the weights and the state included (bfloat16 instructions take them for zero). Then

    |a_i - s_i| <= alpha_i = gamma32(d + 1) sum_j |w_ij h_j| + d 2^-126 (2 + max |w_ij| + max |h_j|)

as long as no partial sum leaves the range of float32, and round() is monotone, so z_i lies between the rounded ends of
[s_i - alpha_i, s_i + alpha_i].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import modes
from .bounds.rounding import INFLATE, RELATIVE, gamma
from .scan import Scan, exact_rows

if TYPE_CHECKING:
    from .kernels import Kernels
    from .spec import HeadSpec

__all__ = ["STEPS", "Sums", "keeps_bound", "logit_interval", "narrow", "rounded_argmax", "sum_error"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_U32 = 2.0**-24


def _gamma32(n: int) -> float:
    return n * _U32 / (1 - n * _U32) * (1 + RELATIVE)


def sum_error(width: int, magnitude: F64, largest: F64 | float) -> F64:
    """alpha for sums of absolute values of at most `magnitude`; no weight plus no coordinate of the state is above
    `largest`. Infinite where a partial sum may leave the range of float32."""
    alpha = magnitude * _gamma32(width + 1) * INFLATE + width * 2.0**-126 * (2 + largest) * INFLATE
    return np.where((magnitude + alpha) * INFLATE < 2.0**127, alpha, np.inf)


def narrow(x: F32, kind: str) -> F64:
    """float32 numbers rounded to a type, to nearest, ties to even."""
    if kind == "float32":
        return x.astype(np.float64)
    if kind == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float64)
    bits = x.view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _float32(x: F64, up: bool) -> F32:
    """The nearest float32 number that is not below (up) or not above."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    wrong = near.astype(np.float64) < x if up else near.astype(np.float64) > x
    return np.where(wrong, np.nextafter(near, np.float32(np.inf if up else -np.inf)), near).astype(np.float32)


def logit_interval(value: F64, error: F64, kind: str) -> tuple[F64, F64]:
    """Smallest and largest z for a sum within `error` of `value`."""
    slack = error + RELATIVE * np.abs(value)
    return narrow(_float32(value - slack, False), kind), narrow(_float32(value + slack, True), kind)


def _half_step_below(z: float, kind: str) -> float:
    """A number below which everything rounds to less than z (and not to z)."""
    if kind == "float32":
        below = float(np.nextafter(np.float32(z), np.float32(-np.inf)))
    elif kind == "float16":
        below = float(np.nextafter(np.float16(z), np.float16(-np.inf)))
    else:
        bits = int(np.float32(z).view(np.uint32)) >> 16
        bits = 0x8001 if bits in (0, 0x8000) else bits - 1 if bits < 0x8000 else bits + 1
        below = float(np.uint32(bits << 16).view(np.float32))
    return (below + z) / 2 if math.isfinite(below) else -math.inf


class Sums:
    """The float32 sums of one state h (d,), and what becomes of them in the head's type."""

    def __init__(self, spec: HeadSpec, h: F64, largest_norm: float) -> None:
        self.kind, self.width = spec.rows.kind, spec.width
        # `score_error` is its factor times the sum of absolute values, and more: so this is at least that sum
        self.g = gamma(math.ceil(self.width / 16) + 5)
        size = math.sqrt(float(h @ h)) * INFLATE
        self.largest = largest_norm + size
        self.reach = float(sum_error(self.width, np.array(largest_norm * size), self.largest))  # Cauchy-Schwarz

    def intervals(self, value: F64, error: F64) -> tuple[F64, F64]:
        alpha = sum_error(self.width, error / self.g * INFLATE, self.largest)
        return logit_interval(value, error + alpha, self.kind)

    def threshold(self, best: float) -> float:
        """A row with a score below this rounds to less than `best`, a number of the type."""
        middle = _half_step_below(best, self.kind)
        return middle - self.reach - (RELATIVE * abs(middle) if math.isfinite(middle) else 0.0)

    def winner(self, scored: tuple[I64, F64, F64], left: float) -> tuple[int, float, float]:
        """The smallest id among the largest z, or -1; its score; and the threshold. scored: ids, scores and errors;
        left: the largest bound of all other rows."""
        ids, value, error = scored
        low, high = self.intervals(value, error)
        best = float(low.max())
        threshold = self.threshold(best)
        at = _first(ids, low, high, best) if threshold > left or left == -math.inf else -1
        return (-1, 0.0, threshold) if at < 0 else (int(ids[at]), float(value[at]), threshold)


def _first(ids: I64, low: F64, high: F64, best: float) -> int:
    """Position of the smallest id among the largest z, from intervals whose largest lower end is `best`; -1 where they
    leave it open."""
    near = np.nonzero(high >= best)[0]
    if not np.isfinite(high[near]).all():
        return -1
    if len(near) == 1:  # nobody else comes near, whatever its own rounding
        return int(near[0])
    sure = near[(low[near] == best) & (high[near] == best)]
    if not len(sure):
        return -1
    first = int(sure[np.argmin(ids[sure])])
    # another row may tie only behind it, and may not be above
    open_ = (high[near] > best) | ((low[near] < best) & (ids[near] < ids[first]))
    return -1 if open_.any() else first


#: How far below the largest score, as a share of it, rows have to be scored to decide. A guess: the certificate's
#: threshold tells whether it was enough.
STEPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-22}


def rounded_argmax(scan: Scan, largest_norm: float) -> tuple[I64, F64, F64, F64]:
    """For each state the smallest id among the largest z, or -1; its score; and the certificate's threshold and largest
    bound left: every row with a bound below the threshold rounds to less than the largest z."""
    n = len(scan)
    sums = [Sums(scan.spec, h, largest_norm) for h in scan.h]
    modes.top(scan, range(n), np.ones(n, np.int64))
    best = [float(sums[b].intervals(*scan.scored(b)[1:])[0].max()) for b in range(n)]
    scan.open(np.array([sums[b].threshold(best[b]) for b in range(n)]))
    left = np.array([scan.unopened(b) for b in range(n)])
    won = [sums[b].winner(scan.scored(b), left[b]) for b in range(n)]
    ids, value, threshold = (np.array(column) for column in zip(*won, strict=True))
    return ids, value, threshold, left


def keeps_bound(spec: HeadSpec, kernels: Kernels, h: F64, logits: F64) -> bool:
    """Whether the logits (B, V) that a head computed for states h (B, d) lie where `logit_interval` says, every one."""
    g = gamma(math.ceil(spec.width / 16) + 5)
    weight = 0.0
    for first in range(0, spec.n_rows, 8192):
        weight = max(weight, float(np.abs(spec.rows.float32(slice(first, min(first + 8192, spec.n_rows)))).max()))
    for b in range(len(h)):
        value, error = (x[0] for x in exact_rows(spec, kernels, h[b : b + 1]))
        alpha = sum_error(spec.width, error / g * INFLATE, weight + float(np.abs(h[b]).max()))
        low, high = logit_interval(value, error + alpha, spec.rows.kind)
        inside = (logits[b, : spec.n_rows] >= low) & (logits[b, : spec.n_rows] <= high)
        if not inside.all():
            return False
    return True
