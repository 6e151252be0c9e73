"""Greedy text through both heads: 64 tokens of each prompt, stock transformers in float32 against the certified head.

    python benchmarks/greedy.py demo
    python benchmarks/greedy.py smollm2 --tokens 64

Where the two differ, the state at the first difference is scored exactly: the difference is a tie within the rounding
of the stock kernel when the stock token's exact logit is closer to the best one than float32 can tell, and an error
otherwise (exit status 1).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import PROMPTS, load
from rich.console import Console
from rich.table import Table

import csv_decode as cd
from csv_decode.exact import stock_gap

console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, smollm2, a .gguf file or a Hugging Face folder")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    import torch

    loaded = load(args.model)
    model, tokenizer = loaded.model, loaded.tokenizer

    def generate(text: str) -> tuple[list[int], float]:
        inputs = tokenizer(text, return_tensors="pt")
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=args.tokens)
        return out[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - started

    stock = [generate(p) for p in PROMPTS]
    cd.accelerate(model, tokenizer=tokenizer)
    ours = [generate(p) for p in PROMPTS]
    state = model.csv_decode
    spec = state.head.spec
    table = Table("prompt", "tokens", "first difference", "verdict", title=loaded.name)
    errors = 0
    for prompt, (a, _), (b, _) in zip(PROMPTS, stock, ours, strict=True):
        where = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), None)
        verdict = "equal" if a == b else judge(model, tokenizer, spec, prompt, a, b, where)
        errors += verdict.startswith("ERROR")
        table.add_row(prompt[:40], str(len(b)), str(where) if where is not None else "-", verdict)
    console.print(table)
    tokens = sum(len(b) for b, _ in ours)
    console.print(
        f"{tokens} tokens, {errors} errors; certified steps {state.certified_steps}, dense steps {state.dense_steps}; "
        f"bytes {state.statistics.bytes_ratio:.3f} of dense bf16; tokens/s stock "
        f"{sum(len(a) for a, _ in stock) / sum(t for _, t in stock):.1f}, certified "
        f"{tokens / sum(t for _, t in ours):.1f}"
    )
    return 1 if errors else 0


def judge(
    model: Any, tokenizer: Any, spec: cd.HeadSpec, text: str, a: list[int], b: list[int], where: int | None
) -> str:
    """Scores the state at the first difference exactly."""
    import torch

    if where is None:
        return "ERROR: one text is longer"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.tensor([b[:where]], dtype=ids.dtype)], 1)
    with torch.no_grad():
        h = model.get_decoder()(ids).last_hidden_state[0, -1].numpy()
    top = cd.CertifiedHead(None, spec).top_k(h, 1)
    cd.verify(top, h, spec)
    if top.ids[0, 0] != b[where]:
        return f"ERROR: the best token is {top.ids[0, 0]}, not {b[where]}"
    gap, allowed = stock_gap(spec, h, b[where], a[where])
    if gap <= allowed:
        return f"tie: the exact logits are {gap:.2g} apart, float32 may be off by {allowed:.2g}"
    return f"ERROR: the exact logits are {gap:.2g} apart, float32 may be off by {allowed:.2g}"


if __name__ == "__main__":
    raise SystemExit(main())
