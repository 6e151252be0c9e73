"""Rounding errors of the float64 operations that stand between the stored numbers and a certificate.

The standard model (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2): every float64 operation
returns ``(exact) (1 + t)`` with ``|t| <= U``, unless it underflows. Sums of n terms in any order are off by at most
``gamma(n - 1)`` times the sum of the absolute values (section 4.2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ABSOLUTE",
    "INFLATE",
    "RELATIVE",
    "SMALLEST_STATE",
    "U",
    "above_float32",
    "below_float32",
    "gamma",
    "score_error",
]

F64 = NDArray[np.float64]

U = 2.0**-53
#: Covers eight roundings: what a short chain of float64 operations can add to one of its terms.
RELATIVE = 2.0**-50
#: Covers sums, norms and products of up to 2^16 positive float64 terms: gamma(2^16 + 8) < 2^-36.
INFLATE = 1.0 + 2.0**-36
#: Covers what underflow can take from a norm: squares below 2^-1022 vanish.
ABSOLUTE = 1e-150
#: States smaller than this in every coordinate are left to the dense product, where underflow is accounted for.
SMALLEST_STATE = 1e-100


def gamma(n: int) -> float:
    """gamma_n = n U / (1 - n U), rounded up."""
    return n * U / (1 - n * U) * (1 + 4 * U)


def score_error(width: int, magnitude: F64) -> F64:
    """Bound on the error of `Kernels.score`.

    A lane adds ceil(width / 16) products and the lanes are folded in 4 steps, so each product passes through at most
    n = ceil(width / 16) + 4 additions after its own rounding: |error| <= gamma(n + 1) sum |w_j h_j|. The magnitude was
    summed in the same way, so the true sum is at most magnitude / (1 - gamma(n + 1)). A product that underflows is
    off by at most 2^-1075 on top.
    """
    g = gamma(math.ceil(width / 16) + 5)
    return magnitude * (g / (1 - g) * (1 + 8 * U)) + width * 2.0**-1074


def below_float32(x: float) -> Any:
    """The largest float32 strictly below x, so that `value > bar` means `value >= x` for every float32 value."""
    with np.errstate(over="ignore"):
        bar = np.float32(x)
    return np.nextafter(bar, np.float32(-np.inf)) if float(bar) >= x else bar


def above_float32(x: F64) -> NDArray[np.float32]:
    """The smallest float32 numbers that are not below x; NaN stays NaN."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    return np.where(near.astype(np.float64) < x, np.nextafter(near, np.float32(np.inf)), near)
