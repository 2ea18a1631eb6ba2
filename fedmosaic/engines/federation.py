"""A federation: an algorithm bound to rounds, participation and an engine; trained like every other method."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import Noise, UploadSum
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import I64, Ragged, slots
from fedmosaic.data.batches import cohort_of, round_half_up
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.choice import choose, holding_of
from fedmosaic.engines.engine import Engine, Holding, Team
from fedmosaic.engines.scorer import DeviceScorer, common_tables, in_common
from fedmosaic.engines.state import Array, Arrays, FederationState, Replay, ServerState, first_devices
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.engines.uploads import add_noise, apply
from fedmosaic.privacy.budget import Budget
from fedmosaic.privacy.release import check_accountant
from fedmosaic.training.method import RoundRecord

# local work of a round; work of a device that is asked; answers with what is everybody's (central training)
Purpose = Literal["local", "serve", "common"]


@dataclass(frozen=True)
class Federation:
    """An algorithm with the number of rounds, the share of clients in each, and the engine."""

    algorithm: Algorithm
    rounds: int = 100
    participation: float = 1.0
    pooled: bool = False  # one client that holds everybody: central training
    engine: str = "auto"
    team: Team | None = None  # the processes that share the work; none: this one alone
    budget: Budget | None = None  # an epsilon, and what keeps it
    _engines: dict[tuple[Purpose, Holding], Engine] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check_installed(self) -> None:
        """Refuse an algorithm that no installed engine runs."""
        self._engine("local", "everybody" if self.pooled else "user", self.algorithm)
        if self.budget is not None:
            check_accountant()

    def start(self, data: TrainingSet, seed: int) -> FederationState:
        """Server and devices before round 1."""
        data = self._arranged(data)
        server = ServerState.first(self.algorithm, data.n_items, seed)
        devices = first_devices(self.algorithm, data, seed)
        return FederationState(seed, data.n_items, server, devices, np.zeros(data.n_clients, dtype=np.int32))

    def advance(
        self, data: TrainingSet, state: FederationState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[FederationState, RoundRecord, Array | None]:
        """One round: cohort, local work, sum, server step; and, per user, the scores that the query asks for."""
        if self.budget is not None:
            self.budget.check(round)
        data, tuned = self._arranged(data), self.algorithm.answers_with_tuned_copy
        ctx = Context(round, seed, data.n_items, data.n_clients)
        cohort = cohort_of(data, self.participation, seed=seed, round=round, alone=self.budget is not None)
        members = data.members(cohort).values.astype(np.int64)
        asked = None
        if query is not None and tuned:
            asked = query if members.size == data.n_users and data.silos is None else query.take(members)
        worked, done = self.contribute(data, state, ctx, cohort, asked)
        total = self._released(data, state, done.total, ctx)
        after = replace(worked, server=apply(self.algorithm, worked.server, total, ctx))
        answers = None if query is None else self._answers(data, state, after, query, members, done.answers)
        if tuned:  # users who are not drawn next round answer as they did now
            after = replace(after, answers=answers, asked=query)
        return after, self._record(data, state, done), answers

    def contribute(
        self, data: TrainingSet, state: FederationState, ctx: Context, cohort: I64, asked: Ragged | None = None
    ) -> tuple[FederationState, Outcome]:
        """The devices' half of a round: the state with what they hold afterwards, and the sum of what they send."""
        task = Task(data, state.server.params, state.devices, ctx, cohort, asked)
        engine = self.engine_for(data)
        done = engine.run(task) if self.team is None else self.team.round(engine, self.algorithm, task)
        add_noise(self._with_shares(data, state, cohort), done.total, data.ids_of(cohort), ctx)
        last = state.last.copy()
        last[cohort] = ctx.round
        after = replace(state, devices=done.devices, last=last)
        if self.algorithm.answers_with_tuned_copy:
            after = replace(after, replay=self._remembered(data, state, last, cohort, ctx.round))
        return after, done

    def _expected(self, data: TrainingSet) -> int:
        """Clients of a round on average; a number that everybody knows."""
        return max(1, round_half_up(self.participation * data.n_clients))

    def _with_shares(self, data: TrainingSet, state: FederationState, cohort: I64) -> Algorithm:
        """The algorithm with what every device adds of the noise, where devices do."""
        if self.budget is None or self.budget.trust == "server":
            return self.algorithm
        self.budget.check_enough(cohort.size, self._expected(data))
        return self._noisy(self.budget.at(state.server.params).noise(self._expected(data)))

    def _noisy(self, noise: Noise) -> Algorithm:
        return replace(self.algorithm, upload=replace(self.algorithm.upload, noise=noise))

    def _released(self, data: TrainingSet, state: FederationState, total: UploadSum, ctx: Context) -> UploadSum:
        """What the server may use of a sum. Under an epsilon a mean divides by the expected number of clients."""
        if self.budget is None:
            return total
        if self.budget.trust == "server":  # one draw for all
            noise = self.budget.at(state.server.params).noise(self._expected(data))
            add_noise(self._noisy(noise), total, np.zeros(1, np.int64), ctx)
        return replace(total, clients=self._expected(data))

    @property
    def promise(self) -> str | None:
        """What the epsilon means, where there is one."""
        return None if self.budget is None else self.budget.promise

    def spent_after(self, rounds: int) -> float:
        """The epsilon of so many rounds, where there is one."""
        return 0.0 if self.budget is None or not rounds else self.budget.spent_after(rounds)

    def engine_for(self, data: TrainingSet) -> Engine:
        """The engine that runs this algorithm on such data; decided once."""
        return self._engine("local", holding_of(data), self.algorithm)

    def _engine(self, purpose: Purpose, holding: Holding, algorithm: Algorithm) -> Engine:
        if (purpose, holding) not in self._engines:
            self._engines[purpose, holding] = choose(algorithm, holding, self.engine)
        return self._engines[purpose, holding]

    def _record(self, data: TrainingSet, state: FederationState, done: Outcome) -> RoundRecord:
        clients, algorithm = max(done.total.clients, 1), self.algorithm
        touched = float(done.total.touched.sum()) / clients
        hidden = done.sent is not None or self.budget is not None
        received = None
        if algorithm.upload.support == "nonzero":
            tables = [n for n in algorithm.received if algorithm.specs[n].axis is Axis.ITEM]
            received = float(sum(np.count_nonzero(state.server.params[n]) for n in tables))
        up, down = algorithm.traffic(data.n_items, touched, done.total.numbers / clients, received)
        return RoundRecord(
            clients=done.total.clients,
            bytes_up=up if done.sent is None else done.sent,
            bytes_down=down,
            loss=done.total.loss / clients if self.budget is None else None,  # an epsilon does not cover it
            touched_rows=None if hidden else float(np.round(touched, 1)),
        )

    def _answers(
        self,
        data: TrainingSet,
        before: FederationState,
        after: FederationState,
        query: Ragged,
        members: I64,
        answered: Array | None,
    ) -> Array:
        """Scores of the query for all users: tuned copies as of their owner's last round, or the newest state."""
        if answered is None:
            return self._scorer(data, after).pairs(query)
        if members.size == data.n_users and data.silos is None:
            return answered
        new = np.empty(query.values.size, dtype=np.float32)
        new[slots(query, members)] = answered
        others = np.setdiff1d(np.arange(data.n_users), members)
        if others.size:
            new[slots(query, others)] = self._of_others(data, before, after, query, others)
        return new

    def _of_others(
        self, data: TrainingSet, before: FederationState, after: FederationState, query: Ragged, users: I64
    ) -> Array:
        """Answers of users who were not drawn this round: as at their last round; the newest table if never drawn."""
        asked = query.take(users)
        result = np.empty(asked.values.size, dtype=np.float32)
        strange = after.last[data.owners()[users]] == 0
        kept, new = np.flatnonzero(~strange), np.flatnonzero(strange)
        if new.size:
            result[slots(asked, new)] = self._scorer(data, after).pairs(asked.take(new), users[new])
        same = before.asked is query or (before.asked is None and before.answers is not None)
        if kept.size and same and before.answers is not None and before.answers.size == query.values.size:
            result[slots(asked, kept)] = before.answers[slots(query, users[kept])]
        elif kept.size:
            part = asked.take(kept)
            result[slots(asked, kept)] = self._scorer(data, after).scores(users[kept])[part.rows, part.values]
        return result

    def scorer(self, data: TrainingSet, state: FederationState) -> DeviceScorer:
        """Answers as a device would: with its tuned copy where it keeps one, else with the server's newest."""
        return self._scorer(self._arranged(data), state)

    def _scorer(self, data: TrainingSet, state: FederationState) -> DeviceScorer:
        if self.pooled and data.n_clients == 1:
            algorithm, data, state = in_common(self.algorithm, data, state)
            return DeviceScorer(algorithm, self._engine("common", holding_of(data), algorithm), data, state)
        serving = None
        if self.algorithm.serve:
            served = replace(self.algorithm, local=self.algorithm.serve)
            serving = self._engine("serve", holding_of(data), served)
        return DeviceScorer(self.algorithm, self.engine_for(data), data, state, serving)

    def vectors(self, state: FederationState) -> npt.NDArray[np.floating]:
        """The shared item rows (for private tables: nothing is common, so nothing is similar)."""
        specs = [s for s in self.algorithm.specs.values() if s.axis is Axis.ITEM]
        tables = [state.server.params[s.name] for s in specs if s.name in self.algorithm.received]
        if self.pooled:  # one client: its own rows are everybody's
            everybodys = common_tables(self.algorithm, state)
            tables += [everybodys[spec.name] for spec in specs]
        if not tables:
            raise SettingsError("this method holds no item table that is common to all users")
        return np.concatenate(tables, axis=1)

    def pack(self, state: FederationState) -> dict[str, Array]:
        """A state as named arrays, for a file."""
        return state.pack()

    def unpack(self, arrays: Arrays, what: str) -> FederationState:
        """Read `pack` back."""
        return FederationState.unpack(self.algorithm, arrays, what)

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Bytes a client sends and receives in a round, all rows trained."""
        return self.algorithm.traffic(n_items, n_items)

    def _arranged(self, data: TrainingSet) -> TrainingSet:
        return data.pooled() if self.pooled and data.silos is None else data

    def _remembered(self, data: TrainingSet, state: FederationState, last: Array, cohort: I64, round: int) -> Replay:
        """What a replay of each client's last round needs; tables that no client refers to are dropped."""
        old, before = state.replay, {}
        for name in self.algorithm.stored:
            held = state.devices.dense(name)
            now = (held if old is None else old.before[name]).copy()
            at = data.members(cohort).values if self.algorithm.specs[name].axis is Axis.USER else cohort
            now[at] = held[at]
            before[name] = now
        rounds = np.zeros(0, dtype=np.int32) if old is None else old.rounds
        alive = np.isin(rounds, last)
        received = {}
        for name in self.algorithm.received:
            table = state.server.params[name][None]
            received[name] = table if old is None else np.concatenate([old.received[name][alive], table])
        return Replay(np.append(rounds[alive], np.int32(round)).astype(np.int32), received, before)
