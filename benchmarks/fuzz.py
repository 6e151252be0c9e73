"""Looks for input that breaks a promise: damaged and forged index files, and strange arguments of the public API.

    python benchmarks/fuzz.py --minutes 30
    python benchmarks/fuzz.py --only index --seed 7
    python benchmarks/fuzz.py --only index --seed 7 --case 1234       replays one case, here

What must hold is in `fuzz_index.py` and `fuzz_arguments.py`. A case is drawn from its seed and number alone. Cases run
in child processes with limited memory and time, so that one that ends its process, hangs, or asks for absurd memory is
a finding as well. Exit status 1 on a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # faiss and torch would spin on tiny matrices

import numpy as np
from fuzz_index import sanitized
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

KINDS = ("index", "arguments")
MEMORY = 4 << 30  # bytes of address space that a case may ask for
SECONDS = 60.0  # that a case may take
STARTING = 600.0  # seconds that a child may take before its first case
RENEW = 20000  # cases after which a child is replaced
MOST = 20  # findings after which a run ends


def case_rng(seed: int, kind: str, case: int) -> np.random.Generator:
    return np.random.default_rng([seed, KINDS.index(kind), case])


def fuzzer(kind: str) -> Any:
    """The module of a kind: prepare(folder) -> context in the parent; open(context) -> cases in a child; cases(rng)
    says in a few words how a case ended, or raises what is then a finding."""
    if kind == "index":
        import fuzz_index

        return fuzz_index
    import fuzz_arguments

    return fuzz_arguments


def child(pipe: Connection, kind: str, seed: int, context: Any, memory: int = MEMORY) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        cases = fuzzer(kind).open(context, Path(folder))
        if memory:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
        pipe.send(None)
        while (case := pipe.recv()) is not None:
            started = time.process_time()
            try:
                outcome, finding = cases(case_rng(seed, kind, case)), None
            except BaseException as error:
                outcome, finding = "finding", "".join(traceback.format_exception(error)).strip()
            pipe.send((outcome, finding, time.process_time() - started))


@dataclass
class Worker:
    """A child process, and the case it is at."""

    kind: str
    seed: int
    context: Any
    case: int | None = None
    since: float = 0.0
    done: int = 0
    ready: bool = False
    process: Any = field(init=False)
    pipe: Connection = field(init=False)

    def __post_init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        # An address sanitizer reserves terabytes, so it cannot be limited.
        memory = 0 if sanitized() else MEMORY
        self.process = spawn.Process(
            target=child, args=(theirs, self.kind, self.seed, self.context, memory), daemon=True
        )
        self.since = time.monotonic()
        self.process.start()
        theirs.close()

    def give(self, case: int) -> None:
        self.case, self.since = case, time.monotonic()
        self.pipe.send(case)

    def stop(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        else:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
        self.process.join(10)
        self.pipe.close()


@dataclass
class Result:
    cases: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    cpu: float = 0.0
    findings: list[tuple[str, int, str]] = field(default_factory=list)  # kind, case, what


def run(kinds: list[str], seed: int, first: int, count: int | None, minutes: float, workers: int) -> Result:
    """Cases first, first + 1, ... of every kind, up to a number of cases or for some minutes each."""
    result = Result()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn(),
            console=console, transient=True,
        ) as progress,
    ):  # fmt: skip
        for kind in kinds:
            result.outcomes[kind] = Counter()
            bar = progress.add_task(kind, total=count or minutes * 60, said="preparing")
            context = fuzzer(kind).prepare(Path(folder))
            _run_kind(kind, seed, first, count, minutes, workers, context, result, progress, bar)
    return result


def _run_kind(
    kind: str, seed: int, first: int, count: int | None, minutes: float, workers: int, context: Any, result: Result,
    progress: Progress, bar: Any,
) -> None:  # fmt: skip
    following = first
    pool = [Worker(kind, seed, context) for _ in range(workers)]
    end = None  # set when the first child is ready
    failed = 0

    def found(worker: Worker, what: str) -> None:
        nonlocal failed
        failed += 1
        result.findings.append((kind, -1 if worker.case is None else worker.case, what))
        progress.console.print(f"[red]{kind} case {worker.case}[/]: {escape(what.splitlines()[-1])}")

    while pool:
        more = failed < MOST and (end is None or time.monotonic() < end)
        more = more and (count is None or following < first + count)
        for worker in list(pool):
            if worker.ready and worker.case is None:
                if not more:
                    worker.stop()
                    pool.remove(worker)
                    continue
                if worker.done >= RENEW:
                    worker.stop()
                    pool[pool.index(worker)] = Worker(kind, seed, context)
                    continue
                worker.give(following)
                following += 1
                more = more and (count is None or following < first + count)
        ready = multiprocessing.connection.wait([worker.pipe for worker in pool], timeout=1.0)
        for worker in list(pool):
            if worker.pipe in ready:
                try:
                    said = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(10)
                    found(worker, f"the process ended with exit code {worker.process.exitcode}")
                    pool.remove(worker)
                    if worker.ready:
                        pool.append(Worker(kind, seed, context))
                    continue
                if not worker.ready:
                    worker.ready = True
                    end = end or (time.monotonic() + minutes * 60 if count is None else None)
                    continue
                outcome, finding, cpu = said
                result.cases[kind] += 1
                result.outcomes[kind][outcome] += 1
                result.cpu += cpu
                if finding is not None:
                    found(worker, finding)
                worker.case = None
                worker.done += 1
            elif time.monotonic() - worker.since > (limit := SECONDS if worker.ready else STARTING) and (
                worker.case is not None or not worker.ready
            ):
                worker.stop(kill=True)
                found(worker, f"no answer within {limit:.0f} s")
                pool.remove(worker)
                if worker.ready:
                    pool.append(Worker(kind, seed, context))
        done = following - first if count else minutes * 60 - max(0.0, (end or 0) - time.monotonic()) if end else 0
        said = f"{result.cases[kind]} cases, {failed} findings"
        progress.update(bar, completed=done, said=said)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="for all kinds together")
    parser.add_argument("--cases", type=int, help="of each kind, instead of minutes")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--case", type=int, help="run this one alone, in this process")
    parser.add_argument("--workers", type=int, default=1, help="child processes")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    kinds = [options.only] if options.only else list(KINDS)
    console = Console()
    if options.case is not None:
        if not options.only:
            parser.error("--case needs --only index or --only arguments")
        module = fuzzer(options.only)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
            outcome = module.open(module.prepare(Path(folder)), Path(scratch))(
                case_rng(seed, options.only, options.case)
            )
        console.print(outcome)
        return 0
    result = run(kinds, seed, 0, options.cases, options.minutes / len(kinds), options.workers)
    for kind in kinds:
        console.print(f"[bold]{kind}[/]: {result.cases[kind]} cases")
        for outcome, times in result.outcomes[kind].most_common():
            console.print(f"  {times:8d}  {escape(outcome)}")
    console.print(f"{result.cpu / 60:.1f} CPU minutes, seed {seed}")
    for kind, case, what in result.findings:
        console.rule(f"{kind}, case {case}")
        print(what)
        print(f"\nreplay: python benchmarks/fuzz.py --only {kind} --seed {seed} --case {case}", flush=True)
    console.print(f"[red]{len(result.findings)} findings[/]" if result.findings else "[green]no finding[/]")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
