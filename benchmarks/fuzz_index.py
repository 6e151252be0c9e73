"""Index files that are damaged, or forged with a checksum that fits.

What must hold for `load_index(path, weight)`, whatever the bytes:

- it raises IndexFileError or StaleIndexError, or it loads, within the memory and time of an ordinary index;
- where the checksum was not computed anew, what loads is the index that was saved, to the bit;
- what loads can be used without harm: `CertifiedHead` refuses it or answers;
- every answer is the exact one, or `verify_index` reports the index. The checksum guards against damage alone; a forged
  bound is found by `verify_index`, and nothing else promises to find it.

Of a probabilistic index `verify_index` cannot see that its rotation was drawn at random; all else holds for it too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import csv_decode as cd
import csv_decode.head
from csv_decode.index.storage import _TYPES, FORMAT, _checksum
from csv_decode.kernels.native import supported

Rng = np.random.Generator
Array = NDArray[Any]


class Finding(AssertionError):
    """A promise that does not hold."""


@dataclass
class Base:
    """A head, some states with the exact order of the rows, and the index file that was built for it."""

    name: str
    weight: Array  # float32
    kind: str
    bias: Array | None
    scale: float
    softcap: float | None
    valid_rows: int | None
    guarantee: str
    states: Array
    order: list[list[int]]
    values: Array  # (states, rows) float64, exact scores rounded once
    content: bytes = b""

    def spec(self) -> cd.HeadSpec:
        weight: Any = self.weight
        if self.kind == "bfloat16":
            import torch

            weight = torch.from_numpy(self.weight).to(torch.bfloat16)
        elif self.kind == "float16":
            weight = self.weight.astype(np.float16)
        return cd.HeadSpec(weight, self.bias, self.scale, self.softcap, self.valid_rows)


def exact_order(weight: Array, states: Array, bias: Array | None) -> tuple[list[list[int]], Array]:
    """Row numbers by (larger <w, h> + b, then smaller number), in exact arithmetic, and the scores rounded once."""
    order, values = [], np.zeros((len(states), len(weight)))
    rows = [[Fraction(float(x)) for x in row] for row in weight]
    for b, h in enumerate(states):
        state = [Fraction(float(x)) for x in h]
        scores = [sum((w * x for w, x in zip(row, state, strict=True) if w and x), Fraction(0)) for row in rows]
        if bias is not None:
            scores = [s + Fraction(float(x)) for s, x in zip(scores, bias, strict=True)]
        order.append(sorted(range(len(scores)), key=lambda i: (-scores[i], i)))
        values[b] = [float(s) for s in scores]
    return order, values


def make_base(
    name: str, rows: int, width: int, kind: str = "float32", bias: bool = False, scale: float = 1.0,
    softcap: float | None = None, valid_rows: int | None = None, shape: str = "gaussian", **build: Any,
) -> Base:  # fmt: skip
    rng = np.random.default_rng([rows, width])
    weight = rng.standard_normal((rows, width)).astype(np.float32)
    if shape == "heavy":
        weight *= rng.pareto(1.5, (rows, 1)).astype(np.float32) + np.float32(0.1)
    weight[rows // 2 :: 7] = weight[: len(weight[rows // 2 :: 7])]  # equal rows tie
    bits = weight.view(np.uint32) & np.uint32(0xFFFFE000)  # numbers that all three types hold
    weight = (bits & np.uint32(0xFFFF0000 if kind == "bfloat16" else 0xFFFFE000)).view(np.float32)
    spectrum = np.geomspace(1, 0.05, width) * rng.standard_normal((40, width))
    states = (spectrum @ np.linalg.qr(rng.standard_normal((width, width)))[0]).astype(np.float32)
    served = states[-6:].copy()
    served[-1] = 0
    served[-2] *= np.float32(1e-20)
    offsets = rng.standard_normal(rows).astype(np.float32) if bias else None
    valid = rows if valid_rows is None else valid_rows
    order, values = exact_order(weight[:valid], served, None if offsets is None else offsets[:valid])
    guarantee = build.get("guarantee", "deterministic")
    base = Base(name, weight, kind, offsets, scale, softcap, valid_rows, guarantee, served, order, values)
    # The rotation of the probabilistic mode comes from the system's entropy; a case must be the same again.
    with mock.patch("csv_decode.index.shadow.secrets.randbits", return_value=12345):
        index = cd.build_index(base.spec(), states[:-6], seed=1, threads=1, **build)
    return replace(base, content=_saved(index))


def _saved(index: cd.Index) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "x")
        return (Path(folder) / "x").read_bytes()


def sanitized() -> bool:
    """Whether this process runs under a sanitizer, where nothing but our own code is of interest."""
    return any(name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan"))


def has(module: str) -> bool:
    """Whether a package is to be used, if it is there."""
    return importlib.util.find_spec(module) is not None and not sanitized()


def bases() -> list[Base]:
    out = [
        make_base("plain", 200, 40),
        make_base("everything", 150, 33, "float16", bias=True, scale=0.5, softcap=30.0, valid_rows=141),
        make_base("four planes", 90, 64, bits=(3.0, 2.0, 1.0, 4.0), shape="heavy"),
        make_base("seven bits", 50, 32, bits=(7.0, 7.0, 7.0, 7.0), bias=True),
        make_base("few", 5, 3, bits=(2.0, 1.0)),
        make_base("probabilistic", 200, 70, bias=True, guarantee="probabilistic"),
        make_base("probabilistic, narrow", 120, 10, guarantee="probabilistic", bits=(2.0, 1.0)),
    ]
    if has("torch"):
        out.append(make_base("bfloat16", 100, 48, "bfloat16", bias=True, valid_rows=97))
    if has("faiss"):
        out += [
            make_base("centroid", 120, 24, bias=True, bounds="centroid", clusters=12),
            make_base("both", 150, 40, bias=True, bounds=("centroid", "shadow"), clusters=10),
        ]
    return out


def prepare(folder: Path) -> Path:
    path = folder / "bases"
    path.write_bytes(pickle.dumps(bases()))
    return path


def open(context: Path, folder: Path) -> Callable[[Rng], str]:
    csv_decode.head.SMALL_HEAD = 0
    made = [(base, base.spec(), _load(base, folder)) for base in pickle.loads(context.read_bytes())]

    def case(rng: Rng) -> str:
        base, spec, honest = made[rng.integers(len(made))]
        content, forged = mutate(rng, base.content)
        path = folder / "x"
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return judge(rng, path, base, spec, honest, forged)

    return case


def _load(base: Base, folder: Path) -> cd.Index:
    (folder / "y").write_bytes(base.content)
    index = cd.load_index(folder / "y", base.spec())
    (folder / "y").unlink()  # stays mapped
    return index


# What must hold.


def judge(rng: Rng, path: Path, base: Base, spec: cd.HeadSpec, honest: cd.Index, forged: bool) -> str:
    try:
        index = cd.load_index(path, spec if rng.random() < 0.8 else None)
    except (cd.IndexFileError, cd.StaleIndexError) as error:
        if not str(error):
            raise Finding("an error without a message") from error
        return f"{'forged' if forged else 'damaged'}: {type(error).__name__}"
    repr(index)
    if not forged and not same(index, honest):
        raise Finding("a damaged file loads as another index")
    kernels = [*supported(), "reference"][rng.integers(len(supported()) + 1)]
    budget = [None, 0.25, 1.0][rng.integers(3)]
    most = len(base.order[0])
    k = int(min([1, 2, 5, 10, most][rng.integers(5)], most))
    try:
        cd.verify_index(index, spec, threads=1)
        sound = True
    except ValueError:
        sound = False
    if not forged and not sound:
        raise Finding("verify_index reports an index that is as it was saved")
    try:
        head = cd.CertifiedHead(
            index, spec, threads=int(rng.integers(1, 3)), guarantee=base.guarantee, budget=budget, kernels=kernels
        )
    except ValueError:
        if sound:
            raise Finding("the head refuses an index that verify_index finds sound") from None
        return "forged: refused by the head"
    top = head.top_k(base.states, k)
    right = all(top.ids[b].tolist() == base.order[b][:k] for b in range(len(base.states)))
    if right:
        want = np.stack([base.values[b, base.order[b][:k]] for b in range(len(base.states))]) * base.scale
        want = want if base.softcap is None else base.softcap * np.tanh(want / base.softcap)
        right = bool(np.allclose(top.logits, want, rtol=1e-9, atol=1e-12 * float(np.abs(base.weight).max())))
    if sound and not right:
        raise Finding(f"a wrong answer from an index that verify_index finds sound (kernels {kernels}, k {k})")
    if sound:
        try:
            cd.verify(top, base.states, spec)
        except cd.VerificationError as error:
            raise Finding(f"a false certificate from an index that verify_index finds sound: {error}") from None
        if rng.random() < 0.1:
            again = path.with_name("again")
            index.save(again)
            if not same(cd.load_index(again, spec), index):
                raise Finding("an index changes when it is saved again")
    if not forged:
        return "damaged where nothing is read: exact"
    return f"forged: {'exact' if right else 'wrong'}, verify_index {'finds it sound' if sound else 'reports it'}"


def same(a: cd.Index, b: cd.Index) -> bool:
    return _plain(a) == _plain(b)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return sorted((key, repr(v)) for key, v in value.items())
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return [(name, _plain(getattr(value, name))) for name in value.__dataclass_fields__]
    return repr(value)


# How files are changed.


@dataclass
class Parts:
    """A safetensors file taken apart: tensors as (type, shape, bytes), and our JSON."""

    tensors: dict[str, tuple[str, list[int], bytes]]
    about: Any

    @classmethod
    def of(cls, content: bytes) -> Parts:
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        about = json.loads(header.pop("__metadata__")[FORMAT])
        return cls(
            {
                name: (e["dtype"], e["shape"], content[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
                for name, e in header.items()
            },
            about,
        )

    def arrays(self) -> dict[str, Array]:
        return {
            name: np.frombuffer(data, _TYPES[kind]).reshape(shape)
            for name, (kind, shape, data) in self.tensors.items()
        }  # fmt: skip

    def seal(self) -> None:
        """A checksum that fits, where one can be computed."""
        with contextlib.suppress(Exception):
            self.about["sha256"] = _checksum(self.about["head"], self.arrays())

    def header(self) -> dict[str, Any]:
        out: dict[str, Any] = {"__metadata__": {FORMAT: _dumps(self.about)}}
        at = 0
        for name, (kind, shape, data) in self.tensors.items():
            out[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        return out

    def content(self, text: bytes | None = None) -> bytes:
        text = _dumps(self.header()).encode("utf-8", "surrogatepass") if text is None else text
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in self.tensors.values())


class Nested:
    """Stands for brackets that deep, which json.dumps could not write."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def _dumps(value: Any) -> str:
    deep: list[int] = []

    def mark(x: Any) -> str:
        deep.append(x.depth)
        return f"@{len(deep) - 1}@"

    text = json.dumps(value, default=mark)
    for i, depth in enumerate(deep):
        text = text.replace(f'"@{i}@"', "[" * depth + "]" * depth)
    return text


