"""Sampling, softmax, partition and masks: against dense references that share nothing with the scan."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import csv_decode as cd
from csv_decode import _native, noise
from csv_decode.kernels.native import supported

from .conftest import KINDS, make_head
from .exactly import exact_logits

# (The sanitizers run test_ledger.py, which calls the same native code.)
pytestmark = [pytest.mark.usefixtures("cascade"), pytest.mark.unsanitized]


def serve(weight: Any, states: np.ndarray, **more: Any) -> cd.CertifiedHead:
    index = cd.build_index(weight, states, seed=0, threads=1)
    return cd.CertifiedHead(index, weight, **{"budget": None, **more})


def peaked(rows: int = 3000, width: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """A head whose softmax is neither flat nor a point."""
    weight, states = make_head(rows, width)
    return weight, states * np.float32(2.0)


def dense_set(logits: np.ndarray, top_k: int, top_p: float, min_p: float, t: float) -> np.ndarray:
    """top-k with ties, top-p of what is left, min-p: as transformers applies them, in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k:
        order = order[logits[order] >= logits[order[min(top_k, len(order)) - 1]]]
    weight = np.exp((logits[order] - logits[order[0]]) / t)
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]]) / weight.sum()
    order = order[before < top_p]
    return order[(logits[order] - logits[order[0]]) / t >= np.log(min_p)] if min_p else order


