"""`build_index`: from weights and calibration states to an index."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..bounds.planes import MAX_PLANES
from ..kernels import require_ieee, thread_count
from ..spec import Array, HeadSpec, as_states, flag, one_of, positive, require_callable, shown, whole
from . import Index
from .centroid import build_centroid
from .shadow import build_shadow
from .verify import verify_index

__all__ = ["Progress", "build_index"]

#: Called as progress(stage, done, total).
Progress = Callable[[str, int, int], None]
_BOUNDS = ("centroid", "shadow")
#: Bits of the planes by default.
BITS: dict[str, tuple[float, ...]] = {"deterministic": (2.4, 0.75, 1.35), "probabilistic": (1.2, 0.75, 1.35)}


def _chosen(bounds: Any) -> tuple[str, ...]:
    """The bounds asked for, coarse to fine."""
    try:
        chosen = (bounds,) if isinstance(bounds, str) else tuple(str(one_of("bounds", b, _BOUNDS)) for b in bounds)
        if not chosen or len(set(chosen)) != len(chosen) or any(name not in _BOUNDS for name in chosen):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"bounds is {shown(bounds)}, expected 'shadow', 'centroid' or ['centroid', 'shadow']"
        ) from None
    if len(chosen) == 2 and chosen != _BOUNDS:
        raise ValueError(f"bounds is {shown(bounds)}, but the coarse bound comes first: ['centroid', 'shadow']")
    return chosen


def build_index(
    spec: HeadSpec | Array,
    calibration: Array | None = None,
    bounds: str | Sequence[str] = "shadow",
    seed: int | None = None,
    *,
    guarantee: str = "deterministic",
    bits: tuple[float, ...] | None = None,
    ridge: float = 0.01,
    clusters: int | None = None,
    iterations: int = 8,
    spherical: bool = False,
    verify: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Index:
    """Builds the index of a head.

    Args:
        spec: the `HeadSpec`, or a bare weight (V, d).
        calibration: (N, d) hidden states like those to be served, a few thousand, for the shadow bound. They decide
            how few rows survive, never whether an answer is right. None: isotropic, which is sound but reads more.
        bounds: "shadow", "centroid", or both as a sequence: the cascade ("centroid", "shadow").
        seed: for rotations, samples and k-means; None draws one. The settings record it.
        guarantee: "deterministic", or "probabilistic": codes under a rotation drawn from the system's entropy, whose
            bounds each fail with a small probability that the head is told (docs/mathematics.md, section 9).
        bits: mean bits a weight of each plane, coarse to fine; rounded in the second so that a row fills cache lines.
        ridge: added to the spectrum of the states, in units of its mean.
        clusters, iterations, spherical: of the centroid bound; C defaults to 0.015 V.
        verify: check every radius against the weights at the end.
        threads: at most this many; None: all that the process may use.
        progress: called as progress(stage, done, total).

    Raises ValueError for NaN or infinite weights, a calibration of another width, or unknown bounds.
    """
    started = time.perf_counter()
    spec = HeadSpec.of(spec)
    chosen = _chosen(bounds)
    guarantee = one_of("guarantee", guarantee, tuple(BITS))
    if guarantee != "deterministic" and chosen != ("shadow",):
        raise ValueError(f"the probabilistic mode has the shadow bound alone, not bounds={shown(bounds)}")
    given = BITS[guarantee] if bits is None else bits
    try:
        bits = tuple(positive("bits", b, 7) for b in given)
        if not 1 <= len(bits) <= MAX_PLANES:
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(
            f"bits is {shown(given)}, expected 1 to {MAX_PLANES} numbers above 0 and at most 7, one a plane"
        ) from None
    ridge = positive("ridge", ridge)  # it keeps the transform invertible
    if clusters is not None:
        clusters = whole("clusters", clusters, 1, spec.n_rows)
    iterations = whole("iterations", iterations, 1, 1000)
    seed = secrets.randbits(31) if seed is None else whole("seed", seed, 0, 2**63 - 1)
    threads = thread_count(threads)
    spherical, verify = flag("spherical", spherical), flag("verify", verify)
    require_callable("progress", progress)
    require_ieee()
    spec.require_finite()
    rng = np.random.default_rng(seed)

    def report(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(stage, done, total) if progress else None

    settings: dict[str, Any] = {"bounds": list(chosen), "seed": seed}
    row_ids, centroid, shadow = None, None, None
    if "centroid" in chosen:
        centroid, row_ids = build_centroid(spec, clusters, iterations, spherical, seed, report("clustering"), threads)
        settings |= {"clusters": len(centroid.radius), "iterations": iterations, "spherical": spherical}
    if "shadow" in chosen:
        states = np.eye(spec.width) if calibration is None else as_states(calibration, spec.width)
        if not states.any():
            raise ValueError("the calibration states are all zero")
        probabilistic = guarantee == "probabilistic"
        shadow = build_shadow(spec, states, row_ids, bits, ridge, rng, report("coding"), threads, probabilistic)
        settings |= {
            "guarantee": guarantee,
            "bits": list(bits),
            "ridge": ridge,
            "calibration_states": 0 if calibration is None else len(states),
        }
    index = Index(
        fingerprint=spec.fingerprint,
        kind=spec.rows.kind,
        shape=spec.rows.shape,
        n_rows=spec.n_rows,
        row_ids=row_ids,
        centroid=centroid,
        shadow=shadow,
        settings=settings,
    )
    if verify:
        verify_index(index, spec, threads=threads, progress=report("verifying"))
    settings["seconds"] = round(time.perf_counter() - started, 1)
    return index
