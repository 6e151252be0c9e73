"""The reference that tests believe: Python fractions, slow and beyond doubt."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray


def exact_logits(weight: NDArray[Any], h: NDArray[Any], bias: NDArray[Any] | None = None) -> list[Fraction]:
    """<w_i, h> + b_i of every row, exactly."""
    state = [Fraction(float(x)) for x in h]
    out = []
    for i, row in enumerate(weight):
        total = sum((Fraction(float(w)) * x for w, x in zip(row, state, strict=True)), Fraction(0))
        out.append(total + (Fraction(float(bias[i])) if bias is not None else 0))
    return out


def exact_top_k(logits: list[Fraction], k: int) -> list[int]:
    """Larger logit first, then the smaller id."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def float64_top_k(weight: NDArray[Any], h: NDArray[Any], k: int) -> NDArray[np.int64]:
    """The same in float64, for sizes where fractions are too slow; callers make sure that no two logits are close."""
    logits = weight.astype(np.float64) @ h.astype(np.float64)
    return np.lexsort((np.arange(len(logits)), -logits))[:k]
