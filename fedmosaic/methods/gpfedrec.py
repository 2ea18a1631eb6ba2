"""GPFedRec (KDD 2024): a graph of similar users on the server, and a table of one's own as an anchor.

    device   loss = cross-entropy + pull · mean (E_u - R_u)²       E_u begins as the global table, R_u is the server's
    server   A_uv = 1 if cos(E_u, E_v) > threshold · mean cosine of u, rows normalised;   R = A E,   global = mean of R

The released "cosine" option is a cosine *distance* and links the least similar users; this one is a similarity. The
server sees every upload by itself, so no secure sum can hide it, and both sides cost users · items · width numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context, Move, Pass, PerItem, Phase
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.batches import cohort_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines import loop
from fedmosaic.engines.answer import holding, probe_scores, score_users
from fedmosaic.engines.block import Block, Task
from fedmosaic.engines.devices import Array, Place, Stored, first_rows
from fedmosaic.engines.round import finish
from fedmosaic.methods.hosts import RoundSettings, network_of, refuse_silos
from fedmosaic.training.method import RoundRecord, State

CLIENTS_PER_CHUNK = 64


class GraphSettings(RoundSettings):
    """Settings of GPFedRec."""

    rate: float = Field(default=1.0, gt=0, description="rate of the network")
    user_rate: float = Field(default=3.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=8.0, gt=0, description="item rate = items · factor")
    pull: float = Field(default=0.1, ge=0, description="weight of the anchor")
    threshold: float = Field(default=1.0, ge=0, description="neighbours are more similar than this times the mean")
    init: float = Field(default=0.3, gt=0, description="deviation of the first vectors")


@dataclass(frozen=True)
class Anchored:
    """A host with a table of anchors beside its own; they are read, never scored with."""

    host: Model
    dim: int

    def specs(self) -> tuple[Spec, ...]:
        """The host's, and the anchors."""
        return (*self.host.specs(), Spec("anchor", Axis.ITEM, (self.dim,), Init("zero")))

    def score(self, view: View, items: Tensor) -> Tensor:
        """The host's."""
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
        score = Phase((Move(network, s.rate), Move(("user",), s.user_rate)))
        items = Phase((Move(("item",), PerItem(s.item_factor)),))
        roles = dict.fromkeys((*network, "user", "anchor"), Role.PRIVATE) | {"item": Role.SHARED}
        local = (Pass((score, items), s.local_epochs, s.batch_size),)
        return Algorithm(model, roles, local, objective=Pulled(s.pull), negatives=s.negatives, whole=True)

    def start(self, data: TrainingSet, seed: int) -> State:
        """One table for all; every anchor is that table."""
        algorithm = self.algorithm
        item = algorithm.specs["item"].table(seed, data.n_items)
        state: dict[str, Array] = {"server/item": item, "seed": np.array([seed]), "n_items": np.array([data.n_items])}
        for name in (n for n in algorithm.stored if n != "anchor"):
            state[f"private/{name}"] = first_rows(algorithm.specs[name], seed, data)
        everybody = np.broadcast_to(item, (data.n_users, *item.shape))
        last = np.zeros(data.n_users, dtype=np.int32)
        return state | {"anchor": everybody.copy(), "tuned": everybody.copy(), "last": last}

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, probe: Ragged | None = None
    ) -> tuple[State, RoundRecord, npt.NDArray[np.floating] | None]:
        """Local work of the cohort, one table per client, and the graph over those tables."""
        refuse_silos(data, "gpfedrec")
        cohort = cohort_of(data, self.settings.participation, seed=seed, round=round)
        ctx = Context(round, seed, data.n_items, data.n_clients)
        task = self._task(data, state, ctx, cohort)
        tuned, loss = state["tuned"].copy(), 0.0
        held: dict[str, list[Stored]] = {}
        for at in range(0, cohort.size, CLIENTS_PER_CHUNK):
            clients = cohort[at : at + CLIENTS_PER_CHUNK]
            clients = clients[np.argsort(-data.histories.lengths[clients], kind="stable")]
            block = loop.work(self.algorithm, task, clients, dense=True)
            upload, stays = finish(self.algorithm, block, ctx)
            loss += upload.loss
            tuned[clients] = block.params["item"].reshape(clients.size, data.n_items, -1).numpy()
            for name, value in stays.items():
                if not name.startswith("private/anchor"):
                    held.setdefault(name, []).append(value)
        after = {k: v for k, v in loop.merge_held(task, held).items() if not k.startswith("private/anchor")}
        anchor = state["anchor"].copy()
        anchor[cohort] = neighbours_mean(tuned[cohort], self.settings.threshold)
        last = state["last"].copy()
        last[cohort] = round
        newest = anchor[cohort].mean(axis=0)
        anchor[last == 0], tuned[last == 0] = newest, newest  # whoever has not been drawn yet has the newest table
        result = {**state, **after, "tuned": tuned, "anchor": anchor, "server/item": newest, "last": last}
        size = 4 * tuned[0].size
        answers = None if probe is None else self._scores(data, result, probe)
        return result, RoundRecord(cohort.size, size, 2 * size, loss / cohort.size, float(data.n_items)), answers

    def _task(self, data: TrainingSet, state: State, ctx: Context, cohort: I64) -> Task:
        held = {k: v for k, v in state.items() if k.startswith("private/")}
        held["private/anchor.keys"] = np.arange(data.n_users * data.n_items)
        held["private/anchor.rows"] = state["anchor"].reshape(-1, self.settings.dim)
        return Task(data, {"item": state["server/item"]}, held, ctx, cohort)

    def _scores(self, data: TrainingSet, state: State, probe: Ragged) -> Array:
        found = [
            probe_scores(self._answering, task, block, probe.take(users))
            for users, task, block in self._blocks(data, state, np.arange(data.n_users))
        ]
        return np.concatenate(found)

    @property
    def _answering(self) -> Algorithm:
        """The devices' part when they answer: with the table they tuned."""
        algorithm = self.algorithm
        return replace(algorithm, roles={**algorithm.roles, "item": Role.PRIVATE})

    def _blocks(self, data: TrainingSet, state: State, users: I64) -> list[tuple[I64, Task, Block]]:
        """Blocks that hold what devices answer with."""
        result = []
        ctx = Context(0, int(state["seed"][0]), data.n_items, data.n_clients)
        for at in range(0, users.size, CLIENTS_PER_CHUNK):
            part = users[at : at + CLIENTS_PER_CHUNK]
            task = self._task(data, state, ctx, part)
            held = {**task.held, "private/item.keys": task.held["private/anchor.keys"]}
            held["private/item.rows"] = state["tuned"].reshape(-1, self.settings.dim)
            task = replace(task, held=held)
            everything = np.tile(np.arange(data.n_items, dtype=np.int32), part.size)
            whole = Ragged(everything, np.arange(part.size + 1) * data.n_items)
            place = Place(part, data.members(part), whole, data.n_items)
            result.append((part, task, holding(self._answering, task, place)))
        return result

    def scorer(self, data: TrainingSet, state: State) -> TunedScorer:
        """Answers with the tables devices tuned."""
        return TunedScorer(self, data, state)

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """The global table."""
        return state["server/item"]


@dataclass(frozen=True, eq=False)
class TunedScorer:
    """Scores from every device's own table."""

    method: GPFedRec
    data: TrainingSet
    state: State

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
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
