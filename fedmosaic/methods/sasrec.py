"""SASRec (Kang & McAuley, ICDM 2018): a Transformer reads a history in its order and says what comes next; central.

    score(j) = x · E[j]        x: what `sasrec_network` makes of the history, E: the item table, which it also reads

An event attends to itself and to those before it, so one pass over a history predicts every item of it from what came
before. The loss is the cross-entropy of those predictions among the whole catalogue (Klenitskiy & Vasilev, RecSys 2023,
found it to be far better than the paper's one negative), or among some items drawn for a step (`negatives`), whose
weight is then raised to stand for all.

Ours: every history begins with a row of its own, so that the first item is predicted too and whoever has no history
gets an answer; attention weights are not dropped, as in the paper's text (its code drops them). Events of one time have
no order: every epoch draws one (`reorder`), unless the order of the rows is said to mean something.

Answers come from the history that is given, so nobody needs to have been there in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedmosaic.algorithm.local import Adam
from fedmosaic.algorithm.parameters import Axis, Init, Spec
from fedmosaic.core import keys
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.extras import lazy_torch, require_torch
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.state import Array, checked
from fedmosaic.methods.base import Entry, MethodSettings
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmosaic.methods.sasrec_network import Network
else:
    torch = lazy_torch("sasrec")

USERS = 32  # whose histories are read together


class SASRecSettings(MethodSettings):
    """Settings of SASRec on one server that holds everybody's history; a round is an epoch."""

    rounds: int = Field(default=100, ge=1, description="epochs")
    dim: int = Field(default=64, ge=1, description="width of the vectors")
    blocks: int = Field(default=2, ge=1, description="attention and network, one after the other, so many times")
    heads: int = Field(default=2, ge=1, description="attentions side by side; a divisor of the width")
    length: int = Field(default=200, ge=1, description="events of a history that are read, the last ones")
    dropout: float = Field(default=0.2, ge=0, lt=1, description="share of numbers dropped in training")
    negatives: int = Field(default=0, ge=0, description="items drawn for a step's softmax; 0: the whole catalogue")
    reorder: bool = Field(default=True, description="draw an order of events of one time in every epoch")
    batch_size: int = Field(default=128, ge=1, description="users per step")
    rate: float = Field(default=1e-3, gt=0, description="rate of Adam")

    @model_validator(mode="after")
    def _heads_divide(self) -> SASRecSettings:
        if self.dim % self.heads:
            raise ValueError(f"heads must divide the width, and {self.heads} does not divide {self.dim}")
        return self

    def shapes(self, n_items: int) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape; the last row of `item` begins all histories."""
        d = self.dim
        shapes: dict[str, tuple[int, ...]] = {"item": (n_items + 1, d), "place": (self.length, d)}
        for b in range(self.blocks):
            layers = {"mixed": (3 * d, d), "joined": (d, d), "inner": (d, d), "outer": (d, d)}
            for name, shape in layers.items():
                shapes |= {f"{b}.{name}": shape, f"{b}.{name}.bias": shape[:1]}
            shapes |= {f"{b}.{name}.{part}": (d,) for name in ("before", "between") for part in ("scale", "bias")}
        return shapes | {"after.scale": (d,), "after.bias": (d,)}


@dataclass(frozen=True, eq=False)
class SASRecState:
    """The network, and the memory of its Adam."""

    params: Mapping[str, Array]
    memory: Mapping[str, tuple[Array, ...]]


@dataclass(frozen=True)
class SASRec:
    """Epochs of next-item prediction over everybody's history."""

    settings: SASRecSettings
    pooled: ClassVar[bool] = True  # one server holds everybody
    from_history: ClassVar[bool] = True

    RULE: ClassVar[Adam] = Adam(beta2=0.98)

    @property
    def rounds(self) -> int:
        """As many as set."""
        return self.settings.rounds

    def check_installed(self) -> None:
        """Refuse it where PyTorch is not installed."""
        require_torch("sasrec")

    def start(self, data: TrainingSet, seed: int) -> SASRecState:
        """A network of small random numbers."""
        params = {n: _first(n, shape, seed) for n, shape in self.settings.shapes(data.n_items).items()}
        return SASRecState(params, {n: self.RULE.memory(v) for n, v in params.items()})

    def advance(
        self, data: TrainingSet, state: SASRecState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[SASRecState, RoundRecord, None]:
        """One epoch: all users with a history, in a drawn order, some at a time."""
        s, rng = self.settings, keys.generator(seed=seed, purpose=keys.Purpose.SHUFFLE, round=round)
        noise = keys.derive(seed=seed, purpose=keys.Purpose.NOISE, round=round)
        network = _network(s, state)
        memory = {n: tuple(part.copy() for part in parts) for n, parts in state.memory.items()}
        events = begun(in_some_order(data.held, rng) if s.reorder else data.histories, data.n_items, s.length + 1)
        order, total = rng.permutation(np.flatnonzero(data.histories.lengths)), 0.0
        for at in range(0, order.size, s.batch_size):
            part = events.take(order[at : at + s.batch_size])
            loss, slopes = self._slopes(network, part, keys.fold(noise, keys.words(at)))
            for (name, value), slope in zip(network.params.items(), slopes, strict=True):
                self.RULE.step(value.numpy(), slope.numpy(), memory[name], s.rate)
            total += loss
        after = SASRecState({n: v.numpy() for n, v in network.params.items()}, memory)
        return after, RoundRecord(1, 0, 0, total / max(int((events.lengths - 1).sum()), 1)), None

    def _slopes(self, network: Network, events: Ragged, key: keys.U64) -> tuple[float, list[Tensor]]:
        """The losses of some users' events, summed, and the gradient of their mean, by parameter.

        Users of alike length are read together, so that little is padded. The gradients of these groups are added up in
        one order, so the number of threads does not matter.
        """
        from fedmosaic.methods.sasrec_network import drawing, dropping, side_by_side

        s, items = self.settings, network.params["item"].shape[0] - 1
        drawn = torch.randperm(items, generator=drawing(key, 0))[: s.negatives] if s.negatives else torch.arange(items)
        order = np.argsort(-events.lengths, kind="stable")
        groups = [events.take(order[at : at + USERS]) for at in range(0, order.size, USERS)]
        told = side_by_side(
            lambda at: network.slopes(groups[at], drawn, dropping(s.dropout, drawing(key, at + 1))), len(groups)
        )
        count = int((events.lengths - 1).sum())
        sums = (sum(more, first) / count for first, *more in zip(*(slopes for _, slopes in told), strict=True))
        return sum(loss for loss, _ in told), list(sums)

    def scorer(self, data: TrainingSet, state: SASRecState) -> NextScorer:
        """Answers from the users' histories."""
        return NextScorer(self.settings, data.held, state)

    def vectors(self, state: SASRecState) -> npt.NDArray[np.floating]:
        """The item table."""
        return np.asarray(state.params["item"][:-1])

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Nothing travels: there is one server."""
        return 0, 0

    def pack(self, state: SASRecState) -> dict[str, Array]:
        """As named arrays, for a file."""
        arrays = {f"network/{n}": v for n, v in state.params.items()}
        return arrays | {f"rule/{n}/{i}": m for n, parts in state.memory.items() for i, m in enumerate(parts)}

    def unpack(self, arrays: Mapping[str, Array], what: str) -> SASRecState:
        """Read `pack` back."""
        if "network/item" not in arrays:
            raise ForeignError(f"{what} holds no network of sasrec; it belongs to another method")
        shapes = self.settings.shapes(arrays["network/item"].shape[0] - 1)
        params = {n: checked(arrays, f"network/{n}", shape, what) for n, shape in shapes.items()}
        memory = {
            n: tuple(checked(arrays, f"rule/{n}/{i}", m.shape, what) for i, m in enumerate(self.RULE.memory(v)))
            for n, v in params.items()
        }
        return SASRecState(params, memory)


@dataclass(frozen=True, eq=False)
class NextScorer:
    """What comes next, for histories by their position."""

    settings: SASRecSettings
    held: Histories
    state: SASRecState

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
        from fedmosaic.methods.sasrec_network import side_by_side

        network, items = _network(self.settings, self.state), self.held.n_items
        found = np.empty((users.size, items), np.float32)

        def work(at: int) -> None:
            part = slice(at * USERS, (at + 1) * USERS)
            events = begun(self.held.items.take(users[part]), items, self.settings.length)
            found[part] = network.scores(events).numpy()

        side_by_side(work, -(-users.size // USERS))
        return found


def begun(items: Ragged, start: int, length: int) -> Ragged:
    """Histories with a beginning before them, and of those the last events.

    >>> [row.tolist() for row in begun(Ragged.from_rows([[4, 5, 6], [], [7]]), 9, 3)]
    [[4, 5, 6], [9], [9, 7]]
    """
    rows = np.concatenate([np.arange(len(items)), items.rows])
    whole = Ragged.group(rows, np.concatenate([np.full(len(items), start), items.values]), len(items))
    ends = np.repeat(whole.offsets[1:], whole.lengths)
    return whole.only(np.arange(ends.size) >= ends - length)


def in_some_order(held: Histories, rng: np.random.Generator) -> Ragged:
    """Histories in which events of one time stand in an order drawn for them; without times, as they are."""
    if held.times is None:
        return held.items
    order = np.lexsort((rng.random(held.times.size), held.times, held.items.rows))
    return Ragged(held.items.values[order], held.items.offsets)


def _network(s: SASRecSettings, state: SASRecState) -> Network:
    """The network that a state is of."""
    from fedmosaic.methods.sasrec_network import Network

    return Network.of(state.params, s.blocks, s.heads)


def _first(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """A part as it begins: tables of deviation 0.02, layers by Glorot & Bengio 2010, norms that change nothing."""
    if len(shape) == 1:
        return np.full(shape, name.endswith("scale"), np.float32)
    scale = 0.02 if name in ("item", "place") else sqrt(2 / sum(shape))
    return Spec(f"sasrec.{name}", Axis.WHOLE, shape, Init("normal", scale)).table(seed, 0)


METHODS = (
    Entry(
        "sasrec",
        "Central SASRec: a Transformer over histories in their order",
        "Kang & McAuley, Self-attentive sequential recommendation, ICDM 2018",
        SASRecSettings,
        SASRec,
    ),
)
