"""Building a shadow bound: calibrated whitening, water-filled bits, planes of codes, radii rounded up."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bounds.planes import BLOCK, GROUPS, INTERLEAVE, Plane, group_edges, rotation_edges
from ..bounds.rounding import INFLATE, gamma
from ..bounds.shadow import ShadowBound
from ..spec import HeadSpec
from .moments import Sums, add_sums, bound_sums

__all__ = ["build_shadow", "longest_code", "solve_transform", "whitening"]

F64 = NDArray[np.float64]

# Step of the uniform quantiser with 2^b levels that loses least of a unit Gaussian, and what it loses (Max, 1960).
_STEP = np.array([0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569])
_LOSS = np.array([1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035])
_CHUNK = 8192
_SAMPLE = 8192
_LARGEST = 2.0**120


def whitening(states: F64, ridge: float) -> tuple[F64, F64]:
    """M = (L + ridge)^(-2/5) U^T from calibration states (N, d), and its inverse transposed; most energy first.

    An exponent of -1/2 would make the calibration states white. States that were not in the calibration have more
    energy in its small eigenvalues, which -2/5 trusts less: it leaves a tenth fewer rows there (docs/tuning.md)."""
    eigenvalues, vectors = np.linalg.eigh(states.T @ states / len(states))
    eigenvalues, vectors = np.maximum(eigenvalues[::-1], 0.0), vectors[:, ::-1]
    spread = eigenvalues + ridge * (eigenvalues.mean() or 1.0)
    spread = np.maximum(spread, spread.max() * 2.0**-20) ** 0.4  # bounded, or float16 could not hold M's small rows
    return (vectors / spread).T, (vectors * spread).T


def _rotations(dims: int, rng: np.random.Generator) -> list[F64]:
    """A random rotation for each block of dimensions."""
    out = []
    for _ in range(dims // BLOCK):
        q, r = np.linalg.qr(rng.standard_normal((BLOCK, BLOCK)))
        out.append(q * np.sign(np.diag(r)))
    return out


def _fill(variance: F64, budget: float, limit: int, lines: bool) -> NDArray[np.int32]:
    """Bits for each block, one at a time to the block that has lost most, until they are `budget` a dimension.

    `variance` (blocks,) is the mean square of what a plane codes. lines: the row, a word of radii and a word for each
    bit of a block, shall fill whole cache lines of 16 words, as a row that is read alone should."""
    bits = np.zeros(len(variance), np.int32)
    most = limit * len(variance)
    total = min(round(budget * len(variance)), most)
    if lines and most >= 15:
        total = min(max(1, round((total + 1) / 16)), (most + 1) // 16) * 16 - 1
    for _ in range(total):
        loss = np.where(bits < limit, variance * _LOSS[bits], -1.0)
        bits[int(np.argmax(loss))] += 1
    return bits


@dataclass(frozen=True)
class _Quantiser:
    """Codes of one plane while it is built."""

    bits: NDArray[np.int32]
    step: NDArray[np.float32]

    def code(self, x: F64) -> tuple[NDArray[np.uint8], F64]:
        """Whole codes (n, D) of x in units of rho, and their values xc."""
        levels = np.repeat(2.0**self.bits, BLOCK)
        step = np.repeat(self.step.astype(np.float64), BLOCK)
        with np.errstate(divide="ignore", invalid="ignore"):
            c = np.floor(x / step + levels / 2)
        c = np.clip(np.nan_to_num(c), 0, levels - 1)
        return c.astype(np.uint8), step * (c - (levels - 1) / 2)


def _best_step(values: F64, bits: int, start: float) -> float:
    """The step near `start` that loses least of the sampled values."""
    if bits == 0 or not values.any():
        return 0.0 if bits == 0 else start
    levels = 2.0**bits
    best, best_loss = start, np.inf
    for factor in np.geomspace(0.6, 1.4, 17):
        step = start * factor
        c = np.clip(np.floor(values / step + levels / 2), 0, levels - 1)
        loss = float(np.sum((values - step * (c - (levels - 1) / 2)) ** 2))
        if loss < best_loss:
            best, best_loss = step, loss
    return best


def _quantiser(x: F64, budget: float, limit: int, lines: bool) -> _Quantiser:
    """A plane's bits and steps from sampled rows (n, D) in units of rho."""
    blocks = x.reshape(len(x), -1, BLOCK)
    variance = np.mean(blocks**2, axis=(0, 2))
    bits = _fill(variance, budget, limit, lines)
    step = [
        _best_step(blocks[:, b].reshape(-1), int(bits[b]), float(_STEP[bits[b]] * np.sqrt(variance[b])) or 1.0)
        for b in range(len(bits))
    ]
    return _Quantiser(bits, np.array(step, np.float32))


