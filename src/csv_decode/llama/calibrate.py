"""Calibration states of a GGUF model: what its body gives while the model writes by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..calibration import LENGTH, OPENINGS, TEMPERATURES
from .body import Body, Vocabulary
from .files import Parts

__all__ = ["collect_states"]

F32 = NDArray[np.float32]
_SEQUENCES = 16


def embed(parts: Parts, tokens: list[int]) -> F32:
    """Inputs of the body (n, d)."""
    rows = parts.embedding.float32(np.array(tokens, np.int64))
    return rows if parts.input_scale == 1.0 else rows * np.float32(parts.input_scale)


def collect_states(
    parts: Parts,
    vocabulary: Vocabulary,
    count: int,
    threads: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> F32:
    """Hidden states (count, d) of sequences from `OPENINGS`, half at temperature 0.8 and half at 1.0, drawn from the
    whole distribution by dense products: the weights are in memory as float32 while this runs."""
    rng = np.random.default_rng(seed)
    weight = parts.spec.rows.float32()
    openings = [ids for ids in (vocabulary.encode(text) for text in OPENINGS) if ids]
    longest = max(len(ids) for ids in openings) + LENGTH
    body = Body(parts.body, parts.width, longest * _SEQUENCES, _SEQUENCES, threads)
    kept: list[F32] = []
    done = 0
    try:
        while done < count:
            chosen = [openings[int(i)] for i in rng.integers(len(openings), size=_SEQUENCES)]
            temperature = np.array([TEMPERATURES[i % len(TEMPERATURES)] for i in range(_SEQUENCES)], np.float32)
            for sequence in range(_SEQUENCES):
                body.drop(sequence)
            tokens = [ids[:-1] for ids in chosen]
            if any(tokens):
                flat = [(token, at, s) for s, ids in enumerate(tokens) for at, token in enumerate(ids)]
                body.evaluate(embed(parts, [t for t, _, _ in flat]), [p for _, p, _ in flat], [s for *_, s in flat], [])
            live = list(range(_SEQUENCES))
            last = [ids[-1] for ids in chosen]
            at = [len(ids) - 1 for ids in chosen]
            for _ in range(LENGTH):
                inputs = embed(parts, [last[s] for s in live])
                states = body.evaluate(inputs, [at[s] for s in live], live, list(range(len(live))))
                kept.append(states)
                done += len(states)
                if progress:
                    progress(min(done, count), count)
                if done >= count:
                    break
                for s, token in zip(live, _draw(states @ weight.T, temperature[live], rng), strict=True):
                    last[s], at[s] = token, at[s] + 1
                live = [s for s in live if not vocabulary.ends(last[s])]
                if not live:
                    break
    finally:
        body.close()
    return np.concatenate(kept)[:count]


def _draw(logits: F32, temperature: F32, rng: np.random.Generator) -> list[int]:
    """A token for each row."""
    logits = logits / temperature[:, None]
    mass = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1, dtype=np.float64)
    point = rng.random(len(mass)) * mass[:, -1]
    return [min(int(np.searchsorted(row, x, side="right")), len(row) - 1) for row, x in zip(mass, point, strict=True)]
