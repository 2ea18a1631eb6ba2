"""ItemKNN: neighbourhoods from the summed item co-occurrence matrix."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.data.histories import Histories
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics, gram, refuse_many_items


class ItemKNN(ClosedForm):
    """score(u, j) = sum over the user's items l of sim(j, l), sim = cosine over users, kept for the nearest neighbours.

    sim(j, l) = G_jl / (sqrt(G_jj G_ll) + shrink), G = R'R.
    """

    CLIENTS_AT_ONCE: ClassVar[int | None] = None

    neighbours: int | None = Field(default=None, ge=1, description="similar items kept per item; none keeps all")
    shrink: float = Field(default=0.0, ge=0, description="pulls similarities of rare items towards 0")

    def init(self, n_items: int, seed: int) -> State:
        """An empty similarity; refused where the matrix would not fit."""
        refuse_many_items("itemknn", n_items)
        return {"similarity": np.zeros((n_items, n_items), dtype=np.float32)}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Co-occurrence counts of a group of clients."""
        return {"gram": gram(histories)}

    def apply(self, state: State, total: Statistics) -> State:
        """Cosine, zero diagonal, nearest neighbours of each item."""
        g = total["gram"]
        norm = np.sqrt(np.diag(g))
        similarity = (g / np.maximum(np.outer(norm, norm) + self.shrink, 1e-12)).astype(np.float32)
        np.fill_diagonal(similarity, 0)
        if self.neighbours is not None and self.neighbours < similarity.shape[0]:
            edge = np.partition(similarity, -self.neighbours, axis=1)[:, -self.neighbours]
            similarity[similarity < edge[:, None]] = 0
        return {"similarity": similarity}

    def scores(self, state: State, histories: Histories) -> Scores:
        """Sum of the similarities of each item's neighbours that the user holds."""
        return np.asarray(histories.csr @ state["similarity"].T)

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """sim(j, l) of every item l of the history."""
        return np.asarray(state["similarity"][item, history.items.values])

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """Rows of the similarity matrix."""
        return state["similarity"]


METHODS = (
    Entry(
        "itemknn",
        "Item neighbourhoods by cosine",
        "Sarwar et al., Item-based collaborative filtering, WWW 2001",
        ItemKNN,
        expect={"ml-100k": (49.6, 29.1), "amazon-video": (55.2, 36.4)},
    ),
)
