"""The readable engine: one client after the other, each with its own copy of the whole table. Slow; the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.engines.answer import SCORES_PER_BLOCK, answer, query_scores
from fedmosaic.engines.block import Block, turns
from fedmosaic.engines.round import begin, finish, train_batch
from fedmosaic.engines.state import Array, Kept, store
from fedmosaic.engines.task import Outcome, Task


@dataclass(frozen=True)
class Loop:
    """Every client of the cohort in turn."""

    algorithm: Algorithm
    name: ClassVar[str] = "loop"
    scores_at_once: ClassVar[int] = SCORES_PER_BLOCK

    def parts(self, task: Task) -> list[I64]:
        """Every client by itself."""
        return [np.array([place]) for place in range(task.cohort.size)]

    def run(self, task: Task, parts: Sequence[I64] | None = None) -> Outcome:
        """Uploads are added, what stays is put back."""
        total: UploadSum | None = None
        kept: list[Kept] = []
        answers = []
        members = task.data.members(task.cohort)
        for place, client in enumerate(task.cohort):
            block = work(self.algorithm, task, np.array([client]), dense=True)
            upload, stays = finish(self.algorithm, block, task.ctx)
            total = upload if total is None else total + upload
            kept.append(stays)
            if task.query_items is not None:
                rows = np.arange(members.offsets[place], members.offsets[place + 1])
                answers.append(query_scores(self.algorithm, task, block, task.query_items.take(rows)))
        assert total is not None
        return Outcome(total, store(task.devices, kept, task.data), np.concatenate(answers) if answers else None)

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """Scores with the newest state."""
        return answer(self.algorithm, task, users, query)


def work(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool) -> Block:
    """Local work of a block of clients: begin, then all turns of all passes."""
    block = begin(algorithm, task, clients, dense=dense)
    for number, one in enumerate(algorithm.local):
        for turn in turns(block, one, number, task.ctx):
            block = train_batch(algorithm, block, turn, one.phases, task.ctx)
    return block
