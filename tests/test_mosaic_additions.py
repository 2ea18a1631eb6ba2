"""What can be added to the next-item method: features of histories, and the private gate."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from mosaic_cases import ITEMS, by_definition, circle, histories, trained

from fedmosaic import FederatedRecommender, Interactions, leave_one_out
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.negatives import training_set
from fedmosaic.data.split import Split
from fedmosaic.methods.mosaic import gate
from fedmosaic.methods.mosaic.features import drawn
from fedmosaic.methods.mosaic.lifts import lift_events, lift_next
from fedmosaic.methods.mosaic.method import Mosaic
from fedmosaic.methods.registry import entry


@pytest.fixture(scope="module")
def shop() -> Split:
    return circle()


def features_by_definition(items: list[int], times: list[int], vectors: Any, drawn: Any, next_moment: bool) -> Any:
    """Features of what stands before every event, or before an item that comes next at a moment of its own."""
    coordinates, signs, bias = drawn
    moments = np.unique(times, return_inverse=True)[1].astype(float)
    tau = moments / 3.0 + np.array([np.flatnonzero(moments == s).mean() for s in moments]) / 30.0
    asked = [(len(items), (moments.max() + 1) / 3.0 + len(items) / 30.0)] if next_moment else list(enumerate(tau))
    found = []
    for t, now in asked:
        blocks = []
        for fall in (1.0, 4.0, 0.0):
            block = np.zeros(vectors.shape[1])
            for p, item in enumerate(items):
                weight = 0.5 if t < len(items) and times[p] == times[t] else np.exp(-fall * (now - tau[p]))
                block += (p != t and tau[p] <= now) * weight * vectors[item]
            blocks.append(block / max(np.linalg.norm(block), 1e-30))
        z = np.concatenate(blocks)
        raw = 8 * (bias + (signs * z[coordinates]).sum(axis=1))
        found.append(np.clip(np.floor(raw), 0, 31) * (np.abs(z).sum() > 0))
    return np.array(found)


@settings(max_examples=40, deadline=None)
@given(histories().filter(lambda one: len(one[0]) > 0))
def test_features_and_their_sums_are_those_of_the_definition(one: tuple[list[int], list[int]]) -> None:
    items, times = one
    vectors = np.random.default_rng(1).standard_normal((ITEMS, 3), dtype=np.float32)
    picked, decay = drawn(20, 3), np.array([3.0, 30.0])
    history, offsets, when = np.array(items, np.int32), np.array([0, len(items)]), np.array(times, np.int64)
    found, last = np.zeros((len(items), 20), np.float32), np.zeros((1, 20), np.float32)
    cross, answers = np.zeros((ITEMS, 20)), np.zeros((ITEMS, 20))
    inputs = np.arange(ITEMS, dtype=np.int32)
    lift_events(history, offsets, when, decay, inputs, vectors, picked, found, (cross, answers))
    lift_next(history, offsets, when, decay, inputs, vectors, picked, last)
    expected = features_by_definition(items, times, vectors, picked, False)
    assert np.abs(found - expected).max() <= 1, "a number at the edge of a step may fall on either side"
    assert (found != expected).mean() < 0.02
    assert np.abs(last - features_by_definition(items, times, vectors, picked, True)).max() <= 1
    one_hot = np.eye(ITEMS)[items]
    np.testing.assert_array_equal(answers, one_hot.T @ found)
    _, c = by_definition(items, times, 3.0, 30.0)
    np.testing.assert_allclose(cross, c[:, items] @ found, atol=0.2)  # items are distinct: a column of C is x_t


def test_features_learn_what_no_single_event_tells(tmp_path: Path) -> None:
    """After a and b comes one item, after a alone or b alone another: a sum of what each says cannot tell."""
    rng, rows = np.random.default_rng(0), []
    for user in range(600):
        a, b = rng.integers(0, 2, 2)
        walk = [int(rng.integers(8, 16)), 2 + int(a), 4 + int(b), 6 + int(a ^ b)]
        rows += [
            (user, item, when) for when, item in enumerate([*walk, *rng.permutation(np.arange(16, 22))[:2].tolist()])
        ]
    frame = pl.DataFrame(rows, schema=["user", "item", "when"], orient="row")
    split = leave_one_out(Interactions.from_frame(frame, time="when"))
    data = training_set(split, "strict")
    position = {item: split.interactions.items.positions([item])[0] for item in range(2, 8)}
    asked = [[position[2 + a], position[4 + b]] for a, b in itertools.product((0, 1), repeat=2)]
    query = Histories(Ragged.from_rows(asked), split.n_items, np.tile(np.array([1, 2]), 4))
    gaps = {}
    for features in (0, 200):
        form = Mosaic(features=features, lam=1.0, auto=False, window=3.0, taste=0.0)
        found = form.scores(trained(form, data), query)
        sign = np.array([1, -1, -1, 1])
        gaps[features] = float((sign * (found[:, position[6]] - found[:, position[7]])).min())
    assert gaps[0] < 0.05
    assert gaps[200] > 0.3


@pytest.mark.parametrize(
    ("given_", "said"),
    [({"rank": 5}, "leave rank= out"), ({"epsilon": 1.0}, "leave epsilon= out"), ({"rounds": 2}, "three rounds")],
)
def test_features_refuse_what_they_do_not_go_with(given_: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        entry("mosaic").build({"features": 100, **given_})


def test_features_of_a_catalogue_that_is_too_large_are_refused(shop: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmosaic.methods.mosaic.method.LARGEST", 1000)
    with pytest.raises(SettingsError, match="use fewer"):
        FederatedRecommender("mosaic", features=50).fit(shop)


def test_the_gate_asks_a_model_that_never_saw_the_client(shop: Split) -> None:
    data, form = training_set(shop, "strict"), Mosaic(lam=5.0, taste_lam=5.0, folds=3)
    state = trained(form, data)
    folds = gate.folds_of(data.held, 3)
    assert set(folds.tolist()) == {0, 1, 2}
    for fold in range(3):
        others = np.flatnonzero(folds != fold)
        plain, counted = Mosaic(lam=5.0, taste_lam=5.0), {**state, "stage": np.ones(1, np.int64)}
        alone = plain.apply(counted, plain.statistics(counted, data.held.take(others)))
        np.testing.assert_allclose(state["fold_sequence"][fold], alone["sequence"], atol=1e-5)
        np.testing.assert_allclose(state["fold_co"][fold], alone["co"], atol=1e-5)
    longer = data.held.followed_by(shop.held("validation"))
    assert gate.folds_of(longer, 3).tolist() == folds.tolist(), "a fold stays as a history grows"


def test_the_gate_takes_what_answered_the_clients_own_past(shop: Split) -> None:
    model = FederatedRecommender("mosaic", lam=5.0, taste_lam=5.0, folds=3).fit(shop)
    form, state, held = model.method_, model.state_, training_set(shop, "strict").held
    assert isinstance(form, Mosaic)
    tried = [(int(w), float(t), float(r)) for w, t, r in state["tried"]]
    chosen = gate.own(form, state, held)
    for user in (0, 5, 77):
        fold = int(gate.folds_of(held, 3)[user])
        unseen = {**state, "sequence": state["fold_sequence"][fold], "co": state["fold_co"][fold]}
        own, gains = held.take(np.array([user])), 50.0 * state["prior"]
        for t in range(max(1, own.items.values.size - 10), own.items.values.size):
            assert own.times is not None
            before = Histories(Ragged.from_rows([own.items.values[:t].tolist()]), shop.n_items, own.times[:t])
            event = Ragged.from_rows([[int(own.items.values[t])]])
            gains = gains + form.judged(unseen, before, event, tried, shop.n_items)[0]
        assert chosen[user].tolist() == list(tried[int(np.argmax(gains))])
    first = model.recommend(3, k=1).row(0, named=True)
    assert abs(model.explain(3, first["item"])["share"].sum() - first["score"]) < 1e-4
    with pytest.raises(SettingsError, match="at least 2"):
        entry("mosaic").build({"folds": 1})


def test_features_are_left_out_where_validation_does_not_want_them(shop: Split) -> None:
    model = FederatedRecommender("mosaic", features=30, lam=5.0).fit(shop)
    assert model.state_["sequence"].shape[0] == model.state_["windows"].size == 1
    if model.state_["lifted"].size:
        with pytest.raises(SettingsError, match="none has a share of its own"):
            model.explain(3, model.recommend(3, k=1)["item"][0])
    random = FederatedRecommender("mosaic", features=30, lam=1e9, taste_lam=5.0).fit(shop)
    assert random.recommend(3, k=2)["item"].to_list()
