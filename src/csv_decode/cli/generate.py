"""`csv-decode generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ..exact import stock_gap
from .common import Dtype, IndexFile, ModelName, Opened, Threads, Verbose, open_model
from .terminal import err, note, problem, show_facts, size

__all__ = ["generate"]

F32 = NDArray[np.float32]
_TIMED = 5  # states on which the stock head is timed


def generate(
    model: ModelName,
    prompt: Annotated[
        list[str], typer.Option("-p", "--prompt", metavar="TEXT", help="What to go on from; repeatable.")
    ],
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="New tokens at most, for each prompt.")] = 64,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user's turn: apply the chat template.")
    ] = (False),
    sample: Annotated[bool, typer.Option("--sample", help="Sample; otherwise greedy.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.", show_default="the model's")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0: no limit.", show_default="the model's")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus.", show_default="the model's")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the best.", show_default="the model's")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling.", show_default="a fresh one")] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Use the model's own head throughout.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the stock model too, and compare tokens and speed.")
    ] = (False),
    index: IndexFile = None,
    threads: Threads = None,
    dtype: Dtype = "float32",
    engine: Annotated[
        str,
        typer.Option(
            help="auto (a .gguf file by llama.cpp where llama-cpp-python is installed), llama.cpp or transformers."
        ),
    ] = "auto",
    speculate: Annotated[
        str,
        typer.Option(help="auto: with llama.cpp, try several tokens at once where a text repeats itself; or off."),
    ] = "auto",
    grammar: Annotated[
        Path | None,
        typer.Option(help="With llama.cpp: a file with a grammar (GBNF, or Lark's syntax) that the text obeys."),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="With llama.cpp: a file with a JSON schema that the text obeys.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Generate text, each token with a proof, and report what it took.

    The text goes to stdout, the report to stderr. With --compare the exit status is 1 if the stock model writes other
    tokens, unless their logits are so close that only the rounding of its own kernel told them apart.

    - `csv-decode generate demo -p "The sky is" --compare`

    - `csv-decode generate ./chat-model --chat -p "Why is the sky blue?" -n 200`

    - `csv-decode generate demo -p "Once upon a time" --sample --temperature 0.8 --top-k 40 --seed 1`

    - `csv-decode generate model.gguf -p "Once upon a time" --compare`

    - `csv-decode generate model.gguf -p "A person, as JSON:" --json-schema person.json`
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if given and not sample:
        raise typer.BadParameter(f"{', '.join(given)} go with --sample; without it decoding is greedy")
    if dense and (compare or index is not None):
        raise typer.BadParameter("--dense uses no index, so it goes with neither --compare nor --index")
    from .llama import gguf_file, read_grammar, speculation, write

    file = gguf_file(model, engine)
    if file is not None:
        if dense or dtype != "float32":
            raise typer.BadParameter("--dense and --dtype are about transformers; add --engine transformers")
        if sample:
            given = {"temperature": 1.0, **given}
        given["speculate"] = speculation(speculate)
        given["grammar"] = read_grammar(grammar, json_schema)
        write(file, prompt, tokens, chat, given, seed, compare, index, threads, verbose)
        return
    if grammar is not None or json_schema is not None:
        raise typer.BadParameter("--grammar and --json-schema go with .gguf files that llama.cpp runs")
    opened = open_model(model, dtype, threads, verbose)
    if opened.tokenizer is None:
        raise ValueError(f"{opened.loaded.name} has no tokenizer, so it can neither read a prompt nor show its text")
    prompts = [_encode(opened, text, chat) for text in prompt]
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": sample, **given}
    if seed is None:
        seed = int(np.random.default_rng().integers(2**31))
    if dense:
        run = _run(opened, prompts, prompt, settings, seed, chat)
        note("")
        show_facts([("tokens", f"{run.tokens}, all by the stock head"), ("speed", f"{run.speed:.1f} tokens/s")], err)
        return
    from ..integrations.transformers import accelerate, restore

    usable = opened.spec.rows.kind == "float32"  # `accelerate` says what becomes of other heads
    accelerate(opened.model, index=opened.index(index) if usable else None, threads=threads)
    run = _run(opened, prompts, prompt, settings, seed, chat)
    state = opened.model.csv_decode
    restore(opened.model)
    facts = [*_certified(state, run), *_head_times(opened, state, run)]
    stock = _run(opened, prompts, None, settings, seed, chat) if compare else None
    if stock is not None:
        facts.append(
            ("stock speed", f"{stock.speed:.1f} tokens/s, so this is {run.speed / stock.speed:.2f} times that")
        )
    if sample:
        facts.append(("seed", str(seed)))
    note("")
    show_facts(facts, err)
    if stock is not None and not _same(opened, run, stock, sample):
        raise typer.Exit(1)


class _Result:
    """New tokens of each prompt, the states that chose them, and the time it took."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.states: list[F32] = []
        self.seconds = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def _encode(opened: Opened, text: str, chat: bool) -> Any:
    if not chat:
        encoded = opened.tokenizer(text, return_tensors="pt")
    elif opened.tokenizer.chat_template is None:
        raise ValueError(f"{opened.loaded.name} has no chat template; leave --chat out and give it a text to continue")
    else:
        encoded = opened.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    if not encoded["input_ids"].shape[1]:
        raise ValueError(f"the prompt {text!r} has no token; give it at least one word")
    return encoded


