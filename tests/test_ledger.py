"""The ledger: a record says what its folder said, a study does not repeat it, a book can be written from it alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from fedmosaic.core.errors import RunError
from fedmosaic.report.curves import validation_curve
from fedmosaic.reproduce import results_page as book
from fedmosaic.reproduce.card import MANY, NAMES, Card, Claim, Results, card_table
from fedmosaic.reproduce.draw_curves import draw_learning
from fedmosaic.reproduce.draw_rows import draw_tsne
from fedmosaic.reproduce.shelf import CARDS
from fedmosaic.runs.ledger import Ledger, Record, modernise
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import PAPERS, Settings
from fedmosaic.runs.study import run_study

DOCS = Path(__file__).parent.parent / "docs"
WRITE_AGAIN = "write it again: fedmosaic reproduce all --ledger docs/ledger.jsonl -o docs/results.md"
TOY: dict[str, Any] = {
    "users": 50,
    "items": 40,
    "per_user": 8,
    "dim": 4,
    "rounds": 3,
    "item_rate": 2.0,
    "select": PAPERS,
}
TWO = [Settings.make("fedmf", "synthetic", {**TOY, "seed": seed}) for seed in range(2)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs and the ledger that was kept of them."""
    parent = tmp_path_factory.mktemp("runs")
    path = parent / "kept" / "ledger.jsonl"
    assert run_study(TWO, parent, ledger=Ledger.read(path)).failed == []
    return parent, path


def test_a_record_says_what_its_folder_said(made: tuple[Path, Path]) -> None:
    parent, path = made
    ledger = Ledger.read(path)
    assert set(ledger.records) == {s.key() for s in TWO}
    for record in ledger.records.values():
        folder = RunFolder(parent / record.name)
        assert record == Record.of(folder), "a record does not survive its file"
        summary, lines = folder.summary(), folder.metrics()
        assert record.data == folder.data
        for protocol in ("sampled", "full"):
            for metric in ("hr@10", "ndcg@10"):
                for part, tables in (("test", summary), ("chance", summary["reference"])):
                    assert record.summary[part][protocol][metric] == pytest.approx(
                        tables[part][protocol][metric], rel=1e-5
                    )
        curve = validation_curve(record)
        assert curve.rounds == [line["round"] for line in lines]
        assert curve.values == pytest.approx([100 * line["validation"]["sampled"]["hr@10"] for line in lines], rel=1e-5)
        assert curve.megabytes[-1] == pytest.approx(sum(line["bytes_up"] for line in lines) / 1e6, rel=1e-5)


def test_a_study_does_not_repeat_what_stands_in_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(made[1].read_bytes())
    again = run_study(TWO, tmp_path, ledger=Ledger.read(path))
    assert (again.skipped, again.finished) == (2, [])
    with_states = run_study(TWO, tmp_path, ledger=Ledger.read(path), keep={TWO[0].key()})
    assert [c.settings for c in with_states.finished] == [TWO[0]], "a state that is to be kept is not there"
    assert (
        Ledger.read(path).records[TWO[0].key()].summary["test"]
        == Record.of(RunFolder(with_states.finished[0].place)).summary["test"]
    ), "the same settings end in other numbers"
    assert run_study(TWO, tmp_path, ledger=Ledger.read(path), keep={TWO[0].key()}).finished == []