def hostile(rng: Rng) -> Any:
    values: list[Any] = [
        0, 1, -1, 2, 3, 7, 40, 200, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400,
        0.0, -0.0, 0.5, 1.5, 1e-320, 1e-30, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), True, False, None,
        "", "x", "1", "nan", "1e999", "\ud800", "\0", "float32", "float16", "deterministic", "a" * 100_000, [], {},
        [[]], [1], [1, 2], [[1, 2], [3, 4]], [[0.0, 0.0, 0.0]] * 3, {"a": 1}, {"": None}, [None], ["1"] * 3,
        list(range(1000)),
        Nested(100), Nested(400), Nested(900), Nested(990), Nested(100_000), 10**4000,
    ]  # fmt: skip
    return values[rng.integers(len(values))]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            out += _places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            out += _places(value[i], (*path, i))
    return out


def change_json(rng: Rng, value: Any) -> None:
    """Replaces, scales, removes or adds one entry somewhere in nested JSON."""
    places = _places(value)
    if not places:
        return
    *path, last = places[rng.integers(len(places))]
    for key in path:
        value = value[key]
    way = rng.integers(5)
    old = value[last]
    if way == 0 and isinstance(old, (int, float)) and not isinstance(old, bool) and abs(old) < 1e300:
        value[last] = old * [0.5, 0.99, 0.999999, 1.000001, 1.01, 2, -1, 1e3, 1e-3, 1e30][rng.integers(10)]
    elif way == 1:
        del value[last]
    elif way == 2 and isinstance(value, dict):
        value[["new", "", "__metadata__", "version", "head", "sha256"][rng.integers(6)]] = hostile(rng)
    else:
        value[last] = hostile(rng)


