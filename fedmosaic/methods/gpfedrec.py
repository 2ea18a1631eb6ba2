"""GPFedRec (KDD 2024): a graph of similar users on the server, and a table of one's own as an anchor.

    device   loss = cross-entropy + pull · mean (E_u - R_u)²       E_u begins as the global table, R_u is the server's
    server   A_uv = 1 if cos(E_u, E_v) > threshold · mean cosine of u, rows normalised;   R = A E,   global = mean of R

The released "cosine" option is a cosine *distance* and links the least similar users; this one is a similarity. The
server sees every upload by itself, so no secure sum can hide it, and both sides cost users · items · width numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context, Move, Pass, PerItem, Phase
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.extras import lazy_torch, require_torch
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.batches import cohort_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.state import Array, DeviceStore, Kept, Place, Rows, checked, first_rows, store
from fedmosaic.engines.task import Task
from fedmosaic.methods.base import Entry, RoundSettings, network_of, refuse_silos
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmosaic.engines.block import Block
else:
    torch = lazy_torch("gpfedrec")

CLIENTS_PER_CHUNK = 64


class GraphSettings(RoundSettings):
    """Settings of GPFedRec."""

    RENAMED: ClassVar = {"rate": "network_rate", "threshold": "similarity"}

    network_rate: float = Field(default=1.0, gt=0, description="rate of the network")
    user_rate: float = Field(default=3.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=8.0, gt=0, description="item rate = items · factor")
    pull: float = Field(default=0.1, ge=0, description="weight of the anchor")
    similarity: float = Field(default=1.0, ge=0, description="neighbours are more similar than this times the mean")
    init: float = Field(default=0.3, gt=0, description="deviation of the first vectors")


@dataclass(frozen=True, eq=False)
class GraphState:
    """The global table, what devices hold, and every user's anchor and tuned table."""

    seed: int
    item: Array
    private: Mapping[str, Array]
    anchor: Array  # [users, items, width]
    tuned: Array
    last: Array

    @property
    def n_items(self) -> int:
        """How many items the catalogue has."""
        return int(self.item.shape[0])


@dataclass(frozen=True)
class Anchored:
    """A host with a table of anchors beside its own; they are read, never scored with."""

    host: Model
    dim: int

    def specs(self) -> tuple[Spec, ...]:
        """The host's, and the anchors."""
        return (*self.host.specs(), Spec("anchor", Axis.ITEM, (self.dim,), Init("zero")))

    def score(self, view: View, items: Tensor) -> Tensor:
        """The host's score; anchors are not scored with."""
        return self.host.score(view, items)


@dataclass(frozen=True)
class Pulled:
    """Cross-entropy plus pull · mean over all rows of (item - anchor)²."""

    pull: float

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        """One loss per client; every client holds the whole catalogue."""
        gap = (view.params["item"] - view.params["anchor"]).square().reshape(batch.items.shape[0], -1).mean(1)
        return bce(model, view, batch, ctx) + self.pull * gap


