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
from collections.abc import Callable, Iterator
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
from fedmosaic.algorithm.upload import Sum
from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.ragged import I64, Ragged, offsets_of, slots
from fedmosaic.engines.block import Outcome, Task, users_of
from fedmosaic.engines.devices import Array
from fedmosaic.engines.fused.pieces import GROUP

PATIENCE = timedelta(minutes=10)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Run = Callable[[Algorithm, Task, list[I64]], Outcome]  # a part of the cohort, and its groups as places in that part


@dataclass(frozen=True)
class Team:
    """This process among others."""

    rank: int
    size: int

    def round(self, run: Run, groups: list[I64], algorithm: Algorithm, task: Task) -> Outcome:
        """A round of the whole cohort, of which this rank runs every so many-th group."""
        users = task.data.members(task.cohort)
        places = [_together(groups[rank :: self.size]) for rank in range(self.size)]
        mine = places[self.rank]
        sent: dict[str, Array] = {}
        if mine.size:
            rows = users_of(users, mine)
            probe = None if task.probe is None else task.probe.take(rows)
            ends = offsets_of(np.array([g.size for g in groups[self.rank :: self.size]]))
            local = [np.arange(a, b) for a, b in pairwise(ends)]
            done = run(algorithm, replace(task, cohort=task.cohort[mine], probe=probe), local)
            sent = _packed(algorithm, task, done, mine)
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


def _together(groups: list[I64]) -> I64:
    return np.concatenate([np.zeros(0, np.int64), *groups])


def groups_of(cohort: I64) -> list[I64]:
    """Consecutive groups of the size that the fused engine adds up as floats."""
    return [np.arange(at, min(at + GROUP, cohort.size)) for at in range(0, cohort.size, GROUP)]


def _packed(algorithm: Algorithm, task: Task, done: Outcome, mine: I64) -> dict[str, Array]:
    """A rank's outcome as flat tensors: its sum, and what its clients hold now."""
    total, clients = done.total, task.cohort[mine]
    counts = {"clients": total.clients, "examples": total.examples, "loss": total.loss, "numbers": total.numbers}
    header = json.dumps({**counts, "shrink": dict(total.shrink)})
    tensors: dict[str, Array] = {f"total/{n}": v for n, v in total.totals.items()}
    tensors |= {"touched": total.touched, "header": np.frombuffer(header.encode(), dtype=np.uint8)}
    if done.probed is not None:
        tensors["probed"] = done.probed
    for name, value in done.held.items():
        if value is task.held.get(name):
            continue  # nobody here changed it
        if name.endswith(".keys"):
            own = np.isin(value // task.data.n_items, clients)
            tensors[f"held/{name}"] = value[own]
            tensors[f"held/{name[:-5]}.rows"] = done.held[f"{name[:-5]}.rows"][own]
        elif not name.endswith(".rows"):
            tensors[f"held/{name}"] = value[_index(algorithm, task, name, clients)]
    return tensors


def _axis(algorithm: Algorithm, name: str) -> Axis:
    """Along which axis a stored tensor has rows: the user's, or one for each client (scales of tables too)."""
    parameter = name.split("/", 1)[1]
    if name.startswith("memory/"):
        parameter = parameter.rpartition(".")[0]
    spec = algorithm.specs.get(parameter)
    return Axis.USER if spec is not None and spec.axis is Axis.USER else Axis.WHOLE


def _index(algorithm: Algorithm, task: Task, name: str, clients: I64) -> I64:
    """Rows of a stored tensor that belong to some clients."""
    if _axis(algorithm, name) is Axis.USER:
        return task.data.members(clients).values.astype(np.int64)
    return clients


def _joined(
    algorithm: Algorithm, task: Task, users: Ragged, parts: list[tuple[I64, dict[str, Array]]]
) -> Outcome:  # fmt: skip
    """All ranks' outcomes as one."""
    total: Sum | None = None
    held: dict[str, Array] = dict(task.held)
    stores: dict[str, list[dict[str, Array]]] = {}
    probed = None if task.probe is None else np.empty(task.probe.values.size, dtype=np.float32)
    for places, tensors in parts:
        header = json.loads(tensors["header"].tobytes())
        totals = {n[6:]: v for n, v in tensors.items() if n.startswith("total/")}
        one = Sum(totals, tensors["touched"], **header)
        total = one if total is None else total + one
        clients = task.cohort[places]
        if probed is not None and task.probe is not None:
            rows = users_of(users, places)
            probed[slots(task.probe, rows)] = tensors["probed"]
        for name in (n[5:] for n in tensors if n.startswith("held/")):
            value = tensors[f"held/{name}"]
            if name.endswith((".keys", ".rows")):
                stores.setdefault(name[:-5], []).append({name[-4:]: value})
                continue
            if held.get(name) is task.held.get(name):
                before = task.held.get(name)
                held[name] = _fresh(algorithm, task, name, value) if before is None else before.copy()
            held[name][_index(algorithm, task, name, clients)] = value
    for name, pieces in stores.items():
        held |= _merged(task, name, pieces)
    assert total is not None
    return Outcome(total, held, probed)


def _fresh(algorithm: Algorithm, task: Task, name: str, value: Array) -> Array:
    """A tensor nobody had stored before: optimisers begin with zeros, scales with ones."""
    rows = task.data.n_users if _axis(algorithm, name) is Axis.USER else task.data.n_clients
    return np.full((rows, *value.shape[1:]), int(name.endswith(".scale")), dtype=value.dtype)


def _merged(task: Task, name: str, pieces: list[dict[str, Array]]) -> dict[str, Array]:
    """The rows of a table by key: those of the cohort from the ranks, the others as they were."""
    keys = [p["keys"] for p in pieces if "keys" in p]
    rows = [p["rows"] for p in pieces if "rows" in p]
    old = task.held.get(f"{name}.keys")
    if old is not None:
        still = ~np.isin(old // task.data.n_items, task.cohort)
        keys, rows = [old[still], *keys], [task.held[f"{name}.rows"][still], *rows]
    every = np.concatenate(keys)
    order = np.argsort(every)
    return {f"{name}.keys": every[order], f"{name}.rows": np.concatenate(rows)[order]}


@contextmanager
def joined(rank: int, size: int, rendezvous: str, *, trusted: bool = False) -> Iterator[Team]:
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
        yield Team(rank, size)
    finally:
        distributed.destroy_process_group()
