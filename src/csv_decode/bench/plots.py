"""Pictures of a report, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .generation import FREE, STOCK
from .run import CENTROID, OURS

__all__ = ["draw", "draw_generation", "require_matplotlib"]

#: One colour a method in all pictures; ours stands out.
_COLOURS = {
    OURS: "#d62728",
    CENTROID: "#ff9896",
    STOCK: "#1f77b4",
    FREE: "#bdbdbd",
    "torch float32": "#1f77b4",
    "torch bfloat16": "#17becf",
    "torch int8, weight only": "#2ca02c",
    "torch int8, dynamic": "#98df8a",
    "torch int8, dynamic by row": "#bcbd22",
    "torchao int8, weight only": "#8c564b",
    "faiss flat": "#7f7f7f",
    "faiss 8-bit": "#c7c7c7",
}
_STAGES = {"exact rows": "#fd8d3c", "dense product": "#bdbdbd"}
_CODES = ("#08306b", "#2171b5", "#6baed6", "#9ecae1", "#c6dbef")


def require_matplotlib() -> None:
    """Raises ImportError with the way to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plots need matplotlib; install it with: pip install '.[bench]' in the checkout") from None


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what the report has figures for, with the most threads it was measured with. Returns the files."""
    threads = max(f["threads"] for f in report["figures"])
    figures = [f for f in report["figures"] if f["threads"] == threads]
    ours = [f for f in figures if f["method"] == OURS]
    single = [f for f in figures if f["batch"] == 1]
    first = [f for f in figures if f["k"] == figures[0]["k"]]
    about = (
        f"{report['model']}, {report['rows']:,} rows x {report['width']}, {threads} threads, {report['kind']} states"
    )
    drawn = [
        _lines(folder / "time_by_k.png", single, "k", "k best tokens", f"Time of one state\n{about}"),
        _survivors(folder / "survivors.png", [f for f in ours if f["batch"] == 1], report["rows"], about),
        _bytes(folder / "bytes_by_stage.png", ours, about),
    ]
    if len({f["batch"] for f in first}) > 1:
        title = f"Time of a batch, k = {first[0]['k']}\n{about}"
        drawn.append(_lines(folder / "time_by_batch.png", first, "batch", "states in a batch", title))
    if report["against_v"]:
        title = f"Time against V, k = {report['against_v'][0]['k']}\n{about}"
        drawn.append(_lines(folder / "time_by_v.png", report["against_v"], "rows", "rows of the head, V", title))
    return drawn


def draw_generation(report: dict[str, Any], folder: Path) -> list[Path]:
    """Mean milliseconds a token with each head, up to the 90th percentile, for each number of threads."""
    runs = report["end_to_end"]
    about = f"{report['model']}, {report['rows']:,} rows x {report['width']}, {report['dtype']}"
    figure, axes = _canvas(f"Time of a token of model.generate, mean and p90\n{about}")
    names = [f["method"] for f in runs[0]["figures"]]
    for i, name in enumerate(names):
        found = [run["figures"][i] for run in runs]
        mean = np.array([f["ms"]["mean"] for f in found])
        high = np.maximum(np.array([f["ms"]["p90"] for f in found]) - mean, 0)
        at = np.arange(len(runs)) + (i - 1) * 0.27
        axes.bar(at, mean, 0.25, yerr=[np.zeros(len(runs)), high], label=name, color=_COLOURS[name])
        for x, f in zip(at, found, strict=True):
            speed = f"{f['tokens_per_second']:.1f}/s"
            axes.annotate(speed, (x, 0), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(runs)), [f"threads: {run['threads']}" for run in runs])
    axes.set_ylabel("milliseconds a token")
    _legend(axes)
    return [_save(figure, folder / "end_to_end.png")]


def _canvas(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot there is no display and no global state

    figure = Figure(figsize=(8, 5), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any, columns: int = 1) -> None:
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path


def _lines(path: Path, figures: list[dict[str, Any]], x: str, label: str, title: str) -> Path:
    """Mean milliseconds of each method against `x`, both on logarithmic axes."""
    figure, axes = _canvas(title)
    for name in dict.fromkeys(f["method"] for f in figures):
        points = sorted((f[x], f["ms"]["mean"], f["ms"]["p90"]) for f in figures if f["method"] == name)
        at, mean, high = np.array(points, float).T
        mine = name == OURS
        colour = _COLOURS.get(name)
        axes.plot(at, mean, marker="o", markersize=4, linewidth=2.5 if mine else 1.3, color=colour, label=name)
        if mine:
            axes.plot(at, high, linestyle=":", color=colour, label=f"{name}, p90")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({f[x] for f in figures})
    axes.set_xticks(ticks, [f"{t / 1024:.0f}k" if t >= 8192 else str(t) for t in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_locator(_locator())
    axes.set_xlabel(label)
    axes.set_ylabel("milliseconds, mean")
    _legend(axes)
    return _save(figure, path)


def _locator() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(base=10, subs=(1.0, 2.0, 5.0))


def _survivors(path: Path, ours: list[dict[str, Any]], rows: int, about: str) -> Path:
    """How many rows a state keeps after each stage, the states sorted by it."""
    figure, axes = _canvas(f"Rows that survive a stage\n{about}")
    styles = ("-", "--", ":", "-.")
    for i, f in enumerate(ours):
        for stage, counts in enumerate(f["survivors_sorted"]):
            share = np.maximum(np.array(counts, float), 0.5) / rows  # no rows at all lie on the lower edge
            at = (np.arange(len(share)) + 0.5) / len(share) * 100
            label = f"k = {f['k']}, after plane {stage}"
            axes.plot(at, share * 100, linestyle=styles[stage % 4], color=f"C{i}", label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("states, % (sorted by their survivors)")
    axes.set_ylabel("rows left, % of V")
    _legend(axes)
    return _save(figure, path)


def _bytes(path: Path, ours: list[dict[str, Any]], about: str) -> Path:
    """What is read for a state, by stage, for each k and batch."""
    figure, axes = _canvas(f"Bytes read for a state, by stage\n{about}")
    names = [f"k = {f['k']}\nbatch {f['batch']}" for f in ours]
    bottom = np.zeros(len(ours))
    for i, stage in enumerate(dict.fromkeys(name for f in ours for name in f["bytes_by_stage"])):
        part = np.array([f["bytes_by_stage"].get(stage, 0.0) * 100 for f in ours])
        axes.bar(names, part, bottom=bottom, label=stage, color=_STAGES.get(stage, _CODES[i % 5]), width=0.7)
        bottom += part
    lines = {at: f["lines"]["mean"] * 100 for at, f in enumerate(ours) if f["lines"] is not None}
    for at, total in enumerate(bottom):
        top = max(total, lines.get(at, 0.0))
        text = f"{total:.1f} %" + (f" ({lines[at]:.1f} %)" if at in lines else "")
        axes.annotate(text, (at, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    if lines:
        label = "(in whole cache lines,\nat most)"
        axes.hlines([*lines.values()], [at - 0.35 for at in lines], [at + 0.35 for at in lines], "black", label=label)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("% of a dense bfloat16 head")
    _legend(axes)
    return _save(figure, path)
