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

from fedmosaic import FederatedRecommender, Interactions, leave_one_out, time_split
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.negatives import training_set
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.methods.closed_form import ClosedForm, State, fit, total
from fedmosaic.methods.ease import EASE
from fedmosaic.methods.mosaic import gate
from fedmosaic.methods.mosaic.features import drawn
from fedmosaic.methods.mosaic.lifts import lift_events, lift_next
from fedmosaic.methods.mosaic.method import Mosaic
from fedmosaic.methods.mosaic.pairs import add_pairs, next_weights
from fedmosaic.methods.mosaic.scans import project, project_together
from fedmosaic.methods.registry import entry

ITEMS = 8


def by_definition(items: list[int], times: list[int], window: float, events: float) -> tuple[Any, Any]:
    """A and C as means over all orders of the events of a moment, from x_t itself."""
    moments = [list(g) for _, g in itertools.groupby(range(len(items)), key=lambda k: times[k])]
    place = {k: c / window + float(np.mean(g)) / events for c, g in enumerate(moments) for k in g}
    a, c, orders = np.zeros((ITEMS, ITEMS)), np.zeros((ITEMS, ITEMS)), 0
    for chosen in itertools.product(*(itertools.permutations(g) for g in moments)):
        order, orders = [k for g in chosen for k in g], orders + 1
        for at, k in enumerate(order):
            x = np.zeros(ITEMS)
            for p in order[:at]:
                x[items[p]] += np.exp(-(place[k] - place[p]))
            a += np.outer(x, x)
            c[:, items[k]] += x
    return a / orders, c / orders


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    items = draw(st.lists(st.integers(0, ITEMS - 1), unique=True, max_size=6))
    return items, sorted(draw(st.lists(st.integers(0, 4), min_size=len(items), max_size=len(items))))


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([1.5, 3.0]), st.sampled_from([4.0, 30.0]))
def test_sums_are_those_of_the_definition(one: tuple[list[int], list[int]], window: float, events: float) -> None:
    items, times = one
    a, c = np.zeros((ITEMS, ITEMS)), np.zeros((ITEMS, ITEMS))
    every = np.arange(ITEMS, dtype=np.int32)
    arguments = (np.array(items, np.int32), np.array([0, len(items)]), np.array(times, np.int64))
    for low, high in ((0, 3), (3, ITEMS)):  # as two threads would
        add_pairs(*arguments, np.array([window, events]), every, a, c, low, high)
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


def test_the_next_item_is_asked_for_as_it_was_trained() -> None:
    """Weights of a query are those of x_t for an event behind all others, at a moment of its own."""
    out, times = np.empty(4), np.array([3, 3, 7, 9])
    next_weights(np.array([0, 4]), times, np.array([2.0, 5.0]), out)
    items = list(range(4))
    _, c = by_definition([*items, 5], [*times.tolist(), 10], 2.0, 5.0)
    np.testing.assert_allclose(out, c[:4, 5], rtol=1e-12)


@pytest.fixture(scope="module")
def shop() -> Split:
    """Everybody walks a circle of 40 items, from anywhere, in steps of one or two; some items stand at one time."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[int]] = {"user": [], "item": [], "when": []}
    for user in range(150):
        at, when = int(rng.integers(40)), 0
        for _ in range(12):
            rows["user"].append(user)
            rows["item"].append(at % 40)
            rows["when"].append(when)
            at, when = at + int(rng.integers(1, 3)), when + int(rng.integers(0, 3))
    return leave_one_out(Interactions.from_frame(rows, time="when"))


def trained(form: ClosedForm, data: TrainingSet) -> State:
    """After all its rounds."""
    state = form.start(data, 0)
    for number in range(1, form.rounds + 1):
        if not form.done(state):
            state = form.advance(data, state, number, 0)[0]
    return state


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