def test_a_record_of_other_data_is_not_taken_for_this(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, path = made
    stale = Ledger(None, {k: replace(r, data="0" * 16) for k, r in Ledger.read(path).records.items()})
    assert run_study(TWO[:1], tmp_path, ledger=stale).skipped == 0


def test_two_studies_keep_each_others_records(made: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = Ledger.read(made[1]).records.values()
    path = tmp_path / "ledger.jsonl"
    here, there = Ledger.read(path), Ledger.read(path)
    here.add(one)
    there.add(two)
    assert path.read_bytes() == made[1].read_bytes()


def test_folders_that_were_there_before_are_added(made: tuple[Path, Path], tmp_path: Path) -> None:
    parent, path = made
    later = tmp_path / "later.jsonl"
    assert run_study(TWO, parent, ledger=Ledger.read(later)).skipped == 2
    assert later.read_bytes() == path.read_bytes()


def test_a_book_is_written_from_the_ledger_alone(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="figures of documents need the extra `reproduce`")
    parent, path = made
    monkeypatch.setitem(NAMES, "synthetic", "a shop")
    claim = Claim("FedMF", "synthetic", "fedmf", {**TOY, "ties": "hash"}, paper=(50.0, None))
    curves = Card("curves", "a paper", "curves", (claim,), "words", pools=("strict",), draw=draw_learning)
    rows = replace(curves, name="rows", draw=draw_tsne, states=True)
    near, far = Results(parent, 2, False), Results(tmp_path / "nothing", 2, False, ledger=Ledger.read(path))
    assert card_table(curves, far) == card_table(curves, near)
    assert card_table(curves, far).rows[-1][-2] == "2"
    book.write_book([curves, rows], far, tmp_path / "results.md", "fedmosaic reproduce")
    text = (tmp_path / "results.md").read_text()
    assert (tmp_path / "figures" / "curves.png").is_file()
    assert "none is here: run the card" in text
    assert "Of 1 published numbers (printed in the paper) that were run, 0 match" in text
    assert "still to be made" in text  # the references' runs


def test_planned_runs_stand_in_the_published_ledger_or_the_book_says_how_many_do_not() -> None:
    planned = {s.key() for card in CARDS.values() for s in card.plan(MANY, False)}
    absent = planned - set(Ledger.read(DOCS / "ledger.jsonl").records)
    words = f"Of {len(planned)} planned runs {len(absent)} are still to be made"
    assert (words if absent else "## Cards") in (DOCS / "results.md").read_text(), WRITE_AGAIN
    first = {s.key() for card in CARDS.values() for s in card.plan(1, False)}
    assert len(first & absent) < 0.2 * len(first), "tables without runs"


def test_the_published_ledger_speaks_of_settings_by_their_names_of_today() -> None:
    found = modernise(DOCS / "ledger.jsonl")
    assert (found["renamed"], found["rekeyed"]) == (0, 0), "run: fedmosaic ledger docs/ledger.jsonl --write"


def test_old_names_are_mapped_and_results_stay_as_they_are(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Old names, a setting that has gone, a default that was written out: today's names, and today's keys."""
    old = {  # what it becomes -> what was written
        ("fedmf", "user_rate", 0.2): {"score_rate": 0.2},
        ("fedncf", "item_factor", 2.0): {"rate": 0.5, "item_factor": 4.0},  # which the rate multiplied
        ("fedrap", "noise_multiplier", 2.0): {"noise": 2.0, "clip": 0.1, "table_rate": 3.0},
        ("fedmf-plgc", "decorrelation", 0.5): {"weight": 0.5, "trace_rows": "positives"},
    }
    one = next(iter(Ledger.read(made[1]).records.values()))
    path = tmp_path / "ledger.jsonl"
    for number, ((method, _, _), given) in enumerate(old.items()):
        settings = {"method": method, "dataset": "ml-100k", "method_settings": given}
        Ledger.read(path).add(replace(one, key=f"old{number}", settings=settings))
    before = path.read_bytes()
    assert run_command("ledger", str(path)).out.splitlines()[-1] == "4 of 4 records would change names, 4 a key"
    assert path.read_bytes() == before, "it was written without being asked"
    assert json.loads(run_command("ledger", str(path), "--write", "--json").out)["renamed"] == 4
    found = {r.settings["method"]: r for r in Ledger.read(path).records.values()}
    for method, name, value in old:
        record = found[method]
        assert record.settings["method_settings"][name] == pytest.approx(value)
        assert (
            record.key
            == Settings.make(method, "ml-100k", {"select": PAPERS, **record.settings["method_settings"]}).key()
        )
        assert (record.summary, record.curve, record.made, record.data) == (one.summary, one.curve, one.made, one.data)
    assert modernise(path) == {"total": 4, "renamed": 0, "rekeyed": 0, "records": []}


def test_the_published_tables_are_those_of_the_published_ledger(tmp_path: Path) -> None:
    results = Results(tmp_path, MANY, False, ledger=Ledger.read(DOCS / "ledger.jsonl"))
    assert missing_tables([c for c in CARDS.values() if not c.counts], results) == [], WRITE_AGAIN


def test_numbers_that_other_pages_repeat_are_those_of_the_ledger(tmp_path: Path) -> None:
    results = Results(tmp_path, MANY, False, ledger=Ledger.read(DOCS / "ledger.jsonl"))
    rows = [c for name in ("pfedrec-table2", "pfedrec-table3") for c in CARDS[name].rows(False)]
    ours = {(c.method, c.row, c.data): c for c in rows if c.data in ("ml-100k", "ml-1m")}
    methods, readme = (path.read_text() for path in (DOCS / "methods.md", DOCS / "numbers.md"))
    wanted = [(methods, f"| `{m}`", c) for (m, _, data), c in ours.items() if data == "ml-100k" and c.paper[0]]
    wanted = [w for w in wanted if w[1] in methods]
    wanted += [(readme, f"| {row}, {NAMES[d]} ", c) for (_, row, d), c in ours.items() if row in ("FedMF", "PFedRec")]
    wanted += [(readme, "| local-only (no federation), ML-100K", ours["local-only", "local-only", "ml-100k"])]
    assert len(wanted) == 8 + 4 + 1
    for text, start, claim in wanted:
        line = next(line for line in text.splitlines() if line.startswith(start))
        for pool in ("legacy", "strict"):
            found = results.estimate(claim, pool)
            assert found is not None
            assert f"| {found.mean[0]:.2f} / {found.mean[1]:.2f} |" in line, (start, pool)


@pytest.mark.slow
def test_the_published_counts_are_those_of_the_data(tmp_path: Path, real_data: Path) -> None:
    results = Results(tmp_path, MANY, False, data_dir=real_data)
    assert missing_tables([c for c in CARDS.values() if c.counts], results) == [], WRITE_AGAIN


def missing_tables(cards: list[Card], results: Results) -> list[str]:
    text = (DOCS / "results.md").read_text()
    return [card.name for card in cards if card_table(card, results).markdown() not in text]


def test_damage_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"name": "half a rec\n')
    with pytest.raises(RunError, match=r"ledger\.jsonl, line 1: not a record of a run"):
        Ledger.read(path)
    path.write_text('{"name": "one", "shoe_size": 43}\n')
    with pytest.raises(RunError, match="line 1"):
        Ledger.read(path)
