"""`verify_index`: every stored radius against the weights, from the stored bytes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..bounds.planes import BLOCK, group_edges, rotation_edges
from ..bounds.rounding import INFLATE, RELATIVE, gamma
from ..kernels import require_ieee, thread_count
from ..spec import Array, HeadSpec, require_callable
from . import Index
from .moments import Sums, add_sums
from .moments import holds as moment_holds
from .shadow import longest_code, solve_transform
from .structure import require_structure

__all__ = ["verify_index"]

_CHUNK = 8192


def verify_index(
    index: Index,
    weight: HeadSpec | Array,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Checks in float64, with its rounding accounted for, that every stored radius holds for every row.

    For the shadow bound it decodes each row from the stored words and shows a decomposition
    ``w - mu = M^T (rho xc + r) + delta`` whose r fits the stored radii and whose delta fits the stored one: by the
    identity in `csv_decode.bounds.shadow`, that proves the bound for every state. For the centroid bound it measures
    each row's distance to its centroid. Of the probabilistic mode it checks the parts of the rest along and across the
    row; that the rotation was drawn at random, and what float32 took of it (`rotation_error`, beyond its least), no
    check can see.

    Raises StaleIndexError for other weights and ValueError naming the first row whose bound does not hold.
    """
    require_ieee()
    if not isinstance(index, Index):
        raise ValueError(f"index is {type(index).__name__}, expected an Index; load a file with load_index(path)")
    require_callable("progress", progress)
    count = thread_count(threads)
    spec = HeadSpec.of(weight)
    require_structure(index)
    index.check(spec)
    if index.centroid is not None:
        _verify_centroid(index, spec)
    if index.shadow is not None:
        _verify_shadow(index, spec, count, progress or (lambda done, total: None))


def _fail(row: int, what: str) -> ValueError:
    return ValueError(f"the bound of row {row} does not hold: {what}; the index is damaged, rebuild it")


def _verify_centroid(index: Index, spec: HeadSpec) -> None:
    bound, ids = index.centroid, index.row_ids
    assert bound is not None
    assert ids is not None
    for c in range(len(bound.radius)):
        rows = ids[bound.offsets[c] : bound.offsets[c + 1]]
        if not len(rows):
            continue
        away = spec.rows.float32(rows).astype(np.float64) - bound.centroids[c]
        distance = np.linalg.norm(away, axis=1) * (1 + gamma(spec.width + 3))
        worst = int(np.argmax(distance))
        if not distance[worst] <= bound.radius[c]:
            raise _fail(int(rows[worst]), f"distance {distance[worst]!r} to its centroid, radius {bound.radius[c]!r}")
        highest = 0.0 if spec.bias32 is None else float(spec.bias32[rows].max())
        if not highest <= bound.bias_max[c]:
            raise _fail(int(rows[0]), f"bias above its cluster's maximum {bound.bias_max[c]!r}")


