"""What bounds all rows together: lengths of errors, and sums of exponentials made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode import _native
from csv_decode.bounds.moments import Moment
from csv_decode.index.structure import require_structure
from csv_decode.kernels import get_kernels
from csv_decode.kernels.native import supported
from csv_decode.modes import Mass

from .conftest import KINDS, make_head


def centres(index: cd.Index, h: np.ndarray, bias: np.ndarray | None) -> list[np.ndarray]:
    """What each plane gives for every row of one state."""
    shadow, kernels = index.shadow, get_kernels("reference")
    assert shadow is not None
    planes = [kernels.bind(plane, shadow.rho, bias) for plane in shadow.planes]
    states, _ = shadow.prepare(kernels, h[None])
    out = [kernels.screen(planes[0], states[0], None)[0][0]]
    for i in range(1, len(planes)):
        out.append(kernels.refine(planes[i], states[i], np.arange(len(shadow.rho)), out[-1])[0])
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [17, 64])
def test_errors_of_all_rows_are_no_longer_than_spread_says(kind: str, width: int) -> None:
    weight, states = make_head(700, width, kind=kind)
    bias = np.linspace(-3, 3, 700, dtype=np.float32)
    index = cd.build_index(cd.HeadSpec(weight, bias), states, seed=0)
    shadow = index.shadow
    assert shadow is not None
    if shadow.moments is None:
        pytest.skip("float32 cannot hold these")
    # and states that are as bad as can be: along what the planes leave most of, and along what one row leaves
    white = np.linalg.pinv(shadow.transform.astype(np.float64))
    worst = [white @ (moment.matrix[int(np.argmax(moment.size))] * moment.size) for moment in shadow.moments]
    rows = weight[:2].astype(np.float64)
    h = np.concatenate([states[:12], states[:1] * 1e-12, np.array(worst), rows]).astype(np.float32).astype(np.float64)
    h = h[np.abs(h).max(axis=1) > 0]
    spread = shadow.spread(get_kernels("reference"), h, bias)
    assert spread is not None
    for b, state in enumerate(h):
        exact = weight.astype(np.longdouble) @ state.astype(np.longdouble) + bias
        for i, centre in enumerate(centres(index, state, bias)):
            # where a centre is not finite, the sums leave the row out
            assert np.sqrt(np.sum((exact - centre)[np.isfinite(centre)] ** 2)) <= spread[b, i]


def test_spread_is_near_the_truth() -> None:
    weight, states = make_head(5000, 96)
    index = cd.build_index(weight, states, seed=0)
    assert index.shadow is not None
    h = states[:4].astype(np.float64)
    spread = index.shadow.spread(get_kernels("reference"), h, None)
    assert spread is not None
    for b in range(4):
        exact = weight.astype(np.float64) @ h[b]
        for i, centre in enumerate(centres(index, h[b], None)):
            assert spread[b, i] <= 1.5 * np.sqrt(np.sum((exact - centre) ** 2))


def test_terms_hold_and_are_the_same_on_every_instruction_set() -> None:
    rng = np.random.default_rng(0)
    centre = np.concatenate([rng.standard_normal(4000) * 20, [0.0, 3e38, -3e38, np.inf, 1.0, 0.0, -np.inf]])
    upper = np.concatenate([centre[:4000] + rng.exponential(5, 4000), [0.0, 3e38, 3e38, np.inf, np.nan, 1e30, -np.inf]])
    centre, upper = centre.astype(np.float32), upper.astype(np.float32)
    for rate in (0.01, 1.4427, 60.0):
        start, got = float(np.float32(60)), []
        for isa in supported():
            high, likely, peak = (np.empty_like(centre) for _ in range(3))
            _native.joint_bound(isa, centre, upper, start, rate, high, likely, peak)
            got.append(np.stack([high, likely, peak]).tobytes())
            x = float(np.float32(rate)) * np.log(2)
            with np.errstate(over="ignore"):
                exact_high = np.exp(x * (upper[:4000].astype(np.float64) - start))
                exact = np.exp(x * (centre[:4000].astype(np.float64) - start))
            reach = (x * (upper[:4000].astype(np.float64) - centre[:4000])) ** 2
            assert (high[:4000] >= exact_high).all()
            seen = (exact > 2.0**-63) & (exact < 2.0**119)
            assert (np.abs(likely[:4000][seen] / exact[seen] - 1) <= 2.0**-12).all()
            assert (likely[:4000][exact <= 2.0**-63] <= 2.0**-62.9).all()
            assert (peak[:4000] >= exact_high / np.maximum(2, reach)).all()
            assert np.isinf(peak[4003:4005]).all()
            assert np.isinf(high[4004])
            assert high[4006] == likely[4006] == peak[4006] == 0
        assert got == [got[0]] * len(got)


@pytest.mark.parametrize("kernels", [*supported(), "reference"])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_sums_of_exponentials_lie_between_their_bounds(kernels: str, temperature: float, cascade: None) -> None:
    weight, states = make_head(3000, 48, seed=3)
    index = cd.build_index(weight, states, seed=0)
    head = cd.CertifiedHead(index, weight, kernels=kernels, threads=1)
    for h in states[:6] / 4:
        scan = head._scan_of(h, None)
        logits = weight.astype(np.float64) @ h.astype(np.float64)
        scan.leaders(0, 8)
        for step in range(4):
            mass = Mass(scan, 0, temperature, joint=True)
            left = np.setdiff1d(np.arange(3000), mass.ids)
            true = np.exp((logits[left] - mass.start) / temperature).sum()
            assert mass.rest_low <= true <= mass.rest
            assert mass.rest <= mass.bins.sum()
            if step < scan.levels:
                scan.lift(0, step, 40 - 8 * step)


def test_the_joint_bound_reads_less() -> None:
    weight, states = make_head(20000, 128, seed=1)
    index = cd.build_index(weight, states, seed=0)
    assert index.shadow is not None
    alone = dataclasses.replace(index, shadow=dataclasses.replace(index.shadow, moments=None))
    scored = [
        cd.CertifiedHead(some, weight).softmax(states[:6], 0.01).certificates.rows_scored.sum()
        for some in (index, alone)
    ]
    assert scored[0] < 0.9 * scored[1]


@pytest.mark.parametrize("part", ["matrix", "size", "scale", "coding", "lean"])
def test_verify_index_finds_moments_that_do_not_hold(part: str) -> None:
    weight, states = make_head(600, 64)
    index = cd.build_index(weight, states, seed=0)
    shadow = index.shadow
    assert shadow is not None
    assert shadow.moments is not None
    old = shadow.moments[1]
    change: dict[str, Any] = {}
    if part == "matrix":
        change["matrix"] = -old.matrix
    elif part == "lean":
        change["lean"] = old.lean * 0
    else:
        change[part] = getattr(old, part) * np.float32(0.9)
    moments = (shadow.moments[0], dataclasses.replace(old, **change), *shadow.moments[2:])
    damaged = dataclasses.replace(index, shadow=dataclasses.replace(shadow, moments=moments))
    with pytest.raises(ValueError, match="the moments of plane 1 do not hold"):
        cd.verify_index(damaged, weight, threads=1)


def test_moments_of_another_shape_are_refused() -> None:
    weight, states = make_head(200, 64)
    index = cd.build_index(weight, states, seed=0)
    shadow = index.shadow
    assert shadow is not None
    assert shadow.moments is not None
    lopsided = shadow.moments[0].matrix.copy()
    lopsided[0, 1] ^= 1
    for change in (
        {"matrix": lopsided},
        {"matrix": shadow.moments[0].matrix[:32]},
        {"size": -np.abs(shadow.moments[0].size) - 1},
        {"scale": np.array([np.nan, 1], np.float32)},
        {"coding": np.ones(5, np.float32)},
    ):
        moment: Moment = dataclasses.replace(shadow.moments[0], **change)  # type: ignore[arg-type]
        odd = dataclasses.replace(shadow, moments=(moment, *shadow.moments[1:]))
        with pytest.raises(ValueError, match=r"shadow\.moment0"):
            require_structure(dataclasses.replace(index, shadow=odd))
    few = dataclasses.replace(index, shadow=dataclasses.replace(shadow, moments=shadow.moments[:1]))
    with pytest.raises(ValueError, match="moments for other planes"):
        require_structure(few)