# The noise.


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123 (kat_vectors: philox4x32, 10 rounds)."""
    words = noise.philox(0, (np.zeros(1, np.uint64), 0, 0, 0))
    assert [int(w[0]) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = 2**32 - 1
    words = noise.philox(2**64 - 1, (np.array([full], np.uint64), full, full, full))
    assert [int(w[0]) for w in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    # digits of pi
    key, counter = (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    words = noise.philox(key[0] | key[1] << 32, (np.array([counter[0]], np.uint64), *counter[1:]))
    assert [int(w[0]) for w in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("key", [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (123456789, 3, 77)])
def test_native_noise_is_the_definition_and_below_its_bound(key: tuple[int, int, int]) -> None:
    seed, stream, position = key
    ids = np.arange(70001)
    defined = noise.gumbel(seed, stream, position, ids)
    assert (np.asarray(_native.gumbel(seed, stream, position, ids)) == defined).all()
    for isa in supported():
        for temperature in (1e-30, 0.3, 1.0, 1e30):
            raised = np.float32(temperature * (1 + 2.0**-19))
            bound = np.empty(len(ids), np.float32)
            _native.noise_bound(isa, seed, stream, position, float(raised), bound)
            assert (bound.astype(np.float64) >= temperature * defined).all()
            assert (bound >= 0).all()


def test_the_noise_is_gumbel() -> None:
    """Kolmogorov-Smirnov over 2^18 tokens, and no correlation between neighbours, positions or streams."""
    ids = np.arange(1 << 18)
    g = noise.gumbel(5, 0, 0, ids)
    u = np.sort(np.exp(-np.exp(-g)))
    assert np.abs(u - (np.arange(len(u)) + 0.5) / len(u)).max() < 1.95 / np.sqrt(len(u))  # p = 0.001
    for other in (np.roll(g, 1), noise.gumbel(5, 0, 1, ids), noise.gumbel(5, 1, 0, ids), noise.gumbel(6, 0, 0, ids)):
        assert abs(np.corrcoef(g, other)[0, 1]) < 4 / np.sqrt(len(g))


def test_log_is_within_four_ulp() -> None:
    from decimal import Decimal, getcontext

    getcontext().prec = 40
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.random(300), 2.0 ** -rng.integers(1, 60, 300).astype(float) * rng.random(300), [1 - 2.0**-53]]
    )
    for value, got in zip(x.tolist(), noise.log(x).tolist(), strict=True):
        assert abs(float(Decimal(got) - Decimal(value).ln())) <= 4 * np.spacing(abs(got))


def test_bounds_of_sums_and_masses_hold() -> None:
    rng = np.random.default_rng(0)
    upper = np.concatenate(
        [rng.standard_normal(5000) * 20, [-np.inf, 0.0, 3e38, -3e38, 1e-45, np.float32(1e30)]]
    ).astype(np.float32)
    extra = (rng.standard_normal(len(upper)) * 5).astype(np.float32)
    for isa in supported():
        out = np.empty_like(upper)
        _native.add_bound(isa, upper, extra, out)
        assert (out >= upper.astype(np.float64) + extra).all()
        assert out[5000] == -np.inf
        finite = upper[:5000]
        for rate in (0.01, 1.4427, 100.0):
            start = float(finite.max())
            bins = np.asarray(_native.mass_bound(isa, finite, start, rate))
            true = np.exp2((finite.astype(np.float64) - start) * float(np.float32(rate)))
            assert true.sum() <= bins.sum() <= 1.07 * true.sum() + len(finite) * 2.0**-63
            for j in range(0, 120, 7):  # rows with an exponent above -j / 2 are in the first bins
                assert true[(finite - start) * rate > -j / 2 + 1e-3].sum() <= bins[: j + 1].sum()
        odd = np.array([np.nan, np.inf], np.float32)
        assert np.asarray(_native.mass_bound(isa, odd, 0.0, 1.0)).sum() == np.inf


# Sampling.


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
def test_a_draw_is_that_of_the_dense_race(kernels: str) -> None:
    weight, states = peaked()
    head = serve(weight, states[:32], kernels=kernels)
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    ids = np.arange(len(weight))
    for t in (0.05, 0.3, 1.0, 1.5, 50.0):
        draw = head.sample(states[32:48], temperature=t, seed=11, position=5, stream=2)
        for b in range(16):
            race = logits[32 + b] + t * noise.gumbel(11, 2 + b, 5, ids)
            assert draw.ids[b] == race.argmax()
            assert abs(draw.logits[b] - logits[32 + b, draw.ids[b]]) < 1e-10
        assert draw.certificates.certified.all()
        cd.verify(draw, states[32:48], weight)


@pytest.mark.parametrize(
    "settings_",
    [
        (50, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.5, 0.0),
        (0, 1.0, 0.05),
        (0, 0.95, 0.02),
        (50, 0.9, 0.05),
        (1, 1.0, 0.0),
        (0, 1.0, 1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernels", [supported()[-1], "reference"])
def test_filters_leave_the_set_that_transformers_leaves(settings_: tuple[int, float, float], kernels: str) -> None:
    top_k, top_p, min_p = settings_
    weight, states = peaked(1500)
    head = serve(weight, states[:32], kernels=kernels)
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    for t in (0.7, 1.3):
        draw = head.sample(states, t, top_k, top_p, min_p, seed=3, position=1)
        for b in range(len(states)):
            keep = dense_set(logits[b], top_k, top_p, min_p, t)
            race = logits[b, keep] + t * noise.gumbel(3, b, 1, keep)
            assert draw.ids[b] == keep[race.argmax()], (b, t)
        cd.verify(draw, states, weight)
        last = head.sample(states, t, top_k, top_p, min_p, seed=3, position=1, filter_temperature=1.0)
        for b in range(len(states)):
            keep = dense_set(logits[b], top_k, top_p, min_p, 1.0)
            race = logits[b, keep] + t * noise.gumbel(3, b, 1, keep)
            assert last.ids[b] == keep[race.argmax()], (b, t)
        cd.verify(last, states, weight)


def test_every_state_has_its_own_parameters() -> None:
    weight, states = peaked(1500)
    head = serve(weight, states[:32])
    columns = {
        "temperature": np.array([0.5, 1.0, 2.0, 0.7]),
        "top_k": np.array([0, 5, 0, 50]),
        "top_p": np.array([1.0, 0.9, 0.8, 1.0]),
        "min_p": np.array([0.1, 0.0, 0.0, 0.2]),
        "seed": np.array([1, 2, 2**64 - 1, 4], np.uint64),
        "position": np.array([9, 8, 7, 6]),
        "stream": np.array([0, 5, 0, 1]),
    }
    together = head.sample(states[:4], **columns)
    for b in range(4):
        alone = head.sample(states[b], **{name: value[b : b + 1] for name, value in columns.items()})
        assert alone.ids[0] == together.ids[b]
    cd.verify(together, states[:4], weight)


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 20,000 draws of one state."""
    weight, states = peaked(400, 24)
    head = serve(weight, states[:32])
    h, n = states[40], 20000
    p = np.exp(weight.astype(np.float64) @ h)
    p /= p.sum()
    drawn = np.concatenate([head.sample(np.repeat(h[None], 500, 0), seed=1, position=i).ids for i in range(n // 500)])
    counts, expected = np.bincount(drawn, minlength=len(p)), n * p
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    chi = ((seen - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom)


def test_scale_and_bias_are_part_of_the_race() -> None:
    weight, states = peaked(800)
    bias = np.random.default_rng(0).standard_normal(800).astype(np.float32)
    spec = cd.HeadSpec(weight, bias, scale=0.3, valid_rows=790)
    head = serve(spec, states[:32])
    logits = 0.3 * (states.astype(np.float64) @ weight.astype(np.float64).T + bias)[:, :790]
    draw = head.sample(states, 0.8, seed=7)
    for b in range(len(states)):
        assert draw.ids[b] == (logits[b] + 0.8 * noise.gumbel(7, b, 0, np.arange(790))).argmax()
    cd.verify(draw, states, spec)
    z = head.log_partition(states)
    assert (z.low <= np.log(np.exp(logits).sum(1))).all()
    assert (np.log(np.exp(logits).sum(1)) <= z.high).all()


def test_equal_rows_race_by_their_noise_alone() -> None:
    weight, states = make_head(600, 24, kind="duplicate")
    head = serve(weight, states[:32])
    draw = head.sample(states, 0.5, seed=1)
    cd.verify(draw, states, weight)
    flat = head.sample(np.zeros((3, 24), np.float32), seed=1)  # all logits are 0
    for b in range(3):
        assert flat.ids[b] == noise.gumbel(1, b, 0, np.arange(600)).argmax()


@pytest.mark.parametrize("kind", KINDS)
def test_modes_hold_for_every_kind_of_head(kind: str) -> None:
    weight, states = make_head(300, 24, kind=kind)
    head = serve(weight, states[:32])
    few = states[32:36]
    scale = max(1e-3, float(np.abs(few.astype(np.float64) @ weight.astype(np.float64).T).max()))
    t = float(np.clip(scale / 8, 1e-4, 1e4))
    for draw in (
        head.sample(few, float(np.clip(scale / 8, 1e-30, 1e29)), seed=0),
        head.sample(few, t, top_p=0.9, seed=1),
        head.sample(few, t, min_p=0.1, seed=1),
        head.sample(few, t, 7, 0.8, 0.1, seed=2),
    ):
        cd.verify(draw, few, weight)
    cd.verify(head.softmax(few, 0.1, t), few, weight)
    cd.verify(head.log_partition(few, 0.01, t), few, weight)
    cd.verify(head.within(few, 3 * t), few, weight)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_arbitrary_small_heads_draw_what_exact_arithmetic_draws(data: st.DataObject) -> None:
    from fractions import Fraction

    rows, width = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 6))
    number = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1.0 + 2.0**-23, 2.0, -3.0, 1e-20])
    row = st.lists(number, min_size=width, max_size=width)
    weight = np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)), np.float32)
    h = np.array(data.draw(row), np.float32)
    t = data.draw(st.sampled_from([0.25, 1.0, 3.0, 1e-6]))
    seed = data.draw(st.integers(0, 2**64 - 1))
    head = serve(weight, np.concatenate([np.eye(width, dtype=np.float32), h[None]]))
    g = noise.gumbel(seed, 0, 0, np.arange(rows))
    race = [logit + Fraction(t) * Fraction(float(x)) for logit, x in zip(exact_logits(weight, h), g, strict=True)]
    draw = head.sample(h, t, seed=seed)
    assert draw.ids[0] == min(range(rows), key=lambda i: (-race[i], i))
    cd.verify(draw, h, weight)


