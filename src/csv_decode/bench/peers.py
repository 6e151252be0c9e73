"""What people would use instead of a certified head: dense products, int8 weights, and faiss.

Every peer is a function from an array (B, d) of float32 and k to ids (B, k), timed as a whole. None is exact by
construction: float32 rounds its sums, bfloat16 and int8 round the weights as well.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import HeadSpec
from .machine import free_bytes

__all__ = ["PEERS", "Peer", "build_peers", "set_threads"]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_CHUNK = 8192
#: Never fill more of the free memory than this.
_SHARE = 0.8


@dataclass(frozen=True)
class Peer:
    """call(states (B, d), k) gives ids (B, k). weight_bytes: what it reads of the head in a step."""

    name: str
    call: Callable[[F32, int], I64]
    weight_bytes: int


@dataclass(frozen=True)
class _Recipe:
    """How to make a peer. kept, extra: bytes a weight that stay, and that are needed for a moment besides."""

    name: str
    build: Callable[[HeadSpec], Callable[[F32, int], I64]]
    kept: float
    extra: float = 0.0
    stored: str | None = None  # weights stored in this type are used where they are


def set_threads(count: int) -> None:
    """Threads of torch and faiss, for all of the process."""
    import torch

    torch.set_num_threads(count)
    try:
        import faiss
    except ImportError:
        return
    faiss.omp_set_num_threads(count)


def build_peers(
    spec: HeadSpec, names: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be had here, and why the others cannot: package missing, too little memory, and so on."""
    found, skipped = [], {}
    recipes = [recipe for recipe in PEERS if names is None or recipe.name in names]
    for done, recipe in enumerate(recipes):
        weights = spec.n_rows * spec.width
        kept = 0.0 if recipe.stored == spec.rows.kind else recipe.kept
        # Weights that are not float32 are widened once more while a peer is made.
        needed = int(weights * (kept + recipe.extra + (0 if spec.rows.kind == "float32" else 4)))
        free = free_bytes()
        if free is not None and needed > _SHARE * free:
            skipped[recipe.name] = f"would need {needed / 1e9:.2g} GB, and {free / 1e9:.2g} GB of memory are free"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.ao says that it will move
                call = recipe.build(spec)
                call(np.zeros((1, spec.width), np.float32), 1)
        except ImportError as error:
            skipped[recipe.name] = f"not installed ({error})"
        except Exception as error:  # a peer that does not run here is no reason to stop
            skipped[recipe.name] = f"does not run here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            found.append(Peer(recipe.name, call, int(weights * recipe.kept)))
        if progress:
            progress(done + 1, len(recipes))
    return found, skipped


def _weight(spec: HeadSpec, dtype: Any = None) -> Any:
    """Valid rows as a torch tensor, in the same memory where the type is the stored one."""
    import torch

    rows = spec.valid_rows_only()
    if rows.kind == "bfloat16":
        weight = torch.from_numpy(rows.data.view(np.int16)).view(torch.bfloat16)
    else:
        weight = torch.from_numpy(rows.data)
    return weight if dtype is None else weight.to(dtype)


def _bias(spec: HeadSpec, dtype: Any) -> Any:
    import torch

    return None if spec.bias32 is None else torch.from_numpy(spec.bias32[: spec.n_rows]).to(dtype)


def _best(logits: Any, k: int) -> I64:
    ids: I64 = (logits.argmax(-1, keepdim=True) if k == 1 else logits.topk(k).indices).numpy()
    return ids


def _linear(name: str) -> Callable[[HeadSpec], Callable[[F32, int], I64]]:
    """What transformers runs: `linear` in one type, then argmax or topk."""

    def build(spec: HeadSpec) -> Callable[[F32, int], I64]:
        import torch

        dtype = getattr(torch, name)
        weight, bias = _weight(spec, dtype), _bias(spec, dtype)

        def call(h: F32, k: int) -> I64:
            with torch.inference_mode():
                return _best(torch.nn.functional.linear(torch.from_numpy(h).to(dtype), weight, bias), k)

        return call

    return build


