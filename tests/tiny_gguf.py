"""Small random .gguf files of the architectures that the body can be run alone of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, HEADS, KV, HEAD, FF, LAYERS, CONTEXT = 64, 4, 2, 16, 96, 2, 96
WORDS = ["▁the", "▁a", "▁of", "▁and", "ing", "▁to", "er", "▁in", "s", "e", "t", "▁"]
END = 2


def write(
    path: Path, architecture: str = "llama", rows: int = 600, kind: str = "F32", tied: bool = False, **more: Any
) -> Path:
    """A model with `rows` tokens: three special ones, all bytes, and words. kind: type of the output layer."""
    rng = np.random.default_rng(0)
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(LAYERS)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(FF)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(HEAD)
    if architecture in ("gemma2", "gemma3"):
        out.add_sliding_window(64)
    if architecture == "gemma2":
        out.add_attn_logit_softcapping(50.0)
        out.add_final_logit_softcapping(30.0)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
    tokens += [f"word{i}" for i in range(rows - len(tokens))]
    kinds += [1] * (rows - len(kinds))
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * 259 + [-float(i + 1) for i in range(rows - 259)])
    out.add_token_types(kinds)
    out.add_bos_token_id(1)
    out.add_eos_token_id(END)
    if "template" in more:
        out.add_chat_template(more["template"])

    def put(name: str, *shape: int, scale: float | None = None) -> None:
        size = 1.0 / np.sqrt(shape[-1]) if scale is None else scale
        value = rng.standard_normal(shape) * size if len(shape) > 1 else 1 + 0.1 * rng.standard_normal(shape)
        out.add_tensor(name, value.astype(np.float32))

    def matrix(name: str) -> None:
        value = (rng.standard_normal((rows, WIDTH)) * 0.4).astype(np.float32)
        if kind == "F32":
            out.add_tensor(name, value)
        else:
            dtype = gguf.GGMLQuantizationType[kind]
            out.add_tensor(name, gguf.quants.quantize(value, dtype), raw_dtype=dtype)

    matrix("token_embd.weight")
    if not tied:
        matrix("output.weight")
    put("output_norm.weight", WIDTH)
    for i in range(LAYERS):
        block = f"blk.{i}."
        if architecture != "olmo2":
            put(block + "attn_norm.weight", WIDTH)
            put(block + "ffn_norm.weight", WIDTH)
        if architecture == "phi3":
            put(block + "attn_qkv.weight", (HEADS + 2 * KV) * HEAD, WIDTH)
            put(block + "ffn_up.weight", 2 * FF, WIDTH)
        else:
            put(block + "attn_q.weight", HEADS * HEAD, WIDTH)
            put(block + "attn_k.weight", KV * HEAD, WIDTH)
            put(block + "attn_v.weight", KV * HEAD, WIDTH)
            put(block + "ffn_gate.weight", FF, WIDTH)
            put(block + "ffn_up.weight", FF, WIDTH)
        put(block + "attn_output.weight", WIDTH, HEADS * HEAD)
        put(block + "ffn_down.weight", WIDTH, FF)
        if architecture == "qwen2":
            for name, size in (("q", HEADS), ("k", KV), ("v", KV)):
                put(block + f"attn_{name}.bias", size * HEAD)
        if architecture in ("qwen3", "gemma3"):
            put(block + "attn_q_norm.weight", HEAD)
            put(block + "attn_k_norm.weight", HEAD)
        if architecture == "olmo2":
            put(block + "attn_q_norm.weight", HEADS * HEAD)
            put(block + "attn_k_norm.weight", KV * HEAD)
        if architecture in ("gemma2", "gemma3", "olmo2"):
            put(block + "post_attention_norm.weight", WIDTH)
            put(block + "post_ffw_norm.weight", WIDTH)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
