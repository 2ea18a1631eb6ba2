"""Splits: what is trained on, what selects, what is reported.

The order of a user's events decides what is held out. Two events at the same time are ordered by a hash of
(user id, item id), so the split does not depend on the order of the file; `ties="file"` reproduces published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys
from fedmosaic.core.errors import DataError, SettingsError
from fedmosaic.core.looks import Glance, Shown
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.histories import Histories

if TYPE_CHECKING:
    from fedmosaic.data.interactions import Interactions

Ties = Literal["hash", "file"]
Straddle = bool | Literal["once"]
Part = Literal["validation", "test"]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, repr=False)
class Split(Shown):
    """Item positions per user: training rows in order of time, validation, test; `counts` says what was set aside.

    >>> from fedmosaic.data.interactions import Interactions
    >>> shop = Interactions.from_frame({"user": [1] * 4, "item": [7, 8, 9, 5], "when": [4, 3, 2, 1]}, time="when")
    >>> s = leave_one_out(shop)
    >>> [shop.items.take(part[0]).to_list() for part in (s.train, s.validation, s.test)]
    [[5, 9], [8], [7]]
    """

    interactions: Interactions
    train: Ragged
    validation: Ragged
    test: Ragged
    rule: str
    counts: Mapping[str, int]
    times: Mapping[str, I64] = field(default_factory=dict)  # of "train", "validation", "test", beside their items

    def glance(self) -> Glance:
        """What is trained on, what chooses, what is reported."""
        parts = [("train", self.train), ("validation", self.validation), ("test", self.test)]
        rows = [(name, f"{part.values.size:,}", f"{int((part.lengths > 0).sum()):,}") for name, part in parts]
        return Glance(f"Split: {self.rule}", (), ("part", "events", "users"), rows)

    def held(self, part: Literal["train"] | Part) -> Histories:
        """A part of the users' histories, with times where they are known."""
        items = self.train if part == "train" else self.held_out(part)
        return Histories(items, self.n_items, self.times.get(part))

    @property
    def n_users(self) -> int:
        """Number of users, evaluated or not."""
        return len(self.train)

    @property
    def n_items(self) -> int:
        """Size of the catalogue."""
        return len(self.interactions.items)

    def held_out(self, part: Part) -> Ragged:
        """The held-out items of a part."""
        return self.validation if part == "validation" else self.test

    def seen(self, part: Part) -> Ragged:
        """What may not be recommended when a part is evaluated: training items; for the test, validation items too."""
        return self.train.unique() if part == "validation" else self.train.union(self.validation)


def leave_one_out(
    data: Interactions, *, ties: Ties = "hash", straddle: Straddle = False, validation: bool = True
) -> Split:
    """Last event of each user to test, the one before to validation, the rest to training.

    Without `validation` that event is trained on too, and nothing is left to select a round or a setting by; some
    papers do so. Users with fewer than three events are trained on and not evaluated. If repeated pairs were kept in
    `data`, training rows of a held-out pair are removed; `straddle=True` leaves them in, which is a leak and serves
    only to reproduce runs that had it; `straddle="once"` leaves them in too, and trains on every pair once.
    """
    order = _order(data, ties)
    user = data.user[order]
    lengths = np.bincount(user, minlength=len(data.users))
    from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(user.size)  # 1 = the user's last event
    enough = lengths[user] >= 3
    return _assemble(
        data,
        order,
        validation=enough & (from_end == 2) & validation,
        test=enough & (from_end == 1),
        rule=f"leave-one-out{'' if validation else ' without validation'}, ties by {ties}",
        straddle=straddle,
        counts={"users with fewer than 3 events, trained on only": int((lengths < 3).sum())},
    )


def time_split(data: Interactions, *, validation: float = 0.1, test: float = 0.1) -> Split:
    """One moment for everybody: the latest share of all events to test, the share before it to validation.

    No training event is newer than any held-out one, so nothing is learned from the future.
    """
    if data.time is None:
        raise DataError("a global time split needs times; this data has none. Use split=ratio or leave-one-out")
    _check_shares(validation, test)
    at = np.sort(data.time)
    to_validation = at[min(len(data) - 1, int(len(data) * (1 - validation - test)))]
    to_test = at[min(len(data) - 1, int(len(data) * (1 - test)))]
    later, latest = data.time >= to_validation, data.time >= to_test
    rule = f"global time, validation {validation:g}, test {test:g}"
    return _assemble(data, np.arange(len(data)), later & ~latest, latest, rule, straddle=False, counts={})


