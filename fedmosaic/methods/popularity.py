"""Popularity: the sum of the clients' item indicators. The row that every table needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedmosaic.data.histories import Histories
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import Scores, State, Statistics
from fedmosaic.methods.private_release import PrivateRelease


class Popularity(PrivateRelease):
    """score(j) = number of users with item j in their history; with an epsilon, everybody's votes have a norm of 1."""

    def init(self, n_items: int, seed: int) -> State:
        """Zero counts."""
        return {"count": np.zeros(n_items)}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Item counts of a group of clients."""
        held = histories.csr.astype(np.float64)
        if self.epsilon is not None:
            held = held.multiply(1 / np.sqrt(np.maximum(held.sum(axis=1), 1))[:, None])
        return {"count": np.asarray(held.sum(axis=0), dtype=np.float64).ravel()}

    def apply(self, state: State, total: Statistics) -> State:
        """The counts are the model."""
        return {"count": total["count"]}

    def scores(self, state: State, histories: Histories) -> Scores:
        """The same list for everybody."""
        return np.broadcast_to(state["count"], (len(histories), state["count"].size))

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """One number per item: only popularity is known."""
        counts: npt.NDArray[np.floating] = state["count"][:, None]
        return counts


METHODS = (
    Entry(
        "popularity",
        "Most popular items, the same list for everybody",
        "folklore; the row every table needs",
        Popularity,
        expect={"ml-100k": (42.2, 22.9), "amazon-video": (59.9, 39.2)},
    ),
)
