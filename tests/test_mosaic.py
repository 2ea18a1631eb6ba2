"""Mosaic: sums against their definition, exact in any order, EASE without times, answers for everybody."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_cases import ITEMS, by_definition, circle, histories, trained

from fedmosaic import FederatedRecommender, Interactions, time_split
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.negatives import training_set
from fedmosaic.data.split import Split
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.methods.closed_form import State, fit, sorted_by_place, total
from fedmosaic.methods.ease import EASE
from fedmosaic.methods.mosaic.method import Mosaic
from fedmosaic.methods.mosaic.pairs import add_pairs, next_weights, stand
from fedmosaic.methods.mosaic.scans import project, project_together
from fedmosaic.methods.pair_counts import mirror
from fedmosaic.methods.registry import entry


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([1.5, 3.0]), st.sampled_from([4.0, 30.0]))
def test_sums_are_those_of_the_definition(one: tuple[list[int], list[int]], window: float, events: float) -> None:
    items, times = one
    a, c = np.zeros((ITEMS, ITEMS)), np.zeros((ITEMS, ITEMS))
    history = np.array(items, np.int32)
    numbers = tuple(np.empty(len(items), kind) for kind in (np.float64, np.float64, np.int64, np.int64, np.int64))
    stand(np.array([0, len(items)]), np.array(times, np.int64), np.array([window, events]), numbers)
    for low, high in ((0, 3), (3, ITEMS)):  # as two threads would
        add_pairs(history, history, numbers, *sorted_by_place(history, ITEMS), a, c, low, high)
    for low, high in ((0, 3), (3, ITEMS)):
        mirror(a, low, high)
    expected = by_definition(items, times, window, events)
    np.testing.assert_allclose(a, expected[0], atol=2e-3)  # pairs whose weight is under 0.001 are left out
    np.testing.assert_allclose(c, expected[1], atol=2e-3)


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([1.5, 3.0]), st.integers(0, 2))
def test_projected_sums_are_those_of_the_definition(
    one: tuple[list[int], list[int]], window: float, unseen: int
) -> None:
    """A Q and C'Q by carrying r numbers along, against A and C; some items do not predict."""
    items, times = one
    inputs = np.where(np.arange(ITEMS) < unseen, -1, np.arange(ITEMS) - unseen).astype(np.int32)
    basis = np.random.default_rng(0).standard_normal((ITEMS - unseen, 3), dtype=np.float32)
    before, after, both = np.zeros((ITEMS - unseen, 3)), np.zeros((ITEMS, 3)), np.zeros((ITEMS - unseen, 3))
    history, offsets = np.array(items, np.int32), np.array([0, len(items)])
    project(history, offsets, np.array(times, np.int64), np.array([window, 30.0]), inputs, basis, before, after)
    project_together(history, offsets, inputs, basis, both)
    a, c = by_definition(items, times, window, 30.0)
    np.testing.assert_allclose(before, a[unseen:, unseen:] @ basis, atol=1e-5)
    np.testing.assert_allclose(after, c[unseen:].T @ basis, atol=1e-5)
    r = np.bincount(items, minlength=ITEMS)[unseen:].astype(float)
    np.testing.assert_allclose(both, np.outer(r, r) @ basis, atol=1e-5)


def test_the_next_item_is_asked_for_as_it_was_trained() -> None:
    """Weights of a query are those of x_t for an event behind all others, at a moment of its own."""
    out, times = np.empty(4), np.array([3, 3, 7, 9])
    next_weights(np.array([0, 4]), times, np.array([2.0, 5.0]), out)
    items = list(range(4))
    _, c = by_definition([*items, 5], [*times.tolist(), 10], 2.0, 5.0)
    np.testing.assert_allclose(out, c[:4, 5], rtol=1e-12)


@pytest.fixture(scope="module")
def shop() -> Split:
    return circle()


def sums_of(form: Mosaic, held: Histories, chunk: int) -> list[Any]:
    """What the server has after every sum."""
    state: State = {**form.init(held.n_items, 0), "clock": np.array([30.0, 30.0])}
    found = []
    while not form.done(state):
        found.append(total(form, state, held, chunk))
        state = form.apply(state, {name: value.copy() for name, value in found[-1].items()})
    return found


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("given_", [{"rank": None, "rounds": 2}, {"rank": 5, "rounds": 2}, {"features": 9}])
def test_the_sum_over_devices_is_the_central_one_to_the_bit(given_: Any, chunk: int, shop: Split) -> None:
    form, held = Mosaic(**given_), shop.held("train")
    for central, federated in zip(sums_of(form, held, len(held)), sums_of(form, held, chunk), strict=True):
        assert set(central) == set(federated)
        for name, value in central.items():
            assert np.array_equal(value, federated[name]), name
    sizes = {
        tuple(a.nbytes for part in sums_of(form, held.take(np.array([u])), 1)[:1] for a in part.values())
        for u in (0, 9)
    }
    assert len(sizes) == 1, "a message's size tells of its client"


