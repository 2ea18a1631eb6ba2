"""Mosaic: the next item from sums over clients, in one round. A closed form with three terms.

    score(j) = x_u B_s[:, j]  +  taste · r_u B_e[:, j] / sqrt|r_u|  +  trend · T[j]

x_u is the history with weights that fall with age, r_u the history without, T recent popularity. B_s maps what stood
before an event to the event, by ridge regression; B_e is EASE. Both need nothing but sums over clients:

    A = sum x_t x_t'    C = sum x_t e_t'    B_s = (A + lam I)^-1 C
    G = sum r r'        P = (G + lam I)^-1  B_e = -P / diag P, with zeros on the diagonal

so one secure sum trains it (after a small one that counts events per item), a new user needs no training, and a
device scores from its own history. Where the sums would not fit, the same follows from r numbers per item in a few more
rounds (`factored.py`). For large data `features=` adds one more sum, with which events of a history speak together
(`features.py`), and `softmax=` a few that learn the chances of what comes next (`softmax.py`). How a weight falls: by e
in `window` moments and by e in `events` events; events of one time are one moment, and their order among themselves is
not known, so that sums are means over all orders they can have. Without times B_s is left out, and the ranking is that
of EASE.

How much taste and trend, and how long a window, depends on what is asked: the very next item, or anything that comes
later. So by default devices score their held-out items under a few candidates, and the sums of those scores choose
(`auto`): window and taste first, then the trend.

Ours; the idea of a linear map between items is SLIM's and EASE's, one from earlier to later items SLIST's (Choi et al.,
WWW 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import Scores, State, Statistics
from fedmosaic.methods.mosaic import factored, features, full, gate, private, rows, sizes, softmax
from fedmosaic.methods.mosaic.gate import Candidate
from fedmosaic.methods.private_release import PrivateRelease

F32 = npt.NDArray[np.float32]
LARGEST = 4 << 30  # bytes of the full form's sums: about 10,000 items
RANK = 256  # beyond that
WINDOWS = (3.0, 10.0)
TASTES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SOFTS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
TRENDS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
USERS_AT_ONCE = 512
CHOOSERS = 10_000  # devices whose validation chooses; more would tell no more


class Stage(NamedTuple):
    """A round: what devices add up, and what the server makes of it."""

    sums: Callable[[State, Histories], Statistics]
    solved: Callable[[State, Statistics], State]


class Mosaic(PrivateRelease):
    """Next items by sums: a small one that counts, and the one that trains; a factored form asks a few times more."""

    CLIENTS_AT_ONCE: ClassVar[int | None] = None  # its sums have no array of clients x items

    rounds: int = Field(
        default=4,
        ge=2,
        description="at most: counts, bases of a factored form, the sums that train; the full form has as many as it "
        "needs, 2 and those of features= and softmax=",
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
    softmax: int = Field(
        default=0,
        ge=0,
        description="rounds in which chances of the next item are learnt; 10 where a million events are",
    )
    soft: float = Field(default=0.01, ge=0, description="weight of the scores behind those chances")
    folds: int = Field(
        default=0,
        ge=0,
        description="models for the private gate, each unseen by a part of the clients; 0: no gate, "
        "all have the weights that suit most; 4 are enough",
    )
    most: int = Field(default=400, ge=2, description="items that predict others under an epsilon")
    now: float | None = Field(
        default=None,
        description="time of the last event, in the unit of the data; not said: read off them, if all are here",
    )
    span: float | None = Field(
        default=None, gt=0, description="how far back from then the data go: what is recent is a tenth of it"
    )
    auto: bool = Field(default=True, description="choose window, taste, soft and trend, where not given, by validation")

    @model_validator(mode="before")
    @classmethod
    def _as_many_rounds_as_needed(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("softmax") and "rounds" not in given:
            return {**given, "rounds": 3 + int(given["softmax"])}
        return given

    @model_validator(mode="after")
    def _additions_are_of_the_full_form(self) -> Mosaic:
        wants = self._addition
        given = {"rank": self.rank, "epsilon": self.epsilon, "folds": self.folds if wants != "folds" else None}
        other = next((name for name, value in given.items() if value), None)
        if wants and other:
            raise ValueError(f"{wants}= needs the full form without noise; leave {other}= out, or {wants}=")
        if self.folds == 1:
            raise ValueError("one fold leaves nobody who has not seen it; folds= are at least 2")
        if self.softmax and self.rounds < 2 + bool(self.features) + self.softmax:
            raise ValueError(f"softmax={self.softmax} takes {2 + bool(self.features) + self.softmax} rounds")
        if self.features and self.rounds < 3:
            raise ValueError("features= takes three rounds")
        return self

    @property
    def _addition(self) -> str | None:
        """What is added to the full form, if anything is."""
        return next((name for name in ("features", "softmax", "folds") if getattr(self, name)), None)

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
            "clock": np.array([self.now or 0.0, self.span or 0.0]),  # when now is, and how far back the data go
            "windows": np.array(self._windows),  # of every candidate
            "vectors": np.zeros((0, 0), np.float32),  # of items, that features read
            "lifted": np.zeros((0, n_items), np.float32),  # weights of features, of the last candidate
            "fold_sequence": np.zeros((0, len(self._windows), 0, n_items), np.float32),  # of the private gate
            "fold_co": np.zeros((0, 0, 0), np.float32),
            "tried": np.zeros((0, 3)),  # its candidates: window, taste, trend
            "prior": np.zeros(0),  # and how good they are for everybody
            **softmax.init(n_items),
            **full.dropped(),
            "taste": np.array([self.taste]),
            "soft": np.array([self.soft if self.softmax else 0.0]),
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
        """Before the first sum: when now is, and how far back the data go. Devices agree on both (`now`, `span`)."""
        state = dict(self.init(data.n_items, seed))
        if data.times is not None and data.times.size and self.epsilon is None:  # else it would be published
            now = data.times.max() if self.now is None else self.now
            state["clock"] = np.array([now, self.span or max(now - data.times.min(), 1)], np.float64)
        return state

    def done(self, state: State) -> bool:
        """Whether all rounds of its form were made."""
        return int(state["stage"][0]) >= len(self._stages(state))

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """First events per item, and those of late; then what the form needs."""
        return self._stages(state)[int(state["stage"][0])].sums(state, histories)

    def apply(self, state: State, total: Statistics) -> State:
        """Which items predict others, and in which form; then what the form makes of its sums."""
        stage = self._stages(state)[int(state["stage"][0])]
        state = stage.solved({**state, "stage": state["stage"] + 1}, total)
        return {**state, **full.dropped(), **softmax.dropped(state)} if self.done(state) else state

    def _stages(self, state: State) -> list[Stage]:
        """The rounds of the form, in order; which form it is shows in the state after the first."""
        events, lam, taste_lam = self.events, self.lam, self.taste_lam
        if self.epsilon is not None:
            private_solved = partial(private.solved, deviation=self.deviation(1 - private.COUNTS))
            return [
                Stage(lambda _, held: private.counts(held), partial(private.begun, most=self.most)),
                Stage(partial(private.sums, events=events), private_solved),
            ]
        counted = Stage(rows.counts, self._begun)
        if state["taste_basis"].size:
            better = Stage(partial(factored.sums, events=events, last=False), factored.better_bases)
            solved = partial(factored.solved, lam=lam, taste_lam=taste_lam)
            last = Stage(partial(factored.sums, events=events, last=True), solved)
            return [counted, *[better] * (self.rounds - 2), last]
        if self.folds:
            solved = partial(gate.solved, lam=lam, taste_lam=taste_lam)
            return [counted, Stage(partial(gate.sums, events=events, folds=self.folds), solved)]
        found = [counted, Stage(partial(full.sums, events=events), self._solved)]
        if self.features:
            lifted = partial(features.sums, events=events, features=self.features)
            found.append(Stage(lifted, partial(features.solved, lam=self.lam)))
        return found + [Stage(partial(softmax.sums, events=events), softmax.stepped)] * self.softmax

    def _solved(self, state: State, total: Statistics) -> State:
        """The full form, and what is added to it is begun."""
        if self._addition:
            state = full.kept(state, total)
        if self.features:
            state = features.begun(state, total)
        state = full.solved(state, total, self.lam, self.taste_lam)
        return softmax.begun(state) if self.softmax else state

    def _begun(self, state: State, total: Statistics) -> State:
        some = total["events"] >= self.least
        if not some.any():  # too little of everything: all that was seen
            some = total["events"] > 0
        m = some.size
        size = sizes.full(int(some.sum()), m, len(self._windows), self.features, self.folds)
        state = {
            **state,
            "inputs": np.where(some, np.cumsum(some) - 1, -1).astype(np.int32),
            "events": total["events"],
            "recent": (total["late"] / max(total["late"].max(), 1e-9)).astype(np.float32),
        }
        if self.rank is None and size <= LARGEST:
            return state
        if name := self._addition:
            raise SettingsError(
                f"{name}= stands beside sums of pairs of items, and those of {m:,} items would take "
                f"{size / 2**30:.1f} GiB with {name}={getattr(self, name)} (limit {LARGEST / 2**30:.3g}); use fewer"
            )
        return factored.first_bases(state, self.rank or RANK)

    def largest_message(self, events: npt.NDArray[np.int64]) -> int:
        """Bytes of the largest sum that a device sends, where items were met so often."""
        k, m, windows = sizes.predicting(events, self.least), events.size, len(self._windows)
        if self.epsilon is not None:
            return sizes.full(min(k, self.most), m, windows)
        whole = sizes.full(k, m, windows, self.features, self.folds)
        if self.rank is None and whole <= LARGEST:
            return whole
        return sizes.factored(k, m, windows, self.rank or RANK)

    def without_validation(self) -> Mosaic:
        """One window, and the weights as they were given."""
        return self.model_copy(update={"auto": False})

    def budget_share(self, round: int) -> float:
        """Counts take little of an epsilon."""
        return private.COUNTS if round == 1 else 1 - private.COUNTS

    def choose(self, data: TrainingSet, state: State, held_out: Ragged) -> State:
        """The weights under which the devices' held-out items have the best NDCG@10, all items ranked.

        Window and taste first, then the weight of the softmax, then the trend: sums of a few scores; a further one says
        how good each candidate is, where devices choose for themselves.
        """
        users = np.flatnonzero(held_out.lengths > 0)
        users = users[:: -(-users.size // CHOOSERS)] if users.size else users
        tastes = self._candidates("taste", TASTES)
        trends = self._candidates("trend", TRENDS) if state["clock"][1] else (self.trend,)  # none without times
        places = range(state["windows"].size)

        def gains(tried: list[Candidate], cut: int = 10, softs: Sequence[float] = (0.0,)) -> npt.NDArray[np.float64]:
            found = np.zeros((len(softs), len(tried)))
            for begin in range(0, users.size, USERS_AT_ONCE) if found.size > 1 else ():
                some = users[begin : begin + USERS_AT_ONCE]
                for at, soft in enumerate(softs):
                    asked = {**state, "soft": np.array([soft])}
                    found[at] += self.judged(asked, data.held.take(some), held_out.take(some), tried, cut).sum(axis=0)
            return found.ravel()

        tried = [(window, taste, self.trend) for window in places for taste in tastes]
        best = tried[int(np.argmax(gains(tried)))]  # the first of equals
        softs = self._candidates("soft", SOFTS) if state["soft_map"].size else (0.0,)
        soft = softs[int(np.argmax(gains([best], softs=softs)))]
        window, taste, _ = best
        tried = [(window, taste, trend) for trend in trends]
        trend = tried[int(np.argmax(gains(tried, softs=(soft,))))][2]
        chosen = {**state, "taste": np.array([taste]), "trend": np.array([trend]), "soft": np.array([soft])}
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
            "soft_map": state["soft_map"] if soft else state["soft_map"][:0],
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
        """x_u B_s; the last candidate has features, where there are any; and the softmax, as it is weighed."""
        if histories.times is None or not state["sequence"].size:
            return np.zeros((len(histories), histories.n_items), np.float32)
        x = rows.before(state, histories, state["windows"][window], self.events)
        found = np.asarray(rows.within(x, state["basis"]) @ state["sequence"][window])
        if state["soft"][0] and state["soft_map"].size:
            found += softmax.scores(state, histories, self._windows[0], self.events)
        if state["lifted"].size and window == state["windows"].size - 1:
            found += features.scores(state, histories, self.events)
        return found

    def taste_scores(self, state: State, histories: Histories) -> F32:
        """r_u B_e / sqrt|r_u|."""
        found = np.zeros((len(histories), histories.n_items), np.float32)
        if not state["co"].size:
            return found
        r = rows.whole(state, histories)
        found[:, state["inputs"] >= 0] = np.asarray(rows.within(r, state["taste_basis"]) @ state["co"])
        return found

    def trend_scores(self, state: State, histories: Histories, trend: Any) -> F32:
        """Popularity of late, for whoever has no history; for others as much of it as was chosen, by all or by each."""
        weight = np.where(histories.items.lengths > 0, trend, 1.0).astype(np.float32)
        return np.asarray(weight[:, None] * state["recent"])

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """What an event weighs now times B_s and the softmax, and taste times B_e; trend and biases are nobody's."""
        if state["lifted"].size:
            raise SettingsError("with features= events speak together, and none has a share of its own; use features=0")
        window, taste = self._place(state), state["taste"][0]
        if state["tried"].size:
            window, taste, _ = gate.own(self, state, history)[0]
        places = state["inputs"][history.items.values]
        known, found = places >= 0, np.zeros(places.size, np.float32)
        if history.times is not None:
            column = rows.column(state["basis"], state["sequence"][int(window)], places[known], item)
            found[known] = rows.weights(history, state["windows"][int(window)], self.events)[known] * column
            if state["soft_map"].size:
                column = state["soft"][0] * state["soft_map"][places[known], item]
                found[known] += rows.weights(history, self._windows[0], self.events)[known] * column
        if (place := state["inputs"][item]) >= 0:
            size = np.sqrt(max(history.items.unique().lengths[0], 1))
            column = rows.column(state["taste_basis"], state["co"], places[known], place)
            found[known] += taste / size * column
        return found

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """How each item is predicted: from what goes with it, or, with an epsilon, from what comes before it."""
        return rows.vectors(state)


METHODS = (
    Entry(
        "mosaic",
        "Next items by sums over clients, in one round: order, taste and trend",
        "ours; docs/mosaic.md",
        Mosaic,
    ),
)
