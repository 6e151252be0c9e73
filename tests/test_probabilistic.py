"""The probabilistic mode: radii that hold except with a small probability, over the draw of a rotation."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

import csv_decode as cd
from csv_decode.kernels import get_kernels
from csv_decode.kernels.native import supported

from .conftest import KINDS, make_head
from .exactly import exact_logits, exact_top_k

pytestmark = pytest.mark.usefixtures("cascade")


def build(weight: object, states: np.ndarray, **more: object) -> cd.Index:
    return cd.build_index(weight, states, seed=0, threads=1, guarantee="probabilistic", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_exact_and_every_kernel_gives_the_same(kind: str) -> None:
    weight, states = make_head(300, 70, kind=kind)
    spec = cd.HeadSpec(weight, np.random.default_rng(1).standard_normal(300).astype(np.float32))
    index = build(spec, states[:32])
    logits = [exact_logits(weight, h, spec.bias32) for h in states[32:36]]
    tops = []
    for kernels in [*supported(), "reference"]:
        head = cd.CertifiedHead(index, spec, budget=None, kernels=kernels, guarantee="probabilistic")
        for k in (1, 10):
            top = head.top_k(states[32:36], k)
            for b in range(4):
                assert top.ids[b].tolist() == exact_top_k(logits[b], k), (kernels, k, b)
            cd.verify(top, states[32:36], spec)
            certificate = top.certificates[0]
            assert (certificate.guarantee, certificate.failure_probability) == ("probabilistic", 1e-9)
        tops.append(top.certificates)
    for other in tops[:-1]:
        np.testing.assert_array_equal(other.threshold, tops[-1].threshold)
        np.testing.assert_array_equal(other.survivors, tops[-1].survivors)
        np.testing.assert_array_equal(other.bytes_read, tops[-1].bytes_read)


@pytest.mark.unsanitized
def test_violations_are_as_rare_as_the_theorem_says() -> None:
    """Upper bounds against exact scores under many rotations: at a sigma of 0.5 to 3 some fail, never more often than
    exp(-sigma^2 / 2). (One rotation gives pairs that depend on each other; twenty give twenty draws.)"""
    weight, states = make_head(400, 96)
    exact = states[32:48].astype(np.float64) @ weight.T.astype(np.float64)
    k = get_kernels("reference", 1)
    failed = dict.fromkeys((0.5, 1.0, 1.5, 2.0, 3.0, 8.0), 0)
    pairs = 0
    for _ in range(20):
        shadow = build(weight, states[:32], bits=(1.5, 1.0), verify=False).shadow
        assert shadow is not None
        for sigma in failed:
            prepared, _ = shadow.prepare(k, states[32:48].astype(np.float64), sigma)
            centre, upper = k.screen(k.bind(shadow.planes[0], shadow.rho, None), prepared[0], None)
            failed[sigma] += int((upper < exact).sum())
            for b in range(16):
                start = centre[b]
                bound = k.bind(shadow.planes[1], shadow.rho, None)
                _, finer = k.refine(bound, prepared[1].one(b), np.arange(400), start)
                failed[sigma] += int((finer < exact[b]).sum())
        pairs += 2 * exact.size
    assert failed[0.5] > pairs / 100, "bounds that never fail at half a sigma do not test the theorem"
    for sigma, count in failed.items():
        assert count <= math.exp(-(sigma**2) / 2) * pairs, (sigma, count / pairs)
    assert failed[8.0] == 0


@pytest.mark.unsanitized
def tail(sigma: float, m: int) -> float:
    """P(T > sigma / sqrt(m)) for the first coordinate T of a uniform unit vector of m dimensions, m odd: its density is
    proportional to (1 - x^2)^((m - 3) / 2), a polynomial."""
    density = np.polynomial.Polynomial([1.0, 0.0, -1.0]) ** ((m - 3) // 2)
    area = density.integ()
    return float((area(1.0) - area(min(1.0, sigma / math.sqrt(m)))) / (area(1.0) - area(-1.0)))


def test_tails_are_those_of_the_closed_form() -> None:
    """What the codes leave across a row, along a state, is a multiple of the first coordinate of a uniform unit vector,
    here of 31 dimensions. Its share above each point is known exactly, so a rotation that is not uniform shows, and a
    sigma that is a fifth too small or large."""
    weight, states = make_head(200, 32)
    k, h = get_kernels("reference", 1), states[32:44].astype(np.float64)
    m, rotations = 31, 60
    beyond = {sigma: [0, 0] for sigma in (0.5, 1.0, 1.5, 2.0)}
    pairs, ratios = 0, []
    for _ in range(rotations):
        shadow = build(weight, states[:32], bits=(1.5,), verify=False).shadow
        assert shadow is not None
        plane, transform = shadow.planes[0], shadow.transform.astype(np.float64)
        y = np.linalg.solve(transform.T, (weight - shadow.mean).astype(np.float64).T).T
        rho = (shadow.rho.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        rest = y - rho[:, None] * plane.decode(plane.rows(0, len(y)), 32)
        across = rest - y * (np.sum(rest * y, 1) / np.sum(y * y, 1))[:, None]
        z = h @ transform.T
        z_across = np.sqrt(np.sum(z * z, 1)[:, None] - (z @ y.T) ** 2 / np.sum(y * y, 1))
        moved = z @ across.T
        upper = []
        for sigma in (1.0, 2.0):
            prepared, _ = shadow.prepare(k, h, sigma)
            upper.append(k.screen(k.bind(plane, shadow.rho, None), prepared[0], None)[1].astype(np.float64))
        a_sigma = upper[1] - upper[0]  # what one sigma adds to the bound of each pair
        size = np.linalg.norm(across, axis=1)
        ratios.append(a_sigma * math.sqrt(m) / (np.linalg.norm(z, axis=1)[:, None] * size))
        pairs += moved.size
        for sigma, count in beyond.items():
            count[0] += int((moved > sigma / math.sqrt(m) * size * z_across).sum())
            count[1] += int((moved > sigma * a_sigma).sum())
    ratio = np.concatenate(ratios)
    coded = ratio > 0.1  # a row with radii that hold for every rotation has no part across
    assert coded.mean() > 0.9
    assert ratio[coded].min() > 0.999, "a sigma counts for less than the theorem says"
    assert np.median(ratio[coded]) < 1.15, "a sigma counts for far more than it needs to"
    for sigma, (exactly, failed) in beyond.items():
        assert abs(exactly / pairs / tail(sigma, m) - 1) < 0.12, sigma
        assert failed / pairs < 1.05 * tail(sigma, m), sigma
        assert tail(sigma, m) <= math.exp(-(sigma**2) / 2)


def test_a_smaller_failure_probability_keeps_more_rows() -> None:
    weight, states = make_head(2000, 128)
    index = build(weight, states[:32])
    kept = []
    for p in (0.5, 1e-3, 1e-12, 1e-300):
        head = cd.CertifiedHead(index, weight, guarantee="probabilistic", failure_probability=p)
        certificates = head.top_k(states[32:], 1).certificates
        assert certificates.failure_probability == p
        kept.append(int(certificates.survivors[:, 0].sum()))
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_the_rotation_is_drawn_afresh_whatever_the_seed() -> None:
    weight, states = make_head(200, 64)
    a, b = build(weight, states[:32]), build(weight, states[:32])
    assert a.shadow is not None
    assert b.shadow is not None
    assert not np.array_equal(a.shadow.transform, b.shadow.transform)
    np.testing.assert_array_equal(a.shadow.planes[0].step, b.shadow.planes[0].step)


def test_an_index_and_a_head_must_agree() -> None:
    weight, states = make_head(200, 64)
    index = build(weight, states[:32])
    with pytest.raises(ValueError, match="the index was built for 'probabilistic' bounds"):
        cd.CertifiedHead(index, weight)
    with pytest.raises(ValueError, match="the index was built for 'deterministic' bounds"):
        cd.CertifiedHead(cd.build_index(weight, states[:32], seed=0), weight, guarantee="probabilistic")
    for wrong in (0, 1.0, -1e-9, float("nan")):
        with pytest.raises(ValueError, match="failure_probability"):
            cd.CertifiedHead(index, weight, guarantee="probabilistic", failure_probability=wrong)
    with pytest.raises(ValueError, match="guarantee is 'sure'"):
        cd.build_index(weight, states[:32], guarantee="sure")
    with pytest.raises(ValueError, match="shadow bound alone"):
        cd.build_index(weight, states[:32], guarantee="probabilistic", bounds="centroid")


def test_a_file_and_a_pickle_give_it_back(tmp_path: Path) -> None:
    import pickle

    weight, states = make_head(300, 70)
    index = build(weight, states[:32])
    index.save(tmp_path / "x")
    again = cd.load_index(tmp_path / "x", weight)
    head = cd.CertifiedHead(again, weight, guarantee="probabilistic", failure_probability=1e-6)
    other = pickle.loads(pickle.dumps(head))
    for h in (head, other):
        assert h.failure_probability == 1e-6
    a = cd.CertifiedHead(index, weight, guarantee="probabilistic", failure_probability=1e-6).top_k(states, 3)
    for h in (head, other):
        np.testing.assert_array_equal(h.top_k(states, 3).certificates.survivors, a.certificates.survivors)


def test_what_no_radius_covers_is_refused() -> None:
    """Padding that is not zero moves centres; a rotation error of zero hides what float32 took. Both passed once."""
    weight, states = make_head(300, 70)
    shadow = build(weight, states[:32]).shadow
    index = build(weight, states[:32])
    assert index.shadow is not None
    assert shadow is not None
    padded = shadow.transform.copy()
    padded[70:] = 3.0
    for field, value in (("transform", padded), ("rotation_error", 0.0), ("rotation_error", 1.0)):
        damaged = dataclasses.replace(index, shadow=dataclasses.replace(index.shadow, **{field: value}))
        with pytest.raises(ValueError, match=r"padding|rotation_error|above delta"):
            cd.verify_index(damaged, weight)
    with pytest.raises(ValueError, match="sigma is 0"):
        shadow.prepare(get_kernels("reference", 1), states[:1].astype(np.float64))


@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_verify_index_sees_a_radius_that_is_too_small(byte: int, tmp_path: Path) -> None:
    weight, states = make_head(300, 100)
    index = build(weight, states[:32])
    shadow = index.shadow
    assert shadow is not None
    cd.verify_index(index, weight)
    plane = shadow.planes[1]
    radii = plane.words.view(np.uint8).reshape(300, -1)
    row = int(np.argmax(radii[:, byte]))
    assert radii[row, byte] > 0
    radii[row, byte] = 0
    with pytest.raises(ValueError, match="the bound of row"):
        cd.verify_index(index, weight)
