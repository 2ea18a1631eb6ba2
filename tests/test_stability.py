"""Stability, items as tasks, and the bound of FedRecGEL's lemma 1: identities that do not depend on training well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import exp, floor, log, pi, sqrt
from typing import Any

import numpy as np
import pytest
from conftest import random_interactions

from fedmosaic.core.errors import SettingsError
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import leave_one_out
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.methods import registry
from fedmosaic.reproduce import stability
from fedmosaic.reproduce.bound import LIMIT, READINGS, bounds, held_out, perturbed, regularisation, sigma_of
from fedmosaic.runs.ledger import Record
from fedmosaic.runs.run import Setup
from fedmosaic.training.loop import Validation, train

pytest.importorskip("torch")
SMALL = {"dim": 4, "participation": 0.5}


@cache
def shop() -> Setup:
    split = leave_one_out(random_interactions(70, 60, seed=3))  # histories of different lengths
    lists = draw_candidates(split, 15)
    return Setup(split, lists, training_set(split, "strict"), Validation(split, lists))


@cache
def trained(name: str = "fedrecgel") -> tuple[stability.Stability, Any]:
    return stability.watch(registry.entry(name).build(SMALL), shop(), rounds=6, seed=2, last=4)


def tasks_of(name: str = "fedrecgel", **changes: Any) -> Any:
    from fedmosaic.reproduce.item_tasks import Tasks

    return Tasks(registry.entry(name).build(SMALL | changes), shop().data, trained(name)[1])


def test_watching_is_what_the_loop_and_the_evaluation_say() -> None:
    setup, method = shop(), registry.entry("fedrecgel").build(SMALL | {"rounds": 6})
    seen = list(train(method, setup.data, 2, setup.validation))
    found, state = trained()
    said = [s.validation["sampled"]["hr@10"] for s in seen if s.validation is not None]
    assert found.validation == tuple(said[-4:])
    tables = [method.vectors(method.start(setup.data, 2)), *(method.vectors(s.step.state) for s in seen)]
    assert found.movement == tuple(
        np.linalg.norm(b - a.astype(np.float64)) / np.linalg.norm(a.astype(np.float64)) for a, b in pairwise(tables)
    )
    assert np.array_equal(tables[-1], method.vectors(state))
    test = evaluate(method.scorer(setup.data, state), setup.split, "test", setup.candidates).sampled
    assert test is not None
    assert found.test == pytest.approx(test.mean("hr", 10))
    assert found.moved == pytest.approx(np.mean(found.movement[-4:]))
    assert found.over_rounds == pytest.approx(np.std(said[-4:], ddof=1))


def test_rows_of_a_server_without_rate_stand_still() -> None:
    method = registry.entry("fedneumf").build(SMALL)
    idle = replace(method, algorithm=replace(method.algorithm, server=replace(method.algorithm.server, rate=0.0)))
    assert stability.measure(idle, shop(), 3, 0, last=2).movement == (0.0, 0.0, 0.0)
    assert min(stability.measure(method, shop(), 3, 0, last=2).movement) > 0


def test_a_method_without_rounds_answers_or_common_rows_is_measured_too() -> None:
    setup = shop()
    popular = stability.measure(registry.entry("popularity").build(), setup, 2, 0, last=2)
    assert popular.test == pytest.approx(stability.references(setup)["popularity"])
    assert popular.movement[-1] == 0
    alone = stability.measure(registry.entry("local-only").build({"dim": 4}), setup, 2, 0, last=2)
    assert alone.movement == ()
    assert np.isnan(alone.moved)
    with pytest.raises(SettingsError, match="last 5 of 2"):
        stability.measure(registry.entry("popularity").build(), setup, 2, 0, last=5)


def test_a_climb_is_no_jitter() -> None:
    climb = [0.1, 0.2, 0.3, 0.4]
    assert stability.spread(climb) > 0.1 > 1e-9 > stability.about_line(climb)
    shaky = [0.1, 0.3, 0.1, 0.3]
    assert stability.about_line(shaky) > 0.1
    assert stability.movement(np.zeros((2, 2)), np.zeros((2, 2))) == 0
    assert stability.movement(np.zeros((2, 2)), np.ones((2, 2))) == np.inf


def test_records_tell_the_same_spreads() -> None:
    def record(test: float, curve: list[float | None]) -> Record:
        return Record("", "", {}, {}, "", {"test": {"sampled": {"hr@10": test}}}, {"validation": curve})

    found = stability.of_records([record(0.5, [0.0, 0.2, None, 0.4]), record(0.7, [])], last=2)
    assert found["over seeds"] == pytest.approx(sqrt(0.02))
    assert found["over rounds"] == pytest.approx(sqrt(0.02))
    assert np.isnan(stability.of_records([record(0.5, [])])["over rounds"])


@pytest.mark.parametrize("chunk", [None, 3, 128])
def test_items_and_clients_read_one_objective(chunk: int | None) -> None:
    from fedmosaic.algorithm.objective import ChunkedBCE, bce

    tasks = tasks_of()
    found = tasks.by_item(bce if chunk is None else ChunkedBCE(chunk))
    assert found.item_centred == pytest.approx(found.client_centred, rel=1e-6)
    chunks = 1 if chunk is None else np.ceil(tasks.counts / chunk).mean()
    assert found.weights.sum() == pytest.approx(chunks)
    assert found.examples.sum() == tasks.counts.sum()
    if chunk is None:  # a task's loss is the mean over its own examples, each weighing what its client gives it
        place = int(found.examples.argmax())
        mine = tasks.items == found.items[place]
        expected = np.average(tasks.example_losses()[mine], weights=1 / tasks.counts[tasks.clients[mine]])
        assert found.losses[place] == pytest.approx(expected)
    own = tasks.by_item()
    assert (own.client_centred == found.client_centred) == (chunk == 128)  # the algorithm's own is in chunks of 128


def test_tasks_agree_with_the_landscape_on_the_same_examples() -> None:
    from fedmosaic.reproduce.landscape import Landscape

    method, (_, state) = registry.entry("fedrecgel").build(SMALL), trained()
    land = Landscape(method, shop().data, state, negatives=method.algorithm.negatives)
    assert tasks_of().example_losses().mean() == pytest.approx(land.loss(), rel=1e-12)


def test_without_noise_the_moved_loss_is_the_loss() -> None:
    tasks = tasks_of()
    still = perturbed(tasks, 0.0, pairs=3)
    assert (still.mean, still.error) == (still.loss, 0.0)
    assert still.verdict == "undecided"
    far = perturbed(tasks, 0.5, pairs=3)
    assert far.mean != still.mean
    assert far.error > 0


def test_noise_moves_what_it_should_by_as_much_as_it_should() -> None:
    tasks = tasks_of()
    drawn = tasks._noise("item.mlp", (2000, 16), 0.3, 1)
    assert float(drawn.std()) == pytest.approx(0.3, rel=0.02)
    assert (tasks._noise("item.mlp", (2000, 16), 0.3, -2) == -drawn).all()
    losses = [tasks.example_losses(0.3, 0, names) for names in (None, tasks.tables, tasks.private, ())]
    assert len({float(v.mean()) for v in losses}) == 4
    assert np.array_equal(losses[3], tasks.example_losses())
    assert np.array_equal(losses[0], tasks.example_losses(0.3, 0))
    # one item's loss depends on its own rows and on no other item's: what the reading by item relies on
    item, name = int(tasks.items[0]), tasks.tables[0]
    tasks.shared = {**tasks.shared, name: tasks.shared[name].clone()}
    tasks.shared[name][item] += 1.0
    moved = tasks.example_losses() != losses[3]
    assert moved.any()
    assert set(tasks.items[moved]) == {item}


def test_the_test_examples_are_test_items_and_strangers() -> None:
    from fedmosaic.reproduce.item_tasks import Tasks

    split, method = shop().split, registry.entry("fedrecgel").build(SMALL)
    tasks = Tasks(method, held_out(split), trained()[1])
    assert (tasks.counts == 1 + method.algorithm.negatives).all()
    for client in range(split.n_users):
        items = tasks.items[tasks.clients == client]
        assert items[0] == split.test[client][0]
        assert not set(items[1:]) & {*split.train[client], *split.validation[client], *split.test[client]}


def test_the_term_grows_with_the_model_and_falls_with_examples() -> None:
    lengths = [regularisation(float(s), 50, 400, 0.1) for s in (0, 1, 4, 100, 1e6)]
    assert lengths == sorted(set(lengths))
    counts = [regularisation(4.0, 50, n, 0.1) for n in (2, 10, 100, 1e4, 1e8)]
    assert counts == sorted(set(counts), reverse=True)
    assert regularisation(4.0, 50, 400, 0.1, delta=0.001) > regularisation(4.0, 50, 400, 0.1)
    assert regularisation(4.0, 50, 400, 0.1, limit=3.0) == pytest.approx(3 * regularisation(4.0, 50, 400, 0.1))
    assert regularisation(4.0, 50, 1, 0.1) == regularisation(4.0, 50, 400, 0.0) == np.inf
    with pytest.raises(SettingsError):
        regularisation(-1.0, 50, 400, 0.1)


@dataclass(frozen=True)
class Case:
    squared: float
    k: int
    n: int
    sigma: float


@pytest.mark.parametrize("case", [Case(4.0, 50, 400, 0.1), Case(300.0, 5000, 2000, 0.3), Case(0.0, 20, 100, 1.0)])
def test_the_term_is_no_tighter_than_the_theorem_it_comes_from(case: Case) -> None:
    """McAllester with the prior of the grid that Foret et al. choose, computed without their simplifications."""
    k, n, variance = case.k, case.n, case.sigma**2
    top = variance * (1 + exp(4 * n / k))
    number = floor(1 + k * log(top / (variance + case.squared / k)))
    prior = top * exp((1 - number) / k)
    divergence = ((k * variance + case.squared) / prior - k + k * log(prior / variance)) / 2
    confidence = 6 * 0.05 / (pi * number) ** 2
    exact = sqrt((divergence + log(n / confidence)) / (2 * (n - 1)))
    assert exact <= regularisation(case.squared, k, n, case.sigma) <= 1.5 * exact


def test_bounds_of_three_readings() -> None:
    tasks = tasks_of()
    found = {b.reading: b for b in bounds(tasks, 0.05)}
    assert tuple(found) == READINGS
    shared, own, row = tasks.sizes()
    state = trained()[1]
    assert shared == sum(v.size for v in state.server.params.values())
    assert row == own == 4 + 16
    assert [found[r].parameters for r in READINGS] == [shared + 70 * own, shared + own, row]
    total = sum(float((v.astype(np.float64) ** 2).sum()) for v in state.server.params.values())
    total += sum(float((state.devices.dense(n).astype(np.float64) ** 2).sum()) for n in tasks.private)
    assert found["pooled"].squared_norm == pytest.approx(total)
    assert found["pooled"].examples == tasks.counts.sum()
    assert found["pooled"].loss == pytest.approx(np.minimum(tasks.example_losses(), LIMIT).mean())
    for bound in found.values():
        assert bound.lowest <= bound.value
        assert bound.value > bound.perturbed
    assert found["pooled"].value == pytest.approx(found["pooled"].perturbed + LIMIT * found["pooled"].term)
    assert found["pooled"].vacuous == 1  # 70 users of a toy shop
    assert sigma_of(0.02, 10_000, 1000) == pytest.approx(0.02 / (100 + sqrt(log(1000))))
