"""`csv-decode cache` and `csv-decode info`."""

from __future__ import annotations

import sys
import time
from enum import Enum
from typing import Annotated

import typer

from .terminal import out, show_facts, show_table, size

__all__ = ["cache", "info"]


class Action(str, Enum):
    list = "list"
    clear = "clear"


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def cache(
    action: Annotated[Action, typer.Argument(help="What to do.")] = Action.list,
    clear: Annotated[bool, typer.Option("--clear", help="The same as the argument clear.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Clear without asking.")] = False,
) -> None:
    """List or clear the cache: indexes, and models converted from .gguf files.

    - `csv-decode cache`

    - `csv-decode cache clear --yes`
    """
    from ..cache import cache_folder, entries
    from ..cache import clear as clear_cache

    found = entries()
    total = sum(entry.bytes for entry in found)
    if clear or action is Action.clear:
        if not found:
            out.print(f"nothing to clear in {cache_folder()}", markup=False, soft_wrap=True)
            return
        if not yes:
            typer.confirm(f"Delete {len(found)} entries, {size(total)}, from {cache_folder()}?", abort=True, err=True)
        out.print(f"{size(clear_cache())} freed")
        return
    if not found:
        out.print(f"the cache is empty: {cache_folder()}", markup=False, soft_wrap=True)
        return
    rows = [
        [
            entry.kind,
            entry.bounds or "",
            (entry.fingerprint or "")[:8],
            size(entry.bytes),
            _ago(entry.built),
            _ago(entry.used),
            entry.path.name,
        ]
        for entry in found
    ]
    show_table(["kind", "bounds", "weights", "size", "built", "used", "name"], rows)
    out.print(f"{size(total)} in {cache_folder()}", markup=False, soft_wrap=True)


def info() -> None:
    """Show versions, the kernels that run on this processor, and where the cache is."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from ..cache import cache_folder
    from ..kernels import simd_info

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    simd = simd_info()
    forced = " (forced by CSV_DECODE_SIMD)" if simd["forced"] else ""
    facts = [
        ("csv-decode", installed("csv-decode")),
        ("kernels", f"{simd['active']}{forced}, of {', '.join(simd['supported'])}"),
        ("threads", str(simd["threads"])),
        ("cache", str(cache_folder())),
        ("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}"),
    ]
    facts += [(name, installed(name)) for name in ("numpy", "safetensors", "torch", "transformers", "gguf")]
    facts += [("faiss", installed("faiss-cpu"))]
    show_facts(facts)
