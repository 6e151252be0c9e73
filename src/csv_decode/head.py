"""One decoding step: from hidden states to the exact top-k and its certificate."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import secrets
import sys
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import modes
from .bounds.planes import INTERLEAVE, PlaneStates
from .bounds.rounding import ABSOLUTE, INFLATE, RELATIVE, SMALLEST_STATE, below_float32, score_error
from .certificate import (
    Certificates,
    Draw,
    LogPartition,
    LogProbs,
    ModelArgmax,
    Scores,
    Softmax,
    Statistics,
    TopK,
    Within,
)
from .exact import rank
from .index import Index
from .index.structure import require_structure
from .kernels import Cascade, get_kernels, require_ieee
from .narrow import STEPS, Sums, narrow, rounded_argmax
from .scan import Scan, allowed_bits, exact_rows
from .spec import BLOCKS, Array, HeadSpec, as_states, column, flag, one_of, positive, require_usable, whole

__all__ = ["CertifiedHead"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

#: A head of fewer weights than this fits in cache, and the dense product is the fast way.
SMALL_HEAD = 1 << 18
_CLUSTERS_AT_ONCE = 16
#: Drift is told once, after this many states whose mean energy is so many times the calibration's. Text of other kinds
#: than the calibration has 1.2 to 1.8, a calibration on one kind of text only up to 3.5.
_DRIFT_STATES = 256
_DRIFT_ENERGY = 2.5


_heads: weakref.WeakSet[CertifiedHead] = weakref.WeakSet()


def _after_fork() -> None:
    """Another thread may have held a head's lock when the process forked; it does not exist in the child."""
    for head in _heads:
        head._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass
class _Step:
    """What is known of one state so far: rows scored exactly, a lower bound on the k-th best, and the largest upper
    bound over the rows dropped."""

    k: int
    h: F64
    parts: list[tuple[I64, F64, F64]] = field(default_factory=list)  # ids, scores and their errors
    best: F64 = field(default_factory=lambda: np.zeros(0))  # lower ends of the k best intervals, once there are k
    threshold: float = -np.inf
    max_unopened: float = -np.inf
    survivors: list[int] = field(default_factory=list)
    bytes_read: float = 0.0
    energy: float = np.nan
    fallback: str | None = None
    ranked: bool = False  # ids are the k best, in order
    rows_scored: int = 0
    guess: I64 | None = None

    def scored(self) -> tuple[I64, F64, F64]:
        """Ids, scores and errors of all rows scored."""
        if len(self.parts) > 1:
            self.parts = [tuple(np.concatenate(column) for column in zip(*self.parts, strict=True))]  # type: ignore
        return self.parts[0]

    def drop(self, upper: float) -> None:
        self.max_unopened = max(self.max_unopened, upper)


def _spare_leaders(k: int) -> int:
    """Rows scored beside the k best-looking ones of plane 0, whose order is rough."""
    return max(8, k)


def _ids_of(ids: Array, n_states: int, n_rows: int, name: str = "ids", lowest: int = 0) -> I64:
    array = np.asarray(ids)
    if array.ndim == 1 and len(array) == n_states:
        array = array[:, None]
    if array.ndim != 2 or len(array) != n_states or array.shape[1] == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} have shape {array.shape} and dtype {array.dtype}, expected whole numbers ({n_states},) or "
            f"({n_states}, n)"
        )
    if array.min() < lowest or array.max() >= n_rows:
        raise ValueError(f"{name} go from {array.min()} to {array.max()}, expected {lowest} to {n_rows - 1}")
    return np.array(array, np.int64, order="C")


