"""Splits and pools: what may be seen, what is held out, and draws that depend on keys alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import random_interactions
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmosaic.core import keys
from fedmosaic.core.errors import DataError, SettingsError, UnknownNameError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.negatives import draw_candidates, excluded_items, sample_negatives
from fedmosaic.data.split import Split, leave_one_out, ratio_split, time_split


def pairs(part: Ragged) -> set[tuple[int, int]]:
    return set(zip(part.rows.tolist(), part.values.tolist(), strict=True))


def times_of(split: Split, part: Ragged) -> dict[tuple[int, int], int]:
    data = split.interactions
    assert data.time is not None
    when = dict(zip(zip(data.user.tolist(), data.item.tolist(), strict=True), data.time.tolist(), strict=True))
    return {p: when[p] for p in pairs(part)}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([leave_one_out, time_split, ratio_split]))
def test_parts_are_disjoint_and_complete(seed: int, rule: Any) -> None:
    data = random_interactions(users=12, items=20, seed=seed, low=1, high=8)
    split = rule(data)
    parts = [pairs(p) for p in (split.train, split.validation, split.test)]
    assert len(parts[0] | parts[1] | parts[2]) == sum(map(len, parts))
    everything = set(zip(data.user.tolist(), data.item.tolist(), strict=True))
    missing = everything - parts[0] - parts[1] - parts[2]
    assert len(missing) == split.counts.get("held-out rows of users without training rows, not evaluated", 0)


def test_leave_one_out_holds_out_the_latest(small: Split) -> None:
    for user in range(small.n_users):
        assert small.test.lengths[user] == small.validation.lengths[user] == 1
    train, validation, test = (times_of(small, p) for p in (small.train, small.validation, small.test))
    for (user, _), when in test.items():
        before = [t for (u, _), t in validation.items() if u == user]
        assert when >= before[0] >= max(t for (u, _), t in train.items() if u == user)


def test_users_with_fewer_than_three_events_are_trained_on_and_counted() -> None:
    data = Interactions.from_frame({"user": [1, 1, 2, 2, 2], "item": [1, 2, 1, 2, 3]})
    split = leave_one_out(data)
    assert split.train.lengths.tolist() == [2, 1]
    assert split.test.lengths.tolist() == [0, 1]
    assert split.counts["users with fewer than 3 events, trained on only"] == 1
    with pytest.raises(DataError, match="no user can be evaluated"):
        leave_one_out(Interactions.from_frame({"user": [1, 2], "item": [1, 2]}))


def test_ties_file_takes_the_first_listed_of_the_latest() -> None:
    data = Interactions.from_frame({"user": ["u"] * 4, "item": ["a", "b", "c", "d"], "time": [1, 9, 9, 9]}, time="time")
    split = leave_one_out(data, ties="file")
    names = [data.items.take(p[0]).to_list() for p in (split.train, split.validation, split.test)]
    assert names == [["a", "d"], ["c"], ["b"]]


def test_untimed_ties_file_orders_by_first_appearance_of_the_item() -> None:
    data = Interactions.from_frame({"user": ["x", "y", "y", "y", "x", "x"], "item": ["c", "a", "b", "c", "b", "a"]})
    split = leave_one_out(data, ties="file")  # c, then a, then b appeared first in the file
    assert data.items.take(split.test.values).to_list() == ["b", "b"]
    assert data.items.take(split.validation.values).to_list() == ["a", "a"]


def test_hash_ties_favour_no_place_in_the_file_and_no_small_id() -> None:
    users, items = 400, 10
    data = Interactions.from_frame({"user": np.repeat(range(users), items), "item": np.tile(range(items), users)})
    held = np.bincount(leave_one_out(data).test.values, minlength=items)
    assert held.min() > users / items / 2  # uniform would be 40 each


def test_integer_and_text_ids_give_the_same_split() -> None:
    numbers = random_interactions(seed=5)
    frame = {"user": numbers.users.take(numbers.user).cast(str), "item": numbers.items.take(numbers.item).cast(str)}
    text = Interactions.from_frame({**frame, "time": numbers.time}, time="time")
    held = [d.items.take(leave_one_out(d).test.values).cast(int).to_list() for d in (numbers, text)]
    order = [d.users.ids.cast(int).to_list() for d in (numbers, text)]
    assert dict(zip(order[0], held[0], strict=True)) == dict(zip(order[1], held[1], strict=True))


def test_kept_duplicates_never_straddle_unless_asked() -> None:
    frame = {"user": [1] * 6, "item": [5, 6, 7, 5, 7, 5], "time": [1, 2, 3, 4, 5, 6]}
    data = Interactions.from_frame(frame, time="time", duplicates="keep")
    honest, leaky = leave_one_out(data), leave_one_out(data, straddle=True)
    assert not pairs(honest.train) & (pairs(honest.test) | pairs(honest.validation))
    assert honest.counts["training rows removed because their pair is held out"] == 3
    assert pairs(leaky.train) & pairs(leaky.test)


def test_time_split_trains_on_nothing_newer_than_what_it_holds_out() -> None:
    split = time_split(random_interactions(users=60, seed=2))
    newest = max(times_of(split, split.train).values())
    assert newest <= min(times_of(split, split.validation).values()) <= min(times_of(split, split.test).values())
    with pytest.raises(DataError, match="needs times"):
        time_split(Interactions.from_frame({"user": [1, 1], "item": [1, 2]}))
    with pytest.raises(SettingsError, match="sum < 1"):
        ratio_split(random_interactions(), validation=0.6, test=0.6)


def test_ratio_split_random_is_keyed() -> None:
    data = random_interactions(seed=3)
    same = [ratio_split(data, order="random", seed=1).test.values.tolist() for _ in range(2)]
    assert same[0] == same[1] != ratio_split(data, order="random", seed=2).test.values.tolist()


# --- pools -----------------------------------------------------------------------------------------------------


def test_leak_law_strict_pool_does_not_depend_on_held_out_items(small: Split) -> None:
    strict = excluded_items(small, "strict")
    for user in range(small.n_users):
        assert small.test[user][0] not in strict[user]
        assert small.validation[user][0] not in strict[user]
    other = Split(small.interactions, small.train, small.test, small.validation, "swapped", {})
    assert excluded_items(other, "strict").values.tolist() == strict.values.tolist()


def test_legacy_and_isolated_exclude_what_they_say(small: Split) -> None:
    lists = draw_candidates(small, 5)
    legacy, isolated = excluded_items(small, "legacy"), excluded_items(small, "isolated", lists)
    for user in range(small.n_users):
        history = {*small.train[user], *small.validation[user], *small.test[user]}
        assert set(legacy[user]) == history
        assert set(isolated[user]) == history | {*lists.validation[user], *lists.test[user]}
    with pytest.raises(UnknownNameError, match="strict, legacy, isolated"):
        excluded_items(small, "sloppy")  # type: ignore[arg-type]


def slow_twin(excluded: Ragged, counts: Any, n_items: int, seed: int, round: int) -> list[list[int]]:
    """One user, one slot at a time, in plain NumPy."""
    result = []
    for user in range(len(excluded)):
        pool = np.setdiff1d(np.arange(n_items), excluded[user])
        key = keys.derive(seed=seed, purpose=keys.Purpose.NEGATIVES, round=round, client=user)
        draws = keys.draws(key, int(counts[user]) if pool.size else 0)
        result.append([int(pool[r]) for r in keys.below(draws, pool.size)] if pool.size else [])
    return result


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_sampling_equals_its_slow_twin(data: st.DataObject) -> None:
    n_items = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.sets(st.integers(0, n_items - 1)), min_size=1, max_size=5))
    excluded = Ragged.from_rows([sorted(r) for r in rows])
    counts = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows))))
    seed, round = data.draw(st.integers(0, 2**62)), data.draw(st.integers(0, 100))
    drawn = sample_negatives(excluded, counts, n_items, seed=seed, round=round)
    assert [row.tolist() for row in drawn] == slow_twin(excluded, counts, n_items, seed, round)


def test_negatives_are_uniform_over_the_pool() -> None:
    excluded = Ragged.from_rows([[0, 3, 4, 9]])
    drawn = np.bincount(sample_negatives(excluded, np.array([60_000]), 10, seed=1, round=1).values, minlength=10)
    assert drawn[[0, 3, 4, 9]].sum() == 0
    rest = drawn[[1, 2, 5, 6, 7, 8]]
    assert ((rest - 10_000) ** 2 / 10_000).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001


def test_candidates_are_frozen_distinct_unseen_and_disjoint(small: Split) -> None:
    lists = draw_candidates(small, 10)
    again = draw_candidates(small, 10)
    assert lists.test.values.tolist() == again.test.values.tolist()
    history = small.train.union(small.validation, small.test)
    for user in range(small.n_users):
        both = [*lists.validation[user], *lists.test[user]]
        assert len(set(both)) == len(both)
        assert not set(both) & set(history[user])
        unseen = small.n_items - history.lengths[user]
        assert len(both) == min(20, unseen)
    assert lists.short == int((small.n_items - history.lengths < 20).sum())


def test_keys_do_not_collide_and_purposes_are_apart() -> None:
    made = np.concatenate(
        [
            keys.derive(seed=s, purpose=p, round=r, client=np.arange(200))
            for s in (0, 1)
            for p in keys.Purpose
            for r in (0, 1)
        ]
    )
    assert np.unique(made).size == made.size
    uniform = keys.uniform(keys.draws(made[0], 100_000))
    assert abs(uniform.mean() - 0.5) < 0.005
    assert keys.draws(made[0], 5, start=3).tolist() == keys.draws(made[0], 8)[3:].tolist()
