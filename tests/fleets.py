"""Small deployments inside the test process: folders, nodes, and transports that lose, delay and damage."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.pact import Pact, catalogue_digest
from fedmosaic.ragged import Ragged
from fedmosaic.runtime.flower import client_app
from fedmosaic.runtime.protocol import Reply, Task, Update
from fedmosaic.training import TrainingSet

SMALL: dict[str, dict[str, Any]] = {
    "fedmf": {"item_rate": 2.0},
    "pfedrec": {"item_rate": 2.0},
    "fedncf": {"item_factor": 0.1, "user_rate": 0.5, "rate": 0.1},
    "fedrap": {"table_rate": 2.0, "decay": 0.01, "local_epochs": 2},
    "fedrecgel": {"participation": 1.0},
}


def catalogue(items: int) -> pl.DataFrame:
    return pl.DataFrame({"item": [f"i{n}" for n in range(items)], "title": [f"Item {n}" for n in range(items)]})


def histories(users: int = 8, items: int = 30, seed: int = 0) -> TrainingSet:
    rng = np.random.default_rng(seed)
    rows = [sorted(rng.choice(items, int(n), False).tolist()) for n in rng.integers(3, 9, users)]
    ragged = Ragged.from_rows(rows)
    return TrainingSet(ragged, ragged.unique(), items)


def pact_of(method: str, items: int, **more: Any) -> Pact:
    settings = {"dim": 4, "rounds": 3, **SMALL.get(method, {}), **more.pop("settings", {})}
    plain = {"own_draws": False, "seed": 1, "deadline": 30.0}
    return Pact(method=method, method_settings=settings, items=catalogue_digest(catalogue(items)), **(plain | more))


def make_node(place: Path, pact: Pact, data: TrainingSet, users: list[int]) -> Node:
    """A device (one user) or a silo, with its history."""
    Node.create(place, pact, catalogue(data.n_items), np.array(users))
    pairs = [(f"u{u}", f"i{i}") for u in users for i in data.histories[u]]
    Node.take_history(place, pl.DataFrame(pairs, schema=["user", "item"], orient="row"))
    return Node(place)


def make_fleet(place: Path, pact: Pact, data: TrainingSet, groups: list[list[int]]) -> tuple[Path, dict[str, Node]]:
    server = place / "server"
    server.mkdir(parents=True)
    pact.write(server)
    return server, {f"n{k}": make_node(place / f"n{k}", pact, data, users) for k, users in enumerate(groups)}


def roster_of(nodes: dict[str, Node]) -> dict[str, Any]:
    return {name: node.data.numbers for name, node in nodes.items()}


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class LocalTransport:
    """Nodes called directly; every byte that travels is kept, unless there is too much of it."""

    def __init__(self, nodes: dict[str, Any], keep: bool = True) -> None:
        self.keep = keep
        self.members, self.ready, self.sent = nodes, list[Reply](), list[tuple[str, bytes]]()
        self.received: list[tuple[str, bytes]] = []
        self.count = 0

    def nodes(self) -> list[str]:
        return list(self.members)

    def send(self, node: str, content: bytes, seconds: float) -> str:
        self.count += 1
        answer = self.members[node].answer(content)
        if self.keep:
            self.received.append((node, content))
            self.sent.append((node, answer))
        self.ready.append(Reply(str(self.count), answer))
        return str(self.count)

    def receive(self) -> list[Reply]:
        found, self.ready = self.ready, []
        return found


class Chaos(LocalTransport):
    """Drops, delays past the deadline, duplicates, replays and damages, by a seeded draw per message."""

    def __init__(self, nodes: dict[str, Any], clock: Clock, seed: int, late: float) -> None:
        super().__init__(nodes, keep=False)
        self.clock, self.rng, self.late = clock, random.Random(seed), late
        self.held: list[tuple[float, Reply]] = []
        self.old: list[bytes] = []
        self.fates: dict[str, int] = {}

    def send(self, node: str, content: bytes, seconds: float) -> str:
        name = super().send(node, content, seconds)
        reply = self.ready.pop()
        assert reply.content is not None
        draw = self.rng.random()
        fate = "drop" if draw < 0.10 else "late" if draw < 0.20 else "again" if draw < 0.25 else "bad"
        fate = fate if draw < 0.30 else "good"
        self.fates[fate] = self.fates.get(fate, 0) + 1
        if fate == "late":
            self.held.append((self.clock() + self.late, reply))
        elif fate == "again":
            self.ready += [reply, reply]
            if self.old:
                self.ready.append(Reply(f"replay-{self.count}", self.rng.choice(self.old)))
        elif fate == "bad":
            self.ready.append(Reply(name, damaged(reply.content, self.rng)))
        elif fate == "good":
            self.ready.append(reply)
        self.old = [*self.old[-20:], reply.content]
        return name

    def receive(self) -> list[Reply]:
        due = [reply for at, reply in self.held if at <= self.clock()]
        self.held = [(at, reply) for at, reply in self.held if at > self.clock()]
        return super().receive() + due


def damaged(content: bytes, rng: random.Random) -> bytes:
    """An upload with NaN, another shape, an end cut off, or values out of range."""

    kind = rng.choice(["nan", "shape", "truncated", "range", "flip"])
    if kind == "truncated":
        return content[: rng.randrange(len(content))]
    if kind == "flip":
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    update = Update.decode(content)
    name, value = next((n, v) for n, v in update.tensors.items() if not n.endswith(".rows"))
    wrong = value.copy().astype(np.float32)
    if kind == "shape":
        wrong = wrong[:-1]
    else:
        wrong.flat[0] = np.nan if kind == "nan" else 1e30
    return replace(update, tensors={**update.tensors, name: wrong}).encode()


class LocalGrid(Grid):
    """Flower's grid inside this process: the real ClientApp, messages copied, nobody shares an object."""

    def __init__(self, sockets: dict[int, str]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.sockets, self.answers = sockets, dict[str, Message]()

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.sockets)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"m{len(self.answers)}-{random.random()}"
            sent = copy.deepcopy(message)
            sent.metadata.__dict__["_message_id"] = name
            context = Context(1, node, {"socket": self.sockets[node]}, RecordDict(), {})
            self.answers[name] = copy.deepcopy(client_app(sent, context))
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answers.pop(name) for name in list(message_ids) if name in self.answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def coordinator_of(server: Path, nodes: dict[str, Node], transport: Any, **more: Any) -> Coordinator:
    n_items = next(iter(nodes.values())).data.n_items
    return Coordinator(server, roster_of(nodes), transport, n_items=n_items, **more)


class OneHot:
    """A node that reports a single 1 in a row of its own: sums then show who was counted, and how often."""

    def __init__(self, pact: Pact, row: int, shape: tuple[int, int]) -> None:
        self.pact, self.row, self.shape = pact, row, shape

    def answer(self, content: bytes) -> bytes:
        task = Task.decode(content)
        table = np.zeros(self.shape, dtype=np.float32)
        table[self.row] = 1
        return Update(
            self.pact.digest(), task.round, task.attempt, "done", task.version, clients=1, loss=0.5,
            tensors={"item": table},
        ).encode()  # fmt: skip
