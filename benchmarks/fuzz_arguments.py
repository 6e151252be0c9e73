"""Strange arguments of the public API: types, shapes, memory layouts, numbers, objects.

What must hold for every call: it gives the exact answer, or raises ValueError, TypeError or RuntimeError from a `raise`
statement of this library, which says what was given and what is expected. (FileNotFoundError where a file is missing,
OSError where one cannot be written, VerificationError of `verify`.) Nothing else: no error that escapes from numpy or
from the middle of a function, no RuntimeWarning, no wrong answer, no crash.
"""

from __future__ import annotations

import copy
import dataclasses
import linecache
import pickle
import traceback
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from fuzz_index import Array, Finding, Rng, exact_order, has
from numpy.typing import NDArray

import csv_decode as cd
import csv_decode.head
from csv_decode.kernels.native import supported

LIBRARY = str(Path(cd.__file__).parent)
ROWS, WIDTH = 40, 9
TYPES: list[Any] = [np.float16, np.float64, np.longdouble, np.complex64, np.int8, np.int64, np.uint16, bool, object]
TYPES += ["U9", "S9", "datetime64[s]", "timedelta64[s]", ">f4", ">f8", ">f2", ">i4"]


# Strange things.


#: Modes of a head beside plain top-k, with arguments that are good.
MODES: list[tuple[str, dict[str, Any]]] = [
    (
        "sample",
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "seed": 5, "position": 1, "stream": 2},
    ),
    ("sample", {"temperature": 0.7, "seed": 5}),
    ("softmax", {"epsilon": 0.05, "temperature": 1.0}),
    ("log_partition", {"width": 1e-3, "temperature": 1.0}),
    ("within", {"margin": 2.0}),
    ("top_k", {"k": 3}),
    ("top_k", {"k": 3, "guess": np.arange(9).reshape(3, 3)}),
    ("log_probs", {"ids": np.arange(9).reshape(3, 3), "width": 1e-3}),
    ("top_log_probs", {"k": 4, "width": 1e-3}),
]


class Whole(int):
    pass


class Real(float):
    pass


class Text(str):
    pass


class Indexed:
    def __index__(self) -> int:
        return 3


class Floated:
    def __float__(self) -> float:
        return 0.5


class Sub(np.ndarray):
    pass


