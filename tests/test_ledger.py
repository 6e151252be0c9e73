"""The native ledger, call by call, beside its numpy oracle: small, so that the sanitizers can run it as well."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode import _native
from csv_decode.kernels.native import supported

from .conftest import make_head

pytestmark = pytest.mark.usefixtures("cascade")


def heads(rows: int = 9000, width: int = 40, **more: Any) -> tuple[dict[str, cd.CertifiedHead], np.ndarray]:
    """A head for each kernel, more than two ranges of rows long, and states."""
    weight, states = make_head(rows, width)
    index = cd.build_index(weight, states[:32], seed=0, threads=2, **more)
    return {
        name: cd.CertifiedHead(index, weight, kernels=name, threads=2, budget=None)
        for name in (*supported(), "reference")
    }, states.astype(np.float64) * 2


_LONG = pytest.mark.unsanitized
_BITS = [pytest.param(None, marks=_LONG), (2.0,), pytest.param((1.5, 1.0, 1.0, 2.0), marks=_LONG)]


@pytest.mark.parametrize("bits", _BITS, ids=str)
def test_ledgers_agree_with_the_oracle(bits: Any) -> None:
    made, states = heads(bits=bits)
    oracle = made.pop("reference")
    for b, mode in enumerate(
        [
            lambda head, h: head.sample(h, 1.0, seed=1).ids,
            lambda head, h: head.sample(h, 1.0, top_p=0.9, min_p=0.01, seed=1).ids,
            lambda head, h: head.within(h, 2.0).ids[0],
            lambda head, h: head.top_log_probs(h, 5).ids,
            lambda head, h: head.top_k(h, 3, allowed=np.arange(9000) % 3 == 0).ids,
        ]
    ):
        for i in range(4):
            h = states[32 + 4 * b + i : 34 + 4 * b + i]
            for head in made.values():
                assert np.array_equal(mode(head, h), mode(oracle, h))


def races(n: int) -> tuple[np.ndarray, ...]:
    """Of n states: seed 7, stream b, position 3, temperature 0.5."""
    return np.full(n, 7, np.uint64), np.arange(n), np.full(n, 3), np.full(n, 0.5)


def test_what_a_ledger_says_holds() -> None:
    made, states = heads()
    oracle = made["reference"]
    h = states[40:42]
    logits = h @ np.asarray(oracle.spec.rows.data, np.float64).T
    for name in supported():
        ledger = made[name]._cascade.ledger(h, races(2))  # type: ignore[union-attr]
        assert ledger.usable(0)
        assert ledger.usable(1)
        key = logits + 0.5 * np.stack([np.asarray(_native.gumbel(7, b, 3, np.arange(9000))) for b in (0, 1)])
        some = np.asarray(ledger.leaders(0, 20, False))
        value, error = ledger.score(0, some)
        assert (np.abs(value - logits[0, some]) <= np.asarray(error) + 1e-12).all()
        bars = np.array([np.quantile(key[0], 0.99), np.quantile(key[1], 0.9)])
        found = ledger.open(bars, bars, False)
        for b, rows in enumerate(found):
            must = np.setdiff1d(np.nonzero(key[b] >= bars[b])[0], some if b == 0 else [])
            assert np.isin(must, rows).all()
            ledger.score(b, rows)
            left = np.setdiff1d(np.arange(9000), [*rows, *(some if b == 0 else [])])
            assert key[b, left].max() <= ledger.highest(b) < bars[b]
            bins = np.asarray(ledger.mass(b, float(np.float32(logits[b].max())), 1.4426950408889634, False))
            assert np.exp(logits[b, left] - float(np.float32(logits[b].max()))).sum() <= bins.sum()
            assert ledger.rows_at(b, 1) >= len(rows)
        ledger.allow(0, np.zeros(282, np.uint32))
        assert ledger.highest(0) == -np.inf
        assert len(ledger.leaders(0, 5, True)) == 0


@pytest.mark.parametrize("plain", [True, False])
def test_the_k_best_of_a_ledger(plain: bool) -> None:
    """`top` scores every row that may be among the k best, and its bar is the k-th lower end."""
    made, states = heads()
    h = states[40:43]
    logits = h @ np.asarray(made["reference"].spec.rows.data, np.float64).T
    k = np.array([1, 0, 70])
    for name, head in made.items():
        ledger = head._cascade.ledger(h, None if plain else races(3))  # type: ignore[union-attr]
        key = logits.copy()
        for b in (0, 1, 2) if not plain else ():
            key[b] += 0.5 * np.asarray(_native.gumbel(7, b, 3, np.arange(9000)))
        known = np.argsort(-key[0])[5:9]
        ledger.score(0, known)
        found = ledger.top(k, 8, 9000, plain, None)
        assert len(found[1][0]) == 0
        for b in (0, 2):
            ids, value, error, bar, survivors, within, *_ = found[b]
            assert within
            assert survivors <= len(ids)
            assert (np.abs(value - logits[b, ids]) <= np.asarray(error) + 1e-12).all()
            every = np.union1d(ids, known) if b == 0 else np.sort(ids)
            best = np.sort(key[b])[::-1][: k[b]]
            assert np.isin(np.nonzero(key[b] >= best[-1])[0], every).all()
            assert bar == pytest.approx(best[-1], abs=1e-11)
            left = np.setdiff1d(np.arange(9000), every)
            assert key[b, left].max() <= ledger.highest(b) < bar, name
        assert not ledger.top(k, 8, 9, plain, None)[2][5]  # more rows than the budget


def test_the_winner_of_a_race_and_the_rows_before_it() -> None:
    """With nuclei, every row is scored that may come before the winner by its score, where this is near the best; and
    a winner is given only where it is in the nucleus."""
    made, states = heads()
    n = 24
    h = states[40 : 40 + n]
    logits = h @ np.asarray(made["reference"].spec.rows.data, np.float64).T
    key = logits + 0.5 * np.stack([np.asarray(_native.gumbel(7, b, 3, np.arange(9000))) for b in range(n)])
    best = key.argmax(axis=1)
    far = logits.max(axis=1) - logits[np.arange(n), best]
    near = np.where(np.arange(n) % 3 == 1, far / 2 - 1e-9, far + 1e-9)
    top_p = np.where(np.arange(n) % 3 == 2, 1.0, 0.6)
    given = 0
    for head in made.values():
        ledger = head._cascade.ledger(h, races(n))  # type: ignore[union-attr]
        found = ledger.top(np.ones(n, np.int64), 8, 9000, False, (near, np.full(n, 0.5), top_p))
        for b, (ids, value, _, bar, _, _, winner, floor) in enumerate(found):
            weights = np.exp((logits[b] - logits[b].max()) / 0.5)
            inside = weights[logits[b] > logits[b, best[b]]].sum() < top_p[b] * weights.sum()
            assert winner < 0 or (ids[winner] == best[b] and inside)
            given += winner >= 0
            if b % 3 == 2:
                assert winner >= 0
                assert floor == np.inf
            elif near[b] < far[b]:
                assert winner == -1
                assert floor == np.inf
            else:
                assert floor == pytest.approx(logits[b, best[b]], abs=1e-9)
                assert np.isin(np.nonzero(logits[b] >= floor)[0], ids).all()
                some = np.exp((value - value.max()) / 0.5)
                sure = some[value > value[ids == best[b]][0]].sum() < 0.6 * some.sum()
                assert (winner >= 0) == sure
            left = np.setdiff1d(np.arange(9000), ids)
            assert key[b, left].max() <= ledger.highest(b) < bar
    assert given > len(made) * n / 3


def test_a_ledger_checks_what_it_is_given() -> None:
    made, states = heads(600)
    cascade = made[supported()[-1]]._cascade
    assert cascade is not None
    ledger = cascade.ledger(np.stack([states[0], np.zeros(40)]))
    assert not ledger.usable(1)
    assert ledger.vanishing(1)
    for call in (
        lambda: cascade.ledger(states[:2], races(1)),
        lambda: cascade.ledger(states[:1], (*races(1)[:3], np.array([np.nan]))),
        lambda: ledger.leaders(2, 1, True),
        lambda: ledger.score(0, np.array([600])),
        lambda: ledger.allow(0, np.zeros(18, np.uint32)),
        lambda: ledger.open(np.zeros(3), np.zeros(3), True),
        lambda: ledger.mass(-1, 0.0, 1.0, False),
        lambda: ledger.rows_at(0, 4),
        lambda: ledger.top(np.ones(3, np.int64), 8, 9, True, None),
        lambda: ledger.top(np.ones(2, np.int64), 8, 9, False, (np.ones(3),) * 3),
        lambda: _native.gumbel(0, 0, 0, np.array([-1])),
    ):
        with pytest.raises((ValueError, IndexError)):
            call()


def test_threads_share_a_head() -> None:
    made, states = heads(5000)
    head = made[supported()[-1]]
    expected = [int(head.sample(states[i], seed=i, top_p=0.9).ids[0]) for i in range(12)]
    got: dict[int, list[int]] = {}

    def work(worker: int) -> None:
        got[worker] = [int(head.sample(states[i], seed=i, top_p=0.9).ids[0]) for i in range(12)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(got.values()) == [expected] * 3
