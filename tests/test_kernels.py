"""Every kernel returns the bits of the numpy reference."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csv_decode.bounds.planes import BLOCK, Plane, PlaneStates
from csv_decode.bounds.rounding import below_float32, score_error
from csv_decode.kernels import get_kernels, simd_info
from csv_decode.kernels.native import supported
from csv_decode.spec import Rows

NATIVE = supported()
LENGTHS = [1, 8, 15, 16, 17, 31, 32, 33, 255, 256, 257]


def random_plane(
    rng: np.random.Generator, rows: int, bits: list[int], interleaved: bool
) -> tuple[Plane, np.ndarray, np.ndarray]:
    """A plane of random codes, and its whole codes and radii."""
    width = np.array(bits, np.int32)
    step = rng.uniform(0.1, 2, len(bits)).astype(np.float32)
    radius_step = rng.uniform(0.01, 0.1, 4).astype(np.float32)
    empty = Plane(width, step, radius_step, np.zeros((0, 1), np.uint32), interleaved)
    codes = (rng.integers(0, 256, (rows, len(bits) * BLOCK)) % np.repeat(2**width, BLOCK)).astype(np.uint8)
    radii = rng.integers(0, 256, (rows, 4)).astype(np.uint8)
    words = empty.pack(codes, radii)
    if interleaved:
        whole = np.zeros((-(-rows // 16) * 16, words.shape[1]), np.uint32)
        whole[:rows] = words
        words = np.ascontiguousarray(
            whole.reshape(-1, 16, words.shape[1]).transpose(0, 2, 1).reshape(-1, words.shape[1])
        )
    return Plane(width, step, radius_step, words, interleaved), codes, radii


def random_states(rng: np.random.Generator, plane: Plane, count: int) -> PlaneStates:
    slots = len(plane.slots[0])
    params = rng.standard_normal((count, 10))
    params[:, 1] = np.round(params[:, 1] * 1000)
    params[:, [0, 2, 3, 4, 5, 6]] = np.abs(params[:, [0, 2, 3, 4, 5, 6]])
    params[:, 8:] = np.abs(params[:, 8:]) * 1e-6
    hi = rng.integers(-127, 128, (count, slots)).astype(np.int8)
    lo = rng.integers(-128, 128, (count, slots)) * ((plane.slots[2] > 3) | plane.interleaved)  # see PlaneState
    return PlaneStates(hi, lo.astype(np.int8), params)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("bits", [[0], [1], [2], [3], [4], [5], [6], [7], [4, 0, 2, 1, 3], [7, 7, 6, 5, 2, 2, 1, 1, 0]])
def test_decode_gives_back_what_was_packed(bits: list[int], interleaved: bool) -> None:
    rng = np.random.default_rng(sum(bits))
    plane, codes, radii = random_plane(rng, 37, bits, interleaved)
    words = plane.rows(0, 37)
    levels = np.repeat(2.0**plane.bits, BLOCK)
    expected = np.repeat(plane.step.astype(np.float64), BLOCK) * (codes - (levels - 1) / 2)
    np.testing.assert_allclose(plane.decode(words, len(bits) * BLOCK), expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(plane.unpack(words)[1], radii)
    np.testing.assert_array_equal(plane.rows(19, 30), words[19:30])


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("rows", LENGTHS)
def test_screen_equals_the_reference_to_the_bit(isa: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    bits = [[7, 4, 3, 2, 1, 0, 2, 5], [2], [1, 1], [4], [0]][rows % 5]
    plane, _, _ = random_plane(rng, rows, bits, True)
    states = random_states(rng, plane, 1 + rows % 7)
    rho = rng.integers(0x3C00, 0x4200, rows).astype(np.uint16)
    bias = rng.standard_normal(rows).astype(np.float32) if rows % 2 else None
    gate = rng.integers(0, 2, -(-rows // 16)).astype(np.uint8) if rows % 3 == 0 else None
    for threads in (1, 3):
        native, reference = get_kernels(isa, threads), get_kernels("reference")
        got = native.screen(native.bind(plane, rho, bias), states, gate)
        want = reference.screen(reference.bind(plane, rho, bias), states, gate)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("rows", [*LENGTHS, 1040])
def test_sift_equals_the_reference_to_the_bit(isa: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    bits = [[7, 4, 3, 2, 1, 0, 2, 5], [2], [1, 1], [4], [0]][rows % 5]
    plane, _, _ = random_plane(rng, rows, bits, True)
    rho = rng.integers(0x3C00, 0x4200, rows).astype(np.uint16)
    bias = rng.standard_normal(rows).astype(np.float32) if rows % 2 else None
    native, reference = get_kernels(isa, 1), get_kernels("reference")
    handle, oracle = native.bind(plane, rho, bias), reference.bind(plane, rho, bias)
    kept = closed = 0
    for count in (1, 2, 7, 19):
        states = random_states(rng, plane, count)
        states.params[:, 0] *= 10.0 ** rng.integers(-3, 38, count)  # some are beyond float32
        with np.errstate(over="ignore", invalid="ignore"):
            upper = reference.screen(oracle, states, None)[1]
        for bar in (-np.inf, *np.quantile(upper[np.isfinite(upper)], (0.1, 0.5, 0.9, 0.99)), np.inf):
            bars = np.full(count, bar, np.float32)
            for got, want in zip(native.sift(handle, states, bars), reference.sift(oracle, states, bars), strict=True):
                for a, b in zip(got[:3], want[:3], strict=True):
                    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
                assert got[3] == want[3]
                kept, closed = kept + len(got[0]), closed + rows - len(got[0])
    assert kept
    assert closed


@pytest.mark.parametrize("bits", [[7, 4, 3, 2, 1, 0, 2, 5], [2], [1, 1], [4]])
def test_a_sieve_is_above_what_it_stands_for(bits: list[int]) -> None:
    """The inequality of `sieves` in exact arithmetic, row by row."""
    from fractions import Fraction

    rng = np.random.default_rng(sum(bits))
    kernels = get_kernels("reference")
    tightest, silent = -np.inf, 0
    for trial in range(60):
        plane, _, _ = random_plane(rng, 16, bits, True)
        states = random_states(rng, plane, 1)
        codes, radii = plane.unpack(plane.rows(0, 16))
        if trial % 3 == 0:  # low bytes that make the most of the codes of row 0
            states.lo[:] = np.where(codes[0] > plane.slots[2] / 2, 127, -128)
        if trial % 4 == 1:
            states.lo[:], states.hi[:] = 0, rng.integers(-1, 2, states.hi.shape)
        small = trial % 5 == 2  # float32 has few bits left of the step, and nothing else makes up for them
        if small:
            states.lo[:], states.params[:, 2:] = 0, 0
            states.hi[:] = np.where(codes[0] > plane.slots[2] / 2, 127, -127)
        states.params[:] *= 10.0 ** (-42.0 if small else float(rng.integers(-45, 39)))
        states.params[:, 0] *= 1e-3 if small else 10.0 ** rng.choice([-30, -3, 0, 0, 0, 3])
        states.params[:, 7] *= 10.0 ** rng.choice([-9, 0, 0, 9])
        whole = 256 * states.hi[0].astype(np.int64) + states.lo[0]
        states.params[:, 1] = float(whole @ plane.slots[2])
        rho = rng.choice([0x0000, 0x0080, 0x3F80, 0x3C37, 0x4241, 0x6000], 16).astype(np.uint16)
        bias = None if trial % 2 else (rng.standard_normal(16) * 10.0 ** rng.integers(-40, 38)).astype(np.float32)
        upper = kernels.sieve(kernels.bind(plane, rho, bias), states)[0]  # type: ignore[attr-defined]
        half_scale, offset, constant, *norm, base, slack, start_slack = map(Fraction, states.params[0].tolist())
        scale = (rho.astype(np.uint32) << np.uint32(16)).view(np.float32)
        for i in range(16):
            start = base + (0 if bias is None else Fraction(float(bias[i])))
            dot = int(codes[i].astype(np.int64) @ whole)
            radius = sum((int(r) * n for r, n in zip(radii[i], norm, strict=True)), Fraction(0))
            inner = half_scale * (2 * dot - offset) + constant + radius
            true = start + Fraction(float(scale[i])) * inner + slack + abs(start) * min(start_slack, Fraction(2) ** -50)
            if np.isnan(upper[i]) or np.isinf(upper[i]):
                silent += 1
                continue
            assert Fraction(float(upper[i])) >= true, (trial, i)
            size = abs(start) + Fraction(float(scale[i])) * (half_scale * abs(2 * dot - offset) + constant + radius)
            if size and trial % 4 == 1:  # nothing lost with the low bytes: what is left is rounding
                tightest = max(tightest, float((true - Fraction(float(upper[i]))) / size))
    assert silent < 60 * 16 / 2
    assert tightest > -1e-4, "a bound that is far above tests nothing"


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("blocks", [1, 3, 8, 17, 18, 20])
def test_refine_equals_the_reference_to_the_bit(isa: str, blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    plane, _, _ = random_plane(rng, 300, rng.integers(0, 8, blocks).tolist(), False)
    states = random_states(rng, plane, 1)
    rho = rng.integers(0x3C00, 0x4200, 300).astype(np.uint16)
    rows = np.sort(rng.choice(300, 129, replace=False)).astype(np.int64)
    start = rng.standard_normal(129).astype(np.float32)
    native, reference = get_kernels(isa, 2), get_kernels("reference")
    got = native.refine(native.bind(plane, rho, None), states, rows, start)
    want = reference.refine(reference.bind(plane, rho, None), states, rows, start)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("isa", NATIVE)
def test_extreme_codes_and_states_do_not_saturate(isa: str) -> None:
    """All codes at their maximum against all state bytes at theirs: vpmaddubsw would clip a careless kernel."""
    for bits, interleaved in itertools.product((4, 3, 2, 1, 7), (True, False)):
        width = np.full(20, bits, np.int32)
        empty = Plane(width, np.ones(20, np.float32), np.ones(4, np.float32), np.zeros((0, 1), np.uint32), interleaved)
        codes = np.full((16, 640), 2**bits - 1, np.uint8)
        words = empty.pack(codes, np.full((16, 4), 255, np.uint8))
        cmax = empty.slots[2]
        for hi, lo in ((127, 127), (-127, -128)):
            params = np.array([[1.0, 0, 0, 1, 1, 1, 1, 0, 0, 0]])
            low = lo * ((cmax > 3) | interleaved)  # see PlaneState
            states = PlaneStates(np.full((1, len(cmax)), hi, np.int8), low.astype(np.int8)[None], params)
            rho = np.full(16, 0x3F80, np.uint16)
            stored = words.reshape(1, 16, -1).transpose(0, 2, 1).reshape(16, -1) if interleaved else words
            plane = Plane(width, empty.step, empty.radius_step, np.ascontiguousarray(stored), interleaved)
            k = get_kernels(isa, 1)
            handle = k.bind(plane, rho, None)
            expected = 2.0 * float((256 * hi + low) @ cmax)
            if interleaved:
                params[0, 1] = expected / 2  # what the offset is, so that the sum is once the dot
                ((_, centre, _, _),) = k.sift(handle, states, np.array([expected / 2], np.float32))
                np.testing.assert_array_equal(centre, np.full(16, expected / 2, np.float32))
                params[0, 1] = 0
                centre, upper = k.screen(handle, states, None)
                centre, upper = centre[0], upper[0]
            else:
                centre, upper = k.refine(handle, states, np.arange(16), np.zeros(16, np.float32))
            np.testing.assert_array_equal(centre, np.float32(expected))
            assert (upper.astype(np.float64) >= expected + 4 * 255).all()


@pytest.mark.parametrize("isa", NATIVE)
def test_fields_of_three_bits_are_for_plane_0(isa: str) -> None:
    plane, _, _ = random_plane(np.random.default_rng(0), 32, [3, 2], True)
    k = get_kernels(isa, 1)
    handle = k.bind(plane, np.full(32, 0x3F80, np.uint16), None)
    states = random_states(np.random.default_rng(0), plane, 1)
    with pytest.raises(ValueError, match="plane 0"):
        k.refine(handle, states, np.arange(4), np.zeros(4, np.float32))


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [*LENGTHS, 640])
def test_score_equals_the_reference_to_the_bit(isa: str, kind: str, width: int) -> None:
    rng = np.random.default_rng(width)
    data = rng.standard_normal((67, width)) * 10.0 ** rng.integers(-6, 4, (67, 1))
    if kind == "bfloat16":
        stored = (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = data.astype(kind)
    rows = Rows(np.ascontiguousarray(stored), kind)
    h = rng.standard_normal((3, width))
    native, reference = get_kernels(isa, 2), get_kernels("reference")
    for ids in (None, np.array([5, 5, 66, 0], np.int64)):
        for a, b in zip(native.score(rows, h, ids), reference.score(rows, h, ids), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", NATIVE)
def test_score_is_within_its_stated_error(isa: str) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((50, 640)) * 10.0 ** rng.integers(-30, 30, (50, 640))).astype(np.float32)
    h = rng.standard_normal((1, 640)) * 10.0 ** rng.integers(-10, 10, (1, 640))
    value, magnitude = get_kernels(isa, 1).score(Rows(rows, "float32"), h)
    error = score_error(640, magnitude)[0]
    for i in range(50):
        from fractions import Fraction

        true = sum(Fraction(float(w)) * Fraction(float(x)) for w, x in zip(rows[i], h[0], strict=True))
        assert abs(Fraction(float(value[0, i])) - true) <= Fraction(float(error[i]))


@pytest.mark.parametrize("isa", [*NATIVE, "reference"])
@given(
    values=st.lists(st.floats(width=32) | st.sampled_from([0.0, 1.0, math.inf, -math.inf]), min_size=1, max_size=80),
    count=st.integers(0, 90),
)
@settings(max_examples=60, deadline=None)
def test_leaders_are_the_largest_values(isa: str, values: list[float], count: int) -> None:
    v = np.array(values, np.float32)
    want = sorted((i for i in range(len(v)) if not np.isnan(v[i])), key=lambda i: (-v[i], i))[:count]
    assert get_kernels(isa, 3).leaders(v, count).tolist() == want


@pytest.mark.parametrize("isa", [*NATIVE, "reference"])
@given(
    values=st.lists(st.floats(width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=80),
    bar=st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_select_keeps_all_that_is_not_below(isa: str, values: list[float], bar: float) -> None:
    v = np.array(values, np.float32)
    ids, dropped = get_kernels(isa, 1).select(v, bar)
    keep = [i for i in range(len(v)) if not v[i] <= np.float32(bar)]
    assert ids.tolist() == keep, "NaN must stay: it never proves anything"
    rest = [float(v[i]) for i in range(len(v)) if i not in set(keep)]
    assert dropped == max(rest, default=-math.inf)


@given(x=st.floats(allow_nan=False), value=st.floats(width=32, allow_nan=False))
@settings(max_examples=300)
def test_a_float32_above_the_bar_is_at_least_the_threshold(x: float, value: float) -> None:
    with np.errstate(over="ignore"):
        assert (value > float(below_float32(x))) == (value >= x) or x == -math.inf


def test_kernels_are_chosen_reported_and_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CSV_DECODE_SIMD", raising=False)
    assert simd_info()["active"] == NATIVE[-1]
    monkeypatch.setenv("CSV_DECODE_SIMD", "generic")
    assert get_kernels().name == "generic"
    assert simd_info() == {**simd_info(), "active": "generic", "forced": True}
    monkeypatch.setenv("CSV_DECODE_SIMD", "mmx")
    with pytest.raises(ValueError, match="CSV_DECODE_SIMD is 'mmx'; this processor can run generic"):
        get_kernels()


def test_a_forked_child_has_working_threads() -> None:
    import multiprocessing

    v = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    get_kernels(None, 2).leaders(v, 3)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        got = pool.apply_async(_leaders, (v,)).get(timeout=30)
    assert got == get_kernels(None, 2).leaders(v, 3).tolist()


def _leaders(v: np.ndarray) -> list[int]:
    return get_kernels(None, 2).leaders(v, 3).tolist()
