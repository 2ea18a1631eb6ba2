"""Mosaic: the next item from sums over clients, in one round. A closed form with three terms.

    score(j) = x_u B_s[:, j]  +  taste · r_u B_e[:, j] / sqrt|r_u|  +  trend · T[j]

x_u is the history with weights that fall with age, r_u the history without, T recent popularity. B_s maps what stood
before an event to the event, by ridge regression; B_e is EASE. Both need nothing but sums over clients:

    A = sum x_t x_t'    C = sum x_t e_t'    B_s = (A + lam I)^-1 C
    G = sum r r'        P = (G + lam I)^-1  B_e = -P / diag P, with zeros on the diagonal

so one secure sum trains it (after a small one that counts events per item), a new user needs no training, and a
device scores from its own history. How a weight falls: by e in `window` moments and by e in `events` events; events of
one time are one moment, and their order among themselves is not known, so that sums are means over all orders they can
have. Without times B_s is left out, and the ranking is that of EASE.

How much taste, and how long a window, depends on what is asked: the very next item, or anything that comes later. So
by default devices score their held-out items under a few candidates, and the sums of those scores choose (`auto`).

Ours; the idea of a linear map between items is SLIM's and EASE's, one from earlier to later items SLIST's (Choi et al.,
WWW 2021).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics, by_rows

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
MAX_ITEMS = 15_000  # of the full form: beyond it, items x items matrices would not fit a laptop
WINDOWS = (3.0, 10.0)
TASTES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
RECENT = 0.1  # of the time that the data span: in it, what an event counts for the trend falls by e
USERS_AT_ONCE = 512


class Mosaic(ClosedForm):
    """Next items by sums: a small one that counts, and the one that trains."""

    rounds: int = Field(default=2, ge=2, le=2, description="sums over clients: first counts, then what follows what")
    lam: float = Field(default=300.0, gt=0, description="ridge penalty of what follows what")
    taste_lam: float = Field(default=300.0, gt=0, description="ridge penalty of what goes with what")
    window: float = Field(default=3.0, gt=0, description="moments in which a weight falls by e")
    events: float = Field(default=30.0, gt=0, description="events in which a weight falls by e")
    taste: float = Field(default=0.2, ge=0, description="weight of the whole history, whatever its order")
    trend: float = Field(default=0.0, ge=0, description="weight of recent popularity; who has no history has it alone")
    least: int = Field(default=3, ge=1, description="events that an item needs to predict others")
    auto: bool = Field(default=True, description="choose window and taste, where not given, by the devices' validation")

    def init(self, n_items: int, seed: int) -> State:
        """Nothing is known."""
        return {
            "sequence": np.zeros((len(self._windows), 0, n_items), np.float32),
            "co": np.zeros((0, 0), np.float32),
            "inputs": np.full(n_items, -1, np.int32),
            "recent": np.zeros(n_items, np.float32),
            "clock": np.zeros(2),
            "windows": np.array(self._windows),
            "taste": np.array([self.taste]),
        }

    @property
    def _windows(self) -> tuple[float, ...]:
        return WINDOWS if self.auto and "window" not in self.model_fields_set else (self.window,)

    @property
    def _tastes(self) -> tuple[float, ...]:
        return TASTES if self.auto and "taste" not in self.model_fields_set else (self.taste,)

    def start(self, data: TrainingSet, seed: int) -> State:
        """Before the first sum: when now is, and how far back the data go; a federation agrees on both."""
        state = dict(self.init(data.n_items, seed))
        if data.times is not None and data.times.size:
            state["clock"] = np.array([data.times.max(), max(data.times.max() - data.times.min(), 1)], np.float64)
        return state

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """First events per item, and those of late; then A and C for every window, and G."""
        from fedmosaic.methods.mosaic_sums import GRID, add_pairs, add_together

        values, offsets, times = histories.items.values, histories.items.offsets, histories.times
        m, inputs = histories.n_items, state["inputs"]
        if inputs.max(initial=-1) < 0:
            late = np.zeros(m)
            if times is not None:
                now, span = state["clock"]
                np.add.at(late, values, np.floor(np.exp(-(now - times) / (RECENT * span)) * GRID + 0.5) / GRID)
            return {"events": np.bincount(values, minlength=m).astype(np.float64), "late": late}
        k = int(inputs.max()) + 1
        distinct = histories.items.unique()
        found = {"together": np.zeros((k, k))}
        by_rows(k, partial(add_together, distinct.values, distinct.offsets, inputs, found["together"]))
        for window in state["windows"]:
            before, after = np.zeros((k, k)), np.zeros((k, m))
            if times is not None:
                decay = np.array([window, self.events])
                by_rows(k, partial(add_pairs, values, offsets, times, decay, inputs, before, after))
            found |= {f"before {window:g}": before, f"after {window:g}": after}
        return found

    def apply(self, state: State, total: Statistics) -> State:
        """Which items predict others; then two ridge regressions."""
        if "events" in total:
            some = total["events"] >= self.least
            if not some.any():  # too little of everything: all that was seen
                some = total["events"] > 0
            k = int(some.sum())
            if k > MAX_ITEMS:
                raise SettingsError(
                    f"mosaic solves systems of items x items; {k:,} items with {self.least} events or more would need "
                    f"{8 * k**2 / 2**30:.0f} GiB each (limit {MAX_ITEMS:,}). Raise `least`, or use ials"
                )
            inputs = np.where(some, np.cumsum(some) - 1, -1).astype(np.int32)
            recent = (total["late"] / max(total["late"].max(), 1e-9)).astype(np.float32)
            return {**state, "inputs": inputs, "recent": recent}
        windows = [f"{w:g}" for w in state["windows"]]
        sequence = [_solved(total.pop(f"before {w}"), total.pop(f"after {w}"), self.lam) for w in windows]
        return {**state, "sequence": np.stack(sequence), "co": _zero_diagonal(total["together"], self.taste_lam)}

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
        if histories.times is None or not state["co"].size:
            return np.zeros((len(histories), histories.n_items), np.float32)
        weights = self._weights(state, histories, window)
        x = _rows(state["inputs"][histories.items.values], histories.items.rows, weights, len(histories), state)
        return np.asarray(x @ state["sequence"][window])

    def _weights(self, state: State, histories: Histories, window: int) -> Any:
        """What every event weighs for the item that comes next."""
        from fedmosaic.methods.mosaic_sums import next_weights

        weights = np.empty(histories.items.values.size, np.float64)
        decay = np.array([state["windows"][window], self.events])
        next_weights(histories.items.offsets, histories.times, decay, weights)
        return weights

    def _taste(self, state: State, histories: Histories) -> F32:
        """r_u B_e / sqrt|r_u|."""
        distinct = histories.items.unique()
        sizes = np.sqrt(np.maximum(distinct.lengths, 1))
        weights = 1 / sizes[distinct.rows]
        found = np.zeros((len(histories), histories.n_items), np.float32)
        if not state["co"].size:
            return found
        r = _rows(state["inputs"][distinct.values], distinct.rows, weights, len(histories), state)
        found[:, state["inputs"] >= 0] = np.asarray(r @ state["co"])
        return found

    def _trend(self, state: State, histories: Histories) -> F32:
        """Popularity of late, for whoever has no history; for others as much of it as is asked for."""
        weight = np.where(histories.items.lengths > 0, self.trend, 1.0).astype(np.float32)
        return np.asarray(weight[:, None] * state["recent"])

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """What an event weighs now times B_s, and taste times B_e; the trend is nobody's."""
        places = state["inputs"][history.items.values]
        known, found = places >= 0, np.zeros(places.size, np.float32)
        if history.times is not None:
            found[known] = self._weights(state, history, 0)[known] * state["sequence"][0, places[known], item]
        if (place := state["inputs"][item]) >= 0:
            size = np.sqrt(max(history.items.unique().lengths[0], 1))
            found[known] += state["taste"][0] / size * state["co"][places[known], place]
        return found

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """How each item is predicted from what goes with it; items that predict nothing have zeros."""
        inputs = state["inputs"]
        found = np.zeros((inputs.size, state["co"].shape[0]), np.float32)
        found[inputs >= 0] = state["co"].T
        return found


def _rows(places: Any, rows: Any, weights: Any, users: int, state: State) -> Any:
    """Histories as a matrix of users x items that predict."""
    from scipy import sparse

    near = (weights > 0) & (places >= 0)
    shape = (users, state["co"].shape[0])
    return sparse.csr_array((weights[near].astype(np.float32), (rows[near], places[near])), shape=shape)


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
