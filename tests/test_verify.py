"""The checker notices every lie that a result could tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import csv_decode as cd

from .conftest import make_head

pytestmark = pytest.mark.usefixtures("cascade")


@pytest.fixture
def result() -> tuple[cd.TopK, np.ndarray, np.ndarray]:
    weight, states = make_head(300, 24)
    weight[[40, 41]] = weight[7]
    head = cd.CertifiedHead(cd.build_index(weight, states[:32], seed=0, threads=1), weight)
    return head.top_k(states[32:35], 4), states[32:35], weight


def test_a_true_result_passes(result: tuple) -> None:
    top, states, weight = result
    report = cd.verify(top, states, weight)
    assert (report.states, report.rows) == (3, 300)
    assert report.worst_logit_error < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[::-1], "stands before"),
        (lambda ids: np.where(np.arange(4) == 3, 250, ids), "is missing|stands before"),
        (lambda ids: np.where(np.arange(4) == 3, ids[0], ids), "distinct"),
        (lambda ids: np.where(np.arange(4) == 3, 300, ids), "distinct ids below 300"),
        (lambda ids: np.where(np.arange(4) == 0, -1, ids), "distinct ids below 300"),
    ],
)
def test_wrong_ids_are_found(result: tuple, change: object, message: str) -> None:
    top, states, weight = result
    ids = top.ids.copy()
    ids[1] = change(ids[1])  # type: ignore[operator]
    with pytest.raises(cd.VerificationError, match=f"state 1: .*({message})"):
        cd.verify(dataclasses.replace(top, ids=ids), states, weight)


def test_a_wrong_order_of_ties_is_found() -> None:
    weight, states = make_head(50, 8)
    weight[[10, 20]] = 5 * states[0]
    top = cd.CertifiedHead(None, weight).top_k(states[0], 2)
    assert top.ids.tolist() == [[10, 20]]
    with pytest.raises(cd.VerificationError, match="id 20 stands before id 10, which has the smaller id"):
        cd.verify(dataclasses.replace(top, ids=top.ids[:, ::-1]), states[0], weight)
    one = cd.CertifiedHead(None, weight).top_k(states[0], 1)
    with pytest.raises(cd.VerificationError, match="id 10 is missing: its logit is equal to"):
        cd.verify(dataclasses.replace(one, ids=np.array([[20]])), states[0], weight)
    ties = cd.CertifiedHead(None, weight).top_k(states[0], 1, ties=True)
    with pytest.raises(cd.VerificationError, match="id 20 is missing"):
        cd.verify(dataclasses.replace(ties, ids=[np.array([10])], logits=[ties.logits[0][:1]]), states[0], weight)


def test_wrong_logits_and_false_certificates_are_found(result: tuple) -> None:
    top, states, weight = result
    with pytest.raises(cd.VerificationError, match=r"a logit is .* away"):
        cd.verify(dataclasses.replace(top, logits=top.logits + 1e-9), states, weight)
    with pytest.raises(cd.VerificationError, match=r"a logit is nan away"):
        cd.verify(dataclasses.replace(top, logits=top.logits * np.nan), states, weight)
    with pytest.raises(cd.VerificationError, match="a logit is"):
        cd.verify(dataclasses.replace(top, logit_error=top.logit_error * np.nan), states, weight)
    for change, message in (
        ({"threshold": top.certificates.threshold - 1e9}, "is not above max_unopened"),
        ({"threshold": top.certificates.threshold + 1}, "above the k-th score"),
        ({"rows_scored": top.certificates.rows_scored * 0}, "rows were scored"),
    ):
        lie = dataclasses.replace(top, certificates=dataclasses.replace(top.certificates, **change))
        with pytest.raises(cd.VerificationError, match=message):
            cd.verify(lie, states, weight)
    with pytest.raises(cd.VerificationError, match="3 states, but 1 were given"):
        cd.verify(top, states[:1], weight)


@pytest.mark.parametrize(
    ("weight", "h", "bias", "want"),
    [
        ([[1, 1e-30], [1, 2e-30]], [1, 1e-300], None, 1),
        ([[1, 0], [2, 0]], [1e-310, 0], None, 1),
        ([[1, 0], [2, 0]], [1e-300, 0], [1e9, 1e9], 1),
        ([[1, 0], [1, 0]], [0, 0], None, 0),
    ],
)
def test_states_of_any_range_are_judged_exactly(weight: list, h: list, bias: list | None, want: int) -> None:
    spec = cd.HeadSpec(np.array(weight, np.float32), None if bias is None else np.array(bias, np.float32))
    state = np.array(h, np.float64)
    top = cd.CertifiedHead(None, spec).top_k(state, 1)
    assert top.ids.tolist() == [[want]]
    cd.verify(top, state, spec)
    with pytest.raises(cd.VerificationError, match="is missing"):
        cd.verify(dataclasses.replace(top, ids=np.array([[1 - want]])), state, spec)
