"""An epsilon in rounds: the noise that was promised, uploads within their bound, a budget that ends, canaries."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from fedmosaic import leave_one_out
from fedmosaic.algorithm.local import Context
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.data.batches import cohort_of
from fedmosaic.data.negatives import training_set
from fedmosaic.data.synthetic import synthetic
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.methods.base import WITH_EPSILON
from fedmosaic.methods.registry import entries, entry
from fedmosaic.privacy.budget import Budget, BudgetSpentError, multiplier, spent
from fedmosaic.privacy.secure_sum import TooFewError
from fedmosaic.runs.run import start
from fedmosaic.runs.settings import Settings

pytest.importorskip("dp_accounting", reason="epsilons need the extra privacy")


@pytest.fixture(scope="module")
def data() -> TrainingSet:
    return training_set(leave_one_out(synthetic(60, 50, 10, seed=1)), "strict")


def built(method: str, **given: object) -> Federation:
    made = entry(method).build({"epsilon": 4.0, "rounds": 5, "dim": 4, **given})
    assert isinstance(made, Federation)
    return made


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedrap", "fedncf", "fedrecgel"])
def test_no_upload_is_larger_than_its_bound(method: str, data: TrainingSet) -> None:
    """One client at a time, the plain sum: no norm above the clip, whatever the method's rates are."""
    federation = replace(built(method, upload_clip=0.5), budget=None)
    ctx = Context(1, 0, data.n_items, data.n_clients)
    for client in range(8):
        _, done = federation.contribute(data, federation.start(data, 0), ctx, np.array([client]))
        size = sqrt(sum(float(np.square(v / SCALE).sum()) for v in done.total.totals.values()))
        assert size <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize(("trust", "share"), [("server", 1.0), ("devices", 1.5)])
def test_a_round_has_the_noise_that_was_promised(trust: str, share: float, data: TrainingSet) -> None:
    """Shares are enough for two thirds of the clients, so with all of them there is half as much again."""
    federation = built("fedmf", trust=trust, secure=trust == "devices", engine="loop")
    plain = replace(federation, budget=None)
    state = federation.start(data, 0)
    noisy, _, _ = federation.advance(data, state, 1, 0)
    quiet, _, _ = plain.advance(data, state, 1, 0)
    found = (noisy.server.params["item"] - quiet.server.params["item"]) * data.n_clients
    assert federation.budget is not None
    assert found.std() == pytest.approx(federation.budget.multiplier * sqrt(share), rel=0.15)
    again, _, _ = federation.advance(data, state, 2, 0)
    other = (again.server.params["item"] - plain.advance(data, state, 2, 0)[0].server.params["item"]) * data.n_clients
    assert abs(np.corrcoef(found.ravel(), other.ravel())[0, 1]) < 0.3  # another round, other noise


def test_a_budget_that_is_spent_ends_the_training(data: TrainingSet) -> None:
    federation = built("fedmf")
    with pytest.raises(BudgetSpentError, match="was for 5 rounds, and this would be round 6"):
        federation.advance(data, federation.start(data, 0), 6, 0)


def test_under_an_epsilon_nothing_else_is_told(data: TrainingSet) -> None:
    federation = built("pfedrec")
    _, record, _ = federation.advance(data, federation.start(data, 0), 1, 0)
    assert record.loss is None
    assert record.touched_rows is None
    assert federation.promise is not None
    for word in ("epsilon 4", "user level", "5 rounds", "clipped to 1", "trusted with every upload"):
        assert word in federation.promise


def test_clients_are_drawn_one_by_one(data: TrainingSet) -> None:
    """Poisson: sizes differ as those of coins do, and every client has its share of rounds."""
    drawn = [cohort_of(data, 0.2, seed=0, round=r, alone=True) for r in range(300)]
    sizes = np.array([d.size for d in drawn])
    assert sizes.mean() == pytest.approx(12, rel=0.1)
    assert sizes.var() == pytest.approx(60 * 0.2 * 0.8, rel=0.3)
    counts = np.bincount(np.concatenate(drawn), minlength=60)
    assert counts.min() > 30
    assert counts.max() < 95


def test_too_few_shares_are_not_opened() -> None:
    with pytest.raises(TooFewError):
        Budget(4.0, 1e-5, 1.0, 5, 1.0, "devices").check_enough(39, 60)
    Budget(4.0, 1e-5, 1.0, 5, 1.0, "devices").check_enough(40, 60)


def test_what_cannot_have_an_epsilon_says_why() -> None:
    for given, why in (
        ({"preset": "scale-free"}, "rows averaged over their senders"),
        ({"noise": 0.5}, "brings its own noise"),
        ({"trust": "devices"}, "give secure=true"),
    ):
        with pytest.raises(SettingsError, match=why):
            built("fedmf", **given)


