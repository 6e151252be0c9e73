"""Shared fixtures. Small heads are normally served dense, so tests that exercise the cascade lower that border."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # faiss and torch would spin on tiny matrices

import numpy as np
import pytest
from numpy.typing import NDArray

import csv_decode.head

# Under a sanitizer (.ci/sanitize): torch, which most of these import, takes minutes to load, and the others are about
# what Python refuses.
if os.environ.get("CSV_DECODE_SANITIZE"):
    collect_ignore = ["test_bad_input.py", "test_bench.py", "test_cache.py", "test_calibration.py", "test_cli.py"]
    collect_ignore += ["test_index.py", "test_real_models.py", "test_transformers.py", "test_verify.py"]


@pytest.fixture
def cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets heads of any size go through the cascade."""
    monkeypatch.setattr(csv_decode.head, "SMALL_HEAD", 0)


def make_head(
    rows: int, width: int, seed: int = 0, kind: str = "gaussian"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A weight (rows, width) and 64 states (64, width) with a decaying spectrum, like those of a real model."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, width)).astype(np.float32)
    if kind == "heavy":
        weight *= rng.pareto(1.5, (rows, 1)).astype(np.float32) + 0.1
    elif kind == "tied":
        weight = np.round(weight)
    elif kind == "duplicate":
        weight = weight[rng.integers(0, max(1, rows // 4), rows)]
    elif kind == "zero":
        weight[rng.random(rows) < 0.5] = 0
    elif kind == "huge":
        weight[rng.random(rows) < 0.02] *= np.float32(1e30)
    elif kind == "tiny":
        weight *= np.float32(1e-30)
    else:
        assert kind == "gaussian", kind
    spectrum = np.geomspace(1, 0.01, width) * rng.standard_normal((64, width))
    states = (spectrum @ np.linalg.qr(rng.standard_normal((width, width)))[0]).astype(np.float32)
    if kind == "tied":
        states = np.round(states * 2)
    return weight, states


KINDS = ["gaussian", "heavy", "tied", "duplicate", "zero", "huge", "tiny"]
