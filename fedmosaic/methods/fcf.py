"""FCF (Ammad-ud-din et al. 2019): federated collaborative filtering by implicit alternating least squares.

device   u = (Y' C Y + lam I)^-1 Y' C p,  c_j = 1 + alpha for own items, 1 otherwise
         f_j = c_j (p_j - u·y_j) u  for every item j: what it sends
server   dJ/dy_j = -2 sum_i f_ij + 2 lam y_j, one Adam step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.core import keys
from fedmosaic.data.histories import Histories
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics

if TYPE_CHECKING:
    from scipy import sparse

F64 = npt.NDArray[np.float64]


class FCF(ClosedForm):
    """The server sees the sum of item gradients; users are solved on their devices and stay there."""

    RENAMED: ClassVar = {"rate": "server_rate"}
    NO_EPSILON: ClassVar[str] = (
        "a device sends a gradient for every item, made with a vector that it solves itself, whose size nothing bounds"
    )

    rounds: int = Field(default=50, ge=1, description="server steps")
    dim: int = Field(default=32, ge=1, description="width of the vectors")
    alpha: float = Field(default=4.0, ge=0, description="extra confidence of observed pairs")
    lam: float = Field(default=1.0, gt=0, description="regularisation")
    server_rate: float = Field(default=0.1, gt=0, description="rate of the server's Adam")

    def init(self, n_items: int, seed: int) -> State:
        """Random item vectors, fresh Adam memory."""
        rng = keys.generator(seed=seed, purpose=keys.Purpose.INIT)
        table = rng.normal(0, 0.1, (n_items, self.dim))
        return {"item": table, "first": np.zeros_like(table), "second": np.zeros_like(table), "steps": np.zeros(1)}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Sum over the group of f_ij, for every item."""
        from scipy import sparse

        held = histories.csr
        y, own = state["item"], held.astype(np.float64)
        u = self.user_vectors(y, held)
        rows = np.repeat(np.arange(held.shape[0]), np.diff(held.indptr))
        seen = (u[rows] * y[held.indices]).sum(axis=1)  # u·y at observed pairs
        weighted = sparse.csr_array((seen, held.indices, held.indptr), shape=held.shape)
        f = (1 + self.alpha) * (own.T @ u) - self.alpha * (weighted.T @ u) - y @ (u.T @ u)
        return {"gradient": np.asarray(f)}

    def apply(self, state: State, total: Statistics) -> State:
        """One Adam step on the regularised objective."""
        gradient = -2 * total["gradient"] + 2 * self.lam * state["item"]
        steps = state["steps"] + 1
        first = 0.9 * state["first"] + 0.1 * gradient
        second = 0.999 * state["second"] + 0.001 * gradient**2
        ahead, spread = first / (1 - 0.9 ** steps[0]), np.sqrt(second / (1 - 0.999 ** steps[0]))
        item = state["item"] - self.server_rate * ahead / (spread + 1e-8)
        return {"item": item, "first": first, "second": second, "steps": steps}

    def user_vectors(self, item: F64, histories: sparse.csr_array) -> F64:
        """The device's own solution."""
        base = item.T @ item + self.lam * np.eye(self.dim)
        x = np.empty((histories.shape[0], self.dim))
        for i in range(histories.shape[0]):
            own = item[histories.indices[histories.indptr[i] : histories.indptr[i + 1]]]
            x[i] = np.linalg.solve(base + self.alpha * own.T @ own, (1 + self.alpha) * own.sum(axis=0))
        return x

    def scores(self, state: State, histories: Histories) -> Scores:
        """u·y for all items."""
        return self.user_vectors(state["item"], histories.csr) @ state["item"].T

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """The item table."""
        return state["item"]


METHODS = (
    Entry(
        "fcf",
        "Federated collaborative filtering: users solved on devices, item gradients summed",
        "Ammad-ud-din et al., arXiv 1901.09888, 2019",
        FCF,
    ),
)