def test_order_is_learnt_and_taste_alone_does_not_know_it(shop: Split) -> None:
    found = {}
    for name, given_ in (("mosaic", {"lam": 5.0, "taste_lam": 5.0}), ("ease", {"lam": 5.0})):
        made = entry(name).build(given_)
        data = training_set(shop, "strict")
        state = trained(made, data)
        fed = data.followed_by(shop.held("validation"))
        found[name] = evaluate(made.scorer(fed, state), shop, "test").full.mean("hr", 2)
    assert found["mosaic"] > 0.7
    assert found["ease"] < 0.6


def test_a_factored_form_of_full_rank_is_the_full_form(shop: Split) -> None:
    data = training_set(shop, "strict")
    given_ = {"lam": 5.0, "taste_lam": 5.0, "auto": False, "least": 1}
    whole, thin, few = (Mosaic(**given_), Mosaic(**given_, rank=40, rounds=5), Mosaic(**given_, rank=12))
    unseen = np.ones((shop.n_users, shop.n_items), bool)
    unseen[data.histories.rows, data.histories.values] = False  # a factored form speaks for items seen as it likes
    states = [trained(form, data) for form in (whole, thin, few)]
    assert states[0]["stage"].tolist() == [2]
    assert states[1]["stage"].tolist() == [5]
    expected = whole.scores(states[0], data.held)
    found = thin.scores(states[1], data.held)
    np.testing.assert_allclose(found[unseen], expected[unseen], atol=2e-3)
    part = few.scores(states[2], data.held)
    assert np.corrcoef(part[unseen], expected[unseen])[0, 1] > 0.8
    assert states[2]["basis"].shape == (40, 12)