class CertifiedHead:
    """An output layer that proves its answers.

    Args:
        index: from `build_index` or `load_index`; None: every step is dense (and still exact).
        spec: the `HeadSpec` (or bare weight) that the index was built for.
        threads: at most this many threads work in a step; None: all that the process may use.
        guarantee: "deterministic", or "probabilistic" with an index that was built so: each state's answer may be wrong
            with probability `failure_probability`, and N states of a run with N times that (docs/mathematics.md).
        failure_probability: of a step, in the probabilistic mode; at most 0.5.
        budget: share of the rows that a step may score exactly (the paper's K_max) before it falls back to the dense
            product. None: no limit. Sums (`softmax`, `log_partition`, `log_probs`) have no limit.
        kernels: "generic", "avx2", "avx512bw", "avx512" (VNNI) or "reference"; None: CSV_DECODE_SIMD, else the best
            that runs here.
        engine: "torch" or "llama_cpp", where that runs the layers in the thread that calls this head: its OpenMP
            workers, which spin for milliseconds after each layer, then do our work too. (Our own would share the cores
            with them.) None: threads of our own, which sleep between calls. `accelerate` and `LlamaModel` choose.

    Raises ValueError when index and weights do not belong together. `statistics` keeps running totals.

    >>> head = CertifiedHead(build_index(weight, states), weight)
    >>> top = head.top_k(hidden, k=10)
    >>> top.ids, top.certificates[0].margin
    """

    def __init__(
        self,
        index: Index | None,
        spec: HeadSpec | Array,
        threads: int | None = None,
        guarantee: str = "deterministic",
        budget: float | None = 0.25,
        kernels: str | None = None,
        failure_probability: float = 1e-9,
        engine: str | None = None,
    ) -> None:
        self.spec = HeadSpec.of(spec)
        guarantee = one_of("guarantee", guarantee, ("deterministic", "probabilistic"))
        failure_probability = positive("failure_probability", failure_probability, 0.5, sys.float_info.min)
        if index is None:
            guarantee = "deterministic"  # every step is dense
        elif not isinstance(index, Index):
            raise ValueError(f"index is {type(index).__name__}, expected an Index; load a file with load_index(path)")
        else:
            require_structure(index)
        built = "probabilistic" if index is not None and index.shadow and index.shadow.probabilistic else None
        if index is not None and (built or "deterministic") != guarantee:
            raise ValueError(
                f"guarantee is {guarantee!r}, but the index was built for {built or 'deterministic'!r} bounds; build "
                f"one with build_index(..., guarantee={guarantee!r})"
            )
        if budget is not None:
            budget = positive("budget", budget, 1)
        if index is None:
            self.spec.require_finite()
        else:
            index.check(self.spec)  # an index has only ever been built for finite weights
        self.index = index
        self.guarantee = guarantee
        self.failure_probability, self._sigma = 0.0, 0.0
        if index is not None and guarantee == "probabilistic":
            assert index.shadow is not None
            self.failure_probability = failure_probability
            pairs = self.spec.n_rows * len(index.shadow.planes)
            self._sigma = math.sqrt(2 * (math.log(pairs) - math.log(failure_probability))) * INFLATE
        self._share = budget
        self.budget = self.spec.n_rows if budget is None else int(budget * self.spec.n_rows)
        self.kernels = get_kernels(kernels, threads, engine)
        self.statistics = Statistics()
        self._lock = threading.Lock()
        self._drift_told = False
        _heads.add(self)
        self._planes: list[Any] = []
        self._small = self.spec.n_rows * self.spec.width < SMALL_HEAD
        self._cascade: Cascade | None = None
        if index is not None and index.shadow is not None:
            rows, bias = self.spec.valid_rows_only(), self.spec.bias32
            if bias is not None:
                bias = bias[: self.spec.n_rows]
            if index.centroid is None:
                self._cascade = self.kernels.cascade(index.shadow, rows, bias, self._sigma)
            if self._cascade is None or self.kernels.name == "reference":
                if bias is not None and index.row_ids is not None:
                    bias = np.ascontiguousarray(bias[index.row_ids])
                self._planes = [self.kernels.bind(plane, index.shadow.rho, bias) for plane in index.shadow.planes]

    def __repr__(self) -> str:
        return (
            f"CertifiedHead({self.index!r}, V={self.spec.n_rows}, d={self.spec.width}, kernels={self.kernels.name}, "
            f"threads={self.kernels.threads})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles make a new head, with statistics of its own."""
        return CertifiedHead, (
            self.index,
            self.spec,
            self.kernels.threads,
            self.guarantee,
            self._share,
            self.kernels.name,
            self.failure_probability or 1e-9,
            self.kernels.engine,
        )

    def top_k(
        self,
        hidden: Array,
        k: int = 1,
        ties: bool = False,
        allowed: Array | None = None,
        guess: Array | None = None,
    ) -> TopK:
        """The k largest logits of each state, exactly: larger logit first, then the smaller token id.

        Args:
            hidden: (B, d) or (d,), numpy or torch, float16, bfloat16, float32 or float64. The reference is the real
                value of ``<w_i, h> + b_i`` for these numbers and the stored weights.
            k: 1 to the number of valid rows.
            ties: also return every id whose logit equals the k-th exactly (then ids and logits are lists).
            allowed: the ids that may be returned: booleans (V,) or (B, V), or a bitmask of int32 words (V / 32,) or
                (B, V / 32), as grammar libraries use it. A state with fewer than k of them gets those, followed by ids
                of -1 with logits of -infinity (left out with `ties`).
            guess: (B, k), or (B,) where k is 1: ids that may well be the answer, such as the tokens of a draft; -1 in a
                state without. The answer does not depend on them. Scored first, they tell how little a row must promise
                to be left out, and then half of the state's bits are enough for most rows: with several states at
                once, right guesses save a fifth to a third of the time; one wrong in four uses up most of that
                (docs/tuning.md). Not used with `allowed`.

        Raises ValueError for k out of range, another width, an empty batch, NaN or infinity, and RuntimeError where the
        thread flushes subnormal numbers to zero or does not round to nearest: no certificate holds there.
        """
        require_ieee()
        started = time.perf_counter()
        k, ties = whole("k", k, 1, self.spec.n_rows), flag("ties", ties)
        if allowed is not None:
            top = self._allowed_top_k(self._scan_of(hidden, allowed), k, ties)
            self._note(top.certificates, time.perf_counter() - started)
            return top
        native = self._cascade if not self._small and self.kernels.name != "reference" else None
        h = as_states(hidden, self.spec.width, check=native is None)
        guesses = None if guess is None else _ids_of(guess, len(h), self.spec.n_rows, "guesses", -1)
        if guesses is not None and guesses.shape[1] != k:
            raise ValueError(f"there are {guesses.shape[1]} guesses for each state, expected {k}, as many as k")
        found = None
        if native is not None:
            found = native.top_k(h, k, _spare_leaders(k), self.budget, guess=guesses)
            if found is None:
                require_usable(h)
        if isinstance(found, tuple):
            top = self._from_columns(found, k, ties)
        else:
            top = self._from_steps(self._scan(h, k, found, guesses), k, ties)
        self._note(top.certificates, time.perf_counter() - started)
        return top

    def _from_columns(self, columns: tuple[Any, ...], k: int, ties: bool) -> TopK:
        """The answer where the native cascade has found and ordered the k best of every state, with none equal to the
        k-th beside them."""
        ids, value, error, *rest = columns
        certificates = self._native_certificates("top_k", *rest)
        logits = self.spec.finish(value)
        if ties:
            return TopK(list(ids), list(logits), k, error, certificates)
        return TopK(ids, logits, k, error, certificates)

    def _native_certificates(
        self,
        kind: str,
        threshold: F64,
        max_unopened: F64,
        rows_scored: I64,
        survivors: I64,
        bytes_read: I64,
        energy: F64,
    ) -> Certificates:
        return Certificates(
            kind=kind,
            certified=threshold > max_unopened,
            threshold=threshold,
            max_unopened=max_unopened,
            rows_scored=rows_scored,
            survivors=survivors,
            bytes_read=bytes_read,
            bytes_dense=self.spec.bytes_dense,
            fallback=[None] * len(threshold),
            energy=energy,
            guarantee=self.guarantee,
            failure_probability=self.failure_probability,
        )

    def _from_steps(self, steps: list[_Step], k: int, ties: bool) -> TopK:
        ids, logits, errors = [], [], np.zeros(len(steps))
        for b, step in enumerate(steps):
            found, value, error = step.scored()
            if not step.ranked:
                order = rank(found, value, error, k, step.h, self.spec.rows.float32, self.spec.bias32)
                if not ties:
                    order = order[:k]
                found, value, error = found[order], value[order], error[order]
            ids.append(found)
            logits.append(self.spec.finish(value))
            errors[b] = error.max()
        certificates = self._certificates(steps)
        if ties:
            return TopK(ids, logits, k, errors, certificates)
        return TopK(np.stack(ids), np.stack(logits), k, errors, certificates)

    def _scan_of(self, hidden: Array, allowed: Array | None) -> Scan:
        """A scan of the states, for every mode but plain top-k."""
        return self._scan_states(as_states(hidden, self.spec.width), allowed)

    def _scan_states(self, h: F64, allowed: Array | None, race: Any = None) -> Scan:
        require_ieee()
        ledger, why = None, None
        if self._small:
            why = "small head"
        elif self._cascade is not None:
            ledger = self._cascade.ledger
        elif self.index is not None:
            why = "centroid bound"
        bits = allowed_bits(allowed, len(h), self.spec.n_rows)
        shadow = None if self.index is None else self.index.shadow
        return Scan(self.spec, self.kernels, ledger, h, self.budget, bits, why, shadow, race)

    def _allowed_top_k(self, scan: Scan, k: int, ties: bool) -> TopK:
        n = len(scan)
        bars = modes.top(scan, range(n), np.full(n, k))
        ids = np.full((n, k), -1, np.int64)
        logits = np.full((n, k), -np.inf)
        errors, ragged = np.zeros(n), []
        for b in range(n):
            found, value, error = scan.scored(b)
            order = rank(found, value, error, min(k, len(found)), scan.h[b], self.spec.rows.float32, self.spec.bias32)
            ragged.append((found[order], self.spec.finish(value[order])))
            errors[b] = error[order].max()
            if bars[b] == -np.inf:  # fewer than k are allowed, and all of them are scored
                bars[b] = (value - error).min()
            order = order[:k]
            ids[b, : len(order)], logits[b, : len(order)] = found[order], self.spec.finish(value[order])
        left = np.array([scan.unopened(b) for b in range(n)])
        certificates = scan.certificates("top_k", bars, left, (bars > left) | (left == -np.inf), self)
        if ties:
            return TopK([r[0] for r in ragged], [r[1] for r in ragged], k, errors, certificates, scan.allowed)
        return TopK(ids, logits, k, errors, certificates, scan.allowed)

    def sample(
        self,
        hidden: Array,
        temperature: Any = 1.0,
        top_k: Any = 0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        seed: Any = None,
        position: Any = 0,
        stream: Any = 0,
        allowed: Array | None = None,
        filter_temperature: Any = None,
    ) -> Draw:
        """One draw for each state from the softmax over the whole vocabulary, exactly.

        The token is ``argmax_i (logit_i + T g_i)`` in exact arithmetic, with Gumbel noise g_i that is a fixed function
        of (seed, stream, position, token id): see `csv_decode.noise`. The same numbers draw the same token on every
        machine, whatever the batch, the index or the kernels.

        Args:
            hidden: (B, d) or (d,), as for `top_k`.
            temperature: T, positive. For argmax itself there is `top_k`.
            top_k: keep the k largest logits and those equal to the k-th; 0: all. top_p: of these, keep each id
                unless those before it (larger logit, then smaller id) already have this share of the mass; 1: all.
                min_p: of these, keep those with at least this share of the largest probability; 0: all. In this order,
                which is that of transformers; the draw is from the softmax over what is left.
            seed: 0 to 2^64 - 1; None: a fresh one from the operating system, returned with the draw.
            position: of the token in its text, 0 to 2^32 - 1. Never draw twice at one position of one stream: the noise
                would be the same.
            stream: 0 to 2^32 - 1, for independent draws at one position. A number s gives state b stream s + b.
            allowed: as for `top_k`.
            filter_temperature: of the probabilities that top-p and min-p look at; None: temperature, as transformers
                has it. 1 is the order of llama.cpp, where the temperature comes last.

        All parameters but `hidden` and `allowed` are numbers for the batch, or arrays (B,).
        Raises ValueError as `top_k` does and for parameters out of range.
        """
        started = time.perf_counter()
        if self.spec.softcap is not None:
            raise ValueError("sample does not know a soft cap: draw from top_k, whose logits have it")
        require_ieee()
        h = as_states(hidden, self.spec.width)
        n = len(h)
        low = np.finfo(np.float32).smallest_normal
        t = column("temperature", temperature, n, np.float64, float(low), 1e30)
        filters = t if filter_temperature is None else filter_temperature
        filters = column("filter_temperature", filters, n, np.float64, float(low), 1e30)
        ks = np.minimum(column("top_k", top_k, n, np.int64, 0, 2**62), self.spec.n_rows)
        tops = column("top_p", top_p, n, np.float64, 1e-12, 1.0)
        mins = column("min_p", min_p, n, np.float64, 0.0, 1.0)
        if seed is None:
            seed = secrets.randbits(64)
        seeds = column("seed", seed, n, np.uint64, 0, 2**64 - 1)
        positions = column("position", position, n, np.int64, 0, 2**32 - 1)
        streams = column("stream", stream, n, np.int64, 0, 2**32 - 1)
        if np.ndim(stream) == 0:
            streams = streams + np.arange(n)
            if streams[-1] >= 2**32:
                raise ValueError(f"stream is {stream!r}, and state b takes stream + b, which must stay below 2^32")
        hottest = float(np.maximum(t, filters).max()) / self.spec.scale
        if not hottest < 1e31:
            raise ValueError(f"temperature over scale is {hottest:g}, expected less than 1e31")
        parameters = (t, filters, ks, tops, mins, seeds, streams, positions)
        race = (
            seeds,
            streams,
            positions,
            np.where(ks > 0, 0.0, t / self.spec.scale),
        )  # top-k needs no noise of all rows
        if allowed is None and not ks.any() and (tops >= 1).all() and (mins <= 0).all():
            found = self._race(h, race)
            if found is not None:
                (winners, scores, _), certificates = found
                self._note(certificates, time.perf_counter() - started)
                return Draw(winners[:, 0], self.spec.finish(scores[:, 0]), *parameters, certificates)
        scan = self._scan_states(h, allowed, race)
        noise = [
            modes.Noise(
                float(t[b]), self.spec.scale, int(seeds[b]), int(streams[b]), int(positions[b]), float(filters[b])
            )
            for b in range(n)
        ]
        at, threshold, left = modes.draw(scan, noise, ks, tops, mins, modes.min_p_logs(mins))
        ids = np.array([scan.scored(b)[0][at[b]] for b in range(n)])
        value = np.array([scan.scored(b)[1][at[b]] for b in range(n)])
        certificates = scan.certificates("sample", threshold, left, (threshold > left) | (left == -np.inf), self)
        self._note(certificates, time.perf_counter() - started)
        return Draw(ids, self.spec.finish(value), *parameters, certificates, scan.allowed)

    def _race(self, h: F64, race: tuple[Any, ...]) -> tuple[tuple[Any, ...], Certificates] | None:
        """Races of all states without filters in one call of the kernels; None where that does not decide one."""
        if self._cascade is None or self._small or self.kernels.name == "reference":
            return None
        found = self._cascade.top_k(h, 1, _spare_leaders(1), self.budget, race)
        if not isinstance(found, tuple):
            return None
        ids, value, error, *rest = found
        return (ids, value, error), self._native_certificates("sample", *rest)

    def _partition(
        self, scan: Scan, kind: str, t: F64, goal: F64, both: bool = True
    ) -> tuple[list[modes.Mass], Certificates]:
        masses = modes.partition(scan, t, goal, both)
        n = len(scan)
        left = np.array([scan.unopened(b) for b in range(n)])
        threshold = np.array([float((mass.value - mass.spread).max()) for mass in masses])
        reached = np.array([mass.reached(float(goal[b]), both) for b, mass in enumerate(masses)])
        return masses, scan.certificates(kind, threshold, left, reached, self)

    def softmax(
        self, hidden: Array, epsilon: Any = 0.05, temperature: Any = 1.0, allowed: Array | None = None
    ) -> Softmax:
        """The softmax, from as few rows as prove it to be within `epsilon` of the true one in total variation.

        With the scored rows S and M at least the sum of exp(logit / T) over all others, the distance is at most
        M / (Z_S + M): see `certificate.Softmax`. epsilon: in (0, 1), a number or (B,).
        """
        started = time.perf_counter()
        self._no_softcap("softmax")
        scan = self._scan_of(hidden, allowed)
        n = len(scan)
        t = column("temperature", temperature, n, np.float64, 1e-4, 1e4)
        eps = column("epsilon", epsilon, n, np.float64, 1e-9, 1.0)
        masses, certificates = self._partition(scan, "softmax", t, eps / (1 - np.minimum(eps, 1 - 1e-9)), both=False)
        ids, probabilities, bound = [], [], np.zeros(n)
        for b, mass in enumerate(masses):
            order = np.lexsort((mass.ids, -mass.value))
            weights = mass.weights[order]
            ids.append(mass.ids[order])
            probabilities.append(weights / weights.sum())
            # the weights' own rounding moves the distribution too
            missing = mass.rest / (mass.low + mass.rest) if mass.rest > 0 else 0.0
            bound[b] = min(1.0, missing * (1 + 2.0**-40) + 2 * mass.error)
        certificates = dataclasses.replace(
            certificates, tv_bound=bound, certified=certificates.certified & (bound <= eps)
        )
        self._note(certificates, time.perf_counter() - started)
        return Softmax(ids, probabilities, t, eps, bound, certificates, scan.allowed)

    def log_partition(
        self, hidden: Array, width: Any = 1e-3, temperature: Any = 1.0, allowed: Array | None = None
    ) -> LogPartition:
        """``log sum_i exp(logit_i / T)``: an interval that contains it, at most `width` wide.

        width: at least 1e-9, a number or (B,).
        """
        started = time.perf_counter()
        self._no_softcap("log_partition")
        scan = self._scan_of(hidden, allowed)
        n = len(scan)
        t = column("temperature", temperature, n, np.float64, 1e-4, 1e4)
        widths = column("width", width, n, np.float64, 1e-9, 100.0)
        masses, certificates = self._partition(scan, "log_partition", t, np.expm1(widths * 0.99))
        low, high = np.array([modes.log_interval(mass) for mass in masses]).T
        certificates = dataclasses.replace(certificates, certified=certificates.certified & (high - low <= widths))
        self._note(certificates, time.perf_counter() - started)
        return LogPartition(low, high, t, widths, certificates, scan.allowed)

    def log_probs(self, hidden: Array, ids: Array, width: Any = 1e-3) -> LogProbs:
        """Log-probabilities of chosen ids, (B,) or (B, n): intervals at most `width` wide that contain them.

        `top_log_probs` takes the ids of the largest. The mean over a text, with its sign turned, is the log of its
        perplexity: see `csv_decode.perplexity`.
        """
        started = time.perf_counter()
        self._no_softcap("log_probs")
        scan = self._scan_of(hidden, None)
        return self._log_probs(scan, _ids_of(ids, len(scan), self.spec.n_rows), width, started)

    def top_log_probs(self, hidden: Array, k: int = 1, width: Any = 1e-3) -> LogProbs:
        """The k largest log-probabilities, in the exact order of `top_k`: for beams, which want 2k, and for servers."""
        started = time.perf_counter()
        self._no_softcap("top_log_probs")
        k = whole("k", k, 1, self.spec.n_rows)
        scan = self._scan_of(hidden, None)
        top = self._allowed_top_k(scan, k, ties=False)
        return self._log_probs(scan, np.asarray(top.ids), width, started, top=True)

    def _log_probs(self, scan: Scan, ids: I64, width: Any, started: float, top: bool = False) -> LogProbs:
        n = len(scan)
        widths = column("width", width, n, np.float64, 1e-9, 100.0)
        for b in range(n):
            scan.score(b, np.unique(ids[b]))
        masses, certificates = self._partition(scan, "log_probs", np.ones(n), np.expm1(widths * 0.99))
        low, high = np.empty(ids.shape), np.empty(ids.shape)
        for b, mass in enumerate(masses):
            z = modes.log_interval(mass)
            order = np.argsort(mass.ids, kind="stable")
            at = order[np.searchsorted(mass.ids, ids[b], sorter=order)]
            logit = mass.value[at] * self.spec.scale
            error = (mass.spread[at] + 2.0**-50 * np.abs(mass.value[at])) * self.spec.scale * (1 + 2.0**-50)
            slack = error + 2.0**-50 * (np.abs(logit) + abs(z[0]) + abs(z[1]))
            low[b], high[b] = logit - z[1] - slack, logit - z[0] + slack
        certified = certificates.certified & ((high - low).max(axis=1) <= widths)
        certificates = dataclasses.replace(certificates, certified=certified)
        self._note(certificates, time.perf_counter() - started)
        return LogProbs(ids, low, high, widths, certificates, top)

    def within(self, hidden: Array, margin: Any, allowed: Array | None = None) -> Within:
        """Every id whose logit is at least the largest less `margin`: what min-p keeps, with -T log(min_p).

        margin: in logits, positive, a number or (B,).
        """
        started = time.perf_counter()
        self._no_softcap("within")
        scan = self._scan_of(hidden, allowed)
        n = len(scan)
        margins = column("margin", margin, n, np.float64, 0.0, 1e30)
        bars = modes.top(scan, range(n), np.ones(n, np.int64))
        bars = bars - margins / self.spec.scale * (1 + 2.0**-40)
        bars -= RELATIVE * np.abs(bars)
        scan.open(bars)
        ids, logits, left = [], [], np.zeros(n)
        for b in range(n):
            found, value, error = scan.scored(b)
            keep = np.nonzero(value + error >= bars[b])[0]
            keep = modes.near_largest(scan, b, keep, float(margins[b]) / self.spec.scale)
            keep = keep[np.lexsort((found[keep], -value[keep]))]
            ids.append(found[keep])
            logits.append(self.spec.finish(value[keep]))
            left[b] = scan.unopened(b)
        certificates = scan.certificates("within", bars, left, (bars > left) | (left == -np.inf), self)
        self._note(certificates, time.perf_counter() - started)
        return Within(ids, logits, margins, certificates, scan.allowed)

    def scores(self, hidden: Array, ids: Array) -> Scores:
        """Exact logits of chosen ids, (B,) or (B, n), or (1, n) for the same ones in every state."""
        require_ieee()
        h = as_states(hidden, self.spec.width)
        same = np.ndim(ids) == 2 and len(ids) == 1
        wanted = _ids_of(ids, 1 if same else len(h), self.spec.n_rows)
        if same:
            value, error = exact_rows(self.spec, self.kernels, h, wanted[0])
            wanted = np.repeat(wanted, len(h), axis=0)
        else:
            each = [exact_rows(self.spec, self.kernels, h[b : b + 1], wanted[b]) for b in range(len(h))]
            value, error = (np.concatenate(column) for column in zip(*each, strict=True))
        return Scores(wanted, self.spec.finish(value), error)

    def model_argmax(self, hidden: Array) -> ModelArgmax:
        """The id that argmax gives for the logits as a head of the weights' own type computes them, without bias, scale
        or cap: products summed in float32, in any order, then rounded to the type. Of equal logits the smallest id.

        docs/mathematics.md, section 11, has the bound on that arithmetic. Where it does not decide, the id is -1.
        """
        started = time.perf_counter()
        if self.spec.bias32 is not None or self.spec.scale != 1.0 or self.spec.softcap is not None:
            raise ValueError("model_argmax is about a head without bias, scale and soft cap")
        if self.spec.rows.kind in BLOCKS:
            raise ValueError(f"model_argmax does not know the arithmetic of {self.spec.rows.kind} weights; use top_k")
        require_ieee()
        h = as_states(hidden, self.spec.width)
        if not (narrow(h.astype(np.float32), self.spec.rows.kind) == h).all():
            raise ValueError(f"the states are no {self.spec.rows.kind} numbers, which the head is about")
        found = self._native_rounded(h)
        if found is None:
            scan = self._scan_states(h, None)
            ids, value, threshold, left = rounded_argmax(scan, self.largest_norm)
            certificates = scan.certificates("model_argmax", threshold, left, ids >= 0, self)
        else:
            ids, value, certificates = found
        self._note(certificates, time.perf_counter() - started)
        return ModelArgmax(ids, value, certificates)

    def _native_rounded(self, h: F64) -> tuple[I64, F64, Certificates] | None:
        """`rounded_argmax` from one call of the kernels; None where that leaves a state open."""
        if self._cascade is None or self._small or self.kernels.name == "reference":
            return None
        sums = [Sums(self.spec, x, self.largest_norm) for x in h]
        near = STEPS[self.spec.rows.kind], np.array([4 * one.reach for one in sums])
        won = []
        steps = self._cascade.top_k(h, 1, _spare_leaders(1), self.budget, margin=near)
        for one, step in zip(sums, steps, strict=True):
            ids, value, error, _, _, _, left, _, _, _, vanishing, finite, within_budget = step
            if vanishing or not finite or not within_budget:
                return None
            won.append(one.winner((ids, value, error), left))
            if won[-1][0] < 0:
                return None
        ids, value, threshold = (np.array(column) for column in zip(*won, strict=True))
        rest = [np.array([step[i] for step in steps]) for i in (6, 4, 8, 9, 7)]
        return ids, value, self._native_certificates("model_argmax", threshold, *rest)

    @functools.cached_property
    def largest_norm(self) -> float:
        """At least the norm of every row of the weights."""
        largest = 0.0
        for first in range(0, self.spec.n_rows, 8192):
            rows = self.spec.rows.float32(slice(first, min(first + 8192, self.spec.n_rows))).astype(np.float64)
            largest = max(largest, float(np.sqrt(np.einsum("ij,ij->i", rows, rows)).max()))
        return largest * INFLATE + ABSOLUTE

    def _no_softcap(self, mode: str) -> None:
        if self.spec.softcap is not None:
            raise ValueError(f"{mode} does not know a soft cap")

    def _note(self, certificates: Certificates, seconds: float) -> None:
        """Adds a call to the statistics, and tells once when calibration does not fit."""
        with self._lock:
            self.statistics.add(certificates, seconds)
            drifted = self.statistics.energy_states >= _DRIFT_STATES and self.statistics.mean_energy > _DRIFT_ENERGY
            drifted, self._drift_told = drifted and not self._drift_told, self._drift_told or drifted
        if drifted:
            warnings.warn(
                "the calibration of this index does not fit the states being served (their mean energy is "
                f"{self.statistics.mean_energy:.1f} times the calibration's); answers stay exact, but each step reads "
                "more than it need; calibrate on such text with: csv-decode build MODEL --calibration TEXTFILE",
                stacklevel=3,
            )

    # The scan: which rows have to be scored, and what bounds the others.

    def _scan(self, h: F64, k: int, native: list[Any] | None = None, guesses: I64 | None = None) -> list[_Step]:
        """What is known of each state in the end; `native` is what the cascade of the kernels found, where it ran."""
        steps = [_Step(k, h[b]) for b in range(len(h))]
        for step, ids in zip(steps, () if guesses is None else guesses, strict=False):
            if ids.min() >= 0 and len(np.unique(ids)) == k:
                step.guess = np.sort(ids)
        if native is not None:
            for step, found in zip(steps, native, strict=True):
                self._take(step, found)
            self._dense([step for step in steps if step.fallback], None)
            return steps
        index = self.index
        if index is None or self._small:
            self._dense(steps, "no index" if index is None else "small head")
            return steps
        live = []
        for step in steps:
            if np.abs(step.h).max() < SMALLEST_STATE:
                step.fallback = "vanishing state"
            else:
                live.append(step)
        if live:
            if index.shadow is None:
                self._centroids(live)
            else:
                self._shadow(live)
        self._dense([step for step in steps if step.fallback], None)
        return steps

    def _score(self, step: _Step, ids: I64, fresh: bool = False) -> None:
        """Scores rows exactly (float64 with a proved error) and raises the threshold. fresh: none was scored before."""
        if step.parts and not fresh:
            ids = ids[~np.isin(ids, step.scored()[0])]
        if len(ids):
            value, magnitude = self.kernels.score(self.spec.rows, step.h[None], ids)
            self._add(step, ids, value[0], magnitude[0])
            step.bytes_read += len(ids) * self.spec.rows.row_bytes

    def _add(self, step: _Step, ids: I64, value: F64, magnitude: F64) -> None:
        error = score_error(self.spec.width, magnitude) if step.h.any() else np.zeros(len(ids))
        if self.spec.bias32 is not None:
            value = value + self.spec.bias32[ids]
            error = error + RELATIVE * np.abs(value)
        step.parts.append((ids, value, error))
        step.rows_scored += len(ids)
        step.best = np.concatenate([step.best, value - error])
        if len(step.best) >= step.k:
            step.best = np.partition(step.best, len(step.best) - step.k)[len(step.best) - step.k :]
            step.threshold = float(step.best[0])

    def _dense(self, steps: list[_Step], reason: str | None) -> None:
        """Scores every row for these states, in one pass over the weights."""
        if not steps:
            return
        n = self.spec.n_rows
        rows = self.spec.valid_rows_only()
        value, magnitude = self.kernels.score(rows, np.stack([step.h for step in steps]))
        for b, step in enumerate(steps):
            step.parts, step.best, step.rows_scored = [], np.zeros(0), 0
            step.fallback = reason or step.fallback
            step.ranked = False
            step.max_unopened = -np.inf
            step.bytes_read += n * rows.row_bytes / len(steps)
            self._add(step, np.arange(n), value[b], magnitude[b])

    def _token_ids(self, rows: I64) -> I64:
        row_ids = None if self.index is None else self.index.row_ids
        return rows if row_ids is None else row_ids[rows]

    def _centroids(self, steps: list[_Step]) -> None:
        """The paper's search: clusters leave a priority queue by upper bound, largest first, until the k-th best score
        found beats the bound of the next one, or the budget is spent. (The bounds of a state are fixed, so one sort is
        the queue.)"""
        assert self.index is not None
        bound = self.index.centroid
        assert bound is not None
        for step in steps:
            upper = bound.upper(self.kernels, step.h[None])[0]
            upper = np.where(np.isnan(upper), np.inf, upper)
            step.bytes_read += bound.nbytes
            queue = np.argsort(-upper, kind="stable")
            opened = 0
            for at in range(0, len(queue), _CLUSTERS_AT_ONCE):
                some = queue[at : at + _CLUSTERS_AT_ONCE]
                some = some[~(upper[some] < step.threshold) & (upper[some] > -np.inf)]
                if not len(some):
                    step.drop(float(upper[queue[at]]))
                    break
                rows = np.concatenate([np.arange(bound.offsets[c], bound.offsets[c + 1]) for c in some])
                opened += len(rows)
                if opened > self.budget:
                    step.fallback = "budget"
                    break
                self._score(step, self._token_ids(rows), fresh=True)
                if len(some) < _CLUSTERS_AT_ONCE and at + len(some) < len(queue):
                    step.drop(float(upper[queue[at + len(some)]]))
                    break
            step.survivors = [opened]

    @staticmethod
    def _take(step: _Step, found: tuple[Any, ...]) -> None:
        """`_shadow` in one call of the kernels has done this state."""
        (
            *scored,
            step.ranked,
            step.rows_scored,
            step.threshold,
            step.max_unopened,
            step.energy,
            step.survivors,
            step.bytes_read,
            vanishing,
            finite,
            within_budget,
        ) = found
        step.parts = [(scored[0], scored[1], scored[2])]
        if vanishing:
            step.fallback, step.energy = "vanishing state", np.nan
        elif not finite:
            step.fallback = "overflow"
        elif not within_budget:
            step.fallback = "budget"

    def _shadow(self, steps: list[_Step]) -> None:
        assert self.index is not None
        shadow = self.index.shadow
        assert shadow is not None
        h = np.stack([step.h for step in steps])
        states, energy = shadow.prepare(self.kernels, h, self._sigma)
        has_bias = self.spec.bias32 is not None
        row_bytes = [shadow.row_bytes(i, has_bias) for i in range(len(shadow.planes))]
        if self.index.centroid is None:
            centre, upper = self.kernels.screen(self._planes[0], states[0], None)
        every = np.arange(len(shadow.rho))
        for b, step in enumerate(steps):
            step.energy = float(energy[b])
            if not all(np.isfinite(s.params[b]).all() for s in states):
                step.fallback = "overflow"
                continue
            step.bytes_read += shadow.state_bytes / len(steps)
            if self.index.centroid is None:
                step.bytes_read += row_bytes[0] * len(shadow.rho) / len(steps)
                if step.guess is None:
                    self._descend(step, b, states, every, centre[b], upper[b], row_bytes)
                    continue
                self._score(step, step.guess)
                bar = np.array([below_float32(step.threshold)], np.float32)
                rows, some, most, dropped = self.kernels.sift(self._planes[0], states[0].one(b), bar)[0]
                step.drop(dropped)
                self._descend(step, b, states, rows, some, most, row_bytes)
            else:
                open_blocks = self._open_blocks(step)
                one = self.kernels.screen(self._planes[0], states[0].one(b), open_blocks)
                step.bytes_read += row_bytes[0] * INTERLEAVE * int(open_blocks.sum())
                self._descend(step, b, states, every, one[0][0], one[1][0], row_bytes)

    def _open_blocks(self, step: _Step) -> NDArray[np.uint8]:
        """The centroid bound as a first stage: scores the best clusters for a threshold, then closes every block of 16
        index rows whose clusters all lie below it."""
        assert self.index is not None
        bound = self.index.centroid
        assert bound is not None
        upper = bound.upper(self.kernels, step.h[None])[0]
        step.bytes_read += bound.nbytes
        for c in np.argsort(-upper, kind="stable"):
            self._score(step, self._token_ids(np.arange(bound.offsets[c], bound.offsets[c + 1])))
            if step.threshold > -np.inf:
                break
        is_open = ~(upper < step.threshold)
        step.drop(float(np.max(upper[~is_open], initial=-np.inf)))
        n = int(bound.offsets[-1])
        open_rows = np.pad(np.repeat(is_open, np.diff(bound.offsets)), (0, -n % INTERLEAVE))
        return np.asarray(open_rows.reshape(-1, INTERLEAVE).any(axis=1), np.uint8)

    def _descend(
        self, step: _Step, b: int, states: list[PlaneStates], rows: I64, centre: F32, upper: F32, row_bytes: list[int]
    ) -> None:
        """From what plane 0 says of rows to exact scores. The best-looking rows are scored for a threshold, and each
        plane drops the rows whose upper bound lies below it; before the last scores, the best-looking rows of the last
        plane raise it. Equality stays, so that ties are never lost."""
        kernels = self.kernels
        self._score(step, self._token_ids(rows[kernels.leaders(centre, step.k + _spare_leaders(step.k))]))

        def select() -> I64:
            keep, dropped = kernels.select(upper, float(below_float32(step.threshold)))
            step.drop(dropped)
            return keep

        keep = select()
        rows, centre, upper = rows[keep], centre[keep], upper[keep]
        step.survivors = [len(rows)]
        for plane, state, size in zip(self._planes[1:], states[1:], row_bytes[1:], strict=True):
            step.bytes_read += len(rows) * size
            centre, upper = kernels.refine(plane, state.one(b), rows, centre)
            keep = select()
            rows, centre, upper = rows[keep], centre[keep], upper[keep]
            step.survivors.append(len(rows))
        self._score(step, self._token_ids(rows[kernels.leaders(centre, step.k)]))
        rows = rows[select()]
        step.survivors[-1] = len(rows)
        if len(rows) > self.budget:
            step.fallback = "budget"
        else:
            self._score(step, self._token_ids(rows))

    def _certificates(self, steps: list[_Step]) -> Certificates:
        stages = max(len(step.survivors) for step in steps)
        survivors = np.zeros((len(steps), stages), np.int64)
        for b, step in enumerate(steps):
            survivors[b, : len(step.survivors)] = step.survivors
        threshold = np.array([step.threshold for step in steps])
        max_unopened = np.array([step.max_unopened for step in steps])
        return Certificates(
            kind="top_k",
            certified=threshold > max_unopened,
            threshold=threshold,
            max_unopened=max_unopened,
            rows_scored=np.array([step.rows_scored for step in steps]),
            survivors=survivors,
            bytes_read=np.array([round(step.bytes_read) for step in steps]),
            bytes_dense=self.spec.bytes_dense,
            fallback=[step.fallback for step in steps],
            energy=np.array([step.energy for step in steps]),
            guarantee=self.guarantee,
            failure_probability=self.failure_probability,
        )
