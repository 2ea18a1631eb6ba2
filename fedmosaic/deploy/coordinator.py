"""The server of a deployment: asks nodes, checks what they send, and commits a round when its outcome is on disk.

    server.safetensors    server/NAME, rule/NAME.i, moved/NAME (per row, the version it moved in); how far it has come
    rounds.jsonl          one line per committed round
    refused.jsonl         what did not count, from whom, and why

Nothing of a round is stored before all of it is: a server that dies begins the round again, and nodes that have worked
for it already repeat their answers. An upload counts once: only for the attempt it was asked in, while the round is
open, from the node that was asked. Nodes that still owe an answer are not asked again until it comes or its time is up.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm, reduced_by
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.reduction import Bounded
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import ForeignError, SettingsError
from fedmosaic.core.files import load_tensors, save_tensors
from fedmosaic.core.ragged import I64
from fedmosaic.data.batches import draw_cohort, round_half_up
from fedmosaic.deploy.agreement import Agreement, groups_of, stamp_of
from fedmosaic.deploy.protocol import (
    WHOLE,
    Refused,
    Reply,
    Rules,
    TaskMessage,
    Transport,
    UpdateMessage,
    changed_since,
)
from fedmosaic.engines.state import Array, ServerState, checked
from fedmosaic.engines.uploads import apply

STATE = "server.safetensors"
PAUSE = 0.05  # seconds between two looks for answers
MANY_ROUNDS = 1 << 32  # draws of a round that is begun again are keyed apart from all rounds
OWED = 1.0  # deadlines after its round closed until an unanswered task is forgotten


Roster = Mapping[str, I64]  # admitted nodes, and the ids of their clients


def bounded(algorithm: Algorithm) -> Algorithm:
    """An algorithm whose server cuts uploads to what most keep; as it is where it cannot, or has its own way to.

    Decay that reaches all rows, and noise that is as large as the bounds, leave nothing that could be cut fairly.
    """
    spread = any(move.spreads for move in algorithm.moves)
    if algorithm.server.reduction.each or spread or algorithm.upload.noise is not None:
        return algorithm
    return reduced_by("bounded")(algorithm)


@dataclass
class OpenTask:
    """A task that is out."""

    node: str
    attempt: str
    clients: int
    until: float
    upload: bool
    whole: bool  # whether it carried all parameters
    open: bool = True  # whether its round is


@dataclass
class RoundCount:
    """What has come in for a round."""

    total: UploadSum | None = None
    nodes: list[str] = field(default_factory=list)
    refused: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def clients(self) -> int:
        """How many clients have been counted so far."""
        return 0 if self.total is None else self.total.clients


class Coordinator:
    """Holds rounds over a transport; state is on disk after every one."""

    def __init__(
        self,
        place: Path,
        roster: Roster,
        transport: Transport,
        *,
        n_items: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        pause: float = PAUSE,
    ) -> None:
        self.place, self.roster, self.transport = place, dict(roster), transport
        self.agreement = Agreement.read(place)
        self.federation, self.n_items = self.agreement.build(), n_items
        self.clock, self.sleep, self.pause = clock, sleep, pause
        algorithm = self.federation.algorithm
        self.reduced = bounded(algorithm) if self.agreement.bounds else algorithm
        self.rules = Rules(algorithm, n_items, self.agreement.largest_norm, self.agreement.row_quota)
        self.tables = [n for n in algorithm.received if algorithm.specs[n].axis is Axis.ITEM]
        self.state, self.moved, self.version = self._stored()
        self.stamp = stamp_of(self.parameters())
        if self.agreement.least > self.clients:
            raise SettingsError(f"least={self.agreement.least}, but only {self.clients} clients are admitted")
        self.asked: dict[str, OpenTask] = {}  # by message
        self.holds: dict[str, int] = {}  # version each node said it holds

    def _stored(self) -> tuple[ServerState, dict[str, Array], int]:
        """Parameters, per item table the version in which each row moved last, and how far the rounds have come."""
        file, algorithm = self.place / STATE, self.federation.algorithm
        if file.is_file():
            arrays, meta = load_tensors(file)
            if meta["federation"] != self.agreement.digest():
                raise ForeignError(f"{file} belongs to another federation (method, seed, catalogue or support differ)")
            state = ServerState.unpack(algorithm, arrays, self.n_items, str(file))
            return (
                state,
                {n: checked(arrays, f"moved/{n}", (self.n_items,), str(file)) for n in self.tables},
                int(meta["round"]),
            )
        state = ServerState.first(algorithm, self.n_items, self.agreement.seed)
        return state, {n: np.zeros(self.n_items, np.int32) for n in self.tables}, 0

    @property
    def clients(self) -> int:
        """Clients admitted, in all."""
        return int(sum(n.size for n in self.roster.values()))

    def parameters(self) -> dict[str, Array]:
        """The parameters that nodes receive, by name."""
        return dict(self.state.params)

    def run(self) -> None:
        """All rounds that are left."""
        while self.version < self.federation.rounds:
            self.round()

    def round(self) -> dict[str, Any]:
        """One committed round; attempts with too few clients are given up and begun again."""
        number, begun, abandoned, again = self.version + 1, self.clock(), 0, 0
        while (count := self._attempt(number, again=again)).total is None or count.clients < self.agreement.least:
            abandoned += count.bytes_down > 0  # somebody was asked
            if count.bytes_down or not again:
                detail = f"{count.clients} clients answered, {self.agreement.least} are needed; waiting for more"
                self._log("refused.jsonl", {"round": number, "node": "all", **Refused("least", detail).line()})
            again += 1
            self.sleep(1.0)
        ctx = Context(number, self.agreement.seed, self.n_items, self.clients)
        self._commit(apply(self.reduced, self.state, count.total, ctx), number)
        line = {
            "round": number, "clients": count.clients, "nodes": len(count.nodes), "refused": count.refused,
            "abandoned": abandoned, "bytes_up": count.bytes_up, "bytes_down": count.bytes_down,
            "seconds": round(self.clock() - begun, 3),
        }  # fmt: skip
        self._log("rounds.jsonl", line)
        return line

    def share(self) -> int:
        """Give the newest parameters to whoever is there and lacks them; newcomers adapt. How many took them."""
        return len(self._attempt(self.version + 1, upload=False).nodes)

    def lacking(self) -> list[str]:
        """Nodes that are there and do not hold the newest parameters."""
        there = set(self.transport.nodes())
        return [n for n in self.roster if n in there and self.holds.get(n) != self.version]

    def _attempt(self, number: int, *, upload: bool = True, again: int = 0) -> RoundCount:
        """Ask who is there, and take answers until all or enough have come or the round closes.

        A round that is begun `again` draws other clients: those of the first draw may all be away.
        """
        count, closes = RoundCount(), self.clock() + self.agreement.deadline
        wanted, drawn = self._wanted(number, again) if upload else (self.clients, self.roster)
        mine: set[str] = set()
        self._collect(None, mine)  # what came in between rounds
        busy = {a.node for a in self.asked.values()}
        there = set(self.transport.nodes())
        for node in (n for n in drawn if n in there and n not in busy):
            if upload or self.holds.get(node) != self.version:
                mine.add(self._ask(node, drawn[node], number, closes, upload, count))
        while mine & set(self.asked) and count.clients < wanted and self.clock() < closes:
            for node in self._collect(count, mine):
                self.holds.pop(node, None)  # so that the next task is whole
                mine.add(self._ask(node, drawn[node], number, closes, upload, count))
            self.sleep(self.pause)
        for message in mine & set(self.asked):
            self.asked[message].open = False
        return count

    def _wanted(self, number: int, again: int) -> tuple[int, Roster]:
        """How many clients a round wants, and whom it asks for that: some more, if some are expected to be lost."""
        participation = self.federation.participation
        if participation == 1:
            return self.clients, self.roster
        wanted = max(self.agreement.least, round_half_up(participation * self.clients))
        share = min(1.0, wanted / self.clients * self.agreement.spare)
        units = [group for ids in self.roster.values() for group in groups_of(ids, self._smallest(ids))]
        units.sort(key=lambda group: int(group[0]))
        places = draw_cohort(len(units), share, seed=self.agreement.seed, round=number - again * MANY_ROUNDS)
        drawn = np.concatenate([units[at] for at in places])
        chosen = {node: np.intersect1d(ids, drawn) for node, ids in self.roster.items()}
        return wanted, {node: ids for node, ids in chosen.items() if ids.size}

    def _smallest(self, ids: I64) -> int:
        """Clients of a node that are drawn together: a silo's in groups, as it answers for no fewer."""
        return 1 if ids.size == 1 else self.agreement.fewest

    def _ask(self, node: str, clients: I64, number: int, closes: float, upload: bool, count: RoundCount) -> str:
        base = self.holds.get(node, WHOLE)
        parameters = self.parameters()
        tensors = parameters if base == WHOLE else changed_since(base, parameters, self.moved)
        task = TaskMessage(
            federation=self.agreement.digest(), round=number, attempt=secrets.token_hex(16), seed=self.agreement.seed,
            version=self.version, stamp=self.stamp, clients=clients, tensors=tensors,
            base=base if any(n.endswith(".rows") for n in tensors) else WHOLE, upload=upload,
        )  # fmt: skip
        content = task.encode()
        count.bytes_down += len(content)
        patience = max(closes - self.clock(), 0) + OWED * self.agreement.deadline
        message = self.transport.send(node, content, patience)
        until = self.clock() + patience
        self.asked[message] = OpenTask(node, task.attempt, clients.size, until, upload, task.base == WHOLE)
        return message

    def _collect(self, count: RoundCount | None, mine: set[str]) -> list[str]:
        """Take in what has come; returns the nodes that ask for whole parameters."""
        again = []
        for reply in self.transport.receive():
            asked = self.asked.pop(reply.message, None)
            try:
                if self._counted(reply, asked, count, mine) == "resync" and asked is not None:
                    again.append(asked.node)
            except Refused as error:
                if count is not None:
                    count.refused += 1
                node = "unknown" if asked is None else asked.node
                self._log("refused.jsonl", {"round": self.version + 1, "node": node, **error.line()})
        for message in [m for m, a in self.asked.items() if a.until < self.clock()]:
            self.asked.pop(message)
        return again

    def _counted(self, reply: Reply, asked: OpenTask | None, count: RoundCount | None, mine: set[str]) -> str:
        """Check an answer and count it; its status."""
        if reply.content is None:
            raise Refused("failed", reply.error)
        update = UpdateMessage.decode(reply.content)
        now = self.version + 1
        if update.federation != self.agreement.digest():
            raise Refused("federation", f"it belongs to another federation: {update.detail[:200]}")
        if asked is None or update.attempt != asked.attempt:
            raise Refused("duplicate" if update.round == now else "round", f"round {update.round}: nobody waits for it")
        self.holds[asked.node] = update.version
        if count is None or reply.message not in mine or not asked.open or update.round != now:
            raise Refused("late", f"round {update.round} is closed")
        if update.status == "failed":
            raise Refused("failed", update.detail[:200])
        if update.status == "resync" and asked.whole:
            raise Refused("resync", "it was sent everything and asks again")
        if update.status == "done":
            count.bytes_up += len(reply.content)
            if asked.upload:
                if not 0 < update.clients <= asked.clients:
                    raise Refused("clients", f"{update.clients} clients, {asked.clients} were asked")
                one = self.rules.open_sum(update, self.parameters())
                if self.reduced.server.reduction.each:
                    if update.clients != 1 and not isinstance(self.reduced.server.reduction, Bounded):
                        raise Refused("clients", "this server must see every upload by itself; silos send sums")
                    one = replace(one, parts=(one,))
                count.total = one if count.total is None else count.total + one
            count.nodes.append(asked.node)
        return update.status

    def _commit(self, state: ServerState, number: int) -> None:
        """The round counts from here on."""
        for name in self.tables:
            changed = (state.params[name] != self.state.params[name]).reshape(self.n_items, -1).any(1)
            self.moved[name] = np.where(changed, np.int32(number), self.moved[name])
        arrays = state.pack() | {f"moved/{n}": v for n, v in self.moved.items()}
        save_tensors(self.place / STATE, arrays, {"round": number, "federation": self.agreement.digest()})
        self.state, self.version = state, number
        self.stamp = stamp_of(self.parameters())

    def _log(self, name: str, line: dict[str, Any]) -> None:
        with (self.place / name).open("a") as stream:
            stream.write(json.dumps(line) + "\n")
