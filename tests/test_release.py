"""Releases with an epsilon: bounded parts, noise of the right size, nothing else told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmosaic import FederatedRecommender, Interactions, leave_one_out
from fedmosaic.core.errors import FedmosaicError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import total
from fedmosaic.methods.private_release import PrivateRelease
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.release import gaussian_scale

ITEMS = 12
NAMES = ("mosaic", "popularity")
accountant = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")


def made(name: str, **given_: Any) -> PrivateRelease:
    form = entry(name).build({"epsilon": 2.0, **given_})
    assert isinstance(form, PrivateRelease)
    return form


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, ITEMS - 1), st.integers(0, 6)), max_size=30), st.sampled_from(NAMES))
def test_no_client_adds_more_than_one(events: list[tuple[int, int]], name: str) -> None:
    """Whatever a history holds, repeats and ties included: every sum it is part of moves by a norm of at most 1."""
    events = sorted(events, key=lambda e: e[1])
    held = Histories(Ragged.from_rows([[i for i, _ in events]]), ITEMS, np.array([t for _, t in events], np.int64))
    form = made(name)
    state = form.init(ITEMS, 0)
    first = form.statistics(state, held)
    assert sum(float((a**2).sum()) for a in first.values()) <= 1 + 1e-9
    if name == "mosaic":
        everything = {"events": np.arange(1.0, ITEMS + 1)}
        second = form.statistics(form.apply(state, everything), held)
        assert sum(float((a**2).sum()) for a in second.values()) <= 1 + 1e-9


def walk(users: int = 400) -> Interactions:
    """Everybody walks a circle of items."""
    starts = np.random.default_rng(0).integers(0, ITEMS, users)
    frame = {
        "user": np.repeat(np.arange(users), 6),
        "item": np.concatenate([(starts[u] + np.arange(6)) % ITEMS for u in range(users)]),
        "when": np.tile(np.arange(6), users),
    }
    return Interactions.from_frame(frame, time="when")


def test_the_noise_has_the_size_that_the_accountant_says() -> None:
    assert gaussian_scale(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-3)  # Balle and Wang, analytic Gaussian
    form = made("popularity", epsilon=1.0)
    zero = {"count": np.zeros(200_000)}
    drawn = form.released(zero, 1, 0)["count"]
    assert drawn.std() == pytest.approx(3.7306, rel=0.01)
    assert not np.array_equal(drawn, form.released(zero, 1, 1)["count"])
    both = made("mosaic", epsilon=1.0)
    spent = [(1 / both.deviation(both.budget_share(r))) ** 2 for r in (1, 2)]
    assert sum(spent) ** -0.5 == pytest.approx(gaussian_scale(1.0, 1e-5)), "two releases cost what one would"


def test_an_epsilon_chooses_nothing_by_validation_and_learns_what_it_can() -> None:
    split = leave_one_out(walk())
    model = FederatedRecommender("mosaic", epsilon=8.0).fit(split)
    assert model.state_["clock"].tolist() == [0.0, 0.0], "the span of the data is not covered"
    assert model.state_["windows"].tolist() == [3.0]
    assert not model.state_["co"].size
    assert model.evaluate().full.mean("hr", 2) > 0.5
    worse = FederatedRecommender("mosaic", epsilon=0.01).fit(split)
    assert worse.evaluate().full.mean("hr", 2) < model.evaluate().full.mean("hr", 2)


def test_the_sum_that_is_noised_is_the_sum_over_devices() -> None:
    held = leave_one_out(walk(50)).held("train")
    form = made("mosaic")
    state = form.apply(form.init(ITEMS, 0), {"events": np.ones(ITEMS)})
    central, federated = (total(form, state, held, size) for size in (len(held), 1))
    assert np.array_equal(central["after"], federated["after"])


def test_every_epsilon_is_printed_with_what_it_means(tmp_path: Path) -> None:
    frame = walk(60)
    lines = [f"{u},{i},{t}" for u, i, t in zip(frame.user, frame.item, frame.time, strict=True)]  # type: ignore[arg-type]
    (tmp_path / "walk.csv").write_text("user,item,when\n" + "\n".join(lines) + "\n")
    given_ = ("run", "mosaic", str(tmp_path / "walk.csv"), "time=when", "-q")
    said = run_command(*given_, "epsilon=2", "--out", str(tmp_path / "private")).out
    assert "privacy: epsilon 2, delta 1e-05, user level" in said
    assert "trusted with the sums" in said
    assert "privacy:" not in run_command(*given_, "--out", str(tmp_path / "plain")).out


def test_without_an_accountant_an_epsilon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmosaic.core.extras.find_spec", lambda name: None)
    with pytest.raises(FedmosaicError, match=r"fedmosaic\[privacy\]"):
        FederatedRecommender("popularity", epsilon=1.0).fit(walk(20))