class Arrayed:
    """Something that numpy can ask for an array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.array, dtype)


def scalar(rng: Rng) -> Any:
    values: list[Any] = [
        None, True, False, np.True_, 0, -1, 1, 2, 3, 10, ROWS, ROWS + 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64,
        -(2**63), 10**400, -(10**400), 10**5000, 0.0, -0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 7.0, 5e-324, 1e-310, 1e-40, 1e-30,
        1e30, 1e38, 1e39, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"), "", "1", "0.5", "shadow",
        "centroid", "probabilistic", "generic", "reference", "avx2", b"1", b"shadow", 1j, Fraction(1, 3),
        Fraction(10**400), Decimal("0.1"), Decimal("NaN"), Decimal("sNaN"), Decimal("1e400"), np.float16(0.5),
        np.float32(2), np.float64(0.1), np.longdouble("1e4000"), np.longdouble(1), np.int8(3), np.uint64(2**63),
        np.int64(5), np.array(2), np.array(0.5), np.array([1]), np.array([0.5]), np.array([1.0, 2.0]),
        np.array(["shadow", "centroid"]), np.array(None), [], [1], [0.5, 0.5], ["shadow"], ["centroid", "shadow"],
        [["shadow"]], (), (1, 2), (2.0, 1.0), {}, {"a": 1}, {1}, {"shadow"}, frozenset(["shadow"]), object(), int,
        len, range(3), Ellipsis, NotImplemented, Whole(2), Real(0.5), Text("shadow"), Indexed(), Floated(),
        slice(None), np.datetime64("2020-01-01"), np.timedelta64(3), np.void(b"12345678"), memoryview(b"abc"),
        Exception("x"), Path("x"), "a" * 100_000, "\ud800", [[]] * 3, np.zeros((0, 3)),
    ]  # fmt: skip
    if has("torch"):
        import torch

        values += [
            torch.tensor(2),
            torch.tensor(0.5),
            torch.ones(2),
            torch.tensor(True),
            torch.float32,
            torch.nn.Linear,
        ]
    return values[rng.integers(len(values))]


def array(rng: Rng, good: NDArray[Any]) -> Any:
    """A good array (n,) or (n, d) of float32 made strange, or something else in its place."""
    ways: list[Callable[[], Any]] = [
        lambda: good,
        lambda: scalar(rng),
        lambda: good.astype(TYPES[rng.integers(len(TYPES))]),
        lambda: np.asfortranarray(good),
        lambda: good[::-1],
        lambda: good[..., ::-1],
        lambda: np.repeat(good, 2, axis=-1)[..., ::2],
        lambda: np.repeat(good, 3, axis=0)[::3],
        lambda: np.broadcast_to(good[:1], good.shape),
        lambda: np.broadcast_to(good[..., :1], good.shape),
        lambda: good.T,
        lambda: good[None],
        lambda: good[..., None],
        lambda: good[0],
        lambda: good[:0],
        lambda: good[..., :0],
        lambda: good[:1],
        lambda: good[:-1],
        lambda: good[..., :-1],
        lambda: np.concatenate([good, good]),
        lambda: good.tolist(),
        lambda: tuple(good.tolist()),
        lambda: [good[0], good[0][..., :-1]] if good.ndim > 1 else [1.0, [2.0]],
        lambda: np.asmatrix(good),
        lambda: good.view(Sub),
        lambda: np.ma.masked_array(good),
        lambda: np.ma.masked_array(good, mask=rng.random(good.shape) < 0.3),
        lambda: np.ma.masked_array(good, mask=np.ones(good.shape, bool)),
        lambda: unaligned(good),
        lambda: readonly(good),
        lambda: Arrayed(good),
        lambda: memoryview(np.ascontiguousarray(good)),
        lambda: np.zeros(good.shape, [("a", "f4"), ("b", "f4")]),
        lambda: np.rec.fromarrays([good]),
        lambda: np.zeros(good.shape, good.dtype),
        lambda: -np.zeros(good.shape, good.dtype),
        lambda: salted(rng, good, [np.nan, np.inf, -np.inf][rng.integers(3)]),
        lambda: salted(rng, good, np.float32(3.4028235e38)),
        lambda: salted(rng, good, np.float32(1e-45)),
        lambda: salted(rng, good, np.float32(1e30)),
        lambda: good * np.float32(1e-38),
        lambda: good * np.float32(1e-44),
        lambda: good * np.float32(1e37),
        lambda: good.astype(np.float64) * 1e-300,
        lambda: good.astype(np.float64) * 1e-320,
        lambda: good.astype(np.float64) * 1e38,
        lambda: good.astype(np.float64) * 1e300,
        lambda: good.astype(np.float16),
        lambda: np.full(good.shape, np.float32(3.4028235e38)),
        lambda: np.round(good * 2),
        lambda: iter(good.tolist()),
        lambda: {"weight": good},
    ]  # fmt: skip
    if has("torch"):
        import torch

        def tensor() -> torch.Tensor:
            return torch.from_numpy(np.array(good))

        ways += [
            tensor,
            lambda: tensor().to(torch.bfloat16),
            lambda: tensor().to(torch.bfloat16).T,
            lambda: tensor().to(torch.float16),
            lambda: tensor().double(),
            lambda: tensor().to(torch.float8_e4m3fn),
            lambda: tensor().to(torch.complex64),
            lambda: tensor().to(torch.complex64).conj(),
            lambda: torch._neg_view(tensor()),
            lambda: tensor().int(),
            lambda: tensor().requires_grad_(),
            lambda: torch.nn.Parameter(tensor()),
            lambda: tensor().T,
            lambda: tensor().flip(0),
            lambda: tensor()[:1].expand(good.shape),
            lambda: tensor().to_sparse(),
            lambda: tensor().to("meta"),
            lambda: torch.quantize_per_tensor(tensor(), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([tensor(), tensor()]),
            lambda: torch.from_numpy(unaligned(good)),
            lambda: list(tensor()),
        ]
    return ways[rng.integers(len(ways))]()


def unaligned(good: NDArray[Any]) -> NDArray[Any]:
    raw = np.zeros(good.nbytes + 1, np.uint8)
    out = raw[1:].view(good.dtype).reshape(good.shape)
    out[...] = good
    return out


def readonly(good: NDArray[Any]) -> NDArray[Any]:
    out = good.copy()
    out.flags.writeable = False
    return out


def salted(rng: Rng, good: NDArray[Any], grain: Any) -> NDArray[Any]:
    out = good.copy()
    out.reshape(-1)[rng.integers(0, out.size, int(rng.integers(1, 4)))] = grain
    return out


# What an array means, read in another way than the library does.


def numbers(value: Any) -> Array:
    if has("torch"):
        import torch

        if isinstance(value, torch.Tensor):
            return value.detach().resolve_neg().to(torch.float64).numpy()
    return np.array(np.asarray(value), np.float64)


def require_exact(top: cd.TopK, spec: Any, hidden: Any, k: Any, ties: bool = False) -> None:
    """Ids by fractions; logits to what float64 can have."""
    given = spec if isinstance(spec, cd.HeadSpec) else cd.HeadSpec(spec)
    weight = numbers(given.weight)[: given.n_rows]
    bias = None if given.bias is None else numbers(given.bias)[: given.n_rows]
    h = numbers(hidden)
    h = h[None] if h.ndim == 1 else h
    k = int(k.__index__())
    order, values = exact_order(weight, h, bias)
    if len(top.ids) != len(h) or len(top.certificates) != len(h):
        raise Finding(f"{len(top.ids)} answers for {len(h)} states")
    for b in range(len(h)):
        ids = np.asarray(top.ids[b]).tolist()
        want = order[b][:k]
        if ties:
            if ids[:k] != want or len(set(ids)) != len(ids):
                raise Finding(f"state {b}: ids {ids[:9]}, expected {want[:9]}")
        elif ids != want:
            raise Finding(f"state {b}: ids {ids[:9]}, expected {want[:9]}")
        logits = values[b, ids] * given.scale
        if given.softcap is not None:
            logits = given.softcap * np.tanh(logits / given.softcap)
        room = top.logit_error[b] * given.scale + 1e-9 * np.abs(logits) + 5e-324
        if not (np.abs(np.asarray(top.logits[b]) - logits) <= room).all():
            raise Finding(f"state {b}: logits {np.asarray(top.logits[b])[:4]}, expected {logits[:4]}")


# How a call may end.


def deliberate(error: BaseException) -> bool:
    """Whether a `raise` of the library made it, and says something."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return frame.filename.startswith(LIBRARY) and line.startswith("raise") and len(str(error)) >= 15