def _run(
    opened: Opened, prompts: list[Any], show: list[str] | None, settings: dict[str, Any], seed: int, chat: bool
) -> _Result:
    """Generates from each prompt; with `show`, streams the text to stdout as it comes."""
    import torch
    from transformers import TextStreamer

    model, tokenizer = opened.model, opened.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    result = _Result()
    for i, encoded in enumerate(prompts):
        streamer = None
        if show is not None:
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            if i:
                sys.stdout.write("\n")
            if not chat:
                sys.stdout.write(show[i])
                sys.stdout.flush()
        torch.manual_seed(seed + i)
        length = encoded["input_ids"].shape[1]
        with _states(model) as states:
            started = time.perf_counter()
            ids = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                streamer=streamer,
                pad_token_id=pad,
                **settings,
            )
            result.seconds += time.perf_counter() - started
        result.ids.append(ids[0, length:].tolist())
        result.states.append(np.concatenate(states))
    return result


@contextmanager
def _states(model: Any) -> Iterator[list[F32]]:
    """Collects what enters the output layer, one state a step."""
    caught: list[F32] = []

    def catch(module: Any, args: Any) -> None:
        caught.append(args[0][0, -1:].detach().float().numpy().copy())

    handle = model.get_output_embeddings().register_forward_pre_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def _certified(state: Any, run: _Result) -> list[tuple[str, str]]:
    """What the head did, from its own counts."""
    totals, head = state.statistics, state.head
    steps = state.certified_steps + sum(state.dense_steps.values())
    facts = [
        ("tokens", f"{run.tokens} in {run.seconds:.1f} s, {run.speed:.1f} tokens/s"),
        ("certified", f"{state.certified_steps} of {steps} steps"),
    ]
    if state.dense_steps:
        facts.append(("dense steps", ", ".join(f"{n} ({reason})" for reason, n in state.dense_steps.items())))
    if totals.states:
        rows = totals.rows_scored / totals.states
        mean = totals.bytes_read / totals.states
        facts += [
            ("rows scored", f"{rows:,.0f} of {head.spec.n_rows:,} on average ({rows / head.spec.n_rows:.2%})"),
            ("bytes read", f"{size(mean)} a step, {totals.bytes_ratio:.1%} of a dense bfloat16 head"),
        ]
        if totals.fallbacks:
            reasons = ", ".join(f"{n} ({reason})" for reason, n in totals.fallbacks.items())
            facts.append(("fell back", f"{reasons}: every row was scored, which is proof as well"))
    return facts


def _head_times(opened: Opened, state: Any, run: _Result) -> list[tuple[str, str]]:
    """Time in the head for a step, and what the stock head takes on some of the same states."""
    import torch

    if not state.certified_steps:
        return []
    layer = opened.model.get_output_embeddings()
    states = np.concatenate(run.states)
    chosen = states[np.linspace(0, len(states) - 1, _TIMED).astype(int)]
    times = []
    with torch.no_grad():
        for h in torch.from_numpy(chosen).to(layer.weight.dtype):
            started = time.perf_counter()
            layer(h[None, None])
            times.append(time.perf_counter() - started)
    mine, theirs = state.seconds_certified / state.certified_steps * 1e3, float(np.median(times)) * 1e3
    return [("head time", f"{mine:.1f} ms a step; the stock head takes {theirs:.1f} ms")]


def _same(opened: Opened, run: _Result, stock: _Result, sample: bool) -> bool:
    """Compares tokens. Up to the first difference both runs have met the same states."""
    same = True
    for i, (mine, theirs) in enumerate(zip(run.ids, stock.ids, strict=True)):
        if mine == theirs:
            continue
        at = next(
            (t for t, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        where = f"prompt {i + 1}, new token {at + 1}"
        if at >= min(len(mine), len(theirs)) or sample:
            same = False
            problem(f"the stock model goes another way from {where} on")
            continue
        gap, rounding = stock_gap(opened.spec, run.states[i][at], mine[at], theirs[at])
        words = f"{opened.tokenizer.decode([mine[at]])!r} and {opened.tokenizer.decode([theirs[at]])!r}"
        if 0 <= gap <= rounding:
            note(
                f"{where}: the exact scores of {words} are {gap:.2g} apart, and the rounding of the stock head "
                f"(up to {rounding:.2g}) takes the lower one. Both go their own way from there."
            )
        else:
            same = False
            problem(f"{where}: the stock model takes another token, {words}, scores {gap:.3g} apart")
    if same and run.ids == stock.ids:
        note(f"The stock model writes the same {stock.tokens} tokens.")
    return same
