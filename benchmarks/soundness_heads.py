"""Heads and states made to break a bound: ties, cancellation, extreme ranges, and states along what codes lose."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from csv_decode import HeadSpec
from csv_decode.bounds.planes import BLOCK
from csv_decode.bounds.shadow import ShadowBound

KINDS = (
    "gaussian",
    "heavy tails",
    "near ties",
    "cancelling",
    "subnormal",
    "mixed exponents",
    "identical",
    "mostly zero",
    "one huge coordinate",
    "huge rows",
    "tiny",
    "integers",
)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 97)


@dataclass
class Head:
    """A head (rows, its real numbers as float32), states to calibrate on, and what it is called."""

    name: str
    spec: HeadSpec
    weight: np.ndarray
    calibration: np.ndarray


def rows_of(rng: np.random.Generator, kind: str, n: int, width: int) -> np.ndarray:
    w = rng.standard_normal((n, width))
    if kind == "heavy tails":
        w *= rng.pareto(1.2, (n, 1)) + 0.1
    elif kind == "near ties":
        w = np.repeat(rng.standard_normal((1, width)), n, 0).astype(np.float32)
        w = np.nextafter(w, np.where(rng.random(w.shape) < 0.5, -np.inf, np.inf).astype(np.float32))
    elif kind == "cancelling":
        size = 10.0 ** rng.integers(0, 30)
        w[:, 0] = size
        w[:, -1] = -size if width > 1 else size
    elif kind == "subnormal":
        w *= 10.0 ** rng.integers(-45, -37, (n, 1))
    elif kind == "mixed exponents":
        w *= 10.0 ** rng.integers(-30, 30, (n, width))
    elif kind == "identical":
        w = w[rng.integers(0, max(1, n // 50), n)]
    elif kind == "mostly zero":
        w[rng.random(n) < 0.9] = 0
    elif kind == "one huge coordinate":
        w[:, rng.integers(width)] *= 1e20
    elif kind == "huge rows":
        w[rng.random(n) < 0.02] *= 10.0 ** rng.integers(30, 38)
    elif kind == "tiny":
        w *= 1e-30
    elif kind == "integers":
        w = np.round(w * 2)
    return np.clip(w, -3e38, 3e38).astype(np.float32)


def head(rng: np.random.Generator, rows: int, kind: str | None = None, width: int | None = None) -> Head:
    """A random head of such a kind; a third of them have a bias, a third each of the three types."""
    kind = kind or str(rng.choice(KINDS))
    width = width or int(rng.choice(WIDTHS))
    weight: Any = rows_of(rng, kind, rows, width)
    stored = str(rng.choice(["float32", "float16", "bfloat16"]))
    if stored == "float16":
        weight = np.clip(weight, -65504, 65504).astype(np.float16)
    elif stored == "bfloat16":
        import torch

        weight = torch.from_numpy(weight).bfloat16()
        weight = torch.where(weight.isfinite(), weight, torch.zeros_like(weight))
    bias = None
    if rng.random() < 1 / 3:
        bias = rng.standard_normal(rows) * 10.0 ** rng.integers(-20, 20, rows if rng.random() < 0.5 else 1)
    spec = HeadSpec(weight, None if bias is None else bias.astype(np.float32))
    calibration = rng.standard_normal((32, width)) * np.geomspace(1, 0.01, width)
    name = f"{kind}, {rows} x {width} {stored}{'' if bias is None else ', bias'}"
    return Head(name, spec, spec.rows.float32(), calibration.astype(np.float32))


def residual_states(rng: np.random.Generator, shadow: ShadowBound, weight: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """States (n, d) along what the codes leave of `rows`: M h points along the rest in every group of dimensions, so
    that Cauchy-Schwarz is an equality there."""
    dims, width = shadow.transform.shape
    m = shadow.transform[:width].astype(np.float64)
    inverse = np.linalg.inv(m)  # M h = z, h = M^-1 z, on the dimensions that are not padding
    x = (weight[rows].astype(np.float64) - shadow.mean) @ inverse
    rho = (shadow.rho[rows].astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    coded, rests = np.zeros((len(rows), dims)), []
    for plane in shadow.planes:
        words = np.concatenate([plane.rows(int(i), int(i) + 1) for i in rows])
        coded = coded + plane.decode(words, dims)
        rests.append(x - rho[:, None] * coded[:, :width])
    which = rng.integers(0, len(rests), len(rows))
    z = np.array([rests[p][i] for i, p in enumerate(which)])
    edges = np.linspace(0, dims // BLOCK, 5).round().astype(int) * BLOCK
    for a, b in itertools.pairwise(edges.tolist()):
        part = slice(a, min(b, width))
        length = np.linalg.norm(z[:, part], axis=1, keepdims=True)
        z[:, part] *= rng.lognormal(0, 1, (len(rows), 1)) / np.where(length > 0, length, 1)
    sign = rng.choice([-1.0, 1.0], (len(rows), 1))
    return sign * z @ inverse.T


def states(
    rng: np.random.Generator, shadow: ShadowBound | None, weight: np.ndarray, count: int, real: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Hostile states (count, d), float64 with values within float32's range, and for each the row that it aims at."""
    n, width = weight.shape
    aim = rng.integers(0, n, count)
    h = rng.standard_normal((count, width)) * np.geomspace(1, 0.01, width)
    if real is not None:
        h = real[rng.integers(0, len(real), count)].astype(np.float64)
    kind = rng.integers(0, 12, count)
    m = inverse = None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        if shadow is not None:
            m = shadow.transform[:width].astype(np.float64)
            inverse = np.linalg.inv(m)
            along = kind <= 3
            along[0] = True
            h[along] = residual_states(rng, shadow, weight, aim[along])
        for b in range(count):
            w = weight[aim[b]].astype(np.float64)
            if kind[b] == 4 and m is not None and inverse is not None:  # half a step of the state's quantiser
                z = m @ h[b]
                unit = np.abs(z).max() / 32512
                h[b] = inverse @ ((np.floor(z / unit) + 0.5) * unit)
            elif kind[b] == 5 and shadow is not None and inverse is not None:  # what plane 0 has no bits for
                bare = np.repeat(shadow.planes[0].bits == shadow.planes[0].bits.min(), BLOCK)[:width]
                h[b] = inverse @ (rng.standard_normal(width) * bare)
            elif kind[b] == 6:  # large products that cancel: across the row
                size = w @ w
                h[b] = h[b] * 1e3
                if 0 < size < np.inf:
                    h[b] -= (h[b] @ w) / size * w
            elif kind[b] == 7:  # between two rows
                other = weight[rng.integers(n)].astype(np.float64) - w
                size = other @ other
                if 0 < size < np.inf:
                    h[b] -= (h[b] @ other) / size * other
            elif kind[b] == 8:
                h[b] = 0
                h[b, rng.integers(width)] = rng.choice([3e38, -3e38, 1e30, 1e-38, 1.0])
            elif kind[b] == 9:
                h[b] *= 10.0 ** rng.integers(-40, 30, width)
            elif kind[b] == 10:
                h[b] = np.round(h[b] * 4)
            elif kind[b] == 11:
                h[b] = w if rng.random() < 0.5 else -w
        far = rng.random(count) < 0.3
        h[far] *= 10.0 ** rng.integers(-99, 30, (count, 1))[far]
        if rng.random() < 0.2:
            h[0] = 0
        h[~np.isfinite(h).all(axis=1)] = 1.0
        h = np.clip(h, -3e38, 3e38)
    narrow = rng.random(count) < 0.5
    h[narrow] = h[narrow].astype(np.float32)
    return h, aim
