"""Hidden states to measure on: those of text that the model writes, from other openings than the calibration's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PROMPTS", "decode_states", "random_states"]

F32 = NDArray[np.float32]

#: What the model continues: prose, encyclopaedia, instructions, code, mathematics, other languages. None of them is
#: among `csv_decode.calibration.OPENINGS`.
# fmt: off
PROMPTS = (
    "The lighthouse keeper had not spoken to anyone for eleven days when the boat appeared.",
    "My grandmother's kitchen smelled of cinnamon, wet dog and",
    "Nobody in the village believed that the river could run backwards until",
    "Photosynthesis is the process by which plants, algae and some bacteria",
    "The Treaty of Westphalia, signed in 1648, ended",
    "The blue whale (Balaenoptera musculus) is",
    "Write a short email to your landlord asking to have the heating repaired before winter.",
    "Explain to a ten-year-old why the sky is blue.",
    "List five things to check before buying a used bicycle.",
    "def longest_common_prefix(words):\n    \"\"\"Return the longest prefix shared by all words.\"\"\"\n",
    ("#include <vector>\n#include <algorithm>\n\n// Merges overlapping "
     "intervals.\nstd::vector<std::pair<int, int>> merge("),
    "CREATE TABLE orders (\n    id INTEGER PRIMARY KEY,\n    customer_id INTEGER NOT NULL,\n",
    "import { useState, useEffect } from 'react';\n\nexport function useFetch(url) {\n",
    "A train leaves at 9:00 at 80 km/h and another at 10:00 at 120 km/h. When does the second catch up? Let t be",
    "Theorem. There are infinitely many primes.\nProof. Suppose there are only finitely many, p_1, ..., p_n.",
    "Q: A shop sells 3 pens for 2 dollars. How much do 18 pens cost?\nA:",
    "Le petit marché du samedi matin se tenait sur la place, et",
    "Die Sonne war schon untergegangen, als der Zug endlich",
    "La receta tradicional del gazpacho andaluz lleva",
    "Зимой в деревне рано темнело, и дети",
    "春天来了,公园里的花",
    "昨日、友達と一緒に京都へ",
    "كانت المدينة القديمة مليئة",
    "बारिश के बाद गाँव में",
)
# fmt: on

_LENGTH = 24  # tokens written after each prompt at least, so that few states see nothing but the prompt


def decode_states(
    model: Any,
    tokenizer: Any,
    count: int,
    temperature: float = 0.8,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> F32:
    """What enters the output layer while the model continues `PROMPTS` by sampling: (count, d), in a random order.

    A sequence counts until its end-of-sequence token. Without a tokenizer the model starts from random tokens. torch's
    random state stays as it is.
    """
    import torch

    from ..calibration import collect_states

    if tokenizer is None:
        return collect_states(model, None, count=count, seed=seed, progress=progress)
    found: list[F32] = []
    rng = np.random.default_rng(seed)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while sum(map(len, found)) < count:
            missing = count - sum(map(len, found))
            found.append(_continue(model, tokenizer, max(_LENGTH, -(-missing // len(PROMPTS))), temperature))
            if progress:
                progress(min(sum(map(len, found)), count), count)
    states = np.concatenate(found)
    return states[rng.permutation(len(states))[:count]]  # a cut keeps every kind of prompt


def _continue(model: Any, tokenizer: Any, length: int, temperature: float) -> F32:
    """All prompts at once, `length` tokens each."""
    import torch
    from transformers import GenerationConfig

    encoded = [ids for ids in (tokenizer(text)["input_ids"] for text in PROMPTS) if ids]
    if not encoded:
        raise ValueError("the tokenizer turns every prompt into no token at all; is it the model's own?")
    longest = max(map(len, encoded))
    ids, mask = (
        torch.zeros(len(encoded), longest, dtype=torch.long),
        torch.zeros(len(encoded), longest, dtype=torch.long),
    )
    for row, prompt in enumerate(encoded):  # padding goes to the left: every row ends in its last token
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    caught: list[Any] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: caught.append(args[0][:, -1].float().clone())
    )
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=length,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                disable_compile=True,
            ),
        )
    finally:
        handle.remove()
    if not caught:
        raise ValueError(
            f"{type(model).__name__} computes its logits without calling its output embeddings, so there are no states "
            "to measure on; measure on random ones with --random"
        )
    ended = torch.isin(out[:, longest:], torch.tensor(ends, dtype=torch.long)).cumsum(1) > 0
    live = torch.ones(len(encoded), len(caught), dtype=torch.bool)
    live[:, 1:] = ~ended[:, : len(caught) - 1]
    states: F32 = torch.stack(caught, 1)[live].numpy()
    return states


def random_states(width: int, count: int, seed: int = 1) -> F32:
    """Gaussian states (count, d). No model has such states, and a calibrated index is at its worst on them."""
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
