"""Studies and comparisons: every run once, resumed where cut, failures named; tables with what a reader needs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedmosaic.cli import app
from fedmosaic.comparison import Comparison, Contender, compare, contenders, plan
from fedmosaic.config import Settings
from fedmosaic.errors import RunError, SettingsError, UnknownNameError
from fedmosaic.folder import RunFolder
from fedmosaic.report.tables import Table, comparison_table
from fedmosaic.run import start
from fedmosaic.study import cells, run_study

TOY: dict[str, Any] = {"users": 60, "items": 40, "per_user": 8}
SMALL: dict[str, Any] = {**TOY, "dim": 4, "rounds": 4, "item_rate": 2.0}


def toy(method: str, **given: Any) -> Settings:
    known = SMALL if method in ("fedmf", "pfedrec", "local-only") else TOY
    return Settings.make(method, "synthetic", {**known, **given})


def test_a_study_runs_each_cell_once_and_resumes_what_was_cut(tmp_path: Path) -> None:
    settings = [toy("fedmf"), toy("fedmf", seed=1), toy("fedmf")]
    whole = cells(settings, tmp_path / "study")
    assert len(whole) == 2

    class StopError(Exception):
        pass

    def stop(number: int, total: int, line: dict[str, Any]) -> None:
        if number == 2:
            raise StopError

    with pytest.raises(StopError):
        start(settings[0], whole[0].place, progress=stop, checkpoint_seconds=0)
    assert whole[0].done == 2
    first = run_study(settings, tmp_path / "study", workers=2)
    assert (len(first.finished), first.skipped, first.failed) == (2, 0, [])
    again = run_study(settings, tmp_path / "study", workers=2)
    assert (len(again.finished), again.skipped) == (0, 2)
    start(settings[0], tmp_path / "alone")
    ranks = [RunFolder(p).place / "ranks.safetensors" for p in (whole[0].place, tmp_path / "alone")]
    assert ranks[0].read_bytes() == ranks[1].read_bytes()
    assert not (whole[0].place / "checkpoint" / "latest.safetensors").exists()
    other = RunFolder(whole[1].place).place / "ranks.safetensors"
    assert ranks[0].read_bytes() != other.read_bytes()


def test_a_failing_cell_is_named_and_does_not_stop_the_others(tmp_path: Path) -> None:
    told: list[int] = []
    missing = Settings.make("fedmf", str(tmp_path / "nothing.csv"))
    progress = run_study([missing, toy("popularity")], tmp_path / "study", tell=lambda p: told.append(p.ended))
    (cell, reason), *rest = progress.failed
    assert not rest
    assert "nothing.csv" in reason
    assert cell.settings == missing
    assert [c.settings.method for c in progress.finished] == ["popularity"]
    assert told[-1] == 2


def test_large_states_are_dropped_on_request(tmp_path: Path) -> None:
    (cell,) = cells([toy("fedmf")], tmp_path)
    run_study([toy("fedmf")], tmp_path, largest=10)
    assert RunFolder(cell.place).finished
    with pytest.raises(RunError, match="no usable checkpoint"):
        RunFolder(cell.place).recommender()


def test_two_studies_cannot_share_a_folder(tmp_path: Path) -> None:
    def second(progress: Any) -> None:
        with pytest.raises(RunError, match="another study"):
            run_study([toy("popularity")], tmp_path)

    run_study([toy("popularity")], tmp_path, tell=second)


@pytest.fixture(scope="module")
def small_comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    runs = tmp_path_factory.mktemp("runs")
    who = contenders(["fedmf", "pfedrec:score_rate=0.2"])
    common = {**SMALL, "evaluate_every": 2}
    planned = plan(who, "synthetic", ["legacy", "strict"], range(2), common)
    run_study([s for _, s in planned], runs)
    return compare(planned, runs, "fedmf"), runs


def test_a_comparison_has_references_intervals_and_tests(small_comparison: tuple[Comparison, Path]) -> None:
    found, _ = small_comparison
    names = ["chance", "popularity", "local-only:rounds=30", "fedmf", "pfedrec:score_rate=0.2"]
    assert [(r.name, r.pool) for r in found.rows] == [(n, p) for p in ("legacy", "strict") for n in names]
    for row in found.rows:
        for key, mean in row.mean.items():
            assert row.interval[key].low <= mean <= row.interval[key].high
        assert bool(row.paired) == (row.name not in ("chance", "fedmf"))
        assert row.seeds == (() if row.name == "chance" else (0, 1))
    chance = found.rows[0].mean
    assert chance["full:hr@10"] == pytest.approx(10 / 33, rel=0.05)
    assert found.missing == ()


def test_tables_in_every_form_hold_the_same_cells(small_comparison: tuple[Comparison, Path]) -> None:
    table = comparison_table(small_comparison[0])
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert tuple(rows[0]) == table.header
    assert [tuple(r) for r in rows[1:]] == list(table.rows)
    for form in ("markdown", "latex"):
        text = table.render(form)
        for row in table.rows:
            assert row[3].split(" ")[0] in text
    with pytest.raises(UnknownNameError, match="markdown"):
        table.render("word")


def test_latex_and_markdown_escape_what_would_break_them() -> None:
    table = Table("t", ("a_b", "50 %"), (("x|y & z", "1 ± 2"),))
    assert r"a\_b & 50 \%" in table.latex()
    assert r"x|y \& z & 1 $\pm$ 2" in table.latex()
    assert r"| x\|y & z | 1 ± 2 |" in table.markdown()


def test_a_plan_refuses_what_nobody_knows() -> None:
    with pytest.raises(SettingsError, match="no method here accepts nonsense=1"):
        plan([Contender.parse("fedmf")], "synthetic", ["strict"], [0], {"nonsense": 1})
    with pytest.raises(UnknownNameError, match="fedmfx"):
        Contender.parse("fedmfx")


def test_the_command_compares(tmp_path: Path) -> None:
    words = ["compare", "itemknn", "--data", "synthetic", "--seeds", "1", "--runs", str(tmp_path), "--json", "-q"]
    extra = [part for k, v in SMALL.items() for part in ("--set", f"{k}={v}")]
    result = CliRunner().invoke(app, [*words, *extra], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert [r["name"] for r in found["rows"]] == ["chance", "popularity", "local-only:rounds=30", "itemknn"]
    assert found["rows"][3]["paired"]["sampled:hr@10"]["p"] <= 1
