"""Building, storing, refusing and verifying an index."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import csv_decode as cd
from csv_decode.index.storage import FORMAT, _checksum

from .conftest import KINDS, make_head

BOUNDS = ["shadow", "centroid", ("centroid", "shadow")]


def build(weight: object, states: np.ndarray | None, bounds: object = "shadow", **more: object) -> cd.Index:
    return cd.build_index(weight, states, bounds=bounds, **{"seed": 0, "threads": 1, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    weight, states = make_head(200, 40)
    path = tmp_path_factory.mktemp("index") / "head.safetensors"
    build(weight, states, ("centroid", "shadow")).save(path)
    return path, weight, states


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_survives_its_file(tmp_path: Path, kind: str, bounds: object) -> None:
    weight, states = make_head(100, 24, kind=kind)
    index = build(weight, states, bounds)
    index.save(tmp_path / "a.safetensors")
    again = cd.load_index(tmp_path / "a.safetensors", weight=weight)
    assert again.settings == index.settings
    assert again.bounds == index.bounds == ((bounds,) if isinstance(bounds, str) else bounds)
    cd.verify_index(again, weight, threads=1)
    a = cd.CertifiedHead(index, weight).top_k(states[:4], 5)
    b = cd.CertifiedHead(again, weight).top_k(states[:4], 5)
    np.testing.assert_array_equal(a.ids, b.ids)
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2, "no temporary file is left behind"


def test_the_same_seed_gives_the_same_index() -> None:
    weight, states = make_head(100, 24)
    one, two, three = (build(weight, states, seed=s) for s in (1, 1, 2))
    assert one.shadow is not None
    np.testing.assert_array_equal(one.shadow.planes[0].words, two.shadow.planes[0].words)
    assert not np.array_equal(one.shadow.transform, three.shadow.transform)
    assert build(weight, states, seed=None).settings["seed"] != build(weight, states, seed=None).settings["seed"]


@pytest.mark.parametrize("width", [128, 97, 256])
@pytest.mark.parametrize("bits", [(2.5, 2.0), (7.0, 7.0, 7.0, 7.0)])
def test_heads_with_dead_columns_or_rows_are_built_like_others(width: int, bits: tuple) -> None:
    """Rows that live in few dimensions: their radii elsewhere are nothing but rounding."""
    rng = np.random.default_rng(width)
    for seed in range(3):
        weight = np.zeros((300, width), np.float32)
        weight[:, :20] = rng.standard_normal((300, 20))
        weight[rng.random(300) < 0.5] = 0
        cd.verify_index(build(weight, None, seed=seed, bits=bits), weight)
        weight[: 60 + seed] = 0
        weight[60 + seed] = 1e30  # one row far from nothing
        cd.verify_index(build(weight[:61], None, seed=seed, bits=bits), weight[:61])
        onehot = np.eye(width, dtype=np.float32)
        cd.verify_index(build(onehot, None, seed=seed, bits=bits), onehot)


@pytest.mark.parametrize("ridge", [1e-12, 1e-4, 1e6])
def test_any_ridge_gives_a_sound_index(ridge: float) -> None:
    weight, states = make_head(100, 40)
    states[:, 7] = 0
    cd.verify_index(build(weight, states[:3], ridge=ridge), weight)


def test_settings_and_progress_are_reported() -> None:
    weight, states = make_head(100, 24)
    seen: list[tuple[str, int, int]] = []
    index = build(weight, states, ("centroid", "shadow"), progress=lambda *a: seen.append(a), iterations=2, clusters=9)
    assert index.settings["calibration_states"] == 64
    assert index.settings["clusters"] == 9
    assert [s for s in seen if s[0] == "clustering"] == [("clustering", 1, 2), ("clustering", 2, 2)]
    assert ("coding", 100, 100) in seen
    assert ("verifying", 100, 100) in seen


def test_without_calibration_the_index_is_sound_all_the_same() -> None:
    weight, states = make_head(100, 24)
    index = build(weight, None)
    cd.verify_index(index, weight)
    top = cd.CertifiedHead(index, weight).top_k(states[:3], 2)
    cd.verify(top, states[:3], weight)


def test_more_bits_leave_fewer_survivors(cascade: None) -> None:
    weight, states = make_head(2000, 64)
    left = []
    for bits in [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]:
        head = cd.CertifiedHead(build(weight, states[:32], bits=bits), weight, budget=None)
        left.append(head.top_k(states[32:], 1).certificates.survivors.mean(axis=0))
    assert left[0][0] > left[1][0] > left[2][0]
    assert left[0][1] > left[1][1] > left[2][1]


def test_spherical_clusters_stay_sound_for_rows_of_any_norm(cascade: None) -> None:
    weight, states = make_head(300, 24, kind="heavy")
    index = build(weight, None, "centroid", spherical=True)
    cd.verify_index(index, weight)
    cd.verify(cd.CertifiedHead(index, weight, budget=None).top_k(states[:8], 5), states[:8], weight)


@pytest.mark.parametrize("part", ["radii", "rho", "codes", "delta", "mean", "transform", "step"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_verify_index_finds_every_bound_that_does_not_hold(part: str, kind: str) -> None:
    weight, states = make_head(100, 64, kind=kind)
    index = build(weight, states)
    shadow = index.shadow
    assert shadow is not None
    plane = shadow.planes[1]
    words = plane.words.copy()
    change: dict[str, object] = {}
    if part == "radii":
        words.view(np.uint8).reshape(len(words), -1)[37, 2] -= 1
    elif part == "codes":
        words[37, 1:] ^= np.uint32(0xFFFFFFFF)
    elif part == "rho":
        change["rho"] = np.where(np.arange(100) == 37, shadow.rho - np.uint16(9), shadow.rho).astype(np.uint16)
    elif part == "delta":
        change["delta"] = shadow.delta * 1e-3
    elif part == "mean":
        change["mean"] = shadow.mean + np.float32(0.1)
    elif part == "transform":
        change["transform"] = shadow.transform * np.float16(1.25)
    if part in ("radii", "codes"):
        change["planes"] = (shadow.planes[0], dataclasses.replace(plane, words=words), *shadow.planes[2:])
    elif part == "step":
        change["planes"] = (dataclasses.replace(shadow.planes[0], step=shadow.planes[0].step * 1.5), *shadow.planes[1:])
    damaged = dataclasses.replace(index, shadow=dataclasses.replace(shadow, **change))  # type: ignore[arg-type]
    cd.verify_index(index, weight, threads=1)
    with pytest.raises(ValueError, match=r"the bound of row \d+ does not hold"):
        cd.verify_index(damaged, weight, threads=1)


@pytest.mark.parametrize("part", ["radius", "bias_max", "centroids"])
def test_verify_index_finds_every_cluster_that_does_not_hold(part: str) -> None:
    weight, _ = make_head(100, 24)
    spec = cd.HeadSpec(weight, np.arange(100, dtype=np.float32))
    index = build(spec, None, "centroid")
    assert index.centroid is not None
    cd.verify_index(index, spec)
    value = getattr(index.centroid, part) * np.float32(0.99)
    damaged = dataclasses.replace(index, centroid=dataclasses.replace(index.centroid, **{part: value}))
    with pytest.raises(ValueError, match=r"the bound of row \d+ does not hold"):
        cd.verify_index(damaged, spec)


@pytest.mark.parametrize("change", [{"bias_max": -1e4}, {"offsets": 1}, {"step": -1.0}, {"bits": 8}])
def test_verify_index_proves_indexes_that_never_were_a_file(change: dict) -> None:
    """Forged in memory: a bias bound below zero for a head without bias, rows in no cluster, impossible codes."""
    weight, states = make_head(100, 64)
    index = build(weight, states, ("centroid", "shadow"))
    centroid, shadow = index.centroid, index.shadow
    assert centroid is not None
    assert shadow is not None
    if "bias_max" in change:
        centroid = dataclasses.replace(centroid, bias_max=centroid.bias_max + np.float32(change["bias_max"]))
    if "offsets" in change:
        centroid = dataclasses.replace(centroid, offsets=np.maximum(centroid.offsets, 1))
    if "step" in change or "bits" in change:
        plane = shadow.planes[0]
        plane = dataclasses.replace(
            plane,
            step=plane.step * np.float32(change.get("step", 1)),
            bits=plane.bits + np.int32(change.get("bits", 0)),
        )
        shadow = dataclasses.replace(shadow, planes=(plane, *shadow.planes[1:]))
    with pytest.raises(ValueError, match=r"does not hold|impossible|negative|outside 0 to 7"):
        cd.verify_index(dataclasses.replace(index, centroid=centroid, shadow=shadow), weight)


# Files that are not an index, or not the right one.


def rewrite(path: Path, out: Path, *, tensors: dict | None = None, metadata: dict | None = None) -> Path:
    """A copy of the file with other tensors or metadata and a checksum that fits, as a forger would make it."""
    data = load_file(path) | (tensors or {})
    data = {name: tensor for name, tensor in data.items() if tensor is not None}
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    about = json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"][FORMAT]) | (metadata or {})
    about["sha256"] = _checksum(about["head"], data)
    save_file(data, out, metadata={FORMAT: json.dumps(about)})
    return out


def test_a_missing_file_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="csv-decode build"):
        cd.load_index(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\xff" * 100, struct.pack("<Q", 2**60) + b"{}", b"\0" * 8 + b"{}"])
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(cd.IndexFileError, match="damaged or not an index file"):
        cd.load_index(path)
    with pytest.raises(cd.IndexFileError):
        cd.load_index(tmp_path)


def test_a_safetensors_file_of_a_model_is_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros((2, 2), np.float32)}, tmp_path / "m")
    with pytest.raises(cd.IndexFileError, match="is a safetensors file but not an index"):
        cd.load_index(tmp_path / "m")


def test_another_version_is_refused(saved: tuple, tmp_path: Path) -> None:
    path = rewrite(saved[0], tmp_path / "x", metadata={"version": 99})
    with pytest.raises(cd.IndexFileError, match="has format version 99, this program reads version 3"):
        cd.load_index(path)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(saved: tuple, tmp_path: Path, part: float) -> None:
    content = saved[0].read_bytes()
    (tmp_path / "x").write_bytes(content[: int(len(content) * part)])
    with pytest.raises(cd.IndexFileError):
        cd.load_index(tmp_path / "x")


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_goes_unnoticed(saved: tuple, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(saved[0].read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 2000))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "x").write_bytes(content)
    try:
        index = cd.load_index(tmp_path / "x", weight=saved[1])
    except ValueError:
        return
    # White space and unread parts of the header may change; the index may not.
    want = cd.load_index(saved[0])
    assert index.settings == want.settings
    assert index.fingerprint == want.fingerprint
    assert index.shadow is not None
    assert want.shadow is not None
    np.testing.assert_array_equal(index.shadow.planes[0].words, want.shadow.planes[0].words)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("shadow.rho", lambda t: t[:-1], "shadow.rho is uint16"),
        ("shadow.rho", lambda t: t * 0, "row scale is not positive"),
        ("shadow.rho", lambda t: t | np.uint16(0x7F80), "row scale is not positive"),
        ("shadow.mean", lambda t: t * np.float32(np.nan), "shadow.mean holds NaN"),
        ("shadow.transform", lambda t: t.astype(np.float32), "shadow.transform is float32"),
        ("shadow.transform", lambda t: t[:, :-1].copy(), "shadow.transform is float16"),
        ("shadow.plane0.bits", lambda t: t + 8, "bit widths outside 0 to 7"),
        ("shadow.plane0.bits", lambda t: t * 0, "shadow.plane0.words is uint32"),
        ("shadow.plane0.words", lambda t: t[:-16].copy(), "shadow.plane0.words is uint32"),
        ("shadow.plane1.words", lambda t: t[:, :-1].copy(), "shadow.plane1.words is uint32"),
        ("shadow.plane1.step", lambda t: -1 - t, "negative steps"),
        ("shadow.plane1.radius_step", lambda t: None, "radius_step is missing"),
        ("shadow.plane3.bits", lambda t: np.zeros(3, np.int32), "unknown tensors"),
        ("centroid.offsets", lambda t: t[::-1].copy(), "cluster offsets are impossible"),
        ("centroid.radius", lambda t: -1 - t, "a cluster radius is negative"),
        ("row_ids", lambda t: t + 10**9, "row_ids is not a permutation"),
        ("row_ids", lambda t: t * 0, "row_ids is not a permutation"),
        ("row_ids", lambda t: None, "row_ids and centroids come together"),
    ],
)
def test_hostile_tensors_are_refused(saved: tuple, tmp_path: Path, name: str, change: object, message: str) -> None:
    tensor = load_file(saved[0]).get(name)
    path = rewrite(saved[0], tmp_path / "x", tensors={name: change(tensor)})  # type: ignore[operator]
    with pytest.raises(cd.IndexFileError, match=message):
        cd.load_index(path)


@pytest.mark.parametrize(
    "head",
    [
        "[]",
        "{}",
        "null",
        '{"fingerprint": 1}',
        '{"fingerprint":"a","kind":"float32","shape":[200],"n_rows":200,"settings":{},"shadow":null}',
        '{"fingerprint":"a","kind":"float32","shape":[200,40],"n_rows":-1,"settings":{},"shadow":null}',
        '{"fingerprint":"a","kind":"float32","shape":[200,40],"n_rows":1e99,"settings":{},"shadow":null}',
        '{"fingerprint":"a","kind":"float32","shape":[200,40],"n_rows":200,"settings":[[1]],"shadow":null}',
        '{"fingerprint":"a","kind":"float32","shape":[200,40],"n_rows":200,"settings":{},"shadow":{"delta":NaN,"energy":1}}',
    ],
)
def test_hostile_metadata_is_refused(saved: tuple, tmp_path: Path, head: str) -> None:
    with pytest.raises(cd.IndexFileError):
        cd.load_index(rewrite(saved[0], tmp_path / "x", metadata={"head": json.loads(head)}))


def test_a_forged_radius_passes_the_checksum_but_not_verify_index(saved: tuple, tmp_path: Path) -> None:
    words = load_file(saved[0])["shadow.plane1.words"]
    words[:, 0] = 0
    path = rewrite(saved[0], tmp_path / "x", tensors={"shadow.plane1.words": words})
    index = cd.load_index(path, weight=saved[1])
    with pytest.raises(ValueError, match="does not hold"):
        cd.verify_index(index, saved[1])
