"""A model and a tokenizer small enough for tests of everything around the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
WIDTH = 64


def tiny_model(seed: int = 0) -> Any:
    """A random Llama, always the same for a seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> Any:
    """Splits at white space and punctuation; knows w0, w1, ... and takes anything else for <unk>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def save_tiny(folder: Path) -> Path:
    """Model and tokenizer as a folder that transformers loads."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def forge_top_k(monkeypatch: Any) -> None:
    """Makes every head return the neighbour of the best token."""
    import csv_decode as cd

    honest = cd.CertifiedHead.top_k

    def forged(self: Any, hidden: Any, k: int = 1, ties: bool = False, allowed: Any = None) -> Any:
        top = honest(self, hidden, k, ties, allowed)
        top.ids[0, 0] = (top.ids[0, 0] + 1) % VOCABULARY
        return top

    monkeypatch.setattr(cd.CertifiedHead, "top_k", forged)