def _haar(edges: NDArray[np.int64], dims: int, rng: np.random.Generator) -> F64:
    """A rotation (D, D) that turns each group of dimensions by an orthogonal matrix drawn uniformly (Haar)."""
    out = np.eye(dims)
    for a, b in itertools.pairwise(edges.tolist()):
        q, r = np.linalg.qr(rng.standard_normal((b - a, b - a)))
        out[a:b, a:b] = q * np.sign(np.diag(r))
    return out


def longest_code(planes: Sequence[Plane]) -> float:
    """No code vector xc is longer than this."""
    most = sum(np.repeat(p.step.astype(np.float64) * (2.0**p.bits - 1) / 2, BLOCK) for p in planes)
    return float(np.linalg.norm(most)) * INFLATE


def _group_norms(r: F64) -> F64:
    edges = group_edges(r.shape[1])
    return np.stack([np.sqrt(np.sum(r[:, a:b] ** 2, axis=1)) for a, b in itertools.pairwise(edges.tolist())], 1)


def _round_bf16_up(x: F64) -> NDArray[np.uint16]:
    """The smallest bfloat16 not below positive x, as bits; infinity where there is none."""
    with np.errstate(over="ignore"):
        f = x.astype(np.float32)
    f = np.where(f.astype(np.float64) < x, np.nextafter(f, np.float32(np.inf)), f).astype(np.float32)
    return ((f.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)


def _bf16(bits: NDArray[np.uint16]) -> F64:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def solve_transform(transform: NDArray[Any], width: int) -> tuple[F64, float]:
    """S (width, D) with ``x = w S`` solving ``M^T x = w`` for the stored M, and a bound on M's condition number."""
    stored = transform[:width].astype(np.float64)
    solve = np.zeros((width, len(transform)))
    solve[:, :width] = np.linalg.inv(stored.T).T
    return solve, float(np.linalg.norm(stored) * np.linalg.norm(solve))


def _aligned(rows: int, words: int) -> NDArray[np.uint32]:
    """Zeros (rows, words) that begin at a cache line, as they do in an index file."""
    raw = np.zeros(rows * words * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * words * 4].view(np.uint32).reshape(rows, words)


class _UncodableError(Exception):
    """Position of a row whose rest fits no radius at any row scale."""


class _Coder:
    """Turns white rows x (n, D) into codes, row scales and radii."""

    def __init__(self, sample: F64, budgets: tuple[float, ...], condition: float) -> None:
        # Of the norm of x: what another solve (another BLAS, in `verify_index`) may differ by, and then some.
        self.slack = 2.0**-46 * condition
        rho = self._first_scale(sample)
        self.typical = float(np.median(rho[rho > 0])) if (rho > 0).any() else 1.0
        rest = sample / np.maximum(rho, self.typical * 2.0**-8)[:, None]
        self.quantisers: list[_Quantiser] = []
        for budget in budgets:
            quantiser = _quantiser(rest, budget, limit=7, lines=len(self.quantisers) == 1)
            self.quantisers.append(quantiser)
            rest = rest - quantiser.code(rest)[1]
        # Units of the radii: 255 units must hold almost every row, and any row whose scale is raised far enough.
        self.radius_steps = [np.ones(GROUPS, np.float32) for _ in budgets]
        _, _, rests, scale = self._attempt(sample, self._scales(sample))
        limits = self._attempt(np.zeros((1, sample.shape[1])), np.ones(1))[2]
        for i, (r, limit) in enumerate(zip(rests, limits, strict=True)):
            high = np.quantile(self._needed(i, r, sample, scale) / scale[:, None], 0.999, axis=0) * 1.02
            lowest = self._needed(i, limit, np.zeros((1, sample.shape[1])), np.ones(1))[0] * 1.001
            unit = np.maximum(high, lowest) / 254
            unit = np.maximum(unit, unit.max() * 2.0**-20)
            self.radius_steps[i] = np.nextafter(unit.astype(np.float32), np.float32(np.inf))

    def _needed(self, plane: int, rest: F64, x: F64, scale: F64) -> F64:
        """What the radii (n, GROUPS) must cover: the rest, and the float64 rounding of it that `verify_index` allows
        for, here and there."""
        size = np.sqrt(np.sum(x**2, axis=1))
        reach = sum(float(np.linalg.norm(q.step * 2.0**q.bits)) for q in self.quantisers[: plane + 1])
        return _group_norms(rest) + (self.slack * size + 2.0**-44 * scale * reach)[:, None]

    @staticmethod
    def _first_scale(x: F64) -> F64:
        return np.asarray(np.sqrt(np.mean(x**2, axis=1)))

    def _scales(self, x: F64) -> F64:
        """Row scales (n,): least squares for plane 0, twice."""
        low = self.typical * 2.0**-8
        rho = np.maximum(self._first_scale(x), low)
        for _ in range(2):
            xc = self.quantisers[0].code(x / rho[:, None])[1]
            power = np.sum(xc**2, axis=1)
            fit = np.sum(x * xc, axis=1) / np.where(power > 0, power, 1.0)
            rho = np.where(power > 0, np.maximum(fit, low), rho)
        return rho

    def _attempt(self, x: F64, rho: F64) -> tuple[list[NDArray[np.uint8]], list[F64], list[F64], F64]:
        """Codes, radii and rests (in the units of x) of every plane, and the row scales as stored."""
        scale = _bf16(_round_bf16_up(rho))
        rest, codes, radii, rests = x, [], [], []
        for quantiser, unit in zip(self.quantisers, self.radius_steps, strict=True):
            c, xc = quantiser.code(rest / scale[:, None])
            rest = rest - scale[:, None] * xc
            codes.append(c)
            need = self._needed(len(codes) - 1, rest, x, scale)
            radii.append(np.ceil(need * INFLATE / (scale[:, None] * unit.astype(np.float64)) * INFLATE))
            rests.append(rest)
        return codes, radii, rests, scale

    def __call__(self, x: F64, lowest: F64) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]], F64]:
        """Codes (n, D) and radii (n, GROUPS) of each plane, and rho (n,) at least `lowest`. A row that a radius byte
        cannot hold gets a larger scale: its codes then sit next to zero, where every rest fits."""
        rho = np.maximum(self._scales(x), lowest)
        codes, radii, _, scale = self._attempt(x, rho)
        for _ in range(300):
            over = np.nonzero(~(np.max([r.max(axis=1) for r in radii], axis=0) <= 255))[0]
            if not len(over) or not np.isfinite(scale).all():
                break
            rho[over] = scale[over] * 1.5
            again = self._attempt(x[over], rho[over])
            for i in range(len(codes)):
                codes[i][over], radii[i][over] = again[0][i], again[1][i]
            scale[over] = again[3]
        fits = np.isfinite(scale) & (np.max([r.max(axis=1) for r in radii], axis=0) <= 255)
        if not fits.all():
            raise _UncodableError(int(np.argmin(fits)))
        return codes, [r.astype(np.uint8) for r in radii], scale


