"""The body of a model, run by llama.cpp through llama-cpp-python: embeddings in, hidden states out."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models import ModelError

__all__ = ["Body", "Vocabulary", "llama_library"]

F32 = NDArray[np.float32]
_quiet: Any = None
_CLOSED = "the model is closed"


def llama_library(verbose: bool = False) -> Any:
    """llama-cpp-python's ctypes interface, silent unless `verbose`."""
    global _quiet
    try:
        import llama_cpp
    except ImportError as error:
        raise ModelError(
            f"running a .gguf file by llama.cpp needs llama-cpp-python ({error}); get it with: pip install '.[llama]' "
            "in the checkout (it compiles llama.cpp, some minutes)"
        ) from None
    if _quiet is None:
        llama_cpp.llama_backend_init()
    if not verbose and _quiet is None:
        _quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    return llama_cpp


class Vocabulary:
    """Tokens of the original file, as llama.cpp reads them."""

    def __init__(self, path: Path, verbose: bool = False) -> None:
        self._lib = llama_library(verbose)
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        self._model = self._lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot read the vocabulary of {path}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.size = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.begin = int(self._lib.llama_vocab_bos(self._vocab))
        self.end = int(self._lib.llama_vocab_eos(self._vocab))
        self._known = functools.lru_cache(1 << 15)(self._read)  # a text asks for the same tokens again and again

    def close(self) -> None:
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None

    def _check(self) -> None:
        if not self._model:
            raise RuntimeError(_CLOSED)

    def encode(self, text: str, begin: bool = True, special: bool = True) -> list[int]:
        """Token ids. begin: with the tokens that the model wants in front; special: read names of special tokens."""
        self._check()
        data = text.encode()
        count = len(data) + 8
        while True:
            buffer = (self._lib.llama_token * count)()
            n = self._lib.llama_tokenize(self._vocab, data, len(data), buffer, count, begin, special)
            if n >= 0:
                return list(buffer[:n])
            count = -n

    def piece(self, token: int, special: bool = False) -> bytes:
        """What a token stands for; special tokens stand for nothing unless `special`, nor do rows behind the last
        token."""
        self._check()
        return self._known(token, special)[0]

    def ends(self, token: int) -> bool:
        """Whether it ends the generation."""
        self._check()
        return self._known(token, False)[1]

    def _read(self, token: int, special: bool) -> tuple[bytes, bool]:
        if token >= self.size:
            return b"", False
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n], bool(self._lib.llama_vocab_is_eog(self._vocab, token))
            size = -n

    def chat_template(self) -> str | None:
        self._check()
        found = self._lib.llama_model_chat_template(self._model, None)
        return found.decode() if found else None


class Body:
    """A context of the derived file. Positions of each sequence are remembered until they are dropped.

    Args:
        path: of the derived file. width: d. context: positions for all sequences together. sequences: how many there
            may be at once. threads: of llama.cpp. batch: tokens read in one go.
    """

    def __init__(
        self,
        path: Path,
        width: int,
        context: int,
        sequences: int = 1,
        threads: int = 1,
        batch: int = 512,
        verbose: bool = False,
    ) -> None:
        self._lib = lib = llama_library(verbose)
        self.width, self.context, self.sequences = width, context, sequences
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {path}")
        self.batch = min(batch, context)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context, sequences
        params.n_batch = params.n_ubatch = self.batch
        params.n_threads = params.n_threads_batch = threads
        params.embeddings, params.pooling_type = True, lib.LLAMA_POOLING_TYPE_NONE
        params.kv_unified = True
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            lib.llama_model_free(self._model)
            raise ModelError(f"llama.cpp cannot make a context of {context} positions for {path}; is memory short?")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(self.batch, width, sequences)
        shape = (self.batch,)  # its columns as arrays; each input is of one sequence
        self._inputs = np.ctypeslib.as_array(self._batch.embd, (self.batch, width))
        self._positions, self._wanted = (
            np.ctypeslib.as_array(column, shape) for column in (self._batch.pos, self._batch.logits)
        )
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        self._sequence_of = [-1] * self.batch
        self._lock = threading.Lock()

    def close(self) -> None:
        if self._context:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
            self._lib.llama_model_free(self._model)
            self._context = None

    def evaluate(self, inputs: F32, positions: list[int], sequences: list[int], wanted: list[int]) -> F32:
        """Hidden states (len(wanted), d) of the inputs (n, d) with these numbers; n may exceed the batch."""
        out = np.empty((len(wanted), self.width), np.float32)
        to, size = out.__array_interface__["data"][0], self.width * 4
        with self._lock:
            if not self._context:
                raise RuntimeError(_CLOSED)
            for first in range(0, len(inputs), self.batch):
                last = min(first + self.batch, len(inputs))
                here = [i - first for i in wanted if first <= i < last]
                self._decode(inputs[first:last], positions[first:last], sequences[first:last], here)
                for i in here:  # not llama_get_embeddings: with several sequences its order is another
                    found = self._lib.llama_get_embeddings_ith(self._context, i)
                    if not found:
                        raise RuntimeError(f"llama.cpp gave no hidden state for input {first + i}")
                    ctypes.memmove(to, found, size)
                    to += size
        return out

    def _decode(self, inputs: F32, positions: list[int], sequences: list[int], wanted: list[int]) -> None:
        batch, n = self._batch, len(inputs)
        batch.n_tokens = n
        self._inputs[:n] = inputs
        self._positions[:n] = positions
        self._wanted[:n] = 0
        self._wanted[wanted] = 1
        for at, sequence in enumerate(sequences):
            if self._sequence_of[at] != sequence:
                batch.seq_id[at][0] = self._sequence_of[at] = sequence
        status = self._lib.llama_decode(self._context, batch)
        if status == 1:
            raise ContextFullError(f"the context of {self.context} positions is full")
        if status != 0:
            raise RuntimeError(f"llama.cpp failed on {n} inputs (status {status})")

    def drop(self, sequence: int, start: int = 0, stop: int = -1) -> None:
        """Forgets positions from start on, up to stop (-1: all) of a sequence."""
        if self._context:  # a text may be abandoned after the model was closed
            self._lib.llama_memory_seq_rm(self._memory, sequence, start, stop)

    def copy(self, source: int, sequence: int, stop: int) -> None:
        """Positions below stop of a sequence become another's too: they are shared, not computed again."""
        if self._context:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, stop)

    def shift(self, sequence: int, start: int, by: int) -> None:
        """Moves the positions from start on."""
        if self._context:
            self._lib.llama_memory_seq_add(self._memory, sequence, start, -1, by)

    @property
    def can_shift(self) -> bool:
        return bool(self._context) and bool(self._lib.llama_memory_can_shift(self._memory))


class ContextFullError(RuntimeError):
    """No room for more positions."""