def test_every_method_has_an_epsilon_or_says_why_not() -> None:
    """Nobody takes `epsilon=` in silence; what a refusal names has one."""
    for one in entries():
        try:
            promise, why = one.build({"epsilon": 4.0}).promise, ""
        except SettingsError as error:
            promise, why = None, str(error)
        assert promise is not None or one.name not in WITH_EPSILON
        assert promise or "has no epsilon: " in why or "rows averaged over their senders" in why, one.name
    for name in ("ials", "fcf", "fedcia", "metamf", "gpfedrec", "fedpergnn", "mf", "sasrec"):
        with pytest.raises(SettingsError, match=rf"method {name} has no epsilon: .*Methods with one: popularity, "):
            Settings.make(name, "ml-100k", {"epsilon": "1"})


def test_the_multiplier_spends_what_it_may_and_little_less() -> None:
    for participation in (1.0, 0.3):
        found = multiplier(2.0, 1e-5, 10, participation)
        assert 0.98 * 2.0 <= spent(found, 10, participation, 1e-5) <= 2.0 * 1.001


@pytest.mark.slow
def test_sixty_points_agree_with_a_second_library_and_are_never_below() -> None:
    """Within 1 % of `prv-accountant`'s bounds: its lower bound is never above ours."""
    prv = pytest.importorskip("prv_accountant", reason="the second accountant is not installed")
    rng = np.random.default_rng(0)
    for _ in range(60):
        share, noise = float(rng.choice([0.01, 0.05, 0.1, 0.3])), float(rng.uniform(0.7, 4.0))
        rounds, delta = int(rng.choice([1, 10, 50, 200])), float(rng.choice([1e-5, 1e-6]))
        ours = spent(noise, rounds, share, delta)
        mechanism = prv.PoissonSubsampledGaussianMechanism(sampling_probability=share, noise_multiplier=noise)
        accountant = prv.PRVAccountant(
            prvs=[mechanism], max_self_compositions=[rounds], eps_error=0.002 * max(ours, 0.5), delta_error=delta / 1000
        )
        low, estimate, _ = accountant.compute_epsilon(delta=delta, num_self_compositions=[rounds])
        assert ours >= low
        assert ours == pytest.approx(estimate, rel=0.01, abs=0.01)


def test_sums_of_rounded_shares_are_as_private_as_a_gaussian() -> None:
    """Steps as wide as a share's deviation, the worst there is: the loss of the discrete sum against the Gaussian's."""
    shares, deviation = 20, 1.0
    places = np.arange(-12, 13)
    from scipy.stats import norm

    one = norm.cdf(places + 0.5, scale=deviation) - norm.cdf(places - 0.5, scale=deviation)
    law = np.ones(1)
    for _ in range(shares):
        law = np.convolve(law, one)
    moved = 3  # of one client, in steps: as far as it can move the sum
    here, there = np.pad(law, (moved, 0)), np.pad(law, (0, moved))
    total = sqrt(shares) * deviation
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        found = np.maximum(here - np.exp(epsilon) * there, 0).sum()
        half = moved / total / 2
        gaussian = norm.cdf(half - epsilon / (2 * half)) - np.exp(epsilon) * norm.cdf(-half - epsilon / (2 * half))
        assert found <= gaussian + 1e-9


def test_canaries_stay_below_the_claim() -> None:
    """1,000 trainings with and without one user who sends all it may: what is guessed bounds epsilon from below.

    The noise is the library's own; the guess is whether the canary's number, summed over the rounds, is beyond an edge.
    """
    runs, clip, budget = 1000, 1.0, Budget(1.0, 1e-5, 1.0, 4, 1.0, "server")
    noise = budget.noise(1)

    def released(run: int, canary: float) -> float:
        found = 0.0
        for round in range(1, budget.rounds + 1):
            total = np.array([int(canary * SCALE), 0], np.int64)
            noise.add(total, "item", np.zeros(1, np.int64), Context(round, run, 2, 1))
            found += total[0] / SCALE
        return found

    seen = np.array([released(run, clip) for run in range(runs)])
    unseen = np.array([released(runs + run, 0.0) for run in range(runs)])
    slack, lower = 3 * sqrt(0.25 / runs), 0.0
    for edge in np.linspace(-30, 30, 121):
        true, false = (seen > edge).mean() - slack - budget.delta, (unseen > edge).mean() + slack
        if true > 0:
            lower = max(lower, float(np.log(true / false)))
    assert 0 < lower < budget.epsilon


@pytest.mark.parametrize(("method", "given"), [("fedmf", {"rounds": 4, "dim": 4}), ("ease", {}), ("mosaic", {})])
def test_a_run_keeps_a_ledger_of_what_it_spent(method: str, given: dict[str, object], tmp_path: Path) -> None:
    settings = Settings.make(method, "synthetic", {"epsilon": 3.0, **given})
    summary = start(settings, tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert kept["promise"] == summary["privacy"]
    assert "epsilon 3" in kept["promise"]
    assert kept["rounds released"] == summary["rounds"]
    assert 2.9 < kept["epsilon spent"] <= 3.0


def test_part_of_a_training_spends_part_of_the_epsilon() -> None:
    for method in (built("fedmf"), entry("ease").build({"epsilon": 4.0})):
        first, last = method.spent_after(1), method.spent_after(method.rounds)
        assert 0 < first < 0.8 * last
        assert last <= 4.0
        assert method.spent_after(0) == 0.0
