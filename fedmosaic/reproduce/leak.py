"""The evaluation leak in one figure: the same methods, training negatives drawn with and without the answer."""

from __future__ import annotations

from pathlib import Path

from fedmosaic.report import figures
from fedmosaic.reproduce.card import Card, Claim, Figure, Results

CHANCE = 10.0


def draw_pools(card: Card, results: Results, folder: Path) -> list[Figure]:
    """A line per method from one pool to the other."""
    rows = {}
    for claim in card.rows(results.quick):
        found = {pool: results.estimate(claim, pool) for pool in card.pools}
        values = {f"pool {pool}": e.mean[0] for pool, e in found.items() if e is not None}
        if len(values) == len(card.pools):
            rows[claim.row] = values
    if not rows:
        return []
    figures.save(figures.pool_effect(rows, CHANCE, "test HR@10, 1 + 99 candidates (percent)"), folder, card.name)
    return [Figure(card.name, "ML-100K: what the papers' negative pool does to each method.")]


CARDS = (
    Card(
        "leak",
        "the evaluation leak, after an issue that users of PFedRec's code opened in 2024",
        "What the negative pool does",
        tuple(
            Claim(row, "ml-100k", method, given, seeds=seeds, quick=quick)
            for row, method, given, seeds, quick in (
                ("FedMF", "fedmf", {}, None, 20),
                ("FedNCF", "fedncf", {}, None, 6),
                ("FedRecon", "fedrecon", {}, None, 20),
                ("PFedRec", "pfedrec", {}, None, 20),
                ("FedRAP, as released", "fedrap", {"ramp": "as-released"}, None, 4),
                ("FedRAP, own table alone, 60 rounds", "fedrap-d", {"rounds": 60}, 1, 4),
            )
        ),
        "Shared tables hardly notice the pool. The more a device keeps of its own, the more it gains: a table that "
        "learns nothing from anybody beats all that are shared. [leak.md](leak.md) explains.",
        draw=draw_pools,
    ),
)
