"""The laws of the house, for every federated method of the catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedmosaic.algorithm.algorithm import Algorithm, compose, describe
from fedmosaic.algorithm.local import SGD, Adagrad, Adam, Decay, Move, Pass, PerItem, Phase
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Init, Role
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.core.errors import ScoreError, SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.scorer import DeviceScorer
from fedmosaic.methods import registry
from fedmosaic.methods.base import roles_of
from fedmosaic.methods.fedmf import LinearSettings, linear
from fedmosaic.methods.local_only import alone
from fedmosaic.testing import (
    check_chunks,
    check_engines,
    check_privacy,
    digest,
    run_rounds,
    same_parity_share,
    toy_training_set,
)

torch = pytest.importorskip("torch")

# Of FedRAP's ablations, those that are algorithms of their own; other norms and ramps are numbers in one objective
# (tests/test_personalise.py). FedPerGNN, whose graph grows between rounds, is in tests/test_methods.py.
VARIANTS = [f"fedrap-{name}" for name in ("no", "l2", "fixed", "sin", "square", "frac")]
METHODS = [
    e.name for e in registry.entries() if "engine" in e.settings.model_fields and e.name not in (*VARIANTS, "fedpergnn")
]
# Small batches so that the toy data has several, the last one partial; a mild rate so that float noise stays small.
SMALL: dict[str, Any] = {"dim": 4, "batch_size": 16, "rounds": 3}
NETWORK = {"item_factor": 0.025, "network_rate": 0.5, "user_rate": 0.5}
MILD: dict[str, dict[str, Any]] = {
    "fedncf": NETWORK,
    "fedncf-dual": NETWORK,
    "fedncf-plgc": NETWORK,
    "fedrecon": {"item_factor": 0.1, "user_rate": 0.5, "rebuild_epochs": 3},
    "fedrecon-dual": {"item_factor": 0.1, "user_rate": 0.5, "rebuild_epochs": 3},
    "colr": {"rank": 2, "item_rate": 2.0},
}


def small(name: str, **changes: Any) -> Federation:
    fields = registry.entry(name).settings.model_fields
    mild = MILD.get(name, {"item_rate": 2.0} if "item_rate" in fields else {})
    if name.startswith("fedrap"):
        mild = {"item_rate": 2.0, "decay": 0.01, "local_epochs": 3, "batch_size": 32, "tolerance": 0.02}
    made: Federation = registry.entry(name).build(SMALL | mild | changes)
    return made


def table_after_a_round(federation: Federation, data: TrainingSet) -> Any:
    return run_rounds(federation, data, rounds=1)[0].server.params["item"]


@pytest.mark.parametrize("name", METHODS)
def test_engine_law(name: str) -> None:
    check_engines(small(name))


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("mf", "ncf", "neumf")])
@pytest.mark.parametrize("changes", [{"participation": 0.4}, {"local_epochs": 3}, {"negatives": 0}], ids=str)
def test_engine_law_under_other_settings(name: str, changes: dict[str, Any]) -> None:
    check_engines(small(name, **changes))


@pytest.mark.parametrize("name", ["fedmf", "pfedrec"])
def test_engine_law_scale_free(name: str) -> None:
    check_engines(small(name, preset="scale-free"))


@pytest.mark.parametrize("name", ["fedmf", "pfedrec", "fedncf", "local-only"])
def test_engine_law_with_silos(name: str) -> None:
    data = toy_training_set()
    silos = Ragged.from_rows([[0, 1, 2, 3], [4], [7, 5, 6], list(range(8, 13))])
    check_engines(small(name), replace(data, silos=silos))


@pytest.mark.parametrize("name", METHODS)
def test_chunks_and_workers(name: str) -> None:
    check_chunks(small(name))


@pytest.mark.parametrize("name", METHODS)
def test_privacy_law(name: str) -> None:
    check_privacy(small(name))


@pytest.mark.parametrize("name", METHODS)
def test_a_ranking_of_everything_scores_each_pair_as_if_it_were_asked_alone(name: str) -> None:
    """Shortcuts for whole catalogues (rows that all users read are there once, compiled sums) change nothing."""
    data, federation = toy_training_set(), small(name, participation=0.6)
    state, _ = run_rounds(federation, data, rounds=3)
    scorer = federation.scorer(data, state)
    assert isinstance(scorer, DeviceScorer)
    whole = scorer.scores(np.arange(data.n_users))
    if federation.algorithm.answers_with_tuned_copy:  # pairs answer with the newest state, rankings with tuned copies
        alone = np.concatenate([scorer.scores(np.array([u])) for u in range(data.n_users)])
    else:
        rng = np.random.default_rng(0)
        order = rng.permuted(np.tile(np.arange(data.n_items, dtype=np.int32), (data.n_users, 1)), axis=1)
        asked = Ragged(order.ravel(), np.arange(data.n_users + 1) * data.n_items)
        alone = np.empty_like(whole)
        np.put_along_axis(alone, order.astype(np.int64), scorer.pairs(asked).reshape(order.shape), axis=1)
    np.testing.assert_allclose(whole, alone, rtol=1e-5, atol=1e-6)


LEARN: dict[str, dict[str, Any]] = {
    "fedmf": {"rounds": 60, "item_rate": 40.0, "user_rate": 1.0},
    "pfedrec": {"rounds": 60, "preset": "scale-free", "dim": 8},
    "fedncf": {"rounds": 150, "network_rate": 1.0, "user_rate": 1.0, "item_factor": 1.0},
    "fedncf-dual": {"rounds": 150, "network_rate": 0.3, "user_rate": 0.3, "item_factor": 0.15},
    "fedncf-rows": {"rounds": 80, "rate": 0.02, "participation": 1.0},
    "fedrecon": {"rounds": 60, "item_factor": 2.0, "user_rate": 1.0},
    "fedrecon-dual": {"rounds": 60, "item_factor": 0.5, "user_rate": 1.0},
    "fedrap": {"rounds": 60, "preset": "retuned", "item_rate": 50.0, "user_rate": 1.0},
    "fedrap-c": {"rounds": 40, "item_rate": 20.0},
    "fedneumf": {"rounds": 60, "participation": 1.0, "server_rate": 0.02},
    "fedrecgel": {"rounds": 60, "participation": 1.0, "server_rate": 0.02},
    "fedmf-plgc": {"rounds": 60, "preset": "scale-free"},
    "pfedrec-plgc": {"rounds": 60, "preset": "scale-free"},
    "fedncf-plgc": {"rounds": 150, "network_rate": 1.0, "user_rate": 1.0, "item_factor": 1.0},
    "colr": {"rounds": 60, "preset": "scale-free", "rank": 4},
    "mf": {"rounds": 60, "rate": 0.05},
    "ncf": {"rounds": 60, "rate": 0.02},
    "neumf": {"rounds": 60, "rate": 0.02},
}


@pytest.mark.parametrize("name", LEARN)
def test_learning_law(name: str) -> None:
    """Every method that shares anything ranks a user's missing item above all items of the other colour."""
    federation = registry.entry(name).build({"dim": 8, "batch_size": 64} | LEARN[name])
    assert same_parity_share(federation) >= 0.9


