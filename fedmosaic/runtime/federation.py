"""A federation: an algorithm bound to rounds, participation and an engine; trained like every other method.

State is one flat mapping of arrays, ready for a checkpoint:

    server/NAME, rule/NAME.i      the server's parameters and its step rule's memory
    private/NAME..., memory/...   what devices hold (runtime/devices.py)
    last                          per client, the round of its last participation (0: never)
    before/NAME, given/NAME       for tuned copies: what a device held, and the table it got, before its last round
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fedmosaic.algorithm import Algorithm
from fedmosaic.data.batches import draw_cohort
from fedmosaic.errors import SettingsError
from fedmosaic.evaluate import Scorer
from fedmosaic.local import Context
from fedmosaic.models.mf import LinearScorer
from fedmosaic.ragged import I64, Ragged, offsets_of, slots
from fedmosaic.runtime import devices, kernel, loop, simulate
from fedmosaic.runtime.devices import Array
from fedmosaic.runtime.round import Block, Outcome, Task, apply, begin, score_users
from fedmosaic.training import RoundRecord, State, TrainingSet
from fedmosaic.tree import Axis, first_table

Engine = Literal["auto", "loop", "simulate", "kernel"]
SCORES_PER_BLOCK = 500_000


@dataclass(frozen=True)
class Federation:
    """An algorithm with the number of rounds, the share of clients in each, and the engine."""

    algorithm: Algorithm
    rounds: int = 100
    participation: float = 1.0
    pooled: bool = False  # one client that holds everybody: central training
    engine: Engine = "auto"

    def start(self, data: TrainingSet, seed: int) -> State:
        """Server and devices before round 1."""
        data = self._arranged(data)
        state: dict[str, Array] = {"last": np.zeros(data.n_clients, dtype=np.int32)}
        state |= {"seed": np.array([seed]), "n_items": np.array([data.n_items])}
        for name in self.algorithm.received:
            value = self.algorithm.specs[name].table(seed, data.n_items)
            state[f"server/{name}"] = value
            if name in self.algorithm.sent:
                state |= {f"rule/{name}.{i}": m for i, m in enumerate(self.algorithm.server.memory(value))}
        for name in self.algorithm.private:
            spec = self.algorithm.specs[name]
            if spec.axis is not Axis.ITEM:
                state[f"private/{name}"] = devices.first_rows(spec, seed, data.n_users, data.n_clients)
        return state

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, probe: Ragged | None = None
    ) -> tuple[State, RoundRecord, Array | None]:
        """One round: cohort, local work, sum, server step; and, per user, the scores that `probe` asks for."""
        data = self._arranged(data)
        ctx = Context(round, seed, data.n_items, data.n_clients)
        able = _with_history(data)  # a device without events has nothing to train on
        cohort = able[draw_cohort(able.size, self.participation, seed=seed, round=round)]
        members = data.members(cohort).values.astype(np.int64)
        asked = None
        if probe is not None and self.algorithm.keeps:
            asked = probe if members.size == data.n_users and data.silos is None else probe.take(members)
        done = self._run(data)(self.algorithm, self.task(data, state, ctx, cohort, asked))
        after = apply(self.algorithm, {**state, **done.held}, done.total, ctx)
        after["last"] = state["last"].copy()
        after["last"][cohort] = round
        if self.algorithm.keeps:
            after |= self._remembered(data, state, after["last"], cohort, round)
        answers = None if probe is None else self._answers(data, state, after, probe, members, done.probed)
        if answers is not None and self.algorithm.keeps:
            after["answers"] = answers  # of users who were not asked this round, too
        return after, self._record(data, done), answers

    def _record(self, data: TrainingSet, done: Outcome) -> RoundRecord:
        touched = float(done.total.touched.sum()) / max(done.total.clients, 1)
        up, down = self.algorithm.traffic(data.n_items, touched)
        return RoundRecord(
            clients=done.total.clients,
            bytes_up=up,
            bytes_down=down,
            loss=done.total.loss / max(done.total.examples, 1),
            touched_rows=float(np.round(touched, 1)),
        )

    def _answers(
        self, data: TrainingSet, before: State, after: State, probe: Ragged, members: I64, probed: Array | None
    ) -> Array:
        """Scores of the probe for all users: tuned copies as of their owner's last round, or the newest state."""
        if probed is None:
            return DeviceScorer(self, data, after).pairs(probe)
        if members.size == data.n_users and data.silos is None:
            return probed
        new = np.empty(probe.values.size, dtype=np.float32)
        new[slots(probe, members)] = probed
        others = np.setdiff1d(np.arange(data.n_users), members)
        if others.size:
            new[slots(probe, others)] = self._of_others(data, before, after, probe, others)
        return new

    def _of_others(self, data: TrainingSet, before: State, after: State, probe: Ragged, users: I64) -> Array:
        """Answers of users who were not drawn this round: as at their last round; the newest table if never drawn."""
        asked = probe.take(users)
        result = np.empty(asked.values.size, dtype=np.float32)
        strange = after["last"][data.owners()[users]] == 0
        kept, new = np.flatnonzero(~strange), np.flatnonzero(strange)
        if new.size:
            result[slots(asked, new)] = DeviceScorer(self, data, after).pairs(asked.take(new), users[new])
        if kept.size and "answers" in before and before["answers"].size == probe.values.size:
            result[slots(asked, kept)] = before["answers"][slots(probe, users[kept])]
        elif kept.size:
            part = asked.take(kept)
            result[slots(asked, kept)] = DeviceScorer(self, data, after).scores(users[kept])[part.rows, part.values]
        return result

    def scorer(self, data: TrainingSet, state: State) -> Scorer:
        """Answers as a device would: with its tuned copy where it keeps one, else with the server's newest."""
        return DeviceScorer(self, self._arranged(data), state)

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """The shared item rows (for private tables: nothing is common, so nothing is similar)."""
        specs = [s for s in self.algorithm.specs.values() if s.axis is Axis.ITEM]
        tables = [state[f"server/{s.name}"] for s in specs if s.name in self.algorithm.received]
        if self.pooled:  # one client: its own rows are everybody's
            for spec in specs:
                table = spec.table(int(state["seed"][0]), int(state["n_items"][0]))
                table[state[f"private/{spec.name}.keys"]] = state[f"private/{spec.name}.rows"]
                tables.append(table)
        if not tables:
            raise SettingsError("this method holds no item table that is common to all users")
        return np.concatenate(tables, axis=1)

    def _arranged(self, data: TrainingSet) -> TrainingSet:
        return data.pooled() if self.pooled and data.silos is None else data

    def task(self, data: TrainingSet, state: State, ctx: Context, cohort: I64, probe: Ragged | None = None) -> Task:
        """What an engine needs for a round."""
        server = {n: state[f"server/{n}"] for n in self.algorithm.received}
        held = {k: v for k, v in state.items() if k.startswith(("private/", "memory/"))}
        return Task(data, server, held, ctx, cohort, probe)

    def _run(self, data: TrainingSet) -> Callable[[Algorithm, Task], Outcome]:
        reason = kernel.unfit(self.algorithm, data)
        if self.engine == "kernel" and reason:
            raise SettingsError(f"engine=kernel does not run this algorithm: {reason}. Use engine=auto or simulate")
        if self.engine == "loop":
            return loop.run_round
        if self.engine == "simulate" or reason:
            return simulate.run_round
        return kernel.run_round

    def _remembered(self, data: TrainingSet, state: State, last: Array, cohort: I64, round: int) -> dict[str, Array]:
        """What a replay of each client's last round needs; tables that no client refers to are dropped."""
        kept: dict[str, Array] = {}
        for name in self.algorithm.private:
            now = state.get(f"before/{name}", state[f"private/{name}"]).copy()
            at = data.members(cohort).values if self.algorithm.specs[name].axis is Axis.USER else cohort
            now[at] = state[f"private/{name}"][at]
            kept[f"before/{name}"] = now
        rounds = state.get("given.round", np.zeros(0, dtype=np.int32))
        alive = np.isin(rounds, last)
        kept["given.round"] = np.append(rounds[alive], np.int32(round)).astype(np.int32)
        for name in self.algorithm.received:
            past = state.get(f"given/{name}", np.zeros((0, *state[f"server/{name}"].shape), dtype=np.float32))
            kept[f"given/{name}"] = np.concatenate([past[alive], state[f"server/{name}"][None]])
        return kept


