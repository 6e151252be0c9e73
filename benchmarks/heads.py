"""Both bounds on a real head: exactness against a reference over every row, bytes, survivors, fallbacks.

    python benchmarks/heads.py demo
    python benchmarks/heads.py smollm2 --states 1000 --json out.json

The states come from sampled text (temperature 0.8) that continues csv_decode.bench.states.PROMPTS; the index was
calibrated on text that the model wrote from other openings. Every id of every result is compared with the exact
reference, ties by id.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from common import decode_states, load
from rich.console import Console
from rich.progress import track
from rich.table import Table

import csv_decode as cd
from csv_decode.cache import get_index
from csv_decode.calibration import calibration_key, collect_states
from csv_decode.integrations.transformers import head_spec
from csv_decode.kernels.native import supported

console = Console()
BATCH = 50


def reference(spec: cd.HeadSpec, states: np.ndarray, k: int) -> np.ndarray:
    """Exact top-k ids from a dense step over every row, checked by the independent checker."""
    dense = cd.CertifiedHead(None, spec)
    ids = []
    for first in track(range(0, len(states), BATCH), f"exact reference, k = {k}", console=console, transient=True):
        h = states[first : first + BATCH]
        top = dense.top_k(h, k)
        cd.verify(top, h, spec)
        ids.append(top.ids)
    return np.concatenate(ids)


def measure(head: cd.CertifiedHead, states: np.ndarray, k: int, want: np.ndarray, label: str) -> dict[str, Any]:
    """One state a step, as decoding does."""
    wrong, rows, ratio, survivors, seconds, fallbacks = 0, [], [], [], [], 0
    for h, ids in zip(track(states, label, console=console, transient=True), want, strict=True):
        started = time.perf_counter()
        top = head.top_k(h, k)
        seconds.append(time.perf_counter() - started)
        certificate = top.certificates[0]
        wrong += not np.array_equal(top.ids[0], ids)
        assert certificate.certified
        fallbacks += certificate.fallback is not None
        rows.append(certificate.rows_scored)
        ratio.append(certificate.bytes_read / certificate.bytes_dense)
        survivors.append(certificate.survivors)
    return {
        "wrong": wrong,
        "bytes": spread(ratio),
        "rows scored": spread(np.array(rows) / head.spec.n_rows),
        "survivors": [spread(np.array(s) / head.spec.n_rows) for s in zip(*survivors, strict=True)],
        "milliseconds": spread(np.array(seconds) * 1e3),
        "fallback": fallbacks / len(states),
    }


def spread(x: Any) -> dict[str, float]:
    x = np.asarray(x, float)
    return {"mean": float(x.mean()), **{f"p{q}": float(np.quantile(x, q / 100)) for q in (50, 90, 99)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, smollm2, a .gguf file or a Hugging Face folder")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--k", default="1,10,50", help="comma-separated")
    parser.add_argument("--kernels", default=",".join(reversed(supported())), help="comma-separated")
    parser.add_argument("--centroid-states", type=int, default=None, help="fewer states for the centroid bound")
    parser.add_argument("--no-centroid", action="store_true")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    loaded = load(args.model)
    spec = head_spec(loaded.model)
    console.print(f"{loaded.name}: {spec.n_rows} rows x {spec.width}, {args.states} states")
    states = decode_states(loaded.model, loaded.tokenizer, args.states)

    def calibrate() -> np.ndarray:
        return collect_states(loaded.model, loaded.tokenizer)

    started = time.perf_counter()
    shadow = get_index(spec, calibrate, key=calibration_key(None), source=loaded.source)
    console.print(f"shadow index: {time.perf_counter() - started:.1f} s, {shadow.settings}")
    indices = {"shadow": shadow}
    if not args.no_centroid:
        started = time.perf_counter()
        indices["centroid"] = get_index(spec, calibrate, bounds="centroid", source=loaded.source)
        console.print(f"centroid index: {time.perf_counter() - started:.1f} s, {indices['centroid'].settings}")

    figures: list[dict[str, Any]] = []
    ks = sorted(int(x) for x in args.k.split(","))
    best = reference(spec, states, ks[-1])  # in exact order, so its first k are the top-k
    for k in ks:
        want = best[:, :k]
        for bound, index in indices.items():
            few = states if bound == "shadow" else states[: args.centroid_states]
            for kernels in args.kernels.split(",") if bound == "shadow" else args.kernels.split(",")[:1]:
                head = cd.CertifiedHead(index, spec, kernels=kernels)
                found = measure(head, few, k, want[: len(few)], f"{bound}, {kernels}, k = {k}")
                figures.append(
                    {"bound": bound, "kernels": kernels, "k": k, "budget": "25%", "states": len(few), **found}
                )
            if bound == "centroid":  # and how far it must open without a budget
                head = cd.CertifiedHead(index, spec, budget=None)
                found = measure(head, few[:100], k, want[: len(few[:100])], f"{bound}, no budget, k = {k}")
                figures.append(
                    {"bound": bound, "kernels": head.kernels.name, "k": k, "budget": "none", "states": 100, **found}
                )
    show(figures)
    wrong = sum(f["wrong"] for f in figures)
    results = sum(f["states"] for f in figures)
    console.print(f"{results} results, {wrong} differ from the exact reference")
    if args.json:
        about = {"model": loaded.name, "rows": spec.n_rows, "width": spec.width, "shadow": shadow.settings}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"about": about, "figures": figures}, file, indent=1)
    return 1 if wrong else 0


def show(figures: list[dict[str, Any]]) -> None:
    table = Table("bound", "kernels", "k", "budget", "states", "wrong ids", title="mean / p50 / p90 / p99")
    for name in ("bytes of dense bf16", "rows scored", "after each stage (mean)", "ms a step", "fallback"):
        table.add_column(name, justify="right")
    for f in figures:

        def four(name: str, scale: float = 1.0, f: dict[str, Any] = f) -> str:
            return " / ".join(f"{f[name][q] * scale:.3g}" for q in ("mean", "p50", "p90", "p99"))

        stages = " > ".join(f"{s['mean']:.3%}" for s in f["survivors"])
        table.add_row(
            f["bound"], f["kernels"], str(f["k"]), f["budget"], str(f["states"]), str(f["wrong"]),
            four("bytes"), four("rows scored", 100) + " %", stages, four("milliseconds"), f"{f['fallback']:.1%}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
