"""End to end: greedy text through `model.generate` with the stock head, with ours, and with a head that costs nothing.

The three take turns, prompt by prompt, in an order that changes, so that whatever else the machine does falls on all of
them. The head of zero cost answers with a row made ahead, whose best token is the one that the run before has written:
the loop, the layers and their cache do the same work, and what is left is the ceiling for any head.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..exact import stock_gap
from ..index import Index
from .peers import set_threads
from .run import OURS, spread
from .states import PROMPTS

__all__ = ["FREE", "STOCK", "measure_generation"]

STOCK = "stock"
FREE = "head of zero cost"
#: The head of zero cost needs the tokens of a run before it. Each of the three follows each other one.
_ORDERS = ((STOCK, OURS, FREE), (OURS, STOCK, FREE), (STOCK, FREE, OURS), (OURS, FREE, STOCK))


class _Clock:
    """A streamer of transformers that notes when the prompt and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class _Call:
    """One call of `generate`: new tokens, seconds in all, and when the prompt and each token came, since the start."""

    ids: list[int]
    seconds: float
    came: NDArray[np.float64]


@contextmanager
def _free(layer: Any, ids: Sequence[int]) -> Iterator[None]:
    """The output layer answers with a ready row, in its own type: 1 at the next of `ids`, 0 elsewhere."""
    import torch

    row = torch.zeros(layer.weight.shape[0], dtype=layer.weight.dtype)
    at, last = 0, 0

    def forward(hidden: Any) -> Any:
        nonlocal at, last
        row[last] = 0
        last = ids[min(at, len(ids) - 1)]
        row[last] = 1
        at += 1
        return row.expand(*hidden.shape[:-1], -1)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def measure_generation(
    model: Any,
    tokenizer: Any,
    index: Index | None,
    threads: int,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes at most `tokens` tokens from each prompt with each of the three heads, and compares their ids.

    Args:
        model, tokenizer: as loaded; the model is stock again afterwards.
        index: of the model's output layer; None where `accelerate` needs none (it warns of such heads itself).
        threads: of torch and of our head.

    Returns figures of the three heads (milliseconds a token; tokens a second and milliseconds to the first token of
    whole calls, with all that `generate` does once); the steps that were certified, `head_ms`, which is the mean of our
    head in one of them with all checks, and the steps that were dense by reason; and on how many prompts our ids differ
    from stock's: `rounding` where the exact scores are closer than the stock kernel's rounding, `wrong` elsewhere.

    Raises ValueError when the model does not follow the head of zero cost.
    """
    import torch

    from ..integrations.transformers import accelerate, restore

    set_threads(threads)
    encoded = [ids for ids in (tokenizer(text, return_tensors="pt") for text in prompts) if ids["input_ids"].shape[1]]
    if not encoded:
        raise ValueError("the tokenizer turns every prompt into no token at all; is it the model's own?")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    fast = accelerate(model, index=index, threads=threads)
    stock = copy.copy(fast)  # has the same layers in the stock class, whose `generate` knows nothing of our head
    state, layer = fast.csv_decode, fast.get_output_embeddings()
    runs: dict[str, list[_Call]] = {name: [] for name in (STOCK, OURS, FREE)}

    def write(name: str, prompt: Any, length: int, before: list[int]) -> _Call:
        """before: the tokens that the head of zero cost is told."""
        clock = _Clock()
        with _free(layer, before) if name == FREE else nullcontext():
            started = time.perf_counter()
            out = (fast if name == OURS else stock).generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                do_sample=False,
                max_new_tokens=length,
                streamer=clock,
                pad_token_id=pad,
            )
            ended = time.perf_counter()
        ids = out[0, prompt["input_ids"].shape[1] :].tolist()
        if name == FREE and ids != before:
            raise ValueError(
                f"{type(model).__name__} does not take the best token of a prepared row, so it has no ceiling here"
            )
        return _Call(ids, ended - started, np.array(clock.times) - started)

    try:
        with torch.no_grad():
            ids: list[int] = []
            for name in _ORDERS[0]:  # once unmeasured: first calls allocate, and prepare a kernel for each new shape
                ids = write(name, encoded[0], tokens, ids).ids
            state.certified_steps, state.dense_steps, state.seconds_certified = 0, {}, 0.0
            for done, prompt in enumerate(encoded):
                for name in _ORDERS[done % len(_ORDERS)]:
                    call = write(name, prompt, tokens, ids)
                    runs[name].append(call)
                    ids = call.ids
                if progress:
                    progress(done + 1, len(encoded))
            pairs = [(mine.ids, theirs.ids) for mine, theirs in zip(runs[OURS], runs[STOCK], strict=True)]
            differ = [i for i, (a, b) in enumerate(pairs) if a != b]
            rounding = [i for i in differ if _rounded(stock, state.head.spec, encoded[i], *pairs[i])]
    finally:
        restore(model)
    return {
        "threads": threads,
        "prompts": len(encoded),
        "tokens": sum(len(call.ids) for call in runs[OURS]),
        "figures": [_figures(name, runs) for name in runs],
        "certified_steps": state.certified_steps,
        "head_ms": state.seconds_certified / state.certified_steps * 1e3 if state.certified_steps else None,
        "dense_steps": dict(state.dense_steps),
        "differ": len(differ),
        "rounding": len(rounding),
        "wrong": len(differ) - len(rounding),
    }


def _figures(name: str, runs: dict[str, list[_Call]]) -> dict[str, Any]:
    def speed(calls: list[_Call]) -> float:
        return sum(len(call.ids) for call in calls) / sum(call.seconds for call in calls)

    calls = runs[name]
    steps = np.concatenate([np.diff(call.came[1:]) for call in calls])  # came[0] is the prompt's
    return {
        "method": name,
        "ms": spread(steps * 1e3 if len(steps) else [np.nan]),
        "first_ms": float(np.mean([call.came[1] for call in calls])) * 1e3,
        "tokens_per_second": speed(calls),
        "speedup": speed(calls) / speed(runs[STOCK]),
        "of_ceiling": speed(calls) / speed(runs[FREE]),
    }


def _rounded(model: Any, spec: Any, prompt: Any, mine: list[int], stock: list[int]) -> bool:
    """Whether the first difference is one that the rounding of the stock head explains: the state there is made again,
    from all the tokens before, and both tokens are scored exactly."""
    import torch

    at = next((t for t, (a, b) in enumerate(zip(mine, stock, strict=False)) if a != b), None)
    if at is None:  # one text is longer
        return False
    before = torch.tensor([mine[:at]], dtype=torch.long)
    caught: list[NDArray[np.float32]] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: caught.append(args[0][0, -1].float().numpy().copy())
    )
    try:
        model(input_ids=torch.cat([prompt["input_ids"], before], 1), use_cache=False)
    finally:
        handle.remove()
    gap, rounding = stock_gap(spec, caught[-1], mine[at], stock[at])
    return abs(gap) <= rounding
