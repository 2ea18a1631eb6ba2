"""Drawings of item rows as devices read them: t-SNE, and answers with own, global or somebody else's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.extras import require_torch
from fedmosaic.data.negatives import draw_candidates
from fedmosaic.evaluation.evaluate import make_probe, rank_probe
from fedmosaic.report import figures
from fedmosaic.reproduce.card import Card, Figure, Results
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.serving.recommender import FederatedRecommender

PERPLEXITY = 30
GROUPS = ("other items", "the user's history")


def tsne(rows: Any) -> Any:
    """Two dimensions that keep neighbours together; always the same for the same rows."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise SettingsError("t-SNE needs scikit-learn: pip install 'fedmosaic[reproduce]'") from None
    fitted = TSNE(n_components=2, perplexity=PERPLEXITY, init="pca", random_state=0, max_iter=500)
    return fitted.fit_transform(np.asarray(rows, dtype=np.float32))


def somebody(model: FederatedRecommender) -> int:
    """The user with the median number of items: neither a stranger nor an addict."""
    lengths = model.training_.histories.lengths
    return int(np.argsort(lengths, kind="stable")[lengths.size // 2])


def _group(model: FederatedRecommender, user: int) -> Any:
    group = np.zeros(model.training_.n_items, dtype=np.int64)
    group[model.training_.histories[user]] = 1
    return group


def _rows(model: FederatedRecommender, user: int) -> Any:
    require_torch("looking at a device's item rows")
    from fedmosaic.engines.item_rows import item_rows

    scorer: Any = model.method_.scorer(model.training_, model.state_)
    if hasattr(scorer, "item_rows"):  # generated for the user, rather than held by a device
        return scorer.item_rows(user)
    return np.concatenate(list(item_rows(scorer, user).values()), axis=1)


def draw_tsne(card: Card, results: Results, folder: Path) -> list[Figure]:
    """Rows of one user under several methods, a figure per pool."""
    drawn = []
    for pool in card.pools:
        panels = {}
        for claim in card.chosen(results.quick):
            for place in results.states(claim, pool)[:1]:
                model = RunFolder(place).recommender()
                user = somebody(model)
                panels[claim.row] = (tsne(_rows(model, user)), _group(model, user))
        if panels:
            name = f"{card.name}-{pool}"
            figures.save(figures.scatters(panels, GROUPS), folder, name)
            drawn.append(Figure(name, f"Item rows as one ML-100K user's device reads them, pool {pool}."))
    return drawn


def draw_additive_tsne(card: Card, results: Results, folder: Path) -> list[Figure]:
    """Shared rows, own rows and their sum for one user."""
    drawn = []
    (claim,) = card.claims
    for pool in card.pools:
        for place in results.states(claim, pool)[:1]:
            model = RunFolder(place).recommender()
            user = somebody(model)
            common, both = np.asarray(model.method_.vectors(model.state_)), _rows(model, user)
            views = {"shared": common, "own": both - common, "own + shared": both}
            panels = {title: (tsne(rows), _group(model, user)) for title, rows in views.items()}
            name = f"{card.name}-{pool}"
            figures.save(figures.scatters(panels, GROUPS), folder, name)
            drawn.append(Figure(name, f"FedRAP's tables for one ML-100K user, pool {pool}."))
    return drawn


def draw_inference(card: Card, results: Results, folder: Path) -> list[Figure]:
    """HR@10 when a device's own score function reads its own rows, the global ones, or another user's."""
    groups = {}
    (claim,) = card.claims
    for pool in card.pools:
        for place in results.states(claim, pool)[:1]:
            groups[f"pool {pool}"] = inference(RunFolder(place), results.data_dir)
    if not groups:
        return []
    figures.save(figures.bars(groups, "HR@10, 1 + 99 (percent)"), folder, card.name)
    words = "; ".join(f"{g}: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()) for g, values in groups.items())
    return [Figure(card.name, f"All users of ML-100K, HR@10, seed 0. {words}.")]


def inference(folder: RunFolder, data_dir: str | Path | None) -> dict[str, float]:
    """Test HR@10 (percent) of a linear-scorer run with own, global and random rows."""
    settings, model = folder.settings(), folder.recommender()
    split = settings.split_data(settings.load_data(data_dir))
    probe = make_probe(split, "test", draw_candidates(split, settings.candidates, seed=settings.candidate_seed))
    users = np.arange(split.n_users)
    state = model.state_
    own = {int(u): _rows(model, int(u)) for u in users}
    rng = keys.generator(seed=settings.seed, purpose=keys.Purpose.DIRECTIONS)
    other = (users + 1 + rng.integers(0, users.size - 1, users.size)) % users.size
    common = state.server.params["item"]
    asked, held = probe.take(users), split.test.take(users)
    found = {}
    for name in ("own", "global", "random"):
        scores = []
        for u in users:
            table = {"own": own[int(u)], "global": common, "random": own[int(other[u])]}[name]
            scores.append(table[asked[int(u)]] @ state.devices.dense("user")[u])
        found[name] = 100 * rank_probe(np.concatenate(scores), asked, held).mean("hr", 10)
    return found
