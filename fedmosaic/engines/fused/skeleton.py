"""What all compiled programs share: whom they work for, in which passes, in which room, and what comes out.

Everything a compiled loop needs is in a few named tuples that are made here, in NumPy; the loops allocate nothing. Each
worker takes every so-many-th group of GROUP clients. A group is summed in float32, in order, and groups are added in
fixed point, so the result has the same bits for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import PARTS, Context, value_of
from fedmosaic.algorithm.parameters import Role
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core import keys
from fedmosaic.core.buffers import aligned
from fedmosaic.core.errors import ScoreError
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.threads import deal, thread_count
from fedmosaic.engines.state import Array, DeviceStore
from fedmosaic.engines.task import PASSES, Task

GROUP = 128  # clients summed in float32, in fixed order, before the sum turns to fixed point
EMPTY = np.float32(3e38)  # marks a row of a group's sum that nobody has added to; no healthy sum comes near
SCORES_PER_CALL = 8_000_000  # a program holds no layer's output for more than a batch


class Cohort(NamedTuple):
    """The clients of a round, their data, the keys of their draws, and what they are asked at the end."""

    history: Any
    history_at: Any
    excluded: Any
    excluded_at: Any
    clients: Any
    negative_keys: Any
    epoch_keys: Any  # [epochs of all passes, clients]
    negatives: int
    query: Any
    query_at: Any


class Passes(NamedTuple):
    """Local work as numbers: of each pass, and the rates of each phase, 0 where a side stands still."""

    epochs: Any
    sizes: Any  # of batches
    parts: Any  # of the examples: 0 all, 1 support, 2 query
    phase_at: Any
    rates: Any  # [phases, sides]


class Room(NamedTuple):
    """A worker's scratch arrays: a client's examples and rows, a batch, the sum of a group."""

    pool_items: Any
    items: Any
    owner: Any  # owner[j] == c: client c met item j, whose row is place[j]
    place: Any
    met: Any  # items in the order of their rows
    first: Any  # 2 · row + label of every example
    code: Any  # the same, in the order of an epoch
    rows: Any  # the client's copies
    near: Any  # the group's sum, and which rows it holds
    listed: Any
    at: Any  # a batch: rows, labels, scores, and what the exponential needs
    label: Any
    score: Any
    bits: Any
    power: Any
    part: Any
    slope: Any
    w: Any


class Sums(NamedTuple):
    """What comes out: a worker's own sums, and per client its loss, its examples and its answers."""

    total: Any  # fixed point
    touched: Any
    losses: Any
    seen: Any
    answers: Any


def people_of(algorithm: Algorithm, task: Task) -> Cohort:
    """The cohort of a task."""
    data, query = task.data, task.query_items
    asked = query if query is not None else Ragged.from_rows([[]] * task.cohort.size)
    return Cohort(
        data.histories.values,
        data.histories.offsets,
        data.excluded.values,
        data.excluded.offsets,
        task.cohort,
        _client_keys(task, keys.Purpose.NEGATIVES),
        _shuffle_keys(algorithm, task),
        algorithm.negatives,
        asked.values,
        asked.offsets,
    )


def passes_of(algorithm: Algorithm, ctx: Context, sides: Sequence[str]) -> Passes:
    """An algorithm's passes; `sides` names a parameter of each side that moves as one."""
    local = algorithm.local
    counts = np.array([(one.epochs, one.batch_size, PARTS.index(one.part)) for one in local], np.int64).reshape(-1, 3)
    phases = np.cumsum([0, *(len(one.phases) for one in local)])
    rates = []
    for phase in (phase for one in local for phase in one.phases):
        found = {name: value_of(move.rate, ctx) for move in phase.moves for name in move.names}
        rates.append([found.get(side, 0.0) for side in sides])
    epochs, sizes, parts = (counts[:, column].copy() for column in range(3))
    return Passes(epochs, sizes, parts, phases, np.array(rates, np.float32).reshape(-1, len(sides)))


def longest_of(algorithm: Algorithm, task: Task) -> int:
    """The most examples a client of the cohort has."""
    return int(task.data.histories.lengths[task.cohort].max(initial=0)) * (1 + algorithm.negatives)


