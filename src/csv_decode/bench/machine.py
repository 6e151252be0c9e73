"""The machine: what figures depend on, how much memory is free, and how to make a cache cold."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels import simd_info

__all__ = ["Sweeper", "free_bytes", "machine_info", "threads_text"]

_PACKAGES = ("csv-decode", "numpy", "torch", "transformers", "faiss-cpu", "torchao")
#: Of the last cache, since caches keep some old lines under a stream of new ones; in bytes, at least and at most.
_SWEEP, _LEAST_SWEEP, _MOST_SWEEP = 4, 128 << 20, 512 << 20


def machine_info(threads: Sequence[int]) -> dict[str, Any]:
    """Processor, threads, kernels and versions, for the report."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    simd = simd_info()
    return {
        "cpu": _cpu_model(),
        "cores": simd["threads"],
        "l3_bytes": _last_cache(),
        "threads": list(threads),
        "kernels": simd["active"],
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _last_cache() -> int | None:
    """Bytes of the largest cache of processor 0, where the system tells."""
    best = None
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG]?)\s*", file.read_text())
        if found:
            best = max(best or 0, int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]])
    return best


def free_bytes() -> int | None:
    """Memory that can still be had without swapping; None where the system does not tell.

    In a container, its own limit counts as well: going over it ends the process.
    """
    found = []
    try:
        available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if available:
            found.append(int(available[1]) << 10)
    except OSError:
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        cache = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        found.append(int(limit) - int(used) + (int(cache[1]) if cache else 0))
    except (OSError, ValueError):  # no such group, or "max": no limit
        pass
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found) if found else None


class Sweeper:
    """Reads several times what the last cache holds, so that the next method finds its data where a decoder would: in
    memory, after all the layers of the model went through the cache. The few milliseconds are also a pause in which the
    thread pool of the method before stops spinning."""

    def __init__(self, size: int | None = None) -> None:
        if size is None:
            size = min(max(_SWEEP * (_last_cache() or 0), _LEAST_SWEEP), _MOST_SWEEP)
        self._data = np.ones(max(size // 8, 1), np.int64)

    def __call__(self) -> None:
        self._data.sum()


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
