"""A short, seeded part of `benchmarks/fuzz.py`, and what it has found."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode.index.storage import FORMAT, _checksum, _tensors

from .conftest import make_head
from .exactly import exact_logits, exact_top_k

SANITIZED = bool(os.environ.get("CSV_DECODE_SANITIZE"))


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("fuzz")


@pytest.mark.parametrize(("kind", "cases"), [("index", 1500), ("arguments", 700)])
def test_a_short_run_finds_nothing(fuzz: Any, capsys: pytest.CaptureFixture[str], kind: str, cases: int) -> None:
    cases = cases // 20 if SANITIZED else cases
    status = fuzz.main(["--only", kind, "--cases", str(cases), "--seed", "1"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"{kind}: {cases} cases" in said
    assert "exact" in said


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("os.kill(os.getpid(), 11)", "the process ended with exit code -11"),
        ("time.sleep(60)", "no answer within 1 s"),
        ("np.zeros(1 << 36)", "MemoryError"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
@pytest.mark.skipif(SANITIZED, reason="sanitizers have signals and memory of their own")
def test_a_case_that_crashes_hangs_or_asks_for_too_much_is_a_finding(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, said: str
) -> None:
    lines = [
        "import os, time",
        "import numpy as np",
        "def prepare(folder): pass",
        "def open(context, folder): return case",
    ]
    (tmp_path / "fuzz_arguments.py").write_text("\n".join([*lines, f"def case(rng): {case}"]))
    monkeypatch.delitem(sys.modules, "fuzz_arguments", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fuzz, "SECONDS", 1.0 if "sleep" in case else 60.0)
    assert fuzz.main(["--only", "arguments", "--cases", "1", "--seed", "5"]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "--only arguments --seed 5 --case 0" in out
    monkeypatch.delitem(sys.modules, "fuzz_arguments", raising=False)


# Index files.


@pytest.fixture(scope="module")
def made() -> tuple[np.ndarray, np.ndarray, cd.Index]:
    weight, states = make_head(40, 9)
    return weight, states, cd.build_index(weight, states, seed=0, threads=1)


def header_of(content: bytes) -> tuple[dict, bytes]:
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def with_header(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("shape", [[1] * 70, [0, 2**62], [2**62, 0]])
def test_shapes_that_numpy_cannot_hold_are_refused(tmp_path: Path, made: tuple, shape: list[int]) -> None:
    made[2].save(tmp_path / "x")
    header, data = header_of((tmp_path / "x").read_bytes())
    size = 0 if 0 in shape else 4
    header["extra"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + size]}
    (tmp_path / "x").write_bytes(with_header(header, data + bytes(size)))
    with pytest.raises(cd.IndexFileError, match="tensor extra has a shape that no index has"):
        cd.load_index(tmp_path / "x")


@pytest.mark.parametrize("depth", [300, 900, 990, 100_000])
def test_metadata_nested_deeply_is_refused(tmp_path: Path, made: tuple, depth: int) -> None:
    made[2].save(tmp_path / "x")
    header, data = header_of((tmp_path / "x").read_bytes())
    header["__metadata__"][FORMAT] = header["__metadata__"][FORMAT].replace(
        '"settings": {', '"settings": {"x": ' + "[" * depth + "]" * depth + ", "
    )
    (tmp_path / "x").write_bytes(with_header(header, data))
    with pytest.raises(cd.IndexFileError, match=r"nested too deeply|malformed|checksum"):
        cd.load_index(tmp_path / "x")


def test_settings_are_an_object(tmp_path: Path, made: tuple) -> None:
    """A list of pairs would become names that are numbers, and be saved as another index."""
    weight, _, index = made
    index.save(tmp_path / "x")
    header, data = header_of((tmp_path / "x").read_bytes())
    about = json.loads(header["__metadata__"][FORMAT])
    about["head"]["settings"] = [[1, 2], [3, 4]]
    about["sha256"] = _checksum(about["head"], _tensors(index))
    header["__metadata__"][FORMAT] = json.dumps(about)
    (tmp_path / "x").write_bytes(with_header(header, data))
    with pytest.raises(cd.IndexFileError, match="settings is list, expected dict"):
        cd.load_index(tmp_path / "x", weight)


def test_tensors_of_a_file_are_aligned_whatever_stands_before_them(tmp_path: Path) -> None:
    weight, states = make_head(41, 9)  # an odd number of 16-bit row scales stands before a float32 transform
    index = cd.build_index(weight, states, seed=0, threads=1, guarantee="probabilistic")
    index.save(tmp_path / "x")
    shadow = cd.load_index(tmp_path / "x", weight).shadow
    assert shadow is not None
    assert shadow.transform.flags.aligned
    assert all(plane.words.flags.aligned for plane in shadow.planes)


# Indexes in memory.


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": 3},
        {"kind": "x" * 100_000},
        {"shape": [40, 9]},
        {"shape": (10**5000, 9)},
        {"n_rows": 40.0},
        {"settings": None},
        {"settings": {1: 2}},
        {"centroid": ...},
        {"shadow": ...},
        {"shadow": {"delta": "1"}},
        {"shadow": {"planes": []}},
        {"shadow": {"planes": (1, 2)}},
        {"shadow": {"mean": [0.0] * 9}},
        {"shadow": {"rho": np.zeros(40, ">u2")}},
        {"shadow": {"rotation_error": 1.0}},
        {"shadow": {"transform": np.zeros((9, 32), np.float16).T}},
    ],
)
@pytest.mark.usefixtures("cascade")
def test_an_index_that_is_none_is_refused_by_all_who_compute_from_it(made: tuple, change: dict) -> None:
    weight, _, index = made
    if isinstance(change.get("shadow"), dict):
        change = {"shadow": dataclasses.replace(index.shadow, **change["shadow"])}
    other = dataclasses.replace(index, **change)
    for call in (lambda: cd.verify_index(other, weight), lambda: cd.CertifiedHead(other, weight)):
        with pytest.raises(ValueError, match=r"expected|impossible|together|not stored|guarantee") as caught:
            call()
        assert len(str(caught.value)) < 500


def test_what_is_no_index_is_refused(made: tuple) -> None:
    with pytest.raises(ValueError, match="index is str, expected an Index"):
        cd.verify_index("path", made[0])  # type: ignore[arg-type]


# Arguments.

NO_NUMBERS: list[Any] = [True, np.True_, "1", b"1", 1j, [1.0], np.array([1.0]), np.array([1.0, 2.0]), np.timedelta64(1)]
OUT_OF_RANGE: list[Any] = [0.0, -1, 10**400, -(10**5000), np.nan, np.inf, 1e300, 5e-324, np.longdouble("1e4000")]


@pytest.mark.parametrize("value", [*NO_NUMBERS, *OUT_OF_RANGE], ids=lambda value: type(value).__name__)
def test_numbers_that_are_none_or_too_large_or_small_are_refused(made: tuple, value: Any) -> None:
    weight, states, index = made
    for name in ("scale", "softcap"):
        with pytest.raises(ValueError, match=rf"{name} is .*expected a positive number"):
            cd.HeadSpec(weight, **{name: value})
    with pytest.raises(ValueError, match=r"ridge is .*expected a positive number"):
        cd.build_index(weight, states, ridge=value)
    with pytest.raises(ValueError, match=r"budget is .*expected a positive number"):
        cd.CertifiedHead(index, weight, budget=value)
    with pytest.raises(ValueError, match=r"bits is .*expected 1 to 4 numbers"):
        cd.build_index(weight, states, bits=(value,))


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, np.timedelta64(3), np.array([3]), np.array([1, 2]), 1 << 64],
    ids=lambda value: type(value).__name__,
)
def test_whole_numbers_are_whole_and_in_range(made: tuple, value: Any) -> None:
    weight, states, index = made
    with pytest.raises(ValueError, match=r"k is .*expected a whole number from 1 to 40") as caught:
        cd.CertifiedHead(index, weight).top_k(states, value)
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="valid_rows is"):
        cd.HeadSpec(weight, valid_rows=value)


def test_any_chance_above_zero_may_be_asked_for() -> None:
    weight, states = make_head(40, 9)
    index = cd.build_index(weight, states, seed=0, threads=1, guarantee="probabilistic")
    head = cd.CertifiedHead(index, weight, guarantee="probabilistic", failure_probability=1e-307)
    assert np.isfinite(head._sigma)
    for chance in (0, 0.6, "x", 5e-324):
        with pytest.raises(ValueError, match="failure_probability is"):
            cd.CertifiedHead(index, weight, guarantee="probabilistic", failure_probability=chance)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guarantee": ["deterministic"]}, "guarantee is .*, expected 'deterministic' or 'probabilistic'"),
        ({"guarantee": np.array(["deterministic"] * 2)}, "guarantee is .*, expected"),
        ({"bounds": 5}, "bounds is 5, expected 'shadow'"),
        ({"bounds": [["shadow"]]}, "bounds is"),
        ({"bounds": np.array(["shadow", "shadow"])}, "bounds is"),
        ({"bits": 10**5000}, "bits is a int, expected"),
        ({"spherical": np.ones(2)}, "spherical is .*, expected True or False"),
        ({"verify": "no"}, "verify is 'no', expected True or False"),
        ({"progress": 5}, "progress is 5, expected a function or None"),
        ({"spec": [[1.0, 2.0], [3.0]]}, "a list cannot be read as an array of numbers"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_of_another_kind_are_refused(made: tuple, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cd.build_index(**{"spec": made[0], "calibration": made[1], **change})


def test_a_head_and_its_step_refuse_options_of_another_kind(made: tuple) -> None:
    weight, states, index = made
    with pytest.raises(ValueError, match=r"kernels .* are unknown"):
        cd.CertifiedHead(index, weight, kernels=np.array(["generic", "avx2"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ties is .*, expected True or False"):
        cd.CertifiedHead(index, weight).top_k(states, ties=np.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [5, b"x", None, "a\0b"])
def test_paths_that_are_none_are_refused(made: tuple, path: Any) -> None:
    for call in (lambda: cd.load_index(path), lambda: made[2].save(path)):
        with pytest.raises(ValueError, match=r"path is .*, expected the path of a file"):
            call()


@pytest.mark.usefixtures("cascade")
def test_arrays_that_are_not_aligned_are_served_exactly() -> None:
    weight, states = make_head(40, 9)

    def shifted(array: np.ndarray) -> np.ndarray:
        out = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        out[...] = array
        return out

    bias = np.arange(40, dtype=np.float32)
    spec = cd.HeadSpec(shifted(weight), shifted(bias))
    index = cd.build_index(spec, shifted(states), seed=0, threads=1)
    for h in (states[3], states[3].astype(np.float64)):
        top = cd.CertifiedHead(index, spec).top_k(shifted(h), 5)
        assert top.ids[0].tolist() == exact_top_k(exact_logits(weight, h, bias), 5)
    assert spec.rows.data.flags.aligned


@pytest.mark.parametrize("kernels", ["reference", "generic"])
@pytest.mark.usefixtures("cascade")
def test_a_calibration_of_next_to_nothing_gives_an_infinite_energy_and_no_warning(kernels: str) -> None:
    weight, states = make_head(40, 9)
    index = cd.build_index(weight, states, seed=0, threads=1)
    shadow = dataclasses.replace(index.shadow, energy=5e-324)  # type: ignore[type-var]
    top = cd.CertifiedHead(dataclasses.replace(index, shadow=shadow), weight, kernels=kernels).top_k(states[:2], 3)
    assert np.isinf(top.certificates.energy).all()
    cd.verify(top, states[:2], weight)


def test_centroids_beyond_float32_are_told_without_a_warning() -> None:
    pytest.importorskip("faiss")
    weight = np.full((40, 9), np.finfo(np.float32).max)
    weight[::2] *= -1
    with pytest.raises(ValueError, match="too large for centroids"):
        cd.build_index(weight, None, "centroid", seed=0, clusters=1, threads=1)


# Results.


def test_verify_refuses_what_is_no_result(made: tuple) -> None:
    weight, states, index = made
    with pytest.raises(ValueError, match="result is str, expected what a mode"):
        cd.verify("top", states, weight)  # type: ignore[arg-type]
    bad = weight.copy()
    bad[7, 0] = np.nan
    with pytest.raises(ValueError, match="the first is row 7"):
        cd.verify(cd.CertifiedHead(index, weight).top_k(states[:2], 3), states[:2], bad)


@pytest.mark.parametrize(
    "change",
    [
        {"k": 0},
        {"k": 2},
        {"k": None},
        {"ids": None},
        {"ids": np.zeros((2, 3))},
        {"ids": np.zeros((2, 3, 1), np.int64)},
        {"ids": np.array([["a"] * 3] * 2)},
        {"logits": None},
        {"logits": np.zeros((2, 2))},
        {"logits": np.zeros((2, 3), complex)},
        {"logit_error": 0.0},
        {"logit_error": np.zeros(1)},
        {"certificates": None},
        {"certificates": {"threshold": np.zeros(1)}},
        {"certificates": {"threshold": None}},
        {"certificates": {"survivors": 5}},
        {"certificates": {"fallback": []}},
    ],
    ids=str,
)
def test_verify_refuses_results_of_another_form(made: tuple, change: dict) -> None:
    weight, states, index = made
    top = cd.CertifiedHead(index, weight).top_k(states[:2], 3)
    if isinstance(change.get("certificates"), dict):
        change = {"certificates": dataclasses.replace(top.certificates, **change["certificates"])}
    with pytest.raises(cd.VerificationError, match=r"this is no TopK|are not 2 distinct ids"):
        cd.verify(dataclasses.replace(top, **change), states[:2], weight)


def test_certificates_are_a_sequence(made: tuple) -> None:
    weight, states, index = made
    certificates = cd.CertifiedHead(index, weight).top_k(states[:2], 3).certificates
    assert len(list(certificates)) == 2
    assert certificates[-1] == certificates[1]
    for wrong, error in ((2, IndexError), (10**400, IndexError), (0.5, TypeError), (np.array([1, 0]), TypeError)):
        with pytest.raises(error):
            certificates[wrong]  # type: ignore[index]


@pytest.mark.skipif(SANITIZED, reason="torch takes minutes to load")
def test_restore_gives_back_what_is_no_model() -> None:
    pytest.importorskip("transformers")
    assert cd.restore("x") == "x"  # type: ignore[type-var]