class _RotatedCoder:
    """As `_Coder`, for rows rotated at random: radii for the probabilistic bound (see bounds/shadow.py).

    The theorem needs the codes of a row to depend on the rotation through the rotated row alone. So all settings come
    from a sample under another rotation, and row scales from lengths, which no rotation changes. And it speaks of the
    exact rotated row, not of what float64 makes of it: where a coordinate is so close to a border of the quantiser that
    the exact one may have another code, the row gets radii that hold without the theorem, as do rows that the bytes do
    not fit.
    """

    def __init__(self, sample: F64, budgets: tuple[float, ...], edges: NDArray[np.int64]) -> None:
        self.parts = [slice(a, b) for a, b in itertools.pairwise(edges.tolist())]
        self.share: F64 = np.full(len(self.parts), np.inf)
        scale = self.lengths(sample)
        self.typical = float(np.median(scale[scale > 0])) if (scale > 0).any() else 1.0
        # A row with an unusual share of its length in one group gets a larger scale: it would fit no radius byte.
        ordinary = sample[scale > 0] / scale[scale > 0, None]
        if len(ordinary):
            self.share = np.array([np.quantile(np.linalg.norm(ordinary[:, part], axis=1), 0.98) for part in self.parts])
            self.share[self.share == 0] = np.inf
        scale = self.lengths(sample)
        rows = sample / np.maximum(scale, self.typical * 2.0**-8)[:, None]
        self.quantisers: list[_Quantiser] = []
        self.stretch: list[F64] = []  # of the values of a plane's codes, (D,)
        for budget in budgets:
            rest = self._rests(rows, np.ones(len(rows)))[1][-1] if self.quantisers else rows
            quantiser = _quantiser(rest, budget, limit=7, lines=len(self.quantisers) == 1)
            value, stretch = quantiser.code(rest)[1], np.ones(sample.shape[1])
            if not self.quantisers:  # so that what plane 0 leaves is across its row, in the mean
                for part in self.parts:
                    both = float(np.sum(value[:, part] * rows[:, part]))
                    stretch[part] = np.sum(rows[:, part] ** 2) / both if both > 0 else 1.0
            step = quantiser.step * stretch.reshape(-1, BLOCK)[:, 0].astype(np.float32)
            self.quantisers.append(_Quantiser(quantiser.bits, step))
            self.stretch.append(np.repeat(np.where(step > 0, step / np.maximum(quantiser.step, 1e-30), 1.0), BLOCK))
        # Units of the radii: see `_Coder`.
        self.radius_steps: list[NDArray[np.float32]] = []
        self.middles: list[F64] = []  # squares across, of a row in the middle
        limits = self._rests(np.zeros((1, sample.shape[1])), np.ones(1))[1]
        for left, limit in zip(self._rests(rows, np.ones(len(rows)))[1], limits, strict=True):
            across, along = self._split(left, rows, np.zeros(len(rows)))
            high = np.append(np.quantile(across**2, 0.9995, axis=0), np.quantile(along, 0.9995)) * 1.05
            # what a row next to zero leaves must fit, or no scale would help a row
            least = [float(np.linalg.norm(limit[:, part])) ** 2 for part in self.parts] + [float(np.linalg.norm(limit))]
            high = np.maximum(high, np.array(least) * 1.01)
            self.middles.append(np.median(across**2, axis=0))
            unit = np.maximum(high / 254, high.max() * 2.0**-20)
            self.radius_steps.append(np.nextafter(unit.astype(np.float32), np.float32(np.inf)))

    def lengths(self, x: F64) -> F64:
        """Row scales (n,) from lengths alone."""
        scale = np.sqrt(np.mean(x**2, axis=1))
        for part, share in zip(self.parts, self.share, strict=True):
            scale = np.maximum(scale, np.linalg.norm(x[:, part], axis=1) / share)
        return np.asarray(scale)

    def _rests(self, x: F64, scale: F64) -> tuple[list[NDArray[np.uint8]], list[F64], F64]:
        """Codes and rests (in the units of x) of every plane, and the smallest distance (n,) of a coordinate to a
        border of its quantiser, in the units of x."""
        codes: list[NDArray[np.uint8]] = []
        rests: list[F64] = []
        near = np.full(len(x), np.inf)
        for quantiser, stretch in zip(self.quantisers, self.stretch, strict=True):
            levels = np.repeat(2.0**quantiser.bits, BLOCK)
            value = np.repeat(quantiser.step.astype(np.float64), BLOCK) * scale[:, None]
            step = value / stretch
            with np.errstate(divide="ignore", invalid="ignore"):
                t = np.nan_to_num((rests[-1] if rests else x) / step + levels / 2)
            c = np.clip(np.floor(t), 0, levels - 1)
            away = np.where(levels > 1, np.abs(t - np.rint(t)) * step, np.inf)
            near = np.minimum(near, np.min(away[:, : self.parts[-1].stop], axis=1, initial=np.inf))
            rests.append((rests[-1] if rests else x) - value * (c - (levels - 1) / 2))
            codes.append(c.astype(np.uint8))
        return codes, rests, near

    def _split(self, rest: F64, x: F64, error: F64) -> tuple[F64, F64]:
        """Norms of the rest across the row in each group (n, GROUPS - 1), and along it in all (n,), for every row
        within `error` (n,)."""
        across, along = [], np.zeros(len(x))
        for part in self.parts:
            length = np.linalg.norm(x[:, part], axis=1)
            size = np.linalg.norm(rest[:, part], axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                inside = np.where(length > 0, np.abs(np.sum(rest[:, part] * x[:, part], axis=1)) / length, size)
                turn = np.where(length > 0, size / length, np.inf if part.start < part.stop else 0.0)
                room = np.where(error > 0, 4 * error * (1 + turn), 0.0)
            across.append(np.sqrt(np.maximum(size**2 - inside**2, 0.0)) + 2.0**-20 * size + room)
            along += (inside + 2.0**-40 * size + room) ** 2
        return np.stack(across, 1), np.sqrt(along)

    def __call__(
        self, x: F64, scale: F64, error: F64, room: F64
    ) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]], F64]:
        """Codes, radii and row scales of rotated rows x (n, D). scale (n,) is what `lengths` gives, `error` (n,) bounds
        what float64 has missed of x, and the radii shall hold for every row within `room` (n,)."""
        scale = _bf16(_round_bf16_up(np.maximum(scale, self.typical * 2.0**-8)))
        codes, rests, near = self._rests(x, scale)
        radii = []
        for unit, rest in zip(self.radius_steps, rests, strict=True):
            across, along = self._split(rest, x, room)
            need = np.concatenate([(across / scale[:, None]) ** 2, (along / scale)[:, None]], axis=1)
            with np.errstate(invalid="ignore"):
                radii.append(np.ceil(need * INFLATE / unit.astype(np.float64) * INFLATE))
        plain = ~((near > 2 * error) & (np.max([r.max(axis=1) for r in radii], axis=0) <= 255))
        for _ in range(300):
            rows = np.nonzero(plain)[0]
            if not len(rows) or not np.isfinite(scale[rows]).all():
                break
            again, rests, _ = self._rests(x[rows], scale[rows])
            worst = np.zeros(len(rows))
            for i, (unit, rest) in enumerate(zip(self.radius_steps, rests, strict=True)):
                whole = (np.linalg.norm(rest, axis=1) + 4 * room[rows]) * (1 + 2.0**-30) / scale[rows]
                byte = np.ceil(whole * INFLATE / float(unit[-1]) * INFLATE)
                worst = np.maximum(worst, byte)
                codes[i][rows], radii[i][rows] = again[i], 0
                radii[i][rows, -1] = byte
            plain[rows[worst <= 255]] = False
            scale[plain] = _bf16(_round_bf16_up(scale[plain] * 1.5))
        if plain.any() or not np.isfinite(scale).all():
            raise _UncodableError(int(np.argmax(plain | ~np.isfinite(scale))))
        return codes, [r.astype(np.uint8) for r in radii], scale