def test_seed_decides_everything_and_only_the_seed() -> None:
    data = toy_training_set()
    one, two, other = (run_rounds(small("pfedrec"), data, seed=s)[0] for s in (1, 1, 2))
    assert digest(one.pack()) == digest(two.pack()) != digest(other.pack())


def test_clients_never_drawn_and_drawn_late_are_exact() -> None:
    """With few clients a round, somebody is new in a late round and somebody never comes: they answer all the same."""
    data = toy_training_set()
    federation = small("pfedrec", participation=0.1)
    state, seen = run_rounds(federation, data, rounds=4)
    assert (state.last == 0).any()
    assert len(set(state.last.tolist())) > 2
    answers = seen[-1][1].reshape(data.n_users, -1)
    np.testing.assert_allclose(federation.scorer(data, state).scores(np.arange(data.n_users)), answers, atol=1e-5)


def test_tuned_copies_are_replayed_exactly() -> None:
    """What a device answers from its own memory equals what it answered at the end of its round."""
    data = toy_training_set()
    for engine in ("loop", "simulate", "fused"):
        federation = small("pfedrec", engine=engine)
        state, seen = run_rounds(federation, data)
        answers = seen[-1][1].reshape(data.n_users, -1)
        assert np.array_equal(federation.scorer(data, state).scores(np.arange(data.n_users)), answers)


