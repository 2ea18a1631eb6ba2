"""A round whose sum is a secure one: every client works alone, masks what it sends, and only the sum is opened.

It is what devices do (`privacy/secure_sum.py`), in one process. The sum has the same bits as a plain one of the same
uploads, hence the same model; what changes is what the server sees, and the time: a client masks its numbers once for
every neighbour.

Under the masks is all that adds up: changes, shares of decay, the loss and the number of examples, and per row the
clients that trained it where the server divides by them.

With `groups` a sum is opened for each of so many groups of clients, and a reduction that looks at uploads looks at
those: poison in few groups is bounded, and a client is hidden among those of its group only. Who is in which group
follows from a hash of federation and client alone, the same in every round: a server cannot choose it, and what groups
that were dealt anew would tell, round by round, of each client in them (`audit`), these do not.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import ceil, log2
from typing import Literal

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE, fixed
from fedmosaic.core.ragged import I64
from fedmosaic.core.secret import packed
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.state import Array, received_digest
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.privacy.secure_sum import SumTerms, simulated

LARGEST_LOSS = 1000.0
FEWEST = 8  # clients of a group
FEDERATION = "simulation"


def check_adds_up(algorithm: Algorithm, groups: int | None = None) -> None:
    """Refuse an algorithm of which the server must see more than sums, or whose messages tell rows by their size."""
    if algorithm.server.reduction.each and groups is None:
        raise SettingsError(
            "secure=true: this server's reduction must see every upload by itself; use mean or sum, or, "
            "in simulations, give groups=, and it sees sums of so many groups"
        )
    if groups is not None and not algorithm.server.reduction.each:
        raise SettingsError("groups= is for reductions that look at sums of groups: bounded, trimmed-mean or median")
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


def dealt(federation: str, parties: Sequence[int], groups: int) -> list[list[int]]:
    """Parties in groups: sha256(federation, party) modulo their number.

    >>> [len(group) for group in dealt("shop", range(1000), 4)]
    [254, 266, 231, 249]
    """
    found: list[list[int]] = [[] for _ in range(groups)]
    for party in parties:
        drawn = hashlib.sha256(b"group" + packed(federation, int(party))).digest()
        found[int.from_bytes(drawn[:8], "big") % groups].append(int(party))
    return found


@dataclass(frozen=True)
class SecureTeam:
    """Clients that sum securely (`engine.Team`), modulo 2^bits.

    clip: with 32 bits, what no number is larger than. groups: of which each has a sum; none: one of all.
    """

    bits: Literal[32, 64] = 64
    clip: float | None = None
    groups: int | None = None

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
        """Every client by itself, then the two exchanges of each sum."""
        ids, members = task.data.ids_of(task.cohort), task.data.members(task.cohort)
        place = {int(party): at for at, party in enumerate(ids)}
        done, answers = Outcome(_nothing(task), task.devices, None), dict[int, Array]()

        def work(party: int, clients: int) -> I64:
            nonlocal done
            at = place[party]
            own = np.arange(members.offsets[at], members.offsets[at + 1])
            asked = None if task.query_items is None else task.query_items.take(own)
            one = replace(task, cohort=task.cohort[at : at + 1], devices=done.devices, query_items=asked)
            done = engine.run(one)
            if done.answers is not None:
                answers[at] = done.answers
            return self.sent(algorithm, done.total, clients)

        table, parts, size = received_digest(algorithm, task.server), list[UploadSum](), 0
        for group in self.dealt(sorted(place)):
            terms = SumTerms(FEDERATION, task.ctx.round, table, tuple(group), bits=self.bits)
            vector, here, size = simulated(partial(work, clients=len(group)), terms)
            vector = vector << self.lost(algorithm, done.total, len(group))
            parts.append(unflat(algorithm, done.total, vector, len(here)))
        total = reduce(operator.add, parts)
        found = np.concatenate([answers[at] for at in sorted(answers)]) if answers else None
        if self.groups is not None:
            total = replace(total, parts=tuple(parts))
        return Outcome(total, done.devices, found, size)

    def dealt(self, parties: Sequence[int]) -> list[list[int]]:
        """Parties of every sum; refused where a group would hide its clients among hardly anybody."""
        if self.groups is None:
            return [list(parties)]
        found = dealt(FEDERATION, parties, self.groups)
        least = min(len(group) for group in found)
        if least < FEWEST:
            raise SettingsError(
                f"groups={self.groups}: of {len(parties)} clients one group would have {least}, and would hide hardly "
                f"anything; at least {FEWEST} are wanted, so use fewer groups"
            )
        return found


def _nothing(task: Task) -> UploadSum:
    return UploadSum({}, np.zeros(task.data.n_items, np.int64), 0, 0, 0.0)
