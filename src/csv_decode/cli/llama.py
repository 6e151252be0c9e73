"""`csv-decode generate` for .gguf files, run by llama.cpp."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import typer

from ..grammar import Grammar
from .terminal import Bars, err, note, problem, show_facts, size, working

__all__ = ["by_llama", "gguf_file", "read_grammar", "speculation", "write"]


def by_llama(model: str, engine: str) -> bool:
    """Whether llama.cpp is to run the model, else transformers."""
    if engine not in ("auto", "llama.cpp", "transformers"):
        raise typer.BadParameter(f"--engine is {engine!r}, expected auto, llama.cpp or transformers")
    is_file = model == "demo" or Path(model).suffix.lower() == ".gguf"
    if engine == "llama.cpp" and not is_file:
        raise typer.BadParameter(f"llama.cpp runs .gguf files, and {model} is none; leave --engine out")
    if engine == "auto":
        return is_file and importlib.util.find_spec("llama_cpp") is not None
    return engine == "llama.cpp"


def gguf_file(model: str, engine: str) -> Path | None:
    """The .gguf file that `csv-decode generate` is to run by llama.cpp, or None. (The demo is about transformers.)"""
    if not by_llama(model, engine) or (model == "demo" and engine == "auto"):
        return None
    if model == "demo":
        from ..models import demo_file

        return demo_file()
    return Path(model)


def speculation(asked: str) -> bool:
    """What --speculate says."""
    if asked not in ("auto", "off"):
        raise typer.BadParameter(f"--speculate is {asked!r}, expected auto or off")
    return asked == "auto"


def read_grammar(grammar: Path | None, json_schema: Path | None) -> Grammar | None:
    """What --grammar or --json-schema names."""
    if grammar is not None and json_schema is not None:
        raise typer.BadParameter("--grammar and --json-schema each say what the text is to be; give one of them")
    if grammar is not None:
        return Grammar.gbnf(grammar.read_text(encoding="utf-8"))
    return None if json_schema is None else Grammar.json_schema(json_schema.read_text(encoding="utf-8"))


def write(
    path: Path,
    prompts: list[str],
    tokens: int,
    chat: bool,
    options: dict[str, Any],
    seed: int | None,
    compare: bool,
    index: Path | None,
    threads: int | None,
    verbose: bool,
) -> None:
    """Generates from each prompt, streams the text to stdout, and reports to stderr. With `compare`, stock llama.cpp
    writes from the same prompts in turns."""
    from ..index.storage import load_index
    from ..llama import LlamaModel
    from ..llama.stock import Stock

    with working(f"loading {path.name}"), Bars() as bars:
        given = None if index is None else load_index(index)
        model = LlamaModel(path, given, threads=threads, progress=bars, verbose=verbose)
    warm = (options.get("temperature", 0.0), options.get("top_p", 1.0))
    stock = Stock(path, model.context, model.threads, *warm) if compare else None
    ids = [
        model.chat([{"role": "user", "content": text}]) if chat else model.vocabulary.encode(text) for text in prompts
    ]
    mine = theirs = 0.0
    count, certified, differ, drafted, accepted = 0, 0, 0, 0, 0
    for i, (text, prompt) in enumerate(zip(prompts, ids, strict=True)):
        if i:
            sys.stdout.write("\n")
        if not chat:
            sys.stdout.write(text)
        run = model.generate(prompt, tokens, seed=seed, **options)
        started = time.perf_counter()
        for step in run:
            certified += step.certificate.certified
            sys.stdout.write(step.text)
            sys.stdout.flush()
        mine += time.perf_counter() - started
        count += len(run.ids)
        drafted, accepted = drafted + run.drafted, accepted + run.accepted
        sys.stdout.write("\n")
        if stock is not None:
            started = time.perf_counter()
            other = list(stock.write(prompt, tokens))
            theirs += time.perf_counter() - started
            if other != run.ids and not warm[0]:
                differ += 1
                at = next((t for t, (a, b) in enumerate(zip(run.ids, other, strict=False)) if a != b), len(other))
                note(
                    f"prompt {i + 1}: stock llama.cpp goes another way from new token {at + 1} on. It rounds the state "
                    "in front of a quantised output layer; ours is the exact one of the state."
                )
    total = model.head.statistics
    facts = [
        ("tokens", f"{count} in {mine:.1f} s, {count / mine:.1f} tokens/s, prompts included"),
        ("certified", f"{certified} of {count} steps"),
        (
            "bytes read",
            f"{size(total.bytes_read / max(total.states, 1))} a step, {total.bytes_ratio:.1%} of a bfloat16 head",
        ),
    ]
    if drafted:
        facts.append(("speculation", f"{accepted} of {drafted} drafted tokens were right"))
    if stock is not None:
        facts.append(("stock speed", f"{count / theirs:.1f} tokens/s, so this is {theirs / mine:.2f} times that"))
        if not differ and not warm[0]:
            facts.append(("stock tokens", "the same"))
    note("")
    show_facts(facts, err)
    model.close()
    if certified < count:
        problem("some steps were not certified")
        raise typer.Exit(1)
