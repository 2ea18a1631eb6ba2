"""What the command line says around its work: tables of runs, tables in files, titles that stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run_command

from fedmosaic.report.page import write_page

SHOP = ("synthetic", "users=30", "items=40", "per_user=8", "-q")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_runs_of_a_folder_are_a_table(place: Path) -> None:
    assert run_command("list", "runs").err == "no runs; `fedmosaic run METHOD DATA` makes one\n"
    for method in ("popularity", "itemknn"):
        assert run_command("run", method, *SHOP).code == 0
    (place / "runs" / "cut").mkdir()
    (place / "runs" / "cut" / "config.toml").write_text('method = "ease"\ndataset = "synthetic"\n')
    rows = json.loads(run_command("list", "runs", "--json").out)
    assert [(r["method"], r["finished"]) for r in rows] == [("ease", False), ("itemknn", True), ("popularity", True)]
    assert rows == json.loads(run_command("show", "runs", "--json").out)
    told = run_command("show", "runs").out
    assert "3 runs" in told
    assert "not begun" in told


def test_a_comparison_goes_without_what_is_not_wanted_and_into_a_file(place: Path) -> None:
    words = (
        "compare",
        "itemknn",
        "--data",
        "synthetic",
        "--set",
        "users=30",
        "--set",
        "per_user=8",
        "--seeds",
        "1",
        "-q",
    )
    assert run_command(*words, "--without", "local-only", "-o", "table.md").code == 0
    text = Path("table.md").read_text()
    assert "itemknn" in text
    assert "local-only" not in text
    told = run_command(*words, "--without", "local-only", "-o", "table.json", "--json")
    assert json.loads(Path("table.json").read_text()) == json.loads(told.out)
    wrong = run_command(*words, "-o", "table.doc")
    assert (wrong.code, "unknown ending of a table's file '.doc'" in wrong.err) == (2, True)
    assert "unknown reference 'chance'" in run_command(*words, "--without", "chance").err
    assert "what the others are tested against" in run_command(*words, "--without", "popularity").err


def test_a_report_keeps_titles_that_one_run_lacks(place: Path) -> None:
    rows = [f"u{u},i{(u + n) % 12},{100 + n}" for u in range(20) for n in range(6)]
    Path("shop.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    Path("films.csv").write_text("id,name\n" + "\n".join(f"i{n},Film number {n}" for n in range(12)))
    for out, more in (("bare", ()), ("named", ("titles=films.csv",)), ("last", ("min_user_rows=2",))):
        assert run_command("run", "itemknn", "shop.csv", *more, "--out", out, "-q").code == 0
    for order in (("bare", "named"), ("named", "last")):
        page = write_page([Path(one) for one in order], place / "report.html", users=3).read_text()
        assert '"i3": "Film number 3"' in page
        assert '"i3": "i3"' not in page


def test_completion_is_there(place: Path) -> None:
    assert "--install-completion" in run_command("--help").out
