"""Every mode on drawn heads against exact fractions: draws, softmax, partition, log-probabilities, sets and masks."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import soundness_heads
from soundness import ALL_KERNELS, Report, build, exact_sum

import csv_decode as cd
import csv_decode.head
from csv_decode import noise

_EDGE = 1e-7  # shares of the mass closer than this to an edge are not judged: float64 draws the line there


class Exact:
    """One state: exact scores of the allowed rows, and what follows from them."""

    def __init__(self, spec: cd.HeadSpec, weight: np.ndarray, h: np.ndarray, allowed: np.ndarray) -> None:
        self.scale = Fraction(spec.scale)
        seen: dict[bytes, Fraction] = {}
        self.score: dict[int, Fraction] = {}
        for i in np.nonzero(allowed)[0].tolist():
            key = weight[i].tobytes()
            if key not in seen:
                seen[key] = exact_sum(weight[i], h)
            self.score[i] = seen[key] + (0 if spec.bias32 is None else Fraction(float(spec.bias32[i])))
        self.order = sorted(self.score, key=lambda i: (-self.score[i], i))
        self.top = self.score[self.order[0]]

    def gap(self, i: int, t: float) -> float:
        """(largest logit - logit i) / t."""
        try:
            return float((self.top - self.score[i]) * self.scale / Fraction(t))
        except OverflowError:
            return math.inf

    def weights(self, t: float) -> dict[int, float]:
        return {i: math.exp(-self.gap(i, t)) for i in self.order}

    def race(self, ids: list[int], t: float, seed: int, stream: int, position: int) -> list[int]:
        g = noise.gumbel(seed, stream, position, np.array(ids))
        key = {i: self.scale * self.score[i] + Fraction(t) * Fraction(float(x)) for i, x in zip(ids, g, strict=True)}
        return sorted(ids, key=lambda i: (-key[i], i))

    def kept(self, t: float, top_k: int, top_p: float, min_p: float) -> tuple[list[int], set[int]]:
        """Ids that top-k, top-p and min-p may leave, and those of them too near to an edge to judge."""
        ids = self.order
        if top_k:
            last = self.score[ids[min(top_k, len(ids)) - 1]]
            ids = [i for i in ids if self.score[i] >= last]
        out, unsure, before = [], set(), 0.0
        weights = {i: math.exp(-self.gap(i, t)) for i in ids}
        total = math.fsum(weights.values())
        for i in ids:
            share, edge = before / total, -math.log(min_p) if min_p else math.inf
            gap = self.gap(i, t)
            near = (top_p < 1 and abs(share - top_p) < _EDGE) or abs(gap - edge) < 1e-9 * (1 + edge)
            if near or ((top_p >= 1 or share < top_p) and gap <= edge) or i == ids[0]:
                out.append(i)
                if near and i != ids[0]:
                    unsure.add(i)
            before += weights[i]
        return out, unsure


def run(report: Report, rng: np.random.Generator, heads: int) -> None:
    for turn in range(heads):
        one_head(report, rng, turn)


def one_head(report: Report, rng: np.random.Generator, turn: int) -> None:
    small, csv_decode.head.SMALL_HEAD = csv_decode.head.SMALL_HEAD, 0
    try:
        kind = soundness_heads.KINDS[turn % len(soundness_heads.KINDS)]
        width = int(rng.choice([1, 2, 3, 5, 8, 9, 17, 40]))
        head = soundness_heads.head(rng, int(rng.integers(3, 200)), kind, width)
        scale = float(rng.choice([1.0, 1.0, 0.3, 17.0]))
        spec = cd.HeadSpec(head.spec.weight, head.spec.bias, scale=scale)
        index = build(report, spec, head.calibration, seed=0)
        shadow = None if index is None else index.shadow
        h, _ = soundness_heads.states(rng, shadow, head.weight, 6)
        for kernels in ALL_KERNELS if turn % 5 == 0 else (ALL_KERNELS[turn % len(ALL_KERNELS)],):
            served = cd.CertifiedHead(index, spec, threads=1, budget=None, kernels=kernels)
            check_head(report, rng, served, head.weight, h, f"modes {turn}, {head.name}, {kernels}")
    finally:
        csv_decode.head.SMALL_HEAD = small


def check_head(
    report: Report, rng: np.random.Generator, head: cd.CertifiedHead, weight: np.ndarray, h: np.ndarray, where: str
) -> None:
    spec, count = head.spec, len(h)
    allowed = np.ones((count, spec.n_rows), bool)
    masked = rng.random() < 0.5
    if masked:
        allowed = rng.random((count, spec.n_rows)) < rng.choice([0.02, 0.3, 0.9])
        allowed[:, rng.integers(spec.n_rows)] = True
    mask = allowed if masked else None
    exact = [Exact(spec, weight, h[b], allowed[b]) for b in range(count)]
    reach = [float(max(x.score.values()) - min(x.score.values())) * spec.scale for x in exact]
    natural = float(np.median([x for x in reach if x > 0] or [1.0])) / 8

    def judge(name: str, result: Any, right: list[bool], **more: Any) -> None:
        for b, fine in enumerate(right):
            report.case(name, fine, f"{where}, state {b}, {more}")
        try:
            cd.verify(result, h, spec)
            report.case(f"{name}, verify", True, where)
        except cd.VerificationError as error:
            report.case(f"{name}, verify", False, f"{where}, {more}: {error}")

    k = int(rng.integers(1, spec.n_rows + 1)) if rng.random() < 0.3 else int(min(spec.n_rows, rng.integers(1, 9)))
    top = head.top_k(h, k, allowed=mask)
    first = [x.order[:k] + [-1] * (k - len(x.order)) for x in exact]
    judge("top_k", top, [top.ids[b].tolist() == first[b] for b in range(count)], k=k)
    if not masked:
        guess = np.stack([rng.integers(-1, spec.n_rows, k) if rng.random() < 0.5 else row for row in np.array(first)])
        top = head.top_k(h, k, guess=guess)
        judge("top_k, guesses", top, [top.ids[b].tolist() == first[b] for b in range(count)], k=k)

    for t in temperatures(rng, natural, 1e-37, 1e30):
        seed = int(rng.integers(2**63))
        top_k = int(rng.choice([0, 0, 1, 3, 50]))
        top_p = float(rng.choice([1.0, 1.0, 0.9, 0.5, 0.1]))
        min_p = float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]))
        draw = head.sample(h, t, top_k, top_p, min_p, seed=seed, position=3, allowed=mask)
        right = []
        for b, x in enumerate(exact):
            ids, unsure = x.kept(t, top_k, top_p, min_p)
            ahead = x.race(ids, t, seed, b, 3)
            got = int(draw.ids[b])
            right.append(got in ids and all(i in unsure for i in ahead[: ahead.index(got)]))
        judge("sample", draw, right, t=t, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)

    for t in temperatures(rng, natural, 1e-4, 1e4):
        epsilon = float(10.0 ** rng.uniform(-8, -0.1))
        soft = head.softmax(h, epsilon, t, allowed=mask)
        width = float(10.0 ** rng.uniform(-8, 1))
        z = head.log_partition(h, width, t, allowed=mask)
        close, inside = [], []
        for b, x in enumerate(exact):
            weights = x.weights(t)
            total = math.fsum(weights.values())
            q = dict(zip(soft.ids[b].tolist(), soft.probabilities[b].tolist(), strict=True))
            distance = math.fsum(abs(w / total - q.get(i, 0.0)) for i, w in weights.items()) / 2
            close.append(distance <= soft.tv_bound[b] + 1e-14 and set(q) <= set(weights))
            inside.append(contains(z.low[b], z.high[b], x.top * x.scale / Fraction(t), math.log(total)))
            inside[-1] &= not z.certificates.certified[b] or z.width[b] <= width
            close[-1] &= not soft.certificates.certified[b] or soft.tv_bound[b] <= epsilon
        judge("softmax", soft, close, t=t, epsilon=epsilon)
        judge("log_partition", z, inside, t=t, width=width)

    for margin in (0.0, min(natural, 1e29), min(natural, 1e29) * 1e-9):
        near = head.within(h, margin, allowed=mask)
        right = []
        for b, x in enumerate(exact):
            must = {i for i in x.order if (x.top - x.score[i]) * x.scale <= Fraction(margin)}
            may = {i for i in x.order if x.gap(i, 1.0) <= margin * (1 + 1e-12) + 1e-12 * abs(float(x.top * x.scale))}
            right.append(must <= set(near.ids[b].tolist()) <= may)
        judge("within", near, right, margin=margin)

    if not masked:
        ids = np.tile(rng.integers(0, spec.n_rows, 3), (count, 1))
        probs = head.log_probs(h, ids, 0.1)
        right = []
        for b, x in enumerate(exact):
            log_total = math.log(math.fsum(x.weights(1.0).values()))
            right.append(
                all(
                    contains(probs.low[b, j], probs.high[b, j], (x.score[int(i)] - x.top) * x.scale, -log_total)
                    for j, i in enumerate(ids[b])
                )
            )
        judge("log_probs", probs, right)
        chosen = head.scores(h, ids)
        for b, x in enumerate(exact):
            fine = all(
                abs(Fraction(float(chosen.logits[b, j])) - x.score[int(i)] * x.scale)
                <= (Fraction(float(chosen.error[b, j])) + abs(x.score[int(i)]) * Fraction(2) ** -52) * x.scale
                for j, i in enumerate(ids[b])
            )
            report.case("scores of ids", fine, f"{where}, state {b}")
        if spec.bias32 is None and spec.scale == 1.0:
            check_argmax(report, head, h, where)


def temperatures(rng: np.random.Generator, natural: float, least: float, most: float) -> list[float]:
    """One that fits the scores, and two from anywhere."""
    some = [natural, 10.0 ** rng.uniform(-4, 4), 10.0 ** rng.uniform(math.log10(least), math.log10(most))]
    return [float(np.clip(x, least, most)) for x in some]


def contains(low: float, high: float, large: Fraction, small: float) -> bool:
    """Whether [low, high] contains large + small, the second within 10^-14 of the truth."""
    slack = Fraction(1e-14) * (1 + abs(Fraction(small)))
    value = large + Fraction(small)
    below = low == -math.inf or Fraction(float(low)) <= value + slack
    return below and (high == math.inf or value - slack <= Fraction(float(high)))


def check_argmax(report: Report, head: cd.CertifiedHead, h: np.ndarray, where: str) -> None:
    """Ids that `model_argmax` decides are those of torch's own linear layer."""
    import torch

    kind = getattr(torch, head.spec.rows.kind)
    weight: Any = head.spec.weight
    weight = weight if isinstance(weight, torch.Tensor) else torch.from_numpy(np.asarray(weight))
    state = torch.from_numpy(h).to(kind)
    state = state[torch.isfinite(state).all(dim=1)]
    if not len(state):
        return
    found = head.model_argmax(state)
    with torch.no_grad():
        stock = torch.nn.functional.linear(state, weight).float()
    for b in range(len(state)):
        if found.ids[b] >= 0:
            report.case("model_argmax", int(torch.argmax(stock[b])) == found.ids[b], f"{where}, state {b}")
