"""Adapters to other libraries. Each loads its framework only when one of its names is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .transformers import Accelerated, accelerate, accelerated, head_spec, restore

__all__ = ["Accelerated", "accelerate", "accelerated", "head_spec", "restore"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import transformers

    return getattr(transformers, name)
