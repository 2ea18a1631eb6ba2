"""LightGCN (He et al., SIGIR 2020): vectors smoothed over the graph of users and items; central, and on devices.

    e_u^(k+1) = sum over u's items i of e_i^(k) / sqrt(|N_u| |N_i|)        and the same for items over their users
    e = mean of e^(0) ... e^(layers)            score(u, j) = e_u · e_j

lightgcn      one server holds everybody, as published: BPR with weight decay on the vectors of a step's pairs, Adam,
              one negative per positive. The graph is the training items and nothing else, and negatives come from the
              pool of the training set. With A the graph, A_ui = A_iu = 1 / sqrt(|N_u| |N_i|), and P = mean of A^0 ...
              A^layers, the vectors are E = P E0 and the gradient of a loss is P (dloss / dE): A is symmetric, so no
              chain of operations has to be remembered, and sparse products of SciPy are all that is needed. Ours are
              the rate and larger steps, chosen on validation (ML-100K, strict).
fedlightgcn   ours: a device sees no edges but its own, so there is one hop, and it ends at the user.

                  e_u = (p_u + sum over u's items i of q_i / sqrt(|N_u|)) / 2        score(u, j) = e_u · q_j

              |N_i| is left out, because a device does not know who else holds an item. The item table is shared and
              averaged over the clients that trained a row, with Adam on the server; p_u stays on the device; the
              loss is cross-entropy per example unless asked otherwise. It is SVD++ (Koren, KDD 2008) with one item
              table instead of two. A client that holds several users has a neighbourhood for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, Phase
from fedmosaic.algorithm.parameters import F32, Axis, Init, Spec
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.view import View
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.batches import shuffled, within
from fedmosaic.data.negatives import sample_negatives
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.state import Array, checked
from fedmosaic.methods.base import Entry, FederatedSettings, MethodSettings, federation, one_pass, roles_of
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    from scipy import sparse
    from torch import Tensor

PAPER = "He et al., LightGCN: simplifying and powering graph convolution network for recommendation, SIGIR 2020"


class LightGCNSettings(MethodSettings):
    """Settings of LightGCN on one server that holds everybody."""

    rounds: int = Field(default=60, ge=1, description="epochs")
    dim: int = Field(default=64, ge=1, description="width of the vectors")
    layers: int = Field(default=3, ge=0, description="hops on the graph; 0: matrix factorisation with BPR")
    negatives: int = Field(default=1, ge=1, description="fresh negatives per positive and epoch")
    batch_size: int = Field(default=8192, ge=1, description="pairs of a positive and a negative per step")
    rate: float = Field(default=0.02, gt=0, description="rate of Adam")
    decay: float = Field(default=1e-4, ge=0, description="weight decay of the vectors of a step's pairs")


class OneHopSettings(FederatedSettings):
    """Settings of LightGCN on devices: one hop, from a user's own items to the user."""

    user_rate: float = Field(default=1.0, gt=0, description="rate of user vectors")
    item_rate: float = Field(default=1.0, gt=0, description="rate of item rows on the device")
    server_rate: float = Field(default=0.1, gt=0, description="rate of the server's Adam")


@dataclass(frozen=True, eq=False)
class LightGCNState:
    """Vectors before and after propagation, users first, and the optimiser's memory."""

    n_users: int
    first: F32  # [users + items, width], what is trained
    smooth: F32  # the same after propagation, what answers
    memory: tuple[Array, ...]


