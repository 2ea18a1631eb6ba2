"""Forms that are one matrix over pairs of items, made from how often two items stand in one history.

    G = sum over clients of r r'        W = solved(G)        score(u, j) = r_u W[:, j]

With an epsilon there are two releases, each client's part with a norm of at most 1:

    votes    sum of r / |r|               (share `VOTES` of the budget): the `most` frequent items are paired
    G        sum of r r' / |r|²           over pairs of these items, one of each pair

G is symmetric, so a pair is sent once, with noise of sigma / sqrt 2, and its diagonal with sigma: as if pairs were sent
times sqrt 2, with which the norm is that of the whole matrix. It has no negative eigenvalues, and those that noise
alone could have are taken off. Items that are not paired stand below all others, in the order of their votes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedmosaic.core.ragged import Ragged
from fedmosaic.core.secret import Stream
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.closed_form import Scores, State, Statistics, gram, refuse_many_items
from fedmosaic.methods.private_release import PrivateRelease
from fedmosaic.privacy.release import noised, out_of_noise

F64 = npt.NDArray[np.float64]
VOTES = 0.05  # of the budget
GRID = float(1 << 24)  # weights are multiples of 1 / GRID, rounded down, so that sums are exact and bounds hold


class PairForm(PrivateRelease):
    """A matrix over pairs of items; under an epsilon, over pairs of the most frequent ones."""

    CLIENTS_AT_ONCE: ClassVar[int | None] = None

    rounds: int = Field(default=1, ge=1, le=2, description="sums: one, and under an epsilon one of votes before it")
    most: int = Field(default=400, ge=2, description="items that are paired under an epsilon")

    @model_validator(mode="before")
    @classmethod
    def _as_many_sums_as_needed(cls, given: Any) -> Any:
        private = isinstance(given, dict) and given.get("epsilon") is not None
        return {"rounds": 2, **given} if private else given

    @abstractmethod
    def solved(self, g: F64) -> npt.NDArray[np.float32]:
        """W of counts of pairs; under an epsilon, of counts that are divided by the size of each history."""

    def init(self, n_items: int, seed: int) -> State:
        """Nothing is known; refused where the matrix would not fit."""
        if self.epsilon is not None:
            known: State = {"inputs": np.full(n_items, -1, np.int32), "votes": np.zeros(n_items)}
            return {**known, "weights": np.zeros((0, 0), np.float32)}
        refuse_many_items(type(self).__name__.lower(), n_items)
        return {"weights": np.zeros((n_items, n_items), dtype=np.float32)}

    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Counts of pairs; under an epsilon first votes, and then counts of which each client's has a norm of 1."""
        if self.epsilon is None:
            return {"gram": gram(histories)}
        held: Any = histories.csr.astype(np.float64)
        if not self._voted(state):
            return {"votes": np.asarray(_divided(held, np.sqrt).sum(axis=0), dtype=np.float64).ravel()}
        held = held[:, np.flatnonzero(state["inputs"] >= 0)]
        return {"gram": np.triu((held.T @ _divided(held)).toarray())}

    def apply(self, state: State, total: Statistics) -> State:
        """W of the sum; of votes, which items are paired."""
        if self.epsilon is None:
            return {"weights": self.solved(total["gram"])}
        if not self._voted(state):
            order = np.argsort(-total["votes"], kind="stable")[: self.most]
            inputs = np.full(total["votes"].size, -1, np.int32)
            inputs[np.sort(order)] = np.arange(order.size)
            return {**state, "inputs": inputs, "votes": total["votes"]}
        upper = total["gram"]
        edge = self.deviation(1 - VOTES) * np.sqrt(2 * len(upper))
        clean = out_of_noise(upper + np.triu(upper, 1).T, edge)
        sizes, axes = np.linalg.eigh(clean)
        return {**state, "weights": self.solved((axes * np.maximum(sizes, 0)) @ axes.T)}

    def _voted(self, state: State) -> bool:
        return bool((state["inputs"] >= 0).any())

    def choose(self, data: TrainingSet, state: State, held_out: Ragged) -> State:
        """Nothing is chosen by validation: no epsilon would cover it. What is judged is the outcome of all sums."""
        return state

    def budget_share(self, round: int) -> float:
        """Votes take little of an epsilon."""
        return VOTES if round == 1 else 1 - VOTES

    def released(self, total: Statistics, round: int, seed: int | Stream) -> Statistics:
        """The sum with its noise; of pairs, less than of an item with itself."""
        if self.epsilon is None or "gram" not in total:
            return super().released(total, round, seed)
        drawn = noised({"gram": np.zeros_like(total["gram"])}, self.deviation(1 - VOTES), seed, round)["gram"]
        drawn[np.triu_indices_from(drawn, 1)] /= np.sqrt(2)
        return {"gram": np.triu(total["gram"] + drawn)}

    def scores(self, state: State, histories: Histories) -> Scores:
        """The user's row times the matrix."""
        if self.epsilon is None:
            return np.asarray(histories.csr @ state["weights"], dtype=np.float32)
        paired = np.flatnonzero(state["inputs"] >= 0)
        known = np.asarray(histories.csr[:, paired] @ state["weights"], dtype=np.float32)
        votes = state["votes"] / max(float(np.abs(state["votes"]).max()), 1e-9)
        found: Scores = known.min(axis=1, keepdims=True, initial=0.0) - 2 + votes.astype(np.float32)
        found[:, paired] = known
        return found

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """W[l, j] of every item l of the history."""
        if self.epsilon is None:
            return np.asarray(state["weights"][history.items.values, item])
        at, to = state["inputs"][history.items.values], int(state["inputs"][item])
        found = np.zeros(at.size, np.float32)
        if to >= 0:
            found[at >= 0] = state["weights"][at[at >= 0], to]
        return found

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """How each item is predicted from the others."""
        columns: npt.NDArray[np.floating] = state["weights"].T
        if self.epsilon is None:
            return columns
        found = np.zeros((state["inputs"].size, len(columns)), np.float32)
        found[state["inputs"] >= 0] = columns
        return found


def _divided(held: Any, of: Any = lambda sizes: sizes) -> Any:
    """Rows divided by (a function of) how many items they have."""
    sizes = np.maximum(np.asarray(held.sum(axis=1)).ravel(), 1)
    return held.multiply((np.floor(GRID / of(sizes)) / GRID)[:, None]).tocsr()
