"""The server of a deployment: asks nodes, adds up what they send, and commits a round when its outcome is on disk.

    server.safetensors    server/..., moved/NAME (per row, the version it moved in); how far the rounds have come
    sum.safetensors       a secure sum that is being opened (`open_sum.py`)
    rounds.jsonl          one line per committed round
    refused.jsonl         what did not count, from whom, and why (`desk.py`)

Nothing of a round is stored before all of it is, but for a sum that nodes are asked to open: a server that dies begins
the round again, or goes on with that sum, and nodes that have worked for the round already repeat their answers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm, reduced_by
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.reduction import Bounded
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import ForeignError, RunError
from fedmosaic.core.files import load_tensors, save_tensors
from fedmosaic.core.fixed_point import LIMIT, SCALE
from fedmosaic.core.ragged import I64
from fedmosaic.data.batches import draw_cohort, round_half_up
from fedmosaic.deploy.agreement import Agreement, groups_of, stamp_of
from fedmosaic.deploy.desk import PAUSE, Answer, Desk, Exchange, Tally
from fedmosaic.deploy.masked import Masked
from fedmosaic.deploy.open_sum import OpenSum
from fedmosaic.deploy.plain import Rules
from fedmosaic.deploy.protocol import (
    NO_BYTES,
    NOBODY,
    WHOLE,
    Bytes,
    OpeningMessage,
    Refused,
    TaskMessage,
    Transport,
    UpdateMessage,
    changed_since,
)
from fedmosaic.deploy.roster import Roster
from fedmosaic.deploy.work import LearntWork, SummedWork, work_of
from fedmosaic.engines.state import Array, checked
from fedmosaic.engines.uploads import apply
from fedmosaic.privacy.budget import Budget

STATE = "server.safetensors"
MANY_ROUNDS = 1 << 32  # draws of a round that is begun again are keyed apart from all rounds
PATIENCE = 30.0  # seconds at most between two attempts at a round
SETTLED = 1.0  # seconds without a newcomer after which a round begins, if some of its nodes are not there


def bounded(algorithm: Algorithm) -> Algorithm:
    """An algorithm whose server cuts uploads to what most keep; as it is where it cannot, or has its own way to.

    Decay that reaches all rows, and noise that is as large as the bounds, leave nothing that could be cut fairly.
    """
    spread = any(move.spreads for move in algorithm.moves)
    if algorithm.server.reduction.each or spread or algorithm.upload.noise is not None:
        return algorithm
    return reduced_by("bounded")(algorithm)


@dataclass
class RoundEnd:
    """What an attempt at a round came to: the new state, unless too few answered, and how many clients it is of."""

    tally: Tally
    clients: int = 0
    state: Any = None


class Coordinator:
    """Holds rounds over a transport; state is on disk after every one. roster: who is admitted now."""

    def __init__(
        self, place: Path, roster: Callable[[], Roster], transport: Transport, *, n_items: int,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep, pause: float = PAUSE,
    ) -> None:  # fmt: skip
        self.place, self.roster, self.n_items = place, roster, n_items
        self.agreement = Agreement.read(place)
        self.work = work_of(self.agreement)
        self.desk = Desk(place, self.agreement.digest(), transport, clock, sleep, pause)
        self.masked = Masked(place, self.desk, self.agreement.deadline)
        self.clock, self.sleep, self.pause = clock, sleep, pause
        if isinstance(self.work, LearntWork):
            algorithm = self.work.algorithm
            self.reduced = bounded(algorithm) if self.agreement.bounds else algorithm
            self.rules = Rules(algorithm, n_items, self.agreement.largest_norm, self.agreement.row_quota)
        self.state, self.moved, self.version = self._stored()
        self.stamp = stamp_of(self.parameters())
        self.seen, self.newest = set[str](), float("-inf")  # who was there at the last look; when somebody came last
        self.waited_since = self.began = clock()  # when the round was due, and when its nodes were asked

    def _stored(self) -> tuple[Any, dict[str, Array], int]:
        """Its state, per item table the version in which each row moved last, and how far the rounds have come."""
        file, tables = self.place / STATE, list[str]()
        if isinstance(self.work, LearntWork):
            specs = self.work.algorithm.specs
            tables = [n for n in self.work.algorithm.received if specs[n].axis is Axis.ITEM]
        if file.is_file():
            arrays, meta = load_tensors(file)
            if meta.get("federation") != self.agreement.digest():
                raise ForeignError(f"{file} belongs to another federation (method, seed, catalogue or support differ)")
            moved = {n: checked(arrays, f"moved/{n}", (self.n_items,), str(file)) for n in tables}
            kept = {n: v for n, v in arrays.items() if not n.startswith("moved/")}
            return self.work.unpack(kept, self.n_items, str(file)), moved, int(meta["round"])
        state = self.work.start(self.n_items, self.agreement.seed)
        return state, {n: np.zeros(self.n_items, np.int32) for n in tables}, 0

    @property
    def clients(self) -> int:
        """Clients admitted, in all."""
        return sum(member.users for member in self.roster().values())

    @property
    def over(self) -> bool:
        """Whether no round is left."""
        return self.version >= self.work.rounds or self.work.done(self.state)

    def parameters(self) -> dict[str, Array]:
        """The parameters that nodes receive, by name."""
        return self.work.parameters(self.state)

    def run(self) -> None:
        """All rounds that are left."""
        while not self.over:
            self.round()

    def round(self) -> dict[str, Any]:
        """One committed round; attempts with too few clients are given up and begun again."""
        number, abandoned, again = self.version + 1, 0, 0
        self.waited_since = self.began = self.clock()
        attempt = self._masked if self.agreement.secure else self._plain
        while (outcome := attempt(number, again)).state is None:
            asked = outcome.tally.bytes_down > 0
            abandoned += asked
            if asked or not again:
                needed = self.agreement.cohort if self.agreement.secure else self.agreement.least
                what = "nodes" if self.agreement.secure else "clients"
                detail = f"too few answered: a round needs {needed} {what} at least; waiting for more"
                self.desk.refuse(number, "all", Refused("least", detail))
            again += 1
            self.sleep(min(2.0 ** min(abandoned, 10), PATIENCE))
        self._commit(outcome.state, number)
        tally = outcome.tally
        line = {
            "round": number, "clients": outcome.clients, "nodes": len(tally.nodes), "refused": tally.refused,
            "abandoned": abandoned, "bytes_up": tally.bytes_up, "bytes_down": tally.bytes_down,
            "seconds": round(self.clock() - self.began, 3), "waited": round(self.began - self.waited_since, 3),
            "masked": self.agreement.secure,
        }  # fmt: skip
        self.desk.log("rounds.jsonl", line)
        return line

    # who takes part

    def _wanted(self, number: int, again: int) -> tuple[int, dict[str, I64]]:
        """How many clients a round wants, and whom it asks for that: some more, if some are expected to be lost."""
        roster = {name: member.clients for name, member in self.roster().items()}
        participation = self.work.federation.participation if isinstance(self.work, LearntWork) else 1.0
        count = sum(ids.size for ids in roster.values())
        if participation == 1 or not count:
            return count, roster
        wanted = max(self.agreement.least, round_half_up(participation * count))
        share = min(1.0, wanted / count * self.agreement.spare)
        units = [group for ids in roster.values() for group in groups_of(ids, self._smallest(ids))]
        units.sort(key=lambda group: int(group[0]))
        places = draw_cohort(len(units), share, seed=self.agreement.seed, round=number - again * MANY_ROUNDS)
        drawn = np.concatenate([units[at] for at in places])
        chosen = {node: np.intersect1d(ids, drawn) for node, ids in roster.items()}
        return wanted, {node: ids for node, ids in chosen.items() if ids.size}

    def _smallest(self, ids: I64) -> int:
        """Clients of a node that are drawn together: a silo's in groups, as it answers for no fewer."""
        return 1 if ids.size == 1 else self.agreement.fewest

    def _gathered(self, number: int, drawn: Mapping[str, I64]) -> list[str]:
        """Those of the drawn nodes that are there; while nodes are still coming in, it waits for them.

        Whoever misses the sums of a closed form is in none of it, so those wait for a deadline.
        """
        patience = self.agreement.deadline if isinstance(self.work, SummedWork) else SETTLED
        ends = self.clock() + self.agreement.deadline
        while True:
            self.desk.settle(number)
            there = self.desk.there() & set(drawn)
            if there - self.seen:
                self.newest = self.clock()
            self.seen |= there  # who comes and goes is new once
            if len(there) == len(drawn) or self.clock() >= min(self.newest + patience, ends):
                free, self.began = self.desk.free(), self.clock()
                return [node for node in drawn if node in free]
            self.sleep(self.pause)

    # plain uploads

    def _plain(self, number: int, again: int) -> RoundEnd:
        """An attempt whose uploads the server sees, and checks one by one."""
        wanted, drawn = self._wanted(number, again)
        attempt, total = secrets.token_hex(16), list[UploadSum]()

        def take(node: str, answer: Answer) -> None:
            if isinstance(answer, OpeningMessage):
                raise Refused("protocol", "nothing was to be opened")
            one = self._one_upload(answer, drawn[node].size)
            total[:] = [total[0] + one if total else one]

        exchange = Exchange(
            number, attempt, lambda node, whole: self._task(node, whole, number, attempt, drawn[node]), take,
            self.agreement.deadline, lambda: bool(total) and total[0].clients >= wanted,
        )  # fmt: skip
        tally = self.desk.hold(self._gathered(number, drawn), exchange)
        if not total or total[0].clients < self.agreement.least:
            return RoundEnd(tally)
        ctx = Context(number, self.agreement.seed, self.n_items, self.clients)
        return RoundEnd(tally, total[0].clients, apply(self.reduced, self.state, total[0], ctx))

    def _one_upload(self, update: UpdateMessage, asked: int) -> UploadSum:
        if not 0 < update.clients <= asked:
            raise Refused("clients", f"{update.clients} clients, {asked} were asked")
        one = self.rules.open_sum(update, self.parameters())
        reduction = self.reduced.server.reduction
        if not reduction.each:
            return one
        if update.clients != 1 and not isinstance(reduction, Bounded):
            raise Refused("clients", "this server must see every upload by itself; silos send sums")
        return replace(one, parts=(one,))

    # secure sums

    def _masked(self, number: int, again: int) -> RoundEnd:
        """An attempt of two exchanges, after which the server knows a sum and nothing else."""
        tally, begun = Tally(), OpenSum.read(self.place, self.agreement)
        if begun is None or begun.terms.round != number or self._spoilt(begun):
            begun = self._collected(number, again, tally)
        if begun is None:
            return RoundEnd(tally)
        summed = isinstance(self.work, SummedWork)  # it has nothing without its sum, so it waits for who opens it
        vector, tally.nodes = self.masked.opened(begun, self._parties, tally, waits=summed), self._named(begun.here)
        if vector is None:
            return RoundEnd(tally, 0, self.state)
        users = {member.party: member.users for member in self.roster().values()}
        expected = max(sum(users.get(party, 0) for party in begun.terms.parties), len(begun.here))
        if self._plausible(vector, len(begun.here), expected):
            ctx = Context(number, self.agreement.seed, self.n_items, self.clients)
            state, clients = self.work.applied(self.state, vector, ctx, expected)
            return RoundEnd(tally, clients, state)
        words = "the opened sum is none of healthy uploads: a node sent other numbers, or other shares"
        if summed:
            raise RunError(f"round {number}: {words}; its nodes open no other sum of it: begin a new deployment")
        self.desk.refuse(number, "all", Refused("finite", words))
        return RoundEnd(tally, 0, self.state)

    def _spoilt(self, begun: OpenSum) -> bool:
        """Whether somebody in a sum was put out since: its letters may be why it could not be opened."""
        gone = set(begun.here) - set(self._parties())
        if gone:
            what = f"the sum of round {begun.terms.round} is begun again without {len(gone)} nodes that were put out"
            self.desk.refuse(begun.terms.round, "all", Refused("cohort", what))
        return bool(gone)

    def _plausible(self, vector: I64, least: int, most: int) -> bool:
        """Whether a sum is of so many clients, and learnt changes are such as training reaches."""
        clients = int(vector[-1])
        if not least <= clients <= most:
            return False
        if not isinstance(self.work, LearntWork) or self.work.budget is not None:
            return True
        limit = int(clients * LIMIT * SCALE)
        return -limit < int(vector.min()) and int(vector.max()) < limit

    def _collected(self, number: int, again: int, tally: Tally) -> OpenSum | None:
        """The first exchange; None where too few are there or answer."""
        wanted, drawn = self._wanted(number, again)
        present, roster, attempt = self._gathered(number, drawn), self.roster(), secrets.token_hex(16)
        members = {name: replace(roster[name], users=drawn[name].size) for name in present if name in roster}
        parties = tuple(sorted(member.party for member in members.values()))
        if len(parties) < max(self.agreement.cohort, self._least(drawn)):
            return None

        def make(node: str, whole: bool, everybody: I64, publics: Bytes) -> bytes:
            return self._task(node, whole, number, attempt, drawn[node], parties=everybody, publics=publics)

        terms, size = (
            self.agreement.terms(number, attempt, self.stamp, parties),
            self.work.size(self.state, self.n_items),
        )
        return self.masked.collected(terms, size, members, make, wanted, tally)

    def _least(self, drawn: Mapping[str, I64]) -> int:
        """Nodes without whose shares of the noise an epsilon would not be kept."""
        budgeted = isinstance(self.work, LearntWork) and self.work.budget is not None
        return Budget.least(len(drawn)) if budgeted else 0

    def _parties(self) -> dict[int, str]:
        return {member.party: name for name, member in self.roster().items()}

    def _named(self, parties: tuple[int, ...]) -> list[str]:
        names = self._parties()
        return [names[party] for party in parties if party in names]

    # messages, outcome, state

    def _task(
        self, node: str, whole: bool, number: int, attempt: str, clients: I64, *, upload: bool = True,
        parties: I64 = NOBODY, publics: Bytes = NO_BYTES,
    ) -> bytes:  # fmt: skip
        base = WHOLE if whole else self.desk.holds.get(node, WHOLE)
        parameters = self.parameters()
        tensors = parameters if base == WHOLE else changed_since(base, parameters, self.moved)
        return TaskMessage(
            federation=self.agreement.digest(), round=number, attempt=attempt, seed=self.agreement.seed,
            version=self.version, stamp=self.stamp, clients=clients, tensors=tensors,
            base=base if any(n.endswith(".rows") for n in tensors) else WHOLE, upload=upload,
            ends=not upload and self.over, parties=parties, publics=publics,
        ).encode()  # fmt: skip

    def share(self) -> int:
        """Give the newest parameters to whoever is there and lacks them; newcomers adapt. How many took them."""
        number, attempt, roster = self.version + 1, secrets.token_hex(16), self.roster()
        self.desk.settle(number)
        free = self.desk.free()
        nodes = [node for node in self.lacking() if node in free]
        exchange = Exchange(
            number, attempt,
            lambda node, whole: self._task(node, whole, number, attempt, roster[node].clients, upload=False),
            lambda node, answer: None, self.agreement.deadline,
        )  # fmt: skip
        return len(self.desk.hold(nodes, exchange).nodes)

    def lacking(self) -> list[str]:
        """Nodes that are there and do not hold the newest parameters."""
        there = self.desk.there()
        return [n for n in self.roster() if n in there and self.desk.holds.get(n) != self.version]

    def _commit(self, state: Any, number: int) -> None:
        """The round counts from here on."""
        before, after = self.parameters(), self.work.parameters(state)
        for name, moved in self.moved.items():
            changed = (after[name] != before[name]).reshape(self.n_items, -1).any(1)
            self.moved[name] = np.where(changed, np.int32(number), moved)
        arrays = self.work.pack(state) | {f"moved/{n}": v for n, v in self.moved.items()}
        save_tensors(self.place / STATE, arrays, {"round": number, "federation": self.agreement.digest()})
        OpenSum.forget(self.place)
        self.state, self.version = state, number
        self.stamp = stamp_of(self.parameters())
