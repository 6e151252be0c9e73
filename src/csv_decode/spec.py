"""The output layer to decode through, and the checks on every array that enters the library."""

from __future__ import annotations

import hashlib
import numbers
import operator
import os
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ROW_KINDS",
    "Array",
    "HeadSpec",
    "Rows",
    "as_path",
    "as_states",
    "column",
    "flag",
    "one_of",
    "positive",
    "require_callable",
    "require_usable",
    "shown",
    "whole",
]

Array = Any  # a numpy array or a torch tensor
F64 = NDArray[np.float64]

#: Block formats of GGUF files: numbers and bytes of a block.
BLOCKS = {"q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
ROW_KINDS = ("float32", "float16", "bfloat16", *BLOCKS)
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)


def _to_numpy(array: Array) -> tuple[NDArray[Any], bool]:
    """The same memory as numpy, and whether it holds bfloat16 as uint16 bit patterns."""
    if type(array) is np.ndarray and array.dtype.kind != "V":  # "V": ml_dtypes
        return array, False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise ValueError(f"tensor is on {array.device}; move it to the CPU first")
        try:
            array = array.detach().resolve_neg()
            if array.dtype == torch.bfloat16:
                return array.view(torch.int16).numpy().view(np.uint16), True
            return array.numpy(), False
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"a {type(array).__name__} of {array.dtype} ({array.layout}) cannot be read as numbers: {error}"
            ) from None
    if np.ma.is_masked(array):
        raise ValueError("the array has masked entries; fill them first, since a mask has no meaning here")
    try:
        data = np.asarray(array)
    except MemoryError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"a {type(array).__name__} cannot be read as an array of numbers ({what})") from None
    if data.dtype.name == "bfloat16":  # ml_dtypes
        return data.view(np.uint16), True
    return data, False


