"""Heads in the block formats of GGUF files: the same numbers as the `gguf` package makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode.kernels import get_kernels
from csv_decode.kernels.native import supported
from csv_decode.spec import BLOCKS, Rows

from .conftest import make_head

gguf = pytest.importorskip("gguf")


def random_rows(kind: str, rows: int, blocks: int, seed: int = 0) -> Rows:
    """Any bytes at all, but for scales that are finite."""
    rng = np.random.default_rng(seed)
    size = BLOCKS[kind][1]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in {"q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}[kind]:
        scale = (rng.standard_normal((rows, blocks, 1)) * 10.0 ** rng.integers(-7, 2, (rows, blocks, 1))).astype(
            np.float16
        )
        data[:, :, at : at + 2] = scale.view(np.uint8)
    return Rows.packed(data.reshape(rows, -1), kind)


def quantised(weight: np.ndarray, kind: str) -> Rows:
    return Rows.packed(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind.upper()]), kind)


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    rows = random_rows(kind, 300, 2)
    width = rows.shape[1]
    expected = gguf.quants.dequantize(rows.data, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(rows.float32(), expected)
    assert np.array_equal(rows.float32(np.array([7, 3])), expected[[7, 3]])
    for name in supported():
        kernels = get_kernels(name, threads=1)
        for first in range(0, width, 64):
            units = np.eye(width)[first : first + 64]
            value, magnitude = kernels.score(rows, units)
            assert np.array_equal(value, expected[:, first : first + 64].T.astype(np.float64))
            assert np.array_equal(magnitude, np.abs(value))


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_sums_are_those_of_float32_rows_on_every_instruction_set(kind: str) -> None:
    rows = random_rows(kind, 200, 3, seed=1)
    h = np.random.default_rng(2).standard_normal((3, rows.shape[1]))
    ids = np.array([5, 5, 199, 0, 77])
    expected = get_kernels("reference").score(Rows(rows.float32(), "float32"), h, ids)
    for name in (*supported(), "reference"):
        got = get_kernels(name).score(rows, h, ids)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
def test_a_packed_head_decodes_as_its_float32_numbers_do(kernels: str, cascade: None, tmp_path: Path) -> None:
    weight, states = make_head(900, 64)
    packed = cd.HeadSpec(quantised(weight, "q8_0"))
    wide = cd.HeadSpec(packed.rows.float32())
    index = cd.build_index(packed, states, seed=0)
    index.save(tmp_path / "index")
    head = cd.CertifiedHead(cd.load_index(tmp_path / "index", packed), packed, kernels=kernels)
    other = cd.CertifiedHead(cd.build_index(wide, states, seed=0), wide, kernels=kernels)
    for call in (
        lambda head: head.top_k(states[:9], 5),
        lambda head: head.sample(states[:9], 0.7, top_p=0.9, seed=3),
        lambda head: head.scores(states[:2], np.array([[3, 4], [5, 6]])),
    ):
        assert np.array_equal(call(head).ids, call(other).ids)
    top = head.top_k(states[0], 5)
    cd.verify(top, states[0], packed)
    cd.verify(head.softmax(states[:3], 0.01), states[:3], packed)
    # a row is 34 bytes for 32 numbers
    read = top.certificates.bytes_read[0] - other.top_k(states[0], 5).certificates.bytes_read[0]
    assert read == top.certificates.rows_scored[0] * (68 - 256)
    with pytest.raises(cd.StaleIndexError):
        cd.CertifiedHead(index, wide)


def test_what_is_no_packed_matrix_is_refused() -> None:
    data = np.zeros((4, 68), np.uint8)
    assert Rows.packed(data, "q8_0").shape == (4, 64)
    bad: list[tuple[Any, Any]] = [
        (data[:, :67], "q8_0"),
        (data.astype(np.int8), "q8_0"),
        (data[0], "q8_0"),
        (data, "q4_k"),
    ]
    for array, kind in bad:
        with pytest.raises(ValueError, match=r"whole|expected"):
            Rows.packed(array, kind)
    with pytest.raises(ValueError, match=r"kind is 'q3_k'"):
        Rows.packed(data, "q3_k")
    infinite = data.copy()
    infinite[2, :2] = np.array([np.inf], np.float16).view(np.uint8)
    infinite[2, 2:34] = 1
    with pytest.raises(ValueError, match="the first is row 2"):
        cd.build_index(cd.HeadSpec(Rows.packed(infinite, "q8_0")), None)
    with pytest.raises(ValueError, match="model_argmax"):
        cd.CertifiedHead(None, cd.HeadSpec(Rows.packed(data, "q8_0"))).model_argmax(np.ones((1, 64), np.float32))