@dataclass(frozen=True)
class LightGCN:
    """Epochs of BPR on propagated vectors."""

    settings: LightGCNSettings
    pooled: ClassVar[bool] = True  # one server holds everybody

    @property
    def rounds(self) -> int:
        """As many as set."""
        return self.settings.rounds

    def check_installed(self) -> None:
        """It needs nothing beyond the library."""

    def start(self, data: TrainingSet, seed: int) -> LightGCNState:
        """Small random vectors."""
        init, shape = Init("normal", 0.1), (self.settings.dim,)
        tables = [
            Spec(f"lightgcn.{name}", Axis.ITEM, shape, init).table(seed, count)
            for name, count in (("user", data.n_users), ("item", data.n_items))
        ]
        first = np.concatenate(tables)
        return LightGCNState(data.n_users, first, self._smooth(graph_of(data), first), Adam().memory(first))

    def advance(
        self, data: TrainingSet, state: LightGCNState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[LightGCNState, RoundRecord, Array | None]:
        """One epoch over all pairs of a positive and a negative."""
        graph, first = graph_of(data), state.first.copy()
        memory = tuple(part.copy() for part in state.memory)
        users, liked, other = pairs_of(data, self.settings.negatives, seed=seed, round=round)
        whole = np.array([0, users.size])
        order = shuffled(whole, np.zeros(1, np.int64), seed=seed, round=round, epoch=0)
        loss = 0.0
        for at in range(0, order.size, self.settings.batch_size):
            part = order[at : at + self.settings.batch_size]
            gradient, found = self._gradient(graph, first, users[part], liked[part], other[part])
            Adam().step(first, gradient, memory, self.settings.rate)
            loss += found
        after = LightGCNState(state.n_users, first, self._smooth(graph, first), memory)
        record = RoundRecord(1, 0, 0, loss / max(users.size, 1))
        return after, record, None if query is None else _answers(after, query)

    def _gradient(self, graph: sparse.csr_array, first: F32, users: I64, liked: I64, other: I64) -> tuple[F32, float]:
        """Gradient of the mean over pairs of -log s(e_u · e_i - e_u · e_j) + decay / 2 · |vectors|²; sum of the losses.

        users, liked, other: rows of the table, items' behind users'. With c = -s(-gap) / pairs, the gradient at the
        propagated vectors is (C + C') E, where C has c at (u, i) and -c at (u, j).
        """
        from scipy import sparse

        smooth = self._smooth(graph, first)
        gap = np.einsum("nd,nd->n", smooth[users], smooth[liked] - smooth[other])
        slope = (-1 / (1 + np.exp(gap)) / users.size).astype(np.float32)
        rows, columns = np.tile(users, 2), np.concatenate([liked, other])
        half = sparse.coo_array((np.concatenate([slope, -slope]), (rows, columns)), shape=graph.shape).tocsr()
        gradient = self._smooth(graph, half @ smooth + half.T @ smooth)
        seen = np.bincount(np.concatenate([users, liked, other]), minlength=first.shape[0]) / users.size
        gradient += (self.settings.decay * seen[:, None] * first).astype(np.float32)
        return gradient, float(np.logaddexp(0, -gap).sum())

    def _smooth(self, graph: sparse.csr_array, table: F32) -> F32:
        """P · table: the mean over hops 0 to `layers`."""
        total, hop = table.copy(), table
        for _ in range(self.settings.layers):
            hop = graph @ hop
            total += hop
        total /= np.float32(self.settings.layers + 1)
        return total

    def scorer(self, data: TrainingSet, state: LightGCNState) -> SmoothScorer:
        """Answers with the propagated vectors."""
        return SmoothScorer(state)

    def vectors(self, state: LightGCNState) -> npt.NDArray[np.floating]:
        """The propagated item vectors."""
        return state.smooth[state.n_users :]

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Nothing travels: there is one server."""
        return 0, 0

    def pack(self, state: LightGCNState) -> dict[str, Array]:
        """As named arrays, for a file."""
        arrays = {"first": state.first, "smooth": state.smooth, "n_users": np.array([state.n_users])}
        return arrays | {f"rule/{i}": part for i, part in enumerate(state.memory)}

    def unpack(self, arrays: Mapping[str, Array], what: str) -> LightGCNState:
        """Read `pack` back."""
        first = arrays.get("first")
        if first is None or "n_users" not in arrays or first.ndim != 2 or first.shape[1] != self.settings.dim:
            raise ForeignError(f"{what} holds no vectors of width {self.settings.dim}; it belongs to another method")
        memory = tuple(checked(arrays, f"rule/{i}", part.shape, what) for i, part in enumerate(Adam().memory(first)))
        return LightGCNState(int(arrays["n_users"][0]), first, checked(arrays, "smooth", first.shape, what), memory)


@dataclass(frozen=True, eq=False)
class SmoothScorer:
    """Products of propagated vectors."""

    state: LightGCNState

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
        smooth = self.state.smooth
        return np.asarray(smooth[users] @ smooth[self.state.n_users :].T)


def _answers(state: LightGCNState, query: Ragged) -> Array:
    """Scores of the items each user is asked for, flat like the query."""
    users, items = state.smooth[query.rows], state.smooth[state.n_users + query.values]
    return np.asarray(np.einsum("nd,nd->n", users, items))


def graph_of(data: TrainingSet) -> sparse.csr_array:
    """The graph of users, then items: 1 / sqrt(|N_u| |N_i|) where a user has an item in training.

    >>> data = TrainingSet(Ragged.from_rows([[0, 1], [1]]), Ragged.from_rows([[0, 1], [1]]), 2)
    >>> (graph_of(data).toarray()[0] ** 2).round(2).tolist()
    [0.0, 0.0, 0.5, 0.25]
    """
    from scipy import sparse

    held = data.histories.to_csr(data.n_items)
    of_users, of_items = (np.maximum(np.asarray(held.sum(axis=axis)), 1) for axis in (1, 0))
    rows = np.repeat(np.arange(data.n_users), np.diff(held.indptr))
    held.data = (1 / np.sqrt(of_users[rows] * of_items[held.indices])).astype(np.float32)
    return sparse.block_array([[None, held], [held.T, None]], format="csr")


def pairs_of(data: TrainingSet, negatives: int, *, seed: int, round: int) -> tuple[I64, I64, I64]:
    """(user, positive, negative) as rows of the table, so many fresh negatives per positive; none for an empty pool."""
    everybody = np.arange(data.n_users)
    drawn = sample_negatives(
        data.excluded,
        negatives * data.histories.lengths,
        data.n_items,
        seed=seed,
        round=round,
        users=data.ids_of(everybody),
    )
    users = drawn.rows.astype(np.int64)
    liked = data.histories.values[data.histories.offsets[users] + within(drawn) // negatives]
    return users, data.n_users + liked.astype(np.int64), data.n_users + drawn.values.astype(np.int64)


@dataclass(frozen=True)
class OneHop:
    """A user is the mean of its own vector and its items' sum over sqrt(|N_u|)."""

    dim: int
    init: Init = Init("normal", 0.1)

    def specs(self) -> tuple[Spec, ...]:
        """Item rows and user vectors."""
        return Spec("item", Axis.ITEM, (self.dim,), self.init), Spec("user", Axis.USER, (self.dim,), self.init)

    def score(self, view: View, items: Tensor) -> Tensor:
        """e_u · q_j, one score per example."""
        history = view.history
        assert history is not None
        rows = view.rows("item", history.items)
        # Of a client's positives those of the example's own user; with one user per client these are all of them.
        own = (view.batch.users.unsqueeze(2) == history.users.unsqueeze(1)) * history.weight.unsqueeze(1)
        near = own.bmm(rows) / own.sum(2, keepdim=True).clamp(min=1).sqrt()
        return (view.rows("item", items) * (view.vector("user") + near) / 2).sum(-1)


def fedlightgcn(s: OneHopSettings) -> Algorithm:
    """User vectors on devices; item rows averaged over the clients that trained them, Adam on the server."""
    model = OneHop(s.dim)
    step = Phase((Move(("user",), s.user_rate), Move(("item",), s.item_rate)))
    server = Server("row-mean", Adam(), s.server_rate)
    return Algorithm(model, roles_of(model), (one_pass(s, step),), server=server, negatives=s.negatives, history=True)


METHODS = (
    Entry(
        "lightgcn",
        "Central LightGCN: vectors smoothed over the graph",
        PAPER,
        LightGCNSettings,
        LightGCN,
        expect={"ml-100k ties=file": (66.0, 38.9)},
    ),
    Entry(
        "fedlightgcn",
        "LightGCN on devices: one hop, from a user's own items",
        PAPER + "; its federated form is ours",
        OneHopSettings,
        lambda s: federation(s, fedlightgcn(s)),
        expect={"ml-100k ties=file": (62.3, 36.0)},
    ),
)
