"""The centroid bound of the CSV-Decode paper (arXiv 2511.21702): clusters of rows, each a centroid and a radius.

For every row i of cluster c, by Cauchy-Schwarz,

    <w_i, h> + b_i  =  <mu_c, h> + <w_i - mu_c, h> + b_i  <=  <mu_c, h> + R_c ||h|| + beta_c,

with R_c >= max ||w_i - mu_c|| and beta_c >= max b_i over the rows of c. The inequality holds for any assignment of rows
to clusters, spherical k-means included, because R_c is measured to the stored centroid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..kernels import Kernels
from ..spec import Rows
from .rounding import ABSOLUTE, INFLATE, RELATIVE, score_error

__all__ = ["CentroidBound"]

F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CentroidBound:
    """C clusters of rows that lie together in the index: cluster c holds index rows offsets[c] to offsets[c + 1].

    centroids: (C, d) float32. radius: (C,) float32, rounded up. bias_max: (C,) float32. offsets: (C + 1,) int64.
    """

    centroids: NDArray[np.float32]
    radius: NDArray[np.float32]
    bias_max: NDArray[np.float32]
    offsets: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads."""
        return int(self.centroids.nbytes + self.radius.nbytes + self.bias_max.nbytes)

    def upper(self, kernels: Kernels, h: F64) -> F64:
        """(B, C) upper bounds on every logit (before scale and cap) of each cluster; -inf for empty clusters."""
        value, magnitude = kernels.score(Rows(self.centroids, "float32"), h)
        length = np.linalg.norm(h, axis=1, keepdims=True) * INFLATE + ABSOLUTE
        reach = self.radius.astype(np.float64) * length
        error = score_error(h.shape[1], magnitude)
        rounding = RELATIVE * (np.abs(value) + np.abs(self.bias_max.astype(np.float64)))
        out = value + self.bias_max + (reach + error + rounding) * INFLATE
        out[:, self.offsets[1:] == self.offsets[:-1]] = -np.inf
        return np.asarray(out)
