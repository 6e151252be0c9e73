"""Bad input gets a clear error that names what was given and what was expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import csv_decode as cd

from .conftest import make_head

pytestmark = pytest.mark.usefixtures("cascade")


@pytest.fixture(scope="module")
def small() -> tuple[np.ndarray, np.ndarray, cd.Index]:
    weight, states = make_head(200, 16)
    return weight, states, cd.build_index(weight, states, seed=0, threads=1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_states_that_are_not_numbers_are_refused(small: tuple, bad: float) -> None:
    weight, states, index = small
    h = states[:3].astype(np.float64)
    h[1, 5] = bad
    with pytest.raises(ValueError, match=r"hidden state 1 has 1 values that are NaN, infinite or beyond"):
        cd.CertifiedHead(index, weight).top_k(h)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (np.zeros((2, 15), np.float32), r"shape \(2, 15\), expected \(B, 16\) or \(16,\)"),
        (np.zeros((2, 2, 16), np.float32), r"shape \(2, 2, 16\)"),
        (np.zeros((0, 16), np.float32), "batch of hidden states is empty"),
        (np.zeros((1, 16), np.int64), "dtype int64, expected float16"),
        (np.zeros((1, 16), complex), "dtype complex128"),
        ([["a"] * 16], "dtype <U1"),
    ],
)
def test_states_of_another_shape_or_type_are_refused(small: tuple, hidden: object, message: str) -> None:
    weight, _, index = small
    with pytest.raises(ValueError, match=message):
        cd.CertifiedHead(index, weight).top_k(hidden)


@pytest.mark.parametrize("k", [0, -1, 201, 1.5, "3", True, None])
def test_k_out_of_range_is_refused(small: tuple, k: object) -> None:
    weight, states, index = small
    with pytest.raises(ValueError, match=r"k is .*, expected a whole number from 1 to 200"):
        cd.CertifiedHead(index, weight).top_k(states[0], k)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", ["shadow", "centroid"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused(bounds: str, bad: float) -> None:
    weight, states = make_head(50, 8)
    weight[17, 3] = bad
    with pytest.raises(ValueError, match="1 rows of the weights hold NaN or infinity, the first is row 17"):
        cd.build_index(weight, states, bounds=bounds)


def test_weights_that_are_not_numbers_are_refused_without_an_index_too() -> None:
    weight, _ = make_head(50, 8)
    weight[17, 3] = np.nan
    with pytest.raises(ValueError, match="the first is row 17"):
        cd.CertifiedHead(None, weight)
    cd.CertifiedHead(None, cd.HeadSpec(weight, valid_rows=17))


def test_a_thread_that_flushes_subnormal_numbers_is_refused() -> None:
    torch = pytest.importorskip("torch")
    weight, states = make_head(50, 8)
    head = cd.CertifiedHead(None, weight)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        with pytest.raises(RuntimeError, match="flushes subnormal numbers to zero"):
            head.top_k(states[0])
    finally:
        torch.set_flush_denormal(False)
    head.top_k(states[0])


def test_nothing_is_built_or_checked_in_such_a_thread() -> None:
    torch = pytest.importorskip("torch")
    weight, states = make_head(50, 8)
    index = cd.build_index(weight, states, threads=1)
    top = cd.CertifiedHead(index, weight).top_k(states[0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        for call in (
            lambda: cd.build_index(weight, states, threads=1),
            lambda: cd.verify_index(index, weight),
            lambda: cd.verify(top, states[0], weight),
        ):
            with pytest.raises(RuntimeError, match="IEEE arithmetic"):
                call()
    finally:
        torch.set_flush_denormal(False)


def test_weights_that_changed_since_the_spec_was_made_are_noticed() -> None:
    weight, states = make_head(50, 8)
    spec = cd.HeadSpec(weight)
    index = cd.build_index(spec, states, threads=1)
    weight[7] *= 5
    with pytest.raises(cd.StaleIndexError):
        cd.CertifiedHead(index, spec)


def test_tensors_and_arrays_that_are_not_plain_numbers_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for bad in (torch.ones(4, 3).to_sparse(), torch.ones(4, 3, device="meta"), torch.ones(4, 3, dtype=torch.int8)):
        with pytest.raises(ValueError, match=r"cannot be read|move it to the CPU|has dtype"):
            cd.HeadSpec(bad)

    class Special(torch.nn.Parameter):
        pass

    assert cd.HeadSpec(Special(torch.ones(4, 3))).n_rows == 4
    with pytest.raises(ValueError, match="masked entries"):
        cd.HeadSpec(np.ma.masked_array(np.ones((4, 3), np.float32), mask=np.eye(4, 3)))


def test_numbers_of_numpy_are_as_good_as_pythons(tmp_path: Path) -> None:
    weight, states = make_head(50, 8)
    index = cd.build_index(
        weight,
        states,
        bounds=("centroid", "shadow"),
        seed=np.int64(2**40),  # type: ignore[arg-type]
        bits=(np.float32(2),),  # type: ignore[arg-type]
        ridge=np.float32(0.1),  # type: ignore[arg-type]
        iterations=np.int64(2),  # type: ignore[arg-type]
        spherical=np.True_,  # type: ignore[arg-type]
        threads=np.int64(1),  # type: ignore[arg-type]
    )
    index.save(tmp_path / "x")
    assert cd.load_index(tmp_path / "x", weight).settings == index.settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((4, 3))}, "weight has dtype float64, expected float32"),
        ({"weight": np.zeros((4, 3), np.int8)}, "weight has dtype int8"),
        ({"weight": np.zeros(3, np.float32)}, r"weight has shape \(3,\), expected \(V, d\)"),
        ({"weight": np.zeros((0, 3), np.float32)}, r"weight has shape \(0, 3\)"),
        ({"bias": np.zeros(3, np.float32)}, r"bias has shape \(3,\) and dtype float32, expected \(4,\)"),
        ({"bias": np.full(4, np.nan, np.float32)}, "bias has 4 NaN"),
        ({"scale": 0.0}, "scale is 0.0, expected a positive"),
        ({"scale": "1"}, "scale is '1', expected a positive"),
        ({"valid_rows": 2.5}, "valid_rows is 2.5, expected a whole number"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"softcap": np.inf}, "softcap is inf"),
        ({"valid_rows": 5}, "valid_rows is 5, expected a whole number from 1 to 4"),
        ({"valid_rows": 0}, "valid_rows is 0"),
    ],
)
def test_impossible_heads_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cd.HeadSpec(**{"weight": np.ones((4, 3), np.float32), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": "fancy"}, "bounds is 'fancy', expected 'shadow'"),
        ({"bounds": []}, "bounds is"),
        ({"bounds": ["shadow", "centroid"]}, "the coarse bound comes first"),
        ({"bits": ()}, "bits is"),
        ({"bits": 2.5}, "bits is 2.5"),
        ({"bounds": None}, "bounds is None"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"bits": (0.0,)}, "bits is"),
        ({"bits": (9.0,)}, "bits is"),
        ({"bits": (1.0,) * 5}, "expected 1 to 4 numbers"),
        ({"ridge": 0.0}, "ridge is 0.0"),
        ({"clusters": 51, "bounds": "centroid"}, "clusters is 51, expected a whole number from 1 to 50"),
        ({"iterations": 0, "bounds": "centroid"}, "iterations is 0"),
        ({"calibration": np.zeros((3, 9), np.float32)}, r"shape \(3, 9\), expected \(B, 8\)"),
        ({"calibration": np.zeros((3, 8), np.float32)}, "calibration states are all zero"),
    ],
)
def test_impossible_builds_are_refused(change: dict, message: str) -> None:
    weight, states = make_head(50, 8)
    with pytest.raises(ValueError, match=message):
        cd.build_index(weight, **{"calibration": states, **change})


def test_an_index_of_other_weights_is_refused(small: tuple) -> None:
    weight, _, index = small
    other = weight.copy()
    other[3, 3] = np.nextafter(other[3, 3], np.float32(9))
    with pytest.raises(cd.StaleIndexError, match=r"index was built for weights .*V=200, d=16.*, not weights"):
        cd.CertifiedHead(index, other)
    with pytest.raises(cd.StaleIndexError, match=r"not weights .*V=199"):
        cd.CertifiedHead(index, weight[:199])
    with pytest.raises(cd.StaleIndexError, match="valid rows"):
        cd.CertifiedHead(index, cd.HeadSpec(weight, valid_rows=150))
    with pytest.raises(cd.StaleIndexError):
        cd.CertifiedHead(index, cd.HeadSpec(weight, bias=np.ones(200, np.float32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guarantee": "hopeful"}, "guarantee is 'hopeful'"),
        ({"budget": 0.0}, "budget is 0.0"),
        ({"budget": 1.1}, "budget is 1.1"),
        ({"budget": "x"}, "budget is 'x'"),
        ({"index": "path"}, "index is str, expected an Index"),
        ({"threads": 0}, "threads is 0"),
        ({"kernels": "mmx"}, "kernels 'mmx' are unknown"),
    ],
)
def test_impossible_heads_options_are_refused(small: tuple, change: dict, message: str) -> None:
    weight, _, index = small
    with pytest.raises(ValueError, match=message):
        cd.CertifiedHead(**{"index": index, "spec": weight, **change})


def test_a_row_too_large_for_the_codes_is_refused() -> None:
    weight, states = make_head(50, 8)
    weight[7] = 3e38
    with pytest.raises(ValueError, match="row 7 of the weights is too large to code"):
        cd.build_index(weight, states)
