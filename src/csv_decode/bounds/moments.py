"""What the rests of all rows can be together: second moments of what each plane leaves.

Cauchy-Schwarz bounds what a state can make of one row's rest, and for that row it may be near the truth. It cannot be
for all rows at once: with r_i the rest of row i, H the state and G = sum_i r_i r_i^T,

    sum_i <r_i, H>^2  =  H^T G H,

a number that the index knows in advance and that is hundreds of times smaller than the sum of the squared radii. So the
errors of the approximations, as one vector over the rows, have a known length; `csv_decode.modes` makes of it a bound
on sums of exponentials. docs/mathematics.md, section 10, has the proof.

The index stores for each plane a matrix that is above G: with S a diagonal of sizes and C small integers,

    G  <=  S (unit C + diagonal I) S     (the difference has no negative eigenvalue).

What narrow fields make of the rounding of the state to 8 bits is bounded in the same way: with c_i the codes of row i
less their middle, in the slots of one such field width,

    sum_i rho_i^2 c_i c_i^T  <=  lean lean^T + coding^2 I.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..spec import Rows

if TYPE_CHECKING:
    from ..kernels import Kernels

__all__ = ["Moment"]

F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Moment:
    """Of one plane, in D dimensions. matrix: (D, D) int8, C. size: (D,) float32, S. scale: (2,) float32, unit and
    diagonal. coding: float32, a number for each segment that is `coarse`; lean: float32, for each of their slots."""

    matrix: NDArray[np.int8]
    size: NDArray[np.float32]
    scale: NDArray[np.float32]
    coding: NDArray[np.float32]
    lean: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return int(self.matrix.nbytes + self.size.nbytes + self.lean.nbytes)

    @cached_property
    def _wide(self) -> NDArray[np.float32]:
        return self.matrix.astype(np.float32)

    @cached_property
    def _most(self) -> float:
        """The largest row sum of |C|."""
        return float(np.abs(self._wide).sum(axis=1, dtype=np.float64).max(initial=0.0))

    @cached_property
    def norm(self) -> float:
        """At least the square root of the largest eigenvalue: a row sum of |C| bounds that of C."""
        unit, diagonal = (float(x) for x in self.scale)
        return float(self.size.max(initial=0.0)) * float(np.sqrt(unit * self._most + diagonal)) * (1 + 2.0**-30)

    def length(self, kernels: Kernels, white: F64) -> F64:
        """(B,) upper bounds of ``sqrt(H^T G H)`` for states H (B, D).

        The products with the integers are float64 dots (`rounding.score_error`), those of them with the state as well,
        and the state is rounded to length 1: in all, off by less than (D + 8) 2^-23 of the sum of the terms' sizes,
        which is at most unit most ||S H||^2, as for `norm`. (Not numpy's product, which has threads of its own.)
        """
        unit, diagonal = (float(x) for x in self.scale)
        scaled = white * self.size
        power = np.sum(scaled**2, axis=1)
        top = np.sqrt(power)
        one = scaled / np.where(top > 0, top, 1.0)[:, None]
        inner = np.einsum("bi,bi->b", one, kernels.score(Rows(self._wide, "float32"), one)[0])
        slack = (len(self.size) + 8) * 2.0**-23 * self._most
        return np.asarray(top * np.sqrt(np.maximum(unit * (inner + slack), 0.0) + diagonal) * (1 + 2.0**-20))
