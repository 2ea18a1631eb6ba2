"""Studies and comparisons: every run once, resumed where cut, failures named; tables with what a reader needs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import descendants, run_command

from fedmosaic.core.errors import RenamedWarning, RunError, SettingsError, UnknownNameError
from fedmosaic.report.tables import Table, comparison_table
from fedmosaic.runs.comparison import Comparison, Contender, compare, contenders, plan
from fedmosaic.runs.run import load_ranks, start
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings
from fedmosaic.runs.study import cells, run_study

TOY: dict[str, Any] = {"users": 60, "items": 40, "per_user": 8}
SMALL: dict[str, Any] = {**TOY, "dim": 4, "rounds": 4, "item_rate": 2.0}


def toy(method: str, **given: Any) -> Settings:
    known = SMALL if method in ("fedmf", "pfedrec", "local-only") else TOY
    return Settings.make(method, "synthetic", {**known, **given})


def run_here(settings: list[Settings], parent: Path) -> None:
    """What a study would run, in this process, which is quicker."""
    for cell in cells(settings, parent):
        start(cell.settings, cell.place)


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
        start(settings[0], whole[0].place, on_round=stop, checkpoint_seconds=0)
    assert whole[0].done == 2
    before = RunFolder(whole[0].place).metrics()
    first = run_study(settings, tmp_path / "study", workers=2)
    assert (len(first.finished), first.skipped, first.failed) == (2, 0, [])
    assert RunFolder(whole[0].place).metrics()[:1] == before[:1], "rounds that were done were run again"
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


def test_changed_data_is_not_taken_for_done(tmp_path: Path) -> None:
    shop = tmp_path / "shop.csv"
    rows = [(u, (3 * u + k) % 11) for u in range(20) for k in range(5)]
    shop.write_text("user,item\n" + "".join(f"u{u},i{i}\n" for u, i in rows))
    settings = Settings.make("popularity", str(shop))
    assert len(run_study([settings], tmp_path / "runs").finished) == 1
    assert run_study([settings], tmp_path / "runs").skipped == 1
    shop.write_text("user,item\n" + "".join(f"u{u},i{(i + u) % 11}\n" for u, i in rows))
    assert len(run_study([settings], tmp_path / "runs").finished) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", "{}"),
        ("env.json", None),
        ("metrics.jsonl", "half a li\n"),
        ("ranks.safetensors", "x"),
        ("ranks.safetensors", None),
    ],
)
def test_a_damaged_run_is_made_again(tmp_path: Path, name: str, content: str | None) -> None:
    settings = [toy("popularity"), toy("popularity", seed=1)]
    run_here(settings, tmp_path)
    whole, other = (cell.record() for cell in cells(settings, tmp_path))
    assert whole is not None
    assert other is not None
    (cell, _) = cells(settings, tmp_path)
    if content is None:
        (cell.place / name).unlink()
    else:
        (cell.place / name).write_text(content)
    assert cell.record() is None
    again = run_study(settings, tmp_path)
    assert ([c.place for c in again.finished], again.skipped, again.failed) == ([cell.place], 1, [])
    mended = cell.record()
    assert mended is not None
    assert mended.summary["test"] == whole.summary["test"]


def test_a_run_without_its_settings_is_named_and_the_others_are_compared(tmp_path: Path) -> None:
    planned = plan([Contender.parse("popularity"), Contender.parse("itemknn")], "synthetic", ["strict"], [0], TOY)
    run_here([s for _, s in planned], tmp_path)
    (cells([planned[1][1]], tmp_path)[0].place / "config.toml").unlink()
    progress = run_study([s for _, s in planned], tmp_path)
    assert [reason for _, reason in progress.failed if "not a run folder" in reason]
    found = compare(planned, tmp_path, "popularity")
    assert [r.name for r in found.rows] == ["chance", "popularity"]
    assert len(found.missing) == 1


def test_states_that_are_asked_for_are_kept(tmp_path: Path) -> None:
    settings = toy("fedmf")
    run_study([settings], tmp_path, largest=10, keep={settings.key()})
    assert RunFolder(cells([settings], tmp_path)[0].place).recommender().recommend(k=2).height == 120


@pytest.mark.slow
def test_a_killed_study_takes_its_workers_with_it(tmp_path: Path) -> None:
    words = ["compare", "fedmf", "--data", "synthetic", "--seeds", "1", "--runs", str(tmp_path), "-q"]
    extra = [part for k, v in {**SMALL, "rounds": 1_000_000}.items() for part in ("--set", f"{k}={v}")]
    parent = subprocess.Popen([sys.executable, "-m", "fedmosaic", *words, *extra])
    (cell,) = cells([toy("fedmf", rounds=1_000_000)], tmp_path)
    try:
        until(lambda: cell.done > 3, "the run did not begin")
        family = descendants([parent.pid])
        assert len(family) > 1
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not set(family.items()) & set(descendants(list(family)).items()), "workers are left")
    done = cell.done
    time.sleep(0.2)
    assert cell.done == done


def until(true: Callable[[], bool], otherwise: str) -> None:
    """Wait for something, on a busy machine too."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.1)


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
    who = contenders(["fedmf", "pfedrec:user_rate=0.2"])
    common = {**SMALL, "evaluate_every": 2}
    planned = plan(who, "synthetic", ["legacy", "strict"], range(2), common)
    run_here([s for _, s in planned], runs)
    return compare(planned, runs, "fedmf"), runs


