"""Plain numpy kernels: slow, obvious, and the oracle for the native ones, which must return the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bounds.planes import INTERLEAVE, Plane, PlaneStates, sieves
from ..bounds.rounding import RELATIVE, SMALLEST_STATE, above_float32, below_float32, score_error
from ..noise import gumbel
from ..spec import Rows

if TYPE_CHECKING:
    from ..bounds.shadow import ShadowBound

__all__ = ["ReferenceKernels"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class _Bound(NamedTuple):
    plane: Plane
    rho: F64
    bias: F64 | None


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
    engine: str | None = None

    def bind(self, plane: Plane, rho: NDArray[np.uint16], bias: F32 | None) -> _Bound:
        wide = (rho.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return _Bound(plane, wide, None if bias is None else bias.astype(np.float64))

    def cascade(self, bound: ShadowBound, rows: Rows, bias: F32 | None, sigma: float = 0.0) -> ReferenceCascade:
        return ReferenceCascade(self, bound, rows, bias, sigma)

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
        return mid.astype(np.float32), above_float32((mid + radius) + (slack + np.abs(start) * start_slack))

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

    def sieve(self, plane: _Bound, states: PlaneStates) -> F32:
        """The upper bounds (B, V) of `bounds.planes.sieves`."""
        codes, radii = plane.plane.unpack(plane.plane.rows(0, len(plane.rho)))
        rho, r = plane.rho.astype(np.float32), radii.astype(np.float32)
        out = np.empty((len(states.params), len(rho)), np.float32)
        for b, (step, constant, n0, n1, n2, n3, start) in enumerate(sieves(plane.plane, states)):
            dot = (codes.astype(np.int64) @ states.hi[b].astype(np.int64)).astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                inner = step * dot + (((r[:, 0] * n0 + r[:, 1] * n1) + (r[:, 2] * n2 + r[:, 3] * n3)) + constant)
                if plane.bias is not None:
                    bias = plane.bias.astype(np.float32)
                    start = start + (bias + np.abs(bias) * np.float32(2.0**-20))
                out[b] = rho * inner + start
        return out

    def sift(self, plane: _Bound, states: PlaneStates, bars: F32) -> list[tuple[I64, F32, F32, float]]:
        n, out = len(plane.rho), []
        centre, upper = self.screen(plane, states, None)
        coarse = self.sieve(plane, states)
        whole = np.arange(n) < n // INTERLEAVE * INTERLEAVE  # a block of fewer rows is looked at whatever its bounds
        for b, bar in enumerate(bars):
            closed = (coarse[b] <= bar) & (coarse[b] > -np.inf) & whole
            closed &= np.repeat(np.logical_and.reduceat(closed, np.arange(0, n, INTERLEAVE)), INTERLEAVE)[:n]
            kept = ~closed & ~(upper[b] <= bar)
            others = np.where(closed, coarse[b], upper[b])[~kept]
            rows = np.nonzero(kept)[0].astype(np.int64)
            out.append((rows, centre[b, rows], upper[b, rows], float(np.max(others, initial=-np.inf))))
        return out

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


class ReferenceCascade:
    """See `csv_decode.kernels.Cascade`."""

    def __init__(self, kernels: ReferenceKernels, bound: ShadowBound, rows: Rows, bias: F32 | None, sigma: float):
        self.kernels, self.bound, self.rows, self.bias, self.sigma = kernels, bound, rows, bias, sigma
        self.planes = [kernels.bind(plane, bound.rho, bias) for plane in bound.planes]

    def top_k(self, *_: Any) -> Any:
        raise NotImplementedError  # the head walks the planes itself

    def ledger(self, h: F64, race: Any = None) -> ReferenceLedger:
        return ReferenceLedger(self, h, race)


class ReferenceLedger:
    """cpp/ledger.hpp in numpy. Keys are float64 sums with noise that is exact, so they are a little tighter."""

    def __init__(self, cascade: ReferenceCascade, h: F64, race: Any) -> None:
        self._cascade, self._h = cascade, h
        self._states, self._energy = cascade.bound.prepare(cascade.kernels, h, cascade.sigma)
        self._vanishing = np.abs(h).max(axis=1) < SMALLEST_STATE
        self._finite = np.all([np.isfinite(states.params).all(axis=1) for states in self._states], axis=0)
        self._centre, self._upper = cascade.kernels.screen(cascade.planes[0], self._states[0], None)
        self._level = np.zeros(self._centre.shape, np.int64)
        self._bins = np.full(self._centre.shape, 255)
        self._extra = np.zeros(self._centre.shape)
        self._rows_at = np.zeros((len(h), len(cascade.planes)), np.int64)
        self._raced = np.zeros(len(h), bool)
        self._scored = [[(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))] for _ in h]
        for b, (seed, stream, position, temperature) in enumerate(zip(*race, strict=True) if race else ()):
            if temperature > 0 and self.usable(b):
                noise = gumbel(int(seed), int(stream), int(position), np.arange(self._centre.shape[1]))
                self._extra[b] = float(temperature) * noise
                self._raced[b] = True

    def usable(self, b: int) -> bool:
        return bool(self._finite[b] and not self._vanishing[b])

    def vanishing(self, b: int) -> bool:
        return bool(self._vanishing[b])

    def energy(self, b: int) -> float:
        return float(self._energy[b])

    def rows_at(self, b: int, plane: int) -> int:
        return int(self._rows_at[b, plane])

    def allow(self, b: int, words: NDArray[np.uint32]) -> None:
        allowed = np.unpackbits(words.view(np.uint8), count=self._centre.shape[1], bitorder="little")
        self._centre[b, allowed == 0] = self._upper[b, allowed == 0] = -np.inf

    def _keys(self, values: F32, b: int, plain: bool) -> F64:
        wide = values[b].astype(np.float64)
        if plain:
            return wide
        extra = self._extra[b]
        return np.asarray(wide + extra + RELATIVE * (np.where(np.isinf(wide), 0.0, np.abs(wide)) + np.abs(extra)))

    def leaders(self, b: int, count: int, plain: bool) -> I64:
        keys = self._keys(self._centre, b, plain)
        at = np.nonzero(keys > -np.inf)[0]
        return at[np.argsort(-keys[at], kind="stable")][:count].astype(np.int64)

    def score(self, b: int, ids: I64) -> tuple[F64, F64]:
        cascade = self._cascade
        value, magnitude = cascade.kernels.score(cascade.rows, self._h[b : b + 1], ids)
        self._centre[b, ids] = self._upper[b, ids] = -np.inf
        total, error = value[0], score_error(cascade.rows.shape[1], magnitude[0])
        if cascade.bias is not None:
            total = total + cascade.bias[ids]
            error = error + RELATIVE * np.abs(total)
        self._scored[b].append((ids, total, error))
        return total, error

    def _bar(self, b: int, k: int, plain: bool) -> float:
        ids, value, error = (np.concatenate(column) for column in zip(*self._scored[b], strict=True))
        if len(ids) < k:
            return -np.inf
        if self._raced[b] and not plain:
            extra = self._extra[b, ids]
            error = error + RELATIVE * (np.abs(value) + np.abs(extra))
            value = value + extra
        return float(np.partition(value - error, len(ids) - k)[len(ids) - k])

    def top(
        self, k: I64, spare: int, budget: int, plain: bool, nuclei: tuple[F64, F64, F64] | None
    ) -> list[tuple[I64, F64, F64, float, int, bool, int, float]]:
        out = []
        for b in range(len(self._h)):
            count, before = int(k[b]), len(self._scored[b])
            bar, survivors, within, winner, floor = np.inf, 0, True, -1, np.inf
            if count > 0 and self.usable(b):
                self.score(b, self.leaders(b, count + max(spare, count), plain))
                bars = np.full(len(self._h), np.inf)
                bars[b] = self._bar(b, count, plain)
                rows = self.open(bars, bars, plain)[b]
                looks = self._keys(self._centre, b, plain)[rows]
                self.score(b, rows[np.argsort(-looks, kind="stable")[:count]])
                bar = self._bar(b, count, plain)
                rows = rows[~(self._keys(self._upper, b, plain)[rows] <= below_float32(bar))]
                survivors = len(rows)
                within = survivors + sum(len(part[0]) for part in self._scored[b]) <= budget
                if within:
                    self.score(b, rows)
                    bar = self._bar(b, count, plain)
                    if nuclei is not None and self._raced[b] and not plain:
                        near, t, top_p = (float(column[b]) for column in nuclei)
                        winner, more, floor = self._settle(b, near, t, top_p, budget)
                        survivors += more
            ids, value, error = (
                np.concatenate(column) for column in zip(*self._scored[b][:1], *self._scored[b][before:], strict=True)
            )
            out.append((ids, value, error, bar, survivors, within, winner, floor))
        return out

    def _settle(self, b: int, near: float, t: float, top_p: float, budget: int) -> tuple[int, int, float]:
        def scored() -> tuple[I64, F64, F64]:
            return tuple(np.concatenate(column) for column in zip(*self._scored[b], strict=True))  # type: ignore

        ids, value, error = scored()
        extra = self._extra[b, ids]
        first = int(np.argmax(value + extra))
        slack = error + RELATIVE * (np.abs(value) + np.abs(extra))
        others = np.arange(len(ids)) != first
        if not ((value + extra + slack)[others] < (value + extra - slack)[first]).all():
            return -1, 0, np.inf
        if top_p >= 1:
            return first, 0, np.inf
        if not value.max() - value[first] <= near:
            return -1, 0, np.inf
        bars = np.full(len(self._h), np.inf)
        bars[b] = value[first] - error[first]
        rows = self.open(bars, bars, True)[b]
        if len(rows) + len(ids) > budget:
            return -1, 0, np.inf
        self.score(b, rows)
        ids, value, error = scored()
        doubt = float((error + RELATIVE * (np.abs(value) + abs(value.max()))).max() / t)
        ahead = np.delete(value - value[first], first)
        if doubt > 2.0**-30 or (np.abs(ahead) <= np.delete(error + error[first], first)).any():
            return -1, len(rows), float(bars[b])
        weights = np.exp((value - value.max()) / t)
        before, off = float(weights[value > value[first]].sum()), np.expm1(doubt) + 2.0**-46 + len(ids) * 2.0**-52
        inside = before * (1 + off) < top_p * float(weights.sum()) * (1 - off)
        return first if inside else -1, len(rows), float(bars[b])

    def open(self, bars: F64, exact: F64, plain: bool) -> list[I64]:
        cascade, out = self._cascade, []
        for b in range(len(self._h)):
            if not self.usable(b) or not bars[b] < np.inf:
                out.append(np.zeros(0, np.int64))
                continue

            def reaching(bar: float, b: int = b) -> I64:
                return np.nonzero(~(self._keys(self._upper, b, plain) <= below_float32(bar)))[0].astype(np.int64)

            for p in range(1, len(cascade.planes)):
                rows = reaching(float(bars[b]))
                rows = rows[self._level[b, rows] == p - 1]
                if len(rows):
                    self._centre[b, rows], self._upper[b, rows] = cascade.kernels.refine(
                        cascade.planes[p], self._states[p].one(b), rows, self._centre[b, rows]
                    )
                    self._level[b, rows] = p
                    self._rows_at[b, p] += len(rows)
            out.append(reaching(float(exact[b])))
        return out

    def highest(self, b: int) -> float:
        keys = self._keys(self._upper, b, plain=False)
        return float(np.inf if np.isnan(keys).any() else keys.max())

    def mass(self, b: int, start: float, rate: float, likely: bool) -> F64:
        upper = (self._centre if likely else self._upper)[b]
        upper = upper[~(upper == -np.inf)].astype(np.float64)
        upper[np.isnan(upper)] = np.inf
        exponent = np.maximum((upper - start) * rate + 2.0**-14, -63.75)
        bins = np.zeros(128)
        with np.errstate(over="ignore"):
            np.add.at(bins, np.clip(-2 * exponent, 0, 127).astype(np.int64), np.exp2(exponent) * (1 + 2.0**-30))
        return bins

    def _joint_terms(self, b: int, start: float, rate: float) -> tuple[F64, F64, F64, I64]:
        """high, likely and peak of cpp/noise.inl, and bins of the peaks."""
        upper, centre = self._upper[b].astype(np.float64), self._centre[b].astype(np.float64)
        gone = upper == -np.inf
        with np.errstate(over="ignore", invalid="ignore"):
            high = np.exp2(np.maximum((upper - start) * rate, -63.75)) * (1 + 2.0**-30)
            likely = np.exp2(np.maximum((centre - start) * rate, -63.75))
            peak = high / np.maximum(2, ((upper - centre) * rate * np.log(2)) ** 2) * (1 + 2.0**-30)
        high[np.isnan(upper)] = np.inf
        peak[~(np.isfinite(centre) & (peak >= 0))] = np.inf
        high[gone] = likely[gone] = peak[gone] = 0.0
        with np.errstate(divide="ignore"):
            bins = np.clip(np.floor(-2 * np.log2(peak)), 0, 127)
        return high, likely, peak, bins.astype(np.int64)

    def joint(self, b: int, start: float, rate: float) -> F64:
        high, likely, peak, bins = self._joint_terms(b, start, rate)
        self._bins[b] = np.where(peak > 0, bins, 255)
        out = np.zeros((len(self._cascade.planes), 128, 4))
        for column, terms in enumerate((high, likely, likely**2)):
            np.add.at(out[:, :, column], (self._level[b], bins), terms)
        np.maximum.at(out[:, :, 3], (self._level[b], bins), peak)
        return out

    def lift(self, b: int, level: int, count: int) -> I64:
        left = self._upper[b] != -np.inf
        rows = np.nonzero((self._level[b] == level) & left & (self._bins[b] < count))[0].astype(np.int64)
        if level + 1 == len(self._cascade.planes):
            return rows
        if len(rows):
            self._centre[b, rows], self._upper[b, rows] = self._cascade.kernels.refine(
                self._cascade.planes[level + 1], self._states[level + 1].one(b), rows, self._centre[b, rows]
            )
            self._level[b, rows] = level + 1
            self._rows_at[b, level + 1] += len(rows)
        return rows[:0]
