"""One objective, read twice: a mean over clients, or a weighted sum over items, each item a task of its own.

    client by client    L = 1/K · sum_k L_k        L_k = sum over the client's examples e of v_e · l_e
    item by item        L = sum_i W_i · T_i        W_i = sum over examples on item i of w_e,  w_e = v_e / K
                                                   T_i = 1/W_i · sum over examples on item i of w_e · l_e

v_e is 1 / (number of the client's examples) for the plain mean, and 1 / (size of the example's chunk) for the sum of
means over chunks that FedRecGEL's code trains on. The two readings are the same number: the sums change places, nothing
else. So the item-centred view is a way of looking at the objective, not another objective; what differs between models
is how far the tasks lie apart.

What we have of the paper (arXiv 2603.11503) says that it takes "an item-centered perspective" and casts the problem as
multi-task learning; its formulas are not in that text. Tasks here are items, with positives and drawn negatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.objective import ChunkedBCE, Objective, bce
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.view import View
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import I64, offsets_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.state import FederationState
from fedmosaic.report.tables import Table
from fedmosaic.reproduce.landscape import Direction, Landscape

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ItemTasks:
    """The tasks of a trained model: weight, loss and number of examples of every item that has any."""

    items: I64
    weights: F64  # W_i
    losses: F64  # T_i
    examples: I64
    client_centred: float  # by the algorithm's own objective, client by client

    @property
    def item_centred(self) -> float:
        """sum_i W_i T_i."""
        return float(self.weights @ self.losses)

    @property
    def mean(self) -> float:
        """Mean task loss, every item the same weight."""
        return float(self.losses.mean())

    @property
    def spread(self) -> float:
        """Standard deviation of task losses over items, every item the same weight."""
        return float(self.losses.std(ddof=1)) if self.losses.size > 1 else float("nan")

    @property
    def weighted_spread(self) -> float:
        """The same with the weights that the objective gives to items."""
        share = self.weights / self.weights.sum()
        return float(np.sqrt(share @ (self.losses - share @ self.losses) ** 2))


class Tasks(Landscape):
    """A trained federation's loss, example by example, with the item and the client that each example belongs to.

    Examples are drawn once, as many negatives as the algorithm trains with; the same ones for every model of a seed.
    """

    def __init__(self, federation: Federation, data: TrainingSet, state: FederationState, *, seed: int = 0):
        super().__init__(federation, data, state, negatives=federation.algorithm.negatives, seed=seed)
        self.context = Context(-1 - seed, state.seed, data.n_items, data.n_clients)
        self.n_users = data.n_users
        counts, items = [], []
        for block, batch in self._blocks:
            real = batch.weight > 0
            counts.append(real.sum(1).numpy())
            items.append(block.place.touched.values[batch.items[real].numpy()])
        self.counts: I64 = np.concatenate(counts)  # examples of each client
        self.clients: I64 = np.repeat(np.arange(self.counts.size), self.counts)  # of each example
        self.items: I64 = np.concatenate(items).astype(np.int64)

    @property
    def private(self) -> tuple[str, ...]:
        """What only devices hold."""
        return tuple(n for n in self.algorithm.specs if n not in self.shared)

    @property
    def tables(self) -> tuple[str, ...]:
        """The shared item tables."""
        return tuple(n for n in self.shared if self.algorithm.specs[n].axis is Axis.ITEM)

    def example_losses(self, sigma: float = 0.0, draw: int = 0, names: Sequence[str] | None = None) -> F64:
        """One cross-entropy per example, at θ + e with e ~ N(0, sigma² I).

        draw: which e; -1 - draw is the opposite of draw. names: parameters that move; all of them, if not said.
        """
        moving = set(self.algorithm.specs if names is None else names) if sigma else set()
        shared = {n: v + self._noise(n, v.shape, sigma, draw) if n in moving else v for n, v in self.shared.items()}
        own = self._private_noise(moving, sigma, draw)
        losses = []
        with torch.no_grad():
            for block, batch in self._blocks:
                users = torch.from_numpy(block.place.users)
                params = {n: v + own[n][users] if n in own else v for n, v in block.params.items()}
                found = self._block_losses(replace(block, params=params) if own else block, batch, shared)
                losses.append(found[batch.weight > 0])
        return torch.cat(losses).double().numpy()

    def squared_lengths(self) -> tuple[float, F64, F64]:
        """|θ|² of the shared parameters together, of each client's private ones, of each item's rows."""
        shared = sum(float(v.double().square().sum()) for v in self.shared.values())
        own: list[Tensor] = []
        for block, _ in self._blocks:
            total = torch.zeros(block.place.clients.size, dtype=torch.float64)
            for name in self.private:
                owners = block.owners[self.algorithm.specs[name].axis]
                total.index_add_(0, owners, block.params[name].double().square().flatten(1).sum(1))
            own.append(total)
        rows = [self.shared[n].double().square().flatten(1).sum(1).numpy() for n in self.tables]
        return shared, torch.cat(own).numpy(), np.sum(rows, axis=0)

    def sizes(self) -> tuple[int, int, int]:
        """How many numbers are shared, are one client's own, make one item's rows."""
        specs = self.algorithm.specs
        shared = sum(v.numel() for v in self.shared.values())
        own, row = (sum(int(np.prod(specs[n].shape)) for n in names) for names in (self.private, self.tables))
        return shared, own, row

    def by_item(self, objective: Objective | None = None) -> ItemTasks:
        """The objective (the algorithm's own, if not said) read item by item, and its value read client by client."""
        chosen = self.algorithm.objective if objective is None else objective
        weight, losses = self._weights(chosen), self.example_losses()
        n_items = self.context.n_items
        total = np.bincount(self.items, weights=weight, minlength=n_items).astype(np.float64)
        added = np.bincount(self.items, weights=weight * losses, minlength=n_items)
        examples = np.bincount(self.items, minlength=n_items)
        there = np.flatnonzero(examples)
        return ItemTasks(
            there, total[there], added[there] / total[there], examples[there], self._client_by_client(chosen)
        )

    def _weights(self, objective: Objective) -> F64:
        """w_e = v_e / K of each example."""
        if objective is bce:
            size = self.counts[self.clients]
        elif isinstance(objective, ChunkedBCE):
            place = np.arange(self.clients.size) - offsets_of(self.counts)[self.clients]
            begin = place // objective.size * objective.size
            size = np.minimum(objective.size, self.counts[self.clients] - begin)
        else:
            raise SettingsError("tasks by item need the plain cross-entropy or the one in chunks")
        return np.asarray(1.0 / (size * self.counts.size))

    def _client_by_client(self, objective: Objective) -> float:
        """1/K sum_k L_k, each L_k by the objective itself."""
        found = []
        with torch.no_grad():
            for block, batch in self._blocks:
                view = View(block.params, batch, block.given, block.history)
                found.append(objective(self.algorithm.model, view, batch, self.context))
        return float(torch.cat(found).double().mean())

    def _noise(self, name: str, shape: Sequence[int], sigma: float, draw: int) -> Tensor:
        """sigma · N(0, I), keyed by the draw and the parameter."""
        number, sign = (draw, 1.0) if draw >= 0 else (-1 - draw, -1.0)
        place = list(self.algorithm.specs).index(name)
        rng = keys.generator(seed=self.context.seed, purpose=keys.Purpose.DIRECTIONS, round=-1 - number, client=place)
        return torch.from_numpy(sign * sigma * rng.standard_normal(tuple(shape), dtype=np.float32))

    def _private_noise(self, moving: set[str], sigma: float, draw: int) -> Direction:
        """For every user, what is added to its own parameters; whatever the blocks."""
        found = {}
        for name in moving.intersection(self.private):
            spec = self.algorithm.specs[name]
            if spec.axis is not Axis.USER:
                raise SettingsError(f"{name} is a table of the device's own; only users' vectors can be moved")
            found[name] = self._noise(name, (self.n_users, *spec.shape), sigma, draw)
        return found


def tasks_table(title: str, found: dict[str, ItemTasks]) -> Table:
    """A row a model: both readings, and how far the tasks lie apart."""
    header = (
        "method",
        "items",
        "client by client",
        "item by item",
        "mean task",
        "spread",
        "weighted spread",
        "10 to 90 %",
    )
    rows = []
    for name, tasks in found.items():
        low, high = np.quantile(tasks.losses, [0.1, 0.9])
        values = (tasks.client_centred, tasks.item_centred)
        spreads = (tasks.mean, tasks.spread, tasks.weighted_spread)
        rows.append(
            (
                name,
                f"{tasks.items.size:,}",
                *(f"{v:.6f}" for v in values),
                *(f"{v:.4f}" for v in spreads),
                f"{low:.3f} to {high:.3f}",
            )
        )
    return Table(title, header, tuple(rows))
