"""Tests the inequalities themselves: every bound against sums of far higher precision, pair by pair of state and row.

    python benchmarks/soundness.py demo
    python benchmarks/soundness.py smollm2 --pairs 20000000 --seed 3
    python benchmarks/soundness.py --adversarial

On a real head, states of sampled text and states that are made to break its bounds meet every row. --adversarial
draws small heads instead: near ties, cancellation, subnormal numbers, ranges from 1e-30 to 1e30, odd widths, all types.
A bound counts as violated only if exact arithmetic says so. For each bound the table has the pairs, the violations, and
the largest share of the bound that an error used. Exit status 1 on a violation, or a mode that gives a wrong answer.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import soundness_heads
from rich.console import Console
from rich.table import Table

import csv_decode as cd
from csv_decode import _native, noise
from csv_decode.bounds.planes import PlaneStates
from csv_decode.bounds.rounding import INFLATE, SMALLEST_STATE, gamma
from csv_decode.bounds.shadow import ShadowBound
from csv_decode.kernels import get_kernels
from csv_decode.kernels.native import supported
from csv_decode.kernels.reference import ReferenceKernels
from csv_decode.narrow import logit_interval, sum_error
from csv_decode.scan import exact_rows

console = Console()
ALL_KERNELS = (*supported(), "reference")


@dataclass
class Line:
    pairs: int = 0
    violations: int = 0
    exact: int = 0
    tightest: float = 0.0


@dataclass
class Report:
    """What was counted, for each bound, and the first violations in words."""

    lines: dict[str, Line] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    pairs: int = 0  # of a state and a row, each once
    refused: int = 0  # heads that the builder refused

    def add(
        self,
        name: str,
        size: np.ndarray,
        bound: np.ndarray,
        doubt: np.ndarray | float,
        holds: Callable[..., bool] | None = None,
        where: str = "",
    ) -> None:
        """Counts ``size <= bound``; size is off by `doubt` at most, and holds(*index) decides where that matters."""
        line = self.lines.setdefault(name, Line())
        line.pairs += size.size
        with np.errstate(all="ignore"):
            open_ = ~(
                (size + doubt + 2.0**-50 * (np.abs(size) + np.abs(bound)) <= bound)
                | (bound == np.inf)
                | (size == -np.inf)
            )
            share = np.where((bound > 0) & np.isfinite(bound) & (size > 0), size / bound, 0.0)
        bad = np.argwhere(open_)
        for at in bad:
            index = tuple(int(x) for x in at)
            line.exact += 1
            if holds is None or not holds(*index):
                line.violations += 1
                share[index] = max(float(share[index]), 1.0)
                if len(self.findings) < 50:
                    self.findings.append(f"{name}, {where}, at {index}: {size[index]!r} above {bound[index]!r}")
            else:
                share[index] = min(float(share[index]), 1.0)
        line.tightest = max(line.tightest, float(share.max(initial=0.0)))

    def case(self, name: str, right: bool, where: str) -> None:
        line = self.lines.setdefault(name, Line())
        line.pairs += 1
        if not right:
            line.violations += 1
            self.findings.append(f"{name}, {where}")

    @property
    def violations(self) -> int:
        return sum(line.violations for line in self.lines.values())


# Sums to compare with.


@dataclass
class Truth:
    """Scores (B, V) times 2^shift: hi + lo, off by at most doubt."""

    hi: np.ndarray
    lo: np.ndarray
    doubt: np.ndarray
    shift: np.ndarray
    exact: Callable[[int, int], Fraction]

    def scaled(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(np.ldexp(x.astype(np.float64), self.shift))

    def above(self, x: np.ndarray) -> np.ndarray:
        """score - x, both times 2^shift."""
        with np.errstate(invalid="ignore"):
            return (self.hi - self.scaled(x)) + self.lo


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Veltkamp: two numbers of 26 bits that add up to x."""
    c = 134217729.0 * x
    high = c - (c - x)
    return high, x - high


def exact_sum(w: np.ndarray, h: np.ndarray) -> Fraction:
    return sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(w, h, strict=True) if a and b), Fraction(0))