def attempt(call: Callable[[], Any], *others: type[BaseException]) -> tuple[Any, str | None]:
    """The answer, or None and how the call was refused."""
    try:
        return call(), None
    except (ValueError, TypeError, RuntimeError, *others) as error:
        name = type(error).__name__
        if isinstance(error, others) and not isinstance(error, (ValueError, TypeError, RuntimeError)):
            return None, name
        if isinstance(error, (RecursionError, NotImplementedError)) or not deliberate(error):
            raise Finding(f"not an error of the library: {name}: {str(error)[:300]}") from error
        if len(str(error)) > 2000:
            raise Finding(f"a message of {len(str(error))} characters") from error
        return None, name


class Cases:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(5)
        self.weight = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
        self.weight[30] = self.weight[3]
        self.bias = rng.standard_normal(ROWS).astype(np.float32)
        self.bias[30] = self.bias[3]
        self.states = rng.standard_normal((24, WIDTH)).astype(np.float32)
        self.spec = cd.HeadSpec(self.weight, self.bias, scale=0.5, softcap=20.0, valid_rows=ROWS - 2)
        self.indexes = [(self.spec, cd.build_index(self.spec, self.states, seed=1, threads=1))]
        with mock.patch("csv_decode.index.shadow.secrets.randbits", return_value=12345):
            found = cd.build_index(self.weight, self.states, seed=1, threads=1, guarantee="probabilistic")
        self.indexes.append((cd.HeadSpec(self.weight), found))
        if has("faiss"):
            both = cd.build_index(self.spec, self.states, ("centroid", "shadow"), 1, threads=1, clusters=5)
            self.indexes.append((self.spec, both))
        self.model: Any = None

    def __call__(self, rng: Rng) -> str:
        csv_decode.head.SMALL_HEAD = 0 if rng.random() < 0.8 else 1 << 18
        kinds = [
            self.head_spec,
            self.build,
            self.head,
            self.top_k,
            self.top_k,
            self.modes,
            self.verify,
            self.verify_index,
            self.file,
        ]
        kinds += [self.values]
        if has("transformers") and rng.random() < 0.02:
            kinds = [self.accelerate]
        kind = kinds[rng.integers(len(kinds))]
        return f"{kind.__name__}: {kind(rng) or 'exact'}"

    def options(self, rng: Rng, good: dict[str, Any], arrays: tuple[str, ...] = ()) -> dict[str, Any]:
        """One or two of the arguments made strange."""
        out = dict(good)
        for name in rng.choice(sorted(good), int(rng.integers(1, 3))):
            out[name] = array(rng, good[name]) if name in arrays and good[name] is not None else scalar(rng)
            if isinstance(good[name], (int, float)) and rng.random() < 0.4:  # one that may be taken
                out[name] = [int(rng.integers(1, 45)), float(rng.choice([0.1, 1, 10])), 10.0 ** rng.uniform(-40, 40)][
                    rng.integers(3)
                ]
        if callable(out.get("progress")):
            out["progress"] = None  # what it raises is its own
        return out

    def some_index(self, rng: Rng) -> tuple[cd.HeadSpec, cd.Index]:
        return self.indexes[rng.integers(len(self.indexes))]

    @staticmethod
    def guarantee(index: Any) -> str:
        return (
            "probabilistic"
            if isinstance(index, cd.Index) and index.shadow and index.shadow.probabilistic
            else "deterministic"
        )

    # One method for each part of the API.

    def head_spec(self, rng: Rng) -> str | None:
        good = {"weight": self.weight, "bias": self.bias, "scale": 0.5, "softcap": 20.0, "valid_rows": 37}
        given = self.options(rng, good, ("weight", "bias"))
        spec, refused = attempt(lambda: cd.HeadSpec(**given))
        if refused:
            return refused
        head, refused = attempt(lambda: cd.CertifiedHead(None, spec))
        if refused:
            return refused
        h = rng.standard_normal((2, spec.width)).astype(np.float32)
        k = int(rng.integers(1, spec.n_rows + 1))
        require_exact(head.top_k(h, k), dataclasses.replace(spec), h, k)
        spec.fingerprint  # noqa: B018
        return None

    def build(self, rng: Rng) -> str | None:
        good: dict[str, Any] = {
            "spec": self.weight, "calibration": self.states, "bounds": "shadow", "seed": 3,
            "guarantee": "deterministic", "bits": (2.0, 1.0), "ridge": 0.01, "clusters": 4, "iterations": 2,
            "spherical": False, "verify": True, "threads": 1, "progress": None,
        }  # fmt: skip
        if has("faiss") and rng.random() < 0.3:
            good["bounds"] = ["centroid", ("centroid", "shadow")][rng.integers(2)]
        elif rng.random() < 0.3:
            good["guarantee"] = "probabilistic"
        given = self.options(rng, good, ("spec", "calibration"))
        if isinstance(given["iterations"], int) and given["iterations"] > 20:
            given["iterations"] = 20  # allowed, and slow
        index, refused = attempt(lambda: cd.build_index(**given))
        if refused:
            return refused
        spec = cd.HeadSpec.of(given["spec"])
        cd.verify_index(index, spec, threads=1)
        head = cd.CertifiedHead(index, spec, guarantee=self.guarantee(index), threads=1)
        h = rng.standard_normal((2, spec.width)).astype(np.float32)
        top = head.top_k(h, min(5, spec.n_rows))
        require_exact(top, given["spec"], h, min(5, spec.n_rows))
        cd.verify(top, h, spec)
        return None

    def head(self, rng: Rng) -> str | None:
        spec, index = self.some_index(rng)
        good = {
            "index": index, "spec": spec, "threads": 1, "guarantee": self.guarantee(index), "budget": 0.25,
            "kernels": supported()[-1], "failure_probability": 1e-9,
        }  # fmt: skip
        given = self.options(rng, good)
        if rng.random() < 0.2:
            given["spec"] = array(rng, self.weight)
        if rng.random() < 0.1:
            given["index"] = None
        head, refused = attempt(lambda: cd.CertifiedHead(**given))
        if refused:
            return refused
        repr(head)
        if rng.random() < 0.3:
            head = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))][rng.integers(3)](head)
        h = (
            self.states[:2]
            if head.spec.width == WIDTH
            else rng.standard_normal((2, head.spec.width)).astype(np.float32)
        )
        k = min(int(rng.integers(1, 8)), head.spec.n_rows)
        require_exact(head.top_k(h, k), head.spec, h, k)
        return None

    def top_k(self, rng: Rng) -> str | None:
        spec, index = self.some_index(rng)
        kernels = [*supported(), "reference"][rng.integers(len(supported()) + 1)]
        head = cd.CertifiedHead(index, spec, threads=1, guarantee=self.guarantee(index), kernels=kernels, budget=None)
        given = self.options(rng, {"hidden": self.states[:3], "k": 2, "ties": False}, ("hidden",))
        if rng.random() < 0.5:
            given["hidden"] = array(rng, self.states[:3])
        top, refused = attempt(lambda: head.top_k(**given))
        if refused:
            return refused
        require_exact(top, spec, given["hidden"], given["k"], bool(given["ties"]))
        cd.verify(top, given["hidden"], spec)
        return None

    def modes(self, rng: Rng) -> str | None:
        spec, index = self.some_index(rng)
        kernels = [*supported(), "reference"][rng.integers(len(supported()) + 1)]
        head = cd.CertifiedHead(index, spec, threads=1, guarantee=self.guarantee(index), kernels=kernels, budget=None)
        mode, good = MODES[rng.integers(len(MODES))]
        allowed = [None, rng.random(spec.n_rows) < 0.5, np.full(-(-spec.n_rows // 32), -1, np.int32)][rng.integers(3)]
        good = {"hidden": self.states[:3], **good, **({} if "log_prob" in mode else {"allowed": allowed})}
        given = self.options(rng, good, ("hidden",))
        for name in ("allowed", "ids"):
            whole = given.get(name)
            if isinstance(whole, np.ndarray) and whole.ndim and whole.dtype.kind in "bi" and rng.random() < 0.4:
                ways = [
                    whole[:-1],
                    whole[None],
                    whole.astype(float),
                    whole.astype(object),
                    whole[::-1],
                    whole.astype(">i8"),
                ]
                given[name] = [*ways, whole[:0], np.tile(whole, (3, 1)), np.tile(whole, (2, 1))][rng.integers(9)]
        found, refused = attempt(lambda: getattr(head, mode)(**given))
        if refused:
            return refused
        cd.verify(found, given["hidden"], spec)
        return None

    def verify(self, rng: Rng) -> str | None:
        spec, index = self.some_index(rng)
        h = self.states[:2]
        ties = bool(rng.integers(2))
        top = cd.CertifiedHead(index, spec, threads=1, guarantee=self.guarantee(index)).top_k(h, 3, ties)
        given: dict[str, Any] = {"result": top, "hidden": h, "spec": spec}
        if rng.random() < 0.75:
            given["result"] = self.other_top(rng, top)
        else:
            given = self.options(rng, given, ("hidden",))
        report, refused = attempt(lambda: cd.verify(**given), cd.VerificationError)
        if refused:
            return refused
        repr(report)
        got = given["result"]
        require_exact(got, given["spec"], given["hidden"], got.k, isinstance(got.ids, list))
        return None

    @staticmethod
    def other_top(rng: Rng, top: cd.TopK) -> cd.TopK:
        """A result with one thing changed."""
        if rng.random() < 0.4:
            certificates = top.certificates
            name = [f.name for f in dataclasses.fields(certificates)][rng.integers(12)]
            old = getattr(certificates, name)
            new = changed(rng, old) if isinstance(old, np.ndarray) and rng.random() < 0.7 else scalar(rng)
            return dataclasses.replace(top, certificates=dataclasses.replace(certificates, **{name: new}))
        name = ["ids", "logits", "k", "logit_error", "certificates"][rng.integers(5)]
        old = getattr(top, name)
        if isinstance(old, np.ndarray) and rng.random() < 0.8:
            new: Any = changed(rng, old)
        elif isinstance(old, list) and rng.random() < 0.8:
            new = list(old)
            new[rng.integers(len(new))] = changed(rng, new[0])
        else:
            new = scalar(rng)
        return dataclasses.replace(top, **{name: new})

    def verify_index(self, rng: Rng) -> str | None:
        spec, index = self.some_index(rng)
        given: dict[str, Any] = {"index": index, "weight": spec, "threads": 1, "progress": None}
        if rng.random() < 0.7:
            given["index"] = self.other_index(rng, index)
        else:
            given = self.options(rng, given)
        _, refused = attempt(lambda: cd.verify_index(**given))
        if isinstance(given["index"], cd.Index):
            head, no = attempt(
                lambda: cd.CertifiedHead(given["index"], spec, guarantee=self.guarantee(index), threads=1)
            )
            if not no:  # whatever it answers
                top = head.top_k(self.states[:2], 3)
                if not refused:
                    require_exact(top, spec, self.states[:2], 3)
        return refused

    @staticmethod
    def other_index(rng: Rng, index: cd.Index) -> Any:
        """One field of the index, or of a part of it, changed in memory."""

        def other(part: Any) -> Any:
            fields = [f.name for f in dataclasses.fields(part)]
            name = fields[rng.integers(len(fields))]
            old = getattr(part, name)
            if dataclasses.is_dataclass(old) and rng.random() < 0.9:
                new: Any = other(old)
            elif name == "planes" and rng.random() < 0.9:
                new = list(old)
                at = int(rng.integers(len(new)))
                new[at] = other(new[at])
                new = tuple(new)
            elif isinstance(old, np.ndarray) and rng.random() < 0.8:
                new = changed(rng, old)
            else:
                new = scalar(rng)
            return dataclasses.replace(part, **{name: new})

        return other(index)

    def file(self, rng: Rng) -> str | None:
        spec, index = self.some_index(rng)
        path = self.folder / "index"
        if rng.random() < 0.3:
            somewhere = scalar(rng)
            if isinstance(somewhere, (str, Path)):  # not here
                somewhere = self.folder / ("\0" if rng.random() < 0.1 else str(somewhere))
            _, refused = attempt(lambda: index.save(somewhere), OSError)
            return refused
        index.save(path)
        if rng.random() < 0.5:
            got, refused = attempt(lambda: cd.load_index(scalar(rng), spec), OSError)
        else:
            given = array(rng, self.weight)
            got, refused = attempt(lambda: cd.load_index(path, given), OSError)
            if not refused and given is not None and cd.HeadSpec.of(given).digest() != got.fingerprint:
                raise Finding("an index of other weights was loaded")
        return refused

    def values(self, rng: Rng) -> str | None:
        """The plain values that a step returns."""
        spec, index = self.some_index(rng)
        head = cd.CertifiedHead(index, spec, threads=1, guarantee=self.guarantee(index))
        top = head.top_k(self.states[:3], 2)
        b = scalar(rng)
        try:
            certificate = top.certificates[b]
        except (IndexError, TypeError) as error:  # as of any sequence
            return type(error).__name__
        if not isinstance(certificate, cd.Certificate):
            raise Finding(f"certificates[{b!r}] is {type(certificate).__name__}")
        return None

    def accelerate(self, rng: Rng) -> str | None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        if self.model is None:
            config = LlamaConfig(
                vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                num_key_value_heads=1, tie_word_embeddings=False,
            )  # fmt: skip
            torch.manual_seed(0)
            self.model = LlamaForCausalLM(config).eval()
        layer = self.model.get_output_embeddings()
        if rng.random() < 0.2:
            _, refused = attempt(lambda: cd.restore(scalar(rng)))
            return refused
        index = cd.build_index(layer.weight, None, seed=1, threads=1)
        good = {"model": self.model, "index": index, "threads": 1, "kernels": None, "budget": 0.25, "progress": None}
        given = self.options(rng, good)
        given["index"] = index if given["index"] is None else given["index"]
        try:
            _, refused = attempt(lambda: cd.accelerate(**given), OSError)
            if refused:
                return refused
            ids = torch.tensor([[1, 5, 9]])
            mine = self.model.generate(ids, do_sample=False, max_new_tokens=4)
        finally:
            cd.restore(self.model)
        if not torch.equal(mine, self.model.generate(ids, do_sample=False, max_new_tokens=4)):
            raise Finding("other tokens than the model's")
        return None


def changed(rng: Rng, old: NDArray[Any]) -> Any:
    """An array with other numbers, of another type or shape, or something else."""
    way = rng.integers(8)
    new = np.array(old)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way <= 3 and new.size:
            at = rng.integers(0, new.size, int(rng.integers(1, 3)))
            grains: list[Any] = [
                0,
                1,
                -1,
                2,
                39,
                40,
                100,
                2**31,
                2**62,
                0.5,
                1e30,
                -1e30,
                1e300,
                np.nan,
                np.inf,
                -np.inf,
            ]
            new.reshape(-1)[at] = np.array(grains[rng.integers(len(grains))]).astype(new.dtype)
            return new
        if way == 4 and new.size:
            return new[rng.permutation(len(new))]
        if way == 5:
            kinds = [
                np.float32,
                np.float64,
                np.int64,
                np.int32,
                np.uint64,
                np.uint16,
                bool,
                object,
                "U9",
                complex,
                ">f4",
                ">i8",
            ]
            return new.astype(kinds[rng.integers(len(kinds))])
        if way == 6:
            return [new[:-1], new[:0], new[None], np.concatenate([new, new]), new[..., None], new.T, new[..., :-1],
                    np.asfortranarray(new), new[::-1], np.repeat(new, 2, axis=-1)[..., ::2], unaligned(new),
                    new.tolist(), new.view(Sub), np.ma.masked_array(new, mask=True)][rng.integers(14)]  # fmt: skip
    return scalar(rng)


def prepare(folder: Path) -> None:
    return None


def open(context: None, folder: Path) -> Callable[[Rng], str]:
    warnings.simplefilter("error", RuntimeWarning)
    warnings.simplefilter("error", DeprecationWarning)
    import logging

    if has("transformers"):
        logging.getLogger("transformers").setLevel(logging.ERROR)
    return Cases(folder)
