"""The general engine: many clients at once in flat blocks, autograd, any algorithm.

Clients are sorted by their number of examples and cut into chunks, so that a block is nearly rectangular; each chunk
holds only the rows its clients touch. Uploads are summed in fixed point, so chunks may be taken in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.upload import Sum
from fedmosaic.core.ragged import I64, slots
from fedmosaic.engines.answer import probe_scores
from fedmosaic.engines.block import Block, Outcome, Task, users_of
from fedmosaic.engines.devices import Stored
from fedmosaic.engines.loop import merge_held, work
from fedmosaic.engines.round import finish

CLIENTS_PER_CHUNK = 64
LEAST = 4  # clients that share a chunk however long they are
FILLED = 0.6  # the shortest client of a chunk has at least this share of the longest one's batch


def run_round(
    algorithm: Algorithm, task: Task, parts: Sequence[I64] | None = None, work: Callable[..., Block] = work
) -> Outcome:
    """The cohort, chunk by chunk: in its own chunks, or in given ones (places in the cohort)."""
    total: Sum | None = None
    held: dict[str, list[Stored]] = {}
    probed = None if task.probe is None else np.empty(task.probe.values.size, dtype=np.float32)
    for chunk in chunks(algorithm, task) if parts is None else parts:
        block = work(algorithm, task, task.cohort[chunk], dense=False)
        upload, stays = finish(algorithm, block, task.ctx)
        total = upload if total is None else total + upload
        for name, value in stays.items():
            held.setdefault(name, []).append(value)
        if task.probe is not None and probed is not None:
            rows = users_of(task.data.members(task.cohort), chunk)
            probed[slots(task.probe, rows)] = probe_scores(algorithm, task, block, task.probe.take(rows))
    assert total is not None
    return Outcome(total, merge_held(task, held), probed)


def chunks(algorithm: Algorithm, task: Task, size: int = CLIENTS_PER_CHUNK) -> Iterator[I64]:
    """Places in the cohort, clients with most examples first; a chunk ends early when it would be mostly padding."""
    members, data = task.data.members(task.cohort), task.data
    drawn = np.where(data.excluded.lengths < data.n_items, algorithm.negatives, 0)  # an empty pool gives none
    per_user = (data.histories.lengths * (1 + drawn))[members.values]
    lengths = np.bincount(members.rows, weights=per_user, minlength=task.cohort.size)
    order = np.argsort(-lengths, kind="stable")
    widths = np.minimum(lengths[order], max((one.batch_size for one in algorithm.local), default=1))
    start = 0
    while start < order.size:
        near = int(np.searchsorted(-widths[start:], -FILLED * widths[start], side="right"))
        stop = min(start + size, max(start + near, start + LEAST), order.size)
        yield order[start:stop]
        start = stop
