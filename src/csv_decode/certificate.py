"""What a step returns: ids, logits, and for every state the proof that they are the right ones."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Certificate",
    "Certificates",
    "Draw",
    "LogPartition",
    "LogProbs",
    "ModelArgmax",
    "Scores",
    "Softmax",
    "Statistics",
    "TopK",
    "Within",
]

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
    tv_bound: float = 0.0


@dataclass(frozen=True, eq=False)
class Certificates:
    """Certificates of B states as columns; `certificates[b]` is one of them.

    certified (B,) bool. threshold, max_unopened, margin (B,) float64. rows_scored (B,): rows scored exactly.
    survivors (B, stages): rows that reached each stage after the first. bytes_read (B,): what the step asked memory
    for (codes, radii, transform, exact rows in their stored type; what a batch reads once is shared out evenly).
    bytes_dense: the head in bfloat16. fallback: reason for the dense product, or None. energy (B,): ||M h||^2 over its
    mean in calibration, NaN where no shadow bound ran. tv_bound (B,): of a softmax, else None.
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
    tv_bound: F64 | None = None

    @property
    def margin(self) -> F64:
        return self.threshold - self.max_unopened

    def __len__(self) -> int:
        return len(self.certified)

    def __iter__(self) -> Iterator[Certificate]:
        return (self[b] for b in range(len(self)))

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
            tv_bound=0.0 if self.tv_bound is None else float(self.tv_bound[b]),
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
    allowed: list[NDArray[np.uint32] | None] | None = None


@dataclass(frozen=True, eq=False)
class Draw:
    """One exact sample for each of B states, and all that it takes to draw it again.

    ids (B,) int64 and their logits (B,) float64, scale applied, temperature not. The parameters are columns (B,); the
    noise of state b is that of (seed[b], stream[b], position[b]). allowed: see `CertifiedHead.sample`.

    Certificate of a state: rows that were not scored have a key, score + temperature / scale * noise, of at most
    `max_unopened`, and the id drawn has one of at least `threshold`. With top_k, the keys are scores, and `threshold`
    is a lower bound of the k-th.
    """

    ids: I64
    logits: F64
    temperature: F64
    filter_temperature: F64
    top_k: I64
    top_p: F64
    min_p: F64
    seed: NDArray[np.uint64]
    stream: I64
    position: I64
    certificates: Certificates
    allowed: list[NDArray[np.uint32] | None] | None = None


@dataclass(frozen=True, eq=False)
class Within:
    """Every row of B states whose logit is within `margin` (B,) of the largest: lists of B arrays, largest first.

    Rows within rounding of the edge (10^-12 of the numbers there) may be among them.
    """

    ids: list[I64]
    logits: list[F64]
    margin: F64
    certificates: Certificates
    allowed: list[NDArray[np.uint32] | None] | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Logits of chosen ids: (B, n) each. The score before scale and cap is within `error` (B, n)."""

    ids: I64
    logits: F64
    error: F64


@dataclass(frozen=True, eq=False)
class ModelArgmax:
    """What argmax returns for the logits that a head computes in its own narrow arithmetic.

    ids (B,) int64; -1 where the bounds on that arithmetic do not decide. logits (B,) float64: exact, of those ids.
    """

    ids: I64
    logits: F64
    certificates: Certificates


@dataclass(frozen=True, eq=False)
class Softmax:
    """Softmax of B states on the rows that were scored: ids and probabilities are lists of B arrays, largest first.

    The probabilities add up to 1. tv_bound (B,) bounds the total variation distance from the softmax over all rows:
    half the sum of the absolute differences, which is the mass that the rows not scored have in it.
    """

    ids: list[I64]
    probabilities: list[F64]
    temperature: F64
    epsilon: F64
    tv_bound: F64
    certificates: Certificates
    allowed: list[NDArray[np.uint32] | None] | None = None


@dataclass(frozen=True, eq=False)
class LogPartition:
    """``log sum_i exp(logit_i / temperature)`` of B states: it lies in [low, high], (B,) each. asked (B,): the width
    that was asked for.
    """

    low: F64
    high: F64
    temperature: F64
    asked: F64
    certificates: Certificates
    allowed: list[NDArray[np.uint32] | None] | None = None

    @property
    def width(self) -> F64:
        return self.high - self.low


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Log-probabilities of chosen ids (B, n): each lies in [low, high], (B, n) each. asked (B,): the width that was
    asked for. top: whether the ids are the largest, in order.
    """

    ids: I64
    low: F64
    high: F64
    asked: F64
    certificates: Certificates
    top: bool = False


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
        for reason in filter(None, certificates.fallback):
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        self.rows_scored += int(certificates.rows_scored.sum())
        self.bytes_read += int(certificates.bytes_read.sum())
        self.bytes_dense += certificates.bytes_dense * len(certificates)
        self.seconds += seconds
        energy = certificates.energy
        total = float(energy.sum())
        if total != total:
            energy = energy[~np.isnan(energy)]
            total = float(energy.sum())
        self.energy += total
        self.energy_states += len(energy)

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
