"""Texts of a Hugging Face model, token by token, through a certified head: what `csv-decode serve` runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..head import CertifiedHead
from ..index import Index
from ..models import LoadedModel, ModelError
from ..spec import whole
from ..writer import CONTEXT, Writer, shared_start
from .transformers import _check_transform, _find_index, _output_layer, head_spec

__all__ = ["TransformersModel"]


class TransformersModel(Writer):
    """A causal language model of transformers on the CPU, ready to write. Tokens are decided by the exact logits.

    Args:
        loaded: the model and its tokenizer (`load_model`). index: of its head; None: from the cache, or calibrated and
            built now. context: positions; None: 4096, or fewer where the model was trained for fewer. threads: of the
            head. progress: called as progress(stage, done, total) while an index is built.

    Raises ModelError or ValueError for models that cannot be run so.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        index: Index | None = None,
        *,
        context: int | None = None,
        threads: int | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.model = model = loaded.model.eval()
        if loaded.tokenizer is None:
            raise ModelError(f"{loaded.name} has no tokenizer, so it can neither read a prompt nor show its text")
        if model.config.is_encoder_decoder:
            raise ModelError(f"{loaded.name} is an encoder-decoder model; texts are continued by causal ones only")
        spec = head_spec(model)
        _check_transform(model, spec)
        self.layer = _output_layer(model)
        known = inspect.signature(model.forward).parameters  # transformers has renamed it
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self.vocabulary: HuggingFaceVocabulary = HuggingFaceVocabulary(loaded.tokenizer, model)
        trained = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT
        self.context = min(trained, CONTEXT) if context is None else whole("context", context, 8, 2**24)
        if index is None:
            index = _find_index(model, spec, None, loaded.tokenizer, threads, progress)
        self.head = CertifiedHead(index, spec, threads=threads, engine="torch")
        self._cache = DynamicCache(config=self.model.config)
        self._evaluate([(0, [0, 0], [])])  # makes the layers of the cache
        self.can_draft = self._can_crop()

    def close(self) -> None:
        self.forget()

    def _forget(self, sequence: int, start: int) -> None:
        if start and self._can_crop():
            self._cache.crop(start - len(self._held[0]))  # negative: so many are removed
        else:
            self._cache = DynamicCache(config=self.model.config)
            self._held[0], self._chunks[0] = [], []

    def _can_crop(self) -> bool:
        """Whether positions can be taken back: layers with a window or a recurrent state have lost what was before."""
        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokenizer = self.vocabulary.tokenizer
        if not tokenizer.chat_template:
            raise ModelError("this model has no chat template; give it a text to continue")
        found = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(token) for token in found]

    def _evaluate(self, texts: Sequence[tuple[int, list[int], list[int]]]) -> list[NDArray[np.float32]]:
        _, tokens, draft = texts[0]  # one at a time: `sequences` is 1
        every = tokens + draft
        self._drop(0, shared_start(self._held[0], tokens[:-1]))  # the last token always needs its state
        new = torch.tensor([every[len(self._held[0]) :]])
        with torch.inference_mode(), _caught(self.layer) as states:
            self.model(
                input_ids=new,
                attention_mask=torch.ones(1, len(every), dtype=torch.long),
                use_cache=True,
                logits_to_keep=len(draft) + 1,
                **{self._cache_name: self._cache},
            )
        self._held[0] = every
        found = states[-1][0, -len(draft) - 1 :].float().numpy()
        if not np.isfinite(found).all():
            raise ModelError("the model gave a hidden state that is not finite")
        return [np.ascontiguousarray(found)]


@contextmanager
def _caught(layer: Any) -> Iterator[list[torch.Tensor]]:
    """Notes what comes to the output layer, which computes nothing meanwhile."""
    states: list[torch.Tensor] = []
    nothing = torch.zeros(1, dtype=layer.weight.dtype)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        states.append(hidden)
        return nothing.expand(*hidden.shape[:-1], layer.weight.shape[0])

    layer.forward = forward
    try:
        yield states
    finally:
        del layer.forward


class HuggingFaceVocabulary:
    """See `csv_decode.writer.Vocabulary`. Bytes of tokens are read off the kind of decoder that the tokenizer has."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer = tokenizer
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or tokenizer.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends] if ends is not None else [])
        self._special = set(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None else str(json.loads(backend.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._spaces = "\u2581" in decoder or "Metaspace" in decoder

    def encode(self, text: str, begin: bool = True, special: bool = True) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=begin, verbose=False)["input_ids"]]

    def piece(self, token: int, special: bool = False) -> bytes:
        if token in self._special and not special:
            return b""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:  # a row behind the last token
            return b""
        if token in self._special:
            return str(name).encode()
        if self._byte_level:
            return b"".join(_BYTES.get(c, c.encode()) for c in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        if self._spaces:
            return str(name).replace("\u2581", " ").encode()
        return str(self.tokenizer.decode([token])).encode()

    def ends(self, token: int) -> bool:
        return token in self._ends


def _byte_characters() -> dict[str, bytes]:
    """What byte-level tokenizers write bytes as: characters that can be seen as they are, others from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): bytes([byte]) for byte in seen}
    hidden = [byte for byte in range(256) if byte not in seen]
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(hidden)}


_BYTES = _byte_characters()
