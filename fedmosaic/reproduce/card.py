"""Reproduction cards: what a paper claims, what comes out here, and whether the two agree.

A claim is a published cell with the run that checks it. It is run under the paper's negative pool and under the strict
one; only the former is compared with the paper.

    matches     |ours - paper| <= max(1.5 points, 2 standard deviations of either)
    differs     by how much
    unchecked   no published number, or no run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.errors import UnknownNameError
from fedmosaic.methods import registry
from fedmosaic.report.tables import Table
from fedmosaic.reproduce.counts import Count, counts_table
from fedmosaic.runs.ledger import Ledger, Record
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import PAPERS, Settings
from fedmosaic.runs.study import Cell, cells

POINTS = 1.5
METRICS = ("hr@10", "ndcg@10")
SEEDS = 3
MANY = 5
SLOW = {  # of which a run takes over a minute of one core
    "ml-100k": ("metamf",),
    "ml-1m": (
        "local-only", "mf", "ncf", "pfedrec", "fedncf", "fedncf-dual", "fedrecon", "fedrecon-dual", "fedrap", "metamf",
        "fedpergnn", "lightgcn",
    ),
    "lastfm-2k": ("fedrap",),
    "lastfm-2k-tags": ("ncf", "metamf", "fedpergnn", "fedrecgel"),
    "lastfm-2k-tags-dedup": ("metamf", "fedpergnn"),
    "amazon-video": ("fedncf", "fedncf-dual", "metamf", "fedpergnn", "fedrecgel"),
}  # fmt: skip
QUICK_DATA = ("ml-100k", "filmtrust-5", "filmtrust-5-drawn")
# Rows that stand in every table, before those of the paper: method, settings, seeds, rounds in quick mode
REFERENCES: tuple[tuple[str, dict[str, Any], int | None, int], ...] = (
    ("popularity", {}, 1, 1),
    ("local-only", {"rounds": 30}, None, 6),
)
NAMES = {
    "ml-100k": "ML-100K",
    "ml-1m": "ML-1M",
    "lastfm-2k": "Lastfm-2K, plays",
    "lastfm-2k-tags": "Lastfm-2K, tags",
    "lastfm-2k-tags-dedup": "Lastfm-2K, tags, each pair once",
    "amazon-video": "Amazon-Video",
    "amazon-video-10": "Amazon-Video, users with 10",
    "filmtrust-5": "FilmTrust",
    "filmtrust-5-drawn": "FilmTrust, authors' draw",
}


@dataclass(frozen=True)
class Reason:
    """Why a cell differs, with what shows it: a run with other settings, a learning curve, or a measurement."""

    words: str
    tried: Mapping[str, Any] = field(default_factory=dict)  # other settings; paper's pool, seed 0
    curve: bool = False  # say in which round validation passes the published HR, in that run if there is one
    measured: tuple[float, float] | None = None  # HR@10 and NDCG@10 by a command that the words name

    def text(self, claim: Claim, pool: str, results: Results) -> str:
        """The words, and what the run found."""
        found = [self._other(claim, pool, results)] if self.tried else []
        found += [self._passed(claim.trial() if self.tried else claim, pool, results)] if self.curve else []
        found += [_against(claim, pool, Estimate(self.measured, (0.0, 0.0), 1))] if self.measured else []
        return f"{self.words}: {'; '.join(found)}" if found else self.words

    def _other(self, claim: Claim, pool: str, results: Results) -> str:
        given = " ".join(f"{k}={v}" for k, v in self.tried.items())
        found = results.estimate(claim.trial(), pool)
        return f"`{given}` was not run" if found is None else f"`{given}` gives {_against(claim, pool, found)}"

    def _passed(self, claim: Claim, pool: str, results: Results) -> str:
        published = claim.paper[0]
        assert published is not None
        for record in results.records(claim, pool)[:1]:
            hr = [100 * (value or 0) for value in record.curve["validation"]]
            passed = [at for at, value in enumerate(hr, 1) if value >= published]
            if passed:
                return f"validation HR passes {published:.1f} in round {passed[0]} of {len(hr)}"
            return f"validation HR stays below, {max(hr):.1f} at most"
        return "not run"


@dataclass(frozen=True)
class Claim:
    """A row of a card: a run, and the HR@10 and NDCG@10 (percent) that the paper prints for it."""

    row: str
    data: str
    method: str
    given: Mapping[str, Any] = field(default_factory=dict)
    paper: tuple[float | None, float | None] = (None, None)
    deviation: tuple[float, float] = (0.0, 0.0)
    seeds: int | None = None  # at most so many; not said: five where a run takes less than a minute, three elsewhere
    quick: int | None = None  # rounds in quick mode; 0 leaves the claim out
    reason: Reason | None = None  # why a cell that differs differs, as tested

    def seed_range(self, most: int) -> range:
        """The seeds it is run with, of `most` that are wanted."""
        return range(min(most, self.seeds or (SEEDS if self.method in SLOW.get(self.data, ()) else MANY)))

    def trial(self) -> Claim:
        """The run that tests the reason."""
        assert self.reason is not None
        return replace(self, given={**self.given, **self.reason.tried}, seeds=1, reason=None)

    def settings(self, pool: str, seed: int, quick: bool) -> Settings:
        """The run that checks this claim."""
        given = {"ties": "file", "select": PAPERS, **self.given, "pool": pool, "seed": seed}
        if quick and self.quick and "rounds" in registry.entry(self.method).settings.model_fields:
            given["rounds"] = self.quick
        return Settings.make(self.method, self.data, given)


@dataclass(frozen=True)
class Figure:
    """A drawing of a card: a file name, and words to stand beneath it."""

    name: str
    caption: str


Draw = Callable[["Card", "Results", Path], list[Figure]]


@dataclass(frozen=True)
class Card:
    """What a table or figure of a paper claims, and how it is checked."""

    name: str
    paper: str
    title: str
    claims: tuple[Claim, ...]
    text: str
    verdict: str = ""  # where the paper draws or says something without a number that could be compared
    pools: tuple[str, ...] = ("legacy", "strict")  # the first is the paper's
    draw: Draw | None = None
    states: bool = False  # whether its drawings look into trained states, which are then kept
    protocol: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by data set, what all of its runs share
    counts: tuple[Count, ...] = ()  # a table of data sets, which has no runs
    core: bool = False  # whether its published numbers could easily be missed: a main table, not a sweep that is flat
    source: str = "printed in the paper"  # where the published numbers are from
    ranks: bool = False  # whether its table says how many directions the shared item table uses

    def data(self, quick: bool) -> list[str]:
        """The data sets it looks at."""
        return list(dict.fromkeys([c.data for c in self.chosen(quick)] + [c.data for c in self.counted(quick)]))

    def counted(self, quick: bool) -> list[Count]:
        """The data sets that are counted: all, or the small ones."""
        return [c for c in self.counts if not quick or c.data in QUICK_DATA]

    def chosen(self, quick: bool) -> list[Claim]:
        """The claims that are run: all, or the small ones."""
        return [c for c in self.claims if not quick or (c.data in QUICK_DATA and c.quick != 0)]

    def rows(self, quick: bool) -> list[Claim]:
        """The rows of the table: by data set, the references and then the claims."""
        chosen = self.chosen(quick)
        found = []
        for data in dict.fromkeys(c.data for c in chosen):
            shared = self.protocol.get(data, {})
            found += [
                Claim(method, data, method, {**shared, **given}, seeds=seeds, quick=rounds)
                for method, given, seeds, rounds in REFERENCES
            ]
            found += [c for c in chosen if c.data == data]
        return found

    def plan(self, seeds: int, quick: bool) -> list[Settings]:
        """Every run of this card, those that test reasons last."""
        rows = self._settings(self.rows(quick), seeds, quick)
        tested = [c.trial() for c in self.chosen(quick) if c.reason is not None and c.reason.tried and not quick]
        return rows + [trial.settings(self.pools[0], 0, quick) for trial in tested]

    def kept(self, quick: bool) -> list[Settings]:
        """The runs whose trained states its drawings look into: the first seed's."""
        return self._settings(self.chosen(quick), 1, quick) if self.states else []

    def _settings(self, claims: Sequence[Claim], seeds: int, quick: bool) -> list[Settings]:
        return [
            claim.settings(pool, seed, quick)
            for seed in range(seeds)
            for claim in claims
            if seed in claim.seed_range(seeds)
            for pool in self.pools
        ]