def _int8_packed(spec: HeadSpec) -> Callable[[F32, int], I64]:
    """torch's weight-only kernel: int8 weights, a scale for each row, bfloat16 states and logits."""
    import torch

    scale = torch.empty(spec.n_rows, dtype=torch.bfloat16)
    codes = torch.empty(spec.n_rows, spec.width, dtype=torch.int8)
    weight, bias = _weight(spec), _bias(spec, torch.bfloat16)
    for first in range(0, spec.n_rows, _CHUNK):
        part = slice(first, min(first + _CHUNK, spec.n_rows))
        rows = weight[part].float()
        scale[part] = (rows.abs().amax(1) / 127).clamp(min=1e-30).bfloat16()
        codes[part] = (rows / scale[part].float()[:, None]).round().clamp(-127, 127).to(torch.int8)

    def call(h: F32, k: int) -> I64:
        with torch.inference_mode():
            logits = torch.ops.aten._weight_int8pack_mm(torch.from_numpy(h).bfloat16(), codes, scale)
            return _best(logits if bias is None else logits + bias, k)

    return call


def _module(spec: HeadSpec, dtype: Any) -> Any:
    import torch

    layer = torch.nn.Linear(spec.width, spec.n_rows, bias=spec.bias32 is not None, device="meta")
    layer.weight = torch.nn.Parameter(_weight(spec, dtype), requires_grad=False)
    if spec.bias32 is not None:
        layer.bias = torch.nn.Parameter(_bias(spec, dtype), requires_grad=False)
    return torch.nn.Sequential(layer).eval()


def _int8_dynamic(per_row: bool) -> Callable[[HeadSpec], Callable[[F32, int], I64]]:
    """torch's dynamic quantisation: int8 weights with one scale or one a row, states rounded to 8 bits on the fly."""

    def build(spec: HeadSpec) -> Callable[[F32, int], I64]:
        import torch

        quantization: Any = importlib.import_module("torch.ao.quantization")
        kinds = {"0": quantization.per_channel_dynamic_qconfig if per_row else quantization.default_dynamic_qconfig}
        model = quantization.quantize_dynamic(_module(spec, torch.float32), kinds, dtype=torch.qint8)

        def call(h: F32, k: int) -> I64:
            with torch.inference_mode():
                return _best(model(torch.from_numpy(h)), k)

        return call

    return build


def _torchao(spec: HeadSpec) -> Callable[[F32, int], I64]:
    """torchao's weight-only int8, without torch.compile."""
    import torch

    torchao: Any = importlib.import_module("torchao.quantization")
    model = _module(spec, torch.bfloat16)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())

    def call(h: F32, k: int) -> I64:
        with torch.inference_mode():
            return _best(model(torch.from_numpy(h).bfloat16()), k)

    return call


def _faiss(quantised: bool) -> Callable[[HeadSpec], Callable[[F32, int], I64]]:
    """faiss's scan of all rows by inner product. A bias is one more coordinate, which is 1 in every state."""

    def build(spec: HeadSpec) -> Callable[[F32, int], I64]:
        import faiss

        width = spec.width + (spec.bias32 is not None)
        index: Any
        if quantised:
            index = faiss.IndexScalarQuantizer(width, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        else:
            index = faiss.IndexFlatIP(width)

        def rows(chosen: Any) -> F32:
            part = spec.rows.float32(chosen)
            if spec.bias32 is not None:
                part = np.concatenate([part, spec.bias32[chosen][:, None]], axis=1)
            return np.ascontiguousarray(part)

        if quantised:  # the range of each coordinate; every nth row is enough
            index.train(rows(np.arange(0, spec.n_rows, max(1, spec.n_rows // 50_000))))
        for first in range(0, spec.n_rows, _CHUNK):
            index.add(rows(slice(first, min(first + _CHUNK, spec.n_rows))))

        def call(h: F32, k: int) -> I64:
            if spec.bias32 is not None:
                h = np.concatenate([h, np.ones((len(h), 1), np.float32)], axis=1)
            ids: I64 = index.search(h, k)[1]
            return ids

        return call

    return build


PEERS = (
    _Recipe("torch float32", _linear("float32"), 4, stored="float32"),
    _Recipe("torch bfloat16", _linear("bfloat16"), 2, stored="bfloat16"),
    _Recipe("torch int8, weight only", _int8_packed, 1),
    _Recipe("torch int8, dynamic", _int8_dynamic(per_row=False), 1, extra=8),
    _Recipe("torch int8, dynamic by row", _int8_dynamic(per_row=True), 1, extra=8),
    _Recipe("torchao int8, weight only", _torchao, 1, extra=6),
    _Recipe("faiss flat", _faiss(quantised=False), 4, extra=4),  # its vector grows by doubling
    _Recipe("faiss 8-bit", _faiss(quantised=True), 1, extra=1),
)
