"""`csv-decode build`."""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calibration import DEFAULT_STATES
from ..index.build import BITS, build_index
from .common import Dtype, ModelName, Threads, Verbose, build_now, open_model, read_text
from .terminal import show_facts, size

__all__ = ["build"]

_BOUNDS = ("shadow", "centroid", "centroid,shadow")


#: What is not given is left to `build_index`; the help shows its defaults.
_DEFAULT = {name: parameter.default for name, parameter in inspect.signature(build_index).parameters.items()}


def _bits(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 2.2,2.0") from None


def build(
    model: ModelName,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write the index.", show_default="the cache"),
    ] = None,
    bounds: Annotated[str, typer.Option(help="shadow, centroid (the paper's), or the cascade centroid,shadow.")] = (
        "shadow"
    ),
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXTFILE",
            exists=True,
            dir_okay=False,
            help="A text like those to be decoded, to calibrate on.",
            show_default="text that the model writes itself",
        ),
    ] = None,
    states: Annotated[int, typer.Option(min=1, help="Hidden states to calibrate on.")] = DEFAULT_STATES,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Mean bits a weight of each plane of the shadow bound.",
            show_default=",".join(map(str, BITS["deterministic"])),
        ),
    ] = None,
    ridge: Annotated[
        float | None,
        typer.Option(
            help="Added to the spectrum of the states, in units of its mean.", show_default=str(_DEFAULT["ridge"])
        ),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(min=1, help="Clusters of the centroid bound.", show_default="0.015 a row")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Rounds of k-means.", show_default=str(_DEFAULT["iterations"]))
    ] = None,
    spherical: Annotated[bool, typer.Option("--spherical", help="Cluster by direction.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of rotations, samples and k-means.", show_default="a fresh one")
    ] = None,
    threads: Threads = None,
    dtype: Dtype = "float32",
    verbose: Verbose = False,
) -> None:
    """Build the index of a model's output layer.

    Without -o it goes to the cache folder, and the other commands use it from then on: they take the index built last
    for a model. The answers are exact with any index; a better calibration makes them come sooner.

    - `csv-decode build demo`

    - `csv-decode build ./my-model --calibration chats.txt`

    - `csv-decode build model.gguf -o model.index.safetensors --bits 2.2,2.0 --seed 1`
    """
    if bounds not in _BOUNDS:
        raise typer.BadParameter(f"{bounds!r} is not one of {' | '.join(_BOUNDS)}", param_hint="--bounds")
    options: dict[str, Any] = {
        "bits": None if bits is None else _bits(bits),
        "ridge": ridge,
        "clusters": clusters,
        "iterations": iterations,
        "spherical": spherical or None,
        "seed": seed,
        "threads": threads,
    }
    settings = {name: value for name, value in options.items() if value is not None}
    text = None if calibration is None else read_text(calibration)
    if output is not None and output.is_dir():
        raise typer.BadParameter(f"{output} is a folder, expected a file name", param_hint="--output")
    opened = open_model(model, dtype, threads, verbose)
    started = time.perf_counter()
    index = build_now(opened, bounds.split(","), text, states, settings, rebuild=True, to=output)
    seconds = time.perf_counter() - started
    path = output
    if path is None:
        from ..cache import newest_index

        newest = newest_index(opened.spec, of_all=True)
        assert newest is not None
        path = newest[0]
    spec, stored = opened.spec, os.path.getsize(path)
    facts = [
        ("model", opened.loaded.name),
        ("index", str(path)),
        ("size", f"{size(stored)}, {stored / spec.bytes_dense:.1%} of the head in bfloat16 ({size(spec.bytes_dense)})"),
        ("head", f"{spec.n_rows:,} rows, width {spec.width}, {spec.rows.kind}"),
        ("bounds", ", ".join(index.bounds)),
    ]
    if index.centroid is not None:
        facts.append(("clusters", f"{len(index.centroid.radius):,}"))
    if index.shadow is not None:
        planes = " + ".join(f"{plane:g}" for plane in index.settings["bits"])
        facts.append(("bits", f"{planes} a weight"))
        facts.append(("calibration", f"{index.settings['calibration_states']:,} hidden states"))
    facts += [("seed", str(index.settings["seed"])), ("time", f"{seconds:.1f} s"), ("weights", index.fingerprint)]
    show_facts(facts)
