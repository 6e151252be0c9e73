"""Plain numpy kernels: slow, obvious, and the oracle for the native ones, which must return the same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bounds.planes import INTERLEAVE, Plane, PlaneStates
from ..spec import Rows

__all__ = ["ReferenceKernels"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class _Bound(NamedTuple):
    plane: Plane
    rho: F64
    bias: F64 | None


def _round_up(x: F64) -> F32:
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    return np.where(near.astype(np.float64) < x, np.nextafter(near, np.float32(np.inf)), near)


def _fold(terms: F64) -> F64:
    """Sums over the last axis in the order of the kernels: 16 lanes, then 16 -> 8 -> 4 -> 1."""
    width = terms.shape[-1]
    padded = np.zeros((*terms.shape[:-1], -(-width // 16) * 16))
    padded[..., :width] = terms
    lanes = np.zeros((*terms.shape[:-1], 16))
    for start in range(0, padded.shape[-1], 16):
        lanes = lanes + padded[..., start : start + 16]
    a = lanes[..., :8] + lanes[..., 8:]
    b = a[..., :4] + a[..., 4:]
    return np.asarray((b[..., 0] + b[..., 2]) + (b[..., 1] + b[..., 3]))


class ReferenceKernels:
    """See `csv_decode.kernels.Kernels`."""

    name = "reference"
    threads = 1

    def bind(self, plane: Plane, rho: NDArray[np.uint16], bias: F32 | None) -> _Bound:
        wide = (rho.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return _Bound(plane, wide, None if bias is None else bias.astype(np.float64))

    def cascade(self, *_: Any) -> None:
        """None: the head walks the planes itself, and is the oracle for cascades that do it in one call."""

    def _bounds(
        self, bound: _Bound, words: NDArray[np.uint32], rho: F64, states: PlaneStates, b: int, start: F64
    ) -> tuple[F32, F32]:
        codes, radii = bound.plane.unpack(words)
        q = 256 * states.hi[b].astype(np.int64) + states.lo[b]
        dot = (codes.astype(np.int64) @ q).astype(np.float64)
        r = radii.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            return self._finish(rho, dot, r, start, states.params[b])

    @staticmethod
    def _finish(rho: F64, dot: F64, r: F64, start: F64, params: F64) -> tuple[F32, F32]:
        half_scale, offset, constant, n0, n1, n2, n3, _, slack, start_slack = params
        along = rho * (half_scale * ((dot + dot) - offset))
        radius = rho * (constant + ((r[:, 0] * n0 + r[:, 1] * n1) + (r[:, 2] * n2 + r[:, 3] * n3)))
        mid = start + along
        return mid.astype(np.float32), _round_up((mid + radius) + (slack + np.abs(start) * start_slack))

    def screen(self, plane: _Bound, states: PlaneStates, open_blocks: NDArray[np.uint8] | None) -> tuple[F32, F32]:
        n = len(plane.rho)
        words = plane.plane.rows(0, n)
        centre = np.empty((len(states.params), n), np.float32)
        upper = np.empty_like(centre)
        for b in range(len(states.params)):
            start = np.full(n, states.params[b, 7])
            if plane.bias is not None:
                start = start + plane.bias
            centre[b], upper[b] = self._bounds(plane, words, plane.rho, states, b, start)
        if open_blocks is not None:
            closed = np.repeat(open_blocks == 0, INTERLEAVE)[:n]
            centre[:, closed] = upper[:, closed] = -np.inf
        return centre, upper

    def refine(self, plane: _Bound, states: PlaneStates, rows: I64, start: F32) -> tuple[F32, F32]:
        return self._bounds(plane, plane.plane.words[rows], plane.rho[rows], states, 0, start.astype(np.float64))

    def score(self, rows: Rows, h: F64, ids: I64 | None = None) -> tuple[F64, F64]:
        wide = rows.float32(slice(None) if ids is None else ids).astype(np.float64)
        value = np.empty((len(h), len(wide)))
        magnitude = np.empty_like(value)
        for b in range(len(h)):
            products = wide * h[b]
            value[b] = _fold(products)
            magnitude[b] = _fold(np.abs(products))
        return value, magnitude

    def leaders(self, values: F32, count: int) -> I64:
        at = np.nonzero(~np.isnan(values))[0]
        return at[np.argsort(-values[at], kind="stable")][:count].astype(np.int64)

    def select(self, values: F32, bar: float) -> tuple[I64, float]:
        keep = ~(values <= np.float32(bar))
        return np.nonzero(keep)[0].astype(np.int64), float(np.max(values[~keep], initial=-np.inf))
