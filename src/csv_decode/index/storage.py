"""The index file: one safetensors file, checked on the way in and mapped, not read.

Tensors: ``row_ids`` int64; ``centroid.centroids``, ``.radius``, ``.bias_max`` float32 and ``.offsets`` int64;
``shadow.mean`` float32, ``.transform`` float16 (float32 in the probabilistic mode) and ``.rho`` uint16 (bfloat16 bits);
``shadow.plane<i>.bits`` int32, ``.step``, ``.radius_step`` float32 and ``.words`` uint32 (see cpp/plane.hpp);
``shadow.moment<i>.matrix`` int8, ``.size``, ``.scale``, ``.coding``, ``.lean`` float32. All numbers are little-endian.

Metadata has one entry, "csv-decode index", JSON with sorted keys: ``version``; ``head`` (fingerprint, kind, shape,
n_rows, settings, scalars of the bounds); ``sha256`` over head and tensors. The same index always gives the same file.

The codes come first and the data begin at a multiple of 64 bytes: codes that straddle cache lines are read half as
fast. The safetensors library orders tensors by itself, so the file is written here and read back through it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..bounds.centroid import CentroidBound
from ..bounds.moments import Moment
from ..bounds.planes import Plane
from ..bounds.shadow import ShadowBound
from ..spec import Array, HeadSpec, as_path
from . import Index
from .structure import require_structure

__all__ = ["IndexFileError", "load_index", "save"]

FORMAT = "csv-decode index"
VERSION = 3
_TYPES: dict[str, Any] = {"I64": np.int64, "I32": np.int32, "I8": np.int8, "U16": np.uint16, "U32": np.uint32}
_TYPES |= {"F32": np.float32, "F16": np.float16}
_CENTROID = ("centroids", "radius", "bias_max", "offsets")
_SHADOW = ("mean", "transform", "rho")
_PLANE = ("bits", "step", "radius_step", "words")
_MOMENT = ("matrix", "size", "scale", "coding", "lean")
Tensors = dict[str, NDArray[Any]]


class IndexFileError(ValueError):
    """The file is not a usable index; the message says why and what to do."""


def _tensors(index: Index) -> Tensors:
    out: Tensors = {}
    if index.row_ids is not None:
        out["row_ids"] = index.row_ids
    if index.centroid is not None:
        for name in _CENTROID:
            out[f"centroid.{name}"] = getattr(index.centroid, name)
    if index.shadow is not None:
        for name in _SHADOW:
            out[f"shadow.{name}"] = getattr(index.shadow, name)
        for i, plane in enumerate(index.shadow.planes):
            for name in _PLANE:
                out[f"shadow.plane{i}.{name}"] = getattr(plane, name)
        for i, moment in enumerate(index.shadow.moments or ()):
            for name in _MOMENT:
                out[f"shadow.moment{i}.{name}"] = getattr(moment, name)
    return {name: np.ascontiguousarray(tensor) for name, tensor in out.items()}


def _checksum(head: Any, tensors: Tensors) -> str:
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        digest.update(tensor.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _write(file: IO[bytes], tensors: Tensors, metadata: dict[str, str]) -> None:
    """The safetensors format: length of the header, header, data without holes."""
    kinds = {np.dtype(dtype): kind for kind, dtype in _TYPES.items()}
    ordered = sorted(tensors, key=lambda name: (not name.endswith(".words"), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in ordered:
        tensor = tensors[name]
        header[name] = {
            "dtype": kinds[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        little = tensors[name].astype(tensors[name].dtype.newbyteorder("<"), copy=False)
        file.write(little.reshape(-1).view(np.uint8).data)


def save(index: Index, path: str | os.PathLike[str]) -> None:
    """Writes the index beside its place and moves it there in one step: a reader sees all of it or nothing."""
    path = as_path(path)
    tensors = _tensors(index)
    shadow = index.shadow
    head = {
        "fingerprint": index.fingerprint,
        "kind": index.kind,
        "shape": list(index.shape),
        "n_rows": index.n_rows,
        "settings": index.settings,
        "shadow": None
        if shadow is None
        else {
            "delta": shadow.delta,
            "energy": shadow.energy,
            "rotation_error": shadow.rotation_error,
            "typical": None if shadow.typical is None else shadow.typical.tolist(),
        },
    }
    about = {"version": VERSION, "head": head, "sha256": _checksum(head, tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, tensors, {FORMAT: json.dumps(about, sort_keys=True)})
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
        first, shape = entry["data_offsets"][0], entry["shape"]
        dtype = np.dtype(_TYPES[entry["dtype"]]).newbyteorder("<")
        try:
            tensor = np.frombuffer(mapped, dtype, math.prod(shape), start + first).reshape(shape)
            tensors[name] = np.require(tensor, requirements=["ALIGNED"])  # the codes are; behind them anything may be
        except ValueError:  # more dimensions, or with an empty one larger dimensions, than numpy has
            raise IndexFileError(f"{path}: tensor {name} has a shape that no index has, {str(shape)[:100]}") from None
    return metadata, tensors


def load_index(path: str | os.PathLike[str], weight: HeadSpec | Array | None = None) -> Index:
    """Maps an index file (no copy) and checks it: format, version, checksum, and every shape against the others.

    With `weight` (a `HeadSpec` or a bare weight), also that it was built for exactly these weights. Without, the head
    that uses it checks. The checksum guards against damage, not against a forger: `verify_index` does that. The file
    must not be truncated or written to while the index is in use: it is mapped, and the system would end the process.

    Raises FileNotFoundError, IndexFileError or StaleIndexError.
    """
    path = as_path(path)
    metadata, tensors = _open(path)
    if FORMAT not in metadata:
        raise IndexFileError(f"{path} is a safetensors file but not an index (its metadata has no {FORMAT!r})")

    def fail(what: str) -> IndexFileError:
        return IndexFileError(f"{path} is not a valid index: {what}; delete it and build it again")

    try:
        about = json.loads(metadata[FORMAT])
        version, checksum, head = about["version"], about["sha256"], about["head"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise fail(f"its metadata is malformed ({type(error).__name__}: {error})") from None
    if version != VERSION:
        raise IndexFileError(
            f"{path} has format version {version!r}, this program reads version {VERSION}; "
            "build it again with: csv-decode build MODEL"
        )
    try:
        actual = _checksum(head, tensors)
    except RecursionError:
        raise fail("its metadata is nested too deeply") from None
    if checksum != actual:
        raise IndexFileError(f"{path} is damaged (its checksum does not match); delete it and build it again")
    try:
        index = _assemble(head, tensors)
    except KeyError as error:
        raise fail(f"{error.args[0]} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise fail(f"its metadata is malformed ({type(error).__name__}: {error})") from None
    try:
        if tensors:
            raise ValueError(f"unknown tensors {sorted(tensors)}")
        require_structure(index)
    except ValueError as error:
        raise fail(str(error)) from None
    if weight is not None:
        index.check(HeadSpec.of(weight))
    return index


def _assemble(head: Any, tensors: Tensors) -> Index:
    """The index of a file, its arrays not looked at yet; takes the tensors that it uses out of `tensors`."""

    def take(part: str, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: tensors.pop(f"{part}.{name}") for name in names}

    rows, width = (int(x) for x in head["shape"])
    scalars = head["shadow"]
    centroid = shadow = None
    if "centroid.centroids" in tensors:
        centroid = CentroidBound(**take("centroid", _CENTROID))
    if scalars is not None:
        planes: list[Plane] = []
        while f"shadow.plane{len(planes)}.words" in tensors:
            planes.append(Plane(**take(f"shadow.plane{len(planes)}", _PLANE), interleaved=not planes))
        moments: list[Moment] = []
        while f"shadow.moment{len(moments)}.matrix" in tensors:
            moments.append(Moment(**take(f"shadow.moment{len(moments)}", _MOMENT)))
        shadow = ShadowBound(
            **take("shadow", _SHADOW),
            planes=tuple(planes),
            delta=float(scalars["delta"]),
            energy=float(scalars["energy"]),
            rotation_error=None if scalars["rotation_error"] is None else float(scalars["rotation_error"]),
            typical=None if scalars["typical"] is None else np.array(scalars["typical"], float),
            moments=tuple(moments) if moments else None,
        )
    return Index(
        fingerprint=str(head["fingerprint"]),
        kind=str(head["kind"]),
        shape=(rows, width),
        n_rows=int(head["n_rows"]),
        row_ids=tensors.pop("row_ids", None),
        centroid=centroid,
        shadow=shadow,
        settings=head["settings"],
    )