# Softmax and partition.


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
def test_softmax_is_within_epsilon(kernels: str) -> None:
    weight, states = peaked()
    head = serve(weight, states[:32], kernels=kernels)
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    for epsilon in (0.3, 0.05, 1e-3, 1e-6):
        for t in (0.5, 1.0, 2.0):
            soft = head.softmax(states[32:44], epsilon, t)
            for b in range(12):
                p = np.exp((logits[32 + b] - logits[32 + b].max()) / t)
                p /= p.sum()
                q = np.zeros(len(p))
                q[soft.ids[b]] = soft.probabilities[b]
                assert np.abs(p - q).sum() / 2 <= soft.tv_bound[b] <= epsilon
            assert soft.certificates.certified.all()
            assert soft.certificates[0].tv_bound == soft.tv_bound[0]
            cd.verify(soft, states[32:44], weight)


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
def test_log_partition_is_inside_its_interval(kernels: str) -> None:
    weight, states = peaked()
    head = serve(weight, states[:32], kernels=kernels)
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    for width in (1.0, 1e-3, 1e-9):
        for t in (0.7, 1.0):
            z = head.log_partition(states, width, t)
            true = np.log(np.exp(logits / t - (logits / t).max(1, keepdims=True)).sum(1)) + (logits / t).max(1)
            assert (z.low - 1e-12 <= true).all()
            assert (true <= z.high + 1e-12).all()
            assert (z.width <= width).all()
            assert z.certificates.certified.all()
            cd.verify(z, states, weight)


