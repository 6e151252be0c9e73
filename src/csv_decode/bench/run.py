"""The measurement: every method answers the same states in turn, and every answer is compared with the exact one.

For each state (or batch) all methods run once, in a new random order, each after the last cache was swept with other
memory (`machine.Sweeper`). So every method finds its data in memory, as it does behind the layers of a model; timed one
after the other without that, a small head would be read from the cache and look several times as fast as it is. A call
counts whole, from the array of states to the array of ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..certificate import Certificates
from ..head import CertifiedHead
from ..index import Index
from ..index.build import build_index
from ..spec import HeadSpec
from ..verify import verify
from .machine import Sweeper, threads_text
from .peers import Peer, build_peers, set_threads

__all__ = [
    "CENTROID",
    "LINE",
    "OURS",
    "PROBABILISTIC",
    "Method",
    "bytes_by_stage",
    "exact_ids",
    "lines_by_stage",
    "measure",
    "run",
    "spread",
    "sweep_rows",
]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Report = Callable[[str, int, int], None]

#: Bytes that memory moves at once.
LINE = 64
OURS = "csv-decode"
CENTROID = "csv-decode, centroid bound"
PROBABILISTIC = "csv-decode, probabilistic"
#: Peers of the sweep over V: the ones whose time is the memory's.
_SWEEP_PEERS = ("torch float32", "torch bfloat16", "torch int8, weight only", "torch int8, dynamic")
_SMALLEST_CUT = 1 << 15
_BATCH = 16  # of the reference
_VERIFIED = 16  # states of the reference that the independent checker sees
_FEW = 10  # the centroid bound gets every tenth state: it opens nearly everything


@dataclass(frozen=True)
class Method:
    """One way to find the k best of states (B, d). Exactly one of head and peer is there.

    only_first: run on the first so many batches only, for slow methods.
    """

    name: str
    head: CertifiedHead | None = None
    peer: Peer | None = None
    only_first: int | None = None

    def __call__(self, h: F32, k: int) -> tuple[I64, Certificates | None]:
        if self.head is None:
            assert self.peer is not None
            return self.peer.call(h, k), None
        top = self.head.top_k(h, k)
        assert isinstance(top.ids, np.ndarray)
        return top.ids, top.certificates


@dataclass
class _Record:
    seconds: list[float] = field(default_factory=list)
    states: int = 0
    first_differs: int = 0
    set_differs: int = 0
    order_differs: int = 0
    certificates: list[Certificates] = field(default_factory=list)

    def compare(self, got: I64, want: I64) -> None:
        self.states += len(got)
        self.first_differs += int((got[:, 0] != want[:, 0]).sum())
        self.set_differs += int((np.sort(got, 1) != np.sort(want, 1)).any(1).sum())
        self.order_differs += int((got != want).any(1).sum())


def spread(values: Any) -> dict[str, float]:
    """Mean and quantiles."""
    x = np.asarray(values, float)
    return {"mean": float(x.mean()), **{f"p{q}": float(np.quantile(x, q / 100)) for q in (50, 90, 99)}}


def exact_ids(spec: HeadSpec, states: F32, k: int, progress: Callable[[int, int], None] | None = None) -> I64:
    """The exact k best of every state, in order: every row scored, and some answers proved by the independent checker.
    Their first j are the j best."""
    dense = CertifiedHead(None, spec)
    checked = set(np.linspace(0, len(states) - 1, min(_VERIFIED, len(states))).astype(int).tolist())
    ids: list[I64] = []
    for first in range(0, len(states), _BATCH):
        batch = states[first : first + _BATCH]
        top = dense.top_k(batch, k)
        assert isinstance(top.ids, np.ndarray)
        ids.append(top.ids)
        for at in checked & set(range(first, first + len(batch))):
            verify(dense.top_k(states[at], k), states[at], spec)
        if progress:
            progress(first + len(batch), len(states))
    return np.concatenate(ids)


def measure(
    methods: Sequence[Method],
    states: F32,
    want: I64,
    batch: int = 1,
    sweep: Callable[[], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Figures of each method, the first of which is what the others are compared with.

    Args:
        methods: each sees the same batches; the order of the methods is drawn anew for every batch.
        states: (N, d). want: (N, k), the exact ids.
        batch: states in a call; a rest that fills no batch is left out unless it is all there is.
        sweep: called before each call, to make it cold.
    """
    k, rng = want.shape[1], np.random.default_rng(seed)
    batch = min(batch, len(states))
    starts = range(0, len(states) - batch + 1, batch)
    records = [_Record() for _ in methods]
    for method in methods:
        method(states[:batch], k)  # first calls allocate
    for turn, first in enumerate(starts):
        h, right = states[first : first + batch], want[first : first + batch]
        for m in rng.permutation(len(methods)):
            method, record = methods[m], records[m]
            if method.only_first is not None and turn >= method.only_first:
                continue
            if sweep:
                sweep()
            started = time.perf_counter()
            ids, certificates = method(h, k)
            record.seconds.append(time.perf_counter() - started)
            record.compare(ids, right)
            if certificates is not None:
                record.certificates.append(certificates)
        if progress:
            progress(turn + 1, len(starts))
    base = float(np.mean(records[0].seconds))
    return [
        _figures(method, record, base, k, batch) for method, record in zip(methods, records, strict=True)
    ]  # fmt: skip


