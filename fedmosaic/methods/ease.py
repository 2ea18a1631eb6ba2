"""EASE (Steck, WWW 2019): a linear item-item model in closed form, from the summed Gram matrix."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.data.histories import Histories
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics, gram, refuse_many_items, zero_diagonal


class EASE(ClosedForm):
    """score(u, ·) = r_u B,  B = I - P diag(1 / P),  P = (R'R + lam I)^-1, diagonal of B zero."""

    CLIENTS_AT_ONCE: ClassVar[int | None] = None

    lam: float = Field(default=500.0, gt=0, description="ridge penalty")

    def init(self, n_items: int, seed: int) -> State:
        """All weights zero; refused where the matrix would not fit."""
        refuse_many_items("ease", n_items)
        return {"weights": np.zeros((n_items, n_items), dtype=np.float32)}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Co-occurrence counts of a group of clients."""
        return {"gram": gram(histories)}

    def apply(self, state: State, total: Statistics) -> State:
        """Invert the summed Gram matrix."""
        return {"weights": zero_diagonal(total["gram"], self.lam)}

    def scores(self, state: State, histories: Histories) -> Scores:
        """The user's row times the weights."""
        return np.asarray(histories.csr @ state["weights"])

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """B[l, j] of every item l of the history."""
        return np.asarray(state["weights"][history.items.values, item])

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """How each item is predicted from the others."""
        columns: npt.NDArray[np.floating] = state["weights"].T
        return columns


METHODS = (
    Entry(
        "ease",
        "Linear item-item model in closed form",
        "Steck, Embarrassingly shallow autoencoders, WWW 2019",
        EASE,
        expect={"ml-100k": (66.3, 38.5)},
    ),
)