def test_log_probs_and_their_order() -> None:
    weight, states = peaked()
    head = serve(weight, states[:32])
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    true = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    top = head.top_log_probs(states, 8, 1e-3)
    assert (top.ids == head.top_k(states, 8).ids).all()
    chosen = head.log_probs(states, np.tile([5, 0, 5, 2999], (len(states), 1)))
    for probs in (top, chosen):
        value = np.take_along_axis(true, probs.ids, 1)
        assert (probs.low <= value).all()
        assert (value <= probs.high).all()
        assert (probs.high - probs.low <= 1e-3).all()
        cd.verify(probs, states, weight)
    assert head.log_probs(states, np.arange(len(states))).ids.shape == (len(states), 1)


def test_perplexity_has_an_error_bar() -> None:
    weight, states = peaked()
    targets = np.random.default_rng(0).integers(0, len(weight), len(states))
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    true = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = np.exp(-true[np.arange(len(states)), targets].mean())
    seen = []
    found = cd.perplexity(weight, states, targets, batch=10, progress=lambda done, total: seen.append((done, total)))
    assert found.low <= expected <= found.high
    assert found.relative_width < 1e-8
    assert found.tokens == len(states)
    assert seen[-1] == (len(states), len(states))


def test_within_finds_all_that_min_p_keeps() -> None:
    weight, states = peaked()
    head = serve(weight, states[:32])
    logits = states.astype(np.float64) @ weight.astype(np.float64).T
    near = head.within(states, 2.5)
    for b in range(len(states)):
        assert set(near.ids[b]) == set(np.nonzero(logits[b] >= logits[b].max() - 2.5)[0])
    cd.verify(near, states, weight)


def test_chosen_scores_are_exact() -> None:
    weight, states = peaked(300)
    head = serve(weight, states[:32])
    ids = np.tile([3, 3, 299, 0], (len(states), 1))
    found = head.scores(states, ids)
    value = np.take_along_axis(states.astype(np.float64) @ weight.astype(np.float64).T, ids, 1)
    assert np.abs(found.logits - value).max() <= found.error.max() + 1e-12


# Masks.


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
def test_masks_restrict_every_mode(share: float, kernels: str) -> None:
    weight, states = peaked(5000)
    head = serve(weight, states[:32], kernels=kernels)
    rng = np.random.default_rng(0)
    few = states[32:38]
    mask = rng.random((len(few), len(weight))) < share
    mask[:, 17] = True
    logits = np.where(mask, few.astype(np.float64) @ weight.astype(np.float64).T, -np.inf)
    words = np.packbits(mask, axis=1, bitorder="little")
    words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4))).view(np.int32)
    for allowed in (mask, words):
        top = head.top_k(few, 10, allowed=allowed)
        for b in range(len(few)):
            count = min(10, int(mask[b].sum()))
            assert top.ids[b, :count].tolist() == np.argsort(-logits[b])[:count].tolist()
            assert (top.ids[b, count:] == -1).all()
            assert (top.logits[b, count:] == -np.inf).all()
        assert top.certificates.certified.all()
        cd.verify(top, few, weight)
        ragged = head.top_k(few, 10, ties=True, allowed=allowed)
        cd.verify(ragged, few, weight)
        draw = head.sample(few, allowed=allowed, seed=0)
        assert draw.ids.tolist() == [
            (logits[b] + noise.gumbel(0, b, 0, np.arange(len(weight)))).argmax() for b in range(len(few))
        ]
        cd.verify(draw, few, weight)
        cd.verify(head.sample(few, top_p=0.8, min_p=0.01, allowed=allowed, seed=0), few, weight)
        cd.verify(head.softmax(few, 0.01, allowed=allowed), few, weight)
        cd.verify(head.log_partition(few, allowed=allowed), few, weight)
        cd.verify(head.within(few, 1.0, allowed=allowed), few, weight)
    one = head.top_k(few, 3, allowed=mask[0])
    assert one.ids[0].tolist() == head.top_k(few[:1], 3, allowed=mask[:1]).ids[0].tolist()