def _figures(method: Method, record: _Record, base: float, k: int, batch: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "method": method.name,
        "ours": method.head is not None,
        "exact": method.head is not None and method.head.guarantee == "deterministic",
        "k": k,
        "batch": batch,
        "calls": len(record.seconds),
        "states": record.states,
        "ms": spread(np.array(record.seconds) * 1e3),
        "times_ours": float(np.mean(record.seconds)) / base,
        "argmax_differs": record.first_differs,
        "set_differs": record.set_differs,
    }
    if method.head is not None:
        out["wrong"] = record.order_differs
        out |= _certified_figures(method.head, record.certificates)
    else:
        assert method.peer is not None
        out["weight_bytes"] = method.peer.weight_bytes
    return out


def _certified_figures(head: CertifiedHead, certificates: list[Certificates]) -> dict[str, Any]:
    """What the certificates of some calls say together: bytes (as a share of a bfloat16 head), survivors, fallbacks."""
    dense = head.spec.bytes_dense
    stages: dict[str, float] = {}
    lines: dict[str, float] = {}
    line_totals: list[F64] = []
    for part in certificates:
        for name, read in bytes_by_stage(head, part).items():
            stages[name] = stages.get(name, 0.0) + float(read.sum())
        touched = lines_by_stage(head, part)
        for name, read in touched.items():
            lines[name] = lines.get(name, 0.0) + float(read.sum())
        if touched:
            line_totals.append(sum(touched.values(), np.zeros(len(part))))
    states = sum(map(len, certificates))
    depth = max(part.survivors.shape[1] for part in certificates)
    survivors = np.zeros((states, depth), np.int64)
    at = 0
    for part in certificates:
        survivors[at : at + len(part), : part.survivors.shape[1]] = part.survivors
        at += len(part)
    reasons = [reason for part in certificates for reason in part.fallback if reason is not None]
    energy = np.concatenate([part.energy for part in certificates])
    energy = energy[~np.isnan(energy)]
    return {
        "guarantee": certificates[0].guarantee,
        "failure_probability": certificates[0].failure_probability,
        "bytes": spread(np.concatenate([part.bytes_read for part in certificates]) / dense),
        "bytes_by_stage": {name: total / states / dense for name, total in stages.items()},
        "lines": spread(np.concatenate(line_totals) / dense) if line_totals else None,
        "lines_by_stage": {name: total / states / dense for name, total in lines.items()},
        "bytes_dense": dense,
        "rows_scored": spread(np.concatenate([part.rows_scored for part in certificates])),
        "survivors": [spread(column) for column in survivors.T],
        "survivors_sorted": [np.sort(column).tolist() for column in survivors.T],
        "fallbacks": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "mean_energy": float(energy.mean()) if len(energy) else None,
    }