def _verify_shadow(index: Index, spec: HeadSpec, threads: int, progress: Callable[[int, int], None]) -> None:
    bound = index.shadow
    assert bound is not None
    ids = np.arange(spec.n_rows) if index.row_ids is None else index.row_ids
    n, width = len(ids), spec.width
    dims = bound.transform.shape[0]
    stored = bound.transform.astype(np.float64)
    # Any x will do, so how it is found needs no trust.
    try:
        solve, _ = solve_transform(bound.transform, width)
    except np.linalg.LinAlgError:
        raise ValueError("the transform of the index is singular; the index is damaged, rebuild it") from None
    rho = (bound.rho.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if not (rho > 0).all() or not np.isfinite(rho).all():
        raise _fail(int(ids[int(np.argmin(rho > 0))]), "its row scale is not positive")
    size = np.linalg.norm(stored)
    mean = bound.mean.astype(np.float64)
    edges, turned = group_edges(dims), rotation_edges(width)
    g = gamma(dims + width + 8)

    turning = 0.0
    if bound.rotation_error is not None:
        if not bound.rotation_error >= 2.0**-40 * np.linalg.norm(stored):
            raise ValueError(
                "rotation_error is below what a float32 transform can have; the index is damaged, rebuild it"
            )
        turning = longest_code(bound.planes) * bound.rotation_error

    def chunk(first: int) -> tuple[int, list[Sums]]:
        last = min(first + _CHUNK, n)
        w = spec.rows.float32(ids[first:last]).astype(np.float64)
        centred = w - mean
        x = centred @ solve
        scale = rho[first:last]
        delta = np.linalg.norm(centred - x @ stored, axis=1)
        delta += g * (np.linalg.norm(w, axis=1) + np.linalg.norm(mean) + size * np.linalg.norm(x, axis=1))
        _require(delta * INFLATE + scale * turning <= scale * bound.delta, ids[first:last], "residual above delta")
        coded, sums = np.zeros_like(x), []
        reach = np.zeros(dims)  # no partial sum of xc_j is above this
        for p, plane in enumerate(bound.planes):
            words = plane.rows(first, last)
            coded += plane.decode(words, dims)
            reach = reach + np.repeat(plane.step * 2.0**plane.bits, BLOCK)
            rest = x - scale[:, None] * coded
            missed = RELATIVE * (np.abs(x) + scale[:, None] * reach)  # by float64, of the true rest
            _, radii = plane.unpack(words)
            if bound.moments is not None:
                sums.append(Sums.of(plane, rest, words[: last - first], scale))
            if bound.probabilistic:
                unit = plane.radius_step.astype(np.float64)
                lost = np.linalg.norm(missed, axis=1)
                whole = (np.linalg.norm(rest, axis=1) + lost) * INFLATE  # radii that hold for any rotation
                plain = whole <= radii[:, -1] * unit[-1] * scale
                along = np.zeros(len(x))
                holds = np.ones(len(x), bool)
                for group, (a, b) in enumerate(itertools.pairwise(turned.tolist())):
                    length = np.linalg.norm(x[:, a:b], axis=1)
                    dot = np.abs(np.sum(rest[:, a:b] * x[:, a:b], axis=1))
                    inside = np.where(length > 0, dot / np.where(length > 0, length, 1), np.inf)
                    length = np.linalg.norm(rest[:, a:b], axis=1)
                    inside = np.minimum(inside, length)
                    across = np.sqrt(length**2 - inside**2) + 2.0**-21 * length + lost
                    holds &= across**2 * INFLATE <= radii[:, group] * unit[group] * scale**2
                    along += (inside + lost) ** 2
                holds &= np.sqrt(along) * INFLATE <= radii[:, -1] * unit[-1] * scale
                _require(plain | holds, ids[first:last], f"residual above the radii of plane {p}")
                continue
            for group in range(len(edges) - 1):
                part = slice(edges[group], edges[group + 1])
                norm = np.linalg.norm(rest[:, part], axis=1) + np.linalg.norm(missed[:, part], axis=1)
                allowed = radii[:, group] * float(plane.radius_step[group]) * scale
                _require(norm * INFLATE <= allowed, ids[first:last], f"residual above radius {group} of plane {p}")
        return last - first, sums

    done, total = 0, None
    with ThreadPoolExecutor(threads) as pool:
        for count, sums in pool.map(chunk, range(0, n, _CHUNK)):
            done += count
            total = add_sums(total, sums)
            progress(done, n)
    for p, (moment, whole_sums) in enumerate(zip(bound.moments or (), total or (), strict=True)):
        if not moment_holds(moment, whole_sums):
            raise ValueError(f"the moments of plane {p} do not hold; the index is damaged, rebuild it")


def _require(holds: np.ndarray, ids: np.ndarray, what: str) -> None:
    if not holds.all():
        raise _fail(int(ids[int(np.argmin(holds))]), what)