def test_masks_that_make_no_sense_are_refused() -> None:
    weight, states = peaked(300)
    head = serve(weight, states[:32])
    for allowed, message in (
        (np.ones(299, bool), "allowed has shape"),
        (np.ones((2, 300), bool), "allowed is for 2 states"),
        (np.zeros(300, bool), "leaves no row"),
        (np.ones(300), "expected booleans or words"),
        (np.ones(9, np.int32), "expected \\(10,\\)"),
    ):
        with pytest.raises(ValueError, match=message):
            head.top_k(states[:3], 1, allowed=allowed)


# What runs dense, and what is refused.


def test_dense_heads_give_the_same_answers() -> None:
    weight, states = peaked(800)
    dense, index = cd.CertifiedHead(None, weight), cd.build_index(weight, states[:32], seed=0, threads=1)
    centroid = cd.CertifiedHead(cd.build_index(weight, states[:32], bounds="centroid", seed=0), weight)
    tight = cd.CertifiedHead(index, weight, budget=0.002)
    sharp = cd.CertifiedHead(index, weight, budget=None)
    for head, reason in ((dense, "no index"), (centroid, "centroid bound"), (tight, None)):
        for mode in (
            lambda h: h.sample(states, seed=1),
            lambda h: h.sample(states, top_p=0.9, seed=1),
            lambda h: h.sample(states, top_k=9, seed=1),
        ):
            assert (mode(head).ids == mode(sharp).ids).all()
            if reason:
                assert mode(head).certificates.fallback == [reason] * len(states)
        z = head.log_partition(states)
        assert (z.low <= sharp.log_partition(states).high).all()
    assert tight.statistics.fallbacks["budget"] > 0


