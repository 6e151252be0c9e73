"""Every decoding mode on a real head, against dense references in float64: how many answers differ, how far the bounds
are from what they bound, and what each mode reads and takes beside greedy.

    python benchmarks/modes.py demo|smollm2 [--only race,filters,softmax,perplexity,chi] [--states N] ...

race        5,000 draws at T = 0.3, 0.7, 1, 1.5 against the dense race with the same key
filters     top-k, top-p and min-p: is every id within 50 ranks of the edge in or out as transformers' warpers say
softmax     total variation against its bound, for epsilon = 0.05, 0.01, 0.001
perplexity  of the first 20,000 tokens of a text (--text), its interval against another float64 route
chi         200,000 draws of four states against the softmax
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import decode_states, load
from rich.console import Console
from rich.progress import track
from rich.table import Table

import csv_decode as cd
from csv_decode import _native, modes
from csv_decode.cache import get_index
from csv_decode.calibration import calibration_key, collect_states, text_states
from csv_decode.integrations.transformers import head_spec

console = Console()


class Dense:
    """Float64 logits of blocks of states, and the noise of every token."""

    def __init__(self, spec: cd.HeadSpec, states: np.ndarray) -> None:
        self.spec, self.states = spec, states
        self.ids = np.arange(spec.n_rows)

    def blocks(self, size: int = 16) -> Iterator[tuple[int, np.ndarray]]:
        for first in range(0, len(self.states), size):
            h = self.states[first : first + size].astype(np.float64)
            out = np.empty((len(h), self.spec.n_rows))
            for row in range(0, self.spec.n_rows, 8192):
                part = slice(row, min(row + 8192, self.spec.n_rows))
                out[:, part] = h @ self.spec.rows.float32(part).astype(np.float64).T
            yield first, out

    def noise(self, seed: int, position: int) -> np.ndarray:
        return np.asarray(_native.gumbel(seed, 0, position, self.ids))


def spread(x: Any) -> dict[str, float]:
    x = np.asarray(x, float)
    return {"mean": float(x.mean()), **{f"p{q}": float(np.quantile(x, q / 100)) for q in (50, 90, 99)}}


def cost(calls: list[tuple[float, cd.Certificates]]) -> dict[str, Any]:
    read = [c.bytes_read[0] / c.bytes_dense for _, c in calls]
    return {
        "bytes": spread(read),
        "ms": spread([s * 1e3 for s, _ in calls]),
        "fallback": float(np.mean([c.fallback[0] is not None for _, c in calls])),
        "certified": float(np.mean([c.certified[0] for _, c in calls])),
    }


def timed(call: Callable[[], Any], calls: list[tuple[float, cd.Certificates]]) -> Any:
    started = time.perf_counter()
    result = call()
    calls.append((time.perf_counter() - started, result.certificates))
    return result


def race(head: cd.CertifiedHead, dense: Dense, pairs: int) -> dict[str, Any]:
    """Draws and greedy steps alternate, so that their times are of the same moments."""
    temperatures, wrong, done = (0.3, 0.7, 1.0, 1.5), 0, 0
    calls: dict[float, list[Any]] = {t: [] for t in (0.0, *temperatures)}
    each = -(-pairs // len(dense.states))
    for first, logits in track(dense.blocks(), "race", total=-(-len(dense.states) // 16), console=console):
        for b, row in enumerate(logits):
            h = dense.states[first + b]
            for i in range(each):
                seed, position = first + b, i
                t = temperatures[(first + b + i) % 4]
                timed(lambda h=h: head.top_k(h), calls[0.0])
                drawn = timed(lambda h=h, t=t, s=seed, p=position: head.sample(h, t, seed=s, position=p), calls[t])
                wrong += int(drawn.ids[0] != (row + t * dense.noise(seed, position)).argmax())
                done += 1
    return {"pairs": done, "wrong": wrong, **{f"T={t}" if t else "greedy": cost(c) for t, c in calls.items()}}


FILTERS = [
    (0, 0.9, 0.0),
    (0, 0.95, 0.0),
    (0, 1.0, 0.05),
    (50, 1.0, 0.0),
    (50, 0.9, 0.0),
    (0, 0.95, 0.05),
    (50, 0.9, 0.05),
]


def warped(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which ids transformers' own warpers leave, on float64 logits."""
    import torch
    from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = torch.from_numpy(logits)[None]
    for warper in (
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ):
        scores = warper(None, scores)
    return np.isfinite(scores[0].numpy())


