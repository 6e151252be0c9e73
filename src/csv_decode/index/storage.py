"""The index file: one safetensors file, checked on the way in and mapped, not read.

Tensors: ``row_ids`` int64; ``centroid.centroids``, ``.radius``, ``.bias_max`` float32 and ``.offsets`` int64;
``shadow.mean`` float32, ``.transform`` float16 and ``.rho`` uint16 (bfloat16 bits); ``shadow.plane<i>.bits`` int32,
``.step``, ``.radius_step`` float32 and ``.words`` uint32 (see cpp/plane.hpp). All numbers are little-endian.

Metadata has one entry, "csv-decode index", JSON with sorted keys: ``version``; ``head`` (fingerprint, kind, shape,
n_rows, settings, scalars of the bounds); ``sha256`` over head and tensors. The same index always gives the same file.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..bounds.centroid import CentroidBound
from ..bounds.planes import BLOCK, GROUPS, INTERLEAVE, Plane
from ..bounds.shadow import ShadowBound
from ..spec import Array, HeadSpec
from . import Index

__all__ = ["IndexFileError", "load_index", "save"]

FORMAT = "csv-decode index"
VERSION = 1
_TYPES = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "F16": np.float16, "U16": np.uint16, "U32": np.uint32}
Tensors = dict[str, NDArray[Any]]


class IndexFileError(ValueError):
    """The file is not a usable index; the message says why and what to do."""


def _tensors(index: Index) -> Tensors:
    out: Tensors = {}
    if index.row_ids is not None:
        out["row_ids"] = index.row_ids
    if index.centroid is not None:
        for name in ("centroids", "radius", "bias_max", "offsets"):
            out[f"centroid.{name}"] = getattr(index.centroid, name)
    if index.shadow is not None:
        for name in ("mean", "transform", "rho"):
            out[f"shadow.{name}"] = getattr(index.shadow, name)
        for i, plane in enumerate(index.shadow.planes):
            for name in ("bits", "step", "radius_step", "words"):
                out[f"shadow.plane{i}.{name}"] = getattr(plane, name)
    return {name: np.ascontiguousarray(tensor) for name, tensor in out.items()}


def _checksum(head: Any, tensors: Tensors) -> str:
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        digest.update(tensor.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save(index: Index, path: str | os.PathLike[str]) -> None:
    """Writes the index beside its place and moves it there in one step: a reader sees all of it or nothing."""
    path = Path(path)
    tensors = _tensors(index)
    shadow = index.shadow
    head = {
        "fingerprint": index.fingerprint,
        "kind": index.kind,
        "shape": list(index.shape),
        "n_rows": index.n_rows,
        "settings": index.settings,
        "shadow": None if shadow is None else {"delta": shadow.delta, "energy": shadow.energy},
    }
    about = {"version": VERSION, "head": head, "sha256": _checksum(head, tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={FORMAT: json.dumps(about, sort_keys=True)})
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _open(path: Path) -> tuple[dict[str, str], Tensors]:
    """Metadata and mapped tensors. The safetensors library checks the header (sizes, holes, truncation) first."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no index at {path}; build one with: csv-decode build MODEL") from None
    except (SafetensorError, OSError) as error:
        raise IndexFileError(f"{path} is damaged or not an index file ({error}); build it again") from None
    with open(path, "rb") as raw:
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    tensors: Tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _TYPES:
            raise IndexFileError(f"{path}: tensor {name} has type {entry['dtype']}, which no index has")
        first = entry["data_offsets"][0]
        count = math.prod(entry["shape"])
        dtype = np.dtype(_TYPES[entry["dtype"]]).newbyteorder("<")
        tensors[name] = np.frombuffer(mapped, dtype, count, start + first).reshape(entry["shape"])
    return metadata, tensors


class _Reader:
    """Takes tensors out with their types and shapes checked."""

    def __init__(self, path: Path, tensors: Tensors) -> None:
        self.path = path
        self.tensors = dict(tensors)

    def fail(self, what: str) -> IndexFileError:
        return IndexFileError(f"{self.path} is not a valid index: {what}; delete it and build it again")

    def take(self, name: str, dtype: Any, shape: tuple[int | None, ...]) -> Any:
        if name not in self.tensors:
            raise self.fail(f"tensor {name} is missing")
        tensor = self.tensors.pop(name)
        fits = len(tensor.shape) == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise self.fail(f"tensor {name} is {tensor.dtype} {tensor.shape}, expected {np.dtype(dtype)} {shape}")
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise self.fail(f"tensor {name} holds NaN or infinity")
        return tensor

    def require(self, holds: Any, what: str) -> None:
        if not bool(holds):
            raise self.fail(what)


