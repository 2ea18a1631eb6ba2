"""Mosaic: the next item from sums over clients, in one round. A closed form with three terms.

    score(j) = x_u B_s[:, j]  +  taste · r_u B_e[:, j] / sqrt|r_u|  +  trend · T[j]

x_u is the history with weights that fall with age, r_u the history without, T recent popularity. B_s maps what stood
before an event to the event, by ridge regression; B_e is EASE. Both need nothing but sums over clients:

    A = sum x_t x_t'    C = sum x_t e_t'    B_s = (A + lam I)^-1 C
    G = sum r r'        P = (G + lam I)^-1  B_e = -P / diag P, with zeros on the diagonal

so one secure sum trains it (after a small one that counts events per item), a new user needs no training, and a
device scores from its own history. Where the sums would not fit, the same follows from r numbers per item in a few more
rounds (`factored.py`). For large data `features=` adds one more sum, with which events of a history speak together
(`features.py`). How a weight falls: by e in `window` moments and by e in `events` events; events of
one time are one moment, and their order among themselves is not known, so that sums are means over all orders they can
have. Without times B_s is left out, and the ranking is that of EASE.

How much taste and trend, and how long a window, depends on what is asked: the very next item, or anything that comes
later. So by default devices score their held-out items under a few candidates, and the sums of those scores choose
(`auto`): window and taste first, then the trend.

Ours; the idea of a linear map between items is SLIM's and EASE's, one from earlier to later items SLIST's (Choi et al.,
WWW 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import Scores, State, Statistics
from fedmosaic.methods.mosaic import factored, features, full, gate, private
from fedmosaic.methods.mosaic.gate import Candidate
from fedmosaic.methods.private_release import PrivateRelease

F32 = npt.NDArray[np.float32]
LARGEST = 4 << 30  # bytes of the full form's sums: about 10,000 items
RANK = 256  # beyond that
WINDOWS = (3.0, 10.0)
TASTES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TRENDS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
RECENT = 0.1  # of the time that the data span: in it, what an event counts for the trend falls by e
USERS_AT_ONCE = 512
CHOOSERS = 10_000  # devices whose validation chooses; more would tell no more


class Mosaic(PrivateRelease):
    """Next items by sums: a small one that counts, and the one that trains; a factored form asks a few times more."""

    CLIENTS_AT_ONCE: ClassVar[int | None] = None  # its sums have no array of clients x items

    rounds: int = Field(
        default=4, ge=2, description="at most: counts, bases of a factored form, the sums that train; the full form: 2"
    )
    lam: float = Field(default=300.0, gt=0, description="ridge penalty of what follows what")
    taste_lam: float = Field(default=300.0, gt=0, description="ridge penalty of what goes with what")
    window: float = Field(default=3.0, gt=0, description="moments in which a weight falls by e")
    events: float = Field(default=30.0, gt=0, description="events in which a weight falls by e")
    taste: float = Field(default=0.2, ge=0, description="weight of the whole history, whatever its order")
    trend: float = Field(default=0.0, ge=0, description="weight of recent popularity; who has no history has it alone")
    least: int = Field(default=3, ge=1, description="events that an item needs to predict others")
    rank: int | None = Field(
        default=None, ge=1, description=f"numbers per item; not said: one per pair where sums fit, else {RANK}"
    )
    features: int = Field(
        default=0,
        ge=0,
        description="random features of histories as further inputs, one more sum; 1000 to 3000 pay "
        "for themselves from about a million events on",
    )
    folds: int = Field(
        default=0,
        ge=0,
        description="models for the private gate, each unseen by a part of the clients; 0: no gate, "
        "all have the weights that suit most; 4 are enough",
    )
    most: int = Field(default=400, ge=2, description="items that predict others under an epsilon")
    auto: bool = Field(default=True, description="choose window, taste and trend, where not given, by validation")

    @model_validator(mode="after")
    def _additions_are_of_the_full_form(self) -> Mosaic:
        wants = "features" if self.features else "folds" if self.folds else None
        given = {"rank": self.rank, "epsilon": self.epsilon, "folds": self.folds if self.features else None}
        other = next((name for name, value in given.items() if value), None)
        if wants and other:
            raise ValueError(f"{wants}= needs the full form without noise; leave {other}= out, or {wants}=")
        if self.folds == 1:
            raise ValueError("one fold leaves nobody who has not seen it; folds= are at least 2")
        if self.features and self.rounds < 3:
            raise ValueError("features= takes three rounds")
        return self

    def init(self, n_items: int, seed: int) -> State:
        """Nothing is known."""
        return {
            "stage": np.zeros(1, np.int64),  # sums that were taken in
            "sequence": np.zeros((len(self._windows), 0, n_items), np.float32),
            "basis": np.zeros((0, 0), np.float32),  # of what follows what; none: every item by itself
            "co": np.zeros((0, 0), np.float32),
            "taste_basis": np.zeros((0, 0), np.float32),  # of what goes with what
            "inputs": np.full(n_items, -1, np.int32),
            "events": np.zeros(n_items),
            "recent": np.zeros(n_items, np.float32),
            "clock": np.zeros(2),
            "windows": np.array(self._windows),  # of every candidate
            "vectors": np.zeros((0, 0), np.float32),  # of items, that features read
            "lifted": np.zeros((0, n_items), np.float32),  # weights of features, of the last candidate
            "fold_sequence": np.zeros((0, len(self._windows), 0, n_items), np.float32),  # of the private gate
            "fold_co": np.zeros((0, 0, 0), np.float32),
            "tried": np.zeros((0, 3)),  # its candidates: window, taste, trend
            "prior": np.zeros(0),  # and how good they are for everybody
            "before": np.zeros((0, 0), np.float32),  # sums that the features' round needs again
            "after": np.zeros((0, 0), np.float32),
            "taste": np.array([self.taste]),
            "trend": np.array([self.trend]),
        }

    @property
    def _chooses(self) -> bool:
        return self.auto and self.epsilon is None  # scores of devices are not covered by an epsilon

    def _candidates(self, name: str, tried: tuple[float, ...]) -> tuple[float, ...]:
        """Those to choose from: what was said, if it was."""
        return tried if self._chooses and name not in self.model_fields_set else (getattr(self, name),)

    @property
    def _windows(self) -> tuple[float, ...]:
        return self._candidates("window", WINDOWS)

    def start(self, data: TrainingSet, seed: int) -> State:
        """Before the first sum: when now is, and how far back the data go; a federation agrees on both."""
        state = dict(self.init(data.n_items, seed))
        if data.times is not None and data.times.size and self.epsilon is None:  # else it would be published
            state["clock"] = np.array([data.times.max(), max(data.times.max() - data.times.min(), 1)], np.float64)
        return state

    def done(self, state: State) -> bool:
        """The full form has its sums after two rounds, with features after three, a factored one after all."""
        return self._last(state, 0)

    def _last(self, state: State, ahead: int) -> bool:
        """Whether a round ahead of this state would be the last."""
        needed = self.rounds if state["taste_basis"].size else 3 if self.features else 2
        return int(state["stage"][0]) + ahead >= needed

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """First events per item, and those of late; then what the form needs."""
        if self.epsilon is not None:
            return private.sums(state, histories, self.events) if state["stage"][0] else private.counts(histories)
        if not state["stage"][0]:
            return self._counts(state, histories)
        if state["taste_basis"].size:
            return factored.sums(state, histories, self.events, last=self._last(state, 1))
        if state["vectors"].size:
            return features.sums(state, histories, self.events, self.features)
        if self.folds:
            return gate.sums(state, histories, self.events, self.folds)
        return full.sums(state, histories, self.events)

    def _counts(self, state: State, histories: Histories) -> Statistics:
        from fedmosaic.methods.mosaic.pairs import GRID

        events = np.bincount(histories.items.values, minlength=histories.n_items).astype(np.float64)
        if histories.times is None:
            return {"events": events, "late": events}
        now, span = state["clock"]
        weights = np.exp(-(now - histories.times) / (RECENT * span))
        late = np.zeros(histories.n_items)
        np.add.at(late, histories.items.values, np.floor(weights * GRID + 0.5) / GRID)
        return {"events": events, "late": late}

    def apply(self, state: State, total: Statistics) -> State:
        """Which items predict others, and in which form; then what the form makes of its sums."""
        state = {**state, "stage": state["stage"] + 1}
        if self.epsilon is not None:
            if "events" in total:
                return private.begun(state, total, self.most)
            return private.solved(state, total, self.deviation(1 - private.COUNTS))
        if "events" in total:
            return self._begun(state, total)
        if "features" in total:
            return features.solved(state, total, self.lam)
        if self.folds:
            return gate.solved(state, total, self.lam, self.taste_lam)
        if not state["taste_basis"].size:
            begun = features.begun(state, total) if self.features else state
            return full.solved(begun, total, self.lam, self.taste_lam)
        if not self.done(state):
            return factored.better_bases(state, total)
        return factored.solved(state, total, self.lam, self.taste_lam)

    def _begun(self, state: State, total: Statistics) -> State:
        some = total["events"] >= self.least
        if not some.any():  # too little of everything: all that was seen
            some = total["events"] > 0
        k, m, windows = int(some.sum()), some.size, len(self._windows)
        state = {
            **state,
            "inputs": np.where(some, np.cumsum(some) - 1, -1).astype(np.int32),
            "events": total["events"],
            "recent": (total["late"] / max(total["late"].max(), 1e-9)).astype(np.float32),
        }
        size = 8 * (k + self.features) * (windows * (k + self.features + m) + k) * max(self.folds, 1)
        if self.rank is None and size <= LARGEST:
            return state
        if self.features or self.folds:
            name = "features" if self.features else "folds"
            raise SettingsError(
                f"{name}= stands beside sums of pairs of items, and those of {m:,} items would take "
                f"{size / 2**30:.1f} GiB with {name}={getattr(self, name)} (limit {LARGEST / 2**30:.3g}); use fewer"
            )
        return factored.first_bases(state, self.rank or RANK)

    def budget_share(self, round: int) -> float:
        """Counts take little of an epsilon."""
        return private.COUNTS if round == 1 else 1 - private.COUNTS

    def choose(self, data: TrainingSet, state: State, held_out: Ragged) -> State:
        """The weights under which the devices' held-out items have the best NDCG@10, all items ranked.

        Window and taste first, then the trend: two sums of a few scores; a third says how good each of them is, where
        devices choose for themselves.
        """
        users = np.flatnonzero(held_out.lengths > 0)
        users = users[:: -(-users.size // CHOOSERS)] if users.size else users
        tastes = self._candidates("taste", TASTES)
        trends = self._candidates("trend", TRENDS) if state["clock"][1] else (self.trend,)  # none without times
        places = range(state["windows"].size)

        def gains(tried: list[Candidate], cut: int = 10) -> npt.NDArray[np.float64]:
            found = np.zeros(len(tried))
            for begin in range(0, users.size, USERS_AT_ONCE) if len(tried) > 1 else ():
                some = users[begin : begin + USERS_AT_ONCE]
                found += self.judged(state, data.held.take(some), held_out.take(some), tried, cut).sum(axis=0)
            return found

        tried = [(window, taste, self.trend) for window in places for taste in tastes]
        window, taste, _ = tried[int(np.argmax(gains(tried)))]  # the first of equals
        tried = [(window, taste, trend) for trend in trends]
        trend = tried[int(np.argmax(gains(tried)))][2]
        chosen = {**state, "taste": np.array([taste]), "trend": np.array([trend])}
        if self.folds:
            every = [(w, t, trend) for w in places for t in tastes]
            prior = gains(every, data.n_items) / max(users.size, 1)
            return {**chosen, "tried": np.array(every), "prior": prior}
        featured = state["lifted"].size > 0 and window == state["windows"].size - 1
        return {
            **chosen,
            "sequence": state["sequence"][window : window + 1],
            "windows": state["windows"][window : window + 1],
            "lifted": state["lifted"] if featured else state["lifted"][:0],
        }

    def judged(
        self, state: State, held: Histories, events: Ragged, tried: Sequence[Candidate], cut: int
    ) -> npt.NDArray[np.float64]:
        """NDCG at a cut of what came after every history, under every candidate."""
        from fedmosaic.evaluation.evaluate import rank_unseen

        taste = self.taste_scores(state, held)
        orders = {w: self.order_scores(state, held, w) for w in {w for w, _, _ in tried}}
        found = np.empty((len(held), len(tried)))
        for at, (window, weight, trend) in enumerate(tried):
            scores = orders[window] + np.float32(weight) * taste + self.trend_scores(state, held, trend)
            found[:, at] = rank_unseen(scores, events, held.items).per_user("ndcg", cut)
        return found

    def scores(self, state: State, histories: Histories) -> Scores:
        """The three terms; a user without a history has the trend alone."""
        if state["tried"].size:
            return gate.scores(self, state, histories)
        order = self.order_scores(state, histories, self._place(state))
        taste = np.float32(state["taste"][0]) * self.taste_scores(state, histories)
        return order + taste + self.trend_scores(state, histories, state["trend"])

    def _place(self, state: State) -> int:
        """Which candidate answers where none was chosen: the first window, with features if there are any."""
        return state["windows"].size - 1 if state["lifted"].size else 0

    def order_scores(self, state: State, histories: Histories, window: int) -> F32:
        """x_u B_s; the last candidate has features, where there are any."""
        if histories.times is None or not state["sequence"].size:
            return np.zeros((len(histories), histories.n_items), np.float32)
        weights = self._weights(state, histories, window)
        x = _rows(state["inputs"][histories.items.values], histories.items.rows, weights, len(histories), state)
        found = np.asarray(_within(x, state["basis"]) @ state["sequence"][window])
        if state["lifted"].size and window == state["windows"].size - 1:
            found += features.scores(state, histories, self.events)
        return found

    def _weights(self, state: State, histories: Histories, window: int) -> Any:
        """What every event weighs for the item that comes next."""
        from fedmosaic.methods.mosaic.pairs import next_weights

        weights = np.empty(histories.items.values.size, np.float64)
        decay = np.array([state["windows"][window], self.events])
        next_weights(histories.items.offsets, histories.times, decay, weights)
        return weights

    def taste_scores(self, state: State, histories: Histories) -> F32:
        """r_u B_e / sqrt|r_u|."""
        found = np.zeros((len(histories), histories.n_items), np.float32)
        if not state["co"].size:
            return found
        distinct = histories.items.unique()
        weights = (1 / np.sqrt(np.maximum(distinct.lengths, 1)))[distinct.rows]
        r = _rows(state["inputs"][distinct.values], distinct.rows, weights, len(histories), state)
        found[:, state["inputs"] >= 0] = np.asarray(_within(r, state["taste_basis"]) @ state["co"])
        return found

    def trend_scores(self, state: State, histories: Histories, trend: Any) -> F32:
        """Popularity of late, for whoever has no history; for others as much of it as was chosen, by all or by each."""
        weight = np.where(histories.items.lengths > 0, trend, 1.0).astype(np.float32)
        return np.asarray(weight[:, None] * state["recent"])

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """What an event weighs now times B_s, and taste times B_e; the trend is nobody's."""
        if state["lifted"].size:
            raise SettingsError("with features= events speak together, and none has a share of its own; use features=0")
        window, taste = self._place(state), state["taste"][0]
        if state["tried"].size:
            window, taste, _ = gate.own(self, state, history)[0]
        places = state["inputs"][history.items.values]
        known, found = places >= 0, np.zeros(places.size, np.float32)
        if history.times is not None:
            column = _column(state["basis"], state["sequence"][int(window)], places[known], item)
            found[known] = self._weights(state, history, int(window))[known] * column
        if (place := state["inputs"][item]) >= 0:
            size = np.sqrt(max(history.items.unique().lengths[0], 1))
            column = _column(state["taste_basis"], state["co"], places[known], place)
            found[known] += taste / size * column
        return found

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """How each item is predicted: from what goes with it, or, with an epsilon, from what comes before it."""
        inputs = state["inputs"]
        if not state["co"].size and state["sequence"].size:
            return np.asarray(state["sequence"][0].T)
        found = np.zeros((inputs.size, state["co"].shape[0]), np.float32)
        found[inputs >= 0] = state["co"].T
        return found


def _rows(places: Any, rows: Any, weights: Any, users: int, state: State) -> Any:
    """Histories as a matrix of users x items that predict."""
    from scipy import sparse

    near = (weights > 0) & (places >= 0)
    shape = (users, int(state["inputs"].max(initial=-1)) + 1)
    return sparse.csr_array((weights[near].astype(np.float32), (rows[near], places[near])), shape=shape)


def _within(rows: Any, basis: F32) -> Any:
    """Rows in a factored form's basis; in the full form as they are."""
    return rows @ basis if basis.size else rows


def _column(basis: F32, weights: F32, places: Any, item: int) -> F32:
    """What some of the items that predict say about one item: rows of a factored product, or of a matrix."""
    return np.asarray(basis[places] @ weights[:, item] if basis.size else weights[places, item])


METHODS = (
    Entry(
        "mosaic",
        "Next items by sums over clients, in one round: order, taste and trend",
        "ours; docs/mosaic.md",
        Mosaic,
    ),
)
