"""Drawings from what runs record: curves over rounds, sweeps over settings, sparsity."""

from __future__ import annotations

import re
from pathlib import Path

from fedmosaic.report import figures
from fedmosaic.report.curves import HR, validation_curve
from fedmosaic.reproduce.card import NAMES, Card, Figure, Results
from fedmosaic.runs.ledger import Record


def _runs(card: Card, results: Results, pool: str) -> dict[str, Record]:
    """The first finished run of each row."""
    records = {c.row: results.records(c, pool) for c in card.chosen(results.quick)}
    return {row: found[0] for row, found in records.items() if found}


def draw_learning(card: Card, results: Results, folder: Path) -> list[Figure]:
    """Validation HR@10 over rounds, a panel per pool."""
    panels = {}
    for pool in card.pools:
        lines = {row: validation_curve(record) for row, record in _runs(card, results, pool).items()}
        panels[f"pool {pool}"] = {row: (c.rounds, c.values) for row, c in lines.items()}
    if not any(panels.values()):
        return []
    figures.save(figures.curves(panels, ["round"] * len(panels), f"validation {HR}"), folder, card.name)
    return [Figure(card.name, f"{card.title}: validation HR@10 by round, one seed.")]


def draw_convergence(card: Card, results: Results, folder: Path) -> list[Figure]:
    """The same against rounds, seconds and bytes, under each pool."""
    drawn = []
    for pool in card.pools:
        lines = {row: validation_curve(record) for row, record in _runs(card, results, pool).items()}
        if not lines:
            continue
        panels = {
            title: {row: (getattr(c, x), c.values) for row, c in lines.items()}
            for title, x in (("by round", "rounds"), ("by time", "seconds"), ("by traffic", "megabytes"))
        }
        labels = ["round", "seconds", "megabytes sent per client"]
        name = f"{card.name}-{pool}"
        figures.save(figures.curves(panels, labels, f"validation {HR}", log=[False, True, True]), folder, name)
        drawn.append(Figure(name, f"Validation HR@10 against rounds, seconds and bytes, pool {pool}, one seed."))
    return drawn


def draw_sparsity(card: Card, results: Results, folder: Path) -> list[Figure]:
    """Share of numbers that are as good as zero, and bytes sent, by row."""
    groups = {}
    for row, record in _runs(card, results, card.pools[0]).items():
        last = record.curve["bytes_up"][-1]
        assert last is not None
        zeros = 100 * record.summary["table"]["zeros"]
        groups[row] = {"zeros, percent": zeros, "kilobytes sent, last round": last / 1e3}
    if not groups:
        return []
    figures.save(figures.bars(groups, "percent, or kilobytes"), folder, card.name)
    words = f"Zeros of the shared table (at or below 1e-4) and kilobytes a client sends, pool {card.pools[0]}."
    return [Figure(card.name, words)]


def draw_radii(card: Card, results: Results, folder: Path) -> list[Figure]:
    """HR@10 and NDCG@10 along each radius, ours and the paper's."""
    drawn = []
    for at, metric in enumerate(("HR@10", "NDCG@10")):
        panels = {}
        for data in dict.fromkeys(c.data for c in card.chosen(results.quick)):
            for kind in ("shared", "private"):
                claims = [
                    c for c in card.chosen(results.quick) if c.data == data and c.row.startswith(f"{kind} radius")
                ]
                if claims:
                    found = [results.estimate(c, card.pools[0]) for c in claims]
                    lines = {
                        "here": [None if e is None else e.mean[at] for e in found],
                        "paper": [c.paper[at] for c in claims],
                    }
                    panels[f"{NAMES[data]}: {kind}"] = ([c.row.split()[2] for c in claims], lines)
        name = f"{card.name}-{metric.split('@')[0].lower()}"
        figures.save(figures.sensitivity(panels, f"{metric}, 1 + 99 (%)"), folder, name)
        drawn.append(Figure(name, f"{metric} by radius; the other radius stands at its base."))
    return drawn


def draw_sensitivity(card: Card, results: Results, folder: Path) -> list[Figure]:
    """HR@10 under each pool as one setting changes; rows are named `SETTING VALUE`."""
    panels: dict[str, tuple[list[str], dict[str, list[float | None]]]] = {}
    for claim in card.chosen(results.quick):
        matched = re.fullmatch(r"(.*) (\S+)", claim.row)
        assert matched is not None
        title, value = matched.groups()
        categories, lines = panels.setdefault(title, ([], {pool: [] for pool in card.pools}))
        categories.append(value)
        for pool in card.pools:
            found = results.estimate(claim, pool)
            lines[pool].append(None if found is None else found.mean[0])
    figures.save(figures.sensitivity(panels, HR), folder, card.name)
    return [Figure(card.name, f"{card.title}: test HR@10.")]
