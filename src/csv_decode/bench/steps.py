"""Decoding steps of a stock model, and what they would be with our head: the measurement behind `csv-decode advise`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..head import CertifiedHead
from .states import PROMPTS

__all__ = ["Step", "advice", "decode_steps", "energy_advice"]

F32 = NDArray[np.float32]

_WARM = 3  # steps before the measured ones
_TEMPERATURE = 0.8
#: Gains of a step below which the stock head may as well stay, and from which ours is clearly worth it.
_NOTHING, _CLEAR = 1.03, 1.15
#: Mean energies (`Statistics.mean_energy`) up to which a calibration fits, and fits roughly. By what rows survive:
#: up to 2.7 a step reads no more than with the best calibration tried, from 3.7 to 5.3 a seventh to a quarter more, and
#: beyond half to two thirds more (docs/tuning.md). The default calibration has 1.4 to 1.7 on other text.
_FITS, _ROUGHLY = 2.5, 5.0


@dataclass(frozen=True)
class Step:
    """Median seconds of a decoding step at one batch size: the layers before the head, the stock head with argmax, and
    our head from states to ids on the same states."""

    batch: int
    body: float
    stock_head: float
    our_head: float

    @property
    def share(self) -> float:
        """Of the stock step, what the head takes."""
        return self.stock_head / (self.body + self.stock_head)

    @property
    def ceiling(self) -> float:
        """The speed-up of the whole step if the head cost nothing."""
        return (self.body + self.stock_head) / self.body

    @property
    def gain(self) -> float:
        """The speed-up of the whole step with our head."""
        return (self.body + self.stock_head) / (self.body + self.our_head)


class _Clock:
    """Notes when the output layer is reached, and with which states."""

    def __init__(self, model: Any) -> None:
        self.layer = model.get_output_embeddings()
        self.at: float | None = None
        self.states: Any = None

    def __enter__(self) -> _Clock:
        self.handle = self.layer.register_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _note(self, module: Any, args: tuple[Any, ...]) -> None:
        self.at, self.states = time.perf_counter(), args[0]


def decode_steps(
    model: Any,
    tokenizer: Any,
    head: CertifiedHead,
    batch: int,
    steps: int = 16,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Step:
    """Measures `steps` steps with a KV cache while the model continues prompts by sampling, after a few to warm up.

    Our head answers the same states right after the stock one, so its codes come from memory, behind everything else
    that a step reads. The step is the model's forward pass and an argmax; what a generation loop adds is not in it.

    Raises ValueError for a model that keeps no KV cache or has no output embeddings to be caught at.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = _prompts(model, tokenizer, batch, generator)
    body, stock, ours = [], [], []
    with torch.inference_mode(), _Clock(model) as clock:
        out = model(input_ids=ids, use_cache=True)
        name, cache = _cache(out)
        if cache is None or clock.at is None:
            raise ValueError(
                f"{type(model).__name__} keeps no KV cache or computes its logits elsewhere than in its output "
                "embeddings, so its steps cannot be taken apart"
            )
        for turn in range(_WARM + steps):
            mass = torch.softmax(out.logits[:, -1].float() / _TEMPERATURE, -1)
            token = torch.multinomial(mass, 1, generator=generator)
            started = time.perf_counter()
            out = model(input_ids=token, use_cache=True, **{name: cache})
            out.logits[:, -1].argmax(-1)
            ended = time.perf_counter()
            h = clock.states[:, -1]
            name, cache = _cache(out)
            before = time.perf_counter()
            head.top_k(h, 1)
            after = time.perf_counter()
            if turn >= _WARM:
                body.append(clock.at - started)
                stock.append(ended - clock.at)
                ours.append(after - before)
            if progress:
                progress(turn + 1, _WARM + steps)
    return Step(batch, float(np.median(body)), float(np.median(stock)), float(np.median(ours)))


def _cache(out: Any) -> tuple[str, Any]:
    """The KV cache of a model's output, and the name that its forward pass takes it by; transformers has renamed it."""
    name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    return name, getattr(out, name, None)


def _prompts(model: Any, tokenizer: Any, batch: int, generator: Any) -> Any:
    """Token ids (batch, n): openings cut to the same length, or random tokens where there is no tokenizer."""
    import torch

    if tokenizer is not None:
        encoded = [ids for ids in (tokenizer(text)["input_ids"] for text in PROMPTS) if ids]
        if encoded:
            chosen = [encoded[i * 5 % len(encoded)] for i in range(batch)]  # of different kinds
            shortest = min(map(len, chosen))
            return torch.tensor([ids[:shortest] for ids in chosen])
    size = model.get_input_embeddings().weight.shape[0]
    return torch.randint(size, (batch, 4), generator=generator)


def advice(steps: list[Step], served_dense: str | None = None) -> str:
    """One sentence: worth it or not, and why. served_dense: why the head never runs, if so."""
    one = steps[0]
    if served_dense is not None:
        return f"Not worth it: {served_dense}."
    if one.ceiling < _CLEAR and max(step.ceiling for step in steps) < _CLEAR:
        return (
            f"Not worth it: the head takes only {one.share:.0%} of a step, so even a head that cost nothing would make "
            f"decoding {one.ceiling:.2f} times as fast."
        )
    best = max(steps, key=lambda step: step.gain)
    if best.gain < _CLEAR:
        if best.gain >= _NOTHING:
            return f"Hardly worth it: the best is {best.gain:.2f} times the speed, at batch {best.batch}."
        return (
            f"Not worth it: the head takes {one.share:.0%} of a step, but ours needs {one.our_head * 1e3:.2f} ms where "
            f"the stock one needs {one.stock_head * 1e3:.2f} ms."
        )
    good = [step for step in steps if step.gain >= _NOTHING]
    sizes = ", ".join(str(step.batch) for step in good)
    rest = [step for step in steps if step not in good]
    last = ""
    if rest:
        last = f"; at batch {', '.join(str(step.batch) for step in rest)} leave the stock head in place"
    return (
        f"Worth it at batch {sizes}: the head takes {best.share:.0%} of a step at batch {best.batch}, and with ours "
        f"the step is {best.gain:.2f} times as fast, where a head that cost nothing would give {best.ceiling:.2f}"
        f"{last}."
    )


def energy_advice(energy: float, model: str) -> str:
    """What the mean energy of the states says about the calibration, and the command to calibrate again."""
    again = f"csv-decode build {model} --calibration TEXTFILE"
    if energy <= _FITS:
        return (
            f"{energy:.2f}: the calibration fits the text that the model writes here (its own has 1, and up to "
            f"{_FITS:g} costs nothing). If yours is of another kind, calibrate on it: {again}"
        )
    if energy <= _ROUGHLY:
        return (
            f"{energy:.2f}: the calibration fits roughly (up to {_FITS:g} costs nothing); answers are exact, but a "
            f"step reads about a fifth more than it need; calibrate on text like yours: {again}"
        )
    return (
        f"{energy:.2f}: the calibration does not fit these states (up to {_FITS:g} costs nothing); answers are exact, "
        f"but a step reads half as much again as it need, or more; calibrate on text like yours: {again}"
    )
