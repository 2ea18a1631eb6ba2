"""The general engine: many clients at once in flat blocks, autograd, any algorithm.

Clients are sorted by their number of examples and cut into chunks, so that a block is nearly rectangular; each chunk
holds only the rows its clients touch. Uploads are summed in fixed point, so chunks may be taken in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.ragged import I64, Ragged, slots
from fedmosaic.engines.answer import SCORES_PER_BLOCK, answer, query_scores
from fedmosaic.engines.block import Block
from fedmosaic.engines.loop import work
from fedmosaic.engines.round import finish
from fedmosaic.engines.state import Array, Kept, store
from fedmosaic.engines.task import Outcome, Task, users_of

CLIENTS_PER_CHUNK = 64
LEAST = 4  # clients that share a chunk however long they are
FILLED = 0.6  # the shortest client of a chunk has at least this share of the longest one's batch


@dataclass(frozen=True)
class Simulate:
    """The cohort, chunk by chunk; `work` does a chunk's local work."""

    algorithm: Algorithm
    work: Callable[..., Block] = work
    name: ClassVar[str] = "simulate"
    scores_at_once: ClassVar[int] = SCORES_PER_BLOCK

    def parts(self, task: Task) -> list[I64]:
        """Chunks of clients with similar numbers of examples."""
        return list(chunks(self.algorithm, task))

    def run(self, task: Task, parts: Sequence[I64] | None = None) -> Outcome:
        """In its own chunks, or in given ones (places in the cohort)."""
        algorithm, query = self.algorithm, task.query_items
        total: UploadSum | None = None
        kept: list[Kept] = []
        answers = None if query is None else np.empty(query.values.size, dtype=np.float32)
        for chunk in self.parts(task) if parts is None else parts:
            block = self.work(algorithm, task, task.cohort[chunk], dense=False)
            upload, stays = finish(algorithm, block, task.ctx)
            total = upload if total is None else total + upload
            kept.append(stays)
            if query is not None and answers is not None:
                rows = users_of(task.data.members(task.cohort), chunk)
                answers[slots(query, rows)] = query_scores(algorithm, task, block, query.take(rows))
        assert total is not None
        return Outcome(total, store(task.devices, kept, task.data), answers)

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """Scores with the newest state."""
        return answer(self.algorithm, task, users, query)


def chunks(algorithm: Algorithm, task: Task, size: int = CLIENTS_PER_CHUNK) -> Iterator[I64]:
    """Places in the cohort, clients with most examples first; a chunk ends early when it would be mostly padding."""
    if algorithm.server.reduction.each:  # every client by itself: its upload is looked at
        size = 1
    members, data = task.data.members(task.cohort), task.data
    drawn = np.where(data.excluded.lengths < data.n_items, algorithm.negatives, 0)  # an empty pool gives none
    per_user = (data.histories.lengths * (1 + drawn))[members.values]
    lengths = np.bincount(members.rows, weights=per_user, minlength=task.cohort.size)
    order = np.argsort(-lengths, kind="stable")
    widths = np.minimum(lengths[order], max((one.batch_size for one in algorithm.local), default=1))
    start = 0
    while start < order.size:
        near = int(np.searchsorted(-widths[start:], -FILLED * widths[start], side="right"))
        stop = min(start + size, max(start + near, start + min(LEAST, size)), order.size)
        yield order[start:stop]
        start = stop
