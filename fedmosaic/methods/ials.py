"""iALS (Hu et al. 2008; Rendle et al. 2021): implicit alternating least squares from summed sufficient statistics.

    minimise  sum over observed (u, j) of (x_u·y_j - 1)^2  +  w0 · sum over all (u, j) of (x_u·y_j)^2
              + sum_u reg_u |x_u|^2 + sum_j reg_j |y_j|^2,      reg_u = reg · (|S_u| + w0 · items)^nu

Per round a device receives Y, solves its own x_u, and sends x_u x_u' and x_u for its items; the server solves each
y_j from the sums. The vector x_u is recomputed from the history whenever it is needed, and never leaves the device.
Where one process plays all devices, the sums are not taken apart: items are solved as users are, in float32.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.core import keys
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics, by_rows
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    from scipy import sparse

F64 = npt.NDArray[np.float64]


class IALS(ClosedForm):
    """Matrix factorisation whose every step is a least-squares solution."""

    NO_EPSILON: ClassVar[str] = (
        "a device sends products of a vector that it solves itself, whose size nothing bounds, in every round"
    )

    dim: int = Field(default=32, ge=1, description="width of the vectors")
    w0: float = Field(default=0.1, gt=0, description="weight of unobserved pairs")
    reg: float = Field(default=4.0, gt=0, description="regularisation")
    nu: float = Field(default=0.0, ge=0, description="how regularisation grows with the amount of data")
    rounds: int = Field(default=10, ge=1, description="passes over users and items")

    def init(self, n_items: int, seed: int) -> State:
        """Small random item vectors."""
        rng = keys.generator(seed=seed, purpose=keys.Purpose.INIT)
        return {"item": rng.normal(0, 0.1 / np.sqrt(self.dim), (n_items, self.dim)), "users": np.zeros(1)}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Per item: sum of x x' (upper triangle) and of x over the clients that hold it; once: sum of all x x'."""
        from fedmosaic.methods.als_sums import add_products

        held = histories.csr
        x = self.user_vectors(state["item"], held)
        holds = held.T.tocsr()
        outer, vector = np.zeros((holds.shape[0], self._size)), np.zeros((holds.shape[0], self.dim))
        by_rows(holds.shape[0], partial(add_products, x, holds.indices, holds.indptr, outer, vector))
        return {
            "outer": outer,
            "vector": vector,
            "all": (x.T @ x)[np.triu_indices(self.dim)],
            "count": np.diff(holds.indptr).astype(np.float64),
            "users": np.array([float(len(histories))]),
        }

    def apply(self, state: State, total: Statistics) -> State:
        """Solve the least-squares problem of every item."""
        from fedmosaic.methods.als_sums import solve_sums

        reg = self.reg * (total["count"] + self.w0 * total["users"][0]) ** self.nu
        everything = np.zeros((self.dim, self.dim))
        everything[np.triu_indices(self.dim)] = total["all"] * self.w0
        item = np.empty_like(state["item"])
        by_rows(item.shape[0], partial(solve_sums, total["outer"], total["vector"], everything, reg, item))
        return {"item": item, "users": total["users"]}

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[State, RoundRecord, None]:
        """Both half steps at once: what `apply` makes of all clients' `statistics`, up to float32."""
        if self.secure:
            return super().advance(data, state, round, seed, query)
        held = data.held.csr
        x = self._solved(state["item"], held, np.float32)
        item = self._solved(x, held.T.tocsr(), np.float32)
        up, down = self.traffic(data.n_items)
        record = RoundRecord(clients=data.n_users, bytes_up=up, bytes_down=down)
        return {"item": item, "users": np.array([float(data.n_users)])}, record, None

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Bytes of a client's `statistics`, and of the state."""
        sums = n_items * (self._size + self.dim + 1) + self._size + 1
        return 8 * sums, 8 * (n_items * self.dim + 1)

    @property
    def _size(self) -> int:
        return self.dim * (self.dim + 1) // 2

    def user_vectors(self, item: F64, held: sparse.csr_array) -> F64:
        """x_u = (sum over own items of y y' + w0 Y'Y + reg_u I)^-1 sum over own items of y."""
        return self._solved(item, held, np.float64)

    def _solved(self, table: F64, held: sparse.csr_array, precision: type[np.floating]) -> F64:
        """One side's vectors from the other side's table, in the axes of w0 Y'Y.

        There the part that all systems share is diagonal. Scaled by it they are I + Z'Z with eigenvalues between 1 and
        1 + 1/w0, because own rows are some of all rows: float32 solves them to six digits, however small reg is.
        """
        from fedmosaic.methods.als_sums import solve_rows

        reg = self.reg * (np.diff(held.indptr) + self.w0 * table.shape[0]) ** self.nu
        base, axes = np.linalg.eigh(self.w0 * (table.T @ table))
        turned, x = (table @ axes).astype(precision), np.empty((held.shape[0], self.dim), precision)
        work = partial(solve_rows, turned, held.indices, held.indptr, np.maximum(base, 0), reg, x)
        by_rows(x.shape[0], work)
        return np.asarray(x @ axes.T)

    def scores(self, state: State, histories: Histories) -> Scores:
        """x_u · y_j for all items."""
        return self.user_vectors(state["item"], histories.csr) @ state["item"].T

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """The item table."""
        return state["item"]


METHODS = (
    Entry(
        "ials",
        "Implicit alternating least squares",
        "Hu et al., ICDM 2008; Rendle et al., RecSys 2022",
        IALS,
        expect={"ml-100k": (66.7, 37.9), "amazon-video": (57.2, 42.4)},
    ),
)
