"""The book of results: cards run, drawn and written down, with date, versions and commands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import FedmosaicError
from fedmosaic.reproduce.card import NAMES, Card, Results, Verdict, card_table, verdicts
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.study import StudyProgress, Tell, cells, run_study

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


def section(card: Card, results: Results, folder: Path, link: str) -> str:
    """One card as Markdown: table, verdict, figures."""
    found = verdicts(card, results)
    table = card_table(card, results)
    parts = [f"## {card.title}", f"*{card.paper}*  ", f"`fedmosaic reproduce {card.name}`", card.text, table.markdown()]
    if found:
        parts.append(f"Of {len(found)} published numbers that were run, {sum(v.matches for v in found)} match.")
    if card.verdict and not results.quick:
        parts.append(f"Verdict: {card.verdict}")
    try:
        drawn = [] if card.draw is None else card.draw(card, results, folder)
        parts += [f"![{f.caption}]({link}/{f.name}.png)\n\n*{f.caption}*" for f in drawn]
        if card.states and not drawn:
            parts.append("(The figure looks into trained states, and none is here: run the card.)")
    except FedmosaicError as error:
        parts.append(f"(The figure could not be drawn: {error}.)")
    return "\n\n".join(parts)


def write_book(cards: Sequence[Card], results: Results, place: Path, command: str) -> None:
    """All cards in one Markdown file, figures in a folder beside it."""
    link = "figures-quick" if results.quick else "figures"
    folder = place.parent / link
    judged = [v for card in cards for v in verdicts(card, results)]
    head = [
        "# Results: published tables and figures, run again",
        f"Written by `{command}` on {datetime.now(UTC):%Y-%m-%d} from runs made on {_versions(cards, results)}. "
        "Values are test HR@10 / NDCG@10 in percent, 1 + 99 candidates, mean ± standard deviation over seeds; the "
        "column beside has the ranking of all unseen items. `legacy` is the papers' negative pool, which spares "
        "the held-out items ([leak.md](leak.md)); `strict` is what holds in real life. Chance is 10.00 / 4.54.",
        "A published number matches if ours lies within 1.5 points or two standard deviations (the paper's or ours, "
        "the larger) under the paper's pool.",
        _contents(cards, results),
        *_unfinished(cards, results),
        *(["A quick run: too few rounds to judge anything."] if results.quick else _judgement(judged, results)),
    ]
    body = [section(card, results, folder, link) for card in cards]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n\n".join([*head, *body]) + "\n")


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


def _judgement(judged: Sequence[Verdict], results: Results) -> list[str]:
    distinct: dict[tuple[str, str, float], Verdict] = {}
    for verdict in judged:  # tables repeat each other's rows: a run is judged once, where it stands first
        key = verdict.claim.settings(verdict.pool, 0, False).key()
        distinct.setdefault((key, verdict.metric, verdict.paper), verdict)
    if not distinct:
        return []
    wrong = [v for v in distinct.values() if not v.matches]
    lines: list[str] = []
    said: dict[str, str] = {}  # a reason is said once
    for (row, data), numbers in groupby(wrong, key=lambda v: (v.claim.row, v.claim.data)):
        found = list(numbers)
        text = "; ".join(f"{v.metric}: paper {v.paper:.2f}, here {v.ours:.2f}" for v in found)
        reason = found[0].claim.reason
        why = "no reason tested" if reason is None else reason.text(found[0].claim, found[0].pool, results)
        title = f"{row}, {NAMES[data]}"
        first = said.setdefault(why, title)
        lines.append(f"- {title}: {text} ({why if first == title or reason is None else f'as for {first}'})")
    share = f"**{len(distinct) - len(wrong)} of {len(distinct)} published numbers match.**"
    return [share + (" Those that do not:" if wrong else ""), "\n".join(lines)]


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
