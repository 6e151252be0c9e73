"""A sampled part of `benchmarks/soundness.py`, the tests of its reference sums, and what it has found."""

from __future__ import annotations

import importlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode.exact import gaps, precedes
from csv_decode.kernels.native import supported
from csv_decode.narrow import sum_error

from .conftest import make_head
from .exactly import exact_logits


@pytest.fixture
def soundness(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("soundness")


def modes_of(soundness: Any) -> Any:
    return importlib.import_module("soundness_modes")


@pytest.mark.unsanitized
def test_no_bound_fails_on_drawn_heads(soundness: Any) -> None:
    report = soundness.Report()
    soundness.adversarial(report, 250_000, seed=1)
    assert report.violations == 0, report.findings
    assert report.pairs >= 250_000
    assert report.lines["plane 0"].tightest > 0.98, "states that do not come near a bound do not test it"
    assert report.lines["scores"].tightest > 0.2


@pytest.mark.slow
def test_no_bound_fails_on_more_of_them(soundness: Any) -> None:
    report = soundness.Report()
    soundness.adversarial(report, 1_500_000, seed=2)
    assert report.violations == 0, report.findings


@pytest.mark.unsanitized
def test_modes_are_those_of_exact_fractions(soundness: Any) -> None:
    report = soundness.Report()
    modes_of(soundness).run(report, np.random.default_rng(5), 7)
    assert report.violations == 0, report.findings


@pytest.mark.slow
def test_modes_are_those_of_exact_fractions_on_more_heads(soundness: Any) -> None:
    report = soundness.Report()
    modes_of(soundness).run(report, np.random.default_rng(6), 50)
    assert report.violations == 0, report.findings


@pytest.mark.parametrize("way", ["paired", "sliced"])
def test_reference_sums_are_as_close_as_they_say(soundness: Any, way: str) -> None:
    heads = importlib.import_module("soundness_heads")
    rng = np.random.default_rng(0)
    for kind in heads.KINDS:
        weight = heads.rows_of(rng, kind, 20, 17)
        h = rng.standard_normal((3, 17)) * 10.0 ** rng.integers(-30, 30, (3, 17))
        truth = getattr(soundness, way)(weight, h)
        shift = np.broadcast_to(truth.shift, truth.hi.shape)
        for b, i in np.ndindex(3, 20):
            true = truth.exact(b, i) * Fraction(2) ** int(shift[b, i])
            off = abs(Fraction(truth.hi[b, i]) + Fraction(truth.lo[b, i]) - true)
            assert off <= Fraction(truth.doubt[b, i]), (kind, b, i)


def test_a_violation_is_counted(soundness: Any) -> None:
    """Bounds that are a little too small must not pass."""
    weight, states = make_head(200, 20)
    h = states[:3].astype(np.float64)
    truth, report = soundness.paired(weight, h), soundness.Report()
    score = h @ weight.T.astype(np.float64)
    for off in (1e-3, -1e-3):
        upper = (score + off).astype(np.float32)
        soundness.check_bounds(report, f"{off}", upper - np.float32(1), upper, truth, True, "")
    assert report.lines["0.001"].violations == 0
    assert report.lines["-0.001"].violations == truth.hi.size
    assert report.violations == truth.hi.size


# What it has found.


def cancelling(width: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row 1 has the score 1e10, and float64 says 0: 1e30 + 1e10 - 1e30. Row 0 has 1e5."""
    rng = np.random.default_rng(0)
    weight = np.zeros((300, width), np.float32)
    weight[:, 1] = rng.standard_normal(300)
    weight[0, 1] = 1e5
    weight[1] = 0
    weight[1, [0, 8, 4]] = 1e30, 1e10, -1e30
    return weight, np.ones((1, width), np.float32), rng.standard_normal((64, width)).astype(np.float32)


@pytest.mark.usefixtures("cascade")
@pytest.mark.parametrize("kernels", [*supported(), "reference", "dense"])
def test_scores_that_cancel_keep_their_share_of_the_softmax(kernels: str) -> None:
    """The row's value was 750 temperatures below the largest, so its error did not count."""
    weight, h, calibration = cancelling()
    if kernels == "dense":
        head = cd.CertifiedHead(None, weight)
    else:
        head = cd.CertifiedHead(cd.build_index(weight, calibration, seed=0), weight, budget=None, kernels=kernels)
    logits = exact_logits(weight, h[0])
    assert max(logits) == logits[1] == 10_000_000_000
    z = head.log_partition(h)
    assert z.low[0] <= 1e10 <= z.high[0]
    soft = head.softmax(h, 0.05)
    assert soft.ids[0][0] == 1
    assert soft.probabilities[0][0] == 1.0
    probs = head.log_probs(h, np.array([[0, 1]]))
    assert probs.low[0, 0] <= 1e5 - 1e10 <= probs.high[0, 0]
    near = head.within(h, 1.0)
    assert near.ids[0].tolist() == [1]
    for more in ({"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.9}, {"top_k": 3, "min_p": 0.9}):
        draw = head.sample(h, seed=0, **more)
        assert draw.ids[0] == 1, more
        cd.verify(draw, h, weight)
    for result in (z, soft, probs, near):
        cd.verify(result, h, weight)


def test_verify_sees_what_cancels() -> None:
    """The checker left the row out in the same way."""
    weight, h, _ = cancelling()
    head = cd.CertifiedHead(None, weight)
    z = head.log_partition(h)
    z.low[:], z.high[:] = 99999.0, 100001.0
    soft = head.softmax(h, 0.05)
    soft.ids[0], soft.probabilities[0] = np.array([0, 1]), np.array([1.0, 0.0])
    draw = head.sample(h, top_p=0.9, seed=0)
    draw.ids[0], draw.logits[0] = 0, 1e5
    near = head.within(h, 1.0)
    near.ids[0], near.logits[0] = np.array([0, 1]), np.array([1e5, 1e10])
    for wrong in (z, soft, draw, near):
        with pytest.raises(cd.VerificationError):
            cd.verify(wrong, h, weight)


def test_the_order_at_the_edge_of_the_nucleus_is_exact() -> None:
    """Two rows a hundredth of an ulp apart: the larger, with the larger id, comes first, and is all that top_p = 0.3
    leaves."""
    weight = np.zeros((300, 3), np.float32)
    weight[:, 0] = -5
    weight[10] = 1, 0, 0
    weight[20] = 1, 1e-18, 0
    h = np.ones((1, 3), np.float32)
    head = cd.CertifiedHead(None, weight)
    for seed in range(8):
        draw = head.sample(h, top_p=0.3, seed=seed)
        assert draw.ids[0] == 20
        cd.verify(draw, h, weight)
        draw = head.sample(h, 1e-19, top_p=0.6, seed=seed)
        assert draw.ids[0] == 20
        cd.verify(draw, h, weight)


@pytest.mark.usefixtures("cascade")
@pytest.mark.parametrize("kernels", [*supported(), "reference"])
def test_scores_beyond_float32_have_a_softmax(kernels: str) -> None:
    """No centre was a number, so no row was scored, and the largest of none was asked for; and the reference kernels
    left rows with a bound of NaN out of the mass."""
    weight, states = make_head(300, 24)
    weight = -np.abs(weight)
    index = cd.build_index(weight, states[:32], seed=0)
    head = cd.CertifiedHead(index, weight, budget=None, kernels=kernels)
    h = np.full((2, 24), 3e38, np.float32)
    cd.verify(head.log_partition(h), h, weight)
    cd.verify(head.softmax(h, 0.1), h, weight)
    cd.verify(head.sample(h, 1e30, top_p=0.9, seed=0), h, weight)


@pytest.mark.usefixtures("cascade")
def test_a_mask_smaller_than_top_k_has_a_threshold() -> None:
    weight, states = make_head(3000, 24)
    head = cd.CertifiedHead(cd.build_index(weight, states[:32], seed=0), weight)
    allowed = np.zeros(3000, bool)
    allowed[[5, 7, 2000]] = True
    draw = head.sample(states[:2], top_k=50, seed=0, allowed=allowed)
    assert np.isfinite(draw.certificates.threshold).all()
    assert draw.certificates[0].margin == np.inf
    cd.verify(draw, states[:2], weight)


def test_gaps_and_order_are_exact() -> None:
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((30, 9)) * 10.0 ** rng.integers(-30, 30, (30, 9))).astype(np.float32)
    weight[5] = weight[3]
    h, bias = rng.standard_normal(9), rng.standard_normal(30).astype(np.float32)
    true = exact_logits(weight, h, bias)
    gap, score = gaps(weight, h, bias, 0.3)
    assert gap.tolist() == [float((max(true) - x) / Fraction(0.3)) for x in true]
    assert score.tolist() == [float(x) for x in true]
    ids = np.arange(30)
    for token in (0, 3, 5):
        want = [(true[i], -i) > (true[token], -token) for i in range(30)]
        assert precedes(ids, token, h, lambda at: weight[at], bias).tolist() == want
    assert gaps(weight, h, bias, 1e-320)[0].max() == np.inf


def test_a_flushed_subnormal_is_within_the_bound_of_narrow_arithmetic() -> None:
    """bfloat16 instructions take subnormal numbers for zero, and a large state makes much of them."""
    weight, h = np.full(64, 1e-39), np.full(64, 1e30)
    alpha = sum_error(64, np.array(weight @ h), float(weight.max() + h.max()))
    assert alpha >= weight @ h


@pytest.mark.usefixtures("cascade")
def test_partial_sums_that_overflow_decide_nothing() -> None:
    """torch says infinity, or NaN, for a score of 1e33 that is what is left of products of 1e38."""
    torch = pytest.importorskip("torch")
    weight, _ = make_head(300, 24)
    weight[7] = 0
    weight[7, :4] = 3e38, 3e38, -3e38, -3e38
    weight[7, 4] = 1e4
    head = cd.CertifiedHead(None, weight)
    h = np.ones((1, 24), np.float32)
    assert not torch.isfinite(torch.nn.functional.linear(torch.from_numpy(h), torch.from_numpy(weight))[0, 7])
    assert head.model_argmax(h).ids[0] == -1
