"""A block: some clients at work together, and the turns in which they take their batches.

Clients of a block are ordered by their number of examples, so that those still at work are nearly always the first
ones and every tensor of the others is simply not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context, Pass
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.view import Batch
from fedmosaic.core.ragged import I64, Ragged, offsets_of
from fedmosaic.core.threads import VARIABLE, thread_count
from fedmosaic.data.batches import Examples, localise, make_examples, shuffled
from fedmosaic.engines.state import Array, Place
from fedmosaic.engines.task import PASSES, Task

Moment = Literal["round", "epoch", "batch"]
if os.environ.get(VARIABLE):
    torch.set_num_threads(thread_count())


@dataclass(frozen=True, eq=False)
class Turn:
    """One batch of the first `active` clients; `factor` multiplies their rates (0: the client rests)."""

    active: int
    batch: Batch
    factor: Tensor | None
    begins: Moment  # what begins with it: the round, an epoch, or only a batch


@dataclass(eq=False)
class Block:
    """A group of clients at work. Tensors are the block's own copies and move in place."""

    place: Place
    examples: Examples
    rows: I64  # row of each example in the block's item tables
    params: dict[str, Tensor]
    before: dict[str, Tensor]  # what will be sent, as it was when the round began
    given: dict[str, Tensor]  # item tables as the server sent them
    memory: dict[str, tuple[Array, ...]]
    gradients: dict[str, Tensor]  # summed, for gradient uploads
    shrunk: dict[str, Tensor]  # per client: what decay has left of rows without examples
    history: Batch | None = None
    rest: dict[str, Array] = field(default_factory=dict)  # per client: variance of noise due on rows without examples
    loss: Array = field(init=False)  # per client: summed over the examples seen
    seen: I64 = field(init=False)
    steps: I64 = field(init=False)

    def __post_init__(self) -> None:
        clients = self.place.clients.size
        self.loss, self.seen, self.steps = np.zeros(clients), np.zeros(clients, np.int64), np.zeros(clients, np.int64)

    @cached_property
    def trained(self) -> Array:
        """Which item rows some example trains; a dense block holds others too."""
        mask = np.zeros(self.place.touched.values.size, dtype=bool)
        mask[self.rows] = True
        return mask

    @cached_property
    def owners(self) -> dict[Axis, Tensor]:
        """For each axis, the client (place in the block) of every row."""
        return {
            Axis.ITEM: torch.from_numpy(self.place.touched.rows.astype(np.int64)),
            Axis.USER: torch.from_numpy(self.place.members.rows.astype(np.int64)),
            Axis.WHOLE: torch.arange(self.place.clients.size),
        }

    def head(self, axis: Axis, value: Any, active: int) -> Any:
        """The part of a tensor or array that belongs to the first clients (a view: it moves with the whole)."""
        if axis is Axis.WHOLE:
            return value[:active]
        owned = self.place.touched if axis is Axis.ITEM else self.place.members
        return value[: int(owned.offsets[active])]


def plan(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool) -> tuple[Place, Examples, I64]:
    """Examples of some clients and the rows they need: touched items only, or (`dense`) the whole catalogue."""
    data, ctx = task.data, task.ctx
    examples = make_examples(data, clients, negatives=algorithm.negatives, seed=ctx.own_seed, round=ctx.round)
    if dense:
        whole = np.tile(np.arange(data.n_items, dtype=np.int32), clients.size)
        touched = Ragged(whole, np.arange(clients.size + 1) * data.n_items)
        first = np.repeat(touched.offsets[:-1], np.diff(examples.offsets))
        return Place(clients, examples.members, touched, data.n_items), examples, first + examples.items
    index, touched = localise(examples.items, examples.offsets, data.n_items)
    return Place(clients, examples.members, touched, data.n_items), examples, index


def turns(block: Block, one: Pass, number: int, ctx: Context) -> Iterator[Turn]:
    """The turns of a pass. A client rests when it has no examples left in the epoch, or has stopped."""
    chosen, offsets = block.examples.part(one.part)
    lengths, size = np.diff(offsets), one.batch_size
    awake, last = np.ones(lengths.size, dtype=bool), np.full(lengths.size, np.nan)
    for epoch in range(one.epochs):
        key = epoch + PASSES * number
        order = chosen[shuffled(offsets, block.examples.client_ids, seed=ctx.own_seed, round=ctx.round, epoch=key)]
        for start in range(0, int(lengths.max(initial=0)), size):
            left = np.clip(lengths - start, 0, size) * awake
            if not left.any():
                break
            active = int(np.flatnonzero(left)[-1]) + 1
            width = int(left.max())
            column = np.minimum(np.arange(width), np.maximum(left[:active] - 1, 0)[:, None])  # padding repeats the last
            at = order[np.minimum(offsets[:active, None] + start + column, order.size - 1)]
            weight = np.arange(width) < left[:active, None]
            factor = None
            if one.uneven:
                rate = (left[:active] > 0) * one.step_decay ** block.steps[:active]
                factor = torch.from_numpy(rate.astype(np.float32))
            begins: Moment = "batch" if start else "epoch" if epoch or number else "round"
            yield Turn(active, _batch(block, at, weight), factor, begins)
            block.steps[:active] += left[:active] > 0
        if one.tolerance:
            mean = block.loss / np.maximum(block.seen, 1)
            awake &= ~(np.abs(mean - last) < one.tolerance * np.abs(last))  # nothing to compare with: go on
            last = mean


def history_of(examples: Examples, rows: I64, place: Place, which: Literal["positives", "examples", "all"]) -> Batch:
    """A block's positives (or all examples, or all rows of a dense block) as one padded batch."""
    if which == "all":
        grid = torch.arange(place.touched.values.size).reshape(place.clients.size, place.n_items)
        first = torch.from_numpy(np.repeat(place.members.offsets[:-1, None], place.n_items, axis=1))
        return Batch(grid, first, torch.ones(grid.shape), torch.ones(grid.shape))
    wanted = examples.labels == 1 if which == "positives" else np.ones(examples.items.size, dtype=bool)
    owner = np.repeat(np.arange(place.clients.size), np.diff(examples.offsets))[wanted]
    lengths = np.bincount(owner, minlength=place.clients.size)
    width = max(int(lengths.max(initial=0)), 1)
    column = np.arange(owner.size) - offsets_of(lengths)[owner]
    both, weight = np.zeros((2, lengths.size, width), np.int64), np.zeros((lengths.size, width), np.float32)
    both[0, owner, column], both[1, owner, column], weight[owner, column] = rows[wanted], examples.users[wanted], 1
    items, users, mask = torch.from_numpy(both[0]), torch.from_numpy(both[1]), torch.from_numpy(weight)
    return Batch(items, users, mask, mask)


def _batch(block: Block, at: I64, weight: Array) -> Batch:
    lone = (block.place.members.lengths == 1).all()  # one user each: one vector serves the whole row
    users = np.arange(at.shape[0])[:, None] if lone else block.examples.users[at].astype(np.int64)
    return Batch(
        items=torch.from_numpy(block.rows[at]),
        users=torch.from_numpy(users),
        labels=torch.from_numpy(block.examples.labels[at]),
        weight=torch.from_numpy(weight.astype(np.float32)),
    )
