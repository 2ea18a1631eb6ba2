"""A federation: an algorithm bound to rounds, participation and an engine; trained like every other method.

State is one flat mapping of arrays, ready for a checkpoint:

    server/NAME, rule/NAME.i      the server's parameters and its step rule's memory
    private/NAME..., memory/...   what devices hold (runtime/devices.py)
    last                          per client, the round of its last participation (0: never)
    before/NAME, given/NAME       for tuned copies: what a device held, and the table it got, before its last round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import I64, Ragged, slots
from fedmosaic.data.batches import cohort_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines import answer, devices, loop, simulate
from fedmosaic.engines.answer import DeviceScorer
from fedmosaic.engines.block import Outcome, Task
from fedmosaic.engines.devices import Array
from fedmosaic.engines.distributed import Team, groups_of
from fedmosaic.engines.fused import linear as kernel
from fedmosaic.engines.round import add_noise, apply
from fedmosaic.evaluation.evaluate import Scorer
from fedmosaic.training.method import RoundRecord, State

Engine = Literal["auto", "loop", "simulate", "kernel"]


@dataclass(frozen=True)
class Federation:
    """An algorithm with the number of rounds, the share of clients in each, and the engine."""

    algorithm: Algorithm
    rounds: int = 100
    participation: float = 1.0
    pooled: bool = False  # one client that holds everybody: central training
    engine: Engine = "auto"
    team: Team | None = None  # the processes that share the work; none: this one alone

    def start(self, data: TrainingSet, seed: int) -> State:
        """Server and devices before round 1."""
        data = self._arranged(data)
        state: dict[str, Array] = {"last": np.zeros(data.n_clients, dtype=np.int32)}
        state |= {"seed": np.array([seed]), "n_items": np.array([data.n_items])}
        for name in self.algorithm.stored:
            spec = self.algorithm.specs[name]
            if spec.axis is not Axis.ITEM:
                state[f"private/{name}"] = devices.first_rows(spec, seed, data)
        return self.first_server(data.n_items, seed) | state

    def first_server(self, n_items: int, seed: int) -> dict[str, Array]:
        """The server's part of the state before round 1."""
        state: dict[str, Array] = {}
        for name in self.algorithm.received:
            value = self.algorithm.specs[name].table(seed, n_items)
            state[f"server/{name}"] = value
            if name in self.algorithm.sent:
                state |= {f"rule/{name}.{i}": m for i, m in enumerate(self.algorithm.server.memory(value))}
        return state

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, probe: Ragged | None = None
    ) -> tuple[State, RoundRecord, Array | None]:
        """One round: cohort, local work, sum, server step; and, per user, the scores that `probe` asks for."""
        data = self._arranged(data)
        ctx = Context(round, seed, data.n_items, data.n_clients)
        cohort = cohort_of(data, self.participation, seed=seed, round=round)
        members = data.members(cohort).values.astype(np.int64)
        asked = None
        if probe is not None and self.algorithm.keeps:
            asked = probe if members.size == data.n_users and data.silos is None else probe.take(members)
        held, done = self.contribute(data, state, ctx, cohort, asked)
        after = apply(self.algorithm, held, done.total, ctx)
        answers = None if probe is None else self._answers(data, state, after, probe, members, done.probed)
        if answers is not None and self.algorithm.keeps:
            after["answers"] = answers  # of users who were not asked this round, too
        return after, self._record(data, state, done), answers

    def contribute(
        self, data: TrainingSet, state: State, ctx: Context, cohort: I64, asked: Ragged | None = None
    ) -> tuple[dict[str, Array], Outcome]:
        """The devices' half of a round: the state with what they hold afterwards, and the sum of what they send."""
        task = self.task(data, state, ctx, cohort, asked)
        done = self._run(self.algorithm, task) if self.team is None else self._share(self.team, task)
        add_noise(self.algorithm, done.total, data.number(cohort), ctx)
        after = {**state, **done.held, "last": state["last"].copy()}
        after["last"][cohort] = ctx.round
        if self.algorithm.keeps:
            after |= self._remembered(data, state, after["last"], cohort, ctx.round)
        return after, done

    def _record(self, data: TrainingSet, state: State, done: Outcome) -> RoundRecord:
        clients, algorithm = max(done.total.clients, 1), self.algorithm
        touched = float(done.total.touched.sum()) / clients
        received = None
        if algorithm.upload.support == "nonzero":
            tables = [n for n in algorithm.received if algorithm.specs[n].axis is Axis.ITEM]
            received = float(sum(np.count_nonzero(state[f"server/{n}"]) for n in tables))
        up, down = algorithm.traffic(data.n_items, touched, done.total.numbers / clients, received)
        return RoundRecord(
            clients=done.total.clients,
            bytes_up=up,
            bytes_down=down,
            loss=done.total.loss / clients,
            touched_rows=float(np.round(touched, 1)),
        )

    def _answers(
        self, data: TrainingSet, before: State, after: State, probe: Ragged, members: I64, probed: Array | None
    ) -> Array:
        """Scores of the probe for all users: tuned copies as of their owner's last round, or the newest state."""
        if probed is None:
            return self._scorer(data, after).pairs(probe)
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
            result[slots(asked, new)] = self._scorer(data, after).pairs(asked.take(new), users[new])
        if kept.size and "answers" in before and before["answers"].size == probe.values.size:
            result[slots(asked, kept)] = before["answers"][slots(probe, users[kept])]
        elif kept.size:
            part = asked.take(kept)
            result[slots(asked, kept)] = self._scorer(data, after).scores(users[kept])[part.rows, part.values]
        return result

    def scorer(self, data: TrainingSet, state: State) -> Scorer:
        """Answers as a device would: with its tuned copy where it keeps one, else with the server's newest."""
        return self._scorer(self._arranged(data), state)

    def _scorer(self, data: TrainingSet, state: State) -> DeviceScorer:
        if self.pooled and data.n_clients == 1:
            algorithm, data, state = answer.in_common(self.algorithm, data, state)
            return DeviceScorer(algorithm, self._run, data, state)
        return DeviceScorer(self.algorithm, self._run, data, state, fused=not self._general(self.algorithm, data))

    def _general(self, algorithm: Algorithm, data: TrainingSet) -> bool:
        """Whether the general engine is used, by wish or because no fused one runs the algorithm."""
        return self.engine in ("loop", "simulate") or bool(kernel.unfit(algorithm, data))

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """The shared item rows (for private tables: nothing is common, so nothing is similar)."""
        specs = [s for s in self.algorithm.specs.values() if s.axis is Axis.ITEM]
        tables = [state[f"server/{s.name}"] for s in specs if s.name in self.algorithm.received]
        if self.pooled:  # one client: its own rows are everybody's
            everybodys = answer.common_tables(self.algorithm, state)
            tables += [everybodys[spec.name] for spec in specs]
        if not tables:
            raise SettingsError("this method holds no item table that is common to all users")
        return np.concatenate(tables, axis=1)

    def _arranged(self, data: TrainingSet) -> TrainingSet:
        return data.pooled() if self.pooled and data.silos is None else data

    def task(self, data: TrainingSet, state: State, ctx: Context, cohort: I64, probe: Ragged | None = None) -> Task:
        """What an engine needs for a round."""
        return answer.task_of(self.algorithm, data, state, ctx, cohort, probe)

    def _run(self, algorithm: Algorithm, task: Task) -> Outcome:
        reason = kernel.unfit(algorithm, task.data)
        if self.engine == "kernel" and reason:
            raise SettingsError(f"engine=kernel does not run this algorithm: {reason}. Use engine=auto or simulate")
        if self.engine == "loop":
            return loop.run_round(algorithm, task)
        if self._general(algorithm, task.data):
            return simulate.run_round(algorithm, task)
        return kernel.run_round(algorithm, task)

    def _share(self, team: Team, task: Task) -> Outcome:
        """The round with others: in the groups this algorithm's engine works in."""
        if self.engine != "loop" and self._general(self.algorithm, task.data):
            return team.round(simulate.run_round, list(simulate.chunks(self.algorithm, task)), self.algorithm, task)
        return team.round(lambda a, t, _: self._run(a, t), groups_of(task.cohort), self.algorithm, task)

    def _remembered(self, data: TrainingSet, state: State, last: Array, cohort: I64, round: int) -> dict[str, Array]:
        """What a replay of each client's last round needs; tables that no client refers to are dropped."""
        kept: dict[str, Array] = {}
        for name in self.algorithm.stored:
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