def change_numbers(rng: Rng, kind: str, shape: list[int], data: bytes) -> bytes:
    """Other numbers of the same type and shape."""
    if not data or len(data) % np.dtype(_TYPES[kind]).itemsize:
        return data
    array = np.frombuffer(data, _TYPES[kind]).copy()
    way = rng.integers(8)
    many = rng.random() < 0.2
    at: Any = slice(None) if many else rng.integers(0, len(array), int(rng.integers(1, 4)))
    with np.errstate(all="ignore"):
        if way == 0:  # one bit
            raw = array.view(np.uint8)
            raw[rng.integers(len(raw))] ^= np.uint8(1 << rng.integers(8))
        elif way == 1:
            array[at] = 0
        elif way == 2:
            info: Any = np.finfo(array.dtype) if array.dtype.kind == "f" else np.iinfo(array.dtype)
            array[at] = [info.max, info.min][rng.integers(2)]
        elif way == 3 and array.dtype.kind == "f":
            array[at] = [np.nan, np.inf, -np.inf, -0.0, float(np.finfo(array.dtype).smallest_subnormal)][
                rng.integers(5)
            ]
        elif way == 4 and array.dtype.kind == "f":
            array[at] *= [0.5, 0.9, 0.999, 1.001, 1.1, 2, -1][rng.integers(7)]
        elif way == 5:
            array[at] = array[at] + np.array([1, -1, 2, -2, 16, 256][rng.integers(6)]).astype(array.dtype)
        elif way == 6:  # radius bytes and the like
            raw = array.view(np.uint8)
            where = slice(int(rng.integers(4)), None, 4) if many else rng.integers(0, len(raw), 3)
            raw[where] = np.maximum(raw[where], 1) - 1 if rng.random() < 0.7 else 0
        else:
            other = rng.permutation(len(array)) if many else rng.integers(0, len(array), 2)
            array[np.sort(other)] = array[other]
    return array.tobytes()


