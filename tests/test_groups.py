"""Secure sums of groups: dealt by a hash, added up to the plain sum, robust against poison in few of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedmosaic import leave_one_out
from fedmosaic.algorithm.algorithm import reduced_by
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis, Spec
from fedmosaic.algorithm.reduction import REDUCTIONS
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.audit import inference, poisoning
from fedmosaic.core.errors import SettingsError
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.data.synthetic import synthetic
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import SecureTeam, dealt
from fedmosaic.methods.registry import entry

pytest.importorskip("mpyc", reason="secure sums need the extra privacy")


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(synthetic(150, 120, 12, seed=2))


@pytest.fixture(scope="module")
def data() -> TrainingSet:
    return training_set(leave_one_out(synthetic(40, 50, 8, seed=1)), "strict")


def built(method: str = "fedmf", **given: object) -> Federation:
    made = entry(method).build({"dim": 4, "rounds": 3, "secure": True, "reduce": "median", **given})
    assert isinstance(made, Federation)
    return made


def test_who_is_in_a_group_follows_from_the_client_alone() -> None:
    """So that a client who is missing moves nobody else, and no round tells other sums of the same clients."""
    everybody = dealt("shop", range(500), 8)
    assert sorted(p for group in everybody for p in group) == list(range(500))
    others = dealt("shop", [p for p in range(500) if p != 77], 8)
    assert [[p for p in group if p != 77] for group in everybody] == others
    assert dealt("another shop", range(500), 8) != everybody
    assert max(map(len, everybody)) < 100


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedncf"])
def test_one_group_has_the_bits_of_the_plain_secure_sum(method: str, data: TrainingSet) -> None:
    """And so do four, added up; what is trained from them differs by the reduction alone."""
    plain = entry(method).build({"dim": 4, "secure": True, "engine": "simulate"})
    ctx, everybody = Context(1, 0, data.n_items, data.n_clients), np.arange(data.n_clients)
    found = []
    for groups in (None, 1, 2):
        federation = replace(plain, team=SecureTeam(groups=groups))
        _, done = federation.contribute(data, federation.start(data, 0), ctx, everybody)
        found.append(done.total)
    for total in found[1:]:
        for name, value in found[0].totals.items():
            np.testing.assert_array_equal(total.totals[name], value)
        assert (total.clients, total.examples) == (found[0].clients, found[0].examples)
    assert [len(total.parts) for total in found] == [0, 1, 2]


@pytest.mark.parametrize("reduce", ["median", "trimmed-mean"])
def test_a_reduction_of_one_group_is_the_mean(reduce: str, data: TrainingSet) -> None:
    """The same model to the bit as the plain secure sum of the same uploads."""
    grouped = built(reduce=reduce, groups=1)
    plain = replace(reduced_by("mean")(grouped.algorithm), upload=grouped.algorithm.upload)
    mean = replace(grouped, algorithm=plain, team=SecureTeam(), engine="simulate")
    states = []
    for federation in (grouped, mean):
        state = federation.start(data, 0)
        for number in (1, 2):
            state, _, _ = federation.advance(data, state, number, 0)
        states.append(state)
    np.testing.assert_array_equal(states[0].server.params["item"], states[1].server.params["item"])


def test_groups_of_other_sizes_count_alike() -> None:
    """Every client sends the same, so that the median of groups is what each of them sends, however many they are."""
    sizes = np.array([5, 9, 14, 30, 31])
    parts = tuple(UploadSum({}, np.zeros(3, np.int64), int(size), 0, 0.0) for size in sizes)
    total = UploadSum({}, np.zeros(3, np.int64), int(sizes.sum()), 0, 0.0, parts=parts)
    changes = np.ones((5, 3, 2)) * sizes.reshape(-1, 1, 1)
    for name in ("median", "trimmed-mean"):
        np.testing.assert_allclose(REDUCTIONS[name](Spec("item", Axis.ITEM, (2,)), changes, total), 1.0)


@pytest.mark.parametrize("attack", ["boost", "huge"])
def test_poison_in_few_groups_is_kept_out(attack: poisoning.Attack, split: Split) -> None:
    candidates = draw_candidates(split)

    def done(method: Federation, attack: poisoning.Attack) -> poisoning.Damage:
        return poisoning.damage(method, split, candidates, attack, 0.02, rounds=8, seed=0)

    grouped, plain = built(groups=10, dim=32), entry("fedmf").build({})
    clean, held, free = done(grouped, "none"), done(grouped, attack), done(plain, attack)
    assert held.er <= 0.05
    assert held.hr >= clean.hr - 0.05
    if attack == "boost":
        assert free.er > 0.1
    else:
        assert free.hr < held.hr


def test_the_audit_looks_at_sums_of_groups(split: Split) -> None:
    data = training_set(split, "strict")
    users = inference.victims(data, 20, 0)
    found, _ = inference.of_federation(built(groups=4), data, users, [1], 0, lambda words: None)
    names = {one.attack for one in found}
    assert {"group direction", "group norm", "direction"} <= names
    single = {one.attack: one.f1 for one in found}
    plain, _ = inference.of_federation(entry("fedmf").build({"dim": 4}), data, users, [1], 0, lambda words: None)
    assert single["group direction"] < max(one.f1 for one in plain) - 0.3


def test_groups_that_hide_nothing_or_have_no_use_are_refused(data: TrainingSet) -> None:
    for given, why in (
        ({"groups": 4, "secure": False}, "give secure=true"),
        ({"groups": 4, "participation": 0.5}, "participation=1"),
        ({"groups": 4, "reduce": "mean"}, "reductions that look at sums of groups"),
        ({"groups": None}, "in simulations, groups="),
        ({"groups": 4, "epsilon": 1.0}, "sees every upload"),
    ):
        with pytest.raises(SettingsError, match=why):
            built(**given)
    federation = built(groups=12)
    with pytest.raises(SettingsError, match="use fewer groups"):
        federation.advance(data, federation.start(data, 0), 1, 0)
