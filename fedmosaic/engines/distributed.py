"""Clients sharded over processes: every rank works for its part of the cohort, and one exchange a round adds it up.

All ranks run the same program on the same data. Uploads are sums of integers, so every rank computes the same next
server state, bit for bit, and the same as one process would. The cohort is dealt in the groups an engine works in,
because inside a group numbers are added, or multiplied in blocks, as floats.

Ranks meet through a file on one machine (only the loopback interface listens) or at an address the user names. There
is no authentication: that is for machines that trust each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import distributed

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.ragged import I64, Ragged, offsets_of, slots
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.state import Array, DeviceStore, Rows, Stored, pack_devices, unpack_devices
from fedmosaic.engines.task import Outcome, Task, users_of

PATIENCE = timedelta(minutes=10)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ProcessTeam:
    """This process among others."""

    rank: int
    size: int

    def round(self, engine: Engine, algorithm: Algorithm, task: Task) -> Outcome:
        """A round of the whole cohort: the engine's groups are dealt to the ranks in turn; this one runs its own."""
        if algorithm.server.reduction.each:
            raise SettingsError("a server that sees every upload by itself runs in one process")
        users, groups = task.data.members(task.cohort), engine.parts(task)
        places = [_joined_places(groups[rank :: self.size]) for rank in range(self.size)]
        mine = places[self.rank]
        sent: dict[str, Array] = {}
        if mine.size:
            query = None if task.query_items is None else task.query_items.take(users_of(users, mine))
            ends = offsets_of(np.array([g.size for g in groups[self.rank :: self.size]]))
            local = [np.arange(a, b) for a, b in pairwise(ends)]
            done = engine.run(replace(task, cohort=task.cohort[mine], query_items=query), local)
            sent = _packed(algorithm, task, done, task.cohort[mine])
        parts = [(p, tensors) for p, tensors in zip(places, self.exchange(sent), strict=True) if p.size]
        return _joined(algorithm, task, users, parts)

    def exchange(self, tensors: dict[str, Array]) -> list[dict[str, Array]]:
        """Everybody's tensors, by rank."""
        data = np.frombuffer(save({n: np.ascontiguousarray(v) for n, v in tensors.items()}), dtype=np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        distributed.all_gather(sizes, torch.tensor([data.size]))
        longest = int(max(s.item() for s in sizes))
        padded = np.zeros(longest, dtype=np.uint8)
        padded[: data.size] = data
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        distributed.all_gather(found, torch.from_numpy(padded))
        return [load(part.numpy()[: int(size.item())].tobytes()) for part, size in zip(found, sizes, strict=True)]


def _joined_places(groups: list[I64]) -> I64:
    return np.concatenate([np.zeros(0, np.int64), *groups])


def _packed(algorithm: Algorithm, task: Task, done: Outcome, clients: I64) -> dict[str, Array]:
    """A rank's outcome as flat tensors: its sum, and what its clients hold now."""
    total = done.total
    counts = {"clients": total.clients, "examples": total.examples, "loss": total.loss, "numbers": total.numbers}
    header = json.dumps({**counts, "shrink": dict(total.shrink)})
    tensors: dict[str, Array] = {f"total/{n}": v for n, v in total.totals.items()}
    tensors |= {f"rest/{n}": v for n, v in total.rest.items()}
    tensors |= {"touched": total.touched, "header": np.frombuffer(header.encode(), dtype=np.uint8)}
    if done.answers is not None:
        tensors["answers"] = done.answers

    def own(name: str, stored: Stored) -> Stored:
        if not isinstance(stored, Rows):
            return stored[_index(algorithm, task, name, clients)]
        mine = np.isin(stored.keys // task.data.n_items, clients)
        return Rows(stored.keys[mine], stored.values[mine], None if stored.scale is None else stored.scale[clients])

    params = {n: own(n, stored) for n, stored in done.devices.params.items()}
    memory = {n: tuple(own(n, part) for part in parts) for n, parts in done.devices.memory.items()}
    return tensors | pack_devices(DeviceStore(params, memory))


def _index(algorithm: Algorithm, task: Task, name: str, clients: I64) -> I64:
    """Rows of a stored tensor that belong to some clients: their users', or one each."""
    if algorithm.specs[name].axis is Axis.USER:
        return task.data.members(clients).values.astype(np.int64)
    return clients


def _joined(algorithm: Algorithm, task: Task, users: Ragged, parts: list[tuple[I64, dict[str, Array]]]) -> Outcome:
    """All ranks' outcomes as one."""
    total: UploadSum | None = None
    query, stores = task.query_items, []
    answers = None if query is None else np.empty(query.values.size, dtype=np.float32)
    for places, tensors in parts:
        header = json.loads(tensors["header"].tobytes())
        totals = {n[6:]: v for n, v in tensors.items() if n.startswith("total/")}
        rest = {n[5:]: v for n, v in tensors.items() if n.startswith("rest/")}
        one = UploadSum(totals, tensors["touched"], **header, rest=rest)
        total = one if total is None else total + one
        if answers is not None and query is not None:
            answers[slots(query, users_of(users, places))] = tensors["answers"]
        stores.append((task.cohort[places], unpack_devices(algorithm, tensors, "what a rank sent")))
    assert total is not None
    old, first, params = task.devices, stores[0][1], dict(task.devices.params)
    for name in {n for _, s in stores for n in s.params}:
        held = [(c, s.params[name]) for c, s in stores if name in s.params]
        params[name] = _merged(algorithm, task, name, old.params.get(name), held)
    memory = {}
    for name, fresh in first.memory.items():
        before = old.memory.get(name) or (None,) * len(fresh)
        memory[name] = tuple(
            _merged(algorithm, task, name, was, [(c, s.memory[name][i]) for c, s in stores])
            for i, was in enumerate(before)
        )
    return Outcome(total, DeviceStore(params, memory), answers)


def _merged(
    algorithm: Algorithm, task: Task, name: str, old: Stored | None, parts: Sequence[tuple[I64, Stored]]
) -> Stored:
    """A stored parameter with what every rank's clients hold put in."""
    if isinstance(parts[0][1], Rows):
        assert old is None or isinstance(old, Rows)
        return _merged_rows(task, old, [(clients, rows) for clients, rows in parts if isinstance(rows, Rows)])
    assert not isinstance(old, Rows)
    count = task.data.n_users if algorithm.specs[name].axis is Axis.USER else task.data.n_clients
    new = np.zeros((count, *parts[0][1].shape[1:]), parts[0][1].dtype) if old is None else old.copy()
    for clients, value in parts:
        new[_index(algorithm, task, name, clients)] = value
    return new


def _merged_rows(task: Task, old: Rows | None, parts: Sequence[tuple[I64, Rows]]) -> Rows:
    """Rows by key: those of the cohort from the ranks, the others as they were."""
    keys, rows = [part.keys for _, part in parts], [part.values for _, part in parts]
    scale = None if old is None or old.scale is None else old.scale.copy()
    for clients, part in parts:
        if part.scale is not None:
            scale = np.ones((task.data.n_clients, 2), np.float32) if scale is None else scale
            scale[clients] = part.scale
    if old is not None:
        still = ~np.isin(old.keys // task.data.n_items, task.cohort)
        keys, rows = [old.keys[still], *keys], [old.values[still], *rows]
    every = np.concatenate(keys)
    order = np.argsort(every)
    return Rows(every[order], np.concatenate(rows)[order], scale)


@contextmanager
def joined(rank: int, size: int, rendezvous: str, *, trusted: bool = False) -> Iterator[ProcessTeam]:
    """Meet the other ranks at `file:///...` (one machine) or `tcp://host:port`, and part when done.

    An address beyond this machine is refused unless the caller says that the network is trusted.
    """
    parts = urlsplit(rendezvous)
    if parts.scheme not in ("file", "tcp"):
        raise SettingsError(f"a rendezvous is file:///path or tcp://host:port, got {rendezvous!r}")
    if parts.scheme == "tcp" and parts.hostname not in LOOPBACK and not trusted:
        raise SettingsError(
            f"{parts.hostname} is not this machine, and ranks do not authenticate each other; say --trusted-network "
            "if everybody who can reach that address is trusted"
        )
    if parts.scheme == "file" or parts.hostname in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        distributed.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=PATIENCE
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise RunError(f"rank {rank} could not meet the others at {rendezvous}: {error}") from None
    try:
        yield ProcessTeam(rank, size)
    finally:
        distributed.destroy_process_group()
