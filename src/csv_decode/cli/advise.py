"""`csv-decode advise`."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Annotated

import typer

from .common import Dtype, IndexFile, ModelName, Threads, Verbose, open_model
from .terminal import Bars, out, show_facts, show_table

__all__ = ["advise"]

_BATCHES = (1, 2, 4, 8)


def advise(
    model: ModelName,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps to measure at each batch size.")] = 16,
    index: IndexFile = None,
    threads: Threads = None,
    dtype: Dtype = "float32",
    verbose: Verbose = False,
) -> None:
    """Say whether the certified head is worth it for a model on this machine.

    Measures a few decoding steps of the stock model with its KV cache: what the layers take and what the head takes,
    and what the certified head takes on the same states. A head that cost nothing would be the ceiling.

    - `csv-decode advise demo`

    - `csv-decode advise ./my-model --threads 4`
    """
    from ..bench.steps import advice, decode_steps, energy_advice
    from ..head import SMALL_HEAD, CertifiedHead
    from ..kernels import default_threads

    count = threads or default_threads()
    opened = open_model(model, dtype, count, verbose)
    spec = opened.spec
    head = CertifiedHead(opened.index(index), spec, threads=count, engine="torch")
    measured = []
    with Bars() as bars:
        for batch in _BATCHES:
            progress = partial(bars, f"batch {batch}")
            measured.append(decode_steps(opened.model, opened.tokenizer, head, batch, steps, progress=progress))
    totals, dense = head.statistics, None
    if spec.n_rows * spec.width < SMALL_HEAD:
        dense = f"a head of {spec.n_rows:,} x {spec.width} weights fits into the cache and is served densely"
    facts = [
        ("model", f"{opened.loaded.name}, head {spec.n_rows:,} x {spec.width}, {spec.rows.kind}"),
        (
            "measured",
            f"{steps} steps at each batch size, {count} thread{'s' * (count > 1)}, medians after a few to warm up",
        ),
    ]
    show_facts(facts)
    out.print()
    show_table(
        ["batch", "step ms", "layers ms", "head ms", "head share", "ceiling", "our head ms", "step ms", "speed-up"],
        [
            [
                str(step.batch),
                f"{(step.body + step.stock_head) * 1e3:.2f}",
                f"{step.body * 1e3:.2f}",
                f"{step.stock_head * 1e3:.2f}",
                f"{step.share:.0%}",
                f"{step.ceiling:.2f}",
                f"{step.our_head * 1e3:.2f}",
                f"{(step.body + step.our_head) * 1e3:.2f}",
                f"{step.gain:.2f}",
            ]
            for step in measured
        ],
    )
    out.print()
    fell = ", ".join(f"{n} ({reason})" for reason, n in totals.fallbacks.items())
    read = f"{totals.bytes_ratio:.1%} of a bfloat16 head a state, over all batch sizes"
    ending = [("bytes read", read + (f"; fell back to the dense product: {fell}" if fell else ""))]
    if totals.energy_states:
        ending.append(("calibration", energy_advice(totals.mean_energy, shlex.quote(model))))
    ending.append(("advice", advice(measured, dense)))
    show_facts(ending)
