"""The cache: an index is built once, found again, never taken for another's, and rebuilt when damaged."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode import cache

from .conftest import make_head

WEIGHT, STATES = make_head(300, 32)


class Calls:
    """Calibration that counts how often it is asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return STATES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_the_users_unless_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cache.cache_folder() == folder
    monkeypatch.delenv("CSV_DECODE_CACHE")
    assert "csv-decode" in str(cache.cache_folder())


def test_an_index_is_built_once_and_found_again() -> None:
    collect = Calls()
    first = cache.get_index(WEIGHT, collect)
    second = cache.get_index(WEIGHT, collect)
    assert collect.count == 1
    assert first.settings == second.settings
    assert first.shadow is not None
    assert second.shadow is not None
    assert np.array_equal(first.shadow.transform, second.shadow.transform)


def test_weights_bounds_key_and_settings_tell_indexes_apart() -> None:
    other = WEIGHT.copy()
    other[7, 3] += 1
    paths = {
        cache.index_path(WEIGHT),
        cache.index_path(other),
        cache.index_path(WEIGHT, key="a text"),
        cache.index_path(WEIGHT, "centroid"),
        cache.index_path(WEIGHT, ("centroid", "shadow")),
        cache.index_path(WEIGHT, build={"bits": (3.0,)}),
    }
    assert len(paths) == 6
    assert cache.index_path(WEIGHT, build={"seed": 1, "ridge": 0.01}) == cache.index_path(WEIGHT)


def test_settings_reach_the_builder() -> None:
    index = cache.get_index(WEIGHT, Calls(), build={"bits": (3.0,), "seed": 5})
    assert index.settings["bits"] == [3.0]
    assert index.settings["seed"] == 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_a_damaged_file_is_rebuilt_with_a_warning(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    collect = Calls()
    cache.get_index(WEIGHT, collect)
    path = cache.index_path(WEIGHT)
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        del content[len(content) // 2 :]
    elif damage == "flip":
        content[-40] ^= 1
    else:
        content = bytearray(b"" if damage == "empty" else b"not an index at all")
    path.unlink()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "csv_decode"):
        index = cache.get_index(WEIGHT, collect)
    assert collect.count == 2
    assert "built again" in caplog.text
    cd.verify_index(index, WEIGHT)
    assert cache.newest_index(WEIGHT) is not None


def test_an_index_of_other_weights_under_this_name_is_not_used() -> None:
    other = np.roll(WEIGHT, 1, axis=0)
    cache.get_index(other, Calls())
    os.replace(cache.index_path(other), cache.index_path(WEIGHT).with_suffix(".safetensors"))
    collect = Calls()
    index = cache.get_index(WEIGHT, collect)
    assert collect.count == 1
    index.check(cd.HeadSpec(WEIGHT))


def test_the_newest_index_is_the_one_built_last() -> None:
    assert cache.newest_index(WEIGHT) is None
    for at, key in enumerate(["a", "b"]):
        cache.get_index(WEIGHT, Calls(), key=key)
        os.utime(cache.index_path(WEIGHT, key=key), (at, at))
    os.utime(cache.index_path(WEIGHT, key="a"), (9, 9))
    newest = cache.newest_index(WEIGHT)
    assert newest is not None
    assert newest[0] == cache.index_path(WEIGHT, key="a")


def test_an_index_for_comparison_is_never_taken_unasked() -> None:
    """A bench once measured the paper's bound as ours, since the cache held no other index."""
    cache.get_index(WEIGHT, Calls(), bounds="centroid")
    cache.get_index(WEIGHT, Calls(), build={"guarantee": "probabilistic"})
    assert cache.newest_index(WEIGHT) is None
    assert cache.newest_index(WEIGHT, of_all=True) is not None
    cache.get_index(WEIGHT, Calls())
    newest = cache.newest_index(WEIGHT)
    assert newest is not None
    assert newest[0] == cache.index_path(WEIGHT)


def test_rebuild_builds_though_there_is_one() -> None:
    collect = Calls()
    cache.get_index(WEIGHT, collect)
    cache.get_index(WEIGHT, collect, rebuild=True)
    assert collect.count == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="CSV_DECODE_CACHE"):
        cache.get_index(WEIGHT, Calls())


# Two processes.


def _build_slowly(started: Any, built: Any) -> None:
    def collect() -> Any:
        with built.get_lock():
            built.value += 1
        started.set()
        time.sleep(0.5)
        return STATES

    cache.get_index(WEIGHT, collect)


def _hold_for_ever(started: Any) -> None:
    def collect() -> Any:
        started.set()
        time.sleep(600)

    cache.get_index(WEIGHT, collect)