def test_untouched_rows_of_a_tuned_copy_are_the_table_received() -> None:
    """An item that a device did not meet in its last round is scored with the row it received, not the newest one."""
    data = toy_training_set()
    federation = small("pfedrec", negatives=0)
    state, _ = run_rounds(federation, data, rounds=2)
    assert state.replay is not None
    given = state.replay.received["item"]
    assert given.shape[0] == 1  # with everybody in every round one past table is enough
    user = 0
    unmet = np.setdiff1d(np.arange(data.n_items), data.histories[user])
    scores = federation.scorer(data, state).scores(np.array([user]))[0]
    received = given[0] @ state.devices.dense("user")[user] + state.devices.dense("bias")[user, 0]
    newest = state.server.params["item"] @ state.devices.dense("user")[user] + state.devices.dense("bias")[user, 0]
    np.testing.assert_allclose(scores[unmet], received[unmet], rtol=1e-4, atol=1e-6)
    met = data.histories[user]
    assert not np.allclose(scores[met], received[met], atol=1e-4)
    assert not np.allclose(newest[met], received[met], atol=1e-6)


def test_a_query_may_begin_late() -> None:
    data = toy_training_set()
    federation = small("pfedrec", participation=0.4)
    state = federation.start(data, 1)
    for number in (1, 2, 3):
        state, _, _ = federation.advance(data, state, number, 1)
    everything = Ragged(np.tile(np.arange(23, dtype=np.int32), 13), np.arange(14) * 23)
    state, _, answers = federation.advance(data, state, 4, 1, everything)
    assert answers is not None
    expected = federation.scorer(data, state).scores(np.arange(13))
    np.testing.assert_allclose(answers.reshape(13, -1), expected, atol=1e-5)


def test_weight_decay_leaves_rows_without_examples_alone() -> None:
    base = linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0, negatives=1))
    for rule in (SGD(decay=0.01), Adam(decay=0.01)):
        step = Phase((Move(("user", "bias"), 0.1), Move(("item",), 0.5, rule)))
        check_engines(Federation(replace(base, local=(Pass((step,), batch_size=16),))))


def test_the_fused_engine_sums_what_the_general_engine_sums() -> None:
    """Many clients with large steps: the sum may be far larger than any one upload."""
    users, items = 3000, 40
    histories = Ragged(np.tile(np.arange(20, dtype=np.int32), users), np.arange(users + 1) * 20)
    data = replace(toy_training_set(), histories=histories, excluded=histories, n_items=items)
    federation = small("fedmf", item_rate=4000.0, batch_size=256)
    sums = [table_after_a_round(replace(federation, engine=engine), data) for engine in ("simulate", "fused")]
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-3, atol=1e-3)


def test_many_users_without_history() -> None:
    rows = [[0, 1, 2], [2, 3]] + [[]] * 150
    histories = Ragged.from_rows(rows)
    data = replace(toy_training_set(), histories=histories, excluded=histories, n_items=6)
    for name in ("fedmf", "pfedrec", "fedncf", "local-only"):
        check_engines(small(name, participation=0.5), data)


def test_similar_items_of_central_models_are_aligned() -> None:
    data = toy_training_set()
    state, _ = run_rounds(small("mf", negatives=0), data)
    vectors = small("mf").vectors(state)
    assert vectors.shape == (data.n_items, 4)
    rows = state.devices.rows("item")
    assert rows is not None
    assert np.array_equal(vectors[rows.keys], rows.values)
    lonely, _ = run_rounds(small("local-only"), data)
    with pytest.raises(SettingsError, match="no item table that is common"):
        small("local-only").vectors(lonely)


# --- identity laws ----------------------------------------------------------------------------------------------


def test_one_client_with_everything_shared_is_central_training() -> None:
    """A federation of one silo is plain SGD: the mean of one is itself."""
    data = toy_training_set().pooled()
    base = linear(LinearSettings(dim=4, batch_size=7, item_rate=2.0))
    shared, _ = run_rounds(Federation(base), data)
    lonely, _ = run_rounds(Federation(alone(base)), data)
    rows = lonely.devices.rows("item")
    assert rows is not None
    np.testing.assert_allclose(shared.server.params["item"], rows.values, atol=1e-6)