def fitted(rng: Rng, kind: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    """With data of the size that safetensors expects, mostly."""
    size = math.prod(shape) * {"64": 8, "32": 4, "16": 2}.get(kind[-2:], 1)
    if 0 <= size < 10**6 and rng.random() < 0.8:
        data = (data * (size // max(1, len(data)) + 1))[:size]
    return kind, shape, data


def change_tensor(rng: Rng, parts: Parts) -> None:
    names = sorted(parts.tensors)
    if not names:
        return
    name = names[rng.integers(len(names))]
    kind, shape, data = parts.tensors[name]
    way = rng.integers(12)
    if way < 6 and kind in _TYPES:
        parts.tensors[name] = kind, shape, change_numbers(rng, kind, shape, data)
    elif way == 6:  # another shape of the same size, or not
        size = int(np.prod(shape)) if shape else 1
        shapes: list[list[int]] = [
            [], [size], [size, 1], [1, size], [1, *shape], [*shape, 1], shape[::-1], [0], [0, *shape[1:]],
            [-1], [2**62, 4], [0, 2**62], [0, 2**63 - 1, 2**63 - 1], [*shape[:-1], 0], [1] * 40 + shape, [1] * 70,
        ]  # fmt: skip
        parts.tensors[name] = fitted(rng, kind, shapes[rng.integers(len(shapes))], data)
    elif way == 7:
        kinds = [*_TYPES, "BF16", "F64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", ""]
        parts.tensors[name] = fitted(rng, kinds[rng.integers(len(kinds))], shape, data)
    elif way == 8:  # fewer or more rows
        row = len(data) // max(1, shape[0] if shape else 1)
        some = [0, 1, 2, 15, 16, 17, 1000][rng.integers(7)]
        parts.tensors[name] = (
            kind,
            [some, *shape[1:]],
            (data * (some // max(1, shape[0] if shape else 1) + 1))[: some * row],
        )
    elif way == 9:
        del parts.tensors[name]
    elif way == 10:
        other = names[rng.integers(len(names))]
        parts.tensors[name], parts.tensors[other] = parts.tensors[other], parts.tensors[name]
    else:
        new = ["row_ids", "unknown", "", "shadow.plane4.words", "shadow.plane1.words", "centroid.centroids"]
        parts.tensors[new[rng.integers(len(new))]] = kind, shape, data


def change_header(rng: Rng, parts: Parts) -> bytes:
    """The header of safetensors itself: entries that overlap, lie outside, occur twice, or are no entries."""
    header = parts.header()
    way = rng.integers(5)
    names = [name for name in header if name != "__metadata__"] or ["__metadata__"]
    name = names[rng.integers(len(names))]
    if way == 0 and name in parts.tensors:
        offsets = header[name]["data_offsets"]
        i = int(rng.integers(2))
        offsets[i] = [0, 1, -1, offsets[i] + 4, offsets[i] - 4, 2**40, 2**63, 2**64 - 1, 1.5, "0", None][
            rng.integers(11)
        ]
    elif way == 1:
        change_json(rng, header)
    elif way == 2:
        header["__metadata__"] = {"format": "pt", **header["__metadata__"]}
    text = _dumps(header).encode("utf-8", "surrogatepass")
    if way == 3:  # a key twice
        entry = json.dumps(name) + ": "
        extra = _dumps([{}, header[name], None, hostile(rng)][rng.integers(4)])
        text = text.replace(entry.encode(), (entry + extra + ", " + entry).encode("utf-8", "surrogatepass"), 1)
    elif way == 4:
        pieces = [b"\0", b"\xff", b"[", b"{", b'"', b",", b"\xef\xbb\xbf", b"NaN", b"//", b"  " * 100]
        at = int(rng.integers(len(text) + 1))
        text = text[:at] + pieces[rng.integers(len(pieces))] + text[at:]
    return text


def change_bytes(rng: Rng, content: bytes) -> bytes:
    data = bytearray(content)
    way = rng.integers(8)
    header = 8 + int.from_bytes(data[:8], "little")
    span = header if rng.random() < 0.5 else len(data)
    at = int(rng.integers(span))
    if way == 0:
        for _ in range(int(rng.integers(1, 5))):
            data[int(rng.integers(span))] ^= 1 << int(rng.integers(8))
    elif way == 1:
        data = data[:at]
    elif way == 2:
        data += bytes(int(rng.integers(1, 200)))
    elif way == 3:
        length = [
            0,
            1,
            7,
            8,
            header - 9,
            header - 7,
            len(data),
            len(data) - 8,
            2**31,
            2**40,
            2**63 - 1,
            2**63,
            2**64 - 1,
        ]
        data[:8] = max(0, length[rng.integers(len(length))]).to_bytes(8, "little")
    elif way == 4:
        data[at : at + int(rng.integers(1, 64))] = bytes(int(rng.integers(1, 64)))
    elif way == 5:
        part = data[at : at + int(rng.integers(1, 256))]
        to = int(rng.integers(len(data)))
        data[to : to + len(part)] = part
    elif way == 6:
        data[at:at] = rng.bytes(int(rng.integers(1, 64)))
    else:
        del data[at : at + int(rng.integers(1, 64))]
    return bytes(data)


def mutate(rng: Rng, content: bytes) -> tuple[bytes, bool]:
    """Another file, and whether its checksum was computed anew."""
    if rng.random() < 0.3:
        for _ in range(int(rng.integers(1, 3))):
            content = change_bytes(rng, content)
            if len(content) < 9 or int.from_bytes(content[:8], "little") > len(content):
                break
        return content, False
    parts = Parts.of(content)
    forged = rng.random() < 0.85
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.6:
            change_tensor(rng, parts)
        elif isinstance(parts.about, dict) and isinstance(parts.about.get("head"), dict) and rng.random() < 0.8:
            change_json(rng, parts.about["head"])
        else:
            change_json(rng, parts.about)
    if forged:
        parts.seal()
    if rng.random() < 0.2:
        return parts.content(change_header(rng, parts)), forged
    result = parts.content()
    if rng.random() < 0.1 and forged:  # our JSON twice in itself
        text = _dumps(parts.header()).replace('{\\"version\\"', '{\\"head\\": null, \\"version\\"', 1)
        result = parts.content(text.encode("utf-8", "surrogatepass"))
    return result, forged
