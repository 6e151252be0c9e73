"""llama.cpp as it is, on the same file: what a GGUF model is compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..models import ModelError
from .body import llama_library

__all__ = ["Stock"]


class Stock:
    """The whole file in llama.cpp, its own head and samplers; tokens as ids. sampler: temperature (0: greedy) after
    top_p, in llama.cpp's order."""

    def __init__(self, path: Path, context: int, threads: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
        self._lib = lib = llama_library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = min(512, context)
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.temperature, self.top_p = temperature, top_p

    def close(self) -> None:
        if self._context:
            self._lib.llama_free(self._context)
            self._lib.llama_model_free(self._model)
            self._context = None

    def write(self, prompt: Sequence[int], count: int, seed: int = 0) -> Iterator[int]:
        """Up to count new tokens."""
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if self.temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(self.top_p, 1))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(self.temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed % 2**32))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        lib.llama_memory_clear(self._memory, True)
        try:
            new = list(prompt)
            for _ in range(count):
                self._decode(new)
                token = int(lib.llama_sampler_sample(chain, self._context, -1))
                yield token
                if lib.llama_vocab_is_eog(self._vocab, token):
                    return
                new = [token]
        finally:
            lib.llama_sampler_free(chain)

    def _decode(self, tokens: list[int]) -> None:
        for first in range(0, len(tokens), 512):
            part = tokens[first : first + 512]
            buffer = (self._lib.llama_token * len(part))(*part)
            status = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(buffer, len(part)))
            if status:
                raise RuntimeError(f"llama.cpp failed on {len(part)} tokens (status {status})")
