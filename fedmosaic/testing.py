"""The conformance kit: laws that every method must keep, shipped so that a new one can prove itself.

    check_engines(federation)    loop, simulate and fused agree, where they run the algorithm
    check_chunks(federation)     any chunk size and any number of workers give the same round
    check_privacy(federation)    nothing private is sent, by any engine

Beside them, toys to try methods on, and transports for deployments without a network.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.algorithm.local import Context, Pass, Phase
from fedmosaic.algorithm.parameters import UPLOADED
from fedmosaic.core.files import digest_of, load_tensors
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy.protocol import Reply, UpdateMessage
from fedmosaic.engines.choice import ENGINES, holding_of
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.state import DeviceStore, FederationState, Rows, Stored, pack_devices
from fedmosaic.engines.task import Outcome, Task


def toy_training_set(users: int = 13, items: int = 23, seed: int = 0) -> TrainingSet:
    """Ragged histories from none to nearly all items, repeats included, and one user whose pool is empty."""
    rng = np.random.default_rng(seed)
    rows = [sorted(rng.choice(items, int(n), replace=False).tolist()) for n in rng.integers(1, items - 4, users)]
    rows[3] = list(range(items))  # nothing left to be a negative
    rows[5] = [*rows[5], rows[5][0]]  # a pair kept twice
    rows[9] = []  # nothing to train on
    histories = Ragged.from_rows(rows)
    return TrainingSet(histories, histories.unique(), items)


def checkerboard(size: int = 16) -> Interactions:
    """Users like items of their own parity; each lacks one of them (its own number), which is the right answer."""
    pairs = [(u, i) for u in range(size) for i in range(size) if u % 2 == i % 2 and i != u]
    return Interactions.from_frame({"user": [u for u, _ in pairs], "item": [i for _, i in pairs]})


def digest(arrays: Mapping[str, Any]) -> str:
    """SHA-256 of named arrays."""
    return digest_of(dict(arrays))


def run_rounds(
    federation: Federation, data: TrainingSet, rounds: int = 3, seed: int = 1
) -> tuple[FederationState, list[Any]]:
    """Advance a federation on some data, asking for every score of every user after every round."""
    everything = np.tile(np.arange(data.n_items, dtype=np.int32), data.n_users)
    query = Ragged(everything, np.arange(data.n_users + 1) * data.n_items)
    state = federation.start(data, seed)
    seen = []
    for number in range(1, rounds + 1):
        state, record, answers = federation.advance(data, state, number, seed, query)
        seen.append((record, answers))
    return state, seen


def engines_of(federation: Federation, data: TrainingSet) -> dict[str, Engine]:
    """Every engine but `loop` that runs a federation's algorithm on such data."""
    arranged = data.pooled() if federation.pooled else data
    algorithm, holding = federation.algorithm, holding_of(arranged)
    runs = {n: kind for n, kind in ENGINES.items() if n != "loop" and not kind.refuses(algorithm, holding)}
    return {name: kind.make(algorithm, holding) for name, kind in runs.items()}


def check_engines(federation: Federation, data: TrainingSet | None = None, tolerance: float = 2e-4) -> None:
    """Engine law: every engine that runs the algorithm agrees with loop on state, losses and answers, three rounds."""
    data = toy_training_set() if data is None else data
    expected, told = run_rounds(replace(federation, engine="loop"), data)
    wanted = expected.pack()
    for engine in engines_of(federation, data):
        chosen = replace(federation, engine=engine)
        state, said = run_rounds(chosen, data)
        found = state.pack()
        assert set(found) == set(wanted), (engine, set(found) ^ set(wanted))
        for name, value in wanted.items():
            _close(found[name], value, tolerance, f"{engine}: {name}")
        for (record, answers), (expect, scores) in zip(said, told, strict=True):
            counted = (record.clients, record.bytes_up, record.touched_rows)
            assert counted == (expect.clients, expect.bytes_up, expect.touched_rows), engine
            _close(np.array([record.loss]), np.array([expect.loss]), tolerance, f"{engine}: loss")
            _close(answers, scores, 10 * tolerance, f"{engine}: answers")
        asked = chosen.scorer(data, state).scores(np.arange(data.n_users))
        _close(asked.ravel(), said[-1][1], 10 * tolerance, f"{engine}: scorer against answers")