def paired(weight: np.ndarray, h: np.ndarray) -> Truth:
    """Products as pairs of floats (Dekker), added in pairs (Ogita, Rump, Oishi: Accurate sum and dot product, 2005).

    With d products the result, kept as a pair, is off by gamma(d)^2 sum |w_j h_j|. Rows and states are scaled by powers
    of two to a largest coordinate near 1, so only what is 2^-900 of the largest product can underflow: 2^-1000 d covers
    it.
    """
    w = weight.astype(np.float64)
    (n, d), count = w.shape, len(h)
    row, state = np.frexp(np.abs(w).max(axis=1))[1], np.frexp(np.abs(h).max(axis=1))[1]
    a, b = np.ldexp(w, -row[:, None]), np.ldexp(h, -state[:, None])
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    hi, lo, size = np.zeros((count, n)), np.zeros((count, n)), np.zeros((count, n))
    for first in range(0, n, 512):
        part = slice(first, first + 512)
        s, c, m = hi[:, part], lo[:, part], size[:, part]
        for j in range(d):
            x, y = a[None, part, j], b[:, j, None]
            p = x * y
            e = ((ah[None, part, j] * bh[:, j, None] - p) + ah[None, part, j] * bl[:, j, None]) + (
                al[None, part, j] * bh[:, j, None]
            )
            e += al[None, part, j] * bl[:, j, None]
            s[:], t = _two_sum(s, p)
            c += t + e
            m += np.abs(p)
    doubt = np.where(size > 0, 2 * gamma(2 * d + 4) ** 2 * size + d * 2.0**-1000, 0.0)
    doubt[:, (np.abs(a).max(axis=1) > 0) & (np.where(a == 0, 1.0, np.abs(a)).min(axis=1) < 2.0**-400)] += d * 2.0**-1000
    shift = -(row[None] + state[:, None])
    return Truth(hi, lo, doubt, shift, lambda b, i: exact_sum(w[i], h[b]))