@dataclass(frozen=True)
class Estimate:
    """Mean and deviation of HR@10 and NDCG@10 over seeds, in percent."""

    mean: tuple[float, float]
    deviation: tuple[float, float]
    seeds: int

    def text(self) -> str:
        """As a table cell."""
        parts = [
            f"{m:.2f}" + (f" ± {d:.2f}" if self.seeds > 1 else "")
            for m, d in zip(self.mean, self.deviation, strict=True)
        ]
        return " / ".join(parts)


@dataclass(frozen=True, eq=False)
class Results:
    """The finished runs of a book of cards, in run folders or in a ledger."""

    parent: Path
    seeds: int
    quick: bool
    data_dir: Path | None = None
    ledger: Ledger = field(default_factory=Ledger)
    seen: dict[Path, Record] = field(default_factory=dict, repr=False)  # folders are read once

    def records(self, claim: Claim, pool: str) -> list[Record]:
        """What the finished runs of a claim found, by seed."""
        found = []
        for cell in self._cells(claim, pool):
            if cell.place not in self.seen and (made := cell.record()) is not None:
                self.seen[cell.place] = made
            record = self.seen.get(cell.place) or self.ledger.records.get(cell.settings.key())
            found += [record] if record is not None else []
        return found

    def states(self, claim: Claim, pool: str) -> list[Path]:
        """Run folders of a claim that hold a trained state, by seed."""
        return [c.place for c in self._cells(claim, pool) if RunFolder(c.place).trained]

    def _cells(self, claim: Claim, pool: str) -> list[Cell]:
        wanted = [claim.settings(pool, seed, self.quick) for seed in claim.seed_range(self.seeds)]
        return cells(wanted, self.parent)

    def estimate(self, claim: Claim, pool: str, protocol: str = "sampled", part: str = "test") -> Estimate | None:
        """Test metrics (or what chance would give) over seeds; none where nothing is finished."""
        known = [r.summary[part] for r in self.records(claim, pool) if part in r.summary]
        found = [[100 * tables[protocol][m] for m in METRICS] for tables in known]
        if not found:
            return None
        (hr, ndcg), values = np.mean(found, axis=0), np.array(found)
        spread = values.std(axis=0, ddof=1) if len(found) > 1 else np.zeros(2)
        return Estimate((float(hr), float(ndcg)), (float(spread[0]), float(spread[1])), len(found))


