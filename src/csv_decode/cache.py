"""The index cache: built once for each set of weights, found again by what they are.

    <cache>/indexes/<fingerprint>-<bounds>-<settings>.safetensors   one index each
    <cache>/fingerprints.json                                       digests of weight files already hashed
    <cache>/models/                                                 converted models, see `csv_decode.models`
    <cache>/locks/                                                  empty files that processes lock while they build

<cache> is the user's cache folder, or what CSV_DECODE_CACHE names.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .index import Index, StaleIndexError
from .index.build import BITS, Progress, build_index
from .index.storage import FORMAT, VERSION, IndexFileError, load_index
from .spec import Array, HeadSpec

try:
    import fcntl
except ImportError:  # Windows: two processes may then build the same index, and the last one to finish stays
    fcntl = None  # type: ignore[assignment]

__all__ = ["Entry", "Source", "cache_folder", "clear", "entries", "get_index", "index_path", "newest_index"]

logger = logging.getLogger("csv_decode")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".json")
#: File systems keep times this coarsely at worst; a younger file may change once more without showing it.
_SETTLED_SECONDS = 2.0


def cache_folder() -> Path:
    """The cache folder: CSV_DECODE_CACHE, or the place that the operating system has for such things."""
    chosen = os.environ.get("CSV_DECODE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("csv-decode"))


# Which weights?


@dataclass(frozen=True)
class Source:
    """The files that weights in memory were read from, as they were then.

    identity: path, size, times and inode of each file. Where all of them are as before, so are the weights, and their
    SHA-256 need not be computed again. Take it before loading, and compare with a fresh one after.
    """

    path: Path
    identity: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Source:
        """Of a model file, or of the configuration and weight files of a folder."""
        root = Path(path).resolve()
        files = sorted(f for f in root.iterdir() if f.suffix in _WEIGHTS) if root.is_dir() else [root]
        seen = []
        for file in files:
            real = file.resolve()
            stat = real.stat()
            seen.append([file.name, str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
        return cls(root, json.dumps([str(root), seen]))

    def settled(self) -> bool:
        """Whether a later change is sure to show: no file was touched just now, nor lies in the future."""
        latest = max((max(entry[3], entry[4]) for entry in json.loads(self.identity)[1]), default=0)
        return bool(latest / 1e9 + _SETTLED_SECONDS < time.time())


def _recall_fingerprint(spec: HeadSpec, source: Source) -> None:
    """Fills in `spec.fingerprint`, from the cache where the files are those that were hashed before."""
    from importlib.metadata import version

    part = [spec.rows.kind, spec.rows.shape, spec.n_rows, spec.bias32 is not None, version("csv-decode")]
    key = hashlib.sha256(json.dumps([source.identity, part]).encode()).hexdigest()
    file = cache_folder() / "fingerprints.json"
    known = _read_json(file).get(key)
    if isinstance(known, str) and re.fullmatch("[0-9a-f]{64}", known):
        spec.remember(known)
        return
    digest = spec.digest()
    spec.remember(digest)
    if source.settled():
        with _locked("fingerprints"):
            _write_json(file, _read_json(file) | {key: digest})


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """In one step: a reader sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
    with os.fdopen(handle, "w") as out:
        json.dump(content, out, indent=1)
    os.replace(temporary, file)


# Which index?


_PROBABILISTIC = "probabilistic"


def _bounds_name(bounds: str | Sequence[str]) -> str:
    return bounds if isinstance(bounds, str) else "+".join(bounds)


def index_path(
    spec: HeadSpec | Array,
    bounds: str | Sequence[str] = "shadow",
    key: str = "",
    build: Mapping[str, Any] | None = None,
) -> Path:
    """Where the cache keeps the index of these weights, built with these settings.

    The name covers the settings of `build_index` (its defaults, or `build`; not the seed, which any index may have),
    the version of the file format, and `key`.
    """
    spec = HeadSpec.of(spec)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(build_index).parameters.items()
        if name in ("guarantee", "bits", "ridge", "clusters", "iterations", "spherical")
    }
    defaults["bits"] = BITS[(build or {}).get("guarantee", "deterministic")]
    settings = defaults | {name: value for name, value in (build or {}).items() if name in defaults}
    text = json.dumps([VERSION, key, {name: repr(value) for name, value in settings.items()}], sort_keys=True)
    kind = _PROBABILISTIC if settings["guarantee"] == _PROBABILISTIC else _bounds_name(bounds)
    name = f"{spec.fingerprint[:16]}-{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return cache_folder() / "indexes" / f"{name}.safetensors"