def _stored(data: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
    """The same numbers row by row and at addresses that suit their type, as kernels read them; copied if need be."""
    if dtype is not None and data.dtype != dtype:
        return data.astype(dtype, order="C")
    return np.require(data, dtype, ["C_CONTIGUOUS", "ALIGNED"])


def _bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def shown(value: Any) -> str:
    """`repr` for messages: short, whatever the value."""
    try:
        text = repr(value)
    except Exception:  # an integer of many thousand digits has none
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _scalar(value: Any) -> Any:
    """A number out of a numpy scalar, or an array or tensor without dimensions; other things as they are."""
    if getattr(getattr(value, "dtype", None), "kind", None) == "m":
        raise TypeError  # a number of no unit to numpy, but time
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from low to high, or a ValueError that names it."""
    try:
        plain = _scalar(value)
        number = operator.index(plain)
        if isinstance(plain, bool) or not low <= number <= high:
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} is {shown(value)}, expected a whole number from {low} to {high}") from None
    return int(number)


def positive(name: str, value: Any, high: float = _LARGEST, low: float = _SMALLEST) -> float:
    """A number from low to high, by default what float32 can hold, or a ValueError that names it."""
    try:
        plain = _scalar(value)
        if isinstance(plain, bool) or not isinstance(plain, (numbers.Real, Decimal)):
            raise TypeError
        number = float(plain)
        if not low <= number <= high:
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(
            f"{name} is {shown(value)}, expected a positive number, at least {low:.3g} and at most {high:.3g}"
        ) from None
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, or a ValueError that names it."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} is {shown(value)}, expected True or False")
    return bool(value)


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of some words, or a ValueError that names them."""
    if not isinstance(value, str) or value not in choices:
        expected = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ValueError(f"{name} is {shown(value)}, expected {expected}")
    return str(value)


def require_callable(name: str, value: Any) -> None:
    """Raises ValueError for anything but None and what can be called."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} is {shown(value)}, expected a function or None")


def as_path(path: Any) -> Path:
    """The path of a file, or a ValueError for what no file system takes."""
    try:
        name = os.fspath(path)
        if not isinstance(name, str) or b"\0" in os.fsencode(name):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f"path is {shown(path)}, expected the path of a file, as str or os.PathLike") from None
    return Path(name)


def column(name: str, value: Any, n: int, dtype: Any, low: float, high: float) -> NDArray[Any]:
    """A number for each of n states, from one number or (n,), from low to high; or a ValueError that names it."""
    whole_wanted = np.dtype(dtype).kind in "iu"
    if (type(value) is int or (type(value) is float and not whole_wanted)) and low <= value <= high:
        return np.full(n, value, dtype)
    fits = type(value) is np.ndarray and value.dtype == dtype and value.shape == (n,) and n > 0
    if fits and low <= value.min() and value.max() <= high:
        return np.array(value)
    expected = f"{'whole numbers' if whole_wanted else 'numbers'} from {low:g} to {high:g}"
    try:
        given = _to_numpy(value)[0]
        if given.dtype == object and given.ndim == 0 and isinstance(value, int):
            given = np.asarray(value, np.uint64)  # beyond int64
        if given.dtype.kind not in ("iu" if whole_wanted else "iuf") or given.ndim > 1:
            raise TypeError
        inside = np.asarray([low <= x <= high for x in given.reshape(-1).tolist()])
        if (given.ndim == 1 and len(given) != n) or not inside.all():
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {shown(value)}, expected {expected}: one, or an array ({n},)") from None
    return np.ascontiguousarray(np.broadcast_to(given.astype(dtype), (n,)))


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix in its stored type: `data` (n, d), float32, float16, or uint16 bit patterns of bfloat16; or (n, bytes)
    uint8, rows of blocks as GGUF files have them, which stand for the float32 numbers that the `gguf` package makes of
    them: kinds "q8_0", "q4_k", "q6_k"."""

    data: NDArray[Any]
    kind: str

    @classmethod
    def packed(cls, data: NDArray[np.uint8], kind: str) -> Rows:
        """Rows of blocks. Raises ValueError where data are no whole blocks of that kind."""
        numbers, size = BLOCKS[one_of("kind", kind, tuple(BLOCKS))]
        if data.dtype != np.uint8 or data.ndim != 2 or 0 in data.shape or data.shape[1] % size:
            raise ValueError(
                f"weight of kind {kind} has shape {data.shape} and dtype {data.dtype}, expected (V, {size} n) uint8: "
                f"n blocks of {numbers} numbers a row"
            )
        return cls(_stored(data), kind)

    @classmethod
    def of(cls, array: Array, what: str = "weight") -> Rows:
        if isinstance(array, Rows):
            return array
        data, brain = _to_numpy(array)
        if not brain and data.dtype not in (np.float32, np.float16):
            raise ValueError(
                f"{what} has dtype {data.dtype}, expected float32, float16 or bfloat16; "
                "the certificate is about the stored numbers, so convert it explicitly"
            )
        if data.ndim != 2 or 0 in data.shape:
            raise ValueError(f"{what} has shape {data.shape}, expected (V, d) with V >= 1 and d >= 1")
        return cls(_stored(data), "bfloat16" if brain else data.dtype.name)

    @property
    def shape(self) -> tuple[int, int]:
        numbers, size = BLOCKS.get(self.kind, (1, 1))
        return self.data.shape[0], self.data.shape[1] // size * numbers

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[1] * self.data.itemsize)

    def float32(self, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.float32]:
        """Chosen rows as float32, exactly."""
        data = self.data[rows]
        if (
            self.kind == "q8_0"
        ):  # blocks of a float16 scale and 32 signed bytes; gguf's own way takes longer for one row
            blocks = data.reshape(len(data), data.shape[1] // 34, 34)
            scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                return (blocks[..., 2:].view(np.int8) * scale).reshape(len(data), blocks.shape[1] * 32)
        if self.kind in BLOCKS:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(over="ignore", invalid="ignore"):  # whoever takes weights in looks for infinity and NaN
                return np.asarray(dequantize(data, GGMLQuantizationType[self.kind.upper()]))
        return _bf16_to_float32(data) if self.kind == "bfloat16" else data.astype(np.float32, copy=False)


@dataclass(frozen=True, eq=False)
class HeadSpec:
    """An output layer: ``logits = softcap(scale * (weight @ h + bias))``.

    Args:
        weight: (V, d), float32, float16 or bfloat16, or `Rows.packed`; one row for each token id. Not copied when
            contiguous.
        bias: (V,) or None, same types.
        scale: positive factor on the logits (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``); like
            softcap, a number that float32 can hold.
        softcap: ``cap`` of ``cap * tanh(logit / cap)`` (Gemma 2), or None.
        valid_rows: rows at and beyond this number are padding and never returned; None: all are valid.

    The weights must not change while a head or an index made of them is in use; `CertifiedHead` hashes them when it is
    made (`accelerate` also watches them afterwards).

    Scale and cap are increasing, so they change no order; returned logits have them applied, in float64.
    """

    weight: Array
    bias: Array | None = None
    scale: float = 1.0
    softcap: float | None = None
    valid_rows: int | None = None
    rows: Rows = field(init=False, repr=False, compare=False)
    bias32: NDArray[np.float32] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = Rows.of(self.weight)
        n_rows = rows.shape[0]
        bias = None
        if self.bias is not None:
            data, brain = _to_numpy(self.bias)
            if data.shape != (n_rows,) or not (brain or data.dtype in (np.float32, np.float16)):
                raise ValueError(
                    f"bias has shape {data.shape} and dtype {data.dtype}, expected ({n_rows},) "
                    "in float32, float16 or bfloat16"
                )
            bias = _stored(_bf16_to_float32(data) if brain else data.astype(np.float32))
            if not np.isfinite(bias).all():
                raise ValueError(f"bias has {int((~np.isfinite(bias)).sum())} NaN or infinite values")
        object.__setattr__(self, "scale", positive("scale", self.scale))
        if self.softcap is not None:
            object.__setattr__(self, "softcap", positive("softcap", self.softcap))
        if self.valid_rows is not None:
            object.__setattr__(self, "valid_rows", whole("valid_rows", self.valid_rows, 1, n_rows))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "bias32", bias)

    @classmethod
    def of(cls, spec: HeadSpec | Array) -> HeadSpec:
        """A spec as it is; a bare weight becomes one."""
        return spec if isinstance(spec, HeadSpec) else cls(spec)

    @property
    def n_rows(self) -> int:
        """Valid rows: token ids are below this."""
        return self.rows.shape[0] if self.valid_rows is None else self.valid_rows

    def require_finite(self) -> None:
        """Raises ValueError for NaN or infinite weights, naming the first row that has them."""
        for first in range(0, self.n_rows, 65536):
            rows = self.rows.float32(slice(first, min(first + 65536, self.n_rows)))
            bad = ~np.isfinite(rows).all(axis=1)
            if bad.any():
                raise ValueError(
                    f"{int(bad.sum())} rows of the weights hold NaN or infinity, the first is row "
                    f"{first + int(np.nonzero(bad)[0][0])}; no bound can be given for them"
                )

    def valid_rows_only(self) -> Rows:
        """The rows without padding, in the same memory."""
        return Rows(self.rows.data[: self.n_rows], self.rows.kind)

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def bytes_dense(self) -> int:
        """The head in bfloat16, in bytes: what a dense step reads."""
        return self.rows.shape[0] * self.width * 2

    @cached_property
    def fingerprint(self) -> str:
        """`digest`, computed once. Weights that change in memory afterwards no longer have it."""
        return self.digest()

    def remember(self, digest: str) -> None:
        """Takes the digest of the file that the weights have just been read from, so that they need not be hashed."""
        self.__dict__["fingerprint"] = digest
        self.__dict__["_remembered"] = True

    @property
    def remembered(self) -> bool:
        """Whether the fingerprint came from `remember`."""
        return "_remembered" in self.__dict__

    def digest(self) -> str:
        """SHA-256 over type, shape, valid rows, weights and bias as they are now: half a second for a gigabyte."""
        digest = hashlib.sha256(f"{self.rows.kind} {self.rows.shape} {self.n_rows}\n".encode())
        digest.update(self.rows.data.data)
        if self.bias32 is not None:
            digest.update(self.bias32.data)
        return digest.hexdigest()

    def finish(self, raw: F64) -> F64:
        """Logits from raw scores <w, h> + b."""
        if self.scale == 1.0 and self.softcap is None:
            return raw
        out = raw * self.scale
        return out if self.softcap is None else self.softcap * np.tanh(out / self.softcap)