@dataclass(frozen=True)
class GPFedRec:
    """Rounds of local training, then the server's graph."""

    settings: GraphSettings

    @property
    def rounds(self) -> int:
        """As many as set."""
        return self.settings.rounds

    @property
    def algorithm(self) -> Algorithm:
        """The devices' part; the anchor table is the device's, written by the server between rounds."""
        s = self.settings
        model = Anchored(NCF(s.dim, init=Init("normal", s.init)), s.dim)
        network = network_of(model)
        score = Phase((Move(network, s.network_rate), Move(("user",), s.user_rate)))
        items = Phase((Move(("item",), PerItem(s.item_factor)),))
        roles = dict.fromkeys((*network, "user", "anchor"), Role.PRIVATE) | {"item": Role.SHARED}
        local = (Pass((score, items), s.local_epochs, s.batch_size),)
        return Algorithm(model, roles, local, objective=Pulled(s.pull), negatives=s.negatives, whole=True)

    def check_installed(self) -> None:
        """Refuse it where PyTorch is not installed."""
        require_torch("gpfedrec")

    def start(self, data: TrainingSet, seed: int) -> GraphState:
        """One table for all; every anchor is that table."""
        algorithm = self.algorithm
        item = algorithm.specs["item"].table(seed, data.n_items)
        private = {n: first_rows(algorithm.specs[n], seed, data) for n in algorithm.stored if n != "anchor"}
        everybody = np.broadcast_to(item, (data.n_users, *item.shape))
        last = np.zeros(data.n_users, dtype=np.int32)
        return GraphState(seed, item, private, everybody.copy(), everybody.copy(), last)

    def advance(
        self, data: TrainingSet, state: GraphState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[GraphState, RoundRecord, npt.NDArray[np.floating] | None]:
        """Local work of the cohort, one table per client, and the graph over those tables."""
        from fedmosaic.engines.loop import work
        from fedmosaic.engines.round import finish

        refuse_silos(data, "gpfedrec")
        cohort = cohort_of(data, self.settings.participation, seed=seed, round=round)
        ctx = Context(round, seed, data.n_items, data.n_clients)
        task = self._task(data, state, ctx, cohort)
        tuned, loss = state.tuned.copy(), 0.0
        kept: list[Kept] = []
        for at in range(0, cohort.size, CLIENTS_PER_CHUNK):
            clients = cohort[at : at + CLIENTS_PER_CHUNK]
            clients = clients[np.argsort(-data.histories.lengths[clients], kind="stable")]
            block = work(self.algorithm, task, clients, dense=True)
            upload, stays = finish(self.algorithm, block, ctx)
            loss += upload.loss
            tuned[clients] = block.params["item"].reshape(clients.size, data.n_items, -1).numpy()
            kept.append(Kept({n: piece for n, piece in stays.params.items() if n != "anchor"}))
        devices = store(task.devices, kept, data)
        anchor = state.anchor.copy()
        anchor[cohort] = neighbours_mean(tuned[cohort], self.settings.similarity)
        last = state.last.copy()
        last[cohort] = round
        newest = anchor[cohort].mean(axis=0)
        anchor[last == 0], tuned[last == 0] = newest, newest  # whoever has not been drawn yet has the newest table
        private = {n: devices.dense(n) for n in state.private}
        after = GraphState(state.seed, newest, private, anchor, tuned, last)
        up, down = self.traffic(data.n_items)
        answers = None if query is None else self._scores(data, after, query)
        return after, RoundRecord(cohort.size, up, down, loss / cohort.size, float(data.n_items)), answers

    def traffic(self, n_items: int) -> tuple[int, int]:
        """A table goes up; the global one and the anchor come down."""
        size = 4 * n_items * self.settings.dim
        return size, 2 * size

    def pack(self, state: GraphState) -> dict[str, Array]:
        """As named arrays, for a file."""
        arrays = {"server/item": state.item, "seed": np.array([state.seed]), "n_items": np.array([state.n_items])}
        arrays |= {f"private/{n}": v for n, v in state.private.items()}
        return arrays | {"anchor": state.anchor, "tuned": state.tuned, "last": state.last}

    def unpack(self, arrays: Mapping[str, Array], what: str) -> GraphState:
        """Read `pack` back."""
        if "anchor" not in arrays or arrays["anchor"].shape[2] != self.settings.dim:
            raise ForeignError(f"{what} holds no anchors of width {self.settings.dim}; it belongs to another method")
        anchor = arrays["anchor"]
        item, tuned = (
            checked(arrays, "server/item", anchor.shape[1:], what),
            checked(arrays, "tuned", anchor.shape, what),
        )
        private = {n.removeprefix("private/"): v for n, v in arrays.items() if n.startswith("private/")}
        return GraphState(int(arrays["seed"][0]), item, private, anchor, tuned, arrays["last"])

    def _task(self, data: TrainingSet, state: GraphState, ctx: Context, cohort: I64) -> Task:
        rows = Rows(np.arange(data.n_users * data.n_items), state.anchor.reshape(-1, self.settings.dim))
        return Task(data, {"item": state.item}, DeviceStore({**state.private, "anchor": rows}), ctx, cohort)

    def _scores(self, data: TrainingSet, state: GraphState, query: Ragged) -> Array:
        from fedmosaic.engines.answer import query_scores

        found = [
            query_scores(self._answering, task, block, query.take(users))
            for users, task, block in self._blocks(data, state, np.arange(data.n_users))
        ]
        return np.concatenate(found)

    @property
    def _answering(self) -> Algorithm:
        """The devices' part when they answer: with the table they tuned."""
        algorithm = self.algorithm
        return replace(algorithm, roles={**algorithm.roles, "item": Role.PRIVATE})

    def _blocks(self, data: TrainingSet, state: GraphState, users: I64) -> list[tuple[I64, Task, Block]]:
        """Blocks that hold what devices answer with."""
        from fedmosaic.engines.answer import holding

        result = []
        ctx = Context(0, state.seed, data.n_items, data.n_clients)
        own = Rows(np.arange(data.n_users * data.n_items), state.tuned.reshape(-1, self.settings.dim))
        for at in range(0, users.size, CLIENTS_PER_CHUNK):
            part = users[at : at + CLIENTS_PER_CHUNK]
            task = self._task(data, state, ctx, part)
            task = replace(task, devices=DeviceStore({**task.devices.params, "item": own}))
            everything = np.tile(np.arange(data.n_items, dtype=np.int32), part.size)
            whole = Ragged(everything, np.arange(part.size + 1) * data.n_items)
            place = Place(part, data.members(part), whole, data.n_items)
            result.append((part, task, holding(self._answering, task, place)))
        return result

    def scorer(self, data: TrainingSet, state: GraphState) -> TunedScorer:
        """Answers with the tables devices tuned."""
        return TunedScorer(self, data, state)

    def vectors(self, state: GraphState) -> npt.NDArray[np.floating]:
        """The table that is common to all users."""
        table: npt.NDArray[np.floating] = state.item
        return table


@dataclass(frozen=True, eq=False)
class TunedScorer:
    """Scores from every device's own table."""

    method: GPFedRec
    data: TrainingSet
    state: GraphState

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
        from fedmosaic.engines.answer import score_users

        everything = np.arange(self.data.n_items, dtype=np.int32)
        return np.concatenate(
            [
                score_users(
                    self.method._answering, task, block, np.broadcast_to(everything, (part.size, everything.size))
                )
                for part, task, block in self.method._blocks(self.data, self.state, users)
            ]
        )


def neighbours_mean(tables: Array, threshold: float) -> Array:
    """Each table replaced by the mean of those more similar to it than `threshold` times its mean similarity.

    >>> a = np.array([[[1.0, 0.0]], [[1.0, 0.5]], [[0.0, 1.0]]], dtype=np.float32)
    >>> neighbours_mean(a, 1.0).tolist()
    [[[1.0, 0.25]], [[1.0, 0.25]], [[0.0, 1.0]]]
    """
    flat = torch.from_numpy(tables.reshape(tables.shape[0], -1))
    unit = torch.nn.functional.normalize(flat, dim=1)
    similar = unit @ unit.T
    links = (similar > threshold * similar.mean(1, keepdim=True)).float()
    links.fill_diagonal_(1)
    return (links @ flat / links.sum(1, keepdim=True)).numpy().reshape(tables.shape)


METHODS = (
    Entry(
        "gpfedrec",
        "A graph of similar users on the server gives every user a table as an anchor",
        "Zhang et al., GPFedRec: graph-guided personalization, KDD 2024 (with similarity, not distance)",
        GraphSettings,
        GPFedRec,
    ),
)
