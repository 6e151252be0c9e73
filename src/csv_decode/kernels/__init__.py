"""The hot loops, behind one small interface: arrays in, arrays out, nothing of models or certificates.

`reference` is plain numpy and the oracle; `native` is C++ for three instruction sets. All of them return the same bits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..bounds.planes import Plane, PlaneStates
from ..spec import Rows, shown, whole
from .native import NativeKernels, ieee, supported
from .reference import ReferenceKernels

if TYPE_CHECKING:
    from ..bounds.shadow import ShadowBound

__all__ = ["Cascade", "Kernels", "default_threads", "get_kernels", "ieee", "require_ieee", "simd_info", "thread_count"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Cascade(Protocol):
    """A shadow bound and the weights it is about."""

    def top_k(
        self,
        h: F64,
        k: int,
        spare: int,
        budget: int,
        race: Any = None,
        margin: Any = None,
        guess: I64 | None = None,
    ) -> Any:
        """All of `CertifiedHead._descend` in one call, see cpp/module.cpp; the reference has none. race: seeds (B,)
        uint64, streams, positions (B,) int64 and temperatures (B,) float64, for the k first of races. margin: how far
        below the k-th rows are scored as well, a share of it and (B,) float64 in scores. guess: (B, k) rows, without
        the other two."""

    def ledger(self, h: F64, race: Any = None) -> Any:
        """A ledger of states h (B, d), see cpp/ledger.hpp. race: as for `top_k`; temperature 0: the state has none."""


class Kernels(Protocol):
    """What a step needs. V rows, d width, B states, n chosen rows."""

    name: str
    threads: int
    engine: str | None

    def bind(self, plane: Plane, rho: NDArray[np.uint16], bias: F32 | None) -> Any:
        """Checks a plane once and returns the handle that `screen` and `refine` take. rho (V,) is bfloat16."""

    def cascade(
        self,
        bound: ShadowBound,
        rows: Rows,
        bias: F32 | None,
        sigma: float = 0.0,
    ) -> Cascade:
        """The shadow bound bound to a head's weights."""

    def screen(self, plane: Any, states: PlaneStates, open_blocks: NDArray[np.uint8] | None) -> tuple[F32, F32]:
        """Plane 0 for every row: centre and upper, (B, V). Blocks of 16 rows that are not open get -inf."""

    def sift(self, plane: Any, states: PlaneStates, bars: F32) -> list[tuple[I64, F32, F32, float]]:
        """Plane 0 for states that know a bar, (B,): for each the rows whose upper bound is not at most the bar, their
        centre and upper as `screen` has them, and at least the upper bound of every other row. Blocks of 16 rows that
        `bounds.planes.sieves` leaves below the bar are not looked at further."""

    def refine(self, plane: Any, states: PlaneStates, rows: I64, start: F32) -> tuple[F32, F32]:
        """A later plane for n rows of one state: centre and upper, (n,)."""

    def score(self, rows: Rows, h: F64, ids: I64 | None = None) -> tuple[F64, F64]:
        """Dots of all or chosen rows with h (B, d), and the sums of their absolute terms: (B, n) each.
        `csv_decode.bounds.rounding.score_error` bounds their error."""

    def leaders(self, values: F32, count: int) -> I64:
        """Indices of the largest values, best first; equal ones by index; NaN never."""

    def select(self, values: F32, bar: float) -> tuple[I64, float]:
        """Indices in rising order of the values that are not at most `bar` (so NaN stays), and the largest other."""


def default_threads() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def thread_count(threads: int | None) -> int:
    """The number asked for, at most 256; None: `default_threads`."""
    return default_threads() if threads is None else min(whole("threads", threads, 1, 2**31 - 1), 256)


def require_ieee() -> None:
    """Raises RuntimeError in a thread whose arithmetic is not what the proofs are about."""
    if not ieee():
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero or does not round to nearest, and certificates hold in IEEE "
            "arithmetic only; undo it, for example with torch.set_flush_denormal(False)"
        )


def _chosen() -> str:
    names = supported()
    forced = os.environ.get("CSV_DECODE_SIMD")
    if not forced:
        return names[-1]
    if forced not in (*names, "reference"):
        raise ValueError(
            f"CSV_DECODE_SIMD is {forced!r}; this processor can run {', '.join(names)} (and reference, in numpy)"
        )
    return forced


def get_kernels(name: str | None = None, threads: int | None = None, engine: str | None = None) -> Kernels:
    """Kernels by name, of `simd_info`, or reference. None: CSV_DECODE_SIMD, else the best that runs here.
    engine: see `CertifiedHead`."""
    name = _chosen() if name is None else name
    count = thread_count(threads)
    if isinstance(name, str) and name == "reference":
        return ReferenceKernels()
    if not isinstance(name, str) or name not in supported():
        raise ValueError(f"kernels {shown(name)} are unknown or cannot run here; there are {', '.join(supported())}")
    return NativeKernels(name, count, engine)


def simd_info() -> dict[str, Any]:
    """Which kernels run by default, which could, whether the choice was forced, and the default thread count."""
    return {
        "active": _chosen(),
        "supported": supported(),
        "forced": bool(os.environ.get("CSV_DECODE_SIMD")),
        "threads": default_threads(),
    }
