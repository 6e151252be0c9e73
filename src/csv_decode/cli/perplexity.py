"""`csv-decode perplexity`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .common import Dtype, ModelName, Threads, Verbose, open_model, read_text
from .terminal import Bars, show_facts

__all__ = ["perplexity"]


def perplexity(
    model: ModelName,
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help="The text, in UTF-8.", exists=True, dir_okay=False)
    ],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many tokens.", show_default="all")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens that the model reads at once.")] = 512,
    threads: Threads = None,
    dtype: Dtype = "float32",
    verbose: Verbose = False,
) -> None:
    """Perplexity of a text, with an error bar that is proved.

    The interval contains the perplexity by the real logits of the stored output layer for the states that the model's
    layers compute. Windows do not overlap, so the first tokens of each see little before them.

    - `csv-decode perplexity demo --text book.txt --tokens 20000`
    """
    from ..calibration import text_states
    from ..perplexity import perplexity as measure

    content = read_text(text)
    opened = open_model(model, dtype, threads, verbose)
    with Bars() as bars:
        states, targets = text_states(opened.model, opened.tokenizer, content, tokens, window, partial(bars, "reading"))
        found = measure(opened.spec, states, targets, progress=partial(bars, "scoring"))
    show_facts(
        [
            ("model", f"{opened.loaded.name}, head {opened.spec.n_rows:,} x {opened.spec.width}"),
            ("text", f"{text}, {found.tokens:,} tokens in windows of {window}"),
            ("perplexity", f"{found.value:.10g}"),
            ("interval", f"[{found.low:.15g}, {found.high:.15g}], relative width {found.relative_width:.1e}"),
        ]
    )