def bytes_by_stage(head: CertifiedHead, certificates: Certificates) -> dict[str, F64]:
    """Bytes of each state of one call, by what they were read for. The stages add up to `bytes_read`.

    What a batch reads once is shared out evenly. What the codes do not explain are rows scored exactly; of a state
    that fell back, that is the dense product.
    """
    batch = len(certificates)
    left = certificates.bytes_read.astype(float)
    ran = ~np.isnan(certificates.energy)  # states whose codes were scanned
    fell = np.array([reason is not None for reason in certificates.fallback])
    stages: dict[str, F64] = {}
    index = head.index
    if index is not None and index.centroid is not None:
        # With the shadow bound behind it, how many blocks stay open is not in the certificate.
        stages["centroids"] = np.where(left > 0, float(index.centroid.nbytes), 0.0)
        if index.shadow is not None:
            stages["codes and exact rows"] = left - stages["centroids"]
            return stages
    elif index is not None and index.shadow is not None and ran.any():
        shadow, bias = index.shadow, head.spec.bias32 is not None
        share = ran / max(1, int(ran.sum()))
        stages["transform"] = shadow.state_bytes * share
        stages["plane 0"] = shadow.row_bytes(0, bias) * len(shadow.rho) * share
        for plane in range(1, len(shadow.planes)):
            reached = certificates.survivors[:, plane - 1] if certificates.survivors.shape[1] >= plane else 0
            stages[f"plane {plane}"] = ran * np.ones(batch) * reached * shadow.row_bytes(plane, bias)
    left = left - sum(stages.values(), np.zeros(batch))
    stages["exact rows"] = np.where(fell, 0.0, left)
    if fell.any():
        stages["dense product"] = np.where(fell, left, 0.0)
    return stages


def lines_by_stage(head: CertifiedHead, certificates: Certificates) -> dict[str, F64]:
    """Bytes of the whole cache lines that each state of one call touches, by stage: what memory has to move.

    What is read from end to end fills its lines. Of rows here and there the certificates give the number and not the
    ids, so each counts with the mean over all rows of its table, at the addresses that they have. Neighbours that share
    a line count it twice: an upper bound, but never more than the whole table. The later planes read the row scales
    again, and the exact rows their bias, in lines that plane 0 has touched.

    Empty for the centroid bound before the shadow bound, where the certificates do not say which blocks were open.
    """
    stages = bytes_by_stage(head, certificates)
    if "codes and exact rows" in stages:
        return {}
    index = head.index
    lines = {name: np.ceil(read / LINE) * LINE for name, read in stages.items()}
    if "plane 0" in stages and index is not None and index.shadow is not None:
        shadow, bias = index.shadow, head.spec.bias32 is not None
        for i, plane in enumerate(shadow.planes[1:], 1):
            rows = stages[f"plane {i}"] / shadow.row_bytes(i, bias)
            lines[f"plane {i}"] = _row_lines(plane.words, plane.words_per_row * 4, rows)
    data = head.spec.valid_rows_only().data
    scored = stages["exact rows"] / (head.spec.rows.row_bytes)
    lines["exact rows"] = _row_lines(data, head.spec.rows.row_bytes, scored)
    return lines