def test_dual_with_still_items_leaves_the_table_alone() -> None:
    data = toy_training_set()
    frozen = compose(linear(LinearSettings(dim=4, batch_size=7, item_rate=2.0)), dual(item_rate=0.0))
    state, _ = run_rounds(Federation(frozen), data)
    start = Federation(frozen).start(data, 1)
    assert np.array_equal(state.server.params["item"], start.server.params["item"])


def test_gradient_upload_with_one_step_equals_delta_upload() -> None:
    """One batch, one step: sending the gradient and stepping on the server is sending the step."""
    data = toy_training_set()
    model = LinearScorer(4)
    step = Phase((Move(("user", "bias"), 0.1), Move(("item",), 0.5)))
    delta = Algorithm(model, roles_of(model), (Pass((step,), batch_size=1000),))
    gradient = replace(delta, upload=Upload("gradient"), server=Server(rate=0.5))
    a, _ = run_rounds(Federation(delta), data, rounds=2)
    b, _ = run_rounds(Federation(gradient), data, rounds=2)
    np.testing.assert_allclose(a.server.params["item"], b.server.params["item"], atol=1e-6)
    np.testing.assert_allclose(a.devices.dense("user"), b.devices.dense("user"), atol=1e-6)


def test_step_rules_equal_torch() -> None:
    rng = np.random.default_rng(0)
    rules: list[tuple[Any, Any]] = [
        (Adam(decay=0.01), lambda p: torch.optim.Adam([p], lr=0.05, weight_decay=0.01)),
        (Adagrad(), lambda p: torch.optim.Adagrad([p], lr=0.05)),
        (SGD(decay=0.1), lambda p: torch.optim.SGD([p], lr=0.05, weight_decay=0.1)),
    ]
    for rule, reference in rules:
        value = rng.standard_normal((3, 2)).astype(np.float32)
        twin = torch.from_numpy(value.copy()).requires_grad_()
        step, memory = reference(twin), rule.memory(value)
        for _ in range(5):
            gradient = rng.standard_normal((3, 2)).astype(np.float32)
            twin.grad = torch.from_numpy(gradient.copy())
            step.step()
            rule.step(value, gradient, memory, 0.05)
        torch.testing.assert_close(torch.from_numpy(value), twin.detach())


@pytest.mark.parametrize("rule", [SGD(), Adam(), Adagrad()], ids=repr)
def test_engine_law_for_every_server_rule(rule: Any) -> None:
    base = replace(linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0)), upload=Upload())
    check_engines(Federation(replace(base, server=Server("row-mean", rule, 0.1))))


def test_values_and_deltas_give_the_same_bits_and_values_need_the_mean() -> None:
    value = linear(LinearSettings(dim=4, batch_size=7, item_rate=2.0))
    states = [
        run_rounds(Federation(replace(value, upload=Upload(k))), toy_training_set())[0].pack()
        for k in ("value", "delta")
    ]
    assert digest(states[0]) == digest(states[1])
    with pytest.raises(SettingsError, match="need the plain mean"):
        replace(value, server=Server("row-mean"))


def test_server_reductions() -> None:
    data = toy_training_set()
    base = replace(linear(LinearSettings(dim=4, batch_size=7, item_rate=2.0)), upload=Upload())
    start = Federation(base).start(data, 1).server.params["item"]
    moved = {
        kind: table_after_a_round(Federation(replace(base, server=Server(kind))), data) - start
        for kind in ("mean", "row-mean", "sum")
    }
    able = int((data.histories.lengths > 0).sum())
    np.testing.assert_allclose(moved["sum"] / able, moved["mean"], atol=1e-5)
    ratio = np.abs(moved["row-mean"]).sum(1) / np.maximum(np.abs(moved["mean"]).sum(1), 1e-12)
    assert ratio.min() >= 0.99  # rows nobody shares are not diluted


# --- construction -----------------------------------------------------------------------------------------------


