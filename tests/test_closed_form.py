"""Reference recommenders: the federated sum equals the central form, and both equal the textbook."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from fedmosaic.core.errors import SettingsError
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods import registry
from fedmosaic.methods.closed_form import ClosedForm, fit
from fedmosaic.methods.ease import EASE
from fedmosaic.methods.fcf import FCF
from fedmosaic.methods.ials import IALS
from fedmosaic.methods.itemknn import ItemKNN
from fedmosaic.methods.popularity import Popularity
from fedmosaic.serving.recommender import FederatedRecommender

FORMS = [
    Popularity(),
    ItemKNN(),
    ItemKNN(neighbours=3, shrink=2.0),
    EASE(lam=3.0),
    IALS(dim=4, rounds=3),
    FCF(dim=4, rounds=3),
]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_sum_over_devices_equals_central(form: ClosedForm, small: Split) -> None:
    histories = small.held("train")
    central = fit(form, histories)
    for clients_per_chunk in (1, 7):
        federated = fit(form, histories, clients_per_chunk=clients_per_chunk)
        for name in central:
            np.testing.assert_allclose(federated[name], central[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_upload_size_is_the_same_for_every_client(form: ClosedForm, small: Split) -> None:
    histories = small.held("train")
    state = form.init(small.n_items, 0)
    alone = (histories.take(np.array([u])) for u in range(small.n_users))
    sizes = {sum(a.nbytes for a in form.statistics(state, one).values()) for one in alone}
    assert sizes == {form.traffic(small.n_items)[0]}


def test_ease_equals_the_textbook(small: Split) -> None:
    r = small.train.to_csr(small.n_items).toarray().astype(np.float64)
    p = np.linalg.inv(r.T @ r + 3.0 * np.eye(small.n_items))
    b = np.eye(small.n_items) - p @ np.diag(1 / np.diag(p))
    np.fill_diagonal(b, 0)
    form = EASE(lam=3.0)
    np.testing.assert_allclose(form.scores(fit(form, small.held("train")), small.held("train")), r @ b, atol=1e-5)


def test_itemknn_equals_the_textbook(small: Split) -> None:
    r = small.train.to_csr(small.n_items).toarray().astype(np.float64)
    norm = np.linalg.norm(r, axis=0)
    sim = (r.T @ r) / np.maximum(np.outer(norm, norm), 1e-12)
    np.fill_diagonal(sim, 0)
    form = ItemKNN()
    np.testing.assert_allclose(form.scores(fit(form, small.held("train")), small.held("train")), r @ sim, atol=1e-5)


def objective(form: IALS, r: Any, x: Any, y: Any) -> float:
    error = ((x @ y.T - 1) ** 2 * r).sum() + form.w0 * ((x @ y.T) ** 2).sum()
    return float(error + form.reg * ((x**2).sum() + (y**2).sum()))


def test_ials_descends_and_its_steps_are_optimal(small: Split) -> None:
    form, histories = IALS(dim=4), small.held("train")
    csr = histories.csr
    r, values, state = csr.toarray(), [], form.init(small.n_items, 0)
    for _ in range(4):
        x = form.user_vectors(state["item"], csr)
        values.append(objective(form, r, x, state["item"]))
        state = form.apply(state, form.statistics(state, histories))
        values.append(objective(form, r, x, state["item"]))
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(values))
    y, best = state["item"], values[-1]
    for _ in range(5):  # no small change of the items improves the solved step
        nudge = np.random.default_rng(0).normal(0, 1e-3, y.shape)
        assert objective(form, r, x, y + nudge) > best


def test_ials_of_one_process_equals_the_sums(small: Split) -> None:
    form, data = IALS(dim=5, reg=0.5, nu=0.5), TrainingSet(small.train, small.train, small.n_items)
    apart = alone = form.init(small.n_items, 0)
    for number in (1, 2, 3):
        summed = form.statistics(apart, data.held)
        apart = form.apply(apart, summed)
        alone, record, _ = form.advance(data, alone, number, 0)
    np.testing.assert_allclose(alone["item"], apart["item"], atol=1e-5 * np.abs(apart["item"]).max())
    assert alone["users"] == apart["users"]
    assert record.bytes_up == sum(a.nbytes for a in summed.values())
    assert record.bytes_down == sum(a.nbytes for a in alone.values())


@pytest.mark.parametrize("reg", [4.0, 1e-4])
def test_ials_users_equal_the_textbook_for_every_length_of_history(reg: float) -> None:
    rng, form = np.random.default_rng(0), IALS(dim=70, reg=reg, nu=0.3)
    y = rng.normal(size=(500, 70))
    r = np.array([rng.permutation(500) < size for size in (0, 1, 64, 69, 70, 192, 450)], dtype=np.float64)
    found = form.user_vectors(y, sparse.csr_array(r))
    for own, x in zip(r, found, strict=True):
        ridge = reg * (own.sum() + form.w0 * 500) ** form.nu * np.eye(70)
        np.testing.assert_allclose(x, np.linalg.solve((y.T * (own + form.w0)) @ y + ridge, own @ y), atol=1e-12)


def checkerboard(n: int = 12) -> dict[str, list[int]]:
    """Users like items of their own parity; each lacks one of them, which is the right answer."""
    rows = [(u, i) for u in range(n) for i in range(n) if u % 2 == i % 2 and i != u]
    return {"user": [u for u, _ in rows], "item": [i for _, i in rows]}


@pytest.mark.parametrize("method", ["itemknn", "ease", "ials", "fcf"])
def test_learning_law_checkerboard(method: str) -> None:
    settings: Any = {"ease": {"lam": 1.0}, "ials": {"dim": 4, "reg": 0.1}, "fcf": {"dim": 4}}.get(method, {})
    model = FederatedRecommender(method, **settings).fit(checkerboard())
    top = model.recommend(k=1)
    assert top["item"].to_list() == top["user"].to_list()


def test_limits_and_settings_are_refused_clearly() -> None:
    with pytest.raises(SettingsError, match="mosaic and ials do without"):
        EASE().init(1_000_000, 0)
    with pytest.raises(SettingsError, match="setting lam of method ease: Input should be greater than 0"):
        registry.entry("ease").build({"lam": -1})


# HR@10 and NDCG@10 in percent under 1 + 99, then full-ranking HR@10: the figures of docs and README.
GOLDEN = {
    "popularity": (42.22, 22.89, 8.06),
    "itemknn": (49.63, 29.06, 10.18),
    "ials": (66.70, 37.87, 12.83),
    "ease": (66.28, 38.48, 12.94),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", GOLDEN)
def test_golden_numbers_on_ml100k(method: str, ml100k: Split, real_data: Path) -> None:
    """Made by `fedmosaic run METHOD ml-100k`."""
    result = FederatedRecommender(method).fit(ml100k).evaluate()
    assert result.sampled is not None
    found = (result.sampled.mean("hr", 10), result.sampled.mean("ndcg", 10), result.full.mean("hr", 10))
    assert [100 * f for f in found] == pytest.approx(GOLDEN[method], abs=0.25)
