"""What every decoding mode asks of a step: which rows to score, and what bounds the others.

A `Scan` holds B states. For each of them some rows are *scored* (ids, values, errors), and all others have a *key*, an
upper bound of their score, or of score + temperature * noise where there is a race. Scoring more rows or reading
more planes (`open`) only ever lowers keys, so a mode asks, decides, and asks for more while it cannot decide. The last
resort is to score every row (`dense`), after which nothing is left to bound; all questions have their answer then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .bounds.rounding import RELATIVE, score_error
from .certificate import Certificates
from .spec import HeadSpec

if TYPE_CHECKING:
    from .bounds.shadow import ShadowBound
    from .kernels import Kernels

__all__ = ["MASS_BINS", "Scan"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]

#: Bins of half a power of two each.
MASS_BINS = 128
#: As many allowed rows are scored at once, without reading any code.
FEW_ALLOWED = 1024
_NONE = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


class Scan:
    """B states on their way to a decision.

    Args:
        spec, kernels: of the head. open_ledger: gives the ledger of states (B, d) and races (`Cascade.ledger`), or None
            where every state is dense; why: the reason for that; shadow: the bound that the ledger is about. h: (B, d)
            states. budget: rows to score before a state goes dense. allowed: for each state None or bits (V / 32,), see
            `allowed_bits`. race: for the ledger; a state with one has keys of score + temperature * noise.
    """

    def __init__(
        self,
        spec: HeadSpec,
        kernels: Kernels,
        open_ledger: Any,
        h: F64,
        budget: int,
        allowed: list[U32 | None],
        why: str | None = None,
        shadow: ShadowBound | None = None,
        race: Any = None,
    ) -> None:
        self.spec, self.kernels, self.h, self.budget = spec, kernels, h, budget
        self.allowed, self.shadow = allowed, shadow
        n = len(h)
        self._spread: F64 | None = None
        self.fallback: list[str | None] = [None] * n
        self._parts: list[list[tuple[I64, F64, F64]]] = [[] for _ in range(n)]
        self.survivors = np.zeros(n, np.int64)
        self._ledger: Any = None
        self._closed = np.zeros(n, bool)  # every row scored
        self._floor = np.full(n, np.inf)  # every row that may have a larger score is scored
        few = [None if bits is None else allowed_ids(bits, spec.n_rows) for bits in allowed]
        small = [ids is not None and len(ids) <= FEW_ALLOWED for ids in few]
        if open_ledger is not None and not all(small):
            self._ledger = open_ledger(h, race)
        for b in range(n):
            if small[b]:
                self._closed[b] = True
                if len(few[b]):  # type: ignore[arg-type]
                    self._score(b, few[b])  # type: ignore[arg-type]
            elif self._ledger is None:
                self.dense(b, why or "no index")
            elif not self._ledger.usable(b):
                self.dense(b, "vanishing state" if self._ledger.vanishing(b) else "overflow")
            elif allowed[b] is not None:
                self._ledger.allow(b, allowed[b])

    def __len__(self) -> int:
        return len(self.h)

    # Rows scored.

    def scored(self, b: int) -> tuple[I64, F64, F64]:
        """Ids, scores and errors of the rows scored: ``|value - score| <= error``."""
        parts = self._parts[b]
        if len(parts) > 1:
            self._parts[b] = [tuple(np.concatenate(column) for column in zip(*parts, strict=True))]  # type: ignore
        return self._parts[b][0] if self._parts[b] else _NONE

    def _score(self, b: int, ids: I64) -> None:
        if self._ledger is not None and not self._closed[b]:
            value, error = self._ledger.score(b, ids)
        else:
            value, error = (x[0] for x in exact_rows(self.spec, self.kernels, self.h[b : b + 1], ids))
        self._parts[b].append((ids, value, error))

    def score(self, b: int, ids: I64) -> None:
        """Scores rows that were not scored yet."""
        known = self.scored(b)[0]
        if len(known):
            ids = ids[~np.isin(ids, known)]
        if len(ids):
            self._score(b, ids)

    def dense(self, b: int, reason: str) -> None:
        """Scores every allowed row."""
        if self._closed[b]:
            return
        bits = self.allowed[b]
        some = None if bits is None else allowed_ids(bits, self.spec.n_rows)
        value, error = (x[0] for x in exact_rows(self.spec, self.kernels, self.h[b : b + 1], some))
        ids = np.arange(self.spec.n_rows) if some is None else some
        self._parts[b] = [(ids, value, error)]
        self._closed[b] = True
        self.fallback[b] = reason

    def closed(self, b: int) -> bool:
        """Whether every row is scored."""
        return bool(self._closed[b])

    # The rows that were not scored.

    def leaders(self, b: int, count: int, plain: bool = True) -> None:
        """Scores the `count` rows that look best; plain: by their score, not by the race."""
        if not self._closed[b]:
            ids = np.asarray(self._ledger.leaders(b, count, plain))
            if len(ids):
                self._score(b, ids)

    def top(self, k: I64, spare: int, plain: bool, nuclei: tuple[F64, F64, F64] | None = None) -> tuple[F64, list[int]]:
        """Scores rows until no other can be among the k[b] > 0 best of state b (B,), by its score if plain, else by the
        race, and returns lower bounds on the k-th best, where not every row is scored.

        nuclei: for the first of races, near, t and top_p of each state. Also returns for each state the position in
        `scored` of the first, if that and that it is in its nucleus are proved, else -1; rows are scored for this where
        it is at most near[b] behind the best score. See `Ledger::top`.
        """
        bars = np.full(len(self), np.inf)
        winners = [-1] * len(self)
        k = np.where(self._closed, 0, k)
        if not k.any():
            return bars, winners
        found = self._ledger.top(k, spare, self.budget, plain, nuclei)
        for b, (ids, value, error, bar, survivors, within, winner, floor) in enumerate(found):
            if k[b] <= 0:
                continue
            if len(ids):
                self._parts[b].append((np.asarray(ids), np.asarray(value), np.asarray(error)))
            bars[b] = bar
            winners[b] = winner
            self._floor[b] = min(self._floor[b], floor)
            if within:
                self.survivors[b] += survivors
            else:
                self.dense(b, "budget")
        return bars, winners

    def open(self, bars: F64, exact: F64 | None = None, plain: bool = True) -> None:
        """Refines every row of state b whose key reaches bars[b], and scores it if it still reaches exact[b] (default:
        the same bar) after the last plane. Infinity leaves a state as it is. plain: keys are those of the score."""
        exact = bars if exact is None else exact
        bars = np.where(self._closed | ((bars >= self._floor) & plain), np.inf, bars)
        if self._ledger is None or not (bars < np.inf).any():
            return
        for b, rows in enumerate(self._ledger.open(bars, np.maximum(exact, bars), plain)):
            if len(rows):
                self._take(b, np.asarray(rows))

    def _take(self, b: int, rows: I64) -> None:
        if len(rows) + sum(len(part[0]) for part in self._parts[b]) > self.budget:
            self.dense(b, "budget")
        else:
            self.survivors[b] += len(rows)
            self._score(b, rows)

    def unopened(self, b: int) -> float:
        """The largest key, -infinity where every row is scored."""
        return -math.inf if self._closed[b] else float(self._ledger.highest(b))

    def mass(self, b: int, start: float, rate: float, likely: bool = False) -> F64:
        """(MASS_BINS,) upper bounds of the sum of 2^(rate (score - start)) over unscored rows, by the exponent of their
        bound: bin j has (-(j + 1) / 2, -j / 2]. likely: of the centres of their intervals, which bounds nothing."""
        if self._closed[b]:
            return np.zeros(MASS_BINS)
        # 2^18 float64 additions of positive terms stay far within this
        return np.asarray(self._ledger.mass(b, start, rate, likely)) * (1 + 2.0**-30)

    @property
    def levels(self) -> int:
        """How many planes there are, 0 where nothing bounds all rows together."""
        return 0 if self._ledger is None or self.shadow is None else len(self.shadow.moments or ())

    @property
    def joined(self) -> bool:
        """Whether something was asked of all rows together already."""
        return self._spread is not None

    def spread(self, b: int) -> F64:
        """(levels,) lengths of the errors of all rows' centres, see `ShadowBound.spread`."""
        if self._spread is None:
            assert self.shadow is not None
            self._spread = self.shadow.spread(self.kernels, self.h, self.spec.bias32)
            assert self._spread is not None
        return self._spread[b]

    def joint(self, b: int, start: float, rate: float) -> F64:
        """(levels, MASS_BINS, 4): of the unscored rows that each plane was the last to meet, by their peak, see
        `Ledger::joint`."""
        return np.asarray(self._ledger.joint(b, start, rate))

    def lift(self, b: int, level: int, bins: int) -> None:
        """Refines the rows of a level whose peak, by the last call of `joint`, is in the first bins, and scores them if
        there is no further plane."""
        rows = np.asarray(self._ledger.lift(b, level, bins))
        if len(rows):
            self._take(b, rows)

    # What it cost.

    def certificates(
        self, kind: str, threshold: F64, max_unopened: F64, certified: NDArray[np.bool_], head: Any
    ) -> Certificates:
        n, spec = len(self), self.spec
        rows_scored = [sum(len(part[0]) for part in parts) for parts in self._parts]
        read = [float(rows * spec.rows.row_bytes) for rows in rows_scored]
        stages = 1
        survivors = [[int(count)] for count in self.survivors]
        energy = [math.nan] * n
        if self._ledger is not None:
            shadow = head.index.shadow
            stages = len(shadow.planes)
            biased = spec.bias32 is not None
            once = shadow.state_bytes + shadow.row_bytes(0, biased) * len(shadow.rho)
            if self._spread is not None:
                once += shadow.moment_bytes
            for b in range(n):
                read[b] += once / n
                rows = [0] * (stages - 1)
                if self._ledger.usable(b):
                    energy[b] = self._ledger.energy(b)
                    rows = [self._ledger.rows_at(b, plane) for plane in range(1, stages)]
                    read[b] += sum(count * shadow.row_bytes(i + 1, biased) for i, count in enumerate(rows))
                survivors[b] = rows + survivors[b]
        return Certificates(
            kind=kind,
            certified=certified,
            threshold=threshold,
            max_unopened=max_unopened,
            rows_scored=np.array(rows_scored, np.int64),
            survivors=np.array(survivors, np.int64).reshape(n, stages),
            bytes_read=np.array([round(x) for x in read], np.int64),
            bytes_dense=spec.bytes_dense,
            fallback=self.fallback,
            energy=np.array(energy),
            guarantee=head.guarantee,
            failure_probability=head.failure_probability,
        )


