"""What several commands need: a model by name, and the index of its output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import Bars, note, working

if TYPE_CHECKING:
    from ..index import Index
    from ..models import LoadedModel
    from ..spec import HeadSpec

__all__ = [
    "Dtype",
    "IndexFile",
    "ModelName",
    "Opened",
    "Threads",
    "Verbose",
    "build_now",
    "open_model",
    "read_text",
]

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or id, a .gguf file, or demo (Gemma-3-270M).")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads at most, for the model and the head.", show_default="all")
]
Dtype = Annotated[str, typer.Option(help="Type to load the model in: float32, bfloat16 or float16.")]
IndexFile = Annotated[
    Path | None, typer.Option("--index", metavar="FILE", help="An index file.", show_default="from the cache")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what transformers reports while it loads.")]


@dataclass
class Opened:
    """A loaded model and its output layer. `spec` is about raw scores: scale and cap change no order."""

    loaded: LoadedModel
    spec: HeadSpec

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    def index(self, file: Path | None) -> Index:
        """From a file; or the one built last for these weights; or built now, and kept in the cache."""
        if file is not None:
            from ..index.storage import load_index

            return load_index(file, self.spec)
        from ..cache import newest_index

        found = newest_index(self.spec, self.loaded.source)
        if found is not None:
            return found[1]
        note("There is no index for this model yet; building one, which later starts will find.")
        return build_now(self)


def open_model(name: str, dtype: str, threads: int | None, verbose: bool) -> Opened:
    """Loads a model and finds its output layer."""
    from ..models import load_model

    with working(f"loading {name}"):
        loaded = load_model(name, dtype, verbose)
        import torch

        from ..integrations.transformers import head_spec

        if threads is not None:
            torch.set_num_threads(threads)
        return Opened(loaded, head_spec(loaded.model))


def build_now(
    opened: Opened,
    bounds: str | Sequence[str] = "shadow",
    text: str | None = None,
    count: int | None = None,
    build: Mapping[str, Any] | None = None,
    rebuild: bool = False,
    to: Path | None = None,
) -> Index:
    """Calibrates and builds, with progress: into the file `to`, or into the cache."""
    from .. import cache
    from ..calibration import DEFAULT_STATES, calibration_key, collect_states
    from ..index.build import build_index

    count = DEFAULT_STATES if count is None else count
    with Bars() as bars:

        def collect() -> Any:
            if "shadow" not in bounds:
                return None  # the centroid bound knows only the weights
            return collect_states(
                opened.model, opened.tokenizer, text=text, count=count, progress=partial(bars, "calibrating")
            )

        if to is None:
            return cache.get_index(
                opened.spec,
                collect,
                bounds=bounds,
                key=calibration_key(text, count),
                source=opened.loaded.source,
                progress=bars,
                build=build,
                rebuild=rebuild,
            )
        index = build_index(opened.spec, collect(), bounds=bounds, progress=bars, **(build or {}))
    index.save(to)
    return index


def read_text(path: Path) -> str:
    """A text file's content."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 ({error.reason} at byte {error.start})") from None