def test_a_comparison_has_references_intervals_and_tests(small_comparison: tuple[Comparison, Path]) -> None:
    found, _ = small_comparison
    names = ["chance", "popularity", "local-only:rounds=30", "fedmf", "pfedrec:user_rate=0.2"]
    assert [(r.name, r.pool) for r in found.rows] == [(n, p) for p in ("legacy", "strict") for n in names]
    for row in found.rows:
        for key, mean in row.mean.items():
            assert row.interval[key].low <= mean <= row.interval[key].high
        assert bool(row.paired) == (row.name not in ("chance", "fedmf"))
        assert row.paired.keys() == row.holm.keys()
        assert all(row.paired[k].p <= p <= 1 for k, p in row.holm.items())
        assert row.seeds == (() if row.name == "chance" else (0, 1))
    chance = found.rows[0].mean
    assert chance["full:hr@10"] == pytest.approx(10 / 33, rel=0.05)
    assert found.missing == ()


def test_tables_in_every_form_hold_the_same_cells(small_comparison: tuple[Comparison, Path]) -> None:
    table = comparison_table(small_comparison[0])
    assert table.rows[3][:3] == ("fedmf", "legacy", "2")
    assert "fewer for 60 users" in table.notes[0]  # 40 items cannot give 99 candidates
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert tuple(rows[0]) == table.header
    assert [tuple(r) for r in rows[1:]] == list(table.rows)
    for form in ("markdown", "latex"):
        text = table.render(form)
        for row in table.rows:
            assert row[4].split(" ")[0] in text
    with pytest.raises(UnknownNameError, match="markdown"):
        table.render("word")


def test_latex_and_markdown_escape_what_would_break_them() -> None:
    table = Table("t", ("a_b", "50 %"), (("x|y & z", "1 ± 2"), ("~^", "")))
    assert r"a\_b & 50 \%" in table.latex()
    assert r"\textasciitilde{}\textasciicircum{} &" in table.latex()
    assert r"x|y \& z & 1 $\pm$ 2" in table.latex()
    assert r"| x\|y & z | 1 ± 2 |" in table.markdown()


