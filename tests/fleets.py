"""Small deployments inside the test process: folders, nodes, and Flower's grid without Flower's processes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedmosaic.core.files import load_tensors
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.flower import client_app
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.protocol import TaskMessage, UpdateMessage

NEEDS_TORCH = ("fedncf", "fedrecgel")  # their nodes answer, or train, by the general engine
SMALL: dict[str, dict[str, Any]] = {
    "fedmf": {"item_rate": 2.0},
    "pfedrec": {"item_rate": 2.0},
    "fedncf": {"item_factor": 0.01, "user_rate": 0.5, "network_rate": 0.1},
    "fedrap": {"item_rate": 2.0, "decay": 0.01, "local_epochs": 2},
    "fedrecgel": {"participation": 1.0},
}


def catalogue(items: int) -> pl.DataFrame:
    return pl.DataFrame({"item": [f"i{n}" for n in range(items)], "title": [f"Item {n}" for n in range(items)]})


def histories(users: int = 8, items: int = 30, seed: int = 0) -> TrainingSet:
    rng = np.random.default_rng(seed)
    rows = [sorted(rng.choice(items, int(n), False).tolist()) for n in rng.integers(3, 9, users)]
    ragged = Ragged.from_rows(rows)
    return TrainingSet(ragged, ragged.unique(), items)


def agreement_of(method: str, items: int, **more: Any) -> Agreement:
    settings = {"dim": 4, "rounds": 3, **SMALL.get(method, {}), **more.pop("settings", {})}
    plain = {"own_draws": False, "seed": 1, "deadline": 30.0, "fewest": 1, "bounds": False}
    return Agreement(
        method=method, method_settings=settings, items=catalogue_digest(catalogue(items)), **(plain | more)
    )


def make_node(place: Path, agreement: Agreement, data: TrainingSet, users: list[int]) -> Node:
    """A device (one user) or a silo, with its history."""
    Node.create(place, agreement, catalogue(data.n_items), np.array(users))
    pairs = [(f"u{u}", f"i{i}") for u in users for i in data.histories[u]]
    Node.take_history(place, pl.DataFrame(pairs, schema=["user", "item"], orient="row"))
    return Node(place)


def make_fleet(
    place: Path, agreement: Agreement, data: TrainingSet, groups: list[list[int]]
) -> tuple[Path, dict[str, Node]]:
    server = place / "server"
    server.mkdir(parents=True)
    agreement.write(server)
    return server, {f"n{k}": make_node(place / f"n{k}", agreement, data, users) for k, users in enumerate(groups)}


def roster_of(nodes: dict[str, Node]) -> dict[str, Any]:
    return {name: node.data.client_ids for name, node in nodes.items()}


def only_pushed_and_pulled(*_: Any, **__: Any) -> Any:
    raise AssertionError("our transport pushes and pulls, and calls nothing else of a grid")


class LocalGrid(Grid):
    """Flower's grid inside this process: the real ClientApp, messages copied, nobody shares an object."""

    def __init__(self, sockets: dict[int, str]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.sockets, self.answers = sockets, dict[str, Message]()

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

    set_run = create_message = send_and_receive = only_pushed_and_pulled  # abstract there
    run = property(only_pushed_and_pulled)


def coordinator_of(server: Path, nodes: dict[str, Node], transport: Any, **more: Any) -> Coordinator:
    n_items = next(iter(nodes.values())).data.n_items
    return Coordinator(server, roster_of(nodes), transport, n_items=n_items, **({"pause": 0.001} | more))


class OneHot:
    """A node that reports a single 1 in a row of its own: sums then show who was counted, and how often."""

    def __init__(self, agreement: Agreement, row: int, shape: tuple[int, int]) -> None:
        self.agreement, self.row, self.shape = agreement, row, shape

    def answer(self, content: bytes) -> bytes:
        task = TaskMessage.decode(content)
        table = np.zeros(self.shape, dtype=np.float32)
        table[self.row] = 1
        return UpdateMessage(
            self.agreement.digest(), task.round, task.attempt, "done", task.version, clients=1,
            tensors={"item": table},
        ).encode()  # fmt: skip


def held(node: Node) -> dict[str, bytes]:
    """Everything a node holds: its users' state, the server's parameters, and its last answer."""
    arrays = node.state.pack() | {f"answer/{n}": v for n, v in node.answered.items()}
    return {name: value.tobytes() for name, value in arrays.items()}


def finished(server: Path) -> dict[str, bytes]:
    """Everything a server has committed."""
    tensors, meta = load_tensors(server / "server.safetensors")
    return {n: v.tobytes() for n, v in tensors.items()} | {"round": str(meta["round"]).encode()}
