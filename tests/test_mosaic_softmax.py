"""Softmax by sums: slopes against their definition, exact in any order, an aim that falls, a weight to leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_cases import ITEMS, circle, histories, trained

from fedmosaic import FederatedRecommender
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.core.threads import VARIABLE
from fedmosaic.data.histories import Histories
from fedmosaic.data.negatives import training_set
from fedmosaic.data.split import Split
from fedmosaic.methods.closed_form import State, total
from fedmosaic.methods.mosaic.chances import add_slopes
from fedmosaic.methods.mosaic.method import Mosaic
from fedmosaic.methods.registry import entry


@pytest.fixture(scope="module")
def shop() -> Split:
    return circle()


def before_events(items: list[int], times: list[int]) -> tuple[Any, Any]:
    """x_t of every event, and which items it could have been: of an earlier moment none, of the same moment half."""
    moments = np.unique(times, return_inverse=True)[1].astype(float)
    tau = moments / 3.0 + np.array([np.flatnonzero(moments == s).mean() for s in moments]) / 30.0
    x, could = np.zeros((len(items), ITEMS)), np.ones((len(items), ITEMS))
    for t in range(len(items)):
        for p, item in enumerate(items):
            if p != t and times[p] == times[t]:
                x[t, item], could[t, item] = 0.5, 0.5
            elif times[p] < times[t]:
                x[t, item], could[t, item] = np.exp(-(tau[t] - tau[p])), 0.0
    return x, could


def added(items: list[int], times: list[int], inputs: Any, weights: Any, bias: Any) -> Any:
    """What the compiled sums say."""
    slopes, sums = np.zeros(weights.shape), (np.zeros(ITEMS), np.zeros(ITEMS), np.zeros(1))
    history = (np.array(items, np.int32), np.array([0, len(items)]), np.array(times, np.int64))
    add_slopes(*history, np.array([3.0, 30.0]), inputs, weights, bias, slopes, sums)
    return slopes, *sums


@settings(max_examples=60, deadline=None)
@given(histories(), st.integers(0, 2), st.sampled_from([0.1, 3.0, 30.0]))
def test_slopes_are_those_of_the_definition(one: tuple[list[int], list[int]], unseen: int, size: float) -> None:
    """Some items do not predict; scores up to where chances are one or nothing."""
    items, times = one
    rng = np.random.default_rng(0)
    inputs = np.where(np.arange(ITEMS) < unseen, -1, np.arange(ITEMS) - unseen).astype(np.int32)
    weights = (size * rng.standard_normal((ITEMS - unseen, ITEMS))).astype(np.float32)
    bias = rng.standard_normal(ITEMS).astype(np.float32)
    slopes, chances, answers, loss = added(items, times, inputs, weights, bias)
    x, could = before_events(items, times)
    scores = x[:, unseen:] @ weights.astype(float) + bias
    p = could * np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e9))
    p /= p.sum(axis=1, keepdims=True)
    is_ = np.eye(ITEMS)[items].reshape(len(items), ITEMS)
    np.testing.assert_allclose(slopes, x[:, unseen:].T @ (is_ - p), atol=2e-5 * max(size, 1))
    np.testing.assert_allclose(chances, p.sum(axis=0), atol=2e-5 * max(size, 1))
    assert answers.tolist() == is_.sum(axis=0).tolist()
    if size < 30:
        np.testing.assert_allclose(loss, -np.log((p * is_).sum(axis=1)).sum(), atol=1e-4)


def test_slopes_are_how_the_loss_falls() -> None:
    items, times, every = [2, 5, 1, 7, 0], [0, 1, 1, 2, 4], np.arange(ITEMS, dtype=np.int32)
    rng = np.random.default_rng(1)
    weights, way = rng.standard_normal((2, ITEMS, ITEMS)).astype(np.float32)
    bias = np.zeros(ITEMS, np.float32)
    slopes = added(items, times, every, weights, bias)[0]
    up, down = (
        added(items, times, every, weights + s * way, bias)[3][0] for s in (np.float32(0.05), -np.float32(0.05))
    )
    np.testing.assert_allclose((down - up) / 0.1, (slopes * way).sum(), rtol=0.01)


def test_an_event_that_was_there_before_is_not_asked_for() -> None:
    every, weights = np.arange(ITEMS, dtype=np.int32), np.zeros((ITEMS, ITEMS), np.float32)
    _, chances, answers, _ = added([3, 4, 3], [0, 1, 2], every, weights, np.zeros(ITEMS, np.float32))
    assert answers.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert chances.sum() == pytest.approx(2)


def rounds_of(form: Mosaic, held: Histories, chunk: int) -> tuple[list[Any], State]:
    """What the server was sent in every round, and what it made of it."""
    state: State = {**form.init(held.n_items, 0), "clock": np.array([30.0, 30.0])}
    found = []
    while not form.done(state):
        found.append(total(form, state, held, chunk))
        state = form.apply(state, {name: value.copy() for name, value in found[-1].items()})
    return found, state


@pytest.mark.parametrize("features", [0, 9])
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_sum_over_devices_is_the_central_one_to_the_bit(
    features: int, chunk: int, shop: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, held = Mosaic(softmax=3, features=features), shop.held("train")
    monkeypatch.setenv(VARIABLE, "3")
    central, state = rounds_of(form, held, len(held))
    monkeypatch.setenv(VARIABLE, "1")
    federated, same = rounds_of(form, held, chunk)
    assert len(central) == len(federated) == 5 + bool(features)
    for one, other in zip(central, federated, strict=True):
        assert {name: value.tobytes() for name, value in one.items()} == {n: v.tobytes() for n, v in other.items()}
    assert {name: value.tobytes() for name, value in state.items()} == {n: v.tobytes() for n, v in same.items()}
    assert not state["before"].size, "what only the rounds needed is not kept"
    assert not state["way"].size


def test_the_aim_falls_and_order_is_learnt(shop: Split) -> None:
    data = training_set(shop, "strict")
    form = Mosaic(softmax=8, auto=False)
    state = trained(form, data)
    aims = state["aims"]
    assert aims.size == 8
    assert aims[-1] < aims[0] - 0.1
    assert aims.min() == aims[-1]
    walk = Histories(Ragged.from_rows([[3, 4, 5]]), shop.n_items, np.array([100, 101, 102]))
    alone = form.scores({**state, "soft": np.array([1e3])}, walk)[0]
    alone[[3, 4, 5]] = -np.inf
    assert set(np.argsort(-alone)[:2].tolist()) == {6, 7}


def test_without_times_or_a_history_it_says_nothing(shop: Split) -> None:
    plain, more = Mosaic(), Mosaic(softmax=2)
    held = Histories(shop.train, shop.n_items)
    states = [rounds_of(form, held, len(held))[1] for form in (plain, more)]
    np.testing.assert_array_equal(plain.scores(states[0], held), more.scores(states[1], held))
    nobody = Histories(Ragged.from_rows([[]]), shop.n_items, np.zeros(0, np.int64))
    state = trained(more, training_set(shop, "strict"))
    np.testing.assert_allclose(more.scores(state, nobody)[0], state["recent"])


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"rank": 5}, "leave rank= out"),
        ({"epsilon": 1.0}, "leave epsilon= out"),
        ({"folds": 3}, "leave folds= out"),
        ({"rounds": 11}, "takes 12 rounds"),
        ({"rounds": 12, "features": 9}, "takes 13 rounds"),
    ],
)
def test_it_refuses_what_it_does_not_go_with(given_: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        entry("mosaic").build({"softmax": 10, **given_})


def test_a_catalogue_that_is_too_large_is_refused(shop: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmosaic.methods.mosaic.method.LARGEST", 1000)
    with pytest.raises(SettingsError, match="softmax= stands beside sums of pairs"):
        FederatedRecommender("mosaic", softmax=2).fit(shop)


def test_validation_weighs_it_or_leaves_it_out(shop: Split, tmp_path: Path) -> None:
    data = training_set(shop, "strict")
    form = Mosaic(softmax=3)
    state = trained(form, data)
    wrong = {**state, "soft_map": -state["soft_map"]}
    left = form.choose(data, wrong, shop.validation)
    assert left["soft"].tolist() == [0.0]
    assert not left["soft_map"].size, "what is left out is not sent to anybody"
    plain = Mosaic()
    expected = plain.choose(data, trained(plain, data), shop.validation)
    np.testing.assert_array_equal(form.scores(left, data.held), plain.scores(expected, data.held))
    kept = Mosaic(softmax=3, soft=0.05)
    assert kept.choose(data, state, shop.validation)["soft"].tolist() == [0.05]


def test_shares_add_up_but_for_biases_and_a_saved_model_answers_alike(shop: Split, tmp_path: Path) -> None:
    model = FederatedRecommender("mosaic", softmax=3, soft=0.05).fit(shop)
    first = model.recommend(3, k=1).row(0, named=True)
    position = shop.interactions.items.positions([first["item"]])[0]
    nobodys = 0.05 * model.state_["soft_bias"][position] + model.state_["trend"][0] * model.state_["recent"][position]
    assert abs(model.explain(3, first["item"])["share"].sum() + nobodys - first["score"]) < 1e-4
    model.save(tmp_path / "model")
    again = FederatedRecommender.load(tmp_path / "model")
    assert again.recommend(3, k=5).equals(model.recommend(3, k=5))