@pytest.mark.parametrize("bounds", ["shadow", ("centroid", "shadow")], ids=str)
def test_the_probabilistic_mode_samples_too(bounds: Any) -> None:
    weight, states = peaked(800)
    index = cd.build_index(weight, states[:32], seed=0, threads=1, guarantee="probabilistic")
    head = cd.CertifiedHead(index, weight, guarantee="probabilistic", budget=None)
    draw = head.sample(states, seed=1)
    cd.verify(draw, states, weight)
    assert draw.certificates[0].guarantee == "probabilistic"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": [1.0, 2.0]}, "temperature is"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"position": 2**32}, "position is"),
        ({"stream": 2**32 - 1}, "stream \\+ b"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(wrong: dict[str, Any], message: str) -> None:
    weight, states = peaked(300)
    head = serve(weight, states[:32])
    with pytest.raises(ValueError, match=message):
        head.sample(states[:3], **wrong)


def test_a_soft_cap_is_refused_where_it_is_not_known() -> None:
    weight, states = peaked(300)
    spec = cd.HeadSpec(weight, softcap=30.0)
    head = serve(spec, states[:32])
    for mode in (head.sample, head.softmax, head.log_partition, lambda h: head.within(h, 1.0), head.top_log_probs):
        with pytest.raises(ValueError, match="soft cap"):
            mode(states)


def test_a_fresh_seed_is_returned_and_draws_again() -> None:
    weight, states = peaked(300)
    head = serve(weight, states[:32])
    first = head.sample(states)
    assert (head.sample(states, seed=int(first.seed[0])).ids == first.ids).all()
    assert int(head.sample(states[:1]).seed[0]) != int(first.seed[0])


@pytest.mark.parametrize("mode", ["draw", "softmax", "partition", "within", "probs"])
def test_verify_notices_a_wrong_answer(mode: str) -> None:
    weight, states = peaked(800)
    head = serve(weight, states[:32])
    few = states[:4]
    if mode == "draw":
        draw = head.sample(few, seed=0)
        draw.ids[1] = (draw.ids[1] + 1) % 800
        wrong: Any = draw
    elif mode == "softmax":
        wrong = head.softmax(few, 0.2)
        wrong.tv_bound[:] = wrong.tv_bound / 1e3
    elif mode == "partition":
        wrong = head.log_partition(few)
        wrong.low[2] += 0.1
        wrong.high[2] += 0.1
    elif mode == "within":
        wrong = head.within(few, 3.0)
        wrong.ids[0], wrong.logits[0] = wrong.ids[0][:-1], wrong.logits[0][:-1]
    else:
        wrong = head.top_log_probs(few, 2)
        wrong.low[0] += 1
        wrong.high[0] += 1
    with pytest.raises(cd.VerificationError):
        cd.verify(wrong, few, weight)


# What a narrow head computes.


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_model_argmax_is_what_the_head_computes(kind: str) -> None:
    torch = pytest.importorskip("torch")
    weight, states = peaked(3000, 64)
    narrow = torch.from_numpy(weight).to(getattr(torch, kind))
    h = torch.from_numpy(states).to(getattr(torch, kind))
    head = serve(narrow, h[:32].float().numpy())
    stock = torch.nn.functional.linear(h, narrow)
    best = head.model_argmax(h)
    decided = best.ids >= 0
    assert decided.mean() > 0.7
    assert (torch.argmax(stock.float(), 1).numpy()[decided] == best.ids[decided]).all()
    from csv_decode.narrow import keeps_bound

    assert keeps_bound(head.spec, head.kernels, h.double().numpy(), stock.double().numpy())
    stock[3, 5] += 8 * torch.finfo(narrow.dtype).eps * stock[3, 5].abs() + 1
    assert not keeps_bound(head.spec, head.kernels, h.double().numpy(), stock.double().numpy())


def test_rounded_ties_go_to_the_smallest_id() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.integers(-3, 4, (2000, 16)).astype(np.float32)).bfloat16()
    h = torch.from_numpy(rng.integers(-9, 10, (64, 16)).astype(np.float32)).bfloat16()
    best = serve(weight, h.float().numpy()).model_argmax(h)
    stock = torch.argmax(torch.nn.functional.linear(h, weight).float(), 1).numpy()
    decided = best.ids >= 0
    assert decided.any()
    assert (best.ids[decided] == stock[decided]).all()


# Where float64 is too coarse.


