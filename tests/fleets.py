"""Small deployments inside the test process: folders, nodes, and who is admitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.files import load_tensors
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy.admission import asked
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.plain import Rules
from fedmosaic.deploy.protocol import TaskMessage, UpdateMessage
from fedmosaic.deploy.roster import Member, Roster
from fedmosaic.deploy.work import LearntWork, Work, work_of

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
    learnt = {"dim": 4, "rounds": 3, **SMALL.get(method, {})} if method in SMALL else {}
    settings = {**learnt, **more.pop("settings", {})}
    plain = {
        "own_draws": "epsilon" in settings,
        "seed": 1,
        "deadline": 30.0,
        "fewest": 1,
        "bounds": False,
        "secure": False,
    }
    return Agreement(
        method=method, method_settings=settings, items=catalogue_digest(catalogue(items)), **(plain | more)
    )


def make_node(place: Path, agreement: Agreement, data: TrainingSet, users: list[int]) -> Node:
    """A device (one user) or a silo, with its keys and its history."""
    Node.create(place, agreement, catalogue(data.n_items), np.array(users), place.name)
    asked(place)
    pairs = [(f"u{u}", f"i{i}") for u in users for i in data.histories[u]]
    take_history(place, pl.DataFrame(pairs, schema=["user", "item"], orient="row"))
    return Node(place)


def make_fleet(
    place: Path, agreement: Agreement, data: TrainingSet, groups: list[list[int]]
) -> tuple[Path, dict[str, Node]]:
    server = place / "server"
    server.mkdir(parents=True)
    agreement.write(server)
    return server, {f"n{k}": make_node(place / f"n{k}", agreement, data, users) for k, users in enumerate(groups)}


def member_of(node: Node) -> Member:
    assert node.data.client_ids is not None
    request = asked(node.place)
    first, users = int(node.data.client_ids.min()), node.data.client_ids.size
    return Member(first, users, request.generation, request.key, bytes.fromhex(request.sum))


def roster_of(nodes: dict[str, Node]) -> Roster:
    return {name: member_of(node) for name, node in nodes.items()}


def coordinator_of(server: Path, nodes: dict[str, Node], transport: Any, **more: Any) -> Coordinator:
    n_items, roster = next(iter(nodes.values())).data.n_items, roster_of(nodes)
    return Coordinator(server, lambda: roster, transport, n_items=n_items, **({"pause": 0.001} | more))


def learnt(work: Work) -> LearntWork:
    assert isinstance(work, LearntWork)
    return work


def rules_of(agreement: Agreement, **limits: Any) -> Rules:
    return Rules(learnt(work_of(agreement)).algorithm, 30, **limits)


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
    arrays = node.work.pack_held(node.state) | {f"answer/{n}": v for n, v in node.answered.items()}
    return {name: value.tobytes() for name, value in arrays.items()}


def finished(server: Path) -> dict[str, bytes]:
    """Everything a server has committed."""
    tensors, meta = load_tensors(server / "server.safetensors")
    return {n: v.tobytes() for n, v in tensors.items()} | {"round": str(meta["round"]).encode()}
