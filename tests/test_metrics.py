"""Metrics: definitions, expected value under ties, chance, intervals, paired tests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from conftest import random_interactions
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmosaic.core.errors import ScoreError, UnknownNameError
from fedmosaic.data.negatives import draw_candidates
from fedmosaic.data.split import Split, ratio_split, time_split
from fedmosaic.evaluation.evaluate import evaluate, make_probe, rank_probe, top_items
from fedmosaic.evaluation.metrics import METRICS, Ranks, bootstrap, paired_test


def ranks(**columns: list[int]) -> Ranks:
    n = len(columns["above"])
    full = {"user": list(range(n)), "item": [0] * n, "tied": [0] * n, "candidates": [100] * n} | columns
    return Ranks(*(np.array(full[c], dtype=np.int32) for c in ("user", "item", "above", "tied", "candidates")))


def test_definitions_on_known_ranks() -> None:
    r = ranks(above=[0, 2, 10])
    assert r.mean("hr", 10) == pytest.approx(2 / 3)
    assert r.mean("ndcg", 10) == pytest.approx((1 + 1 / np.log2(4)) / 3)
    assert r.mean("mrr", 10) == pytest.approx((1 + 1 / 3) / 3)
    with pytest.raises(UnknownNameError, match="known: hr, recall, ndcg, mrr"):
        r.mean("auc", 10)


def brute_force(scores: list[int], relevant: list[int], k: int, name: str) -> float:
    """The metric averaged over every order that respects the scores."""
    values = []
    for order in itertools.permutations(range(len(scores))):
        if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
            continue
        places = sorted(order.index(r) + 1 for r in relevant)
        if name == "hr":
            values.append(float(places[0] <= k))
        elif name == "recall":
            values.append(sum(p <= k for p in places) / len(places))
        elif name == "mrr":
            values.append(1 / places[0] if places[0] <= k else 0.0)
        else:
            ideal = sum(1 / np.log2(i + 2) for i in range(min(k, len(places))))
            values.append(sum(1 / np.log2(p + 1) for p in places if p <= k) / ideal)
    return float(np.mean(values))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(1, 5), st.data())
def test_ties_are_the_mean_over_all_orders(scores: list[int], k: int, data: st.DataObject) -> None:
    relevant = sorted(data.draw(st.sets(st.integers(0, len(scores) - 1), min_size=1, max_size=3)))
    value = np.array(scores)
    r = ranks(
        user=[0] * len(relevant),
        item=relevant,
        above=[int((value > value[i]).sum()) for i in relevant],
        tied=[int((value == value[i]).sum()) - 1 for i in relevant],
        candidates=[len(scores)] * len(relevant),
    )
    for name in METRICS:
        assert r.mean(name, k) == pytest.approx(brute_force(scores, relevant, k, name)), name


class Constant:
    def __init__(self, items: int) -> None:
        self.items = items

    def scores(self, users: Any) -> Any:
        return np.zeros((users.size, self.items))


class Table:
    def __init__(self, table: Any) -> None:
        self.table = table

    def scores(self, users: Any) -> Any:
        return self.table[users]


def test_a_constant_scorer_gets_exactly_chance(small: Split) -> None:
    result = evaluate(Constant(small.n_items), small, "test", draw_candidates(small, 10))
    assert result.sampled is not None
    for found in (result.full, result.sampled):
        assert found.table() == found.chance().table()
    assert result.sampled.mean("hr", 1) == pytest.approx(np.mean(1 / result.sampled.candidates))


def test_an_oracle_gets_one_and_its_opposite_nothing(small: Split) -> None:
    table = np.random.default_rng(0).random((small.n_users, small.n_items))
    table[small.test.rows, small.test.values] = 2
    assert evaluate(Table(table), small).full.mean("ndcg", 5) == 1
    table[small.test.rows, small.test.values] = -1
    assert evaluate(Table(table), small).full.mean("hr", 20) == 0


@pytest.mark.parametrize("rule", [ratio_split, time_split])
def test_an_oracle_gets_one_with_several_held_out_items_too(rule: Any) -> None:
    split = rule(random_interactions(users=40, items=60, low=12, high=20))
    assert split.test.lengths.max() > 1
    table = np.random.default_rng(0).random((split.n_users, split.n_items))
    table[split.test.rows, split.test.values] += 2
    lists = draw_candidates(split, 9)
    result = evaluate(Table(table), split, "test", lists)
    assert result.sampled is not None
    for found in (result.full, result.sampled):
        for name in METRICS:
            assert found.mean(name, 20) == pytest.approx(1), name
    probe = make_probe(split, "test", lists)
    again = rank_probe(table[probe.rows, probe.values], probe, split.test)
    assert again.table() == result.sampled.table()


def test_blocks_do_not_change_results(small: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(1).integers(0, 5, (small.n_users, small.n_items)).astype(float)
    whole = evaluate(Table(table), small, "test", draw_candidates(small, 10)).summary()
    monkeypatch.setattr("fedmosaic.evaluation.evaluate.BLOCK_BYTES", 8 * small.n_items * 3)
    assert evaluate(Table(table), small, "test", draw_candidates(small, 10)).summary() == whole


def test_seen_items_are_not_candidates_and_validation_is_hidden_only_at_test(small: Split) -> None:
    table = np.zeros((small.n_users, small.n_items))
    table[small.train.rows, small.train.values] = 9
    table[small.validation.rows, small.validation.values] = 5
    table[small.test.rows, small.test.values] = 3
    assert evaluate(Table(table), small, "validation").full.mean("hr", 5) == 1
    assert evaluate(Table(table), small, "test").full.above.max() == 0
    table[small.test.rows, small.test.values] = 7
    assert evaluate(Table(table), small, "validation").full.above.min() == 1  # the test item is an ordinary candidate


def test_scores_that_cannot_be_ranked_are_refused(small: Split) -> None:
    table = np.zeros((small.n_users, small.n_items))
    table[3, 4] = np.nan
    with pytest.raises(ScoreError, match="user position 3 hold NaN"):
        evaluate(Table(table), small)
    with pytest.raises(ScoreError, match="expected"):
        evaluate(Constant(3), small)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(1, 6))
def test_top_items_is_a_stable_sort(rows: list[list[int]], k: int) -> None:
    scores = np.where(np.array(rows) == 0, -np.inf, np.array(rows, dtype=float))
    found = top_items(scores, k)
    for row, top in zip(scores, found, strict=True):
        best = [i for i in sorted(range(4), key=lambda i: (-row[i], i)) if np.isfinite(row[i])][:k]
        assert top.tolist() == best + [-1] * (min(k, 4) - len(best))


def test_groups_and_exposure(small: Split) -> None:
    result = evaluate(Table(np.random.default_rng(0).random((small.n_users, small.n_items))), small)
    groups = result.summary()["groups"]
    for group in groups.values():
        assert sum(g["n"] for g in group.values()) == result.full.user.size
    assert 0 < result.coverage <= 1
    popular = np.tile(result.popularity.astype(float), (small.n_users, 1))
    assert evaluate(Table(popular), small).popularity_bias > result.popularity_bias


def test_bootstrap_and_paired_test() -> None:
    rng = np.random.default_rng(0)
    a = rng.random(500)
    interval = bootstrap(a)
    assert interval.low < a.mean() < interval.high
    assert interval.high - interval.low == pytest.approx(4 * a.std() / np.sqrt(500), rel=0.15)
    better = paired_test(a + 0.05 + rng.normal(0, 0.1, 500), a)
    assert better.p < 0.01
    assert better.low > 0
    assert paired_test(a, a).p == 1
    assert paired_test(a + rng.normal(0, 0.1, 500), a).p > 0.01
    with pytest.raises(ValueError, match="different users"):
        paired_test(a, a[:-1])
