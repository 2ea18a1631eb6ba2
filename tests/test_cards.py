"""Cards: every claim is a run that can be made, verdicts follow their rule, books say what they rest on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command

from fedmosaic.core.errors import UnknownNameError
from fedmosaic.data.sources import SOURCES
from fedmosaic.reproduce import draw_land, draw_rows
from fedmosaic.reproduce import draw_spectra as spectra
from fedmosaic.reproduce import results_page as book
from fedmosaic.reproduce.card import NAMES, QUICK_DATA, Card, Claim, Draw, Reason, Results, card_table, find, verdicts
from fedmosaic.reproduce.counts import Count
from fedmosaic.reproduce.draw_curves import draw_convergence, draw_learning, draw_sensitivity, draw_sparsity
from fedmosaic.reproduce.draw_rows import draw_additive_tsne, draw_inference, draw_tsne
from fedmosaic.reproduce.draw_spectra import draw_spectra
from fedmosaic.reproduce.shelf import CARDS
from fedmosaic.runs.run import default_place, load_ranks, start

SHOP: dict[str, Any] = {"users": 50, "items": 40, "per_user": 8, "ties": "hash"}
TOY: dict[str, Any] = {**SHOP, "dim": 4, "rounds": 3}
POOLS = ("legacy", "strict")


@pytest.mark.parametrize("name", CARDS)
def test_every_claim_is_a_run_that_can_be_made(name: str) -> None:
    card = CARDS[name]
    for quick in (False, True):
        for settings in card.plan(2, quick):
            settings.build()
            assert settings.dataset in SOURCES
            if quick:
                assert settings.dataset in QUICK_DATA
    rows = card.rows(False)
    assert len({(c.row, c.data) for c in rows}) == len(rows), "a row appears twice"
    assert card.plan(1, True) or card.counted(True), "nothing of this card runs in quick mode"


def test_published_numbers_are_percent() -> None:
    for card in CARDS.values():
        for claim in card.claims:
            for value in claim.paper:
                assert value is None or 4 < value < 100


def test_a_card_without_published_numbers_says_what_can_be_said() -> None:
    for card in CARDS.values():
        numbers = card.counts or any(any(c.paper) for c in card.claims) or card.name == "leak"  # which is our own
        assert bool(numbers) != bool(card.verdict), card.name


def test_seeds_are_five_where_cheap_three_elsewhere_and_never_more_than_wanted() -> None:
    cheap, large = Claim("a", "ml-100k", "pfedrec"), Claim("a", "ml-1m", "pfedrec")
    assert [len(c.seed_range(9)) for c in (cheap, large, Claim("a", "ml-100k", "metamf"))] == [5, 3, 3]
    assert len(cheap.seed_range(2)) == 2
    assert len(replace(cheap, seeds=1).seed_range(9)) == 1
    published = [c for card in CARDS.values() for c in card.claims if any(c.paper)]
    slow = [c for c in published if "noise_on" in c.given]  # minutes by the general engine
    assert {len(c.seed_range(9)) for c in published if c not in slow} == {3, 5}


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if not card.counts])
def test_chance_popularity_and_local_only_stand_in_every_table(name: str, tmp_path: Path) -> None:
    rows = card_table(CARDS[name], Results(tmp_path, 1, False)).rows
    for data in dict.fromkeys(row[1] for row in rows):
        assert [row[0] for row in rows if row[1] == data][:3] == ["chance", "popularity", "local-only"]


def test_data_sets_are_counted_as_the_paper_counts_them(tmp_path: Path) -> None:
    folder = tmp_path / "qb-article"
    folder.mkdir()
    lines = [f"{user},{item}" for user in range(2) for item in range(5)] + ["0,4"]  # one pair twice
    (folder / "QB-article.csv").write_text("\n".join(["user_id,item_id", *lines]) + "\n")
    right = Count("shop", "qb-article", 11, 2, 5, -10.0)
    counts = (right, replace(right, name="other", users=3), replace(right, name="far", data="tafeng"))
    card = Card("table1", "a paper", "data sets", (), "words", counts=counts)
    found = card_table(card, Results(tmp_path, 1, False, data_dir=tmp_path)).rows
    assert [(row[0], row[2], row[3], row[4]) for row in found] == [
        ("shop", right.text(), "10", "matches"),
        ("other", right.text(), "10", "differs"),
        ("far", "not here", "", "cannot be checked"),
    ]
    assert card.data(False) == ["qb-article", "tafeng"]
    assert card.data(True) == [], "neither is a small one"
    assert card.plan(3, False) == []


RATES: dict[str, Any] = {"item_rate": 2.0}
RAP: dict[str, Any] = {"item_rate": 2.0, "local_epochs": 2}


def toy(row: str, method: str, **given: Any) -> Claim:
    return Claim(row, "synthetic", method, {**TOY, **given}, seeds=1)


def card_of(name: str, claims: tuple[Claim, ...], draw: Draw, *pools: str) -> Card:
    shared = {"synthetic": SHOP}
    return Card(name, "a paper", f"title of {name}", claims, "words", pools=pools or POOLS, draw=draw, protocol=shared)


def run(cards: list[Card], results: Results) -> None:
    """All runs of some cards: one as a study, in a process of its own, the others quicker, in this one."""
    planned = {s.key(): s for card in cards for s in card.plan(results.seeds, False)}
    for settings in list(planned.values())[1:]:
        start(settings, default_place(settings, results.parent))
    done = book.run_cards(cards, results)
    assert (len(done.finished), done.skipped, done.failed) == (1, len(planned) - 1, [])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Card], Results]:
    """Small cards of every kind of drawing that compiled methods can fill, on a made-up shop."""
    linear = (replace(toy("FedMF", "fedmf", **RATES), seeds=2), toy("PFedRec", "pfedrec", **RATES))
    cards = [
        card_of("learning", linear, draw_learning),
        card_of("convergence", linear, draw_convergence),
        card_of("tsne", linear, draw_tsne),
        card_of("spectra", linear, draw_spectra),
        card_of("inference", linear[1:], draw_inference),
        card_of("additive", (toy("FedRAP", "fedrap", **RAP),), draw_additive_tsne, "legacy"),
        card_of(
            "sparsity",
            (toy("L1", "fedrap", **RAP), toy("soft", "fedrap", threshold=0.5, **RAP)),
            draw_sparsity,
            "legacy",
        ),
        card_of("sensitivity", tuple(toy(f"width {d}", "fedmf", **RATES, dim=d) for d in (2, 4)), draw_sensitivity),
    ]
    results = Results(tmp_path_factory.mktemp("runs"), 2, False)
    run(cards, results)
    return {card.name: card for card in cards}, results


def assert_drawn(card: Card, results: Results, folder: Path) -> None:
    assert card.draw is not None
    drawn = card.draw(card, results, folder)
    assert drawn
    for figure in drawn:
        assert (folder / f"{figure.name}.svg").read_text().lstrip().startswith("<?xml")
        assert (folder / f"{figure.name}.png").stat().st_size > 2000
        assert figure.caption


@pytest.mark.parametrize(
    "name", ["learning", "convergence", "spectra", "inference", "additive", "sparsity", "sensitivity", "tsne"]
)
def test_every_drawing_is_written_twice(
    name: str, shelf: tuple[dict[str, Card], Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="figures of documents need the extra `reproduce`")
    if name in ("spectra", "inference", "additive", "tsne"):  # which look into states, by the general engine
        pytest.importorskip("torch")
    monkeypatch.setattr(draw_rows, "PERPLEXITY", 5)
    monkeypatch.setattr(spectra, "CLIENTS", 2)
    cards, results = shelf
    assert_drawn(cards[name], results, tmp_path)


def test_landscapes_are_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(draw_land, "POINTS", {"zero-mean": 3, "filter": 3, "paper": 3})
    card = card_of("land", (toy("host", "fedneumf"), toy("sharp", "fedrecgel")), draw_land.draw_landscapes, "strict")
    results = Results(tmp_path / "runs", 1, False)
    for settings in (claim.settings("strict", 0, False) for claim in card.claims):
        start(settings, default_place(settings, results.parent))
    assert_drawn(card, results, tmp_path)


def test_verdicts_follow_the_rule(shelf: tuple[dict[str, Card], Results]) -> None:
    cards, results = shelf
    claim = cards["learning"].claims[0]
    ours = results.estimate(claim, "legacy")
    assert ours is not None
    near = replace(claim, row="near", paper=(ours.mean[0] + 1.4, None))
    far = replace(claim, row="far", paper=(ours.mean[0] + 40.0, ours.mean[1] - 30))
    wide = replace(claim, row="wide", paper=(ours.mean[0] + 40.0, None), deviation=(20.1, 0.0))
    card = replace(cards["learning"], claims=(near, far, wide, claim))
    found = {(v.claim.row, v.metric): v.matches for v in verdicts(card, results)}
    expected = {("near", "hr@10"): True, ("far", "hr@10"): False, ("far", "ndcg@10"): False, ("wide", "hr@10"): True}
    assert found == expected
    words = {row[0]: row[-1] for row in card_table(card, results).rows}
    assert words["near"] == "matches"
    assert "HR differs by -40.0; NDCG differs by +30.0" in words["far"]
    assert words[claim.row] == ""
    assert verdicts(card, replace(results, quick=True)) == []


def test_estimates_are_means_over_seeds(shelf: tuple[dict[str, Card], Results]) -> None:
    cards, results = shelf
    claim = cards["learning"].claims[0]
    values = [100 * r.summary["test"]["sampled"]["hr@10"] for r in results.records(claim, "strict")]
    found = results.estimate(claim, "strict")
    assert found is not None
    assert found.seeds == len(values) == 2
    assert found.mean[0] == pytest.approx(np.mean(values))
    assert found.deviation[0] == pytest.approx(np.std(values, ddof=1))


def test_chance_is_ten_of_the_candidates(shelf: tuple[dict[str, Card], Results]) -> None:
    cards, results = shelf
    card = cards["learning"]
    popularity = card.rows(False)[0]
    (place,) = results.states(popularity, "strict")
    chance = card_table(card, results).rows[0]
    assert chance[0] == "chance"
    for cell, protocol in ((chance[4], "sampled"), (chance[5], "full")):
        candidates = load_ranks(place, protocol).candidates
        assert cell.split(" / ")[0] == f"{100 * np.minimum(1, 10 / candidates).mean():.2f}"


def test_a_book_says_what_it_rests_on(shelf: tuple[dict[str, Card], Results], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures of documents need the extra `reproduce`")
    cards, results = shelf
    claims = (
        replace(
            cards["learning"].claims[0], data="synthetic", paper=(99.0, None), reason=Reason("as tested", {"dim": 3})
        ),
    )
    place = tmp_path / "docs" / "results.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NAMES, "synthetic", "a shop")
        book.write_book([replace(cards["learning"], claims=claims)], results, place, "fedmosaic reproduce learning")
    text = place.read_text()
    for words in (
        "`fedmosaic reproduce learning`",
        "[title of learning](#title-of-learning): 0 of 1 match",
        "Of 1 published numbers (printed in the paper) that were run, 0 match, 0 of them within 0.5 points.",
        "<details><summary>The 1 rows that differ, and why</summary>",
        "## In one page",
        "(as tested: `dim=3` was not run)",
        "torch",
        "Chance",
    ):
        assert words in text
    assert (place.parent / "figures" / "learning.png").is_file()


def test_reasons_are_shown_by_runs(shelf: tuple[dict[str, Card], Results]) -> None:
    cards, results = shelf
    wide, narrow = cards["sensitivity"].claims[1], cards["sensitivity"].claims[0]
    reason = Reason("the width", {"dim": 2})
    claim = replace(wide, reason=reason)
    card = replace(cards["sensitivity"], claims=(claim,))
    assert narrow.settings("legacy", 0, False) in card.plan(2, False), "the run that tests a reason is not planned"
    assert narrow.settings("legacy", 0, False) not in card.plan(2, True)
    found = results.estimate(replace(narrow, seeds=1), "legacy")
    assert found is not None
    assert reason.text(claim, "legacy", results) == f"the width: `dim=2` gives {found.text()}"
    near = replace(claim, paper=(found.mean[0] + 1.4, None))
    assert reason.text(near, "legacy", results).endswith(f"gives {found.text()}, within the band")
    far = replace(claim, paper=(found.mean[0] - 2.0, found.mean[1]))
    assert reason.text(far, "legacy", results).endswith(f"gives {found.text()}, still off (HR +2.0)")
    measured = Reason("by a command", measured=(50.0, 40.0))
    assert measured.text(replace(wide, paper=(51.0, 42.0)), "legacy", results) == (
        "by a command: 50.00 / 40.00, still off (NDCG -2.0)"
    )
    curve = Reason("less training", curve=True)
    values = [100 * (v or 0) for v in results.records(wide, "legacy")[0].curve["validation"]]
    reached = replace(wide, paper=(max(values), None), reason=curve)
    expected = f"passes {max(values):.1f} in round {values.index(max(values)) + 1} of {len(values)}"
    assert expected in curve.text(reached, "legacy", results)
    assert "stays below" in curve.text(replace(reached, paper=(100.1, None)), "legacy", results)
    both = replace(claim, paper=(100.1, None), reason=replace(reason, curve=True))
    assert both.reason is not None
    assert both.reason.text(both, "legacy", results).endswith(
        f"gives {found.text()}, still off (HR {found.mean[0] - 100.1:+.1f}); validation HR stays below, "
        f"{max(100 * (v or 0) for v in results.records(narrow, 'legacy')[0].curve['validation']):.1f} at most"
    )


def test_the_command_lists_and_refuses(tmp_path: Path) -> None:
    listed = json.loads(run_command("list", "cards", "--json").out)
    assert [row["card"] for row in listed] == list(CARDS)
    with pytest.raises(UnknownNameError, match="pfedrec-table2"):
        find("table2", CARDS)
    (found,) = json.loads(
        run_command("reproduce", "pfedrec-figure3", "--gather", "--json", "--runs", str(tmp_path)).out
    )
    assert {row["`legacy`"] for row in found["rows"]} == {"not run"}
    assert found["verdicts"] == []
