"""Second moments of what the planes leave: sums over all rows, the stored bound above them, and its check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bounds.moments import Moment
from ..bounds.planes import Plane

__all__ = ["Sums", "add_sums", "bound_sums", "holds"]

F64 = NDArray[np.float64]

#: Of a matrix scaled to a diagonal of ones. Sums of up to 2^32 float64 terms, eigenvalues, float32 sizes, the rounding
#: of the rests: all of them together stay far within it.
_SLACK = 2.0**-14


@dataclass
class Sums:
    """G of one plane, (D, D), and for each of its coarse segments sum rho^2 c c^T, over some rows."""

    rests: F64
    codes: list[F64]

    @classmethod
    def of(cls, plane: Plane, rest: F64, words: NDArray[np.uint32], scale: F64) -> Sums:
        """rest: (n, D), what the plane leaves of rows with row scales (n,). words: their codes, row-major."""
        slots, _ = plane.unpack(words)
        _, _, cmax = plane.slots
        centred = (slots - cmax / 2) * scale[:, None]
        codes, at = [], 0
        for width, count in plane.segments:
            part = centred[:, at : at + int(count) * 32 // int(width)]
            at += part.shape[1]
            if plane.coarse(int(width)):
                codes.append(part.T @ part)
        return cls(rest.T @ rest, codes)

    def __iadd__(self, other: Sums) -> Sums:
        self.rests += other.rests
        for mine, theirs in zip(self.codes, other.codes, strict=True):
            mine += theirs
        return self


def add_sums(total: list[Sums] | None, more: list[Sums]) -> list[Sums]:
    """Plane by plane; `total` is changed."""
    if total is None:
        return more
    for mine, theirs in zip(total, more, strict=True):
        mine += theirs
    return total


def _scaled(rests: F64, size: F64) -> F64:
    safe = np.where(size > 0, size, 1.0)
    return np.asarray(rests / safe / safe[:, None])


def _largest(matrix: F64) -> float:
    return max(float(np.linalg.eigvalsh(matrix)[-1]), 0.0) if len(matrix) else 0.0


def _lean(codes: F64) -> NDArray[np.float32]:
    """The direction that codes have in common, as long as it is strong."""
    values, vectors = np.linalg.eigh(codes)
    with np.errstate(under="ignore"):
        return np.asarray(vectors[:, -1] * np.sqrt(max(float(values[-1]), 0.0)), np.float32)


def bound_sums(sums: Sums) -> Moment | None:
    """What the index stores; None where float32 cannot hold it."""
    with np.errstate(over="ignore", under="ignore"):
        size = np.sqrt(np.diag(sums.rests)).astype(np.float32)
        leans = [_lean(codes) for codes in sums.codes]
        across = [
            _largest(codes - np.outer(lean, lean.astype(np.float64))) + _SLACK**2 * float(np.trace(codes))
            for codes, lean in zip(sums.codes, leans, strict=True)
        ]
        coding = np.array([np.sqrt(most) * (1 + 2 * _SLACK) for most in across], np.float32)
    coding = np.where(coding > 0, np.nextafter(coding, np.float32(np.inf)), coding)
    scaled = _scaled(sums.rests, size.astype(np.float64))
    lost = (size == 0) & (np.diag(sums.rests) > 0)
    parts: list[NDArray[Any]] = [scaled, coding, *leans]
    if lost.any() or not all(np.isfinite(part).all() for part in parts):
        return None
    own = np.diag(np.diag(scaled))  # ones, but for what float32 made of `size`
    np.fill_diagonal(scaled, 0.0)
    unit = np.float32(np.abs(scaled).max(initial=0.0) / 127)
    matrix = np.rint(scaled / float(unit)).astype(np.int8) if unit > 0 else np.zeros(scaled.shape, np.int8)
    left = scaled + own - float(unit) * matrix
    diagonal = np.float32(max(float(np.linalg.eigvalsh(left)[-1]), 0.0) + 2 * _SLACK)
    lean = np.concatenate(leans) if leans else np.zeros(0, np.float32)
    return Moment(matrix, size, np.array([unit, diagonal], np.float32), coding, lean)


def holds(moment: Moment, sums: Sums) -> bool:
    """Whether what is stored is above the sums, by more than float64 may have missed."""
    size = moment.size.astype(np.float64)
    if (np.diag(sums.rests)[size == 0] > 0).any():
        return False
    unit, diagonal = (float(x) for x in moment.scale)
    left = _scaled(sums.rests, size) - unit * moment.matrix
    if not np.isfinite(left).all() or not float(np.linalg.eigvalsh(left)[-1]) + _SLACK <= diagonal:
        return False
    at = 0
    for codes, coding in zip(sums.codes, moment.coding.tolist(), strict=True):
        lean = moment.lean[at : (at := at + len(codes))].astype(np.float64)
        most = _largest(codes - np.outer(lean, lean)) + _SLACK**2 * float(np.trace(codes)) / 2
        if not np.sqrt(most) * (1 + _SLACK) <= coding:
            return False
    return True
