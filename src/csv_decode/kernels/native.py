"""The C++ kernels, one instruction set at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..bounds.planes import GROUPS, INTERLEAVE, Plane, PlaneStates, group_edges, rotation_edges
from ..spec import ROW_KINDS, Rows, one_of

if TYPE_CHECKING:
    from ..bounds.shadow import ShadowBound

__all__ = ["NativeKernels", "ieee", "supported"]

_ROW_TYPES = {kind: i for i, kind in enumerate(ROW_KINDS)}  # RowType of cpp/plane.hpp


#: Where engines have the shared library that runs layers, under one of its names.
_LIBRARIES = {"torch": "lib/libtorch_cpu.so", "llama_cpp": "lib/libggml-cpu*.so*"}


def _team(threads: int, engine: str | None) -> Any:
    """The threads of an engine that is loaded, else our own."""
    module = None if engine is None else sys.modules.get(engine)
    if engine is not None and module is not None and module.__file__ is not None:
        for path in sorted(Path(module.__file__).parent.glob(_LIBRARIES[engine])):
            team = _native.Team(threads, str(path))
            if team.shared:
                return team
    return _native.Team(threads, None)


def ieee() -> bool:
    """Whether this thread computes in default IEEE mode: round to nearest, subnormal numbers kept."""
    return bool(_native.ieee())


def supported() -> list[str]:
    """Instruction sets that can run here, slowest first."""
    return list(_native.supported())


class NativeCascade:
    """See `csv_decode.kernels.Cascade`."""

    def __init__(self, cascade: Any, isa: str, team: Any) -> None:
        self._cascade, self._isa, self._team = cascade, isa, team

    def top_k(
        self,
        h: NDArray[np.float64],
        k: int,
        spare: int,
        budget: int,
        race: Any = None,
        margin: Any = None,
        guess: NDArray[np.int64] | None = None,
    ) -> Any:
        return self._cascade.scan(self._isa, self._team, h, k, spare, budget, race, margin, guess)

    def ledger(self, h: NDArray[np.float64], race: Any = None) -> Any:
        return _native.Ledger(self._cascade, self._isa, self._team, h, race)


class NativeKernels:
    """See `csv_decode.kernels.Kernels`. The GIL is released, and at most `threads` threads work: our own, which sleep
    between calls, or those of an engine's OpenMP, see cpp/pool.hpp."""

    def __init__(self, isa: str, threads: int, engine: str | None = None) -> None:
        self.name = isa
        self.threads = threads
        self.engine = None if engine is None else one_of("engine", engine, tuple(_LIBRARIES))
        self._team = _team(threads, engine)

    def bind(self, plane: Plane, rho: NDArray[np.uint16], bias: NDArray[np.float32] | None) -> tuple[Any, int]:
        words = plane.words.reshape(-1, plane.words_per_row)
        if plane.interleaved and len(words) != -(-len(rho) // INTERLEAVE) * INTERLEAVE:
            raise ValueError(f"plane 0 has codes for {len(words)} rows, expected {len(rho)} rounded up to 16")
        return _native.Plane(words, rho, bias, plane.segments), len(rho)

    def cascade(
        self,
        bound: ShadowBound,
        rows: Rows,
        bias: NDArray[np.float32] | None,
        sigma: float = 0.0,
    ) -> NativeCascade:
        planes = []
        for plane in bound.planes:
            dim, step, cmax = plane.slots
            unit = plane.radius_step.astype(np.float64)
            planes.append((self.bind(plane, bound.rho, bias)[0], dim.astype(np.int32), step, cmax, unit))
        typical = np.zeros((len(planes), GROUPS - 1)) if bound.typical is None else bound.typical
        cascade = _native.Cascade(
            planes,
            rows.data,
            _ROW_TYPES[rows.kind],
            bias,
            bound.transform,
            _ROW_TYPES[bound.transform.dtype.name],
            bound.mean[None],
            rotation_edges(bound.transform.shape[1]) if bound.probabilistic else group_edges(len(bound.transform)),
            bound.delta,
            bound.energy,
            bound.rotation_error or 0.0,
            typical,
            sigma,
        )
        return NativeCascade(cascade, self.name, self._team)

    def screen(
        self, plane: tuple[Any, int], states: PlaneStates, open_blocks: NDArray[np.uint8] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        handle, n_rows = plane
        centre = np.empty((len(states.params), n_rows), np.float32)
        upper = np.empty_like(centre)
        _native.screen(self.name, self._team, handle, states.hi, states.lo, states.params, open_blocks, centre, upper)
        return centre, upper

    def sift(
        self, plane: tuple[Any, int], states: PlaneStates, bars: NDArray[np.float32]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], float]]:
        return _native.sift(self.name, plane[0], states.hi, states.lo, states.params, bars)

    def refine(
        self, plane: tuple[Any, int], states: PlaneStates, rows: NDArray[np.int64], start: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        centre = np.empty(len(rows), np.float32)
        upper = np.empty_like(centre)
        _native.refine(self.name, self._team, plane[0], states.hi, states.lo, states.params, rows, start, centre, upper)
        return centre, upper

    def score(
        self, rows: Rows, h: NDArray[np.float64], ids: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        n = rows.shape[0] if ids is None else len(ids)
        value = np.empty((len(h), n))
        magnitude = np.empty_like(value)
        _native.score(self.name, self._team, rows.data, _ROW_TYPES[rows.kind], ids, h, value, magnitude)
        return value, magnitude

    def leaders(self, values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        return np.asarray(_native.leaders(self.name, self._team, values, count))

    def select(self, values: NDArray[np.float32], bar: float) -> tuple[NDArray[np.int64], float]:
        ids, dropped = _native.select(self.name, values, bar)
        return np.asarray(ids), dropped
