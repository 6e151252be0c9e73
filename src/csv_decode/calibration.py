"""Calibration: hidden states like those that the head will serve.

An index is as good as its calibration is like the real thing, and the real thing is what the output layer sees while
the model writes. So the states are caught there, at the entrance of the layer, either on a text that the user names or
on text that the model writes itself. Calibration decides how few rows a step must score, never whether its answer is
right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_STATES", "LENGTH", "OPENINGS", "TEMPERATURES", "calibration_key", "collect_states", "text_states"]

F32 = NDArray[np.float32]
Progress = Callable[[int, int], None]

#: Twice as many leave a few per cent fewer rows, half as many a tenth more (docs/tuning.md).
DEFAULT_STATES = 12000
_WINDOW = 256  # tokens of a text read at once
_BATCH = 32  # sequences written at once
LENGTH = 64  # tokens written from one opening
TEMPERATURES = (0.8, 1.0)

#: What the model is given to go on from: prose, dialogue, questions, mathematics, code, other languages.
# fmt: off
OPENINGS = (
    "The", "In 1912, the", "Once upon a time, there was", "The president of the United States",
    "Scientists at the university have discovered", "\"I don't know,\" she said,",
    "According to the latest report,", "The film was released in", "He was born in", "The species is found in",
    "Chapter 1\n\nIt was", "The company announced that", "How do I", "Question: What is the",
    "Dear Sir or Madam,\n", "To make this recipe you need", "The game ended with", "The town lies on the river",
    "Music critics praised", "The treaty was signed", "First, let", "We prove that", "If x + 3 = 7, then",
    "Tom has 12 apples. He gives", "The probability of", "Let $f(x) =", "Step 1:", "The total cost is",
    "There are 24 students in", "The derivative of", "def main():", "import os\nimport sys\n",
    "class Node:\n    def __init__(self", "for (int i = 0;", "#include <iostream>\n", "function getUser(id) {",
    "public static void main(", "SELECT * FROM", "{\n  \"name\":", "<div class=\"", "# README\n\nThis project",
    "```python", "pub fn new(", "#!/bin/bash\n", "package main\n\nimport (", "Le gouvernement français",
    "Dans les années 1990,", "Die Bundesregierung hat", "In der Stadt", "El presidente de", "Durante la guerra,",
    "Il governo italiano", "A cidade de", "В 1990 году", "История города", "中国的", "在这个", "日本では、", "私は",
    "한국의", "في عام", "भारत में", "Polska jest", "Türkiye'nin\n",
)
# fmt: on


def calibration_key(text: str | None = None, count: int = DEFAULT_STATES, seed: int = 0) -> str:
    """Names what `collect_states` would collect, for the index cache.

    >>> calibration_key()
    'self-12000-0'
    """
    if text is None:
        return f"self-{count}-{seed}"
    return f"text-{hashlib.sha256(text.encode()).hexdigest()[:16]}-{count}"


def collect_states(
    model: Any,
    tokenizer: Any = None,
    text: str | None = None,
    count: int = DEFAULT_STATES,
    seed: int = 0,
    progress: Progress | None = None,
) -> F32:
    """Hidden states (N, d), float32, as the output layer of a Hugging Face causal model receives them.

    Args:
        model: the causal language model; it stays as it is, and so does torch's random state.
        tokenizer: needed for `text`; without it the model writes from a random first token.
        text: read by the model in windows of 256 tokens spread over all of it. None: the model writes by itself, from
            `OPENINGS`, half of the sequences at temperature 0.8 and half at 1.0, up to 64 tokens each.
        count: states wanted. A short text gives fewer; a model that stops early is simply asked again.
        seed: of the sampling; the same seed gives the same states.
        progress: called as progress(done, total).

    Raises ValueError for a model without an output layer, a text without a tokenizer, or a text that is too short.
    """
    import torch

    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1 hidden state")
    if text is not None and tokenizer is None:
        raise ValueError("a calibration text needs the model's tokenizer; pass tokenizer=")
    done = 0

    def report(states: int) -> None:
        nonlocal done
        done += states
        if progress:
            progress(min(done, count), count)

    training = model.training
    model.eval()
    try:
        # Nothing here draws from torch's global state, but code inside a model may.
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _Tap(model) as tap:
            if text is None:
                states = _write(model, tokenizer, seed, tap, count, report)
            else:
                states = _read(model, tokenizer, text, tap, count, report)
    finally:
        model.train(training)
    return states[:count]


class _Tap:
    """Catches what enters the output layer, and lets the layer see the last position only: the logits of the others are
    never needed here, and for 256 positions of a vocabulary of 262,144 they would take a quarter of a gigabyte."""

    def __init__(self, model: Any) -> None:
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise ValueError(
                f"{type(model).__name__} has no output embeddings, so it is not a causal language model; "
                "expected one that AutoModelForCausalLM loads"
            )
        self.name = type(model).__name__
        self.caught: torch.Tensor | None = None

    def __enter__(self) -> _Tap:
        self.handle = self.head.register_forward_pre_hook(self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _catch(self, module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self.caught = args[0]
        return (args[0][..., -1:, :], *args[1:])

    def take(self) -> torch.Tensor:
        """The states of the last forward pass, (B, n, d)."""
        if self.caught is None:
            raise ValueError(
                f"{self.name} computes its logits without calling its output embeddings, so the states cannot be "
                "caught there; collect them yourself and pass them as the calibration"
            )
        states, self.caught = self.caught, None
        return states


def _numpy(states: torch.Tensor) -> F32:
    """Float32 holds every bfloat16 and float16 exactly."""
    out: F32 = states.detach().float().cpu().numpy()
    return out.copy()


def _read(model: Any, tokenizer: Any, text: str, tap: _Tap, count: int, report: Callable[[int], None]) -> F32:
    """States on a given text. The first position of a window is left out: with nothing before it, it is like no state
    that decoding meets."""
    import torch

    ids = torch.tensor(_encode(tokenizer, text), dtype=torch.long)
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens, expected at least 2 (a few thousand calibrate well)")
    window = min(_WINDOW, _longest(model), len(ids))
    windows = max(1, min(-(-count // (window - 1)), len(ids) // window))
    found = []
    for start in np.linspace(0, len(ids) - window, windows).astype(int).tolist():
        part = ids[None, start : start + window].to(model.device)
        both = {"decoder_input_ids": part} if model.config.is_encoder_decoder else {}
        model(input_ids=part, **both, use_cache=False)
        found.append(_numpy(tap.take()[0, 1:]))
        report(window - 1)
    return np.concatenate(found)


def text_states(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int | None = None,
    window: int = 512,
    progress: Progress | None = None,
) -> tuple[F32, NDArray[np.int64]]:
    """Hidden states (N, d) on a text, and the tokens (N,) that follow each: what a perplexity is made of.

    The first `tokens` + 1 tokens are read in windows that do not overlap, as far as the model can look back at once.
    """
    import torch

    ids = torch.tensor(_encode(tokenizer, text), dtype=torch.long)[: None if tokens is None else tokens + 1]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens, expected at least 2")
    window = min(window, _longest(model))
    found = []
    with torch.no_grad(), _Tap(model) as tap:
        for start in range(0, len(ids) - 1, window):
            part = ids[None, start : min(start + window, len(ids) - 1)].to(model.device)
            model(input_ids=part, use_cache=False)
            found.append(_numpy(tap.take()[0]))
            if progress:
                progress(min(start + window, len(ids) - 1), len(ids) - 1)
    return np.concatenate(found), ids[1:].numpy()


def _write(model: Any, tokenizer: Any, seed: int, tap: _Tap, count: int, report: Callable[[int], None]) -> F32:
    """States while the model writes; a sequence counts until its end-of-sequence token.

    `generate` runs the model, since it knows every kind of cache; the draw itself is ours (see `_Draw`).
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList

    generator = torch.Generator().manual_seed(seed)
    prompts = _prompts(model, tokenizer, generator)
    own = getattr(model, "generation_config", None)
    ends = getattr(own, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    draw = _Draw(ends, generator, tap, report)
    while draw.count < count:
        size = min(_BATCH, -(-(count - draw.count) // LENGTH))
        chosen = [next(prompts) for _ in range(size)]
        longest = max(len(prompt) for prompt, _ in chosen)
        ids = torch.zeros(size, longest, dtype=torch.long)
        mask = torch.zeros(size, longest, dtype=torch.long)
        for row, (prompt, _) in enumerate(chosen):  # padding goes to the left: every row ends in its last token
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        draw.start([temperature for _, temperature in chosen])
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            logits_processor=LogitsProcessorList([draw]),
            generation_config=GenerationConfig(
                max_new_tokens=max(1, min(LENGTH, _longest(model) - longest)),
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                disable_compile=True,
            ),
        )
    return np.concatenate(draw.kept)


class _Draw:
    """Draws the next token of each sequence from the whole distribution, and keeps the states of unfinished sequences.

    It stands where transformers has its logits processors and leaves one finite logit a row, so greedy search takes the
    token drawn here. The draw inverts the cumulative sum: no sort over the vocabulary, and nothing from torch's global
    random state.
    """

    def __init__(self, ends: list[int], generator: torch.Generator, tap: _Tap, report: Callable[[int], None]) -> None:
        import torch

        self.ends = torch.tensor(ends, dtype=torch.long)
        self.generator = generator
        self.tap = tap
        self.report = report
        self.kept: list[F32] = []
        self.count = 0

    def start(self, temperatures: list[float]) -> None:
        """A new batch of sequences."""
        import torch

        self.temperature = torch.tensor(temperatures)[:, None]
        self.live = torch.ones(len(temperatures), dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch

        states = _numpy(self.tap.take()[:, -1])[self.live.numpy()]
        self.kept.append(states)
        self.count += len(states)
        self.report(len(states))
        mass = torch.softmax(scores.float() / self.temperature.to(scores.device), -1).cumsum_(-1)
        point = torch.rand(len(mass), 1, generator=self.generator).to(scores.device) * mass[:, -1:]
        token = torch.searchsorted(mass, point, right=True).clamp_(max=mass.shape[-1] - 1)
        self.live &= ~torch.isin(token[:, 0].cpu(), self.ends)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _prompts(model: Any, tokenizer: Any, generator: torch.Generator) -> Iterator[tuple[list[int], float]]:
    """Token ids and temperature for each sequence, without end: the openings in a random order, again and again."""
    import torch

    if tokenizer is None:
        size = model.get_input_embeddings().weight.shape[0]
        start = getattr(model.config.get_text_config(), "bos_token_id", None)
        before = [start] if isinstance(start, int) else []
        while True:
            for temperature in TEMPERATURES:
                yield [*before, int(torch.randint(size, (), generator=generator))], temperature
    encoded = [ids for ids in (_encode(tokenizer, opening) for opening in OPENINGS) if ids]
    if not encoded:
        raise ValueError("the tokenizer turns every opening into no token at all; is it the model's own?")
    room = max(1, _longest(model) // 2)
    turn = 0
    while True:
        for i, at in enumerate(torch.randperm(len(encoded), generator=generator).tolist()):
            yield encoded[at][-room:], TEMPERATURES[(turn + i) % len(TEMPERATURES)]
        turn += 1


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids; `verbose` off, since a long text is no mistake here."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def _longest(model: Any) -> int:
    """Positions that the model has, or a great many."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else 1 << 30