def check_chunks(federation: Federation, data: TrainingSet | None = None, tolerance: float = 2e-4) -> None:
    """Any chunk size gives the same round; the fused engine gives the same bits for any number of workers."""
    from fedmosaic.engines.simulate import chunks

    data = toy_training_set() if data is None else data
    task, algorithm = first_task(federation, data), federation.algorithm
    engines = engines_of(federation, data)
    whole = engines["simulate"].run(task)
    for size in (1, 2, 7, 1000):
        part = engines["simulate"].run(task, list(chunks(algorithm, task, size)))
        assert_same_round(part, whole, tolerance, f"chunks of {size}")
    if "fused" in engines and not federation.pooled:
        fused: Any = engines["fused"]
        bits = {digest(fused.run(task, workers=workers).total.totals) for workers in (1, 2, 4)}
        assert len(bits) == 1, "1, 2 and 4 workers give different sums"


def check_privacy(federation: Federation, data: TrainingSet | None = None) -> None:
    """Privacy law, for every engine that runs the algorithm.

    Names: nothing is sent but what a role allows. Marker: with private tensors poisoned and every rate 0, all local
    work is done and nothing may move, so that anything in the upload would be private state. Others: a client's upload
    does not change when the private state of all other clients does.
    """
    data = toy_training_set() if data is None else data
    algorithm, task = federation.algorithm, first_task(federation, data, rounds=1)
    still = replace(algorithm, local=tuple(_still(one) for one in algorithm.local))
    alone = replace(task, cohort=task.cohort[:1])
    poisoned = replace(task, devices=_poisoned(task, lambda value, mine: np.full_like(value, 1e4)))
    others = replace(alone, devices=_poisoned(task, lambda value, mine: np.where(mine, value, 1e4).astype(value.dtype)))
    holding = holding_of(task.data)
    for name, kind in ENGINES.items():
        if kind.refuses(algorithm, holding) or kind.refuses(still, holding):
            continue
        engine, quiet = kind.make(algorithm, holding), kind.make(still, holding)
        sent = engine.run(task).total
        assert {n for n in sent.totals if algorithm.roles[n] not in UPLOADED} == set(), f"{name}: private is sent"
        marked = quiet.run(poisoned).total
        for parameter, total in marked.totals.items():
            assert algorithm.upload.kind == "gradient" or not total.any(), f"{name}: {parameter} carries private state"
        assert not any(marked.shrink.values()), "what decay left of a table is sent although nothing decayed"
        own, again = engine.run(alone).total, engine.run(others).total
        assert digest(own.totals) == digest(again.totals), f"{name}: an upload depends on another client's state"


def _still(one: Pass) -> Pass:
    phases = tuple(Phase(tuple(replace(m, rate=0.0) for m in phase.moves)) for phase in one.phases)
    return replace(one, phases=phases)


