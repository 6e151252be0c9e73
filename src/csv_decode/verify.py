"""The sceptic's checker: is this really the top-k? It shares no code with the cascade and reads no index."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .certificate import Certificate, Certificates, TopK
from .kernels import require_ieee
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


def verify(top: TopK, hidden: Array, spec: HeadSpec | Array) -> VerificationReport:
    """Checks a `top_k` result against all rows of the head, in exact arithmetic where it matters.

    A float64 product of every row with every state, with the bound ``gamma(d + 2) sum |w_j h_j|`` on its error, decides
    all comparisons that are clear; the others are decided by exact rational sums. Checked for each state: the ids
    are distinct and valid; they are in order (larger logit, then smaller id); no other row beats the last of them;
    logits are within their stated error; with ties, all rows equal to the k-th are there; a certificate that claims to
    be certified has threshold > max_unopened, no returned score below threshold, and has scored as many rows as have a
    score above max_unopened.

    Returns a report, or raises VerificationError naming the state and the rows. ValueError for weights or states that
    are no finite numbers, and for a `top` that is no `TopK`.
    """
    require_ieee()
    if not isinstance(top, TopK):
        raise ValueError(f"top is {type(top).__name__}, expected the TopK that top_k returned")
    spec = HeadSpec.of(spec)
    spec.require_finite()
    h = as_states(hidden, spec.width)
    n, width = spec.n_rows, spec.width
    results = _results(top, len(h), n)
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
        comparisons += _verify_state(top, results[b], b, h[b], spec, bias, value[b], error[b])
        worst = max(worst, float(np.max(np.abs(spec.finish(value[b, results[b].ids]) - results[b].logits))))
    return VerificationReport(len(h), n, comparisons, worst)


@dataclass(frozen=True)
class _Result:
    """What is claimed of one state."""

    ids: I64
    logits: F64
    stated: float
    certificate: Certificate


def _results(top: TopK, states: int, n: int) -> list[_Result]:
    """The claims of a result, state by state; VerificationError where it is not even of the form of one."""
    try:
        k = whole("k", top.k, 1, n)
        if not isinstance(top.certificates, Certificates):
            raise TypeError("certificates are no Certificates")
        columns = [top.certificates.certified, top.certificates.threshold, top.certificates.max_unopened]
        columns += [top.certificates.rows_scored, top.logit_error]
        shape = (len(top.ids),)
        if not all(isinstance(x, np.ndarray) and x.shape == shape and x.dtype.kind in "biuf" for x in columns):
            raise TypeError("certificates and logit_error are not one number a state")
        if len(top.ids) != states or len(top.logits) != states:
            raise ValueError(f"result has {len(top.ids)} states, but {states} were given")
        out = []
        for b in range(states):
            ids, logits = np.asarray(top.ids[b]), np.asarray(top.logits[b])
            if ids.ndim != 1 or ids.dtype.kind not in "iu" or logits.shape != ids.shape or logits.dtype.kind != "f":
                raise TypeError(f"state {b}: ids and logits are not rows of the same length")
            right = len(ids) == k or (len(ids) > k and isinstance(top.ids, list))
            if not right or len(set(ids.tolist())) != len(ids) or ids.min() < 0 or ids.max() >= n:
                raise ValueError(f"state {b}: ids {ids.tolist()[:10]} are not {k} distinct ids below {n}")
            certificate = top.certificates[b]
            out.append(_Result(ids.astype(np.int64), logits.astype(np.float64), float(top.logit_error[b]), certificate))
    except Exception as error:
        raise VerificationError(f"this is no result of top_k: {error}"[:500]) from None
    return out


def _verify_state(top: TopK, result: _Result, b: int, h: F64, spec: HeadSpec, bias: F64, value: F64, error: F64) -> int:
    ids, k = result.ids, int(top.k)
    n = len(value)

    def fail(what: str) -> VerificationError:
        return VerificationError(f"state {b}: {what}")

    count, mine = 0, set(ids.tolist())
    returned: dict[int, Fraction] = {}

    def exact(i: int) -> Fraction:
        if i in returned:
            return returned[i]
        row = spec.rows.float32(np.array([i]))[0].astype(np.float64)
        score = _exact(row, h, float(bias[i]))
        if i in mine:
            returned[i] = score
        return score

    def compare(i: int, j: int) -> int:
        """Sign of score_i - score_j."""
        nonlocal count
        if abs(value[i] - value[j]) > error[i] + error[j]:
            return 1 if value[i] > value[j] else -1
        count += 1
        difference = exact(i) - exact(j)
        return (difference > 0) - (difference < 0)

    for i, j in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
        sign = compare(i, j)
        if sign < 0 or (sign == 0 and i > j):
            raise fail(f"id {i} stands before id {j}, which has {'the larger logit' if sign < 0 else 'the smaller id'}")
    last = int(ids[k - 1])
    others = np.ones(n, bool)
    others[ids] = False
    near = np.nonzero(others & (value + error >= value[last] - error[last]))[0]
    with_ties = isinstance(top.ids, list)
    for j in near.tolist():
        sign = compare(j, last)
        if sign > 0 or (sign == 0 and (with_ties or j < last)):
            raise fail(f"id {j} is missing: its logit is {'above' if sign > 0 else 'equal to'} that of id {last}")
    for extra in ids[k:].tolist():
        if compare(extra, last) != 0:
            raise fail(f"id {extra} is no tie of id {last}")
    stated = result.stated
    off = np.abs(spec.finish(value[ids]) - result.logits)
    allowed = (stated + error[ids]) * spec.scale + 1e-12 * np.abs(spec.finish(value[ids]))
    if not (np.isfinite(stated) and stated >= 0 and (off <= allowed).all()):  # NaN is no logit
        raise fail(f"a logit is {off.max():.3g} away from its value, stated error {stated:.3g}")
    certificate = result.certificate
    if certificate.certified:
        if not certificate.threshold > certificate.max_unopened:
            raise fail(f"threshold {certificate.threshold} is not above max_unopened {certificate.max_unopened}")
        if certificate.threshold > value[last] + error[last]:
            raise fail(f"threshold {certificate.threshold} is above the k-th score {value[last]}")
        above = int(np.sum(value - error > certificate.max_unopened))
        if certificate.rows_scored < above:
            raise fail(
                f"{above} rows have scores above max_unopened {certificate.max_unopened}, "
                f"but only {certificate.rows_scored} rows were scored"
            )
    return count
