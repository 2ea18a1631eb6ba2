"""The book of results: cards run, drawn and written down, with date, versions and commands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedmosaic.cards.card import NAMES, Card, Figure, Results, Verdict, card_table, verdicts
from fedmosaic.errors import FedmosaicError
from fedmosaic.folder import environment
from fedmosaic.study import Progress, Tell, run_study

LARGEST_STATE = 100 << 20  # bytes; figures need some states, none of the large ones


def run_cards(
    cards: Sequence[Card], results: Results, *, workers: int | None = None, tell: Tell | None = None
) -> Progress:
    """All runs of all cards, each once, the first seed of everything before the second."""
    planned = [s for card in cards for s in card.plan(results.seeds, results.quick)]
    planned.sort(key=lambda s: s.seed)
    return run_study(
        planned, results.parent, workers=workers, data_dir=results.data_dir, largest=LARGEST_STATE, tell=tell
    )


def section(card: Card, results: Results, folder: Path, link: str) -> str:
    """One card as Markdown: table, verdict, figures."""
    found = verdicts(card, results)
    table = card_table(card, results)
    parts = [f"## {card.title}", f"*{card.paper}*  ", f"`fedmosaic reproduce {card.name}`", card.text, table.markdown()]
    if found:
        parts.append(f"Of {len(found)} published numbers that were run, {sum(v.matches for v in found)} match.")
    for figure in draw(card, results, folder):
        parts.append(f"![{figure.caption}]({link}/{figure.name}.png)\n\n*{figure.caption}*")
    return "\n\n".join(parts)


def draw(card: Card, results: Results, folder: Path) -> list[Figure]:
    """The card's figures; one that cannot be drawn says why instead of taking the others with it."""
    if card.draw is None:
        return []
    try:
        return card.draw(card, results, folder)
    except FedmosaicError as error:
        return [Figure("missing", f"not drawn: {error}")]


def write_book(cards: Sequence[Card], results: Results, place: Path, command: str) -> None:
    """All cards in one Markdown file, figures in a folder beside it."""
    folder = place.parent / "figures"
    versions = environment()
    packages = ", ".join(f"{k} {v}" for k, v in versions["packages"].items() if k in ("fedmosaic", "numpy", "torch"))
    judged = [v for card in cards for v in verdicts(card, results)]
    head = [
        "# Results: published tables and figures, run again",
        f"Written by `{command}` on {datetime.now(UTC):%Y-%m-%d}; Python {versions['python']}, {packages}. Values are "
        "test HR@10 / NDCG@10 in percent, 1 + 99 candidates, mean ± standard deviation over seeds; the column beside "
        "has the ranking of all unseen items. `legacy` is the papers' negative pool, which spares the held-out items "
        "([leak.md](leak.md)); `strict` is what holds in real life. Chance is 10.00 / 4.54.",
        "A published number matches if ours lies within 1.5 points or two standard deviations (the paper's or ours, "
        "the larger) under the paper's pool.",
        *_judgement(judged),
    ]
    body = [section(card, results, folder, "figures") for card in cards]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n\n".join([*head, *body]) + "\n")


def _judgement(judged: Sequence[Verdict]) -> list[str]:
    distinct = {(v.claim.row, v.claim.data, v.claim.method, v.metric, v.paper): v for v in judged}
    if not distinct:
        return ["A quick run: too few rounds to judge anything."]
    wrong = [v for v in distinct.values() if not v.matches]
    lines = [
        f"- {v.claim.row}, {NAMES[v.claim.data]}, {v.metric}: paper {v.paper:.2f}, here {v.ours:.2f}"
        + (f" ({v.claim.reason})" if v.claim.reason else "")
        for v in wrong
    ]
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
