"""Singular values of global tables, and of the rows that devices read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.extras import require_torch
from fedmosaic.evaluation.spectrum import effective_rank, information_abundance, singular_values
from fedmosaic.report import figures
from fedmosaic.reproduce.card import Card, Figure, Results
from fedmosaic.runs.run_folder import RunFolder

CLIENTS = 16


def draw_spectra(card: Card, results: Results, folder: Path) -> list[Figure]:
    """A figure per pool; abundance and effective rank of global and device tables in words."""
    require_torch("looking at devices' item rows")
    from fedmosaic.engines.item_rows import item_rows

    drawn = []
    for pool in card.pools:
        tables, words = {}, []
        for claim in card.chosen(results.quick):
            for place in results.states(claim, pool)[:1]:
                model = RunFolder(place).recommender()
                table = np.asarray(model.method_.vectors(model.state_))
                tables[claim.row] = singular_values(table).tolist()
                scorer: Any = model.method_.scorer(model.training_, model.state_)
                rows = [item_rows(scorer, user)["item"] for user in range(CLIENTS)]
                own = np.mean([information_abundance(r) for r in rows])
                words.append(
                    f"{claim.row}: abundance {information_abundance(table):.1f} global, {own:.1f} on devices, "
                    f"effective rank {effective_rank(table):.1f}"
                )
        if tables:
            name = f"{card.name}-{pool}"
            figures.save(figures.spectra(tables), folder, name)
            drawn.append(Figure(name, f"Global tables on ML-100K, pool {pool}, seed 0. " + "; ".join(words) + "."))
    return drawn
