"""The compiled program of one client that holds everybody (central MF and NCF): compiled batches, dense Adam.

A block is begun and finished as in the general engine; only the batches in between are compiled. Gradients of a batch
are collected row by row, then Adam moves every row, those without examples by their momentum. On ML-100K an epoch of MF
takes a quarter of the general engine's time, one of NCF half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, value_of
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.batches import shuffled
from fedmosaic.engines.fused.net import Tower, network, tower_widths
from fedmosaic.engines.fused.skeleton import SCORES_PER_CALL
from fedmosaic.engines.state import Array
from fedmosaic.engines.task import Outcome, Task

if TYPE_CHECKING:
    from fedmosaic.engines.block import Block

AT_ONCE = 128  # examples whose activations stay in a core's cache


class BatchRoom(NamedTuple):
    """Scratch arrays of a batch."""

    label: Any
    score: Any
    bits: Any
    power: Any
    part: Any

    @classmethod
    def of(cls, widest: int) -> BatchRoom:
        """For so many examples."""
        bits = np.empty(widest, np.int32)
        label, score, part = (np.empty(widest, np.float32) for _ in range(3))
        return cls(label, score, bits, bits.view(np.float32), part)


@dataclass(frozen=True)
class PoolProgram:
    """Made by `lower`, which has checked that the algorithm is nothing else."""

    algorithm: Algorithm
    name: ClassVar[str] = "fused"
    scores_at_once: ClassVar[int] = SCORES_PER_CALL

    def parts(self, task: Task) -> list[I64]:
        """One group: the one client."""
        return [np.arange(task.cohort.size)]

    def run(self, task: Task, parts: Sequence[I64] | None = None) -> Outcome:
        """The round of the general engine, its batches compiled."""
        from fedmosaic.engines.simulate import Simulate

        return Simulate(self.algorithm, work).run(task, self.parts(task))

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """As the general engine answers."""
        from fedmosaic.engines.answer import answer

        return answer(self.algorithm, task, users, query)


def work(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool) -> Block:
    """The client's local work."""
    from fedmosaic.engines.fused.pool_loop import linear_epoch, net_epoch
    from fedmosaic.engines.round import begin

    block, ctx = begin(algorithm, task, clients, dense=dense), task.ctx
    (one,) = algorithm.local
    (move,) = one.phases[0].moves
    assert isinstance(move.rule, Adam)
    rates, settings = np.full(1, value_of(move.rate, ctx), dtype=np.float32), move.rule.numbers
    model, layers = algorithm.model, network(algorithm)
    widths = tower_widths(model) if isinstance(model, NCF) else None
    third = _table(block, "bias") if widths is None else _joined(block, layers)
    sides = (_table(block, "item"), _table(block, "user"), third)
    examples = (block.rows, block.examples.users, block.examples.labels, one.batch_size)
    chosen, offsets = block.examples.part(one.part)
    for epoch in range(one.epochs):
        order = chosen[shuffled(offsets, block.examples.client_ids, seed=ctx.own_seed, round=ctx.round, epoch=epoch)]
        if widths is None:
            block.loss += linear_epoch(order, examples, sides, rates, settings)
        else:
            widest = min(one.batch_size, order.size, AT_ONCE)
            tower = Tower.of(widths, 0, widest, 0)
            block.loss += net_epoch(order, examples, sides, widths, BatchRoom.of(widest), tower, rates, settings)
        block.seen += order.size
        block.steps += -(-order.size // one.batch_size)
    if widths is not None:
        _put_back(block, layers, third)
    return block


def _table(block: Block, name: str) -> tuple[Any, ...]:
    """A parameter, its two moments and its clock as tables of rows, which move in place; empty if there is none."""
    if name not in block.params:
        return *(np.zeros((0, 0), np.float32) for _ in range(3)), np.zeros(0, np.float32)
    value, first, second, clock = (block.params[name].numpy(), *block.memory[name])
    return *(part.reshape(value.shape[0], -1) for part in (value, first, second)), clock.reshape(-1)


def _joined(block: Block, names: Sequence[str]) -> tuple[Any, ...]:
    """The same of several parameters, as one row: copies."""
    parts = [_table(block, name) for name in names]
    return *(np.concatenate([part[i] for part in parts], axis=1) for i in range(3)), parts[0][3].copy()


def _put_back(block: Block, names: Sequence[str], joined: tuple[Any, ...]) -> None:
    """One row of several parameters, back to where they came from."""
    begin = 0
    for table in (_table(block, name) for name in names):
        end = begin + table[0].shape[1]
        for part, row in zip(table[:3], joined[:3], strict=True):
            part[:] = row[:, begin:end]
        table[3][:] = joined[3]
        begin = end