def filters(head: cd.CertifiedHead, dense: Dense) -> dict[str, Any]:
    """Membership near the edge for a share of the states each; and draws, for what they cost."""
    out: dict[str, Any] = {"wrong": 0, "ids": 0, "states": 0}
    calls: dict[str, list[Any]] = {"greedy": [], **{str(f): [] for f in FILTERS}}
    for first, logits in track(dense.blocks(), "filters", total=-(-len(dense.states) // 16), console=console):
        for b, row in enumerate(logits):
            h = dense.states[first + b]
            setting = FILTERS[(first + b) % len(FILTERS)]
            top_k, top_p, min_p = setting
            timed(lambda h=h: head.top_k(h), calls["greedy"])
            drawn = timed(lambda h=h, s=setting, f=first: head.sample(h, 1.0, *s, seed=f), calls[str(setting)])
            keep = warped(row, *setting)
            race = np.where(keep, row + dense.noise(first, 0), -np.inf)
            out["wrong"] += int(race.argmax() != drawn.ids[0])
            out["states"] += 1
            if top_k:
                continue  # the edge of top-k is that of its own exact set, which the draw has used
            order = np.argsort(-row, kind="stable")
            edge = int(keep.sum())
            near = order[max(0, edge - 50) : edge + 50]
            scan = head._scan_of(h, None)
            noise = modes.Noise(1.0, head.spec.scale, 0, 0, 0)
            scan.score(0, near)
            logs = modes.min_p_logs(np.array([min_p]))
            for token in near.tolist():
                inside = modes.is_member(scan, 0, noise, token, top_p, min_p, float(logs[0]))
                out["wrong"] += int(inside != keep[token])
                out["ids"] += 1
    return out | {name: cost(c) for name, c in calls.items()}


def softmax(head: cd.CertifiedHead, dense: Dense) -> dict[str, Any]:
    out: dict[str, Any] = {"above the bound": 0, "bound above epsilon": 0}
    calls: dict[float, list[Any]] = {e: [] for e in (0.05, 0.01, 0.001)}
    distance: dict[float, list[float]] = {e: [] for e in calls}
    for first, logits in track(dense.blocks(), "softmax", total=-(-len(dense.states) // 16), console=console):
        for b, row in enumerate(logits):
            p = np.exp(row - row.max())
            p /= p.sum()
            for epsilon in calls:
                soft = timed(lambda h=dense.states[first + b], e=epsilon: head.softmax(h, e), calls[epsilon])
                q = np.zeros(len(p))
                q[soft.ids[0]] = soft.probabilities[0]
                distance[epsilon].append(float(np.abs(p - q).sum()) / 2)
                out["above the bound"] += int(distance[epsilon][-1] > soft.tv_bound[0])
                out["bound above epsilon"] += int(soft.tv_bound[0] > epsilon)
    return out | {f"epsilon={e}": cost(c) | {"distance": spread(distance[e])} for e, c in calls.items()}


def perplexity(loaded: Any, spec: cd.HeadSpec, text: str, tokens: int) -> dict[str, Any]:
    """The interval, against torch's log-sum-exp of float64 products taken the other way round."""
    import torch

    h, targets = text_states(loaded.model, loaded.tokenizer, text[: tokens * 12], tokens)
    started = time.perf_counter()
    found = cd.perplexity(spec, h, targets)
    seconds = time.perf_counter() - started
    total = 0.0
    for first in track(range(0, len(h), 64), "reference", console=console):
        x = torch.from_numpy(h[first : first + 64]).double()
        parts = [
            torch.from_numpy(spec.rows.float32(slice(r, min(r + 16384, spec.n_rows)))).double() @ x.T
            for r in range(0, spec.n_rows, 16384)
        ]
        logits = torch.cat(parts)
        chosen = logits[torch.from_numpy(targets[first : first + 64]), torch.arange(len(x))]
        total += float((chosen - torch.logsumexp(logits, 0)).sum())
    expected = float(np.exp(-total / len(h)))
    return {
        "tokens": found.tokens,
        "low": found.low,
        "high": found.high,
        "relative width": found.relative_width,
        "float64": expected,
        "wrong": int(not found.low <= expected <= found.high),
        "seconds": seconds,
    }


def chi(head: cd.CertifiedHead, dense: Dense, draws: int) -> dict[str, Any]:
    """Pearson's statistic, its degrees of freedom, and how many standard deviations it is from its mean."""
    out: dict[str, Any] = {"draws": draws, "states": []}
    for first, logits in dense.blocks(4):
        if first:
            break
        for b, row in enumerate(logits):
            p = np.exp(row - row.max())
            p /= p.sum()
            each, counts = draws // 4, np.zeros(len(p))
            batch = np.repeat(dense.states[b][None], 50, 0)
            for i in track(range(each // 50), f"chi {b}", console=console):
                np.add.at(counts, head.sample(batch, seed=b, position=i).ids, 1)
            expected = each * p
            common = expected >= 5
            seen = np.append(counts[common], counts[~common].sum())
            wanted = np.append(expected[common], expected[~common].sum())
            statistic, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
            out["states"].append([statistic, freedom, (statistic - freedom) / np.sqrt(2 * freedom)])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, smollm2, a .gguf file or a Hugging Face folder")
    parser.add_argument("--only", default="race,filters,softmax", help="comma-separated")
    parser.add_argument("--states", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=5000, help="draws of the race")
    parser.add_argument("--draws", type=int, default=200_000, help="draws of the chi-square test")
    parser.add_argument("--text", type=Path, help="a text file for the perplexity")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--dtype", default="float32", help="of the model, and so of the rows that are scored")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    wanted = args.only.split(",")
    loaded = load(args.model, args.dtype)
    spec = head_spec(loaded.model)
    index = get_index(
        spec,
        lambda: collect_states(loaded.model, loaded.tokenizer),
        key=calibration_key(None),
        source=loaded.source,
    )
    head = cd.CertifiedHead(index, spec, engine="torch")
    states = decode_states(loaded.model, loaded.tokenizer, args.states) if set(wanted) != {"perplexity"} else None
    figures: dict[str, Any] = {
        "model": loaded.name,
        "dtype": args.dtype,
        "kernels": head.kernels.name,
        "threads": head.kernels.threads,
    }
    for name in wanted:
        if name == "perplexity":
            if args.text is None:
                raise SystemExit("perplexity needs --text FILE")
            figures[name] = perplexity(loaded, spec, args.text.read_text(encoding="utf-8"), args.tokens)
            continue
        assert states is not None
        dense = Dense(spec, states)
        run = {
            "race": lambda d=dense: race(head, d, args.pairs),
            "filters": lambda d=dense: filters(head, d),
            "softmax": lambda d=dense: softmax(head, d),
            "chi": lambda d=dense: chi(head, d, args.draws),
        }
        figures[name] = run[name]()
        show(name, figures[name])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    bad = sum(f.get("wrong", 0) + f.get("above the bound", 0) for f in figures.values() if isinstance(f, dict))
    console.print(f"{bad} answers differ from the dense references")
    return 1 if bad else 0


def show(name: str, figures: dict[str, Any]) -> None:
    console.print(f"{name}: { ({k: v for k, v in figures.items() if not (isinstance(v, dict) and 'bytes' in v)}) }")
    table = Table("mode", "bytes of dense bf16", "ms", "fallback", "certified", title="mean / p50 / p90 / p99")
    for mode, f in figures.items():
        if isinstance(f, dict) and "bytes" in f:

            def four(x: dict[str, float]) -> str:
                return " / ".join(f"{x[q]:.3g}" for q in ("mean", "p50", "p90", "p99"))

            table.add_row(mode, four(f["bytes"]), four(f["ms"]), f"{f['fallback']:.1%}", f"{f['certified']:.1%}")
    if table.row_count:
        console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
