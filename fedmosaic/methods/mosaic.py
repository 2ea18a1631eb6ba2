"""Mosaic: the next item from sums over clients, in one round. A closed form with three terms.

    score(j) = x_u B_s[:, j]  +  taste · r_u B_e[:, j] / sqrt|r_u|  +  trend · T[now, j]

x_u is the history with weights that fall with age, r_u the history without, T recent popularity. B_s maps what stood
before an event to the event, by ridge regression; B_e is EASE. Both need nothing but sums over clients:

    A = sum x_t x_t'   C = sum x_t e_t'   B_s = (A + lam I)^-1 C     G = sum r r'   P = (G + lam I)^-1   B_e = -P / diag P

so one round of a secure sum trains it, a new user needs no training, and a device scores from its own history. How a
weight falls: by e in `window` moments and by e in `events` events; events of one time are one moment, and their
order among themselves is not known, so that sums are means over all orders they can have. Without times B_s is
left out, and the ranking is that of EASE.

How much taste, and how long a window, depends on what is asked: the very next item, or anything that comes later. So
by default devices score their held-out items under a few candidates, and the sums of those scores choose (`auto`).

Ours; the idea of a linear map between items is SLIM's and EASE's, one from earlier to later items SLIST's (Choi et al.,
WWW 2021).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.core.threads import deal, thread_count
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
MAX_ITEMS = 15_000  # of the full form: beyond it, items x items matrices would not fit a laptop
WINDOWS = (3.0, 10.0)
TASTES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
PERIODS = 100  # of equal numbers of events
FADING = 0.9  # of popularity, from one period to the next
USERS_AT_ONCE = 512


class Mosaic(ClosedForm):
    """Next items by sums."""

    lam: float = Field(default=300.0, gt=0, description="ridge penalty of what follows what")
    taste_lam: float = Field(default=300.0, gt=0, description="ridge penalty of what goes with what")
    window: float = Field(default=3.0, gt=0, description="moments in which a weight falls by e")
    events: float = Field(default=30.0, gt=0, description="events in which a weight falls by e")
    taste: float = Field(default=0.2, ge=0, description="weight of the whole history, whatever its order")
    trend: float = Field(
        default=0.0, ge=0, description="weight of recent popularity; users without a history have it alone"
    )
    auto: bool = Field(default=True, description="choose window and taste, where not given, by the devices' validation")

    STATE: ClassVar = ("sequence", "windows", "co", "trend", "edges", "taste")

    def init(self, n_items: int, seed: int) -> State:
        """Nothing is known; refused where the matrices would not fit."""
        if n_items > MAX_ITEMS:
            raise SettingsError(
                f"mosaic solves items x items systems; {n_items:,} items would need {8 * n_items**2 / 2**30:.0f} GiB "
                f"each (limit {MAX_ITEMS:,} items). Use ials instead"
            )
        windows = np.array(self._windows)
        return {
            "sequence": np.zeros((windows.size, n_items, n_items), np.float32),
            "windows": windows,
            "co": np.zeros((n_items, n_items), np.float32),
            "trend": np.zeros((PERIODS, n_items), np.float32),
            "edges": np.zeros(PERIODS - 1, np.int64),
            "taste": np.array([self.taste]),
        }

    @property
    def _windows(self) -> tuple[float, ...]:
        return WINDOWS if self.auto and "window" not in self.model_fields_set else (self.window,)

    @property
    def _tastes(self) -> tuple[float, ...]:
        return TASTES if self.auto and "taste" not in self.model_fields_set else (self.taste,)

    def start(self, data: TrainingSet, seed: int) -> State:
        """State before the round: where the periods of the trend begin and end."""
        state = dict(self.init(data.n_items, seed))
        if data.times is not None and data.times.size:
            state["edges"] = np.quantile(data.times, np.arange(1, PERIODS) / PERIODS).astype(np.int64)
        return state

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """A and C for every window, G, and events per period and item."""
        from fedmosaic.methods.mosaic_sums import add_pairs, add_together

        m, windows = histories.n_items, state["windows"]
        values, offsets = histories.items.values, histories.items.offsets
        found = {name: np.zeros((windows.size, m, m)) for name in ("before", "after")}
        found |= {"together": np.zeros((m, m)), "events": np.zeros((PERIODS, m))}
        distinct = histories.items.unique()
        _by_rows(m, lambda low, high: add_together(distinct.values, distinct.offsets, found["together"], low, high))
        if histories.times is not None:
            times = histories.times
            for at, window in enumerate(windows):
                decay, pair = np.array([window, self.events]), (found["before"][at], found["after"][at])
                _by_rows(m, lambda low, high: add_pairs(values, offsets, times, decay, *pair, low, high))  # noqa: B023
            np.add.at(found["events"], (np.searchsorted(state["edges"], times, side="right"), values), 1)
        return found

    def apply(self, state: State, total: Statistics) -> State:
        """Two ridge regressions, and popularity that fades."""
        sequence = np.stack([_solved(a, c, self.lam) for a, c in zip(total["before"], total["after"], strict=True)])
        trend = np.zeros_like(total["events"])
        for period in range(PERIODS):
            trend[period] = total["events"][period] + (FADING * trend[period - 1] if period else 0)
        most = np.maximum(trend.max(1, keepdims=True), 1)
        return {
            **state,
            "sequence": sequence,
            "co": _zero_diagonal(total["together"], self.taste_lam),
            "trend": (trend / most).astype(np.float32),
        }

    def choose(self, data: TrainingSet, state: State, held_out: Ragged) -> State:
        """The window and the taste under which the devices' held-out items have the best NDCG@10, all items ranked."""
        from fedmosaic.evaluation.evaluate import rank_unseen

        users = np.flatnonzero(held_out.lengths > 0)
        tried = [(w, t) for w in range(state["windows"].size) for t in self._tastes]
        gains = np.zeros(len(tried))
        for begin in range(0, users.size, USERS_AT_ONCE) if len(tried) > 1 else ():
            some = users[begin : begin + USERS_AT_ONCE]
            held = data.held.take(some)
            taste, trend = self._taste(state, held), self._trend(state, held)
            sequences = [self._sequence(state, held, w) for w in range(state["windows"].size)]
            for at, (w, weight) in enumerate(tried):
                scores = sequences[w] + np.float32(weight) * taste + trend
                gains[at] += rank_unseen(scores, held_out.take(some), held.items).per_user("ndcg", 10).sum()
        window, weight = tried[int(np.argmax(gains))] if len(tried) > 1 else (0, self._tastes[0])
        return {
            **state,
            "sequence": state["sequence"][window : window + 1],
            "windows": state["windows"][window : window + 1],
            "taste": np.array([weight]),
        }

    def scores(self, state: State, histories: Histories) -> Scores:
        """The three terms; a user without a history has the trend alone."""
        taste = np.float32(state["taste"][0]) * self._taste(state, histories)
        return self._sequence(state, histories, 0) + taste + self._trend(state, histories)

    def _sequence(self, state: State, histories: Histories, window: int) -> F32:
        """x_u B_s."""
        if histories.times is None:
            return np.zeros((len(histories), histories.n_items), np.float32)
        from scipy import sparse

        from fedmosaic.methods.mosaic_sums import next_weights

        weights = np.empty(histories.items.values.size, np.float64)
        decay = np.array([state["windows"][window], self.events])
        next_weights(histories.items.offsets, histories.times, decay, weights)
        near = weights > 0
        x = sparse.csr_array(
            (weights[near].astype(np.float32), (histories.items.rows[near], histories.items.values[near])),
            shape=(len(histories), histories.n_items),
        )
        return np.asarray(x @ state["sequence"][window])

    def _taste(self, state: State, histories: Histories) -> F32:
        """r_u B_e / sqrt|r_u|."""
        held = histories.csr
        sizes = np.sqrt(np.maximum(np.diff(held.indptr), 1)).astype(np.float32)
        return np.asarray(held @ state["co"] / sizes[:, None])

    def _trend(self, state: State, histories: Histories) -> F32:
        """Recent popularity at the time of a user's last event; for a user without any, that of the last period."""
        if histories.times is None:
            return np.zeros((1, histories.n_items), np.float32)
        offsets = histories.items.offsets
        period, weight = np.full(len(histories), PERIODS - 1), np.ones((len(histories), 1), np.float32)
        some = histories.items.lengths > 0
        if some.all() and not self.trend:
            return np.zeros((1, histories.n_items), np.float32)
        last = histories.times[offsets[1:][some] - 1]
        period[some], weight[some] = np.searchsorted(state["edges"], last, side="right"), self.trend
        return np.asarray(weight * state["trend"][period])

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """How each item is predicted from what goes with it."""
        columns: npt.NDArray[np.floating] = state["co"].T
        return columns