def sliced(weight: np.ndarray, h: np.ndarray, slices: int = 3) -> Truth:
    """Products of matrices of few bits (Ozaki, Ogita, Oishi, Rump: Error-free transformations of matrix multiplication,
    2012). A slice holds 21 bits below the largest coordinate, so products of two slices are integers below 2^42 in a
    common unit, and up to 2^11 of them add without any rounding, in whatever order BLAS takes.
    """
    w = weight.astype(np.float64)
    assert w.shape[1] <= 2048, "2^11 products of 42 bits are 53 bits"

    def cut(x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        top = np.frexp(np.abs(x).max(axis=1, keepdims=True))[1]
        parts, rest = [], x
        for s in range(1, slices + 1):
            unit = np.ldexp(1.0, top - 21 * s)
            part = np.rint(rest / unit) * unit
            parts.append(part)
            rest = rest - part
        return parts, np.abs(rest)

    (ws, w_rest), (hs, h_rest) = cut(w), cut(h)
    hi, lo = np.zeros((len(h), len(w))), np.zeros((len(h), len(w)))
    for x in ws:
        for y in hs:
            hi, t = _two_sum(hi, y @ x.T)
            lo += t
    size = np.abs(h).sum(axis=1, keepdims=True) * np.abs(w).max(axis=1)[None]
    doubt = np.abs(h).sum(axis=1, keepdims=True) * w_rest.max(axis=1)[None]
    doubt += h_rest.max(axis=1, keepdims=True) * np.abs(w).sum(axis=1)[None]
    doubt = doubt * 1.01 + 2.0**-100 * size  # the pairs' own rounding: 9 additions
    return Truth(hi, lo, doubt, np.zeros((1, 1), np.int64), lambda b, i: exact_sum(w[i], h[b]))


# The bounds.


def check_scores(report: Report, spec: cd.HeadSpec, h: np.ndarray, truth: Truth, kernels: str, where: str) -> None:
    """`Kernels.score`, the bias, and `score_error`."""
    k, ids = get_kernels(kernels, 1), np.arange(spec.n_rows)
    value, error = exact_rows(spec, k, h, ids)
    report.add(
        "scores",
        np.abs(truth.above(value)),
        truth.scaled(error),
        truth.doubt,
        lambda b, i: abs(truth.exact(b, i) - Fraction(value[b, i])) <= Fraction(error[b, i]),
        f"{where}, {kernels}",
    )


def check_bounds(
    report: Report, name: str, centre: np.ndarray, upper: np.ndarray, truth: Truth, both: bool, where: str
) -> None:
    """A float32 centre and upper bound (B, V) of every score."""
    centre, upper = centre.astype(np.float64), upper.astype(np.float64)
    above = truth.above(centre)
    with np.errstate(invalid="ignore"):
        reach = truth.scaled(upper) - truth.scaled(centre)
    sane = np.isfinite(centre) & np.isfinite(upper) & np.isfinite(reach)
    plain = truth.above(np.where(np.isfinite(upper), upper, 0.0))  # beyond float32 the bound alone counts
    size = np.where(sane, above, np.where(np.isnan(upper) | (upper == np.inf), -np.inf, plain))
    report.add(
        name,
        size,
        np.where(sane, reach, 0.0),
        truth.doubt,
        lambda b, i: math.isnan(upper[b, i]) or upper[b, i] == math.inf or truth.exact(b, i) <= Fraction(upper[b, i]),
        where,
    )
    if both:
        rounding = 2 * (np.abs(centre) * 2.0**-24 + 2.0**-149)
        report.add(
            f"{name}, lower end",
            np.where(sane, -above, 0.0),
            np.where(sane, reach + truth.scaled(np.where(sane, rounding, 0.0)), np.inf),
            truth.doubt,
            lambda b, i: (
                truth.exact(b, i) >= 2 * Fraction(centre[b, i]) - Fraction(upper[b, i]) - Fraction(rounding[b, i])
            ),
            where,
        )


def usable(prepared: list[PlaneStates], h: np.ndarray) -> np.ndarray:
    """The states that the cascade takes on."""
    finite = np.all([np.isfinite(states.params).all(axis=1) for states in prepared], axis=0)
    return np.asarray(finite & (np.abs(h).max(axis=1) >= SMALLEST_STATE))


def check_planes(
    report: Report,
    shadow: ShadowBound,
    spec: cd.HeadSpec,
    h: np.ndarray,
    truth: Truth,
    kernels: str,
    where: str,
    sigma: float = 0.0,
) -> None:
    """Every row in every plane."""
    k = get_kernels(kernels, 1)
    bias = None if spec.bias32 is None else spec.bias32[: spec.n_rows]
    rows = np.arange(spec.n_rows)
    with np.errstate(all="ignore"):
        prepared, _ = shadow.prepare(k, h, sigma)
        live = usable(prepared, h)
        centre, upper = k.screen(k.bind(shadow.planes[0], shadow.rho, bias), prepared[0], None)
        label = "probabilistic plane" if sigma else "plane"
        if isinstance(k, ReferenceKernels):
            coarse = k.sieve(k.bind(shadow.planes[0], shadow.rho, bias), prepared[0])
            coarse = np.where(live[:, None] & (coarse > -np.inf), coarse, np.float32(np.inf))
            check_bounds(report, f"{label} 0, high bytes", centre, coarse, truth, False, where)
        spread = shadow.spread(k, h, bias)
        for p, plane in enumerate(shadow.planes):
            if p:
                handle = k.bind(plane, shadow.rho, bias)
                fine = [k.refine(handle, prepared[p].one(b), rows, centre[b]) for b in range(len(h))]
                centre, upper = np.stack([x[0] for x in fine]), np.stack([x[1] for x in fine])
            some = np.where(live[:, None], upper, np.float32(np.inf))
            check_bounds(report, f"{label} {p}", centre, some, truth, not sigma, f"{where}, {kernels}")
            if spread is not None:
                sane = np.isfinite(centre) & live[:, None]  # the sums leave other rows out
                off = np.where(sane, np.ldexp(truth.above(centre), -truth.shift), 0.0)
                doubt = np.where(sane, np.ldexp(truth.doubt, -truth.shift), 0.0)
                most = np.maximum(np.abs(off).max(axis=1, keepdims=True), 1e-300)
                length = np.sqrt(np.sum((off / most) ** 2, axis=1)) * most[:, 0] * (1 - 2.0**-40)
                bound = np.where(live, spread[:, p], np.inf)
                missed = np.sqrt(np.sum(doubt**2, axis=1))
                report.add(f"all rows of plane {p}", length, bound, missed, None, f"{where}, {kernels}")


def check_ledger(
    report: Report,
    index: cd.Index,
    spec: cd.HeadSpec,
    h: np.ndarray,
    aim: np.ndarray,
    truth: Truth,
    kernels: str,
    where: str,
) -> None:
    """States that C++ prepares by itself: of each the row that it aims at, alone, before and after all planes."""
    head = cd.CertifiedHead(index, spec, threads=1, kernels=kernels)
    assert head._cascade is not None
    ledger = head._cascade.ledger(h)
    live = np.array([ledger.usable(b) for b in range(len(h))])
    at = np.nonzero(live)[0]
    for b in at.tolist():
        bits = np.zeros(-(-spec.n_rows // 32), np.uint32)
        bits[aim[b] // 32] = np.uint32(1 << int(aim[b] % 32))
        ledger.allow(b, bits)
    chosen = aim[at]

    def check(name: str) -> None:
        upper = np.array([ledger.highest(int(b)) for b in at])
        small = Truth(
            truth.hi[at, chosen],
            truth.lo[at, chosen],
            truth.doubt[at, chosen],
            np.broadcast_to(truth.shift, truth.hi.shape)[at, chosen],
            lambda i, _: truth.exact(int(at[i]), int(chosen[i])),
        )
        with np.errstate(invalid="ignore"):
            size = np.where(upper == np.inf, -np.inf, small.above(np.where(upper == np.inf, 0.0, upper)))
        report.add(
            name,
            size,
            np.zeros(len(at)),
            small.doubt,
            lambda i: upper[i] == np.inf or truth.exact(int(at[i]), int(chosen[i])) <= Fraction(upper[i]),
            f"{where}, {kernels}",
        )

    check("native plane 0")
    ledger.open(np.where(live, -np.inf, np.inf), np.full(len(h), np.inf), True)
    check("native last plane")


def check_noise(report: Report, rng: np.random.Generator, count: int, kernels: str) -> None:
    """The float32 bound of the noise, and of its sum with a bound."""
    seed, stream, position = int(rng.integers(2**63)), int(rng.integers(2**32)), int(rng.integers(2**32))
    g = noise.gumbel(seed, stream, position, np.arange(count))
    temperature = float(10.0 ** rng.uniform(-30, 29))
    raised = np.nextafter(
        np.float32(temperature * (1 + 2.0**-20)), np.float32(np.inf)
    )  # as Ledger::race takes it, or more
    bound = np.empty(count, np.float32)
    _native.noise_bound(kernels, seed, stream, position, float(raised), bound)
    report.add("noise", temperature * g, bound.astype(np.float64), 0.0, None, f"{kernels}, T = {temperature}")
    upper = (rng.standard_normal(count) * 10.0 ** rng.uniform(-44, 38, count)).clip(-3e38, 3e38).astype(np.float32)
    added = np.empty(count, np.float32)
    _native.add_bound(kernels, upper, bound, added)
    hi, lo = _two_sum(upper.astype(np.float64), bound.astype(np.float64))
    report.add("bound and noise", (hi - added) + lo, np.zeros(count), 0.0, lambda i: hi[i] + lo[i] <= added[i], kernels)


def check_mass(report: Report, upper: np.ndarray, rate: float, kernels: str, where: str) -> None:
    """Sums of exponentials of bounds (V,), bin by bin from the top."""
    upper = upper[np.isfinite(upper)]
    if not len(upper):
        return
    start = float(upper.max())
    bins = np.asarray(_native.mass_bound(kernels, upper, start, rate))
    exponent = (upper.astype(np.longdouble) - start) * np.longdouble(np.float32(rate))
    with np.errstate(under="ignore"):
        each = np.exp2(exponent)
    first = np.clip(np.floor(-2 * exponent), 0, 127).astype(
        np.int64
    )  # it may lie in an earlier bin, never in a later one
    true = np.cumsum(np.bincount(first, each.astype(np.float64), 128))
    report.add(
        "mass", true, np.cumsum(bins) * (1 + 2.0**-30), true * 2.0**-40, None, f"{where}, {kernels}, rate {rate}"
    )


def check_narrow(report: Report, spec: cd.HeadSpec, h: np.ndarray, kernels: str, where: str) -> None:
    """What torch's own linear layer returns in the type of the weights, for states of that type."""
    import torch

    kind = getattr(torch, spec.rows.kind)
    stored = spec.rows.data
    if spec.rows.kind == "bfloat16":
        weight = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    else:
        weight = torch.from_numpy(stored)
    state = torch.from_numpy(h).to(kind)
    state = state[torch.isfinite(state).all(dim=1)]
    k, ids, g = get_kernels(kernels, 1), np.arange(spec.n_rows), gamma(math.ceil(spec.width / 16) + 5)
    bare = cd.HeadSpec(weight)
    for batch in (state[:1], state):
        if not len(batch):
            continue
        with torch.no_grad():
            z = torch.nn.functional.linear(batch, weight).double().numpy()
        wide = batch.double().numpy()
        for b in range(len(z)):
            value, error = (x[0] for x in exact_rows(bare, k, wide[b : b + 1], ids))
            alpha = sum_error(spec.width, error / g * INFLATE, float(np.abs(wide[b]).max()) + largest_weight(bare))
            with np.errstate(over="ignore"):
                low, high = logit_interval(value, error + alpha, spec.rows.kind)
            known = np.isfinite(low) & np.isfinite(high)  # beyond the type's range nothing is claimed
            size, bound = np.abs(z[b] - value), np.maximum(high - value, value - low)
            outside = known & ~((z[b] >= low) & (z[b] <= high))
            line = f"torch {spec.rows.kind}"
            bound = bound * (1 + 2.0**-40)  # for the share alone: `outside` is what counts
            report.add(
                line,
                np.where(known, size, 0),
                np.where(known, bound, np.inf),
                0.0,
                lambda i, o=outside: not o[i],
                where,
            )
            report.case(f"{line}, whole state", not outside.any(), f"{where}: row {int(np.argmax(outside))}")


def largest_weight(spec: cd.HeadSpec) -> float:
    return max(
        float(np.abs(spec.rows.float32(slice(first, first + 8192))).max()) for first in range(0, spec.n_rows, 8192)
    )


def check_centroids(
    report: Report, rng: np.random.Generator, head: soundness_heads.Head, h: np.ndarray, truth: Truth
) -> None:
    index = cd.build_index(head.spec, bounds="centroid", seed=int(rng.integers(2**31)), threads=1)
    assert index.centroid is not None
    assert index.row_ids is not None
    sizes = np.diff(index.centroid.offsets)
    upper = np.empty((len(h), head.spec.n_rows))
    upper[:, index.row_ids] = np.repeat(index.centroid.upper(get_kernels("generic", 1), h), sizes, axis=1)
    report.add(
        "centroids",
        truth.above(upper),
        np.zeros(upper.shape),
        truth.doubt,
        lambda b, i: truth.exact(b, i) <= Fraction(upper[b, i]),
        head.name,
    )


# Whole runs.


def adversarial(report: Report, pairs: int, seed: int, progress: Callable[[], None] = lambda: None) -> None:
    """Drawn heads, until so many pairs were compared."""
    rng, turn = np.random.default_rng(seed), 0
    while report.pairs < pairs:
        left = pairs - report.pairs
        kind = soundness_heads.KINDS[turn % len(soundness_heads.KINDS)]
        head = soundness_heads.head(rng, int(min(rng.integers(100, 3000), max(40, left // 40))), kind)
        one_head(report, rng, head, 48 if left > 48000 else 16, turn)
        turn += 1
        progress()


def build(report: Report, spec: cd.HeadSpec, calibration: np.ndarray, **settings: Any) -> cd.Index | None:
    """An index, or None where the builder says that rows are too large to code."""
    try:
        return cd.build_index(spec, calibration, threads=1, **settings)
    except ValueError as error:
        if "too large to code" not in str(error):
            raise
        report.refused += 1
        return None


def one_head(report: Report, rng: np.random.Generator, head: soundness_heads.Head, count: int, turn: int) -> None:
    spec, weight = head.spec, head.weight
    planes = int(rng.integers(1, 4))
    bits = tuple(float(x) for x in rng.uniform(0.5, 4, planes))
    settings = {"bits": bits} if rng.random() < 0.7 else {}
    index = build(report, spec, head.calibration, seed=int(rng.integers(2**31)), **settings)
    shadow = None if index is None else index.shadow
    h, aim = soundness_heads.states(rng, shadow, weight, count)
    w, extended = weight, h
    if spec.bias32 is not None:  # one more product: the bias times one
        w = np.concatenate([weight, spec.bias32[:, None]], axis=1)
        extended = np.concatenate([h, np.ones((count, 1))], axis=1)
    with np.errstate(under="ignore"):
        truth = paired(w, extended)
    report.pairs += truth.hi.size
    where = head.name
    for kernels in ALL_KERNELS:
        check_scores(report, spec, h, truth, kernels, where)
        if shadow is not None:
            check_planes(report, shadow, spec, h, truth, kernels, where)
        if kernels != "reference":
            if index is not None:
                check_ledger(report, index, spec, h, aim, truth, kernels, where)
            upper = (truth.hi[0]).astype(np.float32)
            for rate in (1e-3, 1.0, 1.4427, float(10.0 ** rng.uniform(-20, 20))):
                check_mass(report, upper, rate, kernels, where)
            check_noise(report, rng, len(weight), kernels)
    if turn % 3 == 0:
        check_narrow(report, spec, h, ALL_KERNELS[turn % len(ALL_KERNELS)], where)
    if turn % 8 == 0:
        check_centroids(report, rng, head, h, truth)
    drawn = build(report, spec, head.calibration, guarantee="probabilistic") if turn % 4 == 0 else None
    if drawn is not None:
        assert drawn.shadow is not None
        sigma = cd.CertifiedHead(drawn, spec, threads=1, guarantee="probabilistic")._sigma
        fixed, _ = soundness_heads.states(rng, None, weight, count)  # which know nothing of the rotation
        extended = fixed if spec.bias32 is None else np.concatenate([fixed, np.ones((count, 1))], axis=1)
        check_planes(report, drawn.shadow, spec, fixed, paired(w, extended), "generic", where, sigma)


def real(report: Report, spec: cd.HeadSpec, index: cd.Index, states: np.ndarray, pairs: int, seed: int) -> None:
    """Every row of a real head: half of the states are of text, half are hostile."""
    assert index.shadow is not None
    rng = np.random.default_rng(seed)
    count = -(-pairs // spec.n_rows)
    hostile, _ = soundness_heads.states(rng, index.shadow, _Lazy(spec), count // 2, states)  # type: ignore[arg-type]
    h = np.concatenate([states[: count - len(hostile)].astype(np.float64), hostile])
    h = h[rng.permutation(len(h))]
    kernels = [supported()[-1], *supported()]
    for first in range(0, len(h), 8):
        some = h[first : first + 8]
        truths = []
        for row in range(0, spec.n_rows, 8192):
            truths.append(sliced(spec.rows.float32(slice(row, min(row + 8192, spec.n_rows))), some))
        blocks = [t.hi.shape[1] for t in truths]
        assert spec.bias32 is None, "a real head with a bias: use --adversarial"

        def exact(b: int, i: int, some: np.ndarray = some) -> Fraction:
            return exact_sum(spec.rows.float32(np.array([i]))[0], some[b])

        truth = Truth(
            np.concatenate([t.hi for t in truths], 1),
            np.concatenate([t.lo for t in truths], 1),
            np.concatenate([t.doubt for t in truths], 1),
            truths[0].shift,
            exact,
        )
        assert sum(blocks) == spec.n_rows
        report.pairs += truth.hi.size
        name = kernels[(first // 8) % len(kernels)]
        where = f"states {first} to {first + len(some)}"
        check_scores(report, spec, some, truth, name, where)
        check_planes(report, index.shadow, spec, some, truth, name, where)
        for b in range(len(some)):
            with np.errstate(over="ignore"):
                upper = truth.hi[b].astype(np.float32)
            for rate in (0.1, 1.4427, 14.4):
                check_mass(report, upper, rate, name, where)
        check_noise(report, rng, spec.n_rows, name)
        console.print(f"{report.pairs:,} pairs, {report.violations} violations")
    check_narrow(report, spec, h[:4], supported()[-1], "the head's own type")
    if spec.rows.kind == "float32":
        import torch

        for kind in (torch.bfloat16, torch.float16):
            narrow = cd.HeadSpec(torch.from_numpy(spec.rows.data).to(kind))
            check_narrow(report, narrow, h[:4], supported()[-1], f"the head in {kind}")


class _Lazy:
    """Rows by number, of a head that is not copied to float32 as a whole."""

    def __init__(self, spec: cd.HeadSpec) -> None:
        self.spec, self.shape = spec, (spec.n_rows, spec.width)

    def __getitem__(self, at: Any) -> np.ndarray:
        if np.ndim(at) == 0:
            return self.spec.rows.float32(np.array([at]))[0]
        return self.spec.rows.float32(np.asarray(at))


def show(report: Report, title: str, seconds: float) -> None:
    table = Table("bound", title=title)
    for column in ("compared", "violations", "decided exactly", "largest share of the bound"):
        table.add_column(column, justify="right")
    for name, line in report.lines.items():
        table.add_row(name, f"{line.pairs:,}", str(line.violations), f"{line.exact:,}", f"{line.tightest:.4f}")
    console.print(table)
    for finding in report.findings[:20]:
        console.print(finding, style="red", highlight=False)
    console.print(f"{report.pairs:,} pairs of a state and a row, {report.violations} violations, {seconds:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="demo, smollm2, a .gguf file or a Hugging Face folder")
    parser.add_argument("--adversarial", action="store_true", help="drawn heads in place of a model's")
    parser.add_argument("--pairs", type=int, default=10_000_000, help="pairs of a state and a row to compare")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.adversarial == (args.model is not None):
        parser.error("give a model, or --adversarial")
    started, report = time.perf_counter(), Report()
    if args.adversarial:
        import soundness_modes

        told = [time.perf_counter()]

        def progress() -> None:
            if time.perf_counter() - told[0] > 20:
                told[0] = time.perf_counter()
                console.print(f"{report.pairs:,} pairs, {report.violations} violations")

        adversarial(report, args.pairs, args.seed, progress)
        soundness_modes.run(report, np.random.default_rng([args.seed, 1]), max(20, args.pairs // 40_000))
        title = "drawn heads"
    else:
        from common import decode_states, load

        from csv_decode.cache import get_index
        from csv_decode.calibration import calibration_key, collect_states
        from csv_decode.integrations.transformers import head_spec

        loaded = load(args.model)
        spec = head_spec(loaded.model)
        states = decode_states(loaded.model, loaded.tokenizer, max(24, -(-args.pairs // spec.n_rows) // 2 + 1))
        index = get_index(
            spec,
            lambda: collect_states(loaded.model, loaded.tokenizer),
            key=calibration_key(None),
            source=loaded.source,
        )
        title = f"{loaded.name}: {spec.n_rows} rows x {spec.width}"
        real(report, spec, index, states, args.pairs, args.seed)
    show(report, title, time.perf_counter() - started)
    return 1 if report.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