def ratio_split(
    data: Interactions,
    *,
    validation: float = 0.1,
    test: float = 0.2,
    order: Literal["time", "random"] = "time",
    seed: int = 0,
    ties: Ties = "hash",
) -> Split:
    """A share of each user's events to test and validation: the latest ones, or a keyed random choice."""
    _check_shares(validation, test)
    if order == "time":
        rows = _order(data, ties)
    else:
        key = keys.derive(seed=seed, purpose=keys.Purpose.SPLIT)
        rows = np.lexsort((keys.fold(key, data.tie_keys()), data.user))
    user = data.user[rows]
    lengths = np.bincount(user, minlength=len(data.users))
    place = np.arange(user.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    n_test = np.floor(lengths * test).astype(np.int64)
    n_held = n_test + np.floor(lengths * validation).astype(np.int64)
    in_test = place >= (lengths - n_test)[user]
    in_held = place >= (lengths - n_held)[user]
    rule = f"ratio per user by {order}, validation {validation:g}, test {test:g}"
    return _assemble(data, rows, in_held & ~in_test, in_test, rule, straddle=False, counts={})


def _order(data: Interactions, ties: Ties) -> I64:
    """Rows by (user, time, tie rule), earliest first."""
    if ties == "hash":
        return np.arange(len(data))  # the canonical order of Interactions
    if data.row is None:
        raise DataError("ties='file' needs the order of a file, and this data has none")
    if data.time is not None:
        # Published code ranks times downwards with ties in file order: of the latest events the first listed wins.
        return np.lexsort((-data.row, data.time, data.user))
    # Without times it calls the first appearance of an item in the file its time.
    first = np.full(len(data.items), np.iinfo(np.int64).max)
    np.minimum.at(first, data.item, data.row)
    return np.lexsort((-data.row, first[data.item], data.user))


def _assemble(
    data: Interactions,
    order: I64,
    validation: Bool,
    test: Bool,
    rule: str,
    *,
    straddle: Straddle,
    counts: dict[str, int],
) -> Split:
    user, item = data.user[order], data.item[order]
    train = ~(validation | test)
    pair = user.astype(np.int64) * len(data.items) + item
    if data.repeats and not straddle:
        repeated = validation & np.isin(pair, pair[test])
        validation = validation & ~repeated
        leaking = train & np.isin(pair, pair[validation | test])
        train = train & ~leaking
        counts["training rows removed because their pair is held out"] = int(leaking.sum())
    if straddle == "once":
        counts["repeats of training rows"] = int((train & ~_latest(pair, train)).sum())
        train = train & _latest(pair, train)
    if data.repeats:  # a pair is held out once, at its latest
        validation, test = (part & _latest(pair, part) for part in (validation, test))
    known = np.bincount(user[train], minlength=len(data.users))
    homeless = (validation | test) & (known[user] == 0)
    counts["held-out rows of users without training rows, not evaluated"] = int(homeless.sum())
    masks = {"train": train, "validation": validation & ~homeless, "test": test & ~homeless}
    trained, validated, tested = (Ragged.group(user[m], item[m], len(data.users)) for m in masks.values())
    times: dict[str, I64] = {}
    if data.time is not None:  # rows stand user by user, so that grouping them moved nothing
        times = {name: data.time[order][mask] for name, mask in masks.items()}
    counts["cold test items"] = int((~np.isin(tested.values, trained.values)).sum())
    if tested.values.size == 0:
        raise DataError("no user can be evaluated: every user has too few events for this split")
    return Split(
        data, trained, validated, tested, rule=rule, counts={k: v for k, v in counts.items() if v}, times=times
    )


def _latest(pair: I64, part: Bool) -> Bool:
    """Of the chosen rows of each pair, only the last."""
    rows = np.flatnonzero(part)[::-1]
    keep = np.zeros(pair.size, dtype=bool)
    keep[rows[np.unique(pair[rows], return_index=True)[1]]] = True
    return keep


def _check_shares(validation: float, test: float) -> None:
    if not (0 <= validation < 1 and 0 < test < 1 and validation + test < 1):
        raise SettingsError(f"shares must satisfy 0 <= validation, 0 < test, sum < 1; got {validation:g} and {test:g}")