@dataclass(frozen=True)
class Verdict:
    """One published number against ours, under the paper's pool."""

    claim: Claim
    pool: str
    metric: str
    paper: float
    ours: float
    allowed: float

    @property
    def matches(self) -> bool:
        """Whether the two agree."""
        return self.within(self.allowed)

    def within(self, points: float) -> bool:
        """Whether they are at most so far apart."""
        return abs(self.ours - self.paper) <= points


def verdicts(card: Card, results: Results) -> list[Verdict]:
    """Every published number of a card that was run, under the paper's pool; a quick run judges nothing."""
    found: list[Verdict] = []
    if results.quick:
        return found
    for claim in card.chosen(results.quick):
        ours = results.estimate(claim, card.pools[0])
        found += [] if ours is None else _judged(claim, card.pools[0], ours)
    return found


def _judged(claim: Claim, pool: str, ours: Estimate) -> list[Verdict]:
    found = []
    for i, metric in enumerate(METRICS):
        published = claim.paper[i]
        if published is not None:
            allowed = max(POINTS, 2 * claim.deviation[i], 2 * ours.deviation[i])
            found.append(Verdict(claim, pool, metric, published, ours.mean[i], allowed))
    return found


def _against(claim: Claim, pool: str, found: Estimate) -> str:
    """Other numbers for a claim, and whether they are nearer."""
    judged = _judged(claim, pool, found)
    far = [f"{v.metric.split('@')[0].upper()} {v.ours - v.paper:+.1f}" for v in judged if not v.matches]
    return found.text() + (f", still off ({', '.join(far)})" if far else ", within the band" if judged else "")


def card_table(card: Card, results: Results) -> Table:
    """Paper, ours under each pool, full ranking under strict, verdict; of data sets: what the paper counts, and we."""
    if card.counts:
        return counts_table(card.title, card.counted(results.quick), results.data_dir)
    judged: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts(card, results):
        judged.setdefault((verdict.claim.row, verdict.claim.data), []).append(verdict)
    rows = []
    for claim in card.rows(results.quick):
        words = _words(judged.get((claim.row, claim.data), []))
        if claim.method == REFERENCES[0][0]:
            rows.append(_row(card, replace(claim, row="chance"), results, "chance", ""))
        rows.append(_row(card, claim, results, "test", words))
    pools = [f"`{pool}`" for pool in card.pools]
    last = (f"`{card.pools[-1]}`, full ranking", *(["effective rank"] if card.ranks else []), "seeds", "verdict")
    return Table(card.title, ("row", "data", "paper", *pools, *last), tuple(rows))


def _row(card: Card, claim: Claim, results: Results, part: str, verdict: str) -> tuple[str, ...]:
    found = [results.estimate(claim, pool, part=part) for pool in card.pools]
    full = results.estimate(claim, card.pools[-1], "full", part)
    return (
        claim.row,
        NAMES.get(claim.data, claim.data),
        " / ".join("" if p is None else f"{p:.2f}" for p in claim.paper) if any(claim.paper) else "",
        *("not run" if e is None else e.text() for e in found),
        "" if full is None else full.text(),
        *([_rank(card, claim, results)] if card.ranks else []),
        _counts([0 if e is None else e.seeds for e in found]) if part == "test" else "",
        verdict,
    )


def _rank(card: Card, claim: Claim, results: Results) -> str:
    """Mean effective rank of the shared item table over seeds, per pool."""
    found = []
    for pool in card.pools:
        known = [r.summary["table"]["effective_rank"] for r in results.records(claim, pool) if r.summary.get("table")]
        found.append(f"{np.mean(known):.1f}" if known else "")
    return " / ".join(found) if any(found) else ""


def _counts(seeds: Sequence[int]) -> str:
    """Seeds per pool, said once where they agree."""
    return ", ".join(str(s) for s in (seeds if len(set(seeds)) > 1 else seeds[:1]))


def _words(found: Sequence[Verdict]) -> str:
    if not found:
        return ""
    parts = [
        f"{v.metric.split('@')[0].upper()} {'matches' if v.matches else f'differs by {v.ours - v.paper:+.1f}'}"
        for v in found
    ]
    return "matches" if all(v.matches for v in found) else "; ".join(parts)


def find(name: str, cards: Mapping[str, Card]) -> list[Card]:
    """One card, or `all`."""
    if name == "all":
        return list(cards.values())
    if name not in cards:
        raise UnknownNameError("card", name, ["all", *cards])
    return [cards[name]]