def _row_lines(table: NDArray[Any], size: int, count: F64) -> F64:
    """Bytes of the lines that `count` rows of a table touch, `size` bytes from the start of each."""
    some = np.arange(min(len(table), LINE))  # where rows start within a line repeats after at most 64
    start = (table.ctypes.data + some * table.strides[0]) % LINE
    mean = float(np.mean((start + size + LINE - 1) // LINE)) * LINE
    return np.minimum(np.round(count) * mean, len(table) * max(table.strides[0], size) + LINE)


@dataclass(frozen=True)
class Plan:
    """What to measure: each k on single states, and each batch size with the first k, for each number of threads."""

    ks: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]

    def cases(self) -> list[tuple[int, int]]:
        """(k, batch)."""
        return list(dict.fromkeys([(k, 1) for k in self.ks] + [(self.ks[0], b) for b in self.batches]))


def run(
    spec: HeadSpec,
    index: Index,
    states: F32,
    plan: Plan,
    centroid: Index | None = None,
    probabilistic: Index | None = None,
    calibration: F32 | None = None,
    progress: Report | None = None,
    sweep: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Runs the plan. The result is made of dicts, lists and numbers: what `csv-decode bench --json` writes.

    Args:
        spec, index: our head, without scale and cap (they change no order).
        states: (N, d).
        centroid: an index with the paper's bound, to be measured as well.
        probabilistic: one with the probabilistic guarantee, too.
        calibration: states to calibrate the smaller heads on; without it there is no sweep over V.
        progress: called as progress(stage, done, total).
        sweep: makes caches cold; None: `Sweeper`.
    """

    def report(stage: str) -> Callable[[int, int], None] | None:
        return partial(progress, stage) if progress else None

    sweep = sweep or Sweeper()
    want = exact_ids(spec, states, max(plan.ks), report("exact answers"))
    peers, skipped = build_peers(spec, progress=report("peers"))
    figures = []
    for threads in plan.threads:
        set_threads(threads)
        methods = [Method(OURS, CertifiedHead(index, spec, threads=threads, engine="torch"))]
        if probabilistic is not None:
            chance = CertifiedHead(probabilistic, spec, threads=threads, guarantee="probabilistic", engine="torch")
            methods.append(Method(PROBABILISTIC, chance))
        methods += [Method(peer.name, peer=peer) for peer in peers]
        for k, batch in plan.cases():
            here = methods
            if centroid is not None and batch == 1:
                few = max(1, len(states) // _FEW)
                paper = CertifiedHead(centroid, spec, threads=threads, engine="torch")
                here = [*methods, Method(CENTROID, paper, only_first=few)]
            stage = f"k = {k}, batch {batch}, {threads_text(threads)}"
            found = measure(here, states, want[:, :k], batch, sweep, report(stage))
            figures += [{"threads": threads, **one} for one in found]
    out: dict[str, Any] = {"states": len(states), "figures": figures, "skipped": skipped, "against_v": []}
    if calibration is not None:
        set_threads(plan.threads[-1])
        full = index, {p.name: p for p in peers}
        out["against_v"] = sweep_rows(spec, full, calibration, states, plan.ks[0], plan.threads[-1], sweep, progress)
        out["fit"] = _fit(out["against_v"])
    out["compared"] = sum(f["states"] for f in _ours(out))
    out["wrong"] = sum(f["wrong"] for f in _ours(out))
    return out


def _ours(out: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for f in [*out["figures"], *out["against_v"]] if f["ours"]]


def cuts(rows: int) -> list[int]:
    """Sizes to cut a head of so many rows to: 32k, 64k, 128k, ... below it; of a small head, a quarter and a half."""
    sizes = []
    size = _SMALLEST_CUT
    while size < rows:
        sizes.append(size)
        size *= 2
    return sizes if len(sizes) > 1 else [n for n in (rows // 4, rows // 2) if n > 0]


def sweep_rows(
    spec: HeadSpec,
    full: tuple[Index, dict[str, Peer]],
    calibration: F32,
    states: F32,
    k: int,
    threads: int,
    sweep: Callable[[], None] | None = None,
    progress: Report | None = None,
) -> list[dict[str, Any]]:
    """Time against V: the head cut to its first rows, with an index built for each cut, and the head as it is."""
    figures: list[dict[str, Any]] = []
    sizes = [n for n in cuts(spec.n_rows) if n >= k]
    for n in [*sizes, spec.n_rows]:

        def report(stage: str, done: int, total: int, n: int = n) -> None:
            if progress:
                progress(f"V = {n:,}, {stage}", done, total)

        if n == spec.n_rows:
            part, index, peers = spec, full[0], [full[1][name] for name in _SWEEP_PEERS if name in full[1]]
        else:
            part = HeadSpec(spec.weight[:n], None if spec.bias is None else spec.bias[:n])
            peers = build_peers(part, _SWEEP_PEERS)[0]
            # Every answer is compared with the exact one below, so the radii need no check of their own.
            index = build_index(part, calibration, seed=0, threads=threads, verify=False, progress=report)
        head = CertifiedHead(index, part, threads=threads, engine="torch")
        methods = [Method(OURS, head), *(Method(peer.name, peer=peer) for peer in peers)]
        found = measure(methods, states, exact_ids(part, states, k), 1, sweep, partial(report, "timing"))
        figures += [{"rows": n, "threads": threads, **one} for one in found]
    return figures


def _fit(figures: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """A straight line through the mean times of each method: ms and ms a million rows."""
    lines = {}
    for name in dict.fromkeys(f["method"] for f in figures):
        points = [(f["rows"], f["ms"]["mean"]) for f in figures if f["method"] == name]
        if len(points) > 1:
            rows, means = np.array(points, float).T
            slope, start = np.polyfit(rows, means, 1)
            lines[name] = {"ms": float(start), "ms_per_million_rows": float(slope * 1e6)}
    return lines
