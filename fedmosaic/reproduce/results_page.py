"""The book of results: cards run, drawn and written down, with date, versions and commands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import FedmosaicError
from fedmosaic.report.tables import Table
from fedmosaic.reproduce.card import NAMES, POINTS, Card, Results, Verdict, card_table, verdicts
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.study import StudyProgress, Tell, cells, run_study

CLOSE = 0.5  # points: what is close, rather than within the band
LARGEST_STATE = 100 << 20  # bytes; figures need some states, none of the large ones


def run_cards(
    cards: Sequence[Card], results: Results, *, workers: int | None = None, tell: Tell | None = None
) -> StudyProgress:
    """All runs of all cards, each once, the first seed of everything before the second."""
    planned = [s for card in cards for s in card.plan(results.seeds, results.quick)]
    planned.sort(key=lambda s: s.seed)
    keep = {s.key() for card in cards for s in card.kept(results.quick)}
    return run_study(
        planned,
        results.parent,
        workers=workers,
        data_dir=results.data_dir,
        largest=LARGEST_STATE,
        keep=keep,
        ledger=results.ledger,
        tell=tell,
    )


def section(card: Card, results: Results, folder: Path, link: str, before: str = "") -> str:
    """One card as Markdown: table, verdict, figures, and folded why numbers differ.

    before: the section as it was; figures that look into states which are gone stay as they were drawn.
    """
    found = verdicts(card, results)
    table = card_table(card, results)
    parts = [f"## {card.title}", f"*{card.paper}*  ", f"`fedmosaic reproduce {card.name}`", card.text, table.markdown()]
    if found:
        parts.append(
            f"Of {len(found)} published numbers ({card.source}) that were run, {sum(v.matches for v in found)} match, "
            f"{sum(v.within(CLOSE) for v in found)} of them within {CLOSE} points."
        )
        parts += _reasons([v for v in found if not v.matches], results)
    if card.verdict and not results.quick:
        parts.append(f"Verdict: {card.verdict}")
    try:
        drawn = [] if card.draw is None else card.draw(card, results, folder)
        parts += [f"![{f.caption}]({link}/{f.name}.png)\n\n*{f.caption}*" for f in drawn]
        if card.states and not drawn:
            kept = [p for p in before.split("\n\n") if p.startswith("![")]
            parts += [f"{figure}\n\n*{figure[2:].partition('](')[0]}*" for figure in kept]
            parts += [] if kept else ["(The figure looks into trained states, and none is here: run the card.)"]
    except FedmosaicError as error:
        parts.append(f"(The figure could not be drawn: {error}.)")
    return "\n\n".join(parts)


def write_book(cards: Sequence[Card], results: Results, place: Path, command: str) -> None:
    """All cards in one Markdown file, figures in a folder beside it."""
    link = "figures-quick" if results.quick else "figures"
    folder = place.parent / link
    head = [
        "# Results: published tables and figures, run again",
        f"Written by `{command}` on {datetime.now(UTC):%Y-%m-%d} from runs made on {_versions(cards, results)}. "
        "Values are test HR@10 / NDCG@10 in percent, 1 + 99 candidates, mean ± standard deviation over seeds; the "
        "column beside has the ranking of all unseen items. `legacy` is the papers' negative pool, which spares "
        "the held-out items ([leak.md](leak.md)); `strict` is what holds in real life. Chance is 10.00 / 4.54.",
        "A published number matches if ours lies within 1.5 points or two standard deviations (the paper's or ours, "
        "the larger) under the paper's pool.",
        *(["A quick run: too few rounds to judge anything."] if results.quick else overview(cards, results)),
        *_unfinished(cards, results),
        "## Cards",
        _contents(cards, results),
    ]
    old = place.read_text().split("\n## ") if place.is_file() else []
    before = {part.partition("\n")[0]: part for part in old}
    body = [section(card, results, folder, link, before.get(card.title, "")) for card in cards]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n\n".join([*head, *body]) + "\n")


def overview(cards: Sequence[Card], results: Results) -> list[str]:
    """The first page: what matches, how closely, where the numbers are from, and what holds under the strict pool."""
    judged = {card.name: _distinct(verdicts(card, results)) for card in cards}
    seen: set[tuple[str, str, float]] = set()
    rows, sums = [], {True: [0] * 4, False: [0] * 4}
    for card in cards:
        found = [v for key, v in judged[card.name].items() if key not in seen]  # a run is judged where it stands first
        seen |= set(judged[card.name])
        if found:
            numbers = [len(found), *(sum(map(test, found)) for test in (_matches, _near, _close))]
            sums[card.core] = [a + b for a, b in zip(sums[card.core], numbers, strict=True)]
            rows.append([f"[{card.title}](#{_anchor(card.title)})", "core" if card.core else "", *map(str, numbers),
                         card.source])  # fmt: skip
    if not rows:
        return []
    for core, words in ((True, "**core tables**"), (False, "sweeps and others")):
        rows.append([words, "", *(f"**{n}**" if core else str(n) for n in sums[core]), ""])
    header = ("card", "", "numbers", "match", "within 1.5", f"within {CLOSE}", "where the published numbers are from")
    unchecked = [f"- {c.title}: {c.verdict}" for c in cards if c.verdict.startswith(("cannot", "no number"))]
    return [
        "## In one page",
        "Core tables are those in which a method could easily miss the published number. The others cannot fail as "
        "easily: a sweep whose published values all lie within the band, or a data set on which popularity alone comes "
        "as near. Rows that several tables repeat are counted once.",
        Table("", header, tuple(tuple(r) for r in rows)).markdown(),
        "What cannot be checked, and why:\n\n" + "\n".join(unchecked) if unchecked else "",
        "What holds under the strict pool, where no method may know which items were held out:\n\n"
        + "\n".join(strict_words(cards, results)),
    ]


def _matches(verdict: Verdict) -> bool:
    return verdict.matches


def _near(verdict: Verdict) -> bool:
    return verdict.within(POINTS)


def _close(verdict: Verdict) -> bool:
    return verdict.within(CLOSE)


def _distinct(judged: Sequence[Verdict]) -> dict[tuple[str, str, float], Verdict]:
    found: dict[tuple[str, str, float], Verdict] = {}
    for verdict in judged:
        key = verdict.claim.settings(verdict.pool, 0, False).key()
        found.setdefault((key, verdict.metric, verdict.paper), verdict)
    return found


def strict_words(cards: Sequence[Card], results: Results) -> list[str]:
    """Per core card and data set: which rows lie above popularity when all unseen items are ranked."""
    lines: dict[tuple[str, str], str] = {}
    for card in (c for c in cards if c.core and "strict" in c.pools):
        paper = card.title.split(":")[0]
        for data in (d for d in card.data(results.quick) if (paper, d) not in lines):
            rows = [c for c in card.rows(results.quick) if c.data == data]
            known = {c.row: e for c in rows if (e := results.estimate(c, "strict", "full")) is not None}
            popular = known.pop("popularity", None)
            if popular is None or not known:
                continue
            above = {row: e for row, e in known.items() if e.mean[0] > popular.mean[0] + 2 * e.deviation[0]}
            best = max(known.items(), key=lambda pair: pair[1].mean[0])
            names = "; ".join(above) or "none"
            lines[paper, data] = (
                f"- {paper}, {NAMES.get(data, data)}: of {len(known)} rows {len(above)} lie above popularity "
                f"({popular.mean[0]:.1f} % HR@10 of the whole catalogue): {names}. The best is {best[0]}, "
                f"{best[1].mean[0]:.1f} %."
            )
    return list(lines.values())


def _unfinished(cards: Sequence[Card], results: Results) -> list[str]:
    """What the reader does not see: how many runs of the plan are still to be made."""
    planned = [s for card in cards for s in card.plan(results.seeds, results.quick)]
    every = cells(planned, results.parent)
    absent = [c for c in every if c.settings.key() not in results.ledger.records and not RunFolder(c.place).finished]
    if not absent:
        return []
    return [f"Of {len(every)} planned runs {len(absent)} are still to be made; cells say so, or have fewer seeds."]


def _contents(cards: Sequence[Card], results: Results) -> str:
    """A line per card: where it stands, and how many of its published numbers match."""
    lines = []
    for card in cards:
        found = verdicts(card, results)
        share = f": {sum(v.matches for v in found)} of {len(found)} match" if found else ""
        lines.append(f"- [{card.title}](#{_anchor(card.title)}){share}")
    return "\n".join(lines)


def _anchor(title: str) -> str:
    """The name under which readers of Markdown find a heading.

    >>> _anchor("PFedRec, table 2: performance on four data sets")
    'pfedrec-table-2-performance-on-four-data-sets'
    """
    return "".join("-" if c == " " else c for c in title.lower() if c.isalnum() or c in " -_")


def _versions(cards: Sequence[Card], results: Results) -> str:
    """Days, Python and packages of the runs themselves; several, where they were made at different times."""
    days: dict[str, set[str]] = {}
    for card in cards:
        for record in (r for c in card.rows(results.quick) for pool in card.pools for r in results.records(c, pool)):
            days.setdefault(record.versions, set()).add(record.made["date"])
    found = [f"{' to '.join(dict.fromkeys((min(d), max(d))))} with {versions}" for versions, d in sorted(days.items())]
    return "; ".join(found) or "nothing yet"


def _reasons(wrong: Sequence[Verdict], results: Results) -> list[str]:
    """Why numbers differ, folded: each cell with the run that tested the reason."""
    lines: list[str] = []
    said: dict[str, str] = {}  # a reason is said once
    for (row, data), numbers in groupby(wrong, key=lambda v: (v.claim.row, v.claim.data)):
        found = list(numbers)
        text = "; ".join(f"{v.metric}: paper {v.paper:.2f}, here {v.ours:.2f}" for v in found)
        reason = found[0].claim.reason
        why = "no reason tested" if reason is None else reason.text(found[0].claim, found[0].pool, results)
        title = f"{row}, {NAMES.get(data, data)}"
        first = said.setdefault(why, title)
        lines.append(f"- {title}: {text} ({why if first == title or reason is None else f'as for {first}'})")
    if not lines:
        return []
    summary = f"<summary>The {len(lines)} rows that differ, and why</summary>"
    return [f"<details>{summary}\n\n" + "\n".join(lines) + "\n\n</details>"]


def as_json(cards: Sequence[Card], results: Results) -> list[dict[str, Any]]:
    """Cards as plain values."""
    found = []
    for card in cards:
        table = card_table(card, results)
        rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
        judged = [
            {"row": v.claim.row, "data": v.claim.data, "metric": v.metric, "paper": v.paper, "here": v.ours}
            | {"matches": v.matches}
            for v in verdicts(card, results)
        ]
        found.append({"card": card.name, "title": card.title, "rows": rows, "verdicts": judged})
    return found
