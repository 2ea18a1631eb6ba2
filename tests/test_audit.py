"""The audit: attacks that work on what is in the open, and do not on what is masked or bounded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import run_command

from fedmosaic import leave_one_out
from fedmosaic.algorithm.parameters import Axis, Spec
from fedmosaic.algorithm.reduction import REDUCTIONS
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.audit import inference, poisoning
from fedmosaic.audit.attacks import Guess, direction
from fedmosaic.core.errors import SettingsError
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.data.synthetic import synthetic
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.limits import bounded_total

pytest.importorskip("mpyc", reason="the audit masks with secure sums, which need the extra privacy")


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(synthetic(150, 120, 12, seed=2))


def test_a_guess_counts_ties_in_expectation() -> None:
    held = [np.array([0, 1])]
    assert Guess.of([np.zeros(4)], held) == Guess(0.5, 0.5)
    assert Guess.of([np.array([2.0, 1.0, 0.0, 0.0])], held) == Guess(1.0, 1.0)


def test_direction_finds_the_fewer_rows_of_one_ray() -> None:
    ray = np.array([0.6, -0.8])
    seen = np.outer([1.0, -0.3, -0.2, -0.4, 0.0], ray)
    assert int(np.argmax(direction(seen))) == 0


@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
@pytest.mark.parametrize("secure", [False, True])
def test_single_uploads_tell_histories_unless_they_are_masked(method: str, secure: bool, split: Split) -> None:
    data = training_set(split, "strict")
    users = inference.victims(data, 20, 0)
    prior = inference.prior(data, users)
    federation = entry(method).build({"secure": secure})
    found, sizes = inference.of_federation(federation, data, users, [1, 3], 0, lambda words: None)
    guesses = [f for f in found if f.attack == "direction"]
    assert [f.round for f in guesses] == [1, 3]
    for one in guesses:
        if secure:
            assert one.f1 <= prior.f1 + 0.02
            assert one.auc <= prior.auc + 0.02
        else:
            assert one.f1 > 0.9
            assert one.auc > 0.95
    assert [one.sizes for one in sizes] == [1, 1], "a message's size tells of its client"
    if secure:
        assert all(f.f1 <= prior.f1 + 0.1 for f in found)


@pytest.mark.parametrize("method", ["popularity", "ease", "mosaic"])
def test_statistics_of_one_client_are_its_history_unless_they_are_masked(method: str, split: Split) -> None:
    data = training_set(split, "strict")
    users = inference.victims(data, 10, 0)
    plain = inference.of_closed_form(entry(method).build({}), data, users, 0)
    hidden = inference.of_closed_form(entry(method).build({"secure": True}), data, users, 0)
    assert max(f.f1 for f in plain) == 1.0
    assert max(f.f1 for f in hidden) < 0.4


@pytest.mark.parametrize("method", ["fedmf", "ease", "mosaic"])
def test_few_liars_promote_an_item_unless_what_they_send_is_bounded(method: str, split: Split) -> None:
    built, candidates = entry(method).build({}), draw_candidates(split)
    found = {
        reduction: poisoning.damage(built, split, candidates, "boost", 0.02, reduction=reduction, rounds=8, seed=0)
        for reduction in (None, "bounded")
    }
    assert found[None].er > 0.1
    assert found["bounded"].er <= 0.05


@pytest.mark.parametrize("method", ["pfedrec", "mosaic"])
def test_bounds_hold_a_huge_upload(method: str, split: Split) -> None:
    built, candidates = entry(method).build({}), draw_candidates(split)
    clean, huge = (
        poisoning.damage(built, split, candidates, attack, 0.0, reduction="bounded", rounds=5, seed=0)
        for attack in ("none", "huge")
    )
    assert huge.hr >= clean.hr - 0.05


@pytest.mark.parametrize("name", ["trimmed-mean", "median", "bounded"])
def test_a_reduction_that_sees_everything_keeps_one_million_out(name: str) -> None:
    """Nine clients agree, and one sends a million; what comes out is what the nine would make of it."""
    spec = Spec("item", Axis.ITEM, (2,))
    rng = np.random.default_rng(0)
    changes = rng.normal(1.0, 0.1, (10, 4, 2))
    changes[:, 3] = 0  # a row that nobody sent stays where it is
    total = UploadSum({}, np.full(4, 10), 10, 0, 0.0)
    honest = REDUCTIONS[name](spec, changes, total)
    changes[0, :3] = 1e6
    lied = REDUCTIONS[name](spec, changes, total)
    assert np.abs(lied - honest).max() < 0.4
    assert not lied[3].any()


def test_an_honest_crowd_loses_little_by_reductions() -> None:
    changes = np.random.default_rng(0).normal(1.0, 0.1, (50, 3, 2))
    total, spec = UploadSum({}, np.full(3, 50), 50, 0, 0.0), Spec("item", Axis.ITEM, (2,))
    for name in ("trimmed-mean", "median", "bounded"):
        np.testing.assert_allclose(REDUCTIONS[name](spec, changes, total), changes.mean(axis=0), rtol=0.06)


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_bounds_cut_honest_clients_and_refuse_none(share: float) -> None:
    """Uploads that differ a millionfold, every client with a row of its own, and some lie: all rows still move."""
    clients, rng = 60, np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-3, 3, clients)
    changes = np.zeros((clients, clients, 2))
    changes[np.arange(clients), np.arange(clients)] = sizes[:, None]
    changes[: int(share * clients)] = 1e6
    total, spec = UploadSum({}, np.ones(clients, np.int64), clients, 0, 0.0), Spec("item", Axis.ITEM, (2,))
    assert (np.abs(REDUCTIONS["bounded"](spec, changes, total)).min(axis=1) > 0).all()
    summed = bounded_total(lambda client: {"own": changes[client]}, clients)
    assert (np.abs(summed["own"]).min(axis=1) > 0).all()


def test_a_training_with_bounds_counts_everybody(split: Split) -> None:
    data = training_set(split, "strict")
    method = entry("fedmf").build({"reduce": "bounded", "rounds": 3, "dim": 4})
    state = method.start(data, 0)
    for number in (1, 2, 3):
        state, record, _ = method.advance(data, state, number, 0)
        assert record.clients == data.n_clients


def test_reductions_run_by_name_and_hide_nothing() -> None:
    method = entry("fedmf").build({"reduce": "median", "rounds": 2, "dim": 4})
    data = training_set(leave_one_out(synthetic(20, 30, 6, seed=0)), "strict")
    state, record, _ = method.advance(data, method.start(data, 0), 1, 0)
    assert record.clients == 20
    assert np.isfinite(state.server.params["item"]).all()
    with pytest.raises(SettingsError, match="must see every upload"):
        entry("fedmf").build({"reduce": "median", "secure": True})
    with pytest.raises(SettingsError, match="sees every upload"):
        entry("fedmf").build({"reduce": "median", "epsilon": 1.0})
    with pytest.raises(SettingsError, match="give one of them"):
        entry("ease").build({"bounded": True, "secure": True})


@pytest.mark.parametrize("method", ["popularity", "ease", "mosaic"])
def test_bounds_cost_honest_clients_little(method: str) -> None:
    """Nobody's counts lie beyond what most keep but in size, so the common answer stays about as it is."""
    data = training_set(leave_one_out(synthetic(60, 40, 8, seed=0)), "strict")
    found = []
    for bounded in (False, True):
        form = entry(method).build({"bounded": bounded})
        state = form.start(data, 0)
        for number in range(1, form.rounds + 1):
            if not form.done(state):
                state, _, _ = form.advance(data, state, number, 0)
        found.append(form.scorer(data, state).scores(np.arange(60)))
    near = [np.corrcoef(one, other)[0, 1] for one, other in zip(*found, strict=True)]
    assert np.median(near) > 0.9


def test_the_command_prints_one_object() -> None:
    out = run_command("audit", "ease", "synthetic", "--json", "--quiet")
    found = json.loads(out.out)
    assert set(found) == {"prior", "inference", "poisoning", "messages", "noise"}
    assert set(found["prior"]) == {"f1", "auc"}
    assert {"attack", "round", "f1", "auc"} == set(found["inference"][0])
    assert {"attack", "share", "er@10", "hr@10"} <= set(found["poisoning"][0])
