"""`csv-decode verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ..exact import stock_gap
from .common import Dtype, IndexFile, ModelName, Opened, Threads, Verbose, open_model, read_text
from .terminal import Bars, problem, show_facts, size

if TYPE_CHECKING:
    from ..certificate import TopK
    from ..head import CertifiedHead
    from ..spec import HeadSpec

__all__ = ["verify"]

_BATCH = 16
#: Not the calibration's: the index is checked on states that it was not built on.
_SEED = 1


def verify(
    model: ModelName,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A text for the model to read.",
            show_default="text that the model writes itself",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Positions to check.")] = 200,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Check the k best tokens of each position.")] = 1,
    sample_size: Annotated[int, typer.Option(min=0, help="Positions to check in exact arithmetic as well.")] = 16,
    index: IndexFile = None,
    threads: Threads = None,
    dtype: Dtype = "float32",
    verbose: Verbose = False,
) -> None:
    """Check certified decoding against the model's own head, position by position.

    Runs the model over a text and finds the k best tokens of each position twice: with the certified head, and with the
    stock one. Where the two differ, and on a sample of the others, an independent checker decides in exact arithmetic:
    two logits closer than the stock kernel's rounding may come out in the wrong order there, never here. The exit
    status is 1 if any certified answer is wrong.

    - `csv-decode verify demo`

    - `csv-decode verify ./my-model --text book.txt --tokens 1000 --k 10`
    """
    from ..head import CertifiedHead

    content = None if text is None else read_text(text)
    opened = open_model(model, dtype, threads, verbose)
    if k > opened.spec.n_rows:
        raise typer.BadParameter(f"k is {k}, but the head has {opened.spec.n_rows} rows", param_hint="--k")
    head = CertifiedHead(opened.index(index), opened.spec, threads=threads)
    with Bars() as bars:
        states = _states(opened, content, tokens, bars)
        tops, stock = _decode(opened, head, states, k, bars)
        mine = np.concatenate([np.asarray(top.ids) for top in tops])
        differ = np.nonzero((mine != stock).any(axis=1))[0]
        sampled = np.linspace(0, len(states) - 1, min(sample_size, len(states))).astype(int)
        chosen = np.union1d(differ, sampled)
        comparisons, worst, wrong = _check(opened.spec, tops, states, chosen, bars)
        unproved = len(wrong)
        wrong += _beyond_rounding(opened.spec, states, mine, stock, np.setdiff1d(differ, [at for at, _ in wrong]))
    totals = head.statistics
    certified = sum(int(top.certificates.certified.sum()) for top in tops)
    rows = np.concatenate([top.certificates.rows_scored for top in tops]).mean()
    read = np.concatenate([top.certificates.bytes_read for top in tops]).mean()
    fallbacks = ", ".join(f"{count} ({reason})" for reason, count in totals.fallbacks.items())
    facts = [
        (
            "positions",
            f"{len(states)}{'' if len(states) == tokens else ', all that the text has'}, the {k} best of each",
        ),
        ("certified", f"{certified} of {len(states)}" + (f"; fell back: {fallbacks}" if fallbacks else "")),
        ("rows scored", f"{rows:,.0f} of {opened.spec.n_rows:,} on average ({rows / opened.spec.n_rows:.2%})"),
        (
            "bytes read",
            f"{size(read)} a state in batches of {_BATCH}, {read / opened.spec.bytes_dense:.1%} of a bfloat16 head",
        ),
        ("stock head", f"the same ids at {len(states) - len(differ)} of {len(states)} positions"),
        (
            "exact check",
            f"{len(chosen) - unproved} of {len(chosen)} positions proved against all rows; "
            f"{comparisons} close pairs took exact sums; largest error of a logit {worst:.1g}",
        ),
    ]
    if len(differ) > len(wrong):
        facts.append(
            ("rounding", f"{len(differ) - len(wrong)} differences are the stock head's own rounding (see exact check)")
        )
    facts.append(("result", f"{len(wrong)} wrong answers" if wrong else "every certified answer is right"))
    show_facts(facts)
    for position, message in wrong[:5]:
        problem(f"position {position}: {message}")
    if wrong:
        raise typer.Exit(1)


def _states(opened: Opened, text: str | None, count: int, bars: Bars) -> NDArray[np.float32]:
    from functools import partial

    from ..calibration import collect_states

    progress = partial(bars, "reading" if text is not None else "writing")
    return collect_states(opened.model, opened.tokenizer, text, count, seed=_SEED, progress=progress)


def _decode(
    opened: Opened, head: CertifiedHead, states: NDArray[np.float32], k: int, bars: Bars
) -> tuple[list[TopK], NDArray[np.int64]]:
    """The k best of every state: certified, and by the stock head, which computes in its own type."""
    import torch

    layer: Any = opened.model.get_output_embeddings()
    tops, stock = [], []
    for first in range(0, len(states), _BATCH):
        batch = states[first : first + _BATCH]
        tops.append(head.top_k(batch, k))
        with torch.no_grad():
            logits = layer(torch.from_numpy(batch).to(layer.weight.dtype)).float()[:, : opened.spec.n_rows]
        stock.append(_best(logits.numpy(), k))
        bars("decoding", first + len(batch), len(states))
    return tops, np.concatenate(stock)


def _best(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the k largest of each row: larger logit first, then the smaller id."""
    out = np.empty((len(logits), k), np.int64)
    for b, row in enumerate(logits):
        bar = np.partition(row, len(row) - k)[len(row) - k]
        near = np.nonzero(row >= bar)[0]
        out[b] = near[np.lexsort((near, -row[near]))][:k]
    return out


