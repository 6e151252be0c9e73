"""Building the paper's centroid bound: k-means over the rows of the head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..bounds.centroid import CentroidBound
from ..bounds.rounding import INFLATE
from ..spec import HeadSpec

__all__ = ["build_centroid", "cluster_radius"]

_CHUNK = 16384


def _up(x: NDArray[np.float64]) -> NDArray[np.float32]:
    f = x.astype(np.float32)
    return np.where(f.astype(np.float64) < x, np.nextafter(f, np.float32(np.inf)), f).astype(np.float32)


def cluster_radius(rows: NDArray[np.float32], centroid: NDArray[np.float32]) -> float:
    """Upper bound on max ||w_i - mu|| over rows (n, d)."""
    return float(np.max(np.linalg.norm(rows.astype(np.float64) - centroid, axis=1), initial=0.0)) * INFLATE


def build_centroid(
    spec: HeadSpec,
    clusters: int | None,
    iterations: int,
    spherical: bool,
    seed: int,
    progress: Callable[[int, int], None],
    threads: int,
) -> tuple[CentroidBound, NDArray[np.int64]]:
    """Clusters the valid rows; also returns row_ids (V,), the token id of each index row, sorted by cluster.

    clusters: C, default 0.015 V, at least 1. iterations: of Lloyd's algorithm.
    """
    try:
        import faiss
    except ImportError:
        raise ImportError(
            "the centroid bound needs faiss for k-means; install it with: pip install '.[centroid]' in the checkout"
        ) from None
    n, width = spec.n_rows, spec.width
    count = max(1, min(n, round(0.015 * n) if clusters is None else clusters))
    rows = spec.rows.float32(slice(0, n))
    # k-means works in float32, where a huge row squared would overflow: cluster directions of such heads instead.
    scale = float(np.abs(rows).max()) or 1.0
    data = rows if 1e-15 < scale < 1e15 else (rows / np.float32(scale)).astype(np.float32)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        kmeans = faiss.Kmeans(
            width,
            count,
            niter=1,
            seed=seed % 2**31,
            spherical=spherical,
            min_points_per_centroid=1,
            max_points_per_centroid=256,
        )
        centroids: NDArray[np.float32] | None = None
        for i in range(iterations):
            kmeans.train(data, init_centroids=centroids)
            centroids = np.array(kmeans.centroids)
            progress(i + 1, iterations)
        _, assigned = kmeans.index.search(data, 1)
    finally:
        faiss.omp_set_num_threads(before)
    assert centroids is not None
    assigned = assigned[:, 0]
    assigned = np.where(assigned < 0, 0, assigned)
    order = np.argsort(assigned, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(assigned, minlength=count))]).astype(np.int64)
    if data is not rows:
        with np.errstate(over="ignore"):
            centroids = (centroids.astype(np.float64) * scale).astype(np.float32)
    radius, bias = np.zeros(count), np.zeros(count, np.float32)
    for c in range(count):
        members = order[offsets[c] : offsets[c + 1]]
        if len(members):
            radius[c] = cluster_radius(rows[members], centroids[c])
            if spec.bias32 is not None:
                bias[c] = spec.bias32[members].max()
    with np.errstate(over="ignore"):
        radius32 = _up(radius)
    if not (np.isfinite(centroids).all() and np.isfinite(radius32).all()):
        raise ValueError("the weights are too large for centroids in float32")
    return CentroidBound(np.ascontiguousarray(centroids), radius32, bias, offsets), order
