"""A bound that follows a private quantile: what it comes to, what it pays, and that it is a clip like any other."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from pathlib import Path

import numpy as np
import pytest
from fleets import agreement_of, coordinator_of, histories, make_fleet

from fedmosaic import leave_one_out
from fedmosaic.algorithm.local import Context
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.data.negatives import training_set
from fedmosaic.data.synthetic import synthetic
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.state import FederationState
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.adaptive_clip import NAME, SHARE, AdaptiveClip
from fedmosaic.privacy.budget import Budget, bounded_by, multiplier
from fedmosaic.testing import LocalTransport

pytest.importorskip("dp_accounting", reason="epsilons need the extra privacy")
ALL = ["fedmf", "pfedrec", "fedrap", "fedncf", "fedrecgel", "fedneumf", "colr"]


@pytest.fixture(scope="module")
def data() -> TrainingSet:
    return training_set(leave_one_out(synthetic(60, 50, 10, seed=1)), "strict")


def built(method: str, **given: object) -> Federation:
    made = entry(method).build({"rounds": 5, "dim": 4, "upload_clip": "adaptive", **given})
    assert isinstance(made, Federation)
    return made


def trained(federation: Federation, data: TrainingSet, rounds: int) -> FederationState:
    state = federation.start(data, 0)
    for number in range(1, rounds + 1):
        state, _, _ = federation.advance(data, state, number, 0)
    return state


def norms(federation: Federation, data: TrainingSet, state: FederationState) -> np.ndarray:
    """Of what every client would send without a bound."""
    upload = replace(federation.algorithm.upload, stack=federation.algorithm.upload.stack[:-1])
    roles = {n: r for n, r in federation.algorithm.roles.items() if n != NAME}
    free = replace(federation, algorithm=replace(federation.algorithm, upload=upload, roles=roles), budget=None)
    found = []
    for client in range(data.n_clients):
        _, done = free.contribute(data, state, Context(9, 0, data.n_items, data.n_clients), np.array([client]))
        found.append(sqrt(sum(float(np.square(v / SCALE).sum()) for v in done.total.totals.values())))
    return np.array(found)


@pytest.mark.parametrize(
    ("method", "reduce", "engine"),
    [(m, r, "simulate") for m in ALL for r in ("mean", "bounded") if (m, r) != ("fedrap", "bounded")]
    + [("fedmf", "mean", "fused"), ("pfedrec", "mean", "fused")],
)
def test_a_bound_that_stands_still_is_a_fixed_one(method: str, reduce: str, engine: str, data: TrainingSet) -> None:
    """The same bits of every parameter, though each device sends one number more."""
    start, given = 0.37, {"rounds": 3, "dim": 8, "reduce": reduce, "engine": engine}
    still = bounded_by(AdaptiveClip(start=start, rate=0.0))
    plain, fixed = entry(method).build(given), entry(method).build({**given, "upload_clip": start})
    following = replace(plain, algorithm=still(plain.algorithm))
    one, other = trained(fixed, data, 3).pack(), trained(following, data, 3).pack()
    assert all(NAME in name for name in set(other) - set(one))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
def test_the_bound_comes_to_the_quantile(method: str, data: TrainingSet) -> None:
    """From far too small and far too large; norms move with the training, and it follows them."""
    for start, quantile in ((1e-3, 0.5), (10.0, 0.8)):
        federation = built(method, rounds=60, clip_start=start, clip_quantile=quantile)
        state = trained(federation, data, 60)
        bound = AdaptiveClip(start).bound_of(state.server.params)
        assert bound == pytest.approx(np.quantile(norms(federation, data, state), quantile), rel=0.2)


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedncf"])
def test_no_upload_is_larger_than_the_bound_of_its_round(method: str, data: TrainingSet) -> None:
    federation = replace(built(method, epsilon=4.0), budget=None)
    state = trained(federation, data, 3)
    bound = AdaptiveClip().bound_of(state.server.params)
    ctx = Context(4, 0, data.n_items, data.n_clients)
    for client in range(8):
        _, done = federation.contribute(data, state, ctx, np.array([client]))
        sent = {n: v / SCALE for n, v in done.total.totals.items()}
        assert abs(float(sent.pop(NAME)[0])) <= AdaptiveClip().sensitivity
        assert sqrt(sum(float(np.square(v).sum()) for v in sent.values())) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("bits", [(0.3, 0.2), (1.0, 0.5), (20.0, 0.9)])
def test_changes_and_wishes_together_are_the_mechanism_that_is_accounted_for(bits: tuple[float, float]) -> None:
    """Each in multiples of its own sensitivity, the squares add up to what the budget's multiplier says."""
    start, quantile = bits
    clip = AdaptiveClip(start, quantile)
    budget = Budget(2.0, 1e-5, clip, 7, 0.3, "server").at({NAME: np.full(1, 0.4, np.float32)})
    noise = budget.noise(100)
    changes, wishes = noise.changes.scale, noise.wishes.scale  # type: ignore[attr-defined]
    together = sqrt((start * exp(0.4) / changes) ** 2 + (clip.sensitivity / wishes) ** 2)
    assert 1 / together == pytest.approx(multiplier(2.0, 1e-5, 7, 0.3), rel=1e-6)
    fixed = Budget(2.0, 1e-5, start * exp(0.4), 7, 0.3, "server").noise(100)
    assert changes / fixed.scale == pytest.approx(1 / sqrt(1 - SHARE), rel=1e-6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("trust", ["server", "devices"])
def test_a_round_has_noise_for_the_bound_it_began_with(trust: str, data: TrainingSet) -> None:
    federation = built("fedmf", epsilon=4.0, trust=trust, secure=trust == "devices", clip_start=3.0)
    quiet = replace(federation, budget=None)
    state = trained(quiet, data, 2)
    noisy, _, _ = federation.advance(data, state, 3, 0)
    plain, _, _ = quiet.advance(data, state, 3, 0)
    found = (noisy.server.params["item"] - plain.server.params["item"]) * data.n_clients
    assert federation.budget is not None
    bound = AdaptiveClip(3.0).bound_of(state.server.params)
    assert bound != pytest.approx(3.0, rel=0.1)
    wanted = federation.budget.multiplier * bound / sqrt(1 - SHARE) * (1.0 if trust == "server" else sqrt(1.5))
    assert found.std() == pytest.approx(wanted, rel=0.15)
    later = [federation.advance(data, state, number, 0)[0].server.params[NAME][0] for number in (3, 4, 5)]
    assert len({float(value) for value in later}) > 1, "wishes gain noise, another one in every round"


@pytest.mark.parametrize("trust", ["server", "devices"])
def test_a_training_goes_on_from_a_file(trust: str, data: TrainingSet) -> None:
    federation = built("pfedrec", epsilon=4.0, trust=trust, secure=trust == "devices")
    whole = trained(federation, data, 3)
    half = federation.unpack(trained(federation, data, 2).pack(), "a file")
    rest, _, _ = federation.advance(data, half, 3, 0)
    for name, value in whole.pack().items():
        np.testing.assert_array_equal(value, rest.pack()[name], err_msg=name)


def test_a_masked_wish_is_a_plain_one(data: TrainingSet) -> None:
    plain = trained(built("fedmf", engine="loop"), data, 3)
    masked = trained(built("fedmf", engine="loop", secure=True), data, 3)
    assert float(plain.server.params[NAME][0]) != 0
    for name, value in plain.server.params.items():
        np.testing.assert_array_equal(value, masked.server.params[name])


def test_one_liar_moves_a_bounded_bound_little(data: TrainingSet) -> None:
    """A wish of a million is cut to what wishes are, where the server looks at them, and a round's step anywhere."""
    clip = AdaptiveClip()
    assert clip.moved(np.zeros(1, np.float32), np.array([1e6]))[0] == clip.rate * clip.quantile
    assert clip.moved(np.zeros(1, np.float32), np.array([-1e6]))[0] == -clip.rate * (1 - clip.quantile)


def test_where_it_cannot_work_it_is_refused(data: TrainingSet) -> None:
    for given, why in (
        ({"secure": True, "secure_bits": 32}, "give upload_clip a number"),
        ({"upload_clip": 1.0, "clip_start": 2.0}, "give upload_clip=adaptive"),
        ({"upload_clip": "quantile"}, "a number above 0, or adaptive"),
        ({"upload_clip": -1}, "a number above 0, or adaptive"),
    ):
        with pytest.raises(SettingsError, match=why):
            built("fedmf", **given)


def test_the_promise_says_what_the_bound_is() -> None:
    promise = built("fedmf", epsilon=4.0).promise
    assert promise is not None
    assert "clipped to a private quantile of their norms (0.5), which is paid for" in promise


def test_the_bound_travels_to_devices_and_back(tmp_path: Path) -> None:
    """Nodes and server agree with the simulator on it, without knowing more than a parameter's name."""
    settings = {"upload_clip": "adaptive", "clip_start": 0.01, "rounds": 3, "dim": 4, "item_rate": 2.0}
    agreement = agreement_of("fedmf", 30, secure=True, settings=settings)
    people = histories(5)
    server, nodes = make_fleet(tmp_path, agreement, people, [[u] for u in range(5)])
    coordinator = coordinator_of(server, nodes, LocalTransport(nodes))
    simulated = entry("fedmf").build({**settings, "engine": "loop"})
    state = simulated.start(people, 1)
    for number in (1, 2, 3):
        coordinator.round()
        state, _, _ = simulated.advance(people, state, number, 1)
        assert coordinator.state.params[NAME] == pytest.approx(state.server.params[NAME])
    assert state.server.params[NAME][0] == pytest.approx(0.75), "everybody asked for a larger one in every round"
