"""Planes of codes: how rows become small integers, and how a hidden state meets them.

A plane codes every row, in the space of the transform, as ``rho_i * xc_i`` with

    xc_ij = sum over the slots (j, step) of row i:  step * (c - cmax / 2),      c in 0 .. cmax = 2^bits - 1.

A slot is one field of 4, 3, 2 or 1 bits. A dimension with more bits has several slots, whose steps are such that the
fields together are one integer: 6 bits with step s are 4 bits with step 4 s and 2 bits with step s. Plane 0 has fields
of 3 bits; in the later planes 3 bits are 2 bits and 1 bit, which suits rows that are read one by one.
Slots are grouped in segments of equal field width and packed in 32-bit words (see cpp/plane.hpp for the layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .moments import Moment
from .rounding import ABSOLUTE, INFLATE, RELATIVE, above_float32

__all__ = [
    "BLOCK",
    "GROUPS",
    "INTERLEAVE",
    "MAX_PLANES",
    "Plane",
    "PlaneStates",
    "group_edges",
    "prepare",
    "rotation_edges",
    "rounding_lengths",
    "sieves",
]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

BLOCK = 32  # dimensions that share a bit width: one vector of 16 rows at 1 bit
GROUPS = 4  # radii a row
MAX_PLANES = 4  # what the rounding analysis of `verify_index` covers, with room
INTERLEAVE = 16  # rows that plane 0 stores together
_PEAK = 32512  # largest |q|, 127 * 256: its high byte stays within -127 .. 127 and its low byte within -128 .. 127


def group_edges(dims: int) -> I64:
    """Borders (GROUPS + 1,) of the groups of dimensions that have a radius each; whole blocks."""
    return np.linspace(0, dims // BLOCK, GROUPS + 1).round().astype(np.int64) * BLOCK


def rotation_edges(width: int) -> I64:
    """Borders (GROUPS,) of the GROUPS - 1 groups of dimensions that the probabilistic mode rotates, without padding."""
    edges = (-(-width // BLOCK) * np.array([0, 1, 4, 9]) / 9).round().astype(np.int64) * BLOCK  # GROUPS of them
    return np.minimum(edges, width)


@dataclass(frozen=True, eq=False)
class Plane:
    """One plane. `bits` (blocks,) and `step` (blocks,) float32 say how each block of 32 dimensions is coded;
    `radius_step` (GROUPS,) float32 is the unit of the radii; `words` (rows, W) uint32 are the codes. Plane 0 has its
    rows interleaved by 16: word t of row r of a block is at [block * 16 * W + t * 16 + r]."""

    bits: NDArray[np.int32]
    step: NDArray[np.float32]
    radius_step: NDArray[np.float32]
    words: NDArray[np.uint32]
    interleaved: bool

    def _blocks(self, width: int) -> I64:
        """Blocks that have a field of so many bits."""
        if self.interleaved and width < 4:
            return np.nonzero((self.bits & 3) == width)[0]
        return np.nonzero((self.bits & width) == width)[0]

    def _shift(self, width: int) -> NDArray[np.int32]:
        """Bits below the field of that width, for each block that has one."""
        bits = self.bits[self._blocks(width)]
        return bits & 0 if width == 3 else bits & (width - 1)

    @cached_property
    def segments(self) -> NDArray[np.int32]:
        """(n, 2): field width and words, for the field widths that occur."""
        widths = (4, 3, 2, 1) if self.interleaved else (4, 2, 1)
        rows = [(width, len(self._blocks(width)) * width) for width in widths]
        return np.array([row for row in rows if row[1]], dtype=np.int32).reshape(-1, 2)

    @cached_property
    def slots(self) -> tuple[I64, F64, F64]:
        """Dimension, step and cmax of every slot, in the order of the state bytes."""
        dims, steps, cmax = [], [], []
        for width, words in self.segments:
            blocks = self._blocks(int(width))
            weight = 2.0 ** self._shift(int(width))
            dim = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
            step = np.repeat(self.step[blocks].astype(np.float64) * weight, BLOCK)
            order = self._order(int(words), int(width))
            dims.append(dim[order])
            steps.append(step[order])
            cmax.append(np.full(len(order), 2.0**width - 1))
        if not dims:
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        return np.concatenate(dims), np.concatenate(steps), np.concatenate(cmax)

    def coarse(self, width: int) -> bool:
        """Whether fields of that width meet states of 8 bits, see `prepare`."""
        return width <= 2 and not self.interleaved

    @staticmethod
    def _order(words: int, width: int) -> I64:
        """Slot (field f, word t, byte k) holds dimension (t * fields + f) * 4 + k of the segment; three words that hold
        fields of 3 bits together count as one with eight of them."""
        words, fields = (words // 3, 8) if width == 3 else (words, 8 // width)
        dims = np.arange(words * fields * 4).reshape(words, fields, 4)
        return dims.transpose(1, 0, 2).reshape(-1)

    @property
    def words_per_row(self) -> int:
        return 1 + int(self.segments[:, 1].sum())

    def pack(self, codes: NDArray[np.uint8], radii: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Row-major words (n, W) from whole codes (n, dims) below 2^bits and radii (n, GROUPS)."""
        n = len(codes)
        parts = [np.ascontiguousarray(radii).view(np.uint32).reshape(n, 1)]
        blocks_of = codes.reshape(n, -1, BLOCK)
        for width, words in self.segments:
            shift = self._shift(int(width)).astype(np.uint8)
            field = (blocks_of[:, self._blocks(int(width))] >> shift[:, None]) & np.uint8(2**width - 1)
            if width == 3:
                field = field.reshape(n, words // 3, 8, 4)
                low = field & np.uint8(3)
                split = [(low[:, :, :4], 2), (low[:, :, 4:], 2), (field >> np.uint8(2), 1)]
            else:
                split = [(field.reshape(n, words, 8 // width, 4), int(width))]
            for part, size in split:
                byte = np.zeros((n, part.shape[1], 4), np.uint8)
                for f in range(part.shape[2]):
                    byte |= part[:, :, f] << np.uint8(f * size)
                parts.append(byte.view(np.uint32).reshape(n, -1))
        return np.concatenate(parts, axis=1)

    def rows(self, first: int, last: int) -> NDArray[np.uint32]:
        """Row-major words of rows [first, last)."""
        if not self.interleaved:
            return self.words[first:last]
        lo, hi = first // INTERLEAVE, -(-last // INTERLEAVE)
        width = self.words_per_row
        blocks = self.words.reshape(-1, width, INTERLEAVE)[lo:hi]
        return blocks.transpose(0, 2, 1).reshape(-1, width)[first - lo * INTERLEAVE : last - lo * INTERLEAVE]

    def unpack(self, words: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Slot codes (n, slots) and radii (n, GROUPS) of row-major words."""
        n = len(words)
        words = np.ascontiguousarray(words)
        radii = np.ascontiguousarray(words[:, :1]).view(np.uint8)
        parts, at = [], 1
        for width, count in self.segments:
            byte = np.ascontiguousarray(words[:, at : at + count]).view(np.uint8)
            if width == 3:
                p, q, r = np.split(byte, 3, axis=1)
                low = [(two >> np.uint8(2 * f)) & np.uint8(3) for two in (p, q) for f in range(4)]
                parts += [two | (((r >> np.uint8(f)) & np.uint8(1)) << np.uint8(2)) for f, two in enumerate(low)]
            else:
                mask = np.uint8(2**width - 1)
                parts += [(byte >> np.uint8(f * width)) & mask for f in range(8 // width)]
            at += count
        return (np.concatenate(parts, axis=1) if parts else np.zeros((n, 0), np.uint8)), radii

    def decode(self, words: NDArray[np.uint32], dims: int) -> F64:
        """xc (n, dims) of row-major words, in float64."""
        codes, _ = self.unpack(words)
        dim, step, cmax = self.slots
        out = np.zeros((len(words), dims))
        values = step * (codes - cmax / 2)
        at = 0
        for width, words in self.segments:  # no dimension occurs twice within a segment
            here = slice(at, at := at + int(words) * 32 // int(width))
            out[:, dim[here]] += values[:, here]
        return out


@dataclass(frozen=True, eq=False)
class PlaneStates:
    """What B states become for one plane: `hi`, `lo` (B, slots) int8 with q = 256 hi + lo, and `params` (B, 10) float64
    (half_scale, offset, constant, norm x 4, base, slack, start_slack; see cpp/plane.hpp)."""

    hi: NDArray[np.int8]
    lo: NDArray[np.int8]
    params: F64

    def one(self, b: int) -> PlaneStates:
        return PlaneStates(self.hi[b : b + 1], self.lo[b : b + 1], self.params[b : b + 1])


def _quantise(plane: Plane, white: F64) -> tuple[F64, F64, F64, F64]:
    """v = step H~, its largest absolute value (B,), scale (B, 1) and q (B, slots) of `prepare`."""
    dim, step, cmax = plane.slots
    v = white[:, dim] * step
    peak = np.max(np.abs(v), axis=1, initial=0.0)
    scale = np.where(peak > ABSOLUTE, peak / _PEAK, 1.0)[:, None]  # all codes meet q = 0 in a vanishing state
    quantum = np.where(plane.coarse(2) & (cmax <= 3), 256.0, 1.0)
    return v, peak, scale, np.clip(np.rint(v / (scale * quantum)) * quantum, -_PEAK, _PEAK)


def prepare(plane: Plane, white: F64, white_error: F64, norms: F64) -> tuple[PlaneStates, F64, F64]:
    """Quantise white states for a plane.

    Args:
        white: (B, dims) the computed H~ = fl(M h).
        white_error: (B, dims) bound on ``|M h - H~|``.
        norms: (B, GROUPS) upper bounds on the norms of M h over the groups.

    Returns the states, with constant, base and slacks still zero; (B,) bounds E, in units of rho, on

        | <xc_i, M h> - half_scale (2 D_i - offset) |  <=  E    for every row i,  where D_i = sum over slots c q;

    and (B,) bounds half_scale sum cmax |q| on the absolute value of the second term.

    Codes meet states of 16 bits; in the later planes fields of 1 and 2 bits meet the high byte alone (q is a multiple
    of 256): what rounding costs there is small beside the rest that the plane leaves, and half the work is saved. In
    plane 0 it would cost all planes.

    Proof. <xc, M h> = sum step (c - cmax/2) H_dim. With v = step H~_dim and q near v / scale, the slot's term
    differs from scale q (c - cmax/2) by at most cmax/2 (|v - scale q| + step white_error), since |c - cmax/2| <=
    cmax/2. Summing, sum scale q (c - cmax/2) = scale/2 (2 D - sum cmax q), and the last factor is an integer that
    float64 holds exactly. RELATIVE * peak covers the rounding of v, of scale q and of their difference;
    RELATIVE * half_scale * sum cmax |q| covers the product in `bound` with rho and half_scale and its addition.
    """
    dim, step, cmax = plane.slots
    v, peak, scale, q = _quantise(plane, white)
    left = np.abs(v - q * scale) + RELATIVE * peak[:, None] + white_error[:, dim] * step
    error = (left @ (cmax / 2)) * INFLATE
    reach = (scale[:, 0] / 2) * (np.abs(q) @ cmax)
    error += RELATIVE * reach
    hi = np.floor((q + 128) / 256)
    params = np.zeros((len(white), 10))
    params[:, 0] = scale[:, 0] / 2
    params[:, 1] = q @ cmax
    params[:, 3:7] = plane.radius_step.astype(np.float64) * norms * INFLATE
    return PlaneStates(hi.astype(np.int8), (q - 256 * hi).astype(np.int8), params), error * INFLATE, reach * INFLATE


def rounding_lengths(plane: Plane, white: F64, white_error: F64, moment: Moment, rho: float) -> tuple[F64, F64]:
    """For all rows at once, as vectors over the rows: (B,) bounds on the length of what `prepare` may miss,

        sqrt( sum_i rho_i^2 (<xc_i, M h> - half_scale (2 D_i - offset))^2 ),

    and (B,) of that of the second term. rho is the length of the row scales.

    A slot's term is off by (c - cmax/2) (v - scale q) and by at most (c - cmax/2) other, other = RELATIVE peak + step
    white_error. The moments bound what a coarse segment makes of both; in others |c - cmax/2| <= cmax/2 will do.
    """
    dim, step, cmax = plane.slots
    v, peak, scale, q = _quantise(plane, white)
    left = v - q * scale
    other = white_error[:, dim] * step + RELATIVE * peak[:, None] + ABSOLUTE
    reach = rho * (scale[:, 0] * (np.abs(q) @ (cmax / 2)) + other @ (cmax / 2)) * INFLATE
    missed, at, from_, coarse = RELATIVE * reach, 0, 0, 0
    for width, words in plane.segments:
        part = slice(at, at := at + int(words) * 32 // int(width))
        if plane.coarse(int(width)):
            lean = moment.lean[from_ : (from_ := from_ + part.stop - part.start)].astype(np.float64)
            coding = float(moment.coding[coarse])
            along = np.abs(left[:, part] @ lean) + np.abs(left[:, part]) @ np.abs(lean) * 2.0**-36
            across = coding * np.linalg.norm(left[:, part], axis=1)
            most = (float(np.linalg.norm(lean)) + coding) * np.linalg.norm(other[:, part], axis=1)
            missed = missed + np.hypot(along, across) + most
            coarse += 1
        else:
            missed = missed + rho * ((np.abs(left[:, part]) + other[:, part]) @ (cmax[part] / 2))
    return missed * INFLATE, reach


def sieves(plane: Plane, states: PlaneStates) -> F32:
    """For B states of plane 0, (B, 7) float32 step, constant, norm x 4 and start, for which the high bytes alone bound
    the rows. With H = sum c hi of a row (an integer), its radii and its scale rho >= 0,

        upper = rho (step H + (((radius_0 norm_0 + radius_1 norm_1) + (radius_2 norm_2 + radius_3 norm_3)) + constant))
                + (start + (bias + 2^-20 |bias|)),

    in float32 in that order, is at least the upper end of `ShadowBound.prepare`'s interval for the row,

        start' + rho (half_scale (2 D - offset) + constant' + sum radius_g norm'_g) + slack + |start'| start_slack,

    unless it is NaN or -infinity, which say nothing. (Primes: the parameters of the state; start' = base + bias.)

    Proof. D = 256 H + sum c lo and offset = sum cmax (256 hi + lo), so

        2 D - offset = 512 H - 256 sum cmax hi + sum (2 c - cmax) lo  <=  512 H - 256 sum cmax hi + sum cmax |lo|.

    So the inner bracket is at most  a H + b + r  with a = 512 half_scale, b = half_scale (sum cmax |lo| - 256 sum cmax
    hi) + constant', and r = sum radius_g norm'_g. Let u = 2^-24 and S = a sum cmax |hi| + |b| + 255 sum norm'_g, which
    bounds the absolute value of each part and of their sums. Rounding a, H and their product costs 3 u; the products
    and sums of r (norm_g is not below norm'_g) 3 u; adding the constant, a H, the product with rho, and the last sum u
    each: 10 u S rho at most, with the second order below 11 u S rho. constant is b + 16 u S, rounded up. The sums of
    start, bias and the product cost 2 u (|base| + slack) and 3 u |bias| beside; 16 u of both are added, which covers
    start_slack = 2^-50 too. Where float32 underflows, each operation is off by 2^-150 more, and a by that times H:
    2^-140 (1 + sum cmax |hi|) in constant and 2^-140 in start are enough. Overflow to +infinity is above every bar; to
    -infinity, or one against the other, it says nothing.
    """
    _, _, cmax = plane.slots
    half_scale, constant, norms = states.params[:, 0], states.params[:, 2], states.params[:, 3:7]
    base, slack = np.abs(states.params[:, 7]), states.params[:, 8]
    hi, lo = states.hi.astype(np.float64), states.lo.astype(np.float64)
    high = np.abs(hi) @ cmax
    step = 512 * half_scale
    constant = half_scale * (np.abs(lo) @ cmax - 256 * (hi @ cmax)) + constant
    reach = step * high + np.abs(constant)
    for g in range(GROUPS):
        reach = reach + 255 * norms[:, g]
    out = np.empty((len(states.params), 7), np.float32)
    with np.errstate(over="ignore"):
        out[:, 0] = step
    out[:, 1] = above_float32(constant + 2.0**-20 * reach + 2.0**-140 * (1 + high))
    out[:, 2:6] = above_float32(norms)
    out[:, 6] = above_float32(states.params[:, 7] + slack + 2.0**-20 * (base + slack) + 2.0**-140)
    return out
