"""The shadow bound: rows coded in a space where hidden states are white, with a radius for all that the codes leave.

With the stored transform M and, for each row, any vector x_i, the rest r_i = x_i - rho_i xc_i (xc_i the codes of all
planes so far) and delta_i = w_i - mu - M^T x_i,

    <w_i, h> = <mu, h> + rho_i <xc_i, M h> + <r_i, M h> + <delta_i, h>

is an identity. Cauchy-Schwarz over GROUPS groups of dimensions bounds the last two terms:

    |<r_i, M h>|   <= sum_g ||r_i,g|| ||(M h)_g||  <=  rho_i sum_g radius_ig radius_step_g ||(M h)_g||
    |<delta_i, h>| <= ||delta_i|| ||h||            <=  rho_i delta ||h||.

The index stores radius_ig (a byte, rounded up) and `delta` = max_i ||delta_i|| / rho_i; `verify_index` checks both
against the weights. Calibration chooses M and the bits, so it decides how few rows survive; the inequality holds for
any M, any codes and any state. docs/mathematics.md has the whole proof with its rounding.

The probabilistic mode has M = R F + E, where R rotates GROUPS - 1 groups of dimensions at random, after all tuning, and
E is what float32 lost. With y_i = R F^-T (w_i - mu), r_i = y_i - rho_i xc_i is cut in each group into a part along y_i
and a part across, whose direction the rotation has drawn: with n_g dimensions in the group, ||z_g|| >= ||(F h)_g||, and
any c > 0,

    <r_i, R F h> <= rho_i ( byte_i3 step_3 ||z|| + sigma/2 (c + sum_g byte_ig step_g ||z_g||^2 / (n_g - 1) / c) )

except with probability exp(-sigma^2 / 2): bytes 0 to 2 bound squares of the part across, byte 3 the part along.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..kernels import Kernels
from ..spec import Rows
from .moments import Moment
from .planes import GROUPS, Plane, PlaneStates, group_edges, prepare, rotation_edges, rounding_lengths
from .rounding import ABSOLUTE, INFLATE, RELATIVE, score_error

__all__ = ["ShadowBound"]


F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ShadowBound:
    """Arrays of the bound, for V rows of width d coded in D dimensions (d rounded up to whole blocks of 32).

    mean: (d,) float32, mu. transform: (D, d) float16, M (float32 in the probabilistic mode). rho: (V,) bfloat16 as
    uint16. planes: coarse to fine. delta: see the module. energy: mean of ||M h||^2 / D over the calibration states; a
    state that fits has the same. In the probabilistic mode only: rotation_error bounds the Frobenius norm of E, and
    typical (planes, GROUPS - 1) says what a row has of byte_ig step_g, from which c is chosen. moments: for each plane
    what bounds all rows together; None in the probabilistic mode, or where float32 cannot hold it.
    """

    mean: NDArray[np.float32]
    transform: NDArray[np.float16] | NDArray[np.float32]
    rho: NDArray[np.uint16]
    planes: tuple[Plane, ...]
    delta: float
    energy: float
    rotation_error: float | None = None
    typical: NDArray[np.float64] | None = None
    moments: tuple[Moment, ...] | None = None

    @property
    def probabilistic(self) -> bool:
        return self.rotation_error is not None

    @property
    def state_bytes(self) -> int:
        """Bytes that a step reads once for a batch: the transform and the mean."""
        return int(self.transform.nbytes + self.mean.nbytes)

    def row_bytes(self, plane: int, bias: bool) -> int:
        """Bytes that a step reads for each row that reaches a plane: codes, radii, row scale and bias."""
        return self.planes[plane].words_per_row * 4 + 2 + (4 if bias and plane == 0 else 0)

    def prepare(self, kernels: Kernels, h: F64, sigma: float = 0.0) -> tuple[list[PlaneStates], F64]:
        """What B states (B, d) become for every plane, and (B,) ||M h||^2 / D relative to calibration. sigma: of the
        probabilistic mode.

        The parameters complete the bound of a row: with `start` the base plus bias (plane 0) or the centre before,

            |logit_i - centre_i| <= rho_i (constant + sum_g radius_ig norm_g) + slack + |start| start_slack.

        constant collects the errors of `planes.prepare` of all planes so far and delta ||h||. slack covers <mu, h> and
        underflow. start_slack covers float64 rounding at plane 0. At plane p it covers the float32 rounding of all p
        centres before, each 2^-24 of its own size: a centre is at most the last one plus what the planes between have
        added, so p 2^-23 |start| and, in the constant, p 2^-23 times their reach are enough.
        """
        if self.probabilistic != (sigma > 0):
            raise ValueError(f"sigma is {sigma}, but the bound is {'' if self.probabilistic else 'not '}probabilistic")
        dims, width = self.transform.shape
        white, magnitude = kernels.score(Rows(self.transform, self.transform.dtype.name), h)
        white_error = score_error(width, magnitude)
        edges = rotation_edges(width) if self.probabilistic else group_edges(dims)
        norms = np.zeros((len(h), GROUPS))
        for g in range(len(edges) - 1):
            part = slice(edges[g], edges[g + 1])
            norms[:, g] = np.linalg.norm(white[:, part], axis=1) + np.linalg.norm(white_error[:, part], axis=1)
        norms = norms * INFLATE + ABSOLUTE
        base, base_magnitude = kernels.score(Rows(self.mean[None], "float32"), h)
        slack = score_error(width, base_magnitude[:, 0]) * INFLATE
        length = np.linalg.norm(h, axis=1) * INFLATE + ABSOLUTE
        constant = self.delta * length
        if self.rotation_error is not None:  # of ||R F h||, not of ||M h||
            norms = (norms + self.rotation_error * length[:, None]) * INFLATE
            across = norms**2 * INFLATE / np.maximum(1, np.append(np.diff(edges) - 1, 1))
            across[:, [*(np.diff(edges) <= 1), False]] = 0.0  # nothing is across in one dimension
            whole = np.sqrt(np.sum(norms[:, :-1] ** 2, axis=1)) * INFLATE
        between = np.zeros(len(h))  # reach of the planes after the first and before this one
        out = []
        for i, plane in enumerate(self.planes):
            states, error, reach = prepare(plane, white, white_error, norms)
            constant = (constant + error) * INFLATE
            states.params[:, 2] = (constant + i * 2.0**-23 * between) * INFLATE
            if self.probabilistic:
                assert self.typical is not None
                unit = plane.radius_step.astype(np.float64)
                middle = np.sqrt(across[:, :-1] @ self.typical[i]) + ABSOLUTE  # any c will do; this is a good one
                half = sigma / 2
                states.params[:, 2] = (states.params[:, 2] + half * middle) * INFLATE
                states.params[:, 3:6] = unit[:-1] * (half * (across[:, :-1] / middle[:, None])) * INFLATE * INFLATE
                states.params[:, 6] = unit[-1] * whole * INFLATE
            between = between + (reach if i > 0 else 0.0)
            states.params[:, 7] = base[:, 0]
            states.params[:, 8] = slack + 2.0**-140
            states.params[:, 9] = RELATIVE if i == 0 else i * 2.0**-23
            out.append(states)
        with np.errstate(over="ignore"):  # infinite beside a calibration of next to nothing
            return out, np.sum(white * white, axis=1) / dims / (self.energy or 1.0)

    @cached_property
    def _scales(self) -> float:
        """Length of the row scales, as a vector over the rows."""
        rho = (self.rho.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return float(np.sqrt(np.sum(rho.astype(np.float64) ** 2))) * INFLATE

    @property
    def moment_bytes(self) -> int:
        """Bytes that `spread` reads once for a batch."""
        return sum(moment.nbytes for moment in self.moments or ())

    def spread(self, kernels: Kernels, h: F64, bias: NDArray[np.float32] | None) -> F64 | None:
        """For B states (B, d) and each plane, an upper bound (B, planes) of

            sqrt( sum_i (logit_i - centre_i)^2 ),    centre_i what that plane gives for row i,

        over all rows; bias: (V,) of the head. None without moments.

        By the identity of this module a centre misses <r_i, M h>, <delta_i, h>, what `planes.prepare` rounds, the error
        of <mu, h>, and a float32 rounding for each plane; as vectors over the rows, they are at most as long as the
        sum of their lengths.
        """
        if self.moments is None:
            return None
        width = self.transform.shape[1]
        white, magnitude = kernels.score(Rows(self.transform, self.transform.dtype.name), h)
        white_error = score_error(width, magnitude)
        lost = np.linalg.norm(white_error, axis=1) * INFLATE
        base, base_magnitude = kernels.score(Rows(self.mean[None], "float32"), h)
        rows = float(np.sqrt(len(self.rho)))
        common = rows * (score_error(width, base_magnitude[:, 0]) * INFLATE + 2.0**-140)
        common += self.delta * (np.linalg.norm(h, axis=1) * INFLATE + ABSOLUTE) * self._scales
        size = rows * np.abs(base[:, 0])  # bounds the length of the centres
        if bias is not None:
            size += float(np.linalg.norm(bias.astype(np.float64)))
        out = np.empty((len(h), len(self.planes)))
        for i, (plane, moment) in enumerate(zip(self.planes, self.moments, strict=True)):
            missed, reach = rounding_lengths(plane, white, white_error, moment, self._scales)
            common, size = common + missed, size + reach
            rounded = (i + 1) * 2.0**-23 * size
            out[:, i] = (moment.length(kernels, white) + moment.norm * lost + common + rounded) * INFLATE
        return out
