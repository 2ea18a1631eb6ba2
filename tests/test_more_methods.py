"""LightGCN, FedCIA and FedDAE: each equals its formula, keeps to itself what is private, and learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmosaic import FederatedRecommender
from fedmosaic.core import keys
from fedmosaic.core.errors import ForeignError, SettingsError
from fedmosaic.core.ragged import Ragged, slots
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods import registry
from fedmosaic.methods.closed_form import fit
from fedmosaic.methods.ease import EASE
from fedmosaic.methods.fedcia import FedCIA
from fedmosaic.methods.feddae import ROWS
from fedmosaic.methods.itemknn import ItemKNN
from fedmosaic.methods.lightgcn import LightGCN, LightGCNSettings, graph_of, pairs_of
from fedmosaic.testing import check_engines, digest, same_parity_share, toy_training_set

SMALL: dict[str, dict[str, Any]] = {
    "lightgcn": {"dim": 4, "rounds": 3, "batch_size": 32, "layers": 2},
    "fedcia": {},
    "feddae": {"dim": 3, "hidden": 6, "narrow": 4, "rounds": 3},
}
SILOS = Ragged.from_rows([[0, 1, 2, 3], [4], [7, 5, 6], list(range(8, 13))])


def built(name: str, **changes: Any) -> Any:
    if name == "feddae":
        pytest.importorskip("torch")
    return registry.entry(name).build(SMALL[name] | changes)


def trained(method: Any, data: TrainingSet, seed: int = 1) -> tuple[Any, Any]:
    """The state after all rounds, and what the last one answered of everything that can be asked."""
    each = np.arange(data.n_items, dtype=np.int32)
    everything = Ragged(np.tile(each, data.n_users), np.arange(data.n_users + 1) * data.n_items)
    state, answers = method.start(data, seed), None
    for number in range(1, method.rounds + 1):
        state, record, answers = method.advance(data, state, number, seed, everything)
        assert record.loss is None or np.isfinite(record.loss)
    return state, answers


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_decides_and_a_state_survives_its_file(name: str) -> None:
    data, method = toy_training_set(), built(name)
    method.check_installed()
    state, answers = trained(method, data)
    scores = method.scorer(data, state).scores(np.arange(data.n_users))
    if answers is not None:
        np.testing.assert_allclose(scores.ravel(), answers, atol=1e-5)
    some = np.array([4, 0])
    np.testing.assert_allclose(method.scorer(data, state).scores(some), scores[some], atol=1e-5)
    packed = method.pack(state)
    assert digest(packed) == digest(method.pack(trained(method, data)[0]))
    assert digest(packed) != digest(method.pack(trained(method, data, seed=2)[0]))
    again = method.unpack(packed, "a file")
    assert digest(method.pack(again)) == digest(packed)
    assert np.array_equal(method.scorer(data, again).scores(np.arange(data.n_users)), scores)
    assert method.vectors(state).shape[0] == data.n_items
    with pytest.raises(ForeignError, match="a file holds"):
        method.unpack({"strange": np.zeros(3)}, "a file")


@pytest.mark.parametrize("name", SMALL)
def test_going_in_a_state_stays_as_it_was(name: str) -> None:
    data, method = toy_training_set(), built(name)
    state = method.start(data, 1)
    before = digest(method.pack(state))
    method.advance(data, state, 1, 1)
    assert digest(method.pack(state)) == before


@pytest.mark.parametrize("name", [*SMALL, "fedlightgcn"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    from fedmosaic.data.sources import load

    if name in ("feddae", "fedlightgcn"):
        pytest.importorskip("torch")
    given = SMALL.get(name, {"dim": 4, "rounds": 3})
    model = FederatedRecommender(name, **given).fit(load("synthetic", users=40, items=50, per_user=8))
    model.save(tmp_path / "m")
    assert FederatedRecommender.load(tmp_path / "m").recommend(k=5).equals(model.recommend(k=5))


LEARN: dict[str, dict[str, Any]] = {
    "lightgcn": {"dim": 8, "rounds": 30, "rate": 0.05},
    "fedlightgcn": {"dim": 8, "rounds": 40, "batch_size": 64},
    "fedcia": {},
    "feddae": {"dim": 4, "hidden": 16, "narrow": 4, "rounds": 80, "server_rate": 0.03},
}


@pytest.mark.parametrize("name", LEARN)
def test_learning_law(name: str) -> None:
    if name in ("feddae", "fedlightgcn"):
        pytest.importorskip("torch")
    assert same_parity_share(registry.entry(name).build(LEARN[name])) >= 0.9


# HR@10 among 1 + 99 that a short training reaches, in percent; chance is 10, popularity 42.
REACHES: dict[str, tuple[dict[str, Any], float]] = {
    "lightgcn": ({"rounds": 15, "dim": 16, "rate": 0.05}, 55),
    "fedcia": ({}, 48),
    "feddae": ({"rounds": 25, "server_rate": 0.03, "local_epochs": 1, "hidden": 64}, 50),
    "fedlightgcn": ({"rounds": 16, "server_rate": 0.2}, 48),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REACHES)
def test_a_short_training_is_far_above_chance(name: str, ml100k: Split) -> None:
    given, least = REACHES[name]
    result = FederatedRecommender(name, **given).fit(ml100k).evaluate()
    assert result.sampled is not None
    assert 100 * result.sampled.mean("hr", 10) > least


# --- LightGCN -----------------------------------------------------------------------------------------------------


def test_propagation_equals_the_dense_formula() -> None:
    """Entry by entry, as in the paper, on the toy data: repeated pairs count once, empty users keep their vector."""
    data, method = toy_training_set(), built("lightgcn")
    users, items = data.n_users, data.n_items
    held = data.histories.to_csr(items).toarray()
    table = np.random.default_rng(0).standard_normal((users + items, 4)).astype(np.float32)
    hops: list[tuple[Any, Any]] = [(table[:users], table[users:])]
    for _ in range(2):
        of_users, of_items = np.zeros((users, 4)), np.zeros((items, 4))
        for u, i in zip(*np.nonzero(held), strict=True):
            weight = 1 / np.sqrt(held[u].sum() * held[:, i].sum())
            of_users[u] += weight * hops[-1][1][i]
            of_items[i] += weight * hops[-1][0][u]
        hops.append((of_users, of_items))
    expected = np.mean([np.concatenate(hop) for hop in hops], axis=0)
    np.testing.assert_allclose(method._smooth(graph_of(data), table), expected, atol=1e-5)


def test_its_gradient_is_that_of_the_loss() -> None:
    """Against differences of the loss itself, propagation and decay included."""
    data = toy_training_set()
    method = LightGCN(LightGCNSettings(dim=3, layers=2, decay=0.3))
    graph = graph_of(data).astype(np.float64)
    table: Any = np.random.default_rng(0).standard_normal((data.n_users + data.n_items, 3))
    users, liked, other = pairs_of(data, 1, seed=0, round=1)

    def loss(at: Any) -> float:
        smooth = method._smooth(graph, at)
        gap = (smooth[users] * (smooth[liked] - smooth[other])).sum(1)
        squares = sum((at[rows] ** 2).sum(1) for rows in (users, liked, other))
        return float((np.log1p(np.exp(-gap)) + 0.15 * squares).mean())

    found, _ = method._gradient(graph, table, users, liked, other)
    rng = np.random.default_rng(1)
    for row, column in zip(rng.integers(0, table.shape[0], 20), rng.integers(0, 3, 20), strict=True):
        nudge = np.zeros_like(table)
        nudge[row, column] = 1e-5
        slope = (loss(table + nudge) - loss(table - nudge)) / 2e-5
        assert abs(found[row, column] - slope) < 1e-5


def test_negatives_are_fresh_and_from_the_pool_that_is_given() -> None:
    data = toy_training_set()
    wide = replace(data, excluded=data.excluded.union(Ragged.from_rows([[7]] * data.n_users)))  # as legacy hides items
    for given in (data, wide):
        users, liked, other = pairs_of(given, 2, seed=0, round=1)
        assert np.bincount(users, minlength=13)[[3, 9]].tolist() == [0, 0]  # an empty pool, an empty history
        assert not [u for u, j in zip(users, other - 13, strict=True) if j in given.excluded[u]]
        assert sorted(set(zip(users, liked - 13, strict=True))) == sorted(
            {(u, i) for u in range(13) if u != 3 for i in given.histories[u]}
        )
        assert np.bincount(users)[0] == 2 * given.histories[0].size
    first, same, later = (pairs_of(data, 2, seed=0, round=r)[2] for r in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, later)


def test_a_user_of_the_one_hop_form_is_the_mean_of_its_vector_and_its_items() -> None:
    pytest.importorskip("torch")
    data = toy_training_set()
    federation = registry.entry("fedlightgcn").build({"dim": 4, "rounds": 2, "batch_size": 16})
    state, _ = trained(federation, data)
    table, own = state.server.params["item"], state.devices.dense("user")
    for arranged in (data, replace(data, silos=SILOS)):
        found = federation.scorer(arranged, state).scores(np.arange(data.n_users))
        for user, held in enumerate(data.histories):
            vector = (own[user] + table[held].sum(0) / np.sqrt(max(held.size, 1))) / 2
            np.testing.assert_allclose(found[user], table @ vector, atol=1e-5)
    check_engines(federation, replace(data, silos=SILOS))


# --- FedCIA -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_the_sum_over_devices_is_the_central_form_to_the_bit(noise: float, small: Split) -> None:
    form, histories = FedCIA(noise=noise), small.held("train")
    central = fit(form, histories)
    for clients_per_chunk in (1, 7):
        federated = fit(form, histories, clients_per_chunk=clients_per_chunk)
        assert digest(federated) == digest(central)
    sizes = {sum(a.nbytes for a in form.statistics(central, histories.take(np.array([u]))).values()) for u in range(5)}
    assert sizes == {form.traffic(small.n_items)[0]}


def silos_of(data: TrainingSet) -> Iterator[list[int]]:
    yield from ([[u] for u in range(data.n_users)] if data.silos is None else [m.tolist() for m in data.silos])


@pytest.mark.parametrize("silos", [None, SILOS], ids=["devices", "silos"])
def test_fedcia_equals_the_dense_formula(silos: Ragged | None) -> None:
    data, form = replace(toy_training_set(), silos=silos), FedCIA(noise=0.0, weight=7.0)
    r = data.histories.to_csr(data.n_items).toarray().astype(np.float64)
    own: dict[int, Any] = {}
    for members in silos_of(data):
        part = r[members]
        rows, columns = (np.maximum(part.sum(axis), 1) for axis in (1, 0))
        normal = part / np.sqrt(rows)[:, None] / np.sqrt(columns)
        own |= dict.fromkeys(members, normal.T @ normal)
    mean = np.mean([own[members[0]] for members in silos_of(data)], axis=0)
    expected = np.stack([7 * r[u] @ mean + r[u] @ own[u] for u in range(data.n_users)])
    state, _ = trained(form, data)
    np.testing.assert_allclose(state["similarity"], mean, atol=1e-7)
    found = form.scorer(data, state).scores(np.arange(data.n_users))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(form.scorer(data, state).scores(np.array([6, 0])), expected[[6, 0]], atol=1e-4)


def test_noise_has_the_law_of_the_clients_sum() -> None:
    data = toy_training_set()
    quiet, loud = (trained(FedCIA(noise=noise), data)[0]["similarity"] for noise in (0.0, 0.5))
    deviation = 0.5 * np.sqrt(2 / data.n_users)  # of the mean of as many Laplace draws
    assert abs((loud - quiet).std() / deviation - 1) < 0.15
    assert abs((loud - quiet).mean()) < 4 * deviation / data.n_items


def test_catalogues_that_do_not_fit_are_refused() -> None:
    for form in (FedCIA(), EASE(), ItemKNN()):
        with pytest.raises(SettingsError, match="would need 4 GiB"):
            form.init(23_171, 0)


# --- FedDAE -------------------------------------------------------------------------------------------------------


def test_only_global_parts_are_sent_and_they_tell_nothing_of_others() -> None:
    """What leaves a group has global names; a client's part of it does not change with the private parts of others."""
    data, method = toy_training_set(), built("feddae")
    state, _ = trained(method, data)
    assert not any(name.startswith(("local", "gate")) for name in state.server)
    events, key = data.histories.unique(), keys.derive(seed=0, purpose=keys.Purpose.NOISE, client=np.arange(2))

    def sent(*clients: int, poison: float = 0.0) -> dict[str, Any]:
        """The upload of some of the first two clients; poison goes into the own parts of the second."""
        who, private = np.array(clients), {n: v.copy() for n, v in state.private.items()}
        for name, value in private.items():
            value[_places(events, name, np.array([1]))] += poison
        own = {n: v[_places(events, n, who)] for n, v in private.items()}
        found: dict[str, Any] = method.contribute(state.server, own, events.take(who), key[who])[0]
        return found

    alone = sent(0)
    assert set(alone) == set(state.server)
    assert not alone["encoder.rows"][np.setdiff1d(np.arange(data.n_items), events[0])].any()
    assert digest(sent(1)) != digest(sent(1, poison=0.3))
    for poison in (0.0, 0.3):
        both, other = sent(0, 1, poison=poison), sent(1, poison=poison)
        for name, value in alone.items():
            np.testing.assert_allclose(both[name] - other[name], value, atol=1e-5, err_msg=name)


