"""The audit: attacks that work on what is in the open, and do not on what is masked or bounded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import run_command

from fedmosaic import leave_one_out
from fedmosaic.audit import inference, poisoning
from fedmosaic.audit.attacks import Guess, direction
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.data.synthetic import synthetic
from fedmosaic.methods.registry import entry

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
    found = inference.of_federation(federation, data, users, [1, 3], 0, lambda words: None)
    guesses = [f for f in found if f.attack == "direction"]
    assert [f.round for f in guesses] == [1, 3]
    for one in guesses:
        if secure:
            assert one.f1 <= prior.f1 + 0.02
            assert one.auc <= prior.auc + 0.02
        else:
            assert one.f1 > 0.9
            assert one.auc > 0.95
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


def test_one_in_a_hundred_promotes_an_item_unless_uploads_are_bounded(split: Split) -> None:
    federation, candidates = entry("fedmf").build({}), draw_candidates(split)
    found = {
        bounded: poisoning.damage(federation, split, candidates, "boost", 0.02, bounded=bounded, rounds=8, seed=0)
        for bounded in (False, True)
    }
    assert found[False].er > 0.1
    assert found[True].er <= 0.05


def test_bounds_hold_a_huge_upload(split: Split) -> None:
    federation, candidates = entry("pfedrec").build({}), draw_candidates(split)
    clean, huge = (
        poisoning.damage(federation, split, candidates, attack, 0.0, bounded=True, rounds=5, seed=0)
        for attack in ("none", "huge")
    )
    assert huge.hr >= clean.hr - 0.05


def test_the_command_prints_one_object() -> None:
    out = run_command("audit", "ease", "synthetic", "--json", "--quiet")
    found = json.loads(out.out)
    assert set(found) == {"prior", "inference", "poisoning"}
    assert set(found["prior"]) == {"f1", "auc"}
    assert {"attack", "round", "f1", "auc"} <= set(found["inference"][0])