def build_shadow(
    spec: HeadSpec,
    states: F64,
    row_ids: NDArray[np.int64] | None,
    bits: tuple[float, ...],
    ridge: float,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
    threads: int,
    probabilistic: bool = False,
) -> ShadowBound:
    """Codes all valid rows of `spec` (in the order of row_ids, if given) after whitening with states (N, d)."""
    ids = np.arange(spec.n_rows) if row_ids is None else row_ids
    n, width = len(ids), spec.width
    dims = -(-width // BLOCK) * BLOCK

    def wide(rows: NDArray[np.int64]) -> F64:
        return spec.rows.float32(rows).astype(np.float64)

    # Mean and spread of ordinary rows: a few huge ones must not move them, nor rows of zeros hide the rest.
    sample_ids = np.sort(rng.choice(ids, min(n, _SAMPLE), replace=False))
    sample = wide(sample_ids)
    lengths = np.linalg.norm(sample, axis=1)
    usual = lengths <= 8 * np.median(lengths[lengths > 0]) if lengths.any() else lengths == 0
    mean = sample[usual].mean(axis=0).astype(np.float32)
    centred = sample - mean

    # White dimensions, those with the largest spread of rows first, rotated within blocks of like spread.
    forward, inverse = whitening(states, ridge)
    spread = np.sqrt(np.mean((centred[usual] @ inverse.T) ** 2, axis=0))
    order = np.argsort(-spread, kind="stable")
    full = np.zeros((dims, width))
    full[:width] = forward[order]
    full /= 2.0 ** np.ceil(np.log2(np.abs(full).max()))
    rotation_error = None
    if probabilistic:
        edges = rotation_edges(width)
        solve, condition = solve_transform(full, width)
        coder: _Coder | _RotatedCoder = _RotatedCoder((centred[usual] @ solve) @ _haar(edges, dims, rng).T, bits, edges)
        # Everything is settled: now the rotation is drawn, from what only the system knows.
        rotation = _haar(edges, dims, np.random.default_rng(secrets.randbits(256)))
        transform: NDArray[Any] = (rotation @ full).astype(np.float32)
        stored = full  # the rows are decomposed before they are rotated
        # Of a product with the rotation: float64, and what the floats of a rotation are taken to be off a true one.
        wobble = gamma(dims + 8) * float(np.sqrt(dims)) + 2.0**-40
        rotation_error = float(np.linalg.norm(transform - rotation @ full)) + wobble * float(np.linalg.norm(full))
        rotation_error *= INFLATE
        final, _ = solve_transform(transform, width)
    else:
        for b, turn in enumerate(_rotations(dims, rng)):
            part = slice(b * BLOCK, min((b + 1) * BLOCK, width))
            if part.start < width:
                n_part = part.stop - part.start
                full[part] = (turn if n_part == BLOCK else np.linalg.qr(turn[:n_part, :n_part])[0]) @ full[part]
        full /= 2.0 ** np.ceil(np.log2(np.abs(full).max()))
        transform = full.astype(np.float16)
        # From here on the stored transform is the truth: x solves M^T x = w - mu for it.
        stored = transform.astype(np.float64)
        solve, condition = solve_transform(transform, width)
        coder = _Coder(centred[usual] @ solve, bits, condition)
    stored_norm, mean_norm = float(np.linalg.norm(stored)), float(np.linalg.norm(mean.astype(np.float64)))

    planes = [
        Plane(q.bits, q.step, unit, np.zeros(0, np.uint32), interleaved=i == 0)
        for i, (q, unit) in enumerate(zip(coder.quantisers, coder.radius_steps, strict=True))
    ]
    padded = -(-n // INTERLEAVE) * INTERLEAVE
    words = [_aligned(padded if p.interleaved else n, p.words_per_row) for p in planes]
    rho_bits = np.zeros(n, np.uint16)
    g = gamma(dims + width + 8)
    done = 0

    def chunk(first: int) -> tuple[int, float, list[Sums]]:
        last = min(first + _CHUNK, n)
        w = wide(ids[first:last])
        centred = w - mean
        x = centred @ solve
        if not (np.abs(x) < _LARGEST).all():
            row = int(np.nonzero(~(np.abs(x) < _LARGEST).all(axis=1))[0][0])
            raise ValueError(
                f"row {ids[first + row]} of the weights is too large to code: norm {np.linalg.norm(w[row]):.3g}, "
                f"{np.linalg.norm(x[row]):.3g} in the space of the transform, where bfloat16 row scales end"
            )
        # delta_i = w - mu - M^T x, and what float64 may have missed of it.
        delta = np.linalg.norm(centred - x @ stored, axis=1)
        delta += g * (np.linalg.norm(w, axis=1) + mean_norm + stored_norm * np.linalg.norm(x, axis=1))
        delta *= INFLATE
        try:
            if isinstance(coder, _RotatedCoder):
                turned = x @ rotation.T
                error = wobble * np.linalg.norm(x, axis=1)
                room = error + np.linalg.norm(centred @ final - turned, axis=1)  # who checks the index sees `final`
                codes, radii, scale = coder(turned, np.maximum(coder.lengths(x), delta * 2.0**20), error, room)
            else:
                codes, radii, scale = coder(x, delta * 2.0**20)
        except _UncodableError as error:
            row = error.args[0]
            raise ValueError(
                f"row {ids[first + row]} of the weights (norm {np.linalg.norm(w[row]):.3g}) cannot be coded beside the "
                "others; its numbers are too far from theirs"
            ) from None
        rho_bits[first:last] = _round_bf16_up(scale)
        sums, coded = [], np.zeros_like(x)
        for i, plane in enumerate(planes):
            packed = plane.pack(codes[i], radii[i])
            if not probabilistic:
                coded += plane.decode(packed, dims)
                sums.append(Sums.of(plane, x - scale[:, None] * coded, packed, scale))
            if plane.interleaved:
                whole = np.zeros((-(-len(packed) // INTERLEAVE) * INTERLEAVE, packed.shape[1]), np.uint32)
                whole[: len(packed)] = packed
                woven = whole.reshape(-1, INTERLEAVE, packed.shape[1]).transpose(0, 2, 1)
                words[i][first : first + len(whole)] = woven.reshape(-1, packed.shape[1])
            else:
                words[i][first:last] = packed
        return last - first, float(np.max(delta / scale)), sums

    worst, total = 0.0, None
    with ThreadPoolExecutor(threads) as pool:
        for count, ratio, sums in pool.map(chunk, range(0, n, _CHUNK)):
            done += count
            worst = max(worst, ratio)
            total = add_sums(total, sums)
            progress(done, n)
    moments = [bound_sums(sums) for sums in total or []]
    white = states @ transform.astype(np.float64).T
    return ShadowBound(
        mean=mean,
        transform=transform,
        rho=rho_bits,
        planes=tuple(
            Plane(p.bits, p.step, p.radius_step, w, p.interleaved) for p, w in zip(planes, words, strict=True)
        ),
        delta=4 * worst + (0.0 if rotation_error is None else longest_code(planes) * rotation_error * INFLATE),
        energy=float(np.mean(white**2)),
        rotation_error=rotation_error,
        typical=np.array(coder.middles) if isinstance(coder, _RotatedCoder) else None,
        moments=tuple(m for m in moments if m is not None) if moments and None not in moments else None,
    )