@pytest.mark.skipif(cache.fcntl is None, reason="needs file locks")
def test_the_second_process_waits_and_loads(caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    started, built = context.Event(), context.Value("i", 0)
    first = context.Process(target=_build_slowly, args=(started, built))
    first.start()
    assert started.wait(30)
    collect = Calls()
    with caplog.at_level(logging.WARNING, "csv_decode"):
        index = cache.get_index(WEIGHT, collect)
    first.join(30)
    assert first.exitcode == 0
    assert (built.value, collect.count) == (1, 0)
    assert "another process is building this index; waiting" in caplog.text
    index.check(cd.HeadSpec(WEIGHT))


@pytest.mark.skipif(cache.fcntl is None, reason="needs file locks")
def test_a_lock_dies_with_its_process() -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    first = context.Process(target=_hold_for_ever, args=(started,))
    first.start()
    assert started.wait(30)
    first.kill()
    first.join(30)
    collect = Calls()
    cache.get_index(WEIGHT, collect)
    assert collect.count == 1


# Fingerprints by file identity.


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    """A file that was written a while ago."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(WEIGHT.tobytes())
    return file


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SETTLED_SECONDS", -60)


def known(spec: cd.HeadSpec) -> bool:
    return "fingerprint" in spec.__dict__


def recall(source: cache.Source, monkeypatch: pytest.MonkeyPatch, weight: Any = WEIGHT) -> bool:
    """Whether the digest came from the cache, that is without hashing."""
    spec = cd.HeadSpec(weight)
    hashed = []
    digest = cd.HeadSpec.digest
    with monkeypatch.context() as patch:
        patch.setattr(cd.HeadSpec, "digest", lambda self: hashed.append(self) or digest(self))
        cache._recall_fingerprint(spec, source)
    assert known(spec)
    return not hashed


@pytest.mark.usefixtures("settled")
def test_an_unchanged_file_is_not_hashed_again(weights_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not recall(cache.Source.of(weights_file), monkeypatch)
    assert recall(cache.Source.of(weights_file), monkeypatch)
    assert not recall(cache.Source.of(weights_file), monkeypatch, WEIGHT[:-1])
    assert not recall(cache.Source.of(weights_file), monkeypatch, WEIGHT.astype(np.float16))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", ["rewrite", "touch", "replace", "rewrite with the old time", "move"])
def test_any_change_of_the_file_is_noticed(weights_file: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not recall(cache.Source.of(weights_file), monkeypatch)
    stat = weights_file.stat()
    time.sleep(0.02)
    if change == "move":
        weights_file = weights_file.rename(weights_file.with_name("other.safetensors"))
    elif change == "touch":
        os.utime(weights_file, ns=(0, stat.st_mtime_ns + 1))
    elif change == "replace":
        fresh = weights_file.with_suffix(".new")
        fresh.write_bytes(weights_file.read_bytes())
        os.utime(fresh, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(fresh, weights_file)
    else:
        with open(weights_file, "r+b") as file:
            file.write(b"\0")
        if change != "rewrite":
            os.utime(weights_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not recall(cache.Source.of(weights_file), monkeypatch)


def test_a_file_written_just_now_is_not_trusted(weights_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change again within the resolution of its time stamp."""
    assert not recall(cache.Source.of(weights_file), monkeypatch)
    assert not recall(cache.Source.of(weights_file), monkeypatch)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}'])
def test_a_damaged_list_of_fingerprints_is_ignored(
    weights_file: Path, folder: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / "fingerprints.json").write_text(content)
    assert not recall(cache.Source.of(weights_file), monkeypatch)
    assert recall(cache.Source.of(weights_file), monkeypatch)


@pytest.mark.usefixtures("settled")
def test_a_wrong_digest_is_refused_by_the_index(weights_file: Path, folder: Path) -> None:
    source = cache.Source.of(weights_file)
    cache.get_index(WEIGHT, Calls(), source=source)
    file = folder / "fingerprints.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), "0" * 64)))
    index = cache.get_index(WEIGHT, Calls(), source=source)
    with pytest.raises(cd.StaleIndexError):
        index.check(cd.HeadSpec(WEIGHT))


def test_a_folder_is_known_by_its_weight_files(tmp_path: Path) -> None:
    for name in ("a.safetensors", "config.json", "notes.md"):
        (tmp_path / name).write_text(name)
    before = cache.Source.of(tmp_path)
    (tmp_path / "notes.md").write_text("more")
    assert cache.Source.of(tmp_path) == before
    (tmp_path / "b.safetensors").write_text("b")
    assert cache.Source.of(tmp_path) != before


# What is there.


def test_entries_and_clear(folder: Path) -> None:
    assert cache.entries() == []
    assert cache.clear() == 0
    cache.get_index(WEIGHT, Calls())
    (folder / "models" / "m").mkdir(parents=True)
    (folder / "models" / "m" / "w.safetensors").write_bytes(b"12345")
    (folder / "indexes" / "broken-shadow-0.safetensors").write_bytes(b"1")
    found = {entry.path.name: entry for entry in cache.entries()}
    index = found[cache.index_path(WEIGHT).name]
    assert (index.kind, index.bounds, index.fingerprint) == ("index", "shadow", cd.HeadSpec(WEIGHT).fingerprint)
    assert index.settings is not None
    assert index.settings["calibration_states"] == len(STATES)
    assert index.bytes == cache.index_path(WEIGHT).stat().st_size
    assert (found["m"].kind, found["m"].bytes) == ("model", 5)
    assert found["broken-shadow-0.safetensors"].fingerprint is None
    assert cache.clear("model") == 5
    assert cache.clear() == index.bytes + 1
    assert cache.entries() == []
    with pytest.raises(ValueError, match="kind is 'x'"):
        cache.clear("x")
