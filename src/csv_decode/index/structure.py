"""What an index must look like before anything may be computed from it: used by whoever did not build it just now."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..bounds.centroid import CentroidBound
from ..bounds.moments import Moment
from ..bounds.planes import BLOCK, GROUPS, INTERLEAVE, MAX_PLANES, Plane
from ..bounds.shadow import ShadowBound
from ..spec import ROW_KINDS, shown
from . import Index

__all__ = ["require_structure"]

_MOST = 2**40  # rows or columns; above is no head


def require_structure(index: Index) -> None:
    """Raises ValueError, saying what is wrong, unless types, shapes and ranges of all parts fit together."""
    _typed("fingerprint", index.fingerprint, str)
    _typed("kind", index.kind, str)
    _require(index.kind in ROW_KINDS, f"kind is {shown(index.kind)}, expected one of {', '.join(ROW_KINDS)}")
    _typed("shape", index.shape, tuple)
    _require(len(index.shape) == 2, f"shape has {len(index.shape)} entries, expected 2")
    rows, width = index.shape
    n = index.n_rows
    for name, number in (("shape", rows), ("shape", width), ("n_rows", n)):
        _typed(name, number, int)
    _require(
        1 <= n <= rows <= _MOST and 1 <= width <= _MOST,
        f"shape ({shown(rows)}, {shown(width)}) with {shown(n)} valid rows is impossible",
    )
    _typed("centroid", index.centroid, CentroidBound, optional=True)
    _typed("shadow", index.shadow, ShadowBound, optional=True)
    _typed("settings", index.settings, dict)
    _require(all(type(name) is str for name in index.settings), "settings has a name that is no text, expected strings")
    _require(index.centroid is not None or index.shadow is not None, "it holds no bound")
    _require((index.centroid is None) == (index.row_ids is None), "row_ids and centroids come together")
    if index.row_ids is not None:
        _array("row_ids", index.row_ids, np.int64, (n,))
        _require(np.array_equal(np.sort(index.row_ids), np.arange(n)), "row_ids is not a permutation of the rows")
    if index.centroid is not None:
        _centroid(index.centroid, n, width)
    if index.shadow is not None:
        _shadow(index.shadow, n, width)


def _require(holds: Any, what: str) -> None:
    if not bool(holds):
        raise ValueError(what)


def _typed(name: str, value: Any, kind: type[Any], optional: bool = False) -> None:
    right = type(value) is kind or (optional and value is None)
    _require(right, f"{name} is {type(value).__name__}, expected {kind.__name__}")


def _array(name: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    _require(isinstance(array, np.ndarray), f"{name} is {type(array).__name__}, expected an array")
    _require(
        array.dtype == dtype and array.shape == shape,
        f"{name} is {array.dtype} {shown(array.shape)}, expected {np.dtype(dtype)} {shown(shape)}",
    )
    _require(array.flags.c_contiguous and array.flags.aligned, f"{name} is not stored row by row, or not aligned")
    _require(array.dtype.kind != "f" or np.isfinite(array).all(), f"{name} holds NaN or infinity")


def _centroid(bound: CentroidBound, n: int, width: int) -> None:
    _require(isinstance(bound.radius, np.ndarray) and bound.radius.ndim == 1, "centroid.radius is not a row of numbers")
    count = len(bound.radius)
    _array("centroid.centroids", bound.centroids, np.float32, (count, width))
    _array("centroid.radius", bound.radius, np.float32, (count,))
    _array("centroid.bias_max", bound.bias_max, np.float32, (count,))
    _array("centroid.offsets", bound.offsets, np.int64, (count + 1,))
    _require(
        bound.offsets[0] == 0 and bound.offsets[-1] == n and (np.diff(bound.offsets) >= 0).all(),
        "cluster offsets are impossible",
    )
    _require((bound.radius >= 0).all(), "a cluster radius is negative")


def _shadow(bound: ShadowBound, n: int, width: int) -> None:
    blocks = -(-width // BLOCK)
    _typed("delta", bound.delta, float)
    _typed("energy", bound.energy, float)
    _typed("rotation_error", bound.rotation_error, float, optional=True)
    _typed("planes", bound.planes, tuple)
    for plane in bound.planes:
        _typed("plane", plane, Plane)
    _require(
        0 <= bound.delta < math.inf and 0 <= bound.energy < math.inf,
        f"delta {bound.delta} or energy {bound.energy} is impossible",
    )
    _array("shadow.mean", bound.mean, np.float32, (width,))
    _require(bound.rotation_error is None or 0 <= bound.rotation_error < math.inf, "rotation_error is impossible")
    _require(bound.probabilistic == (bound.typical is not None), "rotation_error and typical come together")
    if bound.typical is not None:
        _array("shadow.typical", bound.typical, np.float64, (len(bound.planes), GROUPS - 1))
        _require((bound.typical >= 0).all(), "shadow.typical is negative")
    kind = np.float32 if bound.probabilistic else np.float16
    _array("shadow.transform", bound.transform, kind, (blocks * BLOCK, width))
    _array("shadow.rho", bound.rho, np.uint16, (n,))
    # dimensions of padding belong to no group that is rotated, so no radius speaks of them
    _require(not bound.probabilistic or not bound.transform[width:].any(), "the transform has rows of padding")
    _require(((bound.rho > 0) & (bound.rho < 0x7F80)).all(), "a row scale is not positive and finite")
    _require(1 <= len(bound.planes) <= MAX_PLANES, f"{len(bound.planes)} planes, expected 1 to {MAX_PLANES}")
    for i, plane in enumerate(bound.planes):
        _plane(f"shadow.plane{i}", plane, n, blocks, first=i == 0)
    _typed("moments", bound.moments, tuple, optional=True)
    if bound.moments is not None:
        _require(not bound.probabilistic, "the probabilistic mode has no moments")
        _require(len(bound.moments) == len(bound.planes), "there are moments for other planes")
        for i, (plane, moment) in enumerate(zip(bound.planes, bound.moments, strict=True)):
            _moment(f"shadow.moment{i}", moment, plane, blocks * BLOCK)


def _moment(name: str, moment: Moment, plane: Plane, dims: int) -> None:
    _typed(name, moment, Moment)
    _array(f"{name}.matrix", moment.matrix, np.int8, (dims, dims))
    _require(np.array_equal(moment.matrix, moment.matrix.T), f"{name}.matrix is not symmetric")
    _array(f"{name}.size", moment.size, np.float32, (dims,))
    _array(f"{name}.scale", moment.scale, np.float32, (2,))
    coarse = [int(words) * 32 // int(width) for width, words in plane.segments if plane.coarse(int(width))]
    _array(f"{name}.coding", moment.coding, np.float32, (len(coarse),))
    _array(f"{name}.lean", moment.lean, np.float32, (sum(coarse),))
    for part in (moment.size, moment.scale, moment.coding):
        _require((part >= 0).all(), f"{name} has a negative size")


def _plane(name: str, plane: Plane, n: int, blocks: int, first: bool) -> None:
    _array(f"{name}.bits", plane.bits, np.int32, (blocks,))
    _array(f"{name}.step", plane.step, np.float32, (blocks,))
    _array(f"{name}.radius_step", plane.radius_step, np.float32, (GROUPS,))
    _require(((plane.bits >= 0) & (plane.bits <= 7)).all(), f"{name} has bit widths outside 0 to 7")
    _require((plane.step >= 0).all() and (plane.radius_step > 0).all(), f"{name} has negative steps")
    _typed(f"{name}.interleaved", plane.interleaved, bool)
    _require(plane.interleaved == first, f"{name} is stored in the wrong order")
    stored = -(-n // INTERLEAVE) * INTERLEAVE if first else n
    _array(f"{name}.words", plane.words, np.uint32, (stored, plane.words_per_row))