def test_a_large_catalogue_is_factored_and_says_nothing_of_pairs(shop: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmosaic.methods.mosaic.method.LARGEST", 1000)
    monkeypatch.setattr("fedmosaic.methods.mosaic.method.RANK", 6)
    model = FederatedRecommender("mosaic").fit(shop)
    sizes = {name: array.shape for name, array in model.state_.items() if array.ndim > 1 and array.size}
    assert sizes == {"sequence": (1, 6, 40), "basis": (40, 6), "co": (6, 40), "taste_basis": (40, 6)}
    assert model.recommend(3, k=2)["item"].to_list()


def test_without_times_the_ranking_is_that_of_ease(shop: Split) -> None:
    held = Histories(shop.train, shop.n_items)
    form, ease = Mosaic(taste_lam=50.0, least=1), EASE(lam=50.0)
    ours, theirs = form.scores(fit(form, held), held), ease.scores(fit(ease, held), held)
    scale = np.sqrt(shop.train.unique().lengths)[:, None] / 0.2
    np.testing.assert_allclose(ours * scale, theirs, atol=2e-4)


def test_whoever_comes_later_or_has_nothing_gets_an_answer(shop: Split) -> None:
    data = training_set(shop, "strict")
    form = Mosaic(lam=5.0)
    state = trained(form, data)
    strangers = Histories(Ragged.from_rows([[], [3, 4, 5]]), shop.n_items, np.array([100, 101, 102]))
    cold, later = form.scores(state, strangers)
    np.testing.assert_allclose(cold, state["recent"])
    assert set(np.argsort(-later)[:2].tolist()) <= {6, 7}
    rare = Histories(Ragged.from_rows([[0, 1]]), shop.n_items + 1, np.array([5, 6]))
    counts = {**form.init(shop.n_items + 1, 0), "clock": np.array([10.0, 10.0])}
    once = form.apply(counts, total(form, counts, rare))
    assert (once["inputs"] >= 0).tolist() == [True, True] + [False] * (shop.n_items - 1), "all that was seen, if little"


def test_devices_choose_what_validation_prefers_and_given_values_stay(shop: Split) -> None:
    data = training_set(shop, "strict")

    def chosen(**given_: Any) -> tuple[float, float]:
        form = entry("mosaic").build({"lam": 5.0, "taste_lam": 5.0, **given_})
        state = form.choose(data, trained(form, data), shop.validation)
        assert state["sequence"].shape[0] == 1
        return float(state["windows"][0]), float(state["taste"][0])

    gains = {}
    for window, taste in itertools.product((3.0, 10.0), (0.1, 10.0)):
        model = FederatedRecommender("mosaic", lam=5.0, taste_lam=5.0, window=window, taste=taste, auto=False).fit(shop)
        gains[window, taste] = model.evaluate("validation").full.mean("ndcg", 10)
    best = max(gains, key=lambda pair: gains[pair])
    assert chosen()[0] == best[0]
    assert chosen()[1] < 5, "order matters here"
    assert chosen(window=7.0, taste=4.0) == (7.0, 4.0)
    assert chosen(auto=False) == (3.0, 0.2)


def test_the_trend_is_chosen_where_fashion_moves_and_everything_later_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    likes = np.arange(20, 0, -1) / 210
    rows = []
    for user in range(200):
        early, late = rng.choice(20, 6, replace=False), 20 + rng.choice(20, 6, replace=False, p=likes)
        rows += [(user, item, time) for item, time in zip(early, rng.integers(0, 500, 6), strict=True)]
        rows += [(user, item, time) for item, time in zip(late, rng.integers(500, 1000, 6), strict=True)]
    frame = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    split = time_split(Interactions.from_frame(frame, time="time"), validation=0.2, test=0.2)
    data = training_set(split, "strict")
    for form, moves in ((Mosaic(), True), (Mosaic(trend=0.0), False), (Mosaic(auto=False), False)):
        state = form.choose(data, trained(form, data), split.validation)
        assert (state["trend"][0] > 0) == moves


def test_the_validation_item_is_fed_and_never_trained_on(shop: Split, tmp_path: Path) -> None:
    data = training_set(shop, "strict")
    more = data.followed_by(shop.held("validation"))
    assert more.times is not None
    assert more.histories.lengths.tolist() == (shop.train.lengths + shop.validation.lengths).tolist()
    assert more.histories[0].tolist() == [*shop.train[0].tolist(), *shop.validation[0].tolist()]
    model = FederatedRecommender("mosaic", lam=5.0).fit(shop)
    found = [evaluate(model.method_.scorer(d, model.state_), shop, "test").full.mean("hr", 2) for d in (data, more)]
    assert found[1] > found[0] + 0.1
    rows = shop.interactions
    lines = [f"{u},{i},{t}" for u, i, t in zip(rows.user, rows.item, rows.time, strict=True)]  # type: ignore[arg-type]
    (tmp_path / "shop.csv").write_text("user,item,when\n" + "\n".join(lines) + "\n")
    given_ = ("mosaic", str(tmp_path / "shop.csv"), "time=when", "lam=5", "input=all-before")
    assert "input all-before" in run_command("run", *given_, "--out", str(tmp_path / "run"), "-q").out
    refused = run_command("run", "fedmf", *given_[1:3], "input=all-before", "--out", str(tmp_path / "other"), "-q")
    assert refused.code == 2
    assert "fedmf answers from what it learnt" in refused.err


@pytest.mark.parametrize("name", ["ease", "itemknn", "mosaic"])
def test_shares_of_the_history_add_up_to_the_score(name: str, shop: Split) -> None:
    model = FederatedRecommender(name).fit(shop)
    first = model.recommend(3, k=1).row(0, named=True)
    found = model.explain(3, first["item"])
    assert sorted(found["item"].to_list()) == sorted(shop.interactions.items.take(shop.train[3]).to_list())
    assert found["share"].to_list() == sorted(found["share"].to_list(), reverse=True)
    assert abs(found["share"].sum() - first["score"]) < 1e-4
    with pytest.raises(SettingsError, match="ease, itemknn and mosaic do"):
        FederatedRecommender("popularity").fit(shop).explain(3, first["item"])


def test_what_is_recent_can_be_agreed_on(shop: Split) -> None:
    """Where no place holds all times: the same state as from the data, if what they say is what was agreed on."""
    data = training_set(shop, "strict")
    assert data.times is not None
    last, first = float(data.times.max()), float(data.times.min())
    read = Mosaic(auto=False).start(data, 0)
    agreed = Mosaic(auto=False, now=last, span=last - first)
    np.testing.assert_array_equal(agreed.init(data.n_items, 0)["clock"], read["clock"])
    np.testing.assert_array_equal(agreed.start(data, 0)["clock"], read["clock"])
    counted = agreed.statistics(read, data.held)
    assert (counted["late"] < counted["events"]).any()
    before = Mosaic(auto=False, now=first - 1e9, span=1.0)  # whoever comes after now is of now; nothing overflows
    state = before.init(data.n_items, 0)
    np.testing.assert_array_equal(before.statistics(state, data.held)["late"], counted["events"])
    nothing = Mosaic(auto=False).init(data.n_items, 0)  # nobody agreed on anything
    np.testing.assert_array_equal(agreed.statistics(nothing, data.held)["late"], counted["events"])