def _one(top: TopK, b: int) -> TopK:
    """State b of a result, alone."""
    from dataclasses import replace

    one, columns = slice(b, b + 1), top.certificates
    certificates = replace(
        columns,
        fallback=columns.fallback[one],
        **{
            name: getattr(columns, name)[one]
            for name in ("certified", "threshold", "max_unopened", "rows_scored", "survivors", "bytes_read")
        },
    )
    return replace(
        top, ids=top.ids[one], logits=top.logits[one], logit_error=top.logit_error[one], certificates=certificates
    )


def _check(
    spec: HeadSpec, tops: list[TopK], states: NDArray[np.float32], chosen: NDArray[np.int64], bars: Bars
) -> tuple[int, float, list[tuple[int, str]]]:
    """Exact checks of the chosen positions: pairs decided by exact sums, worst logit error, and what is wrong."""
    from ..verify import VerificationError, verify

    comparisons, worst, wrong = 0, 0.0, []
    for done, position in enumerate(chosen.tolist()):
        try:
            top = _one(tops[position // _BATCH], position % _BATCH)
            report = verify(top, states[position : position + 1], spec)
        except VerificationError as error:
            wrong.append((position, str(error)))
        else:
            comparisons += report.exact_comparisons
            worst = max(worst, report.worst_logit_error)
        bars("checking", done + 1, len(chosen))
    return comparisons, worst, wrong


def _beyond_rounding(
    spec: HeadSpec,
    states: NDArray[np.float32],
    mine: NDArray[np.int64],
    stock: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> list[tuple[int, str]]:
    """Positions where the stock head differs by more than its rounding explains. The certified ids are right for the
    head as it was indexed, so that head is not the one the model uses."""
    found = []
    for at in positions.tolist():
        for a, b in zip(mine[at].tolist(), stock[at].tolist(), strict=True):
            gap, rounding = stock_gap(spec, states[at], a, b)
            if abs(gap) > rounding:
                text = f"the stock head has id {b} where {a} is right; their exact scores are {gap:.3g} apart"
                found.append((at, f"{text}, and its rounding explains {rounding:.2g}"))
                break
    return found
