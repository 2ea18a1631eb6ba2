"""A round whose sum is a secure one: every client works alone, masks what it sends, and only the sum is opened.

It is what devices do (`privacy/secure_sum.py`), in one process. The sum has the same bits as a plain one of the same
uploads, hence the same model; what changes is what the server sees, and the time: a client masks its numbers once for
every neighbour.

Under the masks is all that adds up: changes, shares of decay, the loss and the number of examples, and per row the
clients that trained it where the server divides by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE, fixed
from fedmosaic.core.ragged import I64
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.state import Array, received_digest
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.privacy.secure_sum import SumTerms, simulated

LARGEST_LOSS = 1000.0


def check_adds_up(algorithm: Algorithm) -> None:
    """Refuse an algorithm of which the server must see more than a sum, or whose messages tell rows by their size."""
    if algorithm.server.reduction.each:
        raise SettingsError("secure=true: this server's reduction must see every upload by itself; use mean or sum")
    if algorithm.upload.support != "dense":
        raise SettingsError(f"secure=true: {algorithm.upload.support} uploads tell rows by their size; use dense ones")
    if algorithm.step_noise:
        raise SettingsError("secure=true: noise in every step is drawn for all clients at once; use noise on uploads")


def flat(algorithm: Algorithm, total: UploadSum) -> I64:
    """All that adds up of an upload, as one vector of whole numbers."""
    counted = [total.touched] if algorithm.server.reduction.counts_senders else []
    few = [total.examples, fixed(total.loss), *(total.shrink[n] for n in sorted(total.shrink))]
    tables = [total.totals[n].reshape(-1) for n in sorted(total.totals)]
    return np.concatenate([*tables, *counted, np.array(few, np.int64)]).astype(np.int64)


def unflat(algorithm: Algorithm, like: UploadSum, vector: I64, clients: int) -> UploadSum:
    """The upload that a vector is of, shaped like another one."""
    at, totals = 0, {}
    for name in sorted(like.totals):
        totals[name] = vector[at : at + like.totals[name].size].reshape(like.totals[name].shape)
        at += like.totals[name].size
    touched = np.zeros_like(like.touched)
    if algorithm.server.reduction.counts_senders:
        touched = vector[at : at + touched.size]
        at += touched.size
    examples, loss, *shrink = vector[at:].tolist()
    return UploadSum(
        totals, touched, clients, examples, loss / SCALE, dict(zip(sorted(like.shrink), shrink, strict=True))
    )


def steps(algorithm: Algorithm, total: UploadSum, clients: int, clip: float) -> I64:
    """How many binary places every number of `flat` loses, so that sums over clients fit into 32 bits.

    clip: no number of a table is larger. A loss may be up to a thousand; counts lose nothing.
    """

    def places(largest: float) -> int:
        return max(0, ceil(log2(clients * largest)) + 2)

    counted = [np.zeros(total.touched.size, np.int64)] if algorithm.server.reduction.counts_senders else []
    few = [0, places(LARGEST_LOSS), *[places(1.0)] * len(total.shrink)]
    tables = [np.full(total.totals[n].size, places(clip), np.int64) for n in sorted(total.totals)]
    return np.concatenate([*tables, *counted, np.array(few, np.int64)])


def coarse(vector: I64, steps: I64) -> I64:
    """Numbers in units of 2^steps, rounded.

    >>> coarse(np.array([5, 6, 7, -5]), np.array([2, 2, 0, 2])).tolist()
    [1, 2, 7, -1]
    """
    half: I64 = np.where(steps > 0, np.int64(1) << np.maximum(steps - 1, 0), 0)
    return (vector + half) >> steps


@dataclass(frozen=True)
class SecureTeam:
    """Clients that sum securely (`engine.Team`), modulo 2^bits; clip: with 32, what no number is larger than."""

    bits: Literal[32, 64] = 64
    clip: float | None = None

    def sent(self, algorithm: Algorithm, total: UploadSum, clients: int) -> I64:
        """What a client puts under its masks."""
        return coarse(flat(algorithm, total), self.lost(algorithm, total, clients))

    def lost(self, algorithm: Algorithm, total: UploadSum, clients: int) -> I64:
        """Binary places that are lost; none of 64."""
        if self.bits == 64:
            return np.zeros(1, np.int64)
        assert self.clip is not None
        return steps(algorithm, total, clients, self.clip)

    def round(self, engine: Engine, algorithm: Algorithm, task: Task) -> Outcome:
        """Every client by itself, then the two exchanges of the sum."""
        ids, members = task.data.ids_of(task.cohort), task.data.members(task.cohort)
        place = {int(party): at for at, party in enumerate(ids)}
        done, answers = Outcome(_nothing(task), task.devices, None), dict[int, Array]()

        def work(party: int) -> I64:
            nonlocal done
            at = place[party]
            own = np.arange(members.offsets[at], members.offsets[at + 1])
            asked = None if task.query_items is None else task.query_items.take(own)
            one = replace(task, cohort=task.cohort[at : at + 1], devices=done.devices, query_items=asked)
            done = engine.run(one)
            if done.answers is not None:
                answers[at] = done.answers
            return self.sent(algorithm, done.total, len(place))

        table = received_digest(algorithm, task.server)
        terms = SumTerms("simulation", task.ctx.round, table, tuple(sorted(place)), bits=self.bits)
        vector, here, size = simulated(work, terms)
        vector = vector << self.lost(algorithm, done.total, len(place))
        total = unflat(algorithm, done.total, vector, len(here))
        found = np.concatenate([answers[at] for at in sorted(answers)]) if answers else None
        return Outcome(total, done.devices, found, size)


def _nothing(task: Task) -> UploadSum:
    return UploadSum({}, np.zeros(task.data.n_items, np.int64), 0, 0, 0.0)