def _by_rows(m: int, work: Any) -> None:
    """Work on rows low ... high of a matrix, dealt to threads: each walks all events and adds only to its own rows."""
    workers = thread_count()
    cuts = np.linspace(0, m, workers + 1).astype(np.int64)
    deal(lambda worker: work(cuts[worker], cuts[worker + 1]), workers)


def _solved(a: F64, c: F64, lam: float) -> F32:
    """(A + lam I)^-1 C, in float32."""
    from scipy import linalg

    if not c.any():
        return np.zeros(c.shape, np.float32)
    left = a.astype(np.float32)
    left[np.diag_indices_from(left)] += np.float32(lam)
    factor = linalg.cho_factor(left, lower=True, overwrite_a=True, check_finite=False)
    right = np.asfortranarray(c, dtype=np.float32)
    found: F32 = linalg.cho_solve(factor, right, overwrite_b=True, check_finite=False)
    return np.ascontiguousarray(found)


def _zero_diagonal(g: F64, lam: float) -> F32:
    """B = -P / diag P with a diagonal of zeros, P = (G + lam I)^-1: EASE."""
    from scipy.linalg import lapack

    left = np.asfortranarray(g, dtype=np.float32)
    left[np.diag_indices_from(left)] += np.float32(lam)
    factor, wrong = lapack.spotrf(left, lower=1, overwrite_a=1)
    inverse, failed = lapack.spotri(factor, lower=1, overwrite_c=1)
    if wrong or failed:
        raise SettingsError(f"the sums cannot be inverted with a penalty of {lam:g}; use a larger one")
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    weights = np.ascontiguousarray(-inverse / np.diag(inverse))
    np.fill_diagonal(weights, 0)
    return weights


METHODS = (
    Entry(
        "mosaic",
        "Next items by sums over clients, in one round: order, taste and trend",
        "ours; docs/mosaic.md",
        Mosaic,
    ),
)
