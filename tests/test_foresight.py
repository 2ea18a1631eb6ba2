"""Before a run: what it will cost, which method suits; and what chooses its rounds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command
from conftest import random_interactions

from fedmosaic.data.negatives import draw_candidates
from fedmosaic.data.sources import load
from fedmosaic.data.split import Split
from fedmosaic.methods import registry
from fedmosaic.runs import run as runs
from fedmosaic.runs.foresight import advice, foreseen, worries
from fedmosaic.runs.settings import Settings
from fedmosaic.training.loop import Validation

SHOP: dict[str, Any] = {"users": 40, "items": 50, "per_user": 8}


@pytest.mark.parametrize("method", ["mosaic", "ease", "itemknn", "fedmf", "popularity"])
def test_what_is_foreseen_is_what_a_run_sends(method: str, tmp_path: Path) -> None:
    data = load("synthetic", **SHOP)
    events = np.bincount(data.item, minlength=len(data.items))
    built = registry.entry(method).build()
    told = runs.start(Settings.make(method, "synthetic", SHOP), tmp_path / "run")
    sent = told["cost"]["bytes_up"] * told["rounds"]
    assert sent * 0.4 <= foreseen(built, events, len(data.users)).sent <= sent * 2.5


def test_a_large_catalogue_is_warned_of_with_an_alternative() -> None:
    events = np.full(9_066, 10)
    (worry,) = worries("ease", registry.entry("ease").build(), events, 671)
    assert worry.startswith("ease on 9,066 items: every device sends about 658 MB (in one round); mosaic rank=")
    assert list(worries("fedmf", registry.entry("fedmf").build({"rounds": 10}), np.full(1000, 10), 671)) == []
    memory = list(worries("fedrap", registry.entry("fedrap").build(), np.full(100_000, 9), 1_000_000))
    assert "of memory here" in memory[-1]


def test_advice_is_five_lines_and_its_command_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{u},{i},{100 + n}" for u in range(20) for n, i in enumerate(range(u % 5, u % 5 + 9))]
    Path("shop.csv").write_text("\n".join(["customer,sku,bought", *rows]))
    told = run_command("recommend-method", "shop.csv")
    assert [line.split(":")[0] for line in told.out.splitlines()] == ["data", "suits", "costs", "privacy", "command"]
    words = told.out.splitlines()[-1].removeprefix("command: fedmosaic ").split()
    assert run_command(*words, "--out", "shop", "-q").code == 0
    plain = json.loads(run_command("recommend-method", "shop.csv", "--json").out)
    assert (plain["method"], plain["command"]) == ("mosaic", "fedmosaic run mosaic shop.csv")
    assert set(plain) == {"dataset", "method", "settings", "cost", "command", "lines"}


def test_short_histories_and_missing_times_are_seen() -> None:
    timeless = random_interactions()
    told = advice(timeless, "shop.csv").lines
    assert "with times" in told[0]
    few = random_interactions(low=1, high=2)
    assert advice(few, "shop.csv").method == "popularity"


def test_rounds_are_chosen_by_the_headline(tmp_path: Path) -> None:
    told = runs.start(Settings.make("fedmf", "synthetic", SHOP | {"rounds": 3}), tmp_path / "a")
    assert "selected on validation full:hr@10" in told["protocol"]
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    values = [line["validation"]["full"]["hr@10"] for line in lines]
    assert values[told["best_round"] - 1] == max(values)
    legacy = Settings.make("fedmf", "synthetic", SHOP | {"rounds": 3, "pool": "legacy"})
    assert legacy.selection == "sampled:hr@10"
    assert Settings.make("fedmf", "ml-100k", {"select": "sampled:hr@10"}).recorded().get("select") is None
    assert Settings.make("fedmf", "ml-100k").recorded()["select"] == "auto"


def test_of_many_users_some_speak_for_all(small: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmosaic.training.loop.FEWEST", 5)
    judge = Validation(small, draw_candidates(small, 5), "full:hr@10", scores=10 * small.n_items)
    assert judge.users == 10
    assert (judge.judged.validation.lengths <= small.validation.lengths).all()
    assert Validation(small, draw_candidates(small, 5), "full:hr@10").users is None


def test_a_run_below_popularity_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "run",
        "fedmf",
        "synthetic",
        "users=60",
        "items=80",
        "per_user=6",
        "rounds=1",
        "item_rate=0.000001",
        "--out",
        "r",
    )
    with warnings.catch_warnings():
        told = run_command(*words)
    assert "below popularity: full HR@10" in told.out