def load_index(path: str | os.PathLike[str], weight: HeadSpec | Array | None = None) -> Index:
    """Maps an index file (no copy) and checks it: format, version, checksum, and every shape against the others.

    With `weight` (a `HeadSpec` or a bare weight), also that it was built for exactly these weights. Without, the head
    that uses it checks. The checksum guards against damage, not against a forger: `verify_index` does that.

    Raises FileNotFoundError, IndexFileError or StaleIndexError.
    """
    path = Path(path)
    metadata, tensors = _open(path)
    if FORMAT not in metadata:
        raise IndexFileError(f"{path} is a safetensors file but not an index (its metadata has no {FORMAT!r})")
    read = _Reader(path, tensors)
    try:
        about = json.loads(metadata[FORMAT])
        version, checksum, head = about["version"], about["sha256"], about["head"]
    except (KeyError, TypeError, ValueError) as error:
        raise read.fail(f"its metadata is malformed ({type(error).__name__}: {error})") from None
    if version != VERSION:
        raise IndexFileError(
            f"{path} has format version {version}, this program reads version {VERSION}; "
            "build it again with: csv-decode build MODEL"
        )
    if checksum != _checksum(head, tensors):
        raise IndexFileError(f"{path} is damaged (its checksum does not match); delete it and build it again")
    try:
        fingerprint, kind, n_rows = str(head["fingerprint"]), str(head["kind"]), int(head["n_rows"])
        rows, width = (int(x) for x in head["shape"])
        settings = dict(head["settings"])
        scalars = head["shadow"]
        delta, energy = (float(scalars["delta"]), float(scalars["energy"])) if scalars else (0.0, 0.0)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise read.fail(f"its metadata is malformed ({type(error).__name__}: {error})") from None
    read.require(1 <= n_rows <= rows and width >= 1, f"shape ({rows}, {width}) with {n_rows} valid rows is impossible")
    row_ids = None
    if "row_ids" in tensors:
        row_ids = read.take("row_ids", np.int64, (n_rows,))
        read.require(np.array_equal(np.sort(row_ids), np.arange(n_rows)), "row_ids is not a permutation of the rows")
    centroid = _read_centroid(read, n_rows, width) if "centroid.centroids" in tensors else None
    shadow = _read_shadow(read, n_rows, width, delta, energy) if scalars else None
    read.require(centroid is not None or shadow is not None, "it holds no bound")
    read.require((centroid is None) == (row_ids is None), "row_ids and centroids come together")
    read.require(not read.tensors, f"unknown tensors {sorted(read.tensors)}")
    index = Index(fingerprint, kind, (rows, width), n_rows, row_ids, centroid, shadow, settings)
    if weight is not None:
        index.check(HeadSpec.of(weight))
    return index


def _read_centroid(read: _Reader, n_rows: int, width: int) -> CentroidBound:
    centroids = read.take("centroid.centroids", np.float32, (None, width))
    count = len(centroids)
    radius = read.take("centroid.radius", np.float32, (count,))
    bias_max = read.take("centroid.bias_max", np.float32, (count,))
    offsets = read.take("centroid.offsets", np.int64, (count + 1,))
    read.require(
        offsets[0] == 0 and offsets[-1] == n_rows and (np.diff(offsets) >= 0).all() and (radius >= 0).all(),
        "cluster offsets or radii are impossible",
    )
    return CentroidBound(centroids, radius, bias_max, offsets)


def _read_shadow(read: _Reader, n_rows: int, width: int, delta: float, energy: float) -> ShadowBound:
    read.require(0 <= delta < math.inf and 0 <= energy < math.inf, f"delta {delta} or energy {energy} is impossible")
    blocks = -(-width // BLOCK)
    mean = read.take("shadow.mean", np.float32, (width,))
    transform = read.take("shadow.transform", np.float16, (blocks * BLOCK, width))
    rho = read.take("shadow.rho", np.uint16, (n_rows,))
    read.require(((rho > 0) & (rho < 0x7F80)).all(), "a row scale is not positive and finite")
    planes: list[Plane] = []
    while f"shadow.plane{len(planes)}.words" in read.tensors:
        name = f"shadow.plane{len(planes)}"
        bits = read.take(f"{name}.bits", np.int32, (blocks,))
        step = read.take(f"{name}.step", np.float32, (blocks,))
        radius_step = read.take(f"{name}.radius_step", np.float32, (GROUPS,))
        read.require(((bits >= 0) & (bits <= 7)).all(), f"{name} has bit widths outside 0 to 7")
        read.require((step >= 0).all() and (radius_step > 0).all(), f"{name} has negative steps")
        empty = Plane(bits, step, radius_step, np.zeros((0, 1), np.uint32), interleaved=not planes)
        stored = n_rows if planes else -(-n_rows // INTERLEAVE) * INTERLEAVE
        words = read.take(f"{name}.words", np.uint32, (stored, empty.words_per_row))
        planes.append(Plane(bits, step, radius_step, words, interleaved=not planes))
    read.require(planes, "the shadow bound has no plane")
    return ShadowBound(mean, transform, rho, tuple(planes), delta, energy)
