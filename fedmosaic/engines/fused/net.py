"""The compiled program of the MLP scorer (FedNCF): one client at a time, its layers and rows inside a core's cache.

Plain SGD and cross-entropy on one item table; the network is shared with a shared table, or private beside a
personalised one (dual). Answers without local work are the general engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.parameters import Axis, Role
from fedmosaic.core.buffers import aligned
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.threads import thread_count
from fedmosaic.engines.fused import skeleton
from fedmosaic.engines.fused.skeleton import SCORES_PER_CALL, groups_of
from fedmosaic.engines.state import Array
from fedmosaic.engines.task import Outcome, Task

LONGEST_BATCH = 1024  # examples whose activations still fit a core's cache


class Tower(NamedTuple):
    """What a network needs beside a worker's `Room`: the client's own layers, and a batch on its way through them."""

    net: Any
    acts: Any  # [layers, width, examples]
    slopes: Any
    sums: Any
    step: Any

    @classmethod
    def of(cls, widths: Array, dim: int, widest: int, size: int) -> Tower:
        """For so many examples; `dim` numbers of a vector that all share, `size` in a network."""
        wide = max(int(widths.max()), dim)
        return cls(
            aligned((size,), np.float32),
            aligned((widths.size, wide, widest), np.float32),
            aligned((2, wide, widest), np.float32),
            aligned((wide,), np.float32),
            aligned((dim,), np.float32),
        )


@dataclass(frozen=True)
class NetProgram:
    """Made by `lower`, which has checked that the algorithm is nothing else."""

    algorithm: Algorithm
    name: ClassVar[str] = "fused"
    scores_at_once: ClassVar[int] = SCORES_PER_CALL

    def parts(self, task: Task) -> list[I64]:
        """Groups that are added up as floats."""
        return groups_of(task)

    def run(self, task: Task, parts: Sequence[I64] | None = None, workers: int | None = None) -> Outcome:
        """The cohort in one compiled call per worker."""
        from fedmosaic.engines.fused.net_loop import train

        algorithm, cohort, model = self.algorithm, task.cohort, self.algorithm.model
        assert isinstance(model, NCF)
        count, private = workers or thread_count(), algorithm.roles["item"] is Role.PERSONALISED
        item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
        names, widths = network(algorithm), tower_widths(model)
        source = {n: task.devices.dense(n)[cohort] if private else task.server[n][None] for n in names}
        nets = np.concatenate([v.reshape(v.shape[0], -1) for v in source.values()], axis=1).astype(np.float32)
        user = task.devices.dense("user")[cohort]
        people, longest = skeleton.people_of(algorithm, task), skeleton.longest_of(algorithm, task)
        passes = skeleton.passes_of(algorithm, task.ctx, (names[0], "user", "item"))
        sums, net_totals = skeleton.sums_of(task, item, count), np.zeros((count, nets.shape[1]), np.int64)
        table = (item, user, nets, not private, widths)

        def work(worker: int, workers: int) -> bool:
            room = skeleton.room_of(algorithm, task, item.shape[1], longest)
            tower = Tower.of(widths, item.shape[1], room.at.size, nets.shape[1])
            return bool(train(worker, workers, people, passes, table, room, tower, sums[worker], net_totals[worker]))

        skeleton.run_workers(work, count)
        upload = skeleton.collected(sums)
        cuts = np.cumsum([v[0].size for v in source.values()])[:-1]
        own = {"user": user}
        if private:
            layers = zip(names, np.split(nets, cuts, axis=1), strict=True)
            own |= {n: part.reshape(source[n].shape) for n, part in layers}
        else:
            found = zip(names, np.split(net_totals.sum(0), cuts), strict=True)
            whole = {n: part.reshape(source[n].shape[1:]) for n, part in found}
            upload = replace(upload, totals={n: {**upload.totals, **whole}[n] for n in algorithm.sent})
        answers = None if task.query_items is None else sums[0].answers
        return Outcome(upload, skeleton.with_values(task, own), answers)

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """As the general engine answers."""
        from fedmosaic.engines.answer import answer

        return answer(self.algorithm, task, users, query)


def tower_widths(model: NCF) -> Array:
    """Width of every layer's input, and of the score."""
    return np.array([2 * model.dim, *model.tower, 1])


def network(algorithm: Algorithm) -> tuple[str, ...]:
    """Names of the layers' parameters: weight, bias, layer by layer."""
    return tuple(n for n, s in algorithm.specs.items() if s.axis is Axis.WHOLE)