def _poisoned(task: Task, poison: Callable[[Any, Any], Any]) -> DeviceStore:
    """The device store with every private number changed; `poison` is told which rows are the first client's."""

    def changed(name: str, stored: Stored) -> Stored:
        if isinstance(stored, Rows):
            mine = (stored.keys // task.data.n_items == task.cohort[0]).reshape(-1, *[1] * (stored.values.ndim - 1))
            return replace(stored, values=poison(stored.values, mine))
        users = stored.shape[0] == task.data.n_users
        rows = task.data.members(task.cohort[:1]).values if users else task.cohort[:1]
        mine = np.isin(np.arange(stored.shape[0]), rows).reshape(-1, *[1] * (stored.ndim - 1))
        return np.asarray(poison(stored, mine))

    devices = task.devices
    memory = {n: tuple(changed(n, part) for part in parts) for n, parts in devices.memory.items()}
    return DeviceStore({n: changed(n, stored) for n, stored in devices.params.items()}, memory)


def first_task(federation: Federation, data: TrainingSet, seed: int = 1, rounds: int = 0) -> Task:
    """The task of the round after some, with everybody."""
    arranged = data.pooled() if federation.pooled else data
    state = federation.start(data, seed)
    for number in range(1, rounds + 1):
        state, _, _ = federation.advance(data, state, number, seed)
    ctx = Context(rounds + 1, seed, data.n_items, arranged.n_clients)
    return Task(arranged, state.server.params, state.devices, ctx, np.arange(arranged.n_clients))


def assert_same_round(one: Outcome, other: Outcome, tolerance: float, what: str) -> None:
    """Uploads, counts and private state agree."""
    for name, total in other.total.totals.items():
        _close(one.total.totals[name] / 2**32, total / 2**32, tolerance, f"{what}: {name}")
    assert one.total.touched.tolist() == other.total.touched.tolist(), what
    assert (one.total.clients, one.total.examples) == (other.total.clients, other.total.examples), what
    held = pack_devices(one.devices)
    for name, value in pack_devices(other.devices).items():
        _close(held[name], value, tolerance, f"{what}: {name}")


def same_parity_share(federation: Federation, size: int = 16) -> float:
    """Share of users who rank their missing item above all items of the other parity."""
    data = checkerboard(size)
    histories = Ragged.group(data.user, data.item, size)
    training = TrainingSet(histories, histories.unique(), size)
    state = federation.start(training, 0)
    for number in range(1, federation.rounds + 1):
        state, _, _ = federation.advance(training, state, number, 0)
    scores = federation.scorer(training, state).scores(np.arange(size))
    other = np.arange(size)[:, None] % 2 != np.arange(size)[None] % 2
    return float((np.diag(scores) > np.where(other, scores, -np.inf).max(axis=1)).mean())


def final_bytes(place: str | Path) -> dict[str, bytes]:
    """Everything a finished run ends in but its clocks."""
    states: dict[str, bytes] = {}
    for name in ("best", "latest"):
        tensors, _ = load_tensors(Path(place) / "checkpoint" / f"{name}.safetensors")
        states |= {f"{name}/{k}": v.tobytes() for k, v in tensors.items()}
    summary = json.loads((Path(place) / "summary.json").read_text())
    kept = {k: v for k, v in summary.items() if k not in {"cost", "run"}}
    return states | {"summary": json.dumps(kept).encode(), "ranks": (Path(place) / "ranks.safetensors").read_bytes()}


def kill_at_random(config: str, place: Path, *, times: int, seed: int, longest: float = 2.0) -> int:
    """Start a run, then kill -9 it at random moments of its training and resume it; returns how often it was alive."""
    rng = random.Random(seed)
    metrics, found = place / "metrics.jsonl", 0
    for _ in range(times):
        begun = (place / "config.toml").is_file()
        words = ["resume", str(place)] if begun else ["run", "--config", config, "--out", str(place)]
        before = metrics.stat().st_ino if metrics.is_file() else None  # training begins by replacing this file
        process = subprocess.Popen([sys.executable, "-m", "fedmosaic", *words, "--quiet"], stdout=subprocess.DEVNULL)
        while process.poll() is None and (not metrics.is_file() or metrics.stat().st_ino == before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, longest))
        found += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    return found


def _close(found: Any, wanted: Any, tolerance: float, what: str) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, expected {wanted.shape}"
    if wanted.dtype.kind in "iub":
        assert (found == wanted).all(), f"{what} differs"
        return
    gap = np.abs(found - wanted) / (1 + np.abs(wanted))
    assert not gap.size or gap.max() <= tolerance, f"{what} differs by {gap.max():.2e}"


NOT_EPHEMERAL = range(10_000, 32_768)  # below what Linux, macOS and Windows give to outgoing connections


def free_port() -> int:
    """A port of the loopback interface that nobody uses now, nor is given by chance before it is used."""
    for port in random.SystemRandom().sample(NOT_EPHEMERAL, 100):
        with socket.socket() as door, suppress(OSError):
            door.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port on the loopback interface: 100 were tried")


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now += seconds


class LocalTransport:
    """Nodes called directly; every byte that travels is kept, unless there is too much of it."""

    def __init__(self, nodes: dict[str, Any], keep: bool = True) -> None:
        self.keep = keep
        self.members, self.ready, self.sent = nodes, list[Reply](), list[tuple[str, bytes]]()
        self.received: list[tuple[str, bytes]] = []
        self.count = 0

    def nodes(self) -> list[str]:
        """The names of all nodes."""
        return list(self.members)

    def send(self, node: str, content: bytes, seconds: float) -> str:
        """Let the node answer at once."""
        self.count += 1
        answer = self.members[node].answer(content)
        if self.keep:
            self.received.append((node, content))
            self.sent.append((node, answer))
        self.ready.append(Reply(str(self.count), answer))
        return str(self.count)

    def receive(self) -> list[Reply]:
        """What has been answered."""
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
        """Let the node answer, and draw what becomes of it."""
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
        """What has been answered, and what was late."""
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
    update = UpdateMessage.decode(content)
    name, value = next((n, v) for n, v in update.tensors.items() if not n.endswith(".rows"))
    wrong = value.copy().astype(np.float32)
    if kind == "shape":
        wrong = wrong[:-1]
    else:
        wrong.flat[0] = np.nan if kind == "nan" else 1e30
    return replace(update, tensors={**update.tensors, name: wrong}).encode()
