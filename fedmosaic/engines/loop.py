"""The readable engine: one client after the other, each with its own copy of the whole table. Slow; the reference."""

from __future__ import annotations

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.upload import Sum
from fedmosaic.core.ragged import I64
from fedmosaic.engines import devices
from fedmosaic.engines.answer import probe_scores
from fedmosaic.engines.block import Block, Outcome, Task, turns
from fedmosaic.engines.devices import Array, Stored
from fedmosaic.engines.round import advance, begin, finish


def run_round(algorithm: Algorithm, task: Task) -> Outcome:
    """Every client of the cohort in turn; uploads are added, what stays is put back."""
    total: Sum | None = None
    held: dict[str, list[Stored]] = {}
    probed = []
    members = task.data.members(task.cohort)
    for place, client in enumerate(task.cohort):
        block = work(algorithm, task, np.array([client]), dense=True)
        upload, stays = finish(algorithm, block, task.ctx)
        total = upload if total is None else total + upload
        for name, value in stays.items():
            held.setdefault(name, []).append(value)
        if task.probe is not None:
            rows = np.arange(members.offsets[place], members.offsets[place + 1])
            probed.append(probe_scores(algorithm, task, block, task.probe.take(rows)))
    assert total is not None
    return Outcome(total, merge_held(task, held), np.concatenate(probed) if probed else None)


def work(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool) -> Block:
    """Local work of a block of clients: begin, then advance through all turns of all passes."""
    block = begin(algorithm, task, clients, dense=dense)
    for number, one in enumerate(algorithm.local):
        for turn in turns(block, one, number, task.ctx):
            block = advance(algorithm, block, turn, one.phases, task.ctx)
    return block


def merge_held(task: Task, held: dict[str, list[Stored]]) -> dict[str, Array]:
    """Put what the clients keep back into the device store."""
    state = dict(task.held)
    devices.write(state, held, task.data.n_users, task.data.n_clients)
    return state