def cancelling(big: float, rows: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Every float64 score is lost in the rounding of 2 big; row 1 beats all others by 5."""
    weight = np.zeros((rows, 8), np.float32)
    weight[:, 0], weight[:, 1] = 1.0, -1.0
    weight[1, 2] = 5.0
    return weight, np.array([[big, big, 1.0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("big", [1e10, 1e15, 1e17, 1e19, 1e20])
def test_cancellation_never_certifies_a_wrong_mode(big: float) -> None:
    weight, h = cancelling(big)
    head = serve(weight, np.concatenate([np.eye(8, dtype=np.float32), h.astype(np.float32)]))
    logits = np.zeros(300)
    logits[1] = 5.0
    z = np.log(np.exp(logits).sum())
    found = head.log_partition(h)
    assert found.low[0] - 1e-9 <= z <= found.high[0] + 1e-9
    assert not found.certificates.certified[0] or found.width[0] <= 1e-3
    cd.verify(found, h, weight)
    soft = head.softmax(h, 0.1)
    cd.verify(soft, h, weight)
    for options in ({"top_p": 0.05}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.05}, {"top_k": 1}):
        for seed in range(4):
            draw = head.sample(h, seed=seed, **options)
            assert draw.ids[0] == 1, options
            cd.verify(draw, h, weight)
    draw = head.sample(h, 1.0, top_p=0.9, seed=0)
    cd.verify(draw, h, weight)


def test_equal_floats_have_their_exact_order() -> None:
    """Row 70 is above row 10 by 2^-60: the first of the nucleus, whatever float64 says."""
    weight, states = make_head(100, 8)
    weight *= 0.01
    weight[10], weight[70] = 0.0, 0.0
    weight[10, 0] = weight[70, 0] = 30.0
    weight[70, 1] = 2.0**-60
    h = np.ones((1, 8), np.float32)
    head = serve(weight, states)
    assert head.top_k(h).ids[0, 0] == 70
    for options in ({"top_p": 0.3}, {"top_p": 1e-12}, {"top_k": 5, "top_p": 0.3}, {"min_p": 1.0}, {"top_k": 1}):
        for seed in range(6):
            draw = head.sample(h, seed=seed, **options)
            assert draw.ids[0] == 70, options
            cd.verify(draw, h, weight)


def test_chosen_scores_may_come_in_any_order() -> None:
    weight, states = peaked(300)
    head = serve(weight, states[:32])
    logits = states[:1].astype(np.float64) @ weight.astype(np.float64).T
    for ids in (np.arange(300)[::-1], np.zeros(300, np.int64)):
        assert np.abs(head.scores(states[:1], ids[None]).logits[0] - logits[0, ids]).max() < 1e-9


def test_scores_beyond_float32_are_dense() -> None:
    weight = -np.full((300, 8), 3e38, np.float32)
    head = serve(weight, np.eye(8, dtype=np.float32))
    h = np.full((1, 8), 3.0)
    for result in (head.softmax(h), head.log_partition(h), head.sample(h, top_p=0.5, seed=0), head.sample(h, seed=0)):
        cd.verify(result, h, weight)
    assert head.sample(h, top_k=2**62, seed=0).ids.shape == (1,)


def test_a_head_is_about_states_of_its_own_type() -> None:
    torch = pytest.importorskip("torch")
    weight, states = peaked(300)
    head = serve(torch.from_numpy(weight).bfloat16(), states[:32])
    with pytest.raises(ValueError, match="no bfloat16 numbers"):
        head.model_argmax(states)


@pytest.mark.parametrize("mode", ["within", "softmax", "partition", "draw", "top probs", "model"])
def test_verify_notices_subtler_forgeries(mode: str) -> None:
    weight, states = peaked(800)
    head = serve(weight, states[:32])
    few = states[:2]
    forged: list[Any] = []
    if mode == "within":
        for change in (5.0, np.nan):
            forged.append(head.within(few, 3.0))
            forged[-1].logits[0][:] += change
        forged.append(head.within(few, 3.0))
        forged[-1].ids[0], forged[-1].logits[0] = forged[-1].ids[0][::-1], forged[-1].logits[0][::-1]
    elif mode == "softmax":
        forged = [head.softmax(few, 0.2), head.softmax(few, 0.2)]
        forged[0].ids[0] = forged[0].ids[0] - 800
        forged[1].certificates.tv_bound[:] = 0.0
    elif mode == "partition":
        forged = [head.log_partition(few)]
        forged[0].low[:], forged[0].high[:] = -np.inf, np.inf
    elif mode == "draw":
        forged = [head.sample(few, seed=0), head.sample(few, seed=0)]
        forged[0].certificates.threshold[:] = 1e9
        forged[1].certificates.max_unopened[:] = -np.inf
        forged[1].certificates.rows_scored[:] = 1
    elif mode == "top probs":
        forged = [head.top_log_probs(few, 2)]
        for column in (forged[0].ids, forged[0].low, forged[0].high):
            column[:] = column[:, ::-1].copy()
    else:
        torch = pytest.importorskip("torch")
        weight, few = torch.from_numpy(weight).bfloat16(), torch.from_numpy(few).bfloat16()
        forged = [serve(weight, states[:32]).model_argmax(few)]
        cd.verify(forged[0], few, weight)
        forged[0].ids[:] = (forged[0].ids + 1) % 800
    for result in forged:
        with pytest.raises(cd.VerificationError):
            cd.verify(result, few, weight)


def test_a_long_walk_ends_soon() -> None:
    """Flat logits with ties, and a nucleus of one row: nearly every row of the race is outside. (A token at a time took
    27 s, and takes 0.7 so.)"""
    rng = np.random.default_rng(0)
    weight = rng.integers(-2, 3, (4100, 32)).astype(np.float32)
    head = cd.CertifiedHead(None, weight)
    state = rng.integers(-2, 3, 32).astype(np.float32)
    logits = weight @ state
    best = np.nonzero(logits == logits.max())[0][0]  # the smallest id of the best
    started = time.perf_counter()
    for seed in range(3):
        assert head.sample(state, 1e6, top_p=1e-12, seed=seed).ids[0] == best
    assert time.perf_counter() - started < 10
