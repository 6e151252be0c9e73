"""Heads that work on the OpenMP threads of the engine that runs the layers."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import csv_decode as cd

from .conftest import make_head

pytestmark = [
    pytest.mark.usefixtures("cascade"),
    pytest.mark.skipif(sys.platform != "linux", reason="engines share their threads on Linux"),
]


def heads(**more: Any) -> tuple[cd.CertifiedHead, cd.CertifiedHead, np.ndarray]:
    weight, states = make_head(9000, 40)
    index = cd.build_index(weight, states[:32], seed=0, threads=2)
    return cd.CertifiedHead(index, weight, threads=2), cd.CertifiedHead(index, weight, threads=2, **more), states[32:]


def test_an_engines_threads_give_the_same_answers() -> None:
    own, shared, states = heads(engine="torch")
    assert torch.get_num_threads() >= 1
    assert not own.kernels._team.shared  # type: ignore[attr-defined]
    assert shared.kernels._team.shared  # type: ignore[attr-defined]
    for mode in (
        lambda head: head.top_k(states, 7),
        lambda head: head.sample(states, seed=3),
        lambda head: head.sample(states, seed=3, top_p=0.9),
        lambda head: head.top_k(states, 7, allowed=np.arange(9000) % 2 == 0),
    ):
        a, b = mode(own), mode(shared)
        assert np.array_equal(a.ids, b.ids)
        assert np.array_equal(a.logits, b.logits)
        assert np.array_equal(a.certificates.survivors, b.certificates.survivors)


def test_engines_that_are_not_there() -> None:
    own, absent, states = heads(engine="llama_cpp")  # not loaded here, or loaded by another test: either will do
    assert np.array_equal(own.top_k(states).ids, absent.top_k(states).ids)
    with pytest.raises(ValueError, match=r"engine is 'cuda', expected 'torch' or 'llama_cpp'"):
        heads(engine="cuda")


def test_a_forked_child_leaves_the_engines_threads_alone() -> None:
    _, shared, states = heads(engine="torch")
    expected = shared.top_k(states, 3).ids
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(np.array_equal(shared.top_k(states, 3).ids, expected)))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "the child hangs or fails"
    assert queue.get()


def test_an_engines_threads_keep_subnormal_numbers_for_us_and_their_own_mode() -> None:
    """Workers have the float mode of the thread that made them; a task must not be done in it."""
    code = """
import numpy as np, torch
torch.set_num_threads(2)
torch.set_flush_denormal(True)
tiny = torch.full((1 << 22,), 1e-40)
flushed = (tiny * 1.0).count_nonzero()
torch.set_flush_denormal(False)
from csv_decode.kernels import get_kernels
from csv_decode.spec import Rows
kernels = get_kernels(None, 2, "torch")
assert kernels._team.shared
rows = np.full((20000, 8), 1e-40, np.float32)
for _ in range(20):
    value, _ = kernels.score(Rows.of(rows), np.ones((1, 8)))
    assert (value > 7.9e-40).all()
assert (torch.full((1 << 22,), 1e-40) * 1.0).count_nonzero() > 0  # of this thread at least
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr
