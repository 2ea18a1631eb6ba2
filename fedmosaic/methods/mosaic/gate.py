"""The private gate: every device chooses window and taste for itself, by what would have answered its own past.

A model has seen the past that it is judged by, so a device cannot ask the common one. Clients are dealt to folds, the
sums are kept apart by fold, and the server publishes, beside the common model, one per fold that never saw that fold.
A device replays its last STEPS events with the model of its own fold and takes the candidate with the largest

    sum over replayed events of 1 / log2(1 + rank)  +  SHRINK · mean of the same over everybody's held-out items

so that few events of one's own change little. What was chosen stays on the device, and need not even be kept there: it
follows from the history. The fold of a client follows from its first event, so it does not change as a history grows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics
from fedmosaic.methods.mosaic import full

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Candidate = tuple[int, float, float]  # place of a window, taste, trend
STEPS = 10  # events that are replayed
SHRINK = 50.0  # events that the common answer counts for
USERS_AT_ONCE = 64


class Terms(Protocol):
    """What the gate asks of the method: its three terms, and how candidates would have answered."""

    def order_scores(self, state: State, histories: Histories, window: int) -> F32:
        """The term of order, with one of the windows."""
        ...

    def taste_scores(self, state: State, histories: Histories) -> F32:
        """The term of taste, with weight 1."""
        ...

    def trend_scores(self, state: State, histories: Histories, trend: Any) -> F32:
        """The term of trend, weighed for all or for each."""
        ...

    def judged(self, state: State, held: Histories, events: Ragged, tried: Sequence[Candidate], cut: int) -> F64:
        """NDCG at a cut of what came after every history, under every candidate."""
        ...


def folds_of(histories: Histories, folds: int) -> I64:
    """The fold of every client: a hash of its first event; of one without events the first.

    >>> folds_of(Histories(Ragged.from_rows([[3, 4], [3], []]), 5, np.array([7, 8, 7])), 4).tolist()
    [2, 2, 0]
    """
    found = np.zeros(len(histories), np.int64)
    begins = histories.items.offsets[:-1]
    for user in np.flatnonzero(histories.items.lengths > 0):
        at = begins[user]
        time = 0 if histories.times is None else int(histories.times[at])
        found[user] = zlib.crc32(f"{int(histories.items.values[at])} {time}".encode()) % folds
    return found


def sums(state: State, held: Histories, events: float, folds: int) -> Statistics:
    """The full form's sums, one of each per fold."""
    own = folds_of(held, folds)
    parts = [full.sums(state, held.take(np.flatnonzero(own == fold)), events) for fold in range(folds)]
    return {name: np.stack([part.pop(name) for part in parts]) for name in tuple(parts[0])}


def solved(state: State, total: Statistics, lam: float, taste_lam: float) -> State:
    """The common model, and for every fold the one of all others."""
    whole = {name: parts.sum(axis=0) for name, parts in total.items()}
    fold_models = []
    for fold in range(total["together"].shape[0]):
        others = {name: whole[name] - total[name][fold] for name in total}
        fold_models.append(full.solved(state, others, lam, taste_lam))
    return {
        **full.solved(state, whole, lam, taste_lam),
        "fold_sequence": np.stack([model["sequence"] for model in fold_models]),
        "fold_co": np.stack([model["co"] for model in fold_models]),
    }


def last_steps(histories: Histories, steps: int) -> tuple[Histories, Ragged, I64]:
    """What stood before each of the last events of every client, those events, and whose they are.

    >>> before, event, whose = last_steps(Histories(Ragged.from_rows([[2, 0, 1], [1]]), 3, np.arange(4)), 2)
    >>> [row.tolist() for row in before.items], event.values.tolist(), whose.tolist()
    ([[2], [2, 0]], [0, 1], [0, 0])
    """
    ends = [
        (user, int(begin), t)
        for user, (begin, end) in enumerate(zip(histories.items.offsets, histories.items.offsets[1:], strict=False))
        for t in range(max(int(begin) + 1, int(end) - steps), int(end))
    ]
    places = np.concatenate([np.arange(begin, t) for _, begin, t in ends] or [np.zeros(0, np.int64)])
    offsets = np.concatenate([[0], np.cumsum([t - begin for _, begin, t in ends])]).astype(np.int64)
    times = None if histories.times is None else histories.times[places]
    before = Histories(Ragged(histories.items.values[places], offsets), histories.n_items, times)
    targets = histories.items.values[np.array([t for _, _, t in ends], np.int64)]
    whose = np.array([user for user, _, _ in ends], np.int64)
    return before, Ragged(targets, np.arange(len(ends) + 1)), whose


def own(form: Terms, state: State, histories: Histories) -> F64:
    """For every history its own candidate: place of the window, taste, trend."""
    tried = [(int(window), float(taste), float(trend)) for window, taste, trend in state["tried"]]
    gains, folds = np.zeros((len(histories), len(tried))), len(state["fold_co"])
    of = folds_of(histories, folds)
    for fold in range(folds):
        unseen = {**state, "sequence": state["fold_sequence"][fold], "co": state["fold_co"][fold]}
        users = np.flatnonzero(of == fold)
        for begin in range(0, users.size, USERS_AT_ONCE):
            some = users[begin : begin + USERS_AT_ONCE]
            before, event, whose = last_steps(histories.take(some), STEPS)
            if len(before):
                np.add.at(gains, some[whose], form.judged(unseen, before, event, tried, histories.n_items))
    chosen: F64 = state["tried"][np.argmax(gains + SHRINK * state["prior"], axis=1)]
    return chosen


def scores(form: Terms, state: State, histories: Histories) -> F32:
    """Everybody's list with everybody's own weights."""
    chosen = own(form, state, histories)
    found = np.empty((len(histories), histories.n_items), np.float32)
    for window in np.unique(chosen[:, 0]):
        some = np.flatnonzero(chosen[:, 0] == window)
        found[some] = form.order_scores(state, histories.take(some), int(window))
    found += chosen[:, 1:2].astype(np.float32) * form.taste_scores(state, histories)
    return found + form.trend_scores(state, histories, chosen[:, 2])
