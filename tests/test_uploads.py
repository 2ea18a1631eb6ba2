"""What is done to an upload on its way: noise, clipping, low rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedmosaic import leave_one_out
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.upload import Parcel, Upload
from fedmosaic.algorithm.wrappers.low_rank import low_rank
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.data.negatives import training_set
from fedmosaic.data.synthetic import synthetic
from fedmosaic.engines.federation import Federation
from fedmosaic.methods.fedmf import LinearSettings, linear
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.noise import AddedNoise, Clip
from fedmosaic.testing import run_rounds, toy_training_set


@pytest.mark.parametrize(("kind", "spread"), [("laplace", 2**0.5), ("gaussian", 1.0)])
def test_noise_has_its_scale_on_every_number_and_is_keyed(kind: Any, spread: float) -> None:
    noise, ctx = AddedNoise(kind, 0.5), Context(3, 7, 100, 10)
    clients = np.arange(5)
    total, again, alone = (np.zeros((400, 8), dtype=np.int64) for _ in range(3))
    noise.add(total, "item", clients, ctx)
    for client in clients[::-1]:
        noise.add(again, "item", np.array([client]), ctx)
    assert np.array_equal(total, again)
    noise.add(alone, "item", clients[:1], ctx)
    values = alone / SCALE
    assert abs(values.std() - 0.5 * spread) < 0.03
    assert abs(values.mean()) < 0.03
    other = np.zeros_like(alone)
    noise.add(other, "item", clients[:1], replace(ctx, round=4))
    assert not np.array_equal(alone, other)


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_noise_follows_its_law_and_neighbours_are_independent(kind: Any) -> None:
    total = np.zeros((20_000, 8), dtype=np.int64)
    AddedNoise(kind, 1.0).add(total, "item", np.arange(1), Context(3, 7, 20_000, 1))
    values = (total / SCALE).reshape(-1, 2)  # two places share a word
    law = stats.laplace() if kind == "laplace" else stats.norm()
    for side in values.T:
        assert stats.kstest(side, law.cdf).pvalue > 0.01
    for powers in (values, values**2, np.abs(values)):
        assert abs(np.corrcoef(powers.T)[0, 1]) < 0.015  # five deviations of independent ones


@pytest.mark.parametrize("clients", [1, 3, 40])
@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_a_sum_drawn_at_once_has_the_law_of_the_clients_own_draws(kind: Any, clients: int) -> None:
    each, summed, again, later = (np.zeros((2_000, 8), dtype=np.int64) for _ in range(4))
    ctx, whom = Context(3, 7, 2_000, clients), np.arange(clients)
    AddedNoise(kind, 0.5).add(each, "item", whom, ctx)
    AddedNoise(kind, 0.5, "summed").add(summed, "item", whom, ctx)
    assert stats.ks_2samp(each.ravel(), summed.ravel()).pvalue > 0.01
    assert abs(summed.std() / each.std() - 1) < 0.05
    assert abs(np.corrcoef(summed[:, 0], summed[:, 1])[0, 1]) < 0.1
    AddedNoise(kind, 0.5, "summed").add(again, "item", whom[::-1], ctx)
    assert np.array_equal(summed, again)  # whoever is asked first
    AddedNoise(kind, 0.5, "summed").add(later, "item", whom, replace(ctx, round=4))
    assert not np.array_equal(summed, later)


def test_clipping_bounds_the_joint_norm_of_each_client() -> None:
    changes = {"a": np.full((4, 2), 3.0, np.float32), "b": np.full((2, 2), 0.001, np.float32)}
    owners = {"a": np.array([0, 0, 0, 0]), "b": np.array([0, 1])}
    parcel = Parcel(changes, {}, owners, {}, np.array([5, 9]), Context(1, 0, 4, 2))
    found = Clip(0.5).encode(parcel).changes
    squares = float(np.square(found["a"]).sum() + np.square(found["b"][0]).sum())
    assert abs(squares**0.5 - 0.5) < 1e-6
    assert np.array_equal(found["b"][1], changes["b"][1])  # short enough already


def test_low_rank_uploads_are_lossless_within_their_subspace() -> None:
    """What the server decodes is exactly what the devices changed."""
    pytest.importorskip("torch")
    host = linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0))
    data = toy_training_set()
    projected = replace(low_rank(2)(host), upload=Upload())  # the same training, sent at full width
    one, two = (
        run_rounds(Federation(algorithm), data, rounds=1)[0].server.params["item"]
        for algorithm in (low_rank(2)(host), projected)
    )
    np.testing.assert_allclose(one, two, atol=1e-5)
    change = one - Federation(host).start(data, 1).server.params["item"]
    assert np.linalg.matrix_rank(change, tol=1e-4) == 2


BOUNDED: list[dict[str, object]] = [
    {"upload_clip": 0.7},
    {"row_clip": 0.2},
    {"row_clip": 0.2, "upload_clip": 0.7},
    {"upload_clip": "adaptive", "clip_start": 0.7},
]


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedrecon"])
@pytest.mark.parametrize("given", BOUNDED)
def test_compiled_bounds_are_those_of_the_reference(method: str, given: dict[str, object]) -> None:
    data = training_set(leave_one_out(synthetic(40, 50, 8, seed=3)), "strict")
    states = []
    for engine in ("fused", "loop"):
        federation = entry(method).build({"dim": 4, "rounds": 3, "engine": engine, **given})
        state = federation.start(data, 0)
        for number in (1, 2, 3):
            state, _, _ = federation.advance(data, state, number, 0)
        states.append(state)
    for name, value in states[0].server.params.items():
        np.testing.assert_allclose(value, states[1].server.params[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
def test_bounds_that_nobody_reaches_add_up_what_every_client_sends(method: str) -> None:
    """The same bits as uploads without bounds, one client after the other, as a secure sum adds them."""
    data = training_set(leave_one_out(synthetic(40, 50, 8, seed=3)), "strict")
    ctx, everybody = Context(1, 0, data.n_items, data.n_clients), np.arange(data.n_clients)
    free = entry(method).build({"dim": 4, "engine": "fused"})
    far = entry(method).build({"dim": 4, "engine": "fused", "row_clip": 1e9, "upload_clip": 1e9})
    alone = [free.contribute(data, free.start(data, 0), ctx, everybody[c : c + 1])[1].total for c in everybody]
    _, together = far.contribute(data, far.start(data, 0), ctx, everybody)
    wanted = sum(one.totals["item"] for one in alone)
    np.testing.assert_array_equal(together.total.totals["item"], wanted)
    np.testing.assert_array_equal(together.total.touched, sum(one.touched for one in alone))
