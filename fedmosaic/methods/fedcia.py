"""FedCIA (SIGIR 2025): clients send how similar items are to them; the server averages; a client adds its own view.

    S_c = N_c' N_c,  N_c = D_users^-1/2 R_c D_items^-1/2        R_c: the client's users x items, degrees its own
    S   = mean over clients of (S_c + noise)                    noise: Laplace(0, 0.001) on each of items² numbers
    score = weight · r S + r S_own

This is the published form that is free of parameters, on GF-CF's normalised filter; weight 60 and the noise are those
of the released code. Left out: the ideal low-pass filter that the code adds to S_c from a singular value decomposition
(for a client with one user it is that user's S_c again), and the form with trained tables E, S_c = E E', in which every
client afterwards fits E E' to S for 100 steps.

A client with one user sends S_u = r r' / |r|, which tells its history to anybody who sees it alone: what hides it is a
secure sum, or more noise than this. There r S_own is r itself, so that only items the user has already gain from it and
`weight` does not change a recommendation. With several users per client (`TrainingSet.silos`) both are at work.

What is ours: weights 1 / |r| are rounded to 2^-32, so that sums are exact in any order and grouping; the clients' noise
is drawn at once, by the law of its sum, as in privacy/noise.py (`noise_draws=summed` of other methods).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import Scorer
from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import ClosedForm, Scores, State, Statistics, refuse_many_items
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    from scipy import sparse

F64 = npt.NDArray[np.float64]


class FedCIA(ClosedForm):
    """The mean of the clients' item similarities, and each client's own beside it."""

    weight: float = Field(default=60.0, gt=0, description="weight of the mean similarity beside the client's own")
    noise: float = Field(default=0.001, ge=0, description="scale of the Laplace noise on every number sent")

    def init(self, n_items: int, seed: int) -> State:
        """No similarity yet; refused where the matrix would not fit."""
        refuse_many_items("fedcia", n_items)
        return {"similarity": np.zeros((n_items, n_items), dtype=np.float32), "seed": np.array([seed])}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Sum of r r' / |r| over clients with one user each, and how many they are."""
        held = histories.csr.astype(np.float64)
        share = _rounded(1 / np.maximum(np.diff(held.indptr), 1))
        scaled = held.copy()
        scaled.data = np.repeat(share, np.diff(held.indptr))
        return {"similarity": _product(held, scaled), "clients": np.array([float(held.shape[0])])}

    def of_silos(self, histories: sparse.csr_array, silos: Ragged) -> Statistics:
        """The same sum over clients with several users each: `silos` has the rows of each client."""
        total = np.zeros((histories.shape[1], histories.shape[1]))
        for members in silos:
            own = normalised(histories[members])
            total += _rounded(_product(own, own))
        return {"similarity": total, "clients": np.array([float(len(silos))])}

    def apply(self, state: State, total: Statistics) -> State:
        """The mean of what the clients sent, noise included."""
        clients = max(float(total["clients"][0]), 1.0)
        similarity = total["similarity"]
        if self.noise:
            rng = keys.generator(seed=int(state["seed"][0]), purpose=keys.Purpose.NOISE)
            law = [rng.standard_gamma(clients, similarity.shape) for _ in range(2)]
            similarity = similarity + self.noise * (law[0] - law[1])
        return {"similarity": (similarity / clients).astype(np.float32), "seed": state["seed"]}

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[State, RoundRecord, None]:
        """Ask every client once; where clients hold several users, for the similarity within each of them."""
        if data.silos is None:
            return super().advance(data, state, round, seed, query)
        if self.secure:
            raise SettingsError("secure=true masks what clients with one user send; these hold several")
        up, down = self.traffic(data.n_items)
        total = self.of_silos(data.histories.to_csr(data.n_items), data.silos)
        return self.apply(state, total), RoundRecord(data.n_clients, up, down), None

    def scores(self, state: State, histories: Histories) -> Scores:
        """weight · r S + r S_own of users who are clients themselves: r S_own = r."""
        held = histories.csr
        return np.asarray(self.weight * np.asarray(held @ state["similarity"]) + held.toarray())

    def scorer(self, data: TrainingSet, state: State) -> Scorer:
        """Answers from the users' histories, and from those of the client they belong to."""
        return super().scorer(data, state) if data.silos is None else SiloScorer(self, state, data)

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """Rows of the mean similarity."""
        return state["similarity"]


class SiloScorer:
    """Answers for users of clients that hold several."""

    def __init__(self, form: FedCIA, state: State, data: TrainingSet) -> None:
        self.form, self.state, self.data = form, state, data

    def scores(self, users: I64) -> Scores:
        """weight · r S + r S_own; S_own = N' N is never written out."""
        data = self.data
        held = data.histories.to_csr(data.n_items)
        result = self.form.weight * np.asarray(held[users] @ self.state["similarity"])
        owners = data.owners()[users]
        for client in np.unique(owners):
            asked = np.flatnonzero(owners == client)
            own = normalised(held[data.members(np.array([client])).values])
            result[asked] += (held[users[asked]] @ own.T @ own).toarray()
        return result


def normalised(histories: sparse.csr_array) -> sparse.csr_array:
    """D_users^-1/2 R D_items^-1/2 of the rows of one client.

    >>> normalised(Ragged.from_rows([[0, 1], [1]]).to_csr(3)).toarray().round(3).tolist()
    [[0.707, 0.5, 0.0], [0.0, 0.707, 0.0]]
    """
    result = histories.astype(np.float64)
    of_users, of_items = np.diff(result.indptr), np.bincount(result.indices, minlength=result.shape[1])
    result.data = 1 / np.sqrt(np.repeat(of_users, of_users) * of_items[result.indices])
    return result


def _product(left: sparse.csr_array, right: sparse.csr_array) -> F64:
    return np.asarray((left.T @ right).toarray())


def _rounded(values: F64) -> F64:
    """In multiples of 2^-32: float64 adds them exactly, in any order."""
    return np.round(values * SCALE) / SCALE


METHODS = (
    Entry(
        "fedcia",
        "Item similarities of clients, averaged; each adds its own",
        "Han et al., FedCIA: federated collaborative information aggregation, SIGIR 2025; without trained tables",
        FedCIA,
        expect={"ml-100k ties=file": (51.1, 30.2)},
    ),
)
