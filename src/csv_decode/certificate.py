"""What a step returns: ids, logits, and for every state the proof that they are the right ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Certificate", "Certificates", "Statistics", "TopK"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Certificate:
    """The proof for one state.

    Scores are ``<w, h> + b``, before scale and cap. Every row that was not scored has a score of at most
    `max_unopened`, every id returned one of at least `threshold`, and `margin` = threshold - max_unopened > 0. When the
    dense product ran, `fallback` says why, max_unopened is -inf, and the proof is that every row was scored.
    """

    kind: str
    guarantee: str
    failure_probability: float
    certified: bool
    threshold: float
    max_unopened: float
    margin: float
    rows_scored: int
    survivors: tuple[int, ...]
    bytes_read: int
    bytes_dense: int
    fallback: str | None


@dataclass(frozen=True, eq=False)
class Certificates:
    """Certificates of B states as columns; `certificates[b]` is one of them.

    certified (B,) bool. threshold, max_unopened, margin (B,) float64. rows_scored (B,): rows scored exactly.
    survivors (B, stages): rows that reached each stage after the first. bytes_read (B,): what the step asked memory
    for (codes, radii, transform, exact rows in their stored type; what a batch reads once is shared out evenly).
    bytes_dense: the head in bfloat16. fallback: reason for the dense product, or None. energy (B,): ||M h||^2 over its
    mean in calibration, NaN where no shadow bound ran.
    """

    kind: str
    certified: NDArray[np.bool_]
    threshold: F64
    max_unopened: F64
    rows_scored: I64
    survivors: I64
    bytes_read: I64
    bytes_dense: int
    fallback: list[str | None]
    energy: F64
    guarantee: str = "deterministic"
    failure_probability: float = 0.0

    @property
    def margin(self) -> F64:
        return self.threshold - self.max_unopened

    def __len__(self) -> int:
        return len(self.certified)

    def __getitem__(self, b: int) -> Certificate:
        b = range(len(self))[operator.index(b)]
        return Certificate(
            kind=self.kind,
            guarantee=self.guarantee,
            failure_probability=self.failure_probability,
            certified=bool(self.certified[b]),
            threshold=float(self.threshold[b]),
            max_unopened=float(self.max_unopened[b]),
            margin=float(self.margin[b]),
            rows_scored=int(self.rows_scored[b]),
            survivors=tuple(int(x) for x in self.survivors[b]),
            bytes_read=int(self.bytes_read[b]),
            bytes_dense=self.bytes_dense,
            fallback=self.fallback[b],
        )


@dataclass(frozen=True, eq=False)
class TopK:
    """The k largest logits of B states; larger logits first, equal ones by smaller id.

    ids: (B, k) int64 and logits: (B, k) float64 with scale and cap applied; with ``ties=True`` lists of B arrays that
    also hold every id whose logit equals the k-th exactly. A logit is within `logit_error` (B,) of the real value of
    ``<w, h> + b`` before scale and cap; the order is exact.
    """

    ids: I64 | list[I64]
    logits: F64 | list[F64]
    k: int
    logit_error: F64
    certificates: Certificates


@dataclass
class Statistics:
    """Running totals of a head."""

    states: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    rows_scored: int = 0
    bytes_read: int = 0
    bytes_dense: int = 0
    seconds: float = 0.0
    energy: float = 0.0
    energy_states: int = 0

    def add(self, certificates: Certificates, seconds: float) -> None:
        self.states += len(certificates)
        for reason in certificates.fallback:
            if reason is not None:
                self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        self.rows_scored += int(certificates.rows_scored.sum())
        self.bytes_read += int(certificates.bytes_read.sum())
        self.bytes_dense += certificates.bytes_dense * len(certificates)
        self.seconds += seconds
        known = certificates.energy[~np.isnan(certificates.energy)]
        self.energy += float(known.sum())
        self.energy_states += len(known)

    @property
    def fallback_rate(self) -> float:
        return sum(self.fallbacks.values()) / self.states if self.states else 0.0

    @property
    def bytes_ratio(self) -> float:
        """Bytes read over the bytes of a dense bfloat16 head."""
        return self.bytes_read / self.bytes_dense if self.bytes_dense else 0.0

    @property
    def mean_energy(self) -> float:
        """Mean of ||M h||^2 relative to calibration: 1 where calibration fits the states served, more where not."""
        return self.energy / self.energy_states if self.energy_states else 0.0
