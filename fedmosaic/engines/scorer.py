"""Answers for users, as their devices would give them.

newest     with the server's newest parameters and the device's own
tuned      with the copy a device tuned in its last round; that round is run again from what it held and received
served     with what the device rebuilds from its history when it is asked (`Algorithm.serve`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis, Role, first_table
from fedmosaic.core.ragged import I64, Ragged, offsets_of, slots
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.state import Array, DeviceStore, FederationState, Place, ServerState, read, received_digest
from fedmosaic.engines.task import Task


@dataclass(frozen=True, eq=False)
class DeviceScorer:
    """Scores for users, from what their devices hold."""

    algorithm: Algorithm
    engine: Engine
    data: TrainingSet
    state: FederationState
    serving: Engine | None = None  # runs the work a device does when it is asked

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue, [users, items]."""
        if self.serving is not None:
            return self._in_blocks(self.serving, self.newest(self._last_round()), users)
        if not self.algorithm.answers_with_tuned_copy:
            return self.engine.answer(self.newest(0), users)
        result = np.empty((users.size, self.data.n_items), dtype=np.float32)
        last = self.state.last[self.data.owners()[users]]
        for number in np.unique(last):
            who = np.flatnonzero(last == number)
            if number == 0:
                result[who] = self.engine.answer(self.newest(0), users[who])
            else:
                result[who] = self._in_blocks(self.engine, self.before(int(number)), users[who])
        return result

    def pairs(self, query: Ragged, who: I64 | None = None) -> Array:
        """Scores of a few items per user (all, or `who`) with the newest state, flat like the query."""
        users = np.arange(self.data.n_users) if who is None else who
        if self.serving is None:
            return self.engine.answer(self.newest(0), users, query)
        flat = np.empty(query.values.size, dtype=np.float32)
        longest = max(int(query.lengths.max(initial=0)), 1)
        step = max(1, self.serving.scores_at_once // longest)
        for at in range(0, users.size, step):
            places = np.arange(at, min(at + step, users.size))
            part = query.take(places)
            task = self.newest(self._last_round())
            flat[slots(query, places)] = self._worked(self.serving, task, users[places], part)
        return flat

    def context(self, number: int, received: Mapping[str, Array]) -> Context:
        """What a device knows about a round that began with these parameters."""
        state = self.state
        table = "" if state.secret is None else received_digest(self.algorithm, received)
        return Context(number, state.seed, self.data.n_items, self.data.n_clients, state.secret, table)

    def newest(self, number: int) -> Task:
        """A task on the newest state."""
        state = self.state
        ctx = self.context(number, state.server.params)
        return Task(self.data, state.server.params, state.devices, ctx, np.arange(0))

    def before(self, number: int) -> Task:
        """A task on what clients that were last drawn in a round held and received before it."""
        replay = self.state.replay
        assert replay is not None
        version = int(np.flatnonzero(replay.rounds == number)[0])
        received = {n: replay.received[n][version] for n in self.algorithm.received}
        return Task(self.data, received, DeviceStore(replay.before), self.context(number, received), np.arange(0))

    def _last_round(self) -> int:
        return int(self.state.last.max(initial=0))

    def _in_blocks(self, engine: Engine, task: Task, users: I64) -> Array:
        """Scores of the whole catalogue after local work, some users at a time."""
        result = np.empty((users.size, self.data.n_items), dtype=np.float32)
        everything = np.arange(self.data.n_items, dtype=np.int32)
        step = max(1, engine.scores_at_once // self.data.n_items)
        for at in range(0, users.size, step):
            part = users[at : at + step]
            query = Ragged(np.tile(everything, part.size), np.arange(part.size + 1) * everything.size)
            result[at : at + step] = self._worked(engine, task, part, query).reshape(part.size, -1)
        return result

    def _worked(self, engine: Engine, task: Task, users: I64, query: Ragged) -> Array:
        """Scores after local work of the users' clients, flat like the query."""
        owners = np.unique(self.data.owners()[users])
        members = self.data.members(owners).values.astype(np.int64)
        row = np.full(self.data.n_users, -1)
        row[users] = np.arange(users.size)
        wanted = row[members] >= 0  # the other users of a silo are not asked
        lengths = np.zeros(members.size, np.int64)
        lengths[wanted] = query.lengths[row[members[wanted]]]
        asked = Ragged(query.take(row[members[wanted]]).values, offsets_of(lengths))
        done = engine.run(replace(task, cohort=owners, query_items=asked))
        assert done.answers is not None
        flat = np.empty(query.values.size, dtype=np.float32)
        flat[slots(query, row[members[wanted]])] = done.answers
        return flat


def common_tables(algorithm: Algorithm, state: FederationState) -> dict[str, Array]:
    """Rows and layers of one client that holds everybody."""
    n_items, found = state.n_items, {}
    everything = Ragged(np.arange(n_items, dtype=np.int32), np.array([0, n_items]))
    place = Place(np.zeros(1, np.int64), Ragged.from_rows([[]]), everything, n_items)
    for name, spec in algorithm.specs.items():
        if spec.axis is Axis.ITEM:
            first = first_table(spec, state.seed, n_items)
            found[name] = read(state.devices.params.get(name), spec.axis, place, first)
        elif spec.axis is Axis.WHOLE:
            found[name] = state.devices.dense(name)[0]
    return found


def in_common(
    algorithm: Algorithm, data: TrainingSet, state: FederationState
) -> tuple[Algorithm, TrainingSet, FederationState]:
    """One client that holds everybody, seen as a server and its users: rows and layers are common, vectors their own.

    Answers are the same, and found in the ways that are short for common tables.
    """
    tables = common_tables(algorithm, state)
    roles = {**algorithm.roles, **dict.fromkeys(tables, Role.SHARED)}
    devices = DeviceStore({n: v for n, v in state.devices.params.items() if n not in tables})
    nobody = np.zeros(data.n_users, np.int32)
    common = replace(state, server=ServerState(tables, {}), devices=devices, last=nobody)
    return replace(algorithm, roles=roles, local=()), replace(data, silos=None), common
