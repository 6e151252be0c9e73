"""`csv-decode bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.machine import threads_text
from .common import Dtype, IndexFile, ModelName, Opened, Verbose, open_model
from .terminal import Bars, note, out, problem, show_facts, show_table, size

if TYPE_CHECKING:
    from ..index import Index

__all__ = ["bench"]

_STATES, _QUICK_STATES = 300, 64
_TOKENS, _QUICK_TOKENS, _QUICK_PROMPTS = 64, 32, 6
_LAST = ("exact rows", "dense product")  # of the stages of a step
_FOUR = ("mean", "p50", "p90", "p99")


def bench(
    model: ModelName,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer states and cases, no sweep over V; less than two minutes.")
    ] = False,
    states: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden states to answer.", show_default=f"{_STATES}, quick {_QUICK_STATES}"),
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", "-k", help="How many best tokens.", show_default="1,10,50, quick 1,50")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="States in a call, measured with the first k.", show_default="1,2,4,8,16, quick 1,8"),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(help="Threads, for every method.", show_default="1 and all, quick all")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Random states; no model has such.")] = False,
    end_to_end: Annotated[
        bool, typer.Option("--end-to-end", help="Measure generate as a whole instead: greedy tokens a second.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="New tokens at most for each prompt, with --end-to-end.",
            show_default=f"{_TOKENS}, quick {_QUICK_TOKENS}",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write all figures here.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Draw PNG pictures into this folder.")
    ] = None,
    index: IndexFile = None,
    dtype: Dtype = "float32",
    verbose: Verbose = False,
) -> None:
    """Measure the certified head against what people would use instead, on states of text that the model writes.

    All methods answer the same states in turn, each with its data cold in memory, in one run; a call counts from the
    array of states to the array of ids. Every answer is compared with the exact one: of the others, differences are
    counted; one of ours makes the exit status 1.

    With --end-to-end, transformers writes greedy text from each prompt three times in turn: with the stock head, with
    the certified one, and with a head of zero cost that is told the tokens, which is the ceiling for any head.

    - `csv-decode bench demo --quick`

    - `csv-decode bench demo --end-to-end --dtype bfloat16`

    - `csv-decode bench ./my-model --k 1,10 --batch 1,4 --threads 2 --json figures.json --plots pictures`
    """
    from ..bench.machine import machine_info
    from ..bench.plots import draw, require_matplotlib
    from ..bench.run import Plan, run
    from ..bench.states import decode_states, random_states
    from ..kernels import default_threads

    every = default_threads()
    plan = Plan(
        _numbers("--k", k, (1, 50) if quick else (1, 10, 50)),
        _numbers("--batch", batch, (1, 8) if quick else (1, 2, 4, 8, 16)),
        _numbers("--threads", threads, (every,) if quick else tuple(sorted({1, every}))),
    )
    only = {"--states": states, "--k": k, "--batch": batch, "--random": random or None}
    wrong = [name for name, value in only.items() if value is not None]
    if end_to_end and wrong:
        raise typer.BadParameter(f"{', '.join(wrong)} and --end-to-end do not go together")
    if tokens is not None and not end_to_end:
        raise typer.BadParameter("--tokens goes with --end-to-end")
    # What would only fail at the end fails now.
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.parent}", param_hint="--json")
    if plots is not None:
        require_matplotlib()
        plots.mkdir(parents=True, exist_ok=True)
    opened = open_model(model, dtype, plan.threads[-1], verbose)
    spec = opened.spec
    about: dict[str, Any] = {
        "model": opened.loaded.name,
        "rows": spec.n_rows,
        "width": spec.width,
        "dtype": spec.rows.kind,
        "machine": machine_info(plan.threads),
    }
    if end_to_end:
        _end_to_end(opened, about, plan.threads, tokens, quick, index, json_file, plots)
        return
    if max(plan.ks) > spec.n_rows:
        raise typer.BadParameter(f"k is {max(plan.ks)}, but the head has {spec.n_rows} rows", param_hint="--k")
    count = states or (_QUICK_STATES if quick else _STATES)
    mine = opened.index(index)
    centroid = _centroid(opened, quick)
    calibration = probabilistic = None
    with Bars() as bars:
        if random:
            tested = random_states(spec.width, count)
        else:
            tested = decode_states(opened.model, opened.tokenizer, count, progress=partial(bars, "states"))
        if not quick and mine.shadow is not None:
            from ..calibration import collect_states

            calibration = collect_states(
                opened.model, opened.tokenizer, progress=partial(bars, "calibration for the smaller heads")
            )
            from ..cache import get_index
            from ..calibration import calibration_key

            probabilistic = get_index(
                spec,
                lambda: calibration,
                key=calibration_key(),
                build={"guarantee": "probabilistic"},
                source=opened.loaded.source,
                progress=bars,
            )
        found = run(spec, mine, tested, plan, centroid, probabilistic, calibration, bars)
    report = {
        **about,
        "kind": "random" if random else "real",
        "index": {"bounds": list(mine.bounds), **mine.settings},
        **found,
    }
    _show(report)
    _keep(report, json_file, plots, draw)
    if report["wrong"]:
        problem(f"{report['wrong']} of {report['compared']} answers of the certified head differ from the exact ones")
        raise typer.Exit(1)


def _end_to_end(
    opened: Opened,
    about: dict[str, Any],
    threads: tuple[int, ...],
    tokens: int | None,
    quick: bool,
    index: Path | None,
    json_file: Path | None,
    plots: Path | None,
) -> None:
    from ..bench.generation import measure_generation
    from ..bench.plots import draw_generation
    from ..bench.states import PROMPTS

    if opened.tokenizer is None:
        raise ValueError(f"{opened.loaded.name} has no tokenizer, so it cannot read the prompts")
    # Others are left dense, and `accelerate` says so; the report counts it.
    mine = opened.index(index) if opened.spec.rows.kind == "float32" else None
    prompts = PROMPTS[:: len(PROMPTS) // _QUICK_PROMPTS] if quick else PROMPTS  # of all kinds
    count = tokens or (_QUICK_TOKENS if quick else _TOKENS)
    with Bars() as bars:
        runs = [
            measure_generation(
                opened.model, opened.tokenizer, mine, n, prompts, count, partial(bars, f"generate, {threads_text(n)}")
            )
            for n in threads
        ]
    settings = None if mine is None else {"bounds": list(mine.bounds), **mine.settings}
    report = {**about, "index": settings, "tokens": count, "end_to_end": runs}
    _show_generation(report)
    _keep(report, json_file, plots, draw_generation)
    wrong = sum(run["wrong"] for run in runs)
    if wrong:
        problem(f"on {wrong} prompts the certified head writes other tokens than the stock one, beyond its rounding")
        raise typer.Exit(1)


def _keep(
    report: dict[str, Any],
    json_file: Path | None,
    plots: Path | None,
    draw: Callable[[dict[str, Any], Path], list[Path]],
) -> None:
    """Writes the files that were asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
        note(f"figures: {json_file}")
    if plots is not None:
        note(f"pictures: {', '.join(str(path) for path in draw(report, plots))}")