@dataclass(frozen=True, eq=False)
class DeviceScorer:
    """Scores for users, from what their devices hold."""

    federation: Federation
    data: TrainingSet
    state: State

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue, [users, items]."""
        result = np.empty((users.size, self.data.n_items), dtype=np.float32)
        step = max(1, SCORES_PER_BLOCK // self.data.n_items)
        everything = np.arange(self.data.n_items, dtype=np.int32)
        for at in range(0, users.size, step):
            part = users[at : at + step]
            items = np.broadcast_to(everything, (part.size, everything.size))
            last = self.state["last"][self.data.owners()[part]] * int(self.federation.algorithm.keeps)
            for round in np.unique(last):
                who = np.flatnonzero(last == round)
                one = self._newest if round == 0 else partial(self._tuned, round=int(round))
                result[at + who] = one(part[who], items[who])
        return result

    def pairs(self, probe: Ragged, who: I64 | None = None) -> Array:
        """Scores of a few items per user (all, or `who`) with the newest state, flat like the probe."""
        shared = self._linear()
        if shared is not None:
            item, user, bias = shared
            chosen = slice(None) if who is None else who
            flat: Array = kernel.linear_pairs(item, user[chosen], bias[chosen], probe)
            return flat
        width = max(int(probe.lengths.max(initial=0)), 1)
        result = np.empty(probe.values.size, dtype=np.float32)
        step = max(1, SCORES_PER_BLOCK // width)
        for at in range(0, len(probe), step):
            places = np.arange(at, min(at + step, len(probe)))
            users, asked = places if who is None else who[places], probe.take(places)
            mask = np.arange(width) < asked.lengths[:, None]
            items = np.zeros(mask.shape, dtype=np.int32)
            items[mask] = asked.values
            result[probe.offsets[at] : probe.offsets[places[-1] + 1]] = self._newest(users, items)[mask]
        return result

    def _linear(self) -> tuple[Array, Array, Array] | None:
        """Table, vectors and biases, where scores are plain products with the server's table."""
        algorithm, state = self.federation.algorithm, self.state
        if not isinstance(algorithm.model, LinearScorer) or "item" not in algorithm.received:
            return None
        user = state["private/user"]
        bias = state["private/bias"][:, 0] if "private/bias" in state else np.zeros(user.shape[0], dtype=np.float32)
        return state["server/item"], user, np.ascontiguousarray(bias)

    def _newest(self, users: I64, items: Array) -> Array:
        """With the server's newest parameters and the device's own."""
        shared = self._linear()
        if shared is not None:
            item, user, bias = shared
            asked = Ragged(items.ravel(), np.arange(users.size + 1) * items.shape[1])
            scores: Array = kernel.linear_pairs(item, user[users], bias[users], asked).reshape(items.shape)
            return scores
        algorithm, data = self.federation.algorithm, self.data
        owners = data.owners()[users]
        clients, of_client = np.unique(owners, return_inverse=True)
        order = np.argsort(of_client, kind="stable")
        members = Ragged.group(of_client[order], users[order], clients.size)
        own_rows = any(algorithm.specs[n].axis is Axis.ITEM for n in algorithm.private)
        asked = Ragged.group(np.repeat(of_client, items.shape[1]), items.ravel(), clients.size).unique()
        stored = asked if own_rows else Ragged.from_rows([[]] * clients.size)
        ctx = Context(0, int(self.state["seed"][0]), data.n_items, data.n_clients)
        task = self.federation.task(data, self.state, ctx, clients, None)
        block = holding(algorithm, task, devices.Place(clients, members, stored, data.n_items))
        result = np.empty(items.shape, dtype=np.float32)
        result[order] = score_users(algorithm, task, block, items[order])
        return result

    def _tuned(self, users: I64, items: Array, round: int) -> Array:
        """Run the owners' last round again, from what they held and received then, and answer with the outcome."""
        federation, state = self.federation, self.state
        version = int(np.flatnonzero(state["given.round"] == round)[0])
        past = {f"server/{n}": state[f"given/{n}"][version] for n in federation.algorithm.received}
        past |= {f"private/{n}": state[f"before/{n}"] for n in federation.algorithm.private}
        ctx = Context(round, int(state["seed"][0]), self.data.n_items, self.data.n_clients)
        owners = np.unique(self.data.owners()[users])
        members = self.data.members(owners).values.astype(np.int64)
        row = np.full(self.data.n_users, -1)
        row[users] = np.arange(users.size)
        wanted = row[members] >= 0  # the other users of a silo are not asked
        lengths = np.where(wanted, items.shape[1], 0)
        asked = Ragged(items[row[members[wanted]]].ravel(), offsets_of(lengths))
        done = federation._run(self.data)(federation.algorithm, federation.task(self.data, past, ctx, owners, asked))
        assert done.probed is not None
        result = np.empty(items.shape, dtype=np.float32)
        result[row[members[wanted]]] = done.probed.reshape(-1, items.shape[1])
        return result


def holding(algorithm: Algorithm, task: Task, place: devices.Place) -> Block:
    """A block that only holds: no examples, no steps to come."""
    block = begin(replace(algorithm, local=()), task, place.clients[:0])
    block.place = place
    for name in algorithm.private:
        spec = algorithm.specs[name]
        first: Array = np.empty(0)
        if spec.axis is Axis.ITEM:
            first = first_table(spec, task.ctx.seed, place.n_items)[place.touched.values]
        block.params[name] = torch.from_numpy(devices.read(task.held, f"private/{name}", spec, place, first).copy())
    for name in algorithm.received:
        value = torch.from_numpy(task.server[name])
        if algorithm.specs[name].axis is not Axis.ITEM:
            block.params[name] = value.expand(place.clients.size, *value.shape)
    return block


def _with_history(data: TrainingSet) -> I64:
    """Clients that hold at least one event."""
    members = data.members(np.arange(data.n_clients))
    events = np.bincount(members.rows, weights=data.histories.lengths[members.values], minlength=data.n_clients)
    return np.flatnonzero(events > 0)