def _places(events: Ragged, name: str, clients: Any) -> Any:
    return slots(events, clients) if name in ROWS else clients


def test_private_parts_are_kept_used_and_only_those_of_the_cohort_move() -> None:
    """Unlike in the released code, where they are never loaded."""
    data, method = toy_training_set(), built("feddae", participation=0.4)
    state = method.start(data, 1)
    after, record, _ = method.advance(data, state, 1, 1)
    moved = np.flatnonzero((after.private["local.out"] != state.private["local.out"]).any((1, 2)))
    assert moved.size == record.clients < data.n_users
    users = np.arange(data.n_users)
    with_own = method.scorer(data, after).scores(users)
    without = method.scorer(data, replace(after, private=state.private)).scores(users)
    differs = np.flatnonzero((with_own != without).any(1))
    assert np.array_equal(differs, moved)


def test_one_group_or_many_is_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    data, method = toy_training_set(), built("feddae", rounds=1)
    whole = method.pack(trained(method, data)[0])
    monkeypatch.setattr("fedmosaic.methods.feddae.CLIENTS", 3)
    for name, value in method.pack(trained(method, data)[0]).items():
        np.testing.assert_allclose(value, whole[name], atol=2e-4, err_msg=name)


def test_other_clients_and_other_histories_are_refused() -> None:
    data, method = toy_training_set(), built("feddae")
    with pytest.raises(SettingsError, match="one user per client"):
        method.start(replace(data, silos=SILOS), 1)
    state = method.start(data, 1)
    other = Ragged.from_rows([[0, 1]] * data.n_users)
    with pytest.raises(ForeignError, match="not those"):
        method.scorer(replace(data, histories=other), state).scores(np.arange(2))