def _numbers(option: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """1,10,50 as numbers; each once."""
    if text is None:
        return default
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers such as 1,10", param_hint=option)
    return numbers


def _centroid(opened: Opened, quick: bool) -> Index | None:
    """An index with the paper's bound: one from the cache, or, with time and faiss, a new one."""
    from ..cache import entries, get_index
    from ..index import StaleIndexError
    from ..index.storage import IndexFileError, load_index

    for entry in entries():
        if entry.bounds == "centroid" and entry.fingerprint == opened.spec.fingerprint:
            try:
                return load_index(entry.path, opened.spec)
            except (IndexFileError, StaleIndexError, OSError):
                continue
    if quick:
        note("The paper's centroid bound is left out: its index is not in the cache, and building it takes a while.")
        return None
    try:
        import faiss  # noqa: F401
    except ImportError:
        note("The paper's centroid bound is left out, it needs faiss: pip install '.[centroid]' in the checkout")
        return None
    with Bars() as bars:
        return get_index(opened.spec, lambda: None, bounds="centroid", source=opened.loaded.source, progress=bars)


# What it prints.


def _show(report: dict[str, Any]) -> None:
    machine, settings = report["machine"], report["index"]
    states = f"{report['states']} of text that the model writes, from other openings than the calibration's"
    if report["kind"] == "random":
        states = (
            f"{report['states']} RANDOM ones: no model has such states, and these figures say little about decoding"
        )
    index = ", ".join(f"{name} {_plain(value)}" for name, value in settings.items() if name != "seed")
    show_facts(_about(report, ("states", states), ("index", index)))
    for threads in machine["threads"]:
        figures = [f for f in report["figures"] if f["threads"] == threads]
        for key in dict.fromkeys((f["k"], f["batch"]) for f in figures):
            _show_case(key, threads, [f for f in figures if (f["k"], f["batch"]) == key])
    _show_certified(report)
    if report["against_v"]:
        _show_rows(report)
    for name, reason in report["skipped"].items():
        out.print(f"left out: {name}, {reason}", markup=False, soft_wrap=True)
    out.print(
        f"\n{report['compared']} answers of ours compared with the exact ones, {report['wrong']} differ",
        soft_wrap=True,
    )


def _about(report: dict[str, Any], *more: tuple[str, str]) -> list[tuple[str, str]]:
    machine = report["machine"]
    return [
        ("model", f"{report['model']}, head {report['rows']:,} x {report['width']}, {report['dtype']}"),
        *more,
        ("processor", f"{machine['cpu']}, {machine['cores']} cores, kernels {machine['kernels']}"),
        ("versions", ", ".join(f"{name} {number}" for name, number in machine["versions"].items())),
    ]


def _show_generation(report: dict[str, Any]) -> None:
    from ..bench.generation import FREE

    runs = report["end_to_end"]
    text = f"greedy, {runs[0]['prompts']} prompts, at most {report['tokens']} tokens each"
    show_facts(_about(report, ("text", text)))
    for run in runs:
        _title(f"model.generate, {threads_text(run['threads'])}: milliseconds a token, and whole calls")
        rows = [
            [
                f["method"],
                *_four(f["ms"], ".2f"),
                f"{f['first_ms']:.1f}",
                f"{f['tokens_per_second']:.2f}",
                f"{f['speedup']:.2f}",
                f"{f['of_ceiling']:.0%}",
            ]
            for f in run["figures"]
        ]
        show_table(["head", *_FOUR, "to the first", "tokens/s", "x stock", "of ceiling"], rows)
        steps = run["certified_steps"] + sum(run["dense_steps"].values())
        took = "" if run["head_ms"] is None else f", the head and its checks {run['head_ms']:.2f} ms a step"
        facts = [("certified", f"{run['certified_steps']:,} of {steps:,} steps of csv-decode{took}")]
        if run["dense_steps"]:
            facts.append(("dense", "; ".join(f"{n:,} ({reason})" for reason, n in run["dense_steps"].items())))
        facts.append(("ids", f"equal to stock's on {run['prompts'] - run['differ']} of {run['prompts']} prompts"))
        if run["rounding"]:
            facts.append(("rounding", f"{run['rounding']} of the differences are the rounding of the stock head"))
        show_facts(facts)
        if not run["certified_steps"]:
            out.print(
                "No step was certified: csv-decode here is the stock head once more, and its row shows only noise.",
                soft_wrap=True,
            )
    out.print(
        "\nA token's time is that of a whole step; tokens/s also counts what comes before the first token. "
        f"{FREE}: the same loop and layers, the ceiling for any head.",
        soft_wrap=True,
    )


def _plain(value: Any) -> str:
    return " + ".join(map(str, value)) if isinstance(value, list) else str(value)


def _title(text: str) -> None:
    out.print(f"\n{text}", style="bold", soft_wrap=True)


def _four(numbers: dict[str, float], text: str, scale: float = 1.0) -> list[str]:
    return [format(numbers[name] * scale, text) for name in _FOUR]


def _show_case(key: tuple[int, int], threads: int, figures: list[dict[str, Any]]) -> None:
    k, batch = key
    states = "one state" if batch == 1 else f"batches of {batch} states"
    _title(f"{states}, k = {k}, {threads_text(threads)}: milliseconds a call")
    rows = []
    for f in sorted(figures, key=lambda f: f["ms"]["mean"]):
        differs = [f"{f[name]} of {f['states']}" for name in ("argmax_differs", "set_differs")]
        exact = "yes" if f["exact"] else f"but {f['failure_probability']:g}" if f["ours"] else "no"
        rows.append([f["method"], *_four(f["ms"], ".2f"), f"{f['times_ours']:.2f}", exact, *differs[: 1 + (k > 1)]])
    sets = [f"top {k} differs"] if k > 1 else []
    show_table(["method", *_FOUR, "x ours", "exact", "argmax differs", *sets], rows)


def _show_certified(report: dict[str, Any]) -> None:
    """Bytes, survivors and fallbacks; they do not depend on the threads."""
    threads = report["machine"]["threads"][-1]
    ours = [f for f in report["figures"] if f["ours"] and f["threads"] == threads]
    _title("Bytes read for a state, % of the head in bfloat16")
    stages = sorted(
        {name for f in ours for name in f["bytes_by_stage"]},
        key=lambda name: (name in _LAST, name != "transform", name),
    )
    rows = []
    for f in ours:
        for what, kind in (("asked for", "bytes"), ("in lines", "lines")):
            if f[kind] is not None:
                parts = [f[f"{kind}_by_stage"].get(name) for name in stages]
                parted = ["" if part is None else f"{part * 100:.2f}" for part in parts]
                rows.append([f["method"], str(f["k"]), str(f["batch"]), what, *_four(f[kind], ".1f", 100), *parted])
    show_table(["method", "k", "batch", "bytes", *_FOUR, *stages], rows)
    out.print(
        f"100 % are {size(ours[0]['bytes_dense'])}. In lines: whole cache lines of 64 bytes, which memory moves; an "
        "upper bound, since scattered rows that share a line count it twice.",
        soft_wrap=True,
    )
    _title("Rows left after each stage, and states that fell back to the dense product")
    rows = []
    for f in ours:
        fell = ", ".join(f"{count} ({reason})" for reason, count in f["fallbacks"].items()) or "none"
        for stage, numbers in enumerate(f["survivors"]):
            what = "rows opened" if "centroids" in f["bytes_by_stage"] else f"plane {stage}"
            share = f"{numbers['mean'] / report['rows']:.3%}"
            numbers = _four(numbers, ",.0f")
            rows.append([f["method"], str(f["k"]), str(f["batch"]), what, *numbers, share, fell if stage == 0 else ""])
    show_table(["method", "k", "batch", "stage", *_FOUR, "mean of V", "fallbacks"], rows)


def _show_rows(report: dict[str, Any]) -> None:
    figures, threads = report["against_v"], report["machine"]["threads"][-1]
    sizes = list(dict.fromkeys(f["rows"] for f in figures))
    _title(f"Time against V, k = {figures[0]['k']}, {threads_text(threads)}: mean milliseconds a state")
    rows = []
    for name in dict.fromkeys(f["method"] for f in figures):
        means = {f["rows"]: f"{f['ms']['mean']:.2f}" for f in figures if f["method"] == name}
        line = report["fit"].get(name)
        fit = "" if line is None else f"{line['ms']:.2f} + {line['ms_per_million_rows']:.2f} a million rows"
        rows.append([name, *(means.get(n, "") for n in sizes), fit])
    show_table(["method", *(f"{n:,}" for n in sizes), "fit"], rows)