def test_a_plan_refuses_what_nobody_knows() -> None:
    who = [Contender.parse("fedmf")]
    for common, words in (({"nonsense": 1}, "'nonsense'"), ({"pool": "legacy"}, "pool differs"), ({"dim": -1}, "dim")):
        with pytest.raises(SettingsError, match=words):
            plan(who, "synthetic", ["strict"], [0], common)
    with pytest.raises(SettingsError, match="baseline 'fedmfx'"):
        plan(who, "synthetic", ["strict"], [0], {}, "fedmfx")
    for text in ("fedmf:pool=legacy", "fedmf:users=50", "fedmf:nonsense=1"):
        with pytest.raises(UnknownNameError, match="--set"):
            Contender.parse(text)
    with pytest.raises(UnknownNameError, match="fedmfx"):
        Contender.parse("fedmfx")


def test_common_settings_go_to_all_that_have_them_together() -> None:
    who, common = contenders(["fedrap", "fedmf", "fedmf"]), {"clip": 0.1, "noise_draws": "summed"}
    planned = {c.name: s.method_settings for c, s in plan(who, "synthetic", ["strict"], [0], common)}
    assert planned["fedrap"] == common
    assert planned["fedmf"] == {"noise_draws": "summed"}
    assert planned["popularity"] == {}
    assert len(planned) == 4


def test_old_names_are_accepted_for_a_version() -> None:
    with pytest.warns(RenamedWarning, match="'score_rate' of method pfedrec is now 'user_rate'"):
        one = Contender.parse("pfedrec:score_rate=0.2")
    assert one.given == {"user_rate": "0.2"}
    who = [Contender.parse("fedmf"), Contender.parse("itemknn")]
    with pytest.warns(RenamedWarning, match="'score_rate' of method fedmf"):
        planned = plan(who, "synthetic", ["strict"], [0], {"score_rate": 0.3})
    assert [settings.method_settings for _, settings in planned] == [{"user_rate": 0.3}, {}]


def test_a_settings_file_can_contend(tmp_path: Path) -> None:
    (tmp_path / "found.toml").write_text(toy("fedmf", user_rate=0.3).to_toml())
    one = Contender.parse(f"fedmf@{tmp_path / 'found.toml'}")
    assert one.given["user_rate"] == 0.3
    with pytest.raises(SettingsError, match="settings of fedmf, not of pfedrec"):
        Contender.parse(f"pfedrec@{tmp_path / 'found.toml'}")


def test_deviations_and_tests_are_what_they_say(small_comparison: tuple[Comparison, Path]) -> None:
    rows = {(r.name, r.pool): r for r in small_comparison[0].rows}
    row, base = rows["pfedrec:user_rate=0.2", "strict"], rows["fedmf", "strict"]
    values = [load_ranks(p, "full").mean("hr", 10) for p in row.runs]
    assert row.mean["full:hr@10"] == pytest.approx(np.mean(values))
    assert row.deviation["full:hr@10"] == pytest.approx(np.std(values, ddof=1))
    assert row.paired["full:hr@10"].difference == pytest.approx(row.mean["full:hr@10"] - base.mean["full:hr@10"])


def test_the_command_names_what_failed(tmp_path: Path) -> None:
    words = ("--seeds", "1", "-q", "--runs", str(tmp_path))
    missing = run_command("compare", "itemknn", "--data", str(tmp_path / "nothing.csv"), *words)
    assert missing.code == 1
    assert "nothing.csv: no such file" in missing.err
    unknown = run_command("compare", "itemknn", "--data", "nothing", *words)
    assert unknown.code == 2
    assert "unknown data set 'nothing'" in unknown.err
    assert not list(tmp_path.iterdir()), "runs were begun on data that is not there"


def test_the_command_compares(tmp_path: Path) -> None:
    words = ["compare", "itemknn", "--data", "synthetic", "--seeds", "1", "--runs", str(tmp_path), "--json", "-q"]
    extra = [part for k, v in SMALL.items() for part in ("--set", f"{k}={v}")]
    found = json.loads(run_command(*words, *extra).out)
    assert [r["name"] for r in found["rows"]] == ["chance", "popularity", "local-only:rounds=30", "itemknn"]
    assert found["rows"][3]["paired"]["sampled:hr@10"]["p"] <= 1