def as_states(hidden: Array, width: int, check: bool = True) -> F64:
    """Hidden states as float64 (B, d), exactly; one state may come as (d,).

    Raises ValueError for another width, an empty batch, other shapes, and (with `check`) as `require_usable` does.
    """
    data, brain = _to_numpy(hidden)
    if brain:
        data = _bf16_to_float32(data)
    if data.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"hidden states have dtype {data.dtype}, expected float16, bfloat16, float32 or float64")
    if data.ndim == 1:
        data = data[None]
    if data.ndim != 2 or data.shape[1] != width:
        raise ValueError(f"hidden states have shape {data.shape}, expected (B, {width}) or ({width},)")
    if data.shape[0] == 0:
        raise ValueError("the batch of hidden states is empty, expected at least one state")
    out = _stored(data, np.float64)
    if check:
        require_usable(out)
    return out


def require_usable(states: F64) -> None:
    """Raises ValueError where states (B, d) hold NaN, infinity, or values beyond float32."""
    size = np.abs(states)
    if not size.max(initial=0.0) <= _LARGEST:
        bad = ~(size <= _LARGEST)
        state = int(np.nonzero(bad.any(axis=1))[0][0])
        raise ValueError(
            f"hidden state {state} has {int(bad[state].sum())} values that are NaN, infinite or beyond float32's "
            "range; no certificate can be given for it"
        )
