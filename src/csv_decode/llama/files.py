"""What a .gguf file holds: its output layer and embeddings, as they lie there, and the rest as a file of its own.

llama.cpp always computes the logits of a model that it loads. So the body is derived once, as a second .gguf file with
every tensor but these two (a vocabulary of one token stands for them), and kept in the cache. It is fed with embeddings
and gives hidden states. Weights are not doubled: the body's file has what the original is not mapped for.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache import Source, cache_folder
from ..models import ModelError
from ..spec import BLOCKS, HeadSpec, Rows

__all__ = ["ARCHITECTURES", "Parts", "open_gguf"]

#: Those whose body takes embeddings as its own first step would make them, times a factor that the file's width gives.
#: Others put something between the embedding and the first layer, or behind the last; they are refused.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2")
_SCALED = ("gemma", "gemma2", "gemma3")  # by the square root of the width
_VERSION = 1
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_HEAD, _EMBEDDING, _BIAS = "output.weight", "token_embd.weight", "output.bias"


@dataclass(frozen=True)
class Parts:
    """path: the .gguf file. source: its identity when it was opened. body: the derived file. spec: the output layer;
    embedding: (V, d) rows of the inputs, which are multiplied by input_scale. context: positions trained for."""

    path: Path
    source: Source
    body: Path
    architecture: str
    spec: HeadSpec
    embedding: Rows
    input_scale: float
    context: int

    @property
    def width(self) -> int:
        return self.spec.width


def open_gguf(path: str | os.PathLike[str]) -> Parts:
    """Opens a .gguf file, deriving its body if the cache has none.

    Raises ModelError for a file that is no model, or of an architecture whose body cannot be run alone.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    source = Source.of(path)
    key = hashlib.sha256(f"{_VERSION} {source.identity}".encode()).hexdigest()[:16]
    kept = cache_folder() / "models" / f"{path.stem}-body-{key}"
    body, about = kept / "body.gguf", kept / "about.json"
    facts: dict[str, Any] | None = None
    if body.is_file():
        try:
            facts = json.loads(about.read_text())
        except (OSError, ValueError):
            facts = None
    if facts is None:
        facts = _derive(path, kept)
    head, bias = _rows(path, facts["head"]), None
    if facts["bias"] is not None:
        bias = _rows(path, facts["bias"]).float32()[0]
    embedding = head if facts["embedding"] == facts["head"] else _rows(path, facts["embedding"])
    spec = HeadSpec(head, bias, softcap=facts["softcap"])
    return Parts(path, source, body, facts["architecture"], spec, embedding, facts["input_scale"], facts["context"])


def _rows(path: Path, tensor: dict[str, Any]) -> Rows:
    """A tensor of the file, mapped; types that the kernels do not read become float32 in memory."""
    kind, shape = tensor["kind"], tuple(tensor["shape"])
    if kind in _DTYPES:
        data = np.memmap(path, _DTYPES[kind], "r", tensor["offset"], shape)
        return Rows(np.asarray(data), {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind])
    packed = np.asarray(np.memmap(path, np.uint8, "r", tensor["offset"], shape))
    if kind.lower() in BLOCKS:
        return Rows.packed(packed, kind.lower())
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return Rows(np.asarray(dequantize(packed, GGMLQuantizationType[kind]), np.float32), "float32")


def _derive(path: Path, kept: Path) -> dict[str, Any]:
    """Writes the body's file and what is to be known of the original, and returns the latter."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            "reading a .gguf file needs the gguf package: pip install '.[llama]' in the checkout"
        ) from None
    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever its parser trips over
        raise ModelError(f"{path} cannot be read as a .gguf file: {str(error)[:200]}") from None
    field = reader.get_field("general.architecture")
    architecture = str(field.contents()) if field is not None else "?"
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path.name} is a {architecture} model; its body cannot be run apart from its output layer. Supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if _EMBEDDING not in tensors or "output_norm.weight" not in tensors:
        raise ModelError(f"{path.name} has no {_EMBEDDING} or no output_norm.weight, so it is no whole language model")

    def number(name: str) -> float | None:
        found = reader.get_field(f"{architecture}.{name}")
        return None if found is None else float(found.contents())

    def place(name: str) -> dict[str, Any]:
        tensor = tensors[name]
        kind = tensor.tensor_type.name
        # of plain numbers the tensor's shape, whose first is the width; of blocks the bytes of each row
        shape = [int(n) for n in (tensor.shape[::-1] if kind in _DTYPES else tensor.data.shape)]
        return {
            "kind": kind,
            "offset": int(tensor.data_offset),
            "shape": shape if len(shape) == 2 else [1, *shape],
        }

    width = int(number("embedding_length") or 0)
    facts = {
        "architecture": architecture,
        "embedding": place(_EMBEDDING),
        "head": place(_HEAD if _HEAD in tensors else _EMBEDDING),
        "bias": place(_BIAS) if _BIAS in tensors else None,
        "input_scale": float(np.sqrt(np.float32(width))) if architecture in _SCALED else 1.0,
        "softcap": number("final_logit_softcapping") or None,
        "context": int(number("context_length") or 0),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".body.", dir=kept.parent) as work:
        folder = Path(work) / "body"
        folder.mkdir()
        _write_body(reader, architecture, width, _HEAD in tensors, folder / "body.gguf")
        (folder / "about.json").write_text(json.dumps(facts))
        try:
            os.replace(folder, kept)
        except OSError:  # another process was faster
            if not (kept / "about.json").is_file():
                raise
    return facts


def _write_body(reader: Any, architecture: str, width: int, untied: bool, target: Path) -> None:
    """Everything but the vocabulary: its metadata, the embeddings and the output layer."""
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name in ("general.architecture", f"{architecture}.vocab_size"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(1)
    nothing: NDArray[np.float32] = np.zeros((1, width), np.float32)
    writer.add_tensor(_EMBEDDING, nothing)
    if untied:
        writer.add_tensor(_HEAD, nothing)
    for tensor in reader.tensors:
        if tensor.name not in (_EMBEDDING, _HEAD, _BIAS):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