def room_of(algorithm: Algorithm, task: Task, dim: int, longest: int) -> Room:
    """Room for one worker."""
    n_items = task.data.n_items
    widest = min(max((one.batch_size for one in algorithm.local), default=1), longest)
    owner, near = aligned((n_items,), np.int32), aligned((n_items, dim), np.float32)
    owner[:], near[:] = -1, EMPTY
    pool_items, place, met, listed = (aligned((n_items,), np.int32) for _ in range(4))
    items, first, code = (aligned((longest,), np.int32) for _ in range(3))
    at, bits = aligned((widest,), np.int32), aligned((widest,), np.int32)
    label, score, part = (aligned((widest,), np.float32) for _ in range(3))
    slope, w = aligned((dim,), np.float32), aligned((dim,), np.float32)
    rows = aligned((min(n_items, longest), dim), np.float32)
    return Room(
        pool_items, items, owner, place, met, first, code, rows, near, listed, at, label, score, bits,
        bits.view(np.float32), part, slope, w,
    )  # fmt: skip


def sums_of(task: Task, table: Array, workers: int) -> list[Sums]:
    """Room for the outcome: sums of each worker, and arrays that all of them fill."""
    clients = task.cohort.size
    losses, seen = np.zeros(clients), np.zeros(clients, np.int64)
    answers = np.empty(0 if task.query_items is None else task.query_items.values.size, np.float32)
    return [
        Sums(np.zeros(table.shape, np.int64), np.zeros(table.shape[0], np.int64), losses, seen, answers)
        for _ in range(workers)
    ]


def run_workers(work: Callable[[int, int], bool], workers: int | None = None) -> int:
    """work(worker, workers) in threads; refused if a sum holds what no healthy training reaches."""
    count = workers or thread_count()
    if not all(deal(lambda worker: bool(work(worker, count)), count)):
        raise ScoreError("an upload holds NaN or huge values: training diverged; lower the learning rate")
    return count


def collected(sums: Sequence[Sums], shrink: Mapping[str, int] | None = None) -> UploadSum:
    """The workers' sums as one."""
    losses, seen, total, touched = sums[0].losses, sums[0].seen, sums[0].total, sums[0].touched
    for other in sums[1:]:
        total += other.total
        touched += other.touched
    return UploadSum(
        totals={"item": total},
        touched=touched,
        clients=seen.size,
        examples=int(seen.sum()),
        loss=float((losses / np.maximum(seen, 1)).sum()),
        shrink=shrink or {},
    )


def groups_of(task: Task) -> list[I64]:
    """Consecutive groups of the size that is added up as floats."""
    ends = [*range(0, task.cohort.size, GROUP), task.cohort.size]
    return [np.arange(begin, end) for begin, end in pairwise(ends)]


def user_side(algorithm: Algorithm, task: Task) -> tuple[Array, Array]:
    """Vectors and biases of the cohort: what devices hold, or (rebuilt) what they begin with."""
    found = []
    for name in ("user", "bias"):
        if name not in algorithm.specs:
            found.append(np.zeros((task.cohort.size, 1), np.float32))
        elif algorithm.roles[name] is Role.REBUILT:
            found.append(algorithm.specs[name].rows(task.ctx.seed, task.data.ids_of(task.cohort)))
        else:
            found.append(task.devices.dense(name)[task.cohort])
    return found[0], found[1][:, 0].copy()


def with_values(task: Task, values: Mapping[str, Array]) -> DeviceStore:
    """The device store with new values of the cohort's users (or clients)."""
    params = dict(task.devices.params)
    for name, value in values.items():
        new = task.devices.dense(name).copy()
        new[task.cohort] = value
        params[name] = new
    return DeviceStore(params, task.devices.memory)


def _client_keys(task: Task, purpose: keys.Purpose) -> keys.U64:
    ctx = task.ctx
    return keys.derive(seed=ctx.own_seed, purpose=purpose, round=ctx.round, client=task.data.ids_of(task.cohort))


def _shuffle_keys(algorithm: Algorithm, task: Task) -> Array:
    """Keys of every epoch of every pass, [epochs, cohort]."""
    key = _client_keys(task, keys.Purpose.SHUFFLE)
    found = [
        keys.fold(key, keys.words(epoch + PASSES * number))
        for number, one in enumerate(algorithm.local)
        for epoch in range(one.epochs)
    ]
    return np.array(found, dtype=np.uint64).reshape(len(found), task.cohort.size)
