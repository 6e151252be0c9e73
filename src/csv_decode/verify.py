"""The sceptic's checker: is this really the answer? It shares no code with the cascade and reads no index.

(Noise is recomputed from its definition in numpy; the kernels have their own. Of `narrow` it takes how numbers round.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .certificate import Certificate, Certificates, Draw, LogPartition, LogProbs, ModelArgmax, Softmax, TopK, Within
from .kernels import require_ieee
from .narrow import logit_interval
from .noise import gumbel
from .spec import Array, HeadSpec, as_states, whole

__all__ = ["VerificationError", "VerificationReport", "verify"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
_CHUNK = 4096


class VerificationError(AssertionError):
    """A result is not what exact arithmetic says."""


@dataclass(frozen=True)
class VerificationReport:
    """states and rows compared; exact_comparisons: pairs that float64 could not tell apart and that were decided with
    exact sums; worst_logit_error: largest difference of a returned logit from its float64 recomputation."""

    states: int
    rows: int
    exact_comparisons: int
    worst_logit_error: float


def _exact(row: F64, h: F64, bias: float) -> Fraction:
    """<row, h> + bias. A float is an integer over a power of two, so the largest denominator is the common one."""
    terms = [(bias, 1.0), *((w, x) for w, x in zip(row.tolist(), h.tolist(), strict=True) if w and x)]
    ratios = [(a.as_integer_ratio(), b.as_integer_ratio()) for a, b in terms]
    common = max(p[1] * q[1] for p, q in ratios)
    return Fraction(sum(p[0] * q[0] * (common // (p[1] * q[1])) for p, q in ratios), common)


Result = TopK | Draw | Within | Softmax | LogPartition | LogProbs | ModelArgmax


def verify(result: Result, hidden: Array, spec: HeadSpec | Array) -> VerificationReport:
    """Checks a result of `CertifiedHead` against all rows of the head, in exact arithmetic where it matters.

    A float64 product of every row with every state, with the bound ``gamma(d + 2) sum |w_j h_j|`` on its error, decides
    all comparisons that are clear; the others are decided by exact rational sums. For each state

    - top-k: the ids are distinct, valid and allowed; they are in order (larger logit, then smaller id); no other
      allowed row beats the last of them; logits are within their stated error; with ties, all rows equal to the k-th
      are there; a certificate that claims to be certified has threshold > max_unopened, no returned score below
      threshold, and has scored as many rows as have a score above max_unopened;
    - a draw: the id is the one that the race over the whole vocabulary picks, from its definition in numpy;
    - within: no id is missing, and none is farther from the largest;
    - softmax: the total variation distance from the whole one is at most tv_bound;
    - log partition, log-probabilities: the interval contains the float64 value, within its own rounding, and is as
      narrow as asked where it is certified; the largest ones are the largest, in order;
    - the argmax of a narrow head: no other row can have a larger logit, or an equal one and a smaller id.

    Returns a report, or raises VerificationError naming the state and the rows. ValueError for weights or states that
    are no finite numbers, and for a result of another kind.
    """
    require_ieee()
    if type(result) not in _CHECKS:
        raise ValueError(f"result is {type(result).__name__}, expected what a mode of CertifiedHead returned")
    spec = HeadSpec.of(spec)
    spec.require_finite()
    h = as_states(hidden, spec.width)
    n, width = spec.n_rows, spec.width
    _require_form(result, len(h))
    bias = np.zeros(n) if spec.bias32 is None else spec.bias32[:n].astype(np.float64)
    g = (width + 3) * 2.0**-53
    g = g / (1 - g) * 1.01
    value, error = np.empty((len(h), n)), np.empty((len(h), n))
    for first in range(0, n, _CHUNK):
        part = slice(first, min(first + _CHUNK, n))
        rows = spec.rows.float32(part).astype(np.float64)
        value[:, part] = h @ rows.T + bias[part]
        error[:, part] = g * (np.abs(h) @ np.abs(rows.T) + np.abs(bias[part])) + width * 2.0**-1070
    comparisons, worst = 0, 0.0
    for b in range(len(h)):
        rows_of = _Rows(spec, h[b], bias, value[b], error[b])
        allowed = getattr(result, "allowed", None)
        bits = None if allowed is None else allowed[b]
        if bits is not None:
            out = np.unpackbits(bits.view(np.uint8), count=n, bitorder="little") == 0
            rows_of.allowed = ~out
        try:
            worst = max(worst, _CHECKS[type(result)](result, b, rows_of))
        except VerificationError:
            raise
        except Exception as error:  # whatever ids, bits or numbers of the wrong kind lead to
            raise VerificationError(f"this is no {type(result).__name__}: state {b}: {error!r}"[:500]) from None
        comparisons += rows_of.comparisons
    return VerificationReport(len(h), n, comparisons, worst)


def _require_form(result: Result, states: int) -> None:
    """Raises VerificationError for a result whose columns are not one entry a state, or hold no numbers."""
    try:
        c = result.certificates
        if not isinstance(c, Certificates):
            raise TypeError("certificates are no Certificates")
        columns = [c.certified, c.threshold, c.max_unopened, c.rows_scored]
        rows = []
        for name, value in vars(result).items():
            if name in ("ids", "logits", "probabilities", "low", "high"):
                rows.append(value)
            elif name not in ("certificates", "allowed", "k", "top"):
                columns.append(value)
        if not all(isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype.kind in "biuf" for x in columns):
            raise TypeError("a column is not one number a state")
        if any(len(x) != states for x in [*columns, *rows]):
            raise ValueError(f"result has {len(rows[0])} states, but {states} were given")
        for b in range(states):
            shapes = {np.shape(x[b]) for x in rows}
            kinds = {np.asarray(x[b]).dtype.kind for x in rows}
            if len(shapes) > 1 or not kinds <= set("iuf") or not all(len(shape) <= 1 for shape in shapes):
                raise TypeError(f"state {b}: ids and logits are not rows of numbers of the same length")
            for x in rows[:1] if hasattr(result, "ids") else []:
                if np.asarray(x[b]).dtype.kind not in "iu":
                    raise TypeError(f"state {b}: ids are no whole numbers")
    except Exception as error:
        raise VerificationError(f"this is no {type(result).__name__}: {error}"[:500]) from None


class _Rows:
    """All rows for one state: values with errors, and exact scores on demand."""

    def __init__(self, spec: HeadSpec, h: F64, bias: F64, value: F64, error: F64) -> None:
        self.spec, self.h, self.bias, self.value, self.error = spec, h, bias, value, error
        self.allowed = np.ones(len(value), bool)
        self.comparisons = 0
        self._exact: dict[int, Fraction] = {}

    def exact(self, i: int) -> Fraction:
        if i not in self._exact:
            if len(self._exact) > 4096:
                self._exact.clear()
            row = self.spec.rows.float32(np.array([i]))[0].astype(np.float64)
            self._exact[i] = _exact(row, self.h, float(self.bias[i]))
        return self._exact[i]

    def compare(self, i: int, j: int, extra: tuple[Fraction, Fraction] = (Fraction(0), Fraction(0))) -> int:
        """Sign of score_i + extra_0 - (score_j + extra_1)."""
        a, b = self.value[i] + float(extra[0]), self.value[j] + float(extra[1])
        slack = (
            self.error[i] + self.error[j] + 2.0**-50 * (abs(a) + abs(b) + abs(float(extra[0])) + abs(float(extra[1])))
        )
        if not any(extra):
            slack = self.error[i] + self.error[j]
        if abs(a - b) > slack:
            return 1 if a > b else -1
        self.comparisons += 1
        difference = self.exact(i) + extra[0] - self.exact(j) - extra[1]
        return (difference > 0) - (difference < 0)

    def logits(self) -> tuple[F64, F64]:
        """Of allowed rows, -infinity for others; and a bound on their errors."""
        spec = self.spec
        logits = np.where(self.allowed, spec.finish(self.value), -np.inf)
        return logits, self.error * spec.scale + 2.0**-50 * np.abs(spec.finish(self.value))

    def gaps(self, unit: float, reach: float = 750.0) -> tuple[F64, F64, float]:
        """How far each score is below the largest allowed one, in `unit`; bounds on the errors of those that may be
        within `reach`; and the largest. Where float64 leaves too much open for such a unit, the scores are exact
        sums."""
        value = np.where(self.allowed, self.value, -np.inf)
        near = value + self.error >= (value - self.error).max() - reach * unit
        first = int(np.argmax(value))
        top = float(value[first])
        with np.errstate(over="ignore", invalid="ignore"):
            gap = (top - value) / unit
            doubt = (self.error + self.error[first] + 2.0**-50 * (np.abs(self.value) + abs(top))) / unit
        if not doubt[near].max() <= 1e-9:
            at = np.nonzero(near)[0]
            scores = [self.exact(i) for i in at.tolist()]
            largest, gap = max(scores), np.where(near, 0.0, np.inf)
            gap[at] = [_float((largest - score) / Fraction(unit)) for score in scores]
            doubt, top = 2.0**-52 * gap, float(largest)
        return gap, np.where(near, doubt, 0.0), top

    def chains(self, ids: I64) -> tuple[I64, I64]:
        """ids by falling value, and where their chains of overlapping intervals start, the end included."""
        order = ids[np.lexsort((ids, -self.value[ids]))]
        low = np.minimum.accumulate((self.value - self.error)[order])
        high = np.maximum.accumulate((self.value + self.error)[order][::-1])[::-1]
        return order, np.concatenate([[0], np.nonzero(low[:-1] > high[1:])[0] + 1, [len(order)]])

    def sort(self, chain: I64) -> I64:
        """In exact order."""
        self.comparisons += len(chain)
        return np.array(sorted(chain.tolist(), key=lambda i: (-self.exact(i), i)), np.int64)

    def largest(self, count: int) -> list[int]:
        """The first ids of all in exact order."""
        order, starts = self.chains(np.nonzero(self.allowed)[0])
        out: list[int] = []
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            out += self.sort(order[first:last]).tolist() if last - first > 1 else [int(order[first])]
            if len(out) >= count:
                break
        return out[:count]

    def log_partition(self, temperature: float) -> tuple[float, float]:
        """Value and a bound on its error."""
        gap, doubt, top = self.gaps(temperature / self.spec.scale)
        top = top / (temperature / self.spec.scale)
        return top + math.log(float(np.exp(-gap).sum())), float(doubt[gap < 750].max()) + 1e-13 * (1 + abs(top))


def _float(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _verify_draw(draw: Draw, b: int, rows: _Rows) -> float:
    t, n = float(draw.temperature[b]), len(rows.value)
    ids = np.nonzero(rows.allowed)[0]
    got = int(draw.ids[b])
    if not 0 <= got < n or not rows.allowed[got]:
        raise VerificationError(f"state {b}: id {got} is not an allowed id below {n}")
    _, error = rows.logits()
    keep, starts = rows.chains(ids)

    def settle(at: int) -> None:
        """Puts the chain that holds position `at` in exact order."""
        first, last = (int(x) for x in starts[np.searchsorted(starts, at, "right") - 1 :][:2])
        if last - first > 1 and rows.error[keep[first:last]].any():
            keep[first:last] = rows.sort(keep[first:last])

    settle(0)
    best = last = int(keep[0])
    if draw.top_k[b] > 0:
        count = min(int(draw.top_k[b]), len(keep))
        settle(count - 1)
        last = int(keep[count - 1])
        while count < len(keep) and rows.compare(int(keep[count]), int(keep[count - 1])) == 0:
            count += 1
        keep, starts = keep[:count], np.append(starts[starts < count], count)
    unsure = np.zeros(len(keep), bool)  # closer to an edge than float64 can tell: ours to define
    filter_t = float(draw.filter_temperature[b]) / rows.spec.scale
    gap, doubt, _ = rows.gaps(filter_t)
    if draw.top_p[b] < 1:
        sums = np.concatenate([[0.0], np.cumsum(np.exp(-gap[keep]))])
        settle(int(np.clip(np.searchsorted(sums, draw.top_p[b] * sums[-1]) - 1, 0, len(keep) - 1)))
        before = np.concatenate([[0.0], np.cumsum(np.exp(-gap[keep]))[:-1]]) / sums[-1]
        unsure |= np.abs(before - draw.top_p[b]) < 1e-11 + 4 * float(doubt[gap < 750].max())
        inside = (before < draw.top_p[b]) | unsure
        keep, unsure = keep[inside], unsure[inside]
    if draw.min_p[b] > 0:
        edge = -math.log(draw.min_p[b])
        gap, doubt, _ = rows.gaps(filter_t, 1.01 * edge + 1)
        unsure |= np.abs(gap[keep] - edge) <= doubt[keep] + 1e-11 * (1 + edge)
        inside = (gap[keep] <= edge) | unsure
        keep, unsure = keep[inside], unsure[inside]
    unsure[keep == best] = False
    if got not in keep:
        raise VerificationError(f"state {b}: id {got} is outside of the set that top-k, top-p and min-p leave")
    noise = gumbel(int(draw.seed[b]), int(draw.stream[b]), int(draw.position[b]), np.arange(n))
    unit = t / rows.spec.scale
    factor = Fraction(t) / Fraction(rows.spec.scale)
    key = rows.value + unit * noise
    slack = rows.error + 2.0**-48 * (np.abs(rows.value) + unit * np.abs(noise))
    for i in keep[(key[keep] + slack[keep] >= key[got] - slack[got]) & ~unsure].tolist():
        if i == got:
            continue
        sign = rows.compare(i, got, (factor * Fraction(noise[i]), factor * Fraction(noise[got])))
        if sign > 0 or (sign == 0 and i < got):
            raise VerificationError(f"state {b}: the race goes to id {i}, not to id {got}")
    off = abs(float(rows.spec.finish(rows.value[got : got + 1])[0]) - float(draw.logits[b]))
    if not off <= 2 * error[got]:
        raise VerificationError(f"state {b}: the logit of id {got} is {off:.3g} away from its value")
    if draw.top_k[b] > 0:
        _check_certificate(draw.certificates[b], b, rows.allowed, rows.value, rows.error, last)
    else:
        _check_certificate(draw.certificates[b], b, rows.allowed, key, slack, got)
    return off


def _check_certificate(certificate: Certificate, b: int, allowed: Any, key: F64, slack: F64, last: int) -> None:
    """Keys of all rows; `last` has the one that the threshold bounds from below."""
    if not certificate.certified:
        return
    if certificate.max_unopened > -np.inf and not certificate.threshold > certificate.max_unopened:
        raise VerificationError(
            f"state {b}: threshold {certificate.threshold} is not above max_unopened {certificate.max_unopened}"
        )
    if certificate.threshold > key[last] + slack[last]:
        raise VerificationError(f"state {b}: threshold {certificate.threshold} is above {key[last]}")
    above = int(np.sum(allowed & (key - slack > certificate.max_unopened)))
    if certificate.rows_scored < above:
        raise VerificationError(
            f"state {b}: {above} rows are above max_unopened {certificate.max_unopened}, "
            f"but only {certificate.rows_scored} rows were scored"
        )


def _require_ids(b: int, ids: Any, rows: _Rows) -> None:
    if len(ids) == 0 or len(set(ids.tolist())) != len(ids) or ids.min() < 0 or ids.max() >= len(rows.value):
        raise VerificationError(f"state {b}: {ids.tolist()[:10]} are not distinct ids below {len(rows.value)}")
    if not rows.allowed[ids].all():
        raise VerificationError(f"state {b}: id {ids[~rows.allowed[ids]][0]} is not allowed")


def _verify_within(near: Within, b: int, rows: _Rows) -> float:
    ids, margin = near.ids[b], float(near.margin[b])
    unit = (margin or 1.0) / rows.spec.scale
    gap, doubt, top = rows.gaps(unit, 2.0)
    logits, error = rows.logits()
    _require_ids(b, ids, rows)
    edge = 1.0 if margin else 0.0
    slack = doubt + 1e-11 * (abs(top) / unit + edge)
    must, may = np.nonzero(gap + slack < edge)[0], gap <= edge + 4 * slack
    missing = np.setdiff1d(must, ids)
    if len(missing):
        raise VerificationError(f"state {b}: id {missing[0]} is missing, its logit is within {near.margin[b]}")
    if not may[ids].all():
        raise VerificationError(f"state {b}: an id is farther than {near.margin[b]} from the largest")
    off = np.abs(logits[ids] - near.logits[b])
    if not (off <= 2 * error[ids]).all():
        raise VerificationError(f"state {b}: a logit is {off.max():.3g} away from its value")
    if not (np.diff(near.logits[b]) <= 0).all():
        raise VerificationError(f"state {b}: the logits are not in order")
    largest = int(np.argmax(np.where(rows.allowed, rows.value + rows.error, -np.inf)))
    _check_certificate(near.certificates[b], b, rows.allowed, rows.value, rows.error, largest)
    return float(off.max())


def _verify_softmax(soft: Softmax, b: int, rows: _Rows) -> float:
    t = float(soft.temperature[b])
    gap, _, _ = rows.gaps(t / rows.spec.scale)
    _, error = rows.log_partition(t)
    _require_ids(b, soft.ids[b], rows)
    p = np.exp(-gap)
    q = np.zeros(len(p))
    q[soft.ids[b]] = soft.probabilities[b]
    if not (q >= 0).all() or not abs(q.sum() - 1) <= 1e-9:
        raise VerificationError(f"state {b}: the probabilities are not a distribution over distinct ids")
    distance = float(np.abs(p / p.sum() - q).sum()) / 2
    bound, certificate = float(soft.tv_bound[b]), soft.certificates[b]
    if not distance <= bound + 2 * error + 1e-12:
        raise VerificationError(f"state {b}: total variation {distance} is above its bound {bound}")
    if certificate.tv_bound != bound or (certificate.certified and not bound <= soft.epsilon[b]):
        raise VerificationError(f"state {b}: the certificate does not say the bound {bound}, or it is above epsilon")
    return 0.0


def _inside(b: int, what: str, low: F64, high: F64, value: F64, error: float, asked: float | None) -> None:
    if not ((low <= value + error) & (value - error <= high) & (low <= high)).all():
        raise VerificationError(f"state {b}: {what} {value} is not in [{low}, {high}]")
    if asked is not None and not (high - low <= asked).all():
        raise VerificationError(f"state {b}: certified, but wider than {asked}")


def _verify_log_partition(z: LogPartition, b: int, rows: _Rows) -> float:
    value, error = rows.log_partition(float(z.temperature[b]))
    asked = float(z.asked[b]) if z.certificates.certified[b] else None
    _inside(b, "the log partition", z.low[b], z.high[b], np.float64(value), error, asked)
    return 0.0


def _verify_log_probs(probs: LogProbs, b: int, rows: _Rows) -> float:
    value, error = rows.log_partition(1.0)
    logits, each = rows.logits()
    ids = probs.ids[b]
    if ids.min() < 0 or ids.max() >= len(logits):
        raise VerificationError(f"state {b}: an id is outside of 0 to {len(logits) - 1}")
    asked = float(probs.asked[b]) if probs.certificates.certified[b] else None
    off = error + float(each[ids].max())
    _inside(b, "a log-probability", probs.low[b], probs.high[b], logits[ids] - value, off, asked)
    if probs.top and ids.tolist() != rows.largest(len(ids)):
        raise VerificationError(f"state {b}: these are not the {len(ids)} largest, in order")
    return 0.0


def _verify_model_argmax(best: ModelArgmax, b: int, rows: _Rows) -> float:
    """By the smallest and largest logit that the head's arithmetic can give each row: is this id the first of the
    largest, whatever the roundings?"""
    got, kind, width = int(best.ids[b]), rows.spec.rows.kind, rows.spec.width
    if got < 0:
        return 0.0
    size, peak = np.abs(rows.h), 0.0
    sums = np.empty(len(rows.value))
    for first in range(0, len(sums), _CHUNK):
        part = slice(first, min(first + _CHUNK, len(sums)))
        weights = np.abs(rows.spec.rows.float32(part).astype(np.float64))
        sums[part], peak = weights @ size, max(peak, float(weights.max()))
    unit = (width + 1) * 2.0**-24
    floor = width * 2.0**-126 * (2 + peak + float(size.max()))
    off = sums * unit / (1 - unit) * (1 + 2.0**-30) + floor + rows.error
    off = np.where(sums < 2.0**126, off, np.inf)  # a partial sum may leave float32
    low, high = logit_interval(rows.value, off, kind)
    others = np.arange(len(low)) != got
    beaten = np.where(np.arange(len(low)) < got, high < low[got], high <= low[got]) | ~others
    # a row that ties for certain with a smaller id would win, one that may tie is open
    if not beaten.all():
        raise VerificationError(f"state {b}: id {int(np.argmin(beaten))} may have the larger logit, not id {got}")
    return abs(float(rows.value[got] - best.logits[b]))


def _verify_top_k(top: TopK, b: int, rows: _Rows) -> float:
    ids = np.asarray(top.ids[b])
    spec, value, error = rows.spec, rows.value, rows.error
    n, k = len(value), min(whole("k", top.k, 1, len(value)), int(rows.allowed.sum()))

    def fail(what: str) -> VerificationError:
        return VerificationError(f"state {b}: {what}")

    if k < top.k and not isinstance(top.ids, list):
        if (ids[k:] != -1).any() or (np.asarray(top.logits[b])[k:] != -np.inf).any():
            raise fail(f"only {k} ids are allowed, so what follows them should be -1")
        ids = ids[:k]
    if (
        (len(ids) > k and not isinstance(top.ids, list))
        or len(ids) < k
        or len(set(ids.tolist())) != len(ids)
        or ids.min() < 0
        or ids.max() >= n
    ):
        raise fail(f"ids {ids.tolist()[:10]} are not {k} distinct ids below {n}")
    if not rows.allowed[ids].all():
        raise fail(f"id {ids[~rows.allowed[ids]][0]} is not allowed")
    for i, j in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
        sign = rows.compare(i, j)
        if sign < 0 or (sign == 0 and i > j):
            raise fail(f"id {i} stands before id {j}, which has {'the larger logit' if sign < 0 else 'the smaller id'}")
    last = int(ids[k - 1])
    others = rows.allowed.copy()
    others[ids] = False
    near = np.nonzero(others & (value + error >= value[last] - error[last]))[0]
    with_ties = isinstance(top.ids, list)
    for j in near.tolist():
        sign = rows.compare(j, last)
        if sign > 0 or (sign == 0 and (with_ties or j < last)):
            raise fail(f"id {j} is missing: its logit is {'above' if sign > 0 else 'equal to'} that of id {last}")
    for extra in ids[k:].tolist():
        if rows.compare(extra, last) != 0:
            raise fail(f"id {extra} is no tie of id {last}")
    stated = float(top.logit_error[b])
    off = np.abs(spec.finish(value[ids]) - np.asarray(top.logits[b])[: len(ids)])
    allowed = (stated + error[ids]) * spec.scale + 1e-12 * np.abs(spec.finish(value[ids]))
    if not (np.isfinite(stated) and stated >= 0 and (off <= allowed).all()):  # NaN is no logit
        raise fail(f"a logit is {off.max():.3g} away from its value, stated error {stated:.3g}")
    certificate = top.certificates[b]
    if certificate.certified:
        if not certificate.threshold > certificate.max_unopened and certificate.max_unopened > -np.inf:
            raise fail(f"threshold {certificate.threshold} is not above max_unopened {certificate.max_unopened}")
        if certificate.threshold > value[last] + error[last]:
            raise fail(f"threshold {certificate.threshold} is above the k-th score {value[last]}")
        above = int(np.sum(rows.allowed & (value - error > certificate.max_unopened)))
        if certificate.rows_scored < above:
            raise fail(
                f"{above} rows have scores above max_unopened {certificate.max_unopened}, "
                f"but only {certificate.rows_scored} rows were scored"
            )
    return float(off.max())


_CHECKS: dict[type[Any], Callable[[Any, int, _Rows], float]] = {
    TopK: _verify_top_k,
    Draw: _verify_draw,
    Within: _verify_within,
    Softmax: _verify_softmax,
    LogPartition: _verify_log_partition,
    LogProbs: _verify_log_probs,
    ModelArgmax: _verify_model_argmax,
}
