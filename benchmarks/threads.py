"""Beside other thread pools: our head and torch in one process, each alone, taking turns, and both at once.

    python benchmarks/threads.py demo
    python benchmarks/threads.py smollm2 --threads 2 --seconds 5 --json out.json

The work of torch stands for the layers of a model: a row of states through square matrices, as many bytes as given, one
parallel region for each. Our head answers decode states, one at a time, k = 1. Each line is what one of the two takes:

    alone              call after call
    alone, paused      each call after a few milliseconds in one thread that also empty the cache
    in turns           the layers, then the head, and so on, in one thread: a decoding loop
    in turns, shared   the same, with the head on the other's OpenMP threads (`CertifiedHead(engine=)`)
    at once            a Python thread for each, without a pause

A pool that spins while it waits for work keeps cores from another. The head's own threads sleep at once; OpenMP's spin
for a while, unless OMP_WAIT_POLICY=PASSIVE. With llama-cpp-python, its loop is measured in place of torch's as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from common import decode_states, load
from rich.console import Console
from rich.table import Table

import csv_decode as cd
from csv_decode.bench.machine import Sweeper, machine_info
from csv_decode.bench.peers import set_threads
from csv_decode.bench.run import spread
from csv_decode.cache import get_index
from csv_decode.calibration import calibration_key, collect_states
from csv_decode.integrations.transformers import head_spec
from csv_decode.models import demo_file

console = Console()
WIDTH = 1024
LEAST = 5  # calls of a case at least


def layers(megabytes: int) -> Callable[[], None]:
    """A row through enough matrices (1024, 1024) in float32 for so many bytes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    count = max(1, (megabytes << 20) // (WIDTH * WIDTH * 4))
    matrices = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(count)]
    start = torch.randn(1, WIDTH, generator=generator)

    def call() -> None:
        with torch.inference_mode():
            x = start
            for matrix in matrices:
                x = torch.nn.functional.linear(x, matrix)

    return call


def llama(threads: int) -> Callable[[], None] | str:
    """One decoding step of the demo model in llama.cpp, or why there is none."""
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed, so llama.cpp is left out"
    import llama_cpp

    model = llama_cpp.Llama(str(demo_file()), n_ctx=512, n_threads=threads, verbose=False)

    def call() -> None:
        if model.n_tokens >= 500:
            model.reset()
        model.eval([2])

    return call


def ours(head: cd.CertifiedHead, states: np.ndarray) -> Callable[[], None]:
    at = 0

    def call() -> None:
        nonlocal at
        head.top_k(states[at % len(states)], 1)
        at += 1

    return call


def turns(parts: list[Callable[[], None]], seconds: float) -> list[list[float]]:
    """Calls the parts one after the other until the time is up: seconds of each call of each."""
    for part in parts:
        part()
    times: list[list[float]] = [[] for _ in parts]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < LEAST:
        for part, kept in zip(parts, times, strict=True):
            started = time.perf_counter()
            part()
            kept.append(time.perf_counter() - started)
    return times


def at_once(parts: list[Callable[[], None]], seconds: float) -> list[list[float]]:
    """A Python thread for each part, from one start until the time is up and each has had a few calls."""
    times: list[list[float]] = [[] for _ in parts]
    barrier = threading.Barrier(len(parts))

    def work(i: int) -> None:
        try:
            parts[i]()
            barrier.wait()
            end = time.perf_counter() + seconds
            while not barrier.broken and (time.perf_counter() < end or min(map(len, times)) < LEAST):
                started = time.perf_counter()
                parts[i]()
                times[i].append(time.perf_counter() - started)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        jobs = [pool.submit(work, i) for i in range(len(parts))]
    for job in jobs:
        if job.exception() is not None and not isinstance(job.exception(), threading.BrokenBarrierError):
            job.result()
    return times


def measure(
    name: str, other: Callable[[], None], head: Callable[[], None], shared: Callable[[], None], seconds: float
) -> list[dict[str, Any]]:
    """All cases of our head and one other loop. shared: our head on the threads of the other."""
    sweep = Sweeper()
    found = {
        "alone": [turns([other], seconds)[0], turns([head], seconds)[0]],
        "alone, paused": [turns([sweep, other], seconds)[1], turns([sweep, head], seconds)[1]],
        "in turns": turns([other, head], 2 * seconds),
        "in turns, shared": turns([other, shared], 2 * seconds),
        "at once": at_once([other, head], seconds),
    }
    return [
        {"beside": name, "what": what, "case": case, "calls": len(times[i]), "ms": spread(np.array(times[i]) * 1e3)}
        for i, what in enumerate((name, "csv-decode"))
        for case, times in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, smollm2, a .gguf file or a Hugging Face folder; only its head is used")
    parser.add_argument("--threads", type=int, default=2, help="of each of the two")
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--megabytes", type=int, default=256, help="that the layers read")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    loaded = load(args.model)
    spec = head_spec(loaded.model)
    states = decode_states(loaded.model, loaded.tokenizer, 48)
    index = get_index(
        spec,
        lambda: collect_states(loaded.model, loaded.tokenizer),
        key=calibration_key(None),
        source=loaded.source,
    )
    set_threads(args.threads)

    def on(engine: str | None) -> Callable[[], None]:
        return ours(cd.CertifiedHead(index, spec, threads=args.threads, engine=engine), states)

    figures = measure("torch", layers(args.megabytes), on(None), on("torch"), args.seconds)
    other = llama(args.threads)
    if isinstance(other, str):
        console.print(other)
    else:
        figures += measure("llama.cpp", other, on(None), on("llama_cpp"), args.seconds)
    table = Table("what", "case", "beside", "calls", title=f"{loaded.name}, {args.threads} threads each: ms a call")
    for name in ("mean", "p50", "p99"):
        table.add_column(name, justify="right")
    for f in figures:
        numbers = [f"{f['ms'][name]:.2f}" for name in ("mean", "p50", "p99")]
        table.add_row(f["what"], f["case"], f["beside"], str(f["calls"]), *numbers)
    console.print(table)
    if args.json:
        about = {"model": loaded.name, "threads": args.threads, "megabytes": args.megabytes}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**about, "machine": machine_info([args.threads]), "figures": figures}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