def exact_rows(spec: HeadSpec, kernels: Kernels, h: F64, ids: I64 | None = None) -> tuple[F64, F64]:
    """Scores (B, n) of rows ids (n,), or of all, for states (B, d), bias included, and their errors."""
    rows = spec.valid_rows_only()
    value, magnitude = kernels.score(rows, h, ids)
    error = np.where(h.any(axis=1, keepdims=True), score_error(spec.width, magnitude), 0.0)
    if spec.bias32 is None:
        return value, error
    total = value + (spec.bias32[: spec.n_rows] if ids is None else spec.bias32[ids])
    return total, error + RELATIVE * np.abs(total)


def allowed_ids(bits: U32, n_rows: int) -> I64:
    """The ids whose bit is set."""
    return np.nonzero(np.unpackbits(bits.view(np.uint8), count=n_rows, bitorder="little"))[0]


def allowed_bits(allowed: Any, n_states: int, n_rows: int) -> list[U32 | None]:
    """For each state the bits of the allowed rows, bit i % 32 of word i / 32 for row i, or None where all are.

    allowed: None; booleans (V,) or (B, V); or int32 words (V / 32,) or (B, V / 32), as grammar libraries use them. Rows
    beyond V are left out. Raises ValueError for other shapes or types, and for a state that allows nothing.
    """
    if allowed is None:
        return [None] * n_states
    from .spec import _to_numpy

    array = _to_numpy(allowed)[0]
    words = -(-n_rows // 32)
    if array.dtype == np.bool_:
        if array.shape[-1:] not in ((n_rows,),) or array.ndim not in (1, 2):
            raise ValueError(
                f"allowed has shape {array.shape}, expected ({n_rows},) or ({n_states}, {n_rows}) booleans"
            )
        packed = np.packbits(array, axis=-1, bitorder="little")
        table = np.zeros((*array.shape[:-1], words * 4), np.uint8)
        table[..., : packed.shape[-1]] = packed
        table = table.view(np.uint32)
    elif array.dtype in (np.int32, np.uint32):
        if array.ndim not in (1, 2) or array.shape[-1] < words:
            raise ValueError(
                f"allowed has shape {array.shape} of {array.dtype}, expected ({words},) or ({n_states}, {words}) words "
                f"of 32 bits for {n_rows} rows"
            )
        table = np.ascontiguousarray(array[..., :words]).view(np.uint32)
        if n_rows % 32:
            table = table.copy()
            table[..., -1] &= np.uint32((1 << (n_rows % 32)) - 1)
    else:
        raise ValueError(f"allowed has dtype {array.dtype}, expected booleans or words of 32 bits (int32)")
    if table.ndim == 1:
        table = np.broadcast_to(table, (n_states, words))
    if len(table) != n_states:
        raise ValueError(f"allowed is for {len(table)} states, but {n_states} were given")
    for b in range(n_states):
        if not table[b].any():
            raise ValueError(f"allowed leaves no row to state {b}")
    return [np.ascontiguousarray(row) for row in table]