def get_index(
    spec: HeadSpec | Array,
    collect: Callable[[], Any],
    *,
    bounds: str | Sequence[str] = "shadow",
    key: str = "",
    source: Source | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    build: Mapping[str, Any] | None = None,
    rebuild: bool = False,
) -> Index:
    """The index of these weights: from the cache, or built now and put there.

    Args:
        spec: the `HeadSpec`, or a bare weight.
        collect: called without arguments for the calibration states, only if a shadow bound has to be built.
        bounds, progress: as for `build_index`.
        key: names the calibration, so that another one is another index (`csv_decode.calibration.calibration_key`).
        source: the file or folder that the weights in memory were read from, unchanged since. Its digest is remembered,
            which saves hashing the weights at every start. A `Source` taken before loading is safer than a path.
        build: further arguments for `build_index`.
        rebuild: build even if there is one.

    A damaged file is replaced, with a warning. Of two processes that want the same index, one builds and the other
    waits; the wait ends as well if the first one dies.
    """
    spec = HeadSpec.of(spec)
    if source is not None and "fingerprint" not in spec.__dict__:
        _recall_fingerprint(spec, source if isinstance(source, Source) else Source.of(source))
    path = index_path(spec, bounds, key, build)
    index = None if rebuild else _load(path, spec)
    if index is not None:
        return index
    started = time.time()
    with _locked(path.stem, "another process is building this index; waiting for it"):
        # It may have come while this process waited for the lock.
        if not rebuild or (path.exists() and path.stat().st_mtime > started):
            index = _load(path, spec)
        if index is None:
            states = collect() if "shadow" in bounds else None  # the centroid bound knows only the weights
            index = build_index(spec, states, bounds=bounds, progress=progress, **(build or {}))
            index.save(path)
            index = load_index(path, spec)  # mapped, not held in memory twice
    return index


def newest_index(
    spec: HeadSpec | Array, source: Source | None = None, *, of_all: bool = False
) -> tuple[Path, Index] | None:
    """The index built last for these weights, whatever its settings, or None. Those that have only the centroid bound
    (which reads nearly all of a real head) or are probabilistic are for who names their file, unless `of_all`."""
    spec = HeadSpec.of(spec)
    if source is not None and "fingerprint" not in spec.__dict__:
        _recall_fingerprint(spec, source)
    files = (cache_folder() / "indexes").glob(f"{spec.fingerprint[:16]}-*.safetensors")

    others = () if of_all else (f"-{_bounds_name('centroid')}-", f"-{_PROBABILISTIC}-")
    files = (file for file in files if not any(kind in file.name for kind in others))
    for path in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        index = _load(path, spec)
        if index is not None:
            return path, index
    return None


def _load(path: Path, spec: HeadSpec) -> Index | None:
    """The index at path and its time of use noted, or None if there is no usable one."""
    if not path.exists():
        return None
    try:
        index = load_index(path, spec)
    except (IndexFileError, StaleIndexError, OSError) as error:
        logger.warning("the cached index cannot be used and will be built again: %s", error)
        return None
    with suppress(OSError):  # a cache that may only be read
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return index


@contextmanager
def _locked(name: str, waiting: str = "") -> Iterator[None]:
    """Holds the lock `name` between processes. The operating system drops it when its holder dies, so none is stale;
    the empty file stays, since removing it could take it away from under a process that waits."""
    folder = cache_folder() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / f"{name}.lock", "a")  # noqa: SIM115
    except OSError as error:
        raise OSError(
            f"the cache folder {cache_folder()} cannot be written to ({error}); name another with CSV_DECODE_CACHE"
        ) from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    logger.warning(waiting)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


# What is there?


@dataclass(frozen=True)
class Entry:
    """One thing in the cache. kind: "index" or "model". bytes on disk; built and used are seconds since 1970.

    For an index: fingerprint of the weights, bounds, and the settings that it was built with; None where the file
    cannot be read.
    """

    kind: str
    path: Path
    bytes: int
    built: float
    used: float
    fingerprint: str | None = None
    bounds: str | None = None
    settings: dict[str, Any] | None = None


def entries() -> list[Entry]:
    """Everything in the cache, the last used first."""
    found = []
    for path in (cache_folder() / "indexes").glob("*.safetensors"):
        stat = path.stat()
        head = _head(path)
        found.append(
            Entry(
                "index",
                path,
                stat.st_size,
                stat.st_mtime,
                max(stat.st_atime, stat.st_mtime),
                head.get("fingerprint"),
                path.stem.split("-")[1] if path.stem.count("-") == 2 else None,
                head.get("settings"),
            )
        )
    models = cache_folder() / "models"
    for path in models.iterdir() if models.is_dir() else ():
        files = [file.stat() for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        if files:
            size, built = sum(stat.st_size for stat in files), max(stat.st_mtime for stat in files)
            found.append(Entry("model", path, size, built, max(built, *(stat.st_atime for stat in files))))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def _head(path: Path) -> dict[str, Any]:
    """An index file's own description, from its first bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads((file.metadata() or {})[FORMAT])["head"]
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return {}
    return head if isinstance(head, dict) else {}


def clear(kind: str | None = None) -> int:
    """Deletes all indexes ("index"), all converted models ("model"), or both (None). Returns the bytes set free.

    A process that has such a file open keeps it until it ends.
    """
    if kind not in (None, "index", "model"):
        raise ValueError(f"kind is {kind!r}, expected 'index', 'model' or None for both")
    freed = 0
    for entry in entries():
        if kind in (None, entry.kind):
            freed += entry.bytes
            shutil.rmtree(entry.path) if entry.path.is_dir() else entry.path.unlink(missing_ok=True)
    if kind is None:
        (cache_folder() / "fingerprints.json").unlink(missing_ok=True)
    return freed
