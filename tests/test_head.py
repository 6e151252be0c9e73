"""The head's promise: the exact top-k, whatever the weights, and a certificate that is true."""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import csv_decode as cd
from csv_decode.choice import Choice, choose
from csv_decode.kernels.native import supported

from .conftest import KINDS, make_head
from .exactly import exact_logits, exact_top_k

BOUNDS = ["shadow", "centroid", ("centroid", "shadow")]
pytestmark = pytest.mark.usefixtures("cascade")


def build(weight: object, states: np.ndarray, bounds: object = "shadow", **more: object) -> cd.Index:
    return cd.build_index(weight, states, bounds=bounds, seed=0, threads=1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_exact_for_every_kind_of_head(kind: str, bounds: object) -> None:
    weight, states = make_head(300, 24, kind=kind)
    index = build(weight, states[:32], bounds)
    logits = [exact_logits(weight, h) for h in states[32:36]]
    for kernels in [*supported(), "reference"]:
        head = cd.CertifiedHead(index, weight, budget=None, kernels=kernels)
        for k in (1, 10, 300):
            top = head.top_k(states[32:36], k)
            for b in range(4):
                assert top.ids[b].tolist() == exact_top_k(logits[b], k), (kernels, k, b)
            assert top.certificates.certified.all()
            cd.verify(top, states[32:36], weight)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@given(data=st.data())
@settings(max_examples=5 if os.environ.get("CSV_DECODE_SANITIZE") else 25, deadline=None)
def test_top_k_is_exact_for_arbitrary_small_heads(bounds: object, data: st.DataObject) -> None:
    """Tiny d, widths that are a multiple of nothing, V = 1, integers that tie, numbers from 1e-30 to 1e30."""
    rows = data.draw(st.integers(1, 40), "rows")
    width = data.draw(st.integers(1, 9), "width")
    number = data.draw(
        st.sampled_from(
            [
                st.integers(-2, 2).map(float),
                st.floats(-4, 4, width=32),
                st.sampled_from([0.0, 1e-30, -1e30, 1e30, 1.0, -1.0]),
                st.sampled_from([1.0, 1.0 + 2.0**-23, -1.0]),
            ]
        )
    )
    grid = st.lists(st.lists(number, min_size=width, max_size=width), min_size=1, max_size=40)
    weight = np.array(data.draw(st.lists(grid.map(lambda g: g[0]), min_size=rows, max_size=rows)), np.float32)
    h = np.array(data.draw(st.lists(number, min_size=width, max_size=width)), np.float32)
    bias = np.array(data.draw(st.lists(number, min_size=rows, max_size=rows)), np.float32)
    use_bias = data.draw(st.booleans())
    spec = cd.HeadSpec(weight, bias if use_bias else None)
    states = np.concatenate([np.eye(width, dtype=np.float32), h[None]])
    index = build(spec, states, bounds)
    head = cd.CertifiedHead(index, spec, budget=None)
    k = data.draw(st.integers(1, rows))
    top = head.top_k(h, k)
    logits = exact_logits(weight, h, bias if use_bias else None)
    assert top.ids[0].tolist() == exact_top_k(logits, k)
    cd.verify(top, h, spec)
    tied = head.top_k(h, k, ties=True)
    want = [i for i in range(rows) if logits[i] >= logits[exact_top_k(logits, k)[-1]]]
    assert sorted(tied.ids[0].tolist()) == want
    cd.verify(tied, h, spec)


def test_the_cascade_drops_rows_and_says_how_many() -> None:
    weight, states = make_head(4000, 64)
    head = cd.CertifiedHead(build(weight, states[:48]), weight)
    top = head.top_k(states[48:], 1)
    c = top.certificates[0]
    assert c.certified
    assert c.fallback is None
    assert c.rows_scored < 400
    assert c.survivors[0] > c.survivors[1]
    assert c.threshold > c.max_unopened
    assert c.margin == c.threshold - c.max_unopened
    assert c.bytes_read < c.bytes_dense == 4000 * 64 * 2
    assert (c.kind, c.guarantee, c.failure_probability) == ("top_k", "deterministic", 0.0)
    assert head.statistics.states == 16
    assert 0 < head.statistics.bytes_ratio < 1


def test_the_energy_of_the_states_tells_whether_calibration_fits() -> None:
    weight, states = make_head(1000, 32)
    head = cd.CertifiedHead(build(weight, states), weight)
    head.top_k(states, 1)
    assert head.statistics.mean_energy == pytest.approx(1, rel=1e-3)
    head.top_k(states @ np.linalg.qr(np.random.default_rng(5).standard_normal((32, 32)))[0].astype(np.float32), 1)
    assert head.statistics.mean_energy > 2


@pytest.mark.unsanitized
def test_drift_is_told_once() -> None:
    import warnings

    weight, states = make_head(1000, 32)
    head = cd.CertifiedHead(build(weight, states), weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            head.top_k(states, 1)  # these fit
    other = np.tile(states[:, ::-1] * np.geomspace(1, 30, 32).astype(np.float32), (10, 1))
    with pytest.warns(UserWarning, match=r"does not fit the states being served .* csv-decode build"):
        head.top_k(other, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.top_k(other, 1)


@pytest.mark.unsanitized
def test_no_row_left_out_is_above_max_unopened() -> None:
    """The certificate's inequality itself, over every row, not only the ids that come of it."""
    for kind in KINDS:
        weight, states = make_head(300, 40, seed=1, kind=kind)
        for bounds in BOUNDS:
            head = cd.CertifiedHead(build(weight, states[:32], bounds), weight, budget=None, kernels="reference")
            for h in states[32:36]:
                (step,) = head._scan(h[None].astype(np.float64), 3)
                logits = np.array([float(x) for x in exact_logits(weight, h)])
                out = np.ones(300, bool)
                ids, value, error = step.scored()
                out[ids] = False
                assert np.max(logits[out], initial=-np.inf) <= step.max_unopened
                inside = np.abs(logits[ids] - value)
                assert (inside <= error * 1.01 + 1e-300).all()


@pytest.mark.parametrize("planes", [(2.0,), (2.0, 2.0), (1.0, 1.0, 2.0, 2.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cascade_in_one_native_call_does_what_the_one_in_python_does(kind: str, planes: tuple) -> None:
    weight, states = make_head(700, 45, kind=kind)
    spec = cd.HeadSpec(weight, np.random.default_rng(1).standard_normal(700).astype(np.float32), valid_rows=690)
    index = build(spec, states[:32], bits=planes)
    plain = cd.CertifiedHead(index, spec, kernels="reference")
    rng = np.random.default_rng(2)
    for kernels in supported():
        head = cd.CertifiedHead(index, spec, kernels=kernels, threads=2)
        for k, guessed in itertools.product((1, 7), (False, True)):
            guess = None
            if guessed:  # right, wrong, none, one row twice
                guess = np.array(plain.top_k(states[32:48], k).ids)
                guess[4:8] = [rng.choice(690, k, replace=False) for _ in range(4)]
                guess[8:10], guess[10, -1], guess[11] = -1, -1, 5
            a, b = head.top_k(states[32:48], k, guess=guess), plain.top_k(states[32:48], k, guess=guess)
            np.testing.assert_array_equal(a.ids, plain.top_k(states[32:48], k).ids)
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.logits, b.logits)
            assert a.certificates.fallback == b.certificates.fallback
            np.testing.assert_array_equal(a.certificates.threshold, b.certificates.threshold)
            np.testing.assert_array_equal(a.certificates.rows_scored, b.certificates.rows_scored)
            np.testing.assert_array_equal(a.certificates.survivors, b.certificates.survivors)
            np.testing.assert_array_equal(a.certificates.bytes_read, b.certificates.bytes_read)
            np.testing.assert_allclose(a.certificates.max_unopened, b.certificates.max_unopened, rtol=1e-6)


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
def test_guesses_do_not_change_the_answer(kernels: str) -> None:
    """Right ones, all wrong ones, the worst row, ties with the best row, a mask beside them."""
    weight, states = make_head(1000, 40, kind="tied")
    weight[500:] = weight[:500]  # each row twice
    head = cd.CertifiedHead(build(weight, states[:32]), weight, budget=None, kernels=kernels)
    h = states[32:41]
    for k in (1, 2, 5):
        want = head.top_k(h, k)
        every = np.argsort(h.astype(np.float64) @ weight.T.astype(np.float64), axis=1)
        for guess in (want.ids, every[:, :k], every[:, -k:], want.ids[::-1].copy(), (want.ids + 500) % 1000):
            for ties in (False, True):
                top = head.top_k(h, k, ties, guess=guess)
                for b in range(len(h)):
                    np.testing.assert_array_equal(np.sort(top.ids[b][:k]), np.sort(want.ids[b]))
                assert top.certificates.certified.all()
                cd.verify(top, h, weight)
        allowed = np.arange(1000) % 3 > 0
        np.testing.assert_array_equal(
            head.top_k(h, k, allowed=allowed, guess=want.ids).ids, head.top_k(h, k, allowed=allowed).ids
        )
    np.testing.assert_array_equal(head.top_k(h, guess=np.arange(9)).ids, head.top_k(h).ids)  # (B,) for k = 1


def test_scores_of_the_same_ids_in_every_state() -> None:
    weight, states = make_head(300, 24)
    head = cd.CertifiedHead(None, weight)
    ids = np.array([[3, 1, 299]])
    states[1] = 0
    one, each = head.scores(states[:4], ids), head.scores(states[:4], np.tile(ids, (4, 1)))
    for column in ("ids", "logits", "error"):
        np.testing.assert_array_equal(getattr(one, column), getattr(each, column))
    assert head.scores(states[0], ids).logits.shape == (1, 3)


def test_a_right_guess_leaves_as_many_rows_and_a_low_one_is_no_harm() -> None:
    weight, states = make_head(4000, 64)
    head = cd.CertifiedHead(build(weight, states[:48]), weight)
    plain = head.top_k(states[48:], 1)
    right = head.top_k(states[48:], 1, guess=plain.ids)
    assert (right.certificates.bytes_read <= plain.certificates.bytes_read + 64 * 4).all()
    np.testing.assert_array_equal(right.certificates.survivors[:, 0], plain.certificates.survivors[:, 0])
    low = head.top_k(states[48:], 1, guess=np.argmin(states[48:] @ weight.T, axis=1))
    np.testing.assert_array_equal(low.ids, plain.ids)
    assert low.certificates.certified.all()


@pytest.mark.parametrize(
    ("guess", "said"),
    [
        ([0, 1], "guesses have shape (2,)"),
        ([[0, 1], [1, 2], [2, 3]], "2 guesses for each state, expected 1"),
        ([0.0, 1.0, 2.0], "expected whole numbers (3,)"),
        ([0, 1, 300], "guesses go from 0 to 300, expected -1 to 299"),
        ([0, 1, -2], "guesses go from -2 to 1, expected -1 to 299"),
        ("no", "expected whole numbers"),
    ],
)
def test_bad_guesses_are_named(guess: object, said: str) -> None:
    weight, states = make_head(300, 24)
    head = cd.CertifiedHead(build(weight, states), weight)
    with pytest.raises(ValueError, match=re.escape(said)):
        head.top_k(states[:3], guess=guess)  # type: ignore[arg-type]


def test_a_draft_that_a_token_beats_is_cut() -> None:
    """States behind a wrong token suppose another text: the head does not look at them."""
    weight, states = make_head(300, 24)
    head = cd.CertifiedHead(None, weight)
    best = np.asarray(head.top_k(states[:6]).ids)[:, 0].tolist()
    choice = Choice(head, 0.0, 0, 1.0, 0.0, 0, 0, {}, False)

    def chosen(draft: list[int], recent: list[int], choice: Choice = choice) -> list[int]:
        ((ids, logits, certificates),) = choose(head, [(choice, states[: len(draft) + 1], 0, None, draft, recent)])
        assert len(ids) == len(logits) == len(certificates)
        return ids.tolist()

    second = int(np.argsort(states[0] @ weight.T)[-2])
    worst = int(np.argmin(states[2] @ weight.T))
    assert chosen(best[:5], []) == best
    assert chosen([second], []) == best[:2], "nothing tells that it is wrong"
    assert chosen([second], [best[0]]) == best[:1]
    assert chosen([*best[:2], worst, *best[3:5]], [5, 6]) == best[:3]
    assert chosen([*best[:2], worst, *best[3:5]], list(range(300))) == best[:3]
    banned = Choice(head, 0.0, 0, 1.0, 0.0, 0, 0, {worst: -np.inf}, False)  # then scores alone do not tell
    assert chosen([*best[:2], worst, *best[3:5]], [5, 6], banned) == best


def test_a_tie_at_rank_k_returns_the_smaller_id() -> None:
    weight, states = make_head(200, 16)
    weight[[150, 20, 90]] = 3 * states[0] / np.linalg.norm(states[0])
    head = cd.CertifiedHead(build(weight, states), weight)
    assert head.top_k(states[0], 1).ids.tolist() == [[20]]
    assert head.top_k(states[0], 2).ids.tolist() == [[20, 90]]
    assert head.top_k(states[0], 1, ties=True).ids[0].tolist() == [20, 90, 150]


def test_logits_one_ulp_apart_are_told_apart() -> None:
    """Rows whose float64 dots round to the same number although the real values differ."""
    h = np.array([1.0, 2.0**-40, -1.0, 2.0**-70], np.float32)
    base = np.array([1.0, 1.0, 1.0, 0.0], np.float32)
    weight = np.stack([base, base, base])
    weight[1, 3], weight[2, 3] = 1.0, 2.0
    weight[:, 0] += np.float32(2.0**23)
    weight[:, 2] += np.float32(2.0**23)
    head = cd.CertifiedHead(build(weight, np.eye(4, dtype=np.float32)), weight)
    top = head.top_k(h, 3)
    assert top.ids.tolist() == [[2, 1, 0]]
    assert cd.verify(top, h, weight).exact_comparisons > 0


def test_a_zero_state_ties_everything() -> None:
    weight, states = make_head(300, 16)
    head = cd.CertifiedHead(build(weight, states), weight)
    top = head.top_k(np.zeros(16, np.float32), 3)
    assert top.ids.tolist() == [[0, 1, 2]]
    assert top.certificates[0].fallback == "vanishing state"


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_states_of_any_size(scale: float) -> None:
    weight, states = make_head(300, 24)
    head = cd.CertifiedHead(build(weight, states[:32]), weight)
    h = (states[32:36] * scale).astype(np.float32)
    top = head.top_k(h, 5)
    for b in range(4):
        assert top.ids[b].tolist() == exact_top_k(exact_logits(weight, h[b]), 5)
    assert top.certificates.certified.all()


def test_budget_and_fallback_obey_the_same_reference() -> None:
    weight, states = make_head(400, 24, kind="tied")
    for bounds in BOUNDS:
        head = cd.CertifiedHead(build(weight, states[:32], bounds), weight, budget=0.001)
        top = head.top_k(states[32:40], 7)
        assert set(top.certificates.fallback) == {"budget"}
        assert head.statistics.fallbacks == {"budget": 8}
        assert (top.certificates.rows_scored == 400).all()
        for b in range(8):
            assert top.ids[b].tolist() == exact_top_k(exact_logits(weight, states[32 + b]), 7)
        cd.verify(top, states[32:40], weight)


def test_without_an_index_or_for_a_small_head_the_step_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, states = make_head(100, 8)
    top = cd.CertifiedHead(None, weight).top_k(states[:2], 2)
    assert top.certificates.fallback == ["no index", "no index"]
    monkeypatch.setattr("csv_decode.head.SMALL_HEAD", 801)
    top = cd.CertifiedHead(build(weight, states), weight).top_k(states[:1], 2)
    assert top.certificates.fallback == ["small head"]
    assert top.ids[0].tolist() == exact_top_k(exact_logits(weight, states[0]), 2)


def test_a_batch_equals_its_states_one_by_one() -> None:
    weight, states = make_head(1000, 48)
    head = cd.CertifiedHead(build(weight, states[:32]), weight)
    whole = head.top_k(states[32:49], 5)
    for b in range(17):
        one = head.top_k(states[32 + b], 5)
        assert whole.ids[b].tolist() == one.ids[0].tolist()
        np.testing.assert_array_equal(whole.logits[b], one.logits[0])


def test_bias_scale_cap_and_padding_rows() -> None:
    weight, states = make_head(300, 24)
    bias = np.random.default_rng(0).standard_normal(300).astype(np.float32) * 3
    for bounds in BOUNDS:
        spec = cd.HeadSpec(weight, bias, scale=0.25, softcap=2.0, valid_rows=280)
        index = build(spec, states[:32], bounds)
        top = cd.CertifiedHead(index, spec, budget=None).top_k(states[32:36], 10)
        for b in range(4):
            logits = exact_logits(weight[:280], states[32 + b], bias[:280])
            assert top.ids[b].tolist() == exact_top_k(logits, 10)
            raw = np.array([float(logits[i]) for i in top.ids[b]])
            np.testing.assert_allclose(top.logits[b], 2 * np.tanh(raw * 0.25 / 2), rtol=1e-12)
        cd.verify(top, states[32:36], spec)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_narrow_weights_are_taken_as_they_are(kind: str) -> None:
    torch = pytest.importorskip("torch")
    weight, states = make_head(300, 24)
    stored = torch.from_numpy(weight).to(getattr(torch, kind))
    index = build(stored, torch.from_numpy(states[:32]))
    top = cd.CertifiedHead(index, stored).top_k(torch.from_numpy(states[32:35]).to(torch.bfloat16), 4)
    wide = stored.float().numpy()
    for b in range(3):
        h = torch.from_numpy(states[32 + b]).to(torch.bfloat16).float().numpy()
        assert top.ids[b].tolist() == exact_top_k(exact_logits(wide, h), 4)


def test_float64_and_strided_states_are_taken_as_they_are() -> None:
    weight, states = make_head(200, 16)
    head = cd.CertifiedHead(build(np.asfortranarray(weight), states[:32]), np.asfortranarray(weight))
    h = states[40].astype(np.float64) + 1e-9
    want = exact_top_k(exact_logits(weight, h), 4)
    assert head.top_k(h, 4).ids[0].tolist() == want
    wide = np.zeros((2, 32))
    wide[:, ::2] = h
    assert head.top_k(wide[:, ::2], 4).ids[1].tolist() == want


def test_a_head_can_be_copied_and_pickled() -> None:
    import copy
    import pickle

    weight, states = make_head(300, 24)
    head = cd.CertifiedHead(build(weight, states[:32]), weight, budget=0.5, kernels="generic", threads=1)
    assert copy.copy(cd.CertifiedHead(None, weight, budget=0.001)).budget == 0
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert (twin.budget, twin.kernels.name, twin.kernels.threads) == (150, "generic", 1)
        np.testing.assert_array_equal(twin.top_k(states[40:], 3).ids, head.top_k(states[40:], 3).ids)


def test_a_child_forked_in_the_middle_of_a_step_does_not_hang() -> None:
    import multiprocessing

    weight, states = make_head(300, 24)
    head = cd.CertifiedHead(build(weight, states[:32]), weight)
    context = multiprocessing.get_context("fork")
    with head._lock:  # as another thread would
        child = context.Process(target=head.top_k, args=(states[40], 1))
        child.start()
    child.join(20)
    assert child.exitcode == 0


def test_threads_share_one_head() -> None:
    from concurrent.futures import ThreadPoolExecutor

    weight, states = make_head(2000, 32)
    head = cd.CertifiedHead(build(weight, states[:32]), weight, threads=2)
    want = [head.top_k(states[i], 3).ids.tolist() for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: head.top_k(states[i % 64], 3).ids.tolist(), range(256)))
    assert got == want * 4


def test_rounded_centres_of_many_planes_are_accounted_for() -> None:
    """Plane 1 cancels a huge centre of plane 0, so that what float32 took from the first centre is far above the last
    one, and above the radii of plane 2. The winner's bias is what was lost."""
    from csv_decode.bounds.planes import Plane
    from csv_decode.bounds.shadow import ShadowBound

    rng = np.random.default_rng(0)
    rows, width, fine = 1024, 32, 2.0**-22
    h = rng.integers(20000, 32000, width) * rng.choice([-1.0, 1.0], width)
    h[0] = 32512
    coarse = np.repeat(np.where(h > 0, 15, 0).astype(np.uint8)[None], rows, axis=0)
    last = rng.choice([7, 8], (rows, width)).astype(np.uint8)
    weight = (fine * (last - 7.5)).astype(np.float32)
    bias = np.zeros(rows, np.float32)
    bias[-1] = 0.24

    def plane(step: float, unit: float, codes: np.ndarray, radius: int, interleaved: bool) -> Plane:
        four, steps, units = np.array([4], np.int32), np.array([step], np.float32), np.full(4, unit, np.float32)
        empty = Plane(four, steps, units, np.zeros((0, 1), np.uint32), interleaved)
        words = empty.pack(codes, np.full((rows, 4), radius, np.uint8))
        if interleaved:
            words = words.reshape(-1, 16, words.shape[1]).transpose(0, 2, 1).reshape(rows, -1)
        return Plane(four, steps, units, np.ascontiguousarray(words), interleaved)

    planes = (
        plane(1.0, 1.0, coarse, 50, True),
        plane(1.0, 2.0**-21, 15 - coarse, 20, False),
        plane(fine, 2.0**-36, last, 1, False),
    )
    spec = cd.HeadSpec(weight, bias)
    shadow = ShadowBound(
        np.zeros(width, np.float32),
        np.eye(width, dtype=np.float16),
        np.full(rows, 0x3F80, np.uint16),
        planes,
        1e-13,
        1.0,
    )
    index = cd.Index(spec.fingerprint, "float32", spec.rows.shape, rows, None, None, shadow)
    cd.verify_index(index, spec)
    for kernels in [*supported(), "reference"]:
        top = cd.CertifiedHead(index, spec, kernels=kernels, budget=None).top_k(h, 1)
        assert top.ids.tolist() == [exact_top_k(exact_logits(weight, h, bias), 1)]
        cd.verify(top, h, spec)
