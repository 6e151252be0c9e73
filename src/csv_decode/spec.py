"""The output layer to decode through, and the checks on every array that enters the library."""

from __future__ import annotations

import hashlib
import operator
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "HeadSpec", "Rows", "as_states", "column", "positive", "require_usable", "whole"]

Array = Any  # a numpy array or a torch tensor
F64 = NDArray[np.float64]

_LARGEST = float(np.finfo(np.float32).max)


def _to_numpy(array: Array) -> tuple[NDArray[Any], bool]:
    """The same memory as numpy, and whether it holds bfloat16 as uint16 bit patterns."""
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
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":  # ml_dtypes
        return array.view(np.uint16), True
    return array, False


def _bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from low to high, or a ValueError that names it."""
    try:
        number = operator.index(value)
        if isinstance(value, (bool, np.bool_)) or not low <= number <= high:
            raise TypeError
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected a whole number from {low} to {high}") from None
    return number


def positive(name: str, value: Any, high: float = float("inf")) -> float:
    """A finite number above 0 and at most high, or a ValueError that names it."""
    try:
        number = float(value)
        if isinstance(value, (bool, str)) or not (0 < number <= high and np.isfinite(number)):
            raise TypeError
    except (TypeError, ValueError):
        limit = "" if high == float("inf") else f" at most {high:g}"
        raise ValueError(f"{name} is {value!r}, expected a positive finite number{limit}") from None
    return number


def column(name: str, value: Any, n: int, dtype: Any, low: float, high: float) -> NDArray[Any]:
    """A number for each of n states, from one number or (n,), from low to high; or a ValueError that names it."""
    expected = f"{'whole numbers' if np.dtype(dtype).kind in 'iu' else 'numbers'} from {low:g} to {high:g}"
    whole_wanted = np.dtype(dtype).kind in "iu"
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
        shown = repr(value)
        shown = shown if len(shown) < 80 else f"{type(value).__name__} of shape {np.shape(value)}"
        raise ValueError(f"{name} is {shown}, expected {expected}: one, or an array ({n},)") from None
    return np.ascontiguousarray(np.broadcast_to(given.astype(dtype), (n,)))


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix in its stored type: `data` (n, d), float32, float16, or uint16 bit patterns of bfloat16."""

    data: NDArray[Any]
    kind: str

    @classmethod
    def of(cls, array: Array, what: str = "weight") -> Rows:
        data, brain = _to_numpy(array)
        if not brain and data.dtype not in (np.float32, np.float16):
            raise ValueError(
                f"{what} has dtype {data.dtype}, expected float32, float16 or bfloat16; "
                "the certificate is about the stored numbers, so convert it explicitly"
            )
        if data.ndim != 2 or 0 in data.shape:
            raise ValueError(f"{what} has shape {data.shape}, expected (V, d) with V >= 1 and d >= 1")
        return cls(np.ascontiguousarray(data), "bfloat16" if brain else data.dtype.name)

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def itemsize(self) -> int:
        return int(self.data.itemsize)

    def float32(self, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.float32]:
        """Chosen rows as float32, exactly."""
        data = self.data[rows]
        return _bf16_to_float32(data) if self.kind == "bfloat16" else data.astype(np.float32, copy=False)


@dataclass(frozen=True, eq=False)
class HeadSpec:
    """An output layer: ``logits = softcap(scale * (weight @ h + bias))``.

    Args:
        weight: (V, d), float32, float16 or bfloat16; one row for each token id. Not copied when contiguous.
        bias: (V,) or None, same types.
        scale: positive factor on the logits (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``).
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
            bias = np.ascontiguousarray(_bf16_to_float32(data) if brain else data.astype(np.float32))
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
    out = np.ascontiguousarray(data, dtype=np.float64)
    if check:
        require_usable(out)
    return out


def require_usable(states: F64) -> None:
    """Raises ValueError where states (B, d) hold NaN, infinity, or values beyond float32."""
    bad = ~(np.abs(states) <= _LARGEST)
    if bad.any():
        state = int(np.nonzero(bad.any(axis=1))[0][0])
        raise ValueError(
            f"hidden state {state} has {int(bad[state].sum())} values that are NaN, infinite or beyond float32's "
            "range; no certificate can be given for it"
        )