def test_wrong_declarations_are_refused_with_names() -> None:
    model = LinearScorer(4)
    roles = roles_of(model)
    step = (Pass((Phase((Move(("user",), 0.1),)),)),)
    with pytest.raises(SettingsError, match=r"without role: \['bias'\]"):
        Algorithm(model, {k: v for k, v in roles.items() if k != "bias"}, step)
    with pytest.raises(SettingsError, match=r"unknown: \['head'\]"):
        Algorithm(model, roles | {"head": Role.SHARED}, step)
    with pytest.raises(SettingsError, match=r"move unknown parameters \['users'\]; known: item, user, bias"):
        Algorithm(model, roles, (Pass((Phase((Move(("users",), 0.1),)),)),))
    with pytest.raises(SettingsError, match="would leave the device"):
        Algorithm(model, roles | {"user": Role.SHARED}, step)
    with pytest.raises(SettingsError, match="move frozen"):
        Algorithm(model, roles | {"item": Role.FROZEN}, (Pass((Phase((Move(("item",), 0.1),)),)),))
    lasting = (Pass((Phase((Move(("user",), 0.1, Adam(persistent=True)),)),)),)
    with pytest.raises(SettingsError, match="persistent optimiser cannot be replayed"):
        Algorithm(model, roles | {"item": Role.PERSONALISED}, lasting)
    with pytest.raises(SettingsError, match="persistent optimiser needs private"):
        Algorithm(model, roles, (Pass((Phase((Move(("item",), 0.1, Adam(persistent=True)),)),)),))
    with pytest.raises(SettingsError, match="engine=fused does not run this algorithm: its model is NeuMF"):
        run_rounds(small("fedneumf", engine="fused"), toy_training_set())
    with pytest.raises(SettingsError, match="engine=fused does not run this algorithm: an optimiser is Adam, not SGD"):
        run_rounds(small("fedncf-rows", engine="fused"), toy_training_set())


def test_divergence_is_an_error_and_not_a_number() -> None:
    for engine in ("simulate", "fused"):
        with pytest.raises(ScoreError, match="training diverged"):
            run_rounds(small("fedmf", item_rate=1e30, user_rate=1e30, engine=engine), toy_training_set())
        for method in ("fedncf", "fedncf-dual"):
            with pytest.raises(ScoreError, match="training diverged"):
                run_rounds(small(method, network_rate=1e30, engine=engine), toy_training_set())


def test_describe_tells_what_leaves_the_device() -> None:
    rows = {r["parameter"]: r for r in describe(small("fedncf").algorithm, 100)}
    assert rows["item"]["bytes up"] == 100 * 4 * 4
    assert rows["user"]["bytes up"] == 0
    assert rows["mlp.0.weight"]["role"] == "shared"
    touched = replace(small("fedmf").algorithm, upload=Upload(support="touched"))
    assert touched.traffic(100, 10.0)[0] == 10 * (4 * 4 + 4)


def test_schedules_are_functions_of_the_round() -> None:
    from fedmosaic.algorithm.local import Context, value_of

    ctx = Context(round=3, seed=0, n_items=50, n_clients=2)
    assert value_of(0.5, ctx) == 0.5
    assert value_of(PerItem(0.1), ctx) == 5.0
    assert value_of(Decay(1.0, 0.5), ctx) == 0.25


def test_batch_of_one_client_is_the_textbook_gradient() -> None:
    """One client, one batch, in plain NumPy: the step of FedMF, repeated items included."""
    histories = Ragged.from_rows([[0, 2, 2]])
    data = TrainingSet(histories, Ragged.from_rows([[0, 1, 2, 3]]), 4)  # empty pool: no negatives
    model = LinearScorer(3, item_init=Init("normal", 1.0), user_init=Init("normal", 1.0))
    step = Phase((Move(("user", "bias"), 0.3, SGD()), Move(("item",), 0.7, SGD())))
    federation = Federation(Algorithm(model, roles_of(model), (Pass((step,)),), objective=bce))
    before = federation.start(data, 5)
    e, u, b = before.server.params["item"], before.devices.dense("user")[0], before.devices.dense("bias")[0, 0]
    residual = {j: 1 / (1 + np.exp(-(u @ e[j] + b))) - 1 for j in (0, 2)}
    new = e.copy()
    new[0] -= 0.7 * residual[0] * u / 3
    new[2] -= 0.7 * 2 * residual[2] * u / 3
    for engine in ("loop", "simulate", "fused"):
        after, _, _ = replace(federation, engine=engine).advance(data, before, 1, 5)
        np.testing.assert_allclose(after.server.params["item"], new, rtol=1e-5)
        np.testing.assert_allclose(
            after.devices.dense("user")[0], u - 0.3 * (residual[0] * e[0] + 2 * residual[2] * e[2]) / 3, rtol=1e-5
        )
    assert NCF(3).specs()[0].name == "item"
