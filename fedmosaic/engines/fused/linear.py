"""The compiled program of the linear scorer: FedMF, PFedRec, FedRecon.

    score = w·e + b, binary cross-entropy, plain SGD, one item table that is shared or personalised

One client at a time inside a core's cache, clients in parallel. Randomness is the same function of (seed, round,
client, slot) as everywhere else, and the general engine is this one's test. Bounded uploads are added up one by one in
fixed point, as in a secure sum; others in groups (`skeleton`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Role
from fedmosaic.algorithm.upload import Encoder
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.threads import thread_count
from fedmosaic.engines.fused import skeleton
from fedmosaic.engines.fused.skeleton import SCORES_PER_CALL, groups_of
from fedmosaic.engines.state import Array
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.privacy.adaptive_clip import AdaptiveClip
from fedmosaic.privacy.noise import Clip, ClipRows


@dataclass(frozen=True)
class LinearProgram:
    """Made by `lower`, which has checked that the algorithm is nothing else."""

    algorithm: Algorithm
    name: ClassVar[str] = "fused"
    scores_at_once: ClassVar[int] = SCORES_PER_CALL

    def parts(self, task: Task) -> list[I64]:
        """Groups that are added up as floats."""
        return groups_of(task)

    def run(self, task: Task, parts: Sequence[I64] | None = None, workers: int | None = None) -> Outcome:
        """The cohort in one compiled call per worker."""
        from fedmosaic.engines.fused.linear_loop import train

        algorithm, count = self.algorithm, workers or thread_count()
        item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
        user, bias = skeleton.user_side(algorithm, task)
        cohort, longest = skeleton.people_of(algorithm, task), skeleton.longest_of(algorithm, task)
        passes = skeleton.passes_of(algorithm, task.ctx, ("user", "item"))
        sums = skeleton.sums_of(task, item, count)
        table, stack = (item, user, bias, "bias" in algorithm.specs), algorithm.upload.stack
        norms = np.empty(task.cohort.size if stack else 0)
        bounds = (*bounds_of(stack, task.server), norms)

        def work(worker: int, workers: int) -> bool:
            room = skeleton.room_of(algorithm, task, item.shape[1], longest)
            return bool(train(worker, workers, cohort, passes, table, bounds, room, sums[worker]))

        skeleton.run_workers(work, count)
        own = {"user": user, "bias": bias[:, None]}
        kept = {n: v for n, v in own.items() if algorithm.roles.get(n) is Role.PRIVATE}
        answers = None if task.query_items is None else sums[0].answers
        total = skeleton.collected(sums)
        for clip in (one for one in stack if isinstance(one, AdaptiveClip)):
            wishes = {clip.spec.name: clip.summed_wishes(norms, task.server)}
            total = replace(total, totals={**total.totals, **wishes})
        return Outcome(total, skeleton.with_values(task, kept), answers)

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """Plain products with the server's table."""
        return answer(self.algorithm, task, users, query)


def bounds_of(stack: Sequence[Encoder], params: Mapping[str, Array]) -> tuple[float, float]:
    """On an item's row, and on an upload; infinite where there is none.

    >>> bounds_of((ClipRows(2.0), Clip(3.0)), {}), bounds_of((Clip(3.0),), {})
    ((2.0, 3.0), (inf, 3.0))
    """
    row, whole = inf, inf
    for encoder in stack:
        if isinstance(encoder, ClipRows):
            row = encoder.bound
        else:
            assert isinstance(encoder, Clip | AdaptiveClip)
            whole = encoder.bound if isinstance(encoder, Clip) else encoder.bound_of(params)
    return row, whole


def answer(algorithm: Algorithm, task: Task, users: I64, query: Ragged | None = None) -> Array:
    """w·e + b with the server's table and the users' own vectors: flat like the query, or [users, items]."""
    from fedmosaic.engines.fused.linear_loop import pairs

    item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
    user, bias = task.devices.dense("user")[users], np.zeros(users.size, dtype=np.float32)
    if "bias" in algorithm.specs:
        bias = np.ascontiguousarray(task.devices.dense("bias")[users, 0])
    if query is not None:
        flat = np.empty(query.values.size, dtype=np.float32)
        pairs(item, user, bias, query.values, query.offsets, flat)
        return flat
    whole = np.empty((users.size, item.shape[0]), dtype=np.float32)
    everything, step = np.arange(item.shape[0], dtype=np.int32), max(1, SCORES_PER_CALL // item.shape[0])
    for at in range(0, users.size, step):
        part = slice(at, min(at + step, users.size))
        size = part.stop - part.start
        offsets = np.arange(size + 1) * item.shape[0]
        pairs(item, user[part], bias[part], np.tile(everything, size), offsets, whole[part].reshape(-1))
    return whole
