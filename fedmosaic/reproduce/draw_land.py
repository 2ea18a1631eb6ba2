"""Loss landscapes of two methods on one scale, by the sound recipe and by the paper's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmosaic.core.extras import require_torch
from fedmosaic.report import figures
from fedmosaic.reproduce.card import NAMES, Card, Figure, Results
from fedmosaic.runs.run_folder import RunFolder

POINTS = {"zero-mean": 11, "filter": 11, "paper": 5}
RADIUS = {"zero-mean": 5.0, "filter": 0.5, "paper": 0.001}
WORDS = {
    "zero-mean": "zero-mean, up to {:g} long",
    "filter": "zero-mean, each row up to {:g} of the length that the model's own has",
    "paper": "those of the released code, entries N(1, 1), up to {:g} long, and its shuffled batches",
}


def draw_landscapes(card: Card, results: Results, folder: Path) -> list[Figure]:
    """Surfaces and contours, and the scalar rises in words."""
    require_torch("a loss landscape")
    from fedmosaic.reproduce.landscape import RECIPES, look

    drawn = []
    pool, chosen = card.pools[0], card.chosen(results.quick)
    sets = list(dict.fromkeys(claim.data for claim in chosen))
    recipes = RECIPES[:1] if results.quick else RECIPES
    for data, recipe in ((d, r) for d in sets for r in recipes if r == RECIPES[0] or d == sets[0]):
        surfaces, words = {}, []
        for claim in (c for c in chosen if c.data == data):
            for place in results.states(claim, pool)[:1]:
                model = RunFolder(place).recommender()
                points = 5 if results.quick else POINTS[recipe]
                seen = look(model.method_, model.training_, model.state_, RADIUS[recipe], points, recipe, 0)
                surfaces[claim.row] = (np.array(seen["steps"]), np.array(seen["surface"]) - seen["loss"])
                words.append(
                    f"{claim.row}: loss {seen['loss']:.5f}, mean rise {seen['mean_rise']:.2e}, uphill "
                    f"{seen['uphill_rise']:.2e}"
                )
        if surfaces:
            name = f"{card.name}-{data}-{recipe}"
            figures.save(figures.landscapes(surfaces, words="training loss above the model's own"), folder, name)
            drawn.append(
                Figure(
                    name,
                    f"{NAMES.get(data, data)}. Directions: {WORDS[recipe].format(RADIUS[recipe])}. "
                    + "; ".join(words)
                    + ".",
                )
            )
    return drawn
