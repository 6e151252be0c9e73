"""Decoding modes as questions to a `Scan`: the best, the winner of a race, the mass that was left out.

Units. Everything here is in scores, ``s = <w, h> + b``; logits are ``scale * s``, so a temperature T on logits is
``t = T / scale`` on scores. docs/mathematics.md, section 10, has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from . import _native
from .bounds.rounding import RELATIVE
from .exact import Race, gaps, precedes, rank
from .noise import log
from .scan import MASS_BINS, Scan

__all__ = ["Noise", "draw", "is_member", "near_largest", "partition", "shrink", "top"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_ROUNDS = 12
#: Rows scored beside those wanted, for a first bar.
_SPARE = 8
#: Behind the best by so many times the temperature, a token may have too many rows before it to score them all at once.
_NEAR = 4.0
#: Relative error of a sum of exponentials beside that of its arguments: numpy's exp is within 4 ulp, and sums of up to
#: 2^19 positive terms add pairwise to less than 64 ulp.
_EXP = 2.0**-46
#: Where the errors of scores can move an exponential by more, they are computed exactly.
_COARSE = 2.0**-30
_RATE = 1 / math.log(2)


class Noise:
    """The race of one state: ``scale * s + temperature * g``. filter_t: of top-p and min-p, in units of scores."""

    def __init__(
        self,
        temperature: float,
        scale: float,
        seed: int,
        stream: int,
        position: int,
        filter_temperature: float | None = None,
    ) -> None:
        self.temperature, self.scale = temperature, scale
        self.t = temperature / scale
        self.filter_t = self.t if filter_temperature is None else filter_temperature / scale
        self.seed, self.stream, self.position = seed, stream, position

    def gumbel(self, ids: I64) -> F64:
        return np.asarray(_native.gumbel(self.seed, self.stream, self.position, ids))

    def keys(self, ids: I64, value: F64, error: F64) -> tuple[F64, F64, F64]:
        """Race values in units of scores, their errors, and the noise."""
        g = self.gumbel(ids)
        extra = self.t * g
        key = value + extra
        return key, error + RELATIVE * (np.abs(value) + np.abs(extra)), g

    def order(self, scan: Scan, b: int, ids: I64, value: F64, error: F64, count: int) -> I64:
        """Positions in ids of the first `count` of the race, exactly; equal ones by smaller id."""
        key, key_error, g = self.keys(ids, value, error)
        race = Race(self.scale, self.temperature, g)
        spec = scan.spec
        count = min(count, len(ids))
        return rank(ids, key, key_error, count, scan.h[b], spec.rows.float32, spec.bias32, race)[:count]


def _largest(lower: F64, k: int) -> float:
    """The k-th largest, -infinity where there are fewer."""
    return float(np.partition(lower, len(lower) - k)[len(lower) - k]) if len(lower) >= k else -math.inf


def top(scan: Scan, states: Iterable[int], k: I64, noise: list[Noise] | None = None) -> F64:
    """Scores rows until no other can be among the k[b] best of state b; returns (B,) lower bounds on the k-th best
    (infinity for the other states). Equality stays, so ties are never lost."""
    wanted = _wanted(scan, states, k)
    bars, _ = scan.top(wanted, _SPARE, plain=noise is None)
    for b in np.nonzero(wanted)[0].tolist():
        if scan.closed(b):
            ids, value, error = scan.scored(b)
            if noise is not None:
                value, error, _ = noise[b].keys(ids, value, error)
            bars[b] = _largest(value - error, int(k[b]))
    return bars


def _wanted(scan: Scan, states: Iterable[int], k: I64) -> I64:
    """k of some states, 0 of the others."""
    wanted = np.zeros(len(scan), np.int64)
    wanted[list(states)] = k[list(states)]
    return wanted


class Mass:
    """Sums of exponentials of one state, relative to its largest score found: e^((s - start) / t).

    scored: of the rows scored, within a factor 1 +- `error`. That of all other rows is from `rest_low` to `rest`, each
    bounded alone, or with `joint` all of them together where that says more; unknown without `left`.
    """

    def __init__(self, scan: Scan, b: int, t: float, joint: bool = False, left: bool = True) -> None:
        self.scan, self.b, self.t = scan, b, t
        self._before: dict[int, NDArray[np.bool_]] = {}
        gap, start = self._read()
        with np.errstate(over="ignore"):
            near = float(np.float32(start))  # so that the kernels and this agree on it
        if not scan.closed(b) and (abs(near - start) > t / 8 or RELATIVE * abs(start) > 2.0**-24 * t):
            scan.dense(b, "temperature below rounding")
            gap, start = self._read()
        if not scan.closed(b):
            gap, start = gap + (near - start) / t, near
        self.start = start
        with np.errstate(under="ignore"):
            self.weights = np.exp(-gap)
        self.scored = float(self.weights.sum())
        self.error = math.expm1(self._argument) + _EXP
        self.rate = _RATE / t
        self.rest, self.rest_low = math.inf, 0.0
        self.joint = joint and scan.levels > 0 and not scan.closed(b)
        if self.joint:
            self._levels = self._tails()
            self.rest = float(sum(high[0] for high, _ in self._levels)) * (1 + 2.0**-50)
            self.rest_low = float(sum(low[0] for _, low in self._levels)) * (1 - 2.0**-50)
        elif left:
            self.rest = float(self.bins.sum())

    @cached_property
    def bins(self) -> F64:
        """(MASS_BINS,) bounds of the mass of the rows not scored, by the bounds of their scores."""
        if len(self.scan.scored(self.b)[0]) != len(self.ids):
            raise AssertionError("rows were scored since, which neither the weights nor these bounds would count")
        return self.scan.mass(self.b, self.start, self.rate)

    def _read(self) -> tuple[F64, float]:
        """How far the scores are below the largest, in units of t, and that one, from the rows scored.

        e^x moves by its argument's error: that of the score, of the subtraction and of the division. Rows that are
        750 t below the largest, whatever the errors, weigh nothing. The errors of the others are small, or made so.
        """
        scan, b, t = self.scan, self.b, self.t
        if not len(scan.scored(b)[0]):  # no centre is a float32 number
            scan.dense(b, "overflow")
        self.ids, self.value, self.spread = scan.scored(b)
        counts = self.value + self.spread >= (self.value - self.spread).max() - 750 * t
        start = float(self.value.max())
        with np.errstate(over="ignore"):
            gap = (start - self.value) / t
            self._argument = float((self.spread + RELATIVE * (np.abs(self.value) + abs(start)))[counts].max() / t)
        if self._argument > _COARSE:
            spec, at = scan.spec, np.nonzero(counts)[0]
            some = self.ids[at]
            gap = np.full(len(gap), np.inf)
            gap[at], exact = gaps(spec.rows.float32(some), scan.h[b], _some(spec.bias32, some), t)
            self.value, self.spread = self.value.copy(), self.spread.copy()
            self.value[at], self.spread[at] = exact, 2.0**-52 * np.abs(exact)
            start = float(exact.max())
            # the gap itself, and what turns it into one to a start of the kernels
            self._argument = 750 * RELATIVE + (0.0 if scan.closed(b) else RELATIVE * 2 * abs(start) / t)
        return gap, start

    def _tails(self) -> list[tuple[F64, F64]]:
        """For each level, (MASS_BINS + 1,) bounds of the mass of its rows from each bin of peaks on, above and below.

        With x = 1 / t, w_i = e^(x (centre_i - start)), and d_i what x centre_i is off, at most
        e_i = x (upper_i - centre_i):

            1 + d  <=  e^d  <=  1 + d + d^2 e^e / max(2, e^2),      and over all rows of a plane   sum d_i^2 <= B^2.

        So of any rows, with peak_i = w_i e^(e_i) / max(2, e_i^2),

            sum w - B sqrt(sum w^2)  <=  sum w_i e^(d_i)  <=  sum w + B sqrt(sum w^2) + max peak B^2.

        Or the first bins are bounded row by row, and the others together.
        """
        out = []
        sums = self.scan.joint(self.b, self.start, self.rate)
        lengths = self.scan.spread(self.b) / self.t * (1 + 2.0**-50)
        for level, length in enumerate(lengths.tolist()):
            alone = (sums[level, :, 0] * (1 + 2.0**-30)).tolist()
            likely, power = (np.append(np.cumsum(x[::-1])[::-1], 0.0) for x in sums[level, :, 1:3].T)
            peak = np.append(np.maximum.accumulate(sums[level, ::-1, 3])[::-1], 0.0)
            with np.errstate(over="ignore", invalid="ignore"):
                sway = length * np.sqrt(power) * (1 + 2.0**-11)
                together = (likely * (1 + 2.0**-11) + sway + peak * length**2) * (1 + 2.0**-40)
                low = np.maximum(likely * (1 - 2.0**-11) - self.scan.spec.n_rows * 2.0**-63 - sway, 0.0)
            together[np.isnan(together)] = np.inf  # nothing times infinity
            low[~np.isfinite(likely + peak)] = 0.0
            high = together.tolist()
            for bin_ in range(MASS_BINS - 1, -1, -1):
                high[bin_] = min(high[bin_], alone[bin_] + high[bin_ + 1])
            out.append((np.array(high), low))
        return out

    def far(self, level: int, allowance: float, both: bool) -> int:
        """How many first bins of peaks of a level must be looked into for the others to have at most this mass; both:
        for their mass to be known within this."""
        high, low = self._levels[level]
        return int(np.argmax((high - low if both else high) <= allowance))

    def before(self, at: int) -> NDArray[np.bool_]:
        """Which rows come before row `at`: larger score, then smaller id, exactly."""
        if at not in self._before:
            value, ids = self.value, self.ids
            out = (value > value[at]) | ((value == value[at]) & (ids < ids[at]))
            doubt = self.spread + self.spread[at]
            close = (np.abs(value - value[at]) <= doubt) & (doubt > 0)
            close[at] = False
            if close.any():
                spec = self.scan.spec
                out[close] = precedes(ids[close], int(ids[at]), self.scan.h[self.b], spec.rows.float32, spec.bias32)
            self._before[at] = out
        return self._before[at]

    @property
    def low(self) -> float:
        return self.scored * max(0.0, 1 - self.error) * (1 - 2.0**-50)

    @property
    def high(self) -> float:
        return (self.scored * (1 + self.error) + self.rest) * (1 + 2.0**-50)

    @property
    def floor(self) -> float:
        """At most the mass of all rows."""
        return (self.low + self.rest_low) * (1 - 2.0**-50)

    def reached(self, goal: float, both: bool) -> bool:
        """Whether the mass left out (both: what is unknown of it) is at most goal of the other."""
        return self.rest - self.rest_low <= goal * self.floor if both else self.rest <= goal * self.low

    def bar(self, allowance: float, last: int = MASS_BINS) -> float:
        """A score below which the unscored rows of the first `last` bins have at most this mass, by their bounds."""
        tail = np.cumsum(self.bins[:last][::-1])[::-1]
        j = int(np.argmax(tail <= allowance)) if tail[-1] <= allowance else last
        return self.start - j / (2 * self.rate) if j < MASS_BINS else -math.inf

    def last(self, at: int) -> int:
        """How many bins hold the unscored rows that may come before row `at`: those whose bound reaches its score."""
        depth = (self.start - (self.value[at] - self.spread[at])) * 2 * self.rate
        return max(1, math.floor(depth) + 2) if depth < MASS_BINS - 2 else MASS_BINS

    def at(self, token: int) -> int:
        return int(np.nonzero(self.ids == token)[0][0])


def narrow(
    scan: Scan, masses: dict[int, Mass], allowance: dict[int, float], last: dict[int, int] | None = None
) -> dict[int, Mass]:
    """One round of reading, towards a mass left out (in the first last[b] bins) of allowance[b].

    First planes, for all rows whose bounds have mass worth it; then scores, for the rows that carry it.
    """
    last = last or dict.fromkeys(masses, MASS_BINS)
    bars = np.full(len(scan), np.inf)
    for b, mass in masses.items():
        bars[b] = mass.bar(allowance[b] / 4, last[b])
    scan.open(bars, np.full(len(scan), np.inf))
    for b, mass in masses.items():
        bars[b] = Mass(scan, b, mass.t).bar(allowance[b], last[b])
    scan.open(bars)
    return {b: Mass(scan, b, mass.t) for b, mass in masses.items()}


def shrink(scan: Scan, t: dict[int, float], goal: dict[int, float], both: bool = False) -> dict[int, Mass]:
    """Reads on until the mass left out is at most goal[b] times the mass scored, for each state b of `goal`; both:
    until it is known within goal[b] of the whole."""
    masses = {b: Mass(scan, b, t[b], joint=True) for b in goal}
    for _ in range(_ROUNDS):
        open_ = [b for b, mass in masses.items() if not mass.reached(goal[b], both)]
        if not open_:
            return masses
        if scan.levels:
            for b in open_:
                masses[b] = _lift(scan, masses[b], goal[b] * (masses[b].floor if both else masses[b].low), both)
        else:
            masses.update(narrow(scan, {b: masses[b] for b in open_}, {b: goal[b] * masses[b].low for b in open_}))
    for b, mass in masses.items():
        if not mass.reached(goal[b], both):
            scan.dense(b, "flat distribution")
            masses[b] = Mass(scan, b, t[b])
    return masses


def _lift(scan: Scan, mass: Mass, allowance: float, both: bool) -> Mass:
    """One round through the levels, until the rows left are as `Mass.far` says. A row costs more the further it comes,
    so most of the allowance is spent on the last level."""
    b, share = mass.b, 3.0 ** np.arange(scan.levels)
    for level, part in enumerate((share / share.sum()).tolist()):
        if scan.closed(b):
            break
        scan.lift(b, level, mass.far(level, part * allowance, both))
        mass = Mass(scan, b, mass.t, joint=True)
    return mass


def partition(scan: Scan, temperature: F64, goal: F64, both: bool = False) -> list[Mass]:
    """`shrink` for every state, from a start. Such sums may need many rows, but never more than the dense product."""
    scan.budget = scan.spec.n_rows
    t = {b: float(temperature[b]) / scan.spec.scale for b in range(len(scan))}
    for b in t:
        scan.leaders(b, 64)
    masses = shrink(scan, t, {b: float(goal[b]) for b in t}, both)
    return [masses[b] for b in range(len(scan))]


def log_interval(mass: Mass) -> tuple[float, float]:
    """log of the sum of exponentials of all rows: an interval that contains it."""
    with np.errstate(divide="ignore"):
        low, high = float(np.log(mass.floor)), float(np.log(mass.high))
    shift = mass.start / mass.t
    slack = 2.0**-50 * (abs(low) + abs(high) + 4 * abs(shift)) + 2.0**-50
    return shift + low - slack, shift + high + slack


def near_largest(scan: Scan, b: int, at: I64, margin: float) -> I64:
    """Of positions `at` in scan.scored(b), which hold the largest, those at most `margin` below it; what float64 leaves
    open is decided exactly."""
    ids, value, error = (column[at] for column in scan.scored(b))
    slack = RELATIVE * (np.abs(value) + margin)
    open_ = value - error - slack < (value + error).max() - margin
    if not open_.any():
        return at
    look = open_ | (value + error >= (value - error).max())
    gap = np.zeros(len(at))
    gap[look] = gaps(scan.spec.rows.float32(ids[look]), scan.h[b], _some(scan.spec.bias32, ids[look]), 1.0)[0]
    return at[gap <= margin * (1 + RELATIVE)]


# Sampling.


def _above(mass: Mass, at: int) -> tuple[float, float, float]:
    """The mass of the scored rows that come before row `at` of mass.ids, and bounds on that of all such rows."""
    total = float(mass.weights[mass.before(at)].sum())
    # an unscored row comes before only if its bound reaches the score
    rest = float(mass.bins[: mass.last(at)].sum())
    low, high = total * max(0.0, 1 - mass.error), total * (1 + mass.error)
    return total, low * (1 - 2.0**-50), (high + rest) * (1 + 2.0**-50)


def _in_nucleus(mass: Mass, at: int, top_p: float) -> bool | None:
    """Is the mass before row `at` below top_p of all? None: the bounds cannot tell."""
    total, low, high = _above(mass, at)
    if high < top_p * mass.floor * (1 - 2.0**-50):
        return True
    if low >= top_p * mass.high * (1 + 2.0**-50):
        return False
    if mass.rest > 0:
        return None
    return total < top_p * mass.scored  # every row is scored, and it is a matter of mass.error: by value


def draw(scan: Scan, noise: list[Noise], top_k: I64, top_p: F64, min_p: F64, log_min_p: F64) -> tuple[I64, F64, F64]:
    """Positions (B,) of the ids drawn in scan.scored(b), thresholds and largest keys left, see `certificate.Draw`.

    The race is walked down to its first member of the set that top-k, top-p and min-p leave, in this order.
    """
    n = len(scan)
    out, threshold, left = np.zeros(n, np.int64), np.full(n, -np.inf), np.full(n, -np.inf)
    few = [b for b in range(n) if top_k[b] > 0]
    if few:
        bars = top(scan, few, top_k)
        for b in few:
            threshold[b], left[b] = bars[b], scan.unopened(b)
            if threshold[b] == -math.inf:  # fewer are allowed, and all of them are scored
                _, value, error = scan.scored(b)
                threshold[b] = float((value - error).min())
            out[b] = _draw_among(scan, b, noise[b], int(top_k[b]), top_p[b], min_p[b], log_min_p[b])
    walk = [b for b in range(n) if top_k[b] <= 0]
    count = np.ones(n, np.int64)
    if walk:  # most draws end here
        t = np.array([x.filter_t for x in noise])
        bars, winners = scan.top(_wanted(scan, walk, count), _SPARE, plain=False, nuclei=(_NEAR * t, t, top_p))
        for b in walk:
            if winners[b] >= 0 and min_p[b] <= 0:
                out[b], threshold[b], left[b] = winners[b], bars[b], scan.unopened(b)
                count[b] = 0
        walk = [b for b in walk if count[b]]
    decided: dict[tuple[int, int], bool] = {}
    while walk:
        again = []
        for b in walk:
            found = _walk(scan, b, noise[b], int(count[b]), top_p[b], min_p[b], log_min_p[b], decided)
            if found is None:
                if scan.closed(b) and count[b] >= len(scan.scored(b)[0]):
                    raise AssertionError("no row is in its own nucleus")
                count[b] *= 4
                if count[b] > 64:  # a token at a time would be V tokens of V rows each
                    scan.dense(b, "long walk")
                    every = len(scan.scored(b)[0])
                    found = _draw_among(scan, b, noise[b], every, top_p[b], min_p[b], log_min_p[b])
                else:
                    again.append(b)
            if found is not None:
                out[b] = found
                ids, value, error = scan.scored(b)
                one = slice(found, found + 1)
                key, key_error, _ = noise[b].keys(ids[one], value[one], error[one])
                threshold[b], left[b] = float(key[0] - key_error[0]), scan.unopened(b)
        if again:
            top(scan, again, count, noise)
        walk = again
    return out, threshold, left


def _walk(
    scan: Scan,
    b: int,
    noise: Noise,
    count: int,
    top_p: float,
    min_p: float,
    log_min_p: float,
    decided: dict[tuple[int, int], bool],
) -> int | None:
    """The first of the `count` leading rows of the race that is in the set; None: not one of them."""
    ids, value, error = scan.scored(b)
    order = ids[noise.order(scan, b, ids, value, error, count)]
    if top_p >= 1 and min_p <= 0:
        return int(np.nonzero(ids == order[0])[0][0])
    for token in order.tolist():
        if (b, token) not in decided:
            decided[b, token] = is_member(scan, b, noise, token, top_p, min_p, log_min_p)
        if decided[b, token]:
            return int(np.nonzero(scan.scored(b)[0] == token)[0][0])
    return None


def is_member(
    scan: Scan, b: int, noise: Noise, token: int, top_p: float, min_p: float = 0.0, log_min_p: float = 0.0
) -> bool:
    """Whether a scored token is in the set that top-p and then min-p leave of all rows."""
    return (min_p <= 0 or _reaches(scan, b, noise, token, log_min_p)) and (
        top_p >= 1 or _nucleus(scan, b, noise.filter_t, token, top_p)
    )


def _reaches(scan: Scan, b: int, noise: Noise, token: int, log_min_p: float) -> bool:
    """min-p: is ``(s_max - s) / t``, rounded to float64, at most -log(min_p)?"""
    margin = -log_min_p * noise.filter_t
    ids, value, error = scan.scored(b)
    at = int(np.nonzero(ids == token)[0][0])
    slack = RELATIVE * (abs(value[at]) + margin)
    if value[at] + error[at] + slack < (value - error).max() - margin:
        return False  # another row is so much larger, whatever the rows not scored are
    # is any row so large that this one is too small? only those whose bound says so need a score
    bars = np.full(len(scan), np.inf)
    bars[b] = value[at] - error[at] - slack + margin
    scan.open(bars)
    ids, value, error = scan.scored(b)
    at = int(np.nonzero(ids == token)[0][0])
    doubtful = value + error >= value[at] - error[at] - slack + margin
    if not doubtful.any():
        return True
    doubtful[at] = True
    gap = gaps(
        scan.spec.rows.float32(ids[doubtful]), scan.h[b], _some(scan.spec.bias32, ids[doubtful]), noise.filter_t
    )[0]
    return bool(gap[ids[doubtful] == token][0] <= -log_min_p)


def _nucleus(scan: Scan, b: int, t: float, token: int, top_p: float) -> bool:
    """Reads on until it is certain whether the mass before a token is below top_p of all.

    That it is needs no bound on all mass: the mass scored is less than all. So what is likely decides where to look.
    """
    if _leads(scan, b, t, token, top_p):
        return True
    if not scan.joined:
        scan.leaders(b, 32)
    mass = Mass(scan, b, t, joint=scan.joined)
    for more in range(_ROUNDS):
        at = mass.at(token)
        inside = _in_nucleus(mass, at, top_p)
        if inside is not None:
            return inside
        low, last = _above(mass, at)[0], mass.last(at)
        likely = scan.mass(b, mass.start, mass.rate, likely=True)
        before, total = low + float(likely[:last].sum()), mass.scored + float(likely.sum())
        if before < top_p * total:
            if mass.scored < (before / top_p + total) / 2:
                scan.leaders(b, 64 << more)
            else:
                narrow(scan, {b: mass}, {b: max(top_p * mass.scored - low, 0.0) / 2}, {b: last})
            mass = Mass(scan, b, t, mass.joint)
        elif low / top_p <= mass.scored:
            scan.leaders(b, 64 << more)
            mass = Mass(scan, b, t, mass.joint)
        elif not scan.levels:
            mass = narrow(scan, {b: mass}, {b: (low / top_p - mass.scored) / 2})[b]
        elif mass.joint:
            mass = _lift(scan, mass, max(before / top_p - total, (low / top_p - mass.scored) / 8) * 0.9, both=False)
        else:
            mass = Mass(scan, b, t, joint=True)
    scan.dense(b, "edge of the nucleus")
    mass = Mass(scan, b, t)
    inside = _in_nucleus(mass, mass.at(token), top_p)
    assert inside is not None
    return inside


def _leads(scan: Scan, b: int, t: float, token: int, top_p: float) -> bool:
    """Is a token that is not far behind the best in the nucleus, by the rows before it alone? Once all of these are
    scored, their mass is known, and that of all rows is at least that of those scored. Most draws end here."""
    ids, value, error = scan.scored(b)
    at = int(np.nonzero(ids == token)[0][0])
    if value.max() - value[at] > _NEAR * t:
        return False
    bars = np.full(len(scan), np.inf)
    bars[b] = value[at] - error[at]
    scan.open(bars)
    mass = Mass(scan, b, t, left=False)
    before = float(mass.weights[mass.before(mass.at(token))].sum()) * (1 + mass.error) * (1 + 2.0**-50)
    return before < top_p * mass.low * (1 - 2.0**-50)


def _draw_among(scan: Scan, b: int, noise: Noise, k: int, top_p: float, min_p: float, log_min_p: float) -> int:
    """top-k with its ties, top-p of those, min-p, then the race among what is left."""
    spec = scan.spec
    ids, value, error = scan.scored(b)
    k = min(k, len(ids))
    at = rank(ids, value, error, k, scan.h[b], spec.rows.float32, spec.bias32)
    keep = np.ones(len(at), bool)
    if top_p < 1 or min_p > 0:
        size = np.abs(value[at])
        with np.errstate(over="ignore", invalid="ignore"):
            doubt = (error[at] + error[at[0]] + RELATIVE * (size + size[0])) / noise.filter_t
            gap = (value[at[0]] - value[at]) / noise.filter_t
            unsure = (doubt > _COARSE) | (np.abs(gap + log_min_p) <= doubt)
            unsure &= ~(gap - doubt >= max(750.0, -log_min_p))
        if unsure.any():
            unsure[0] = True  # the largest
            some = ids[at[unsure]]
            gap[unsure] = gaps(spec.rows.float32(some), scan.h[b], _some(spec.bias32, some), noise.filter_t)[0]
        if top_p < 1:
            weights = np.exp(-gap)
            keep &= np.concatenate([[0.0], np.cumsum(weights)[:-1]]) < top_p * weights.sum()
        if min_p > 0:
            keep &= gap <= -log_min_p
    keep[0] = True
    at = at[keep]
    return int(at[noise.order(scan, b, ids[at], scan.scored(b)[1][at], error[at], 1)[0]])


def _some(bias: NDArray[np.float32] | None, ids: I64) -> NDArray[np.float32] | None:
    return None if bias is None else bias[ids]


def min_p_logs(min_p: F64) -> F64:
    """log(min_p), 0 where it is not positive."""
    if not (min_p > 0).any():
        return np.zeros(len(min_p))
    return np.where(min_p > 0, log(np.where(min_p > 0, min_p, 1.0)), 0.0)
