"""What a method will cost on some data, before it is run, and which one suits: for a warning, and for advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import STORED, Axis
from fedmosaic.data.interactions import Interactions
from fedmosaic.methods import registry
from fedmosaic.methods.closed_form import ClosedForm
from fedmosaic.training.method import Method

SENT = 100 << 20  # bytes that a device sends in all, beyond which a run is warned of
PAIRS = 3  # a closed form's memory, in sizes of what it sums: the sum, its inverse, weights
TABLES = 3  # devices' tables, in sizes of what they hold: rows, memory of step rules, what is being worked on
COPIES = 12  # of a small model's uploads that are in the air
ALTERNATIVES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mosaic", {}),
    ("mosaic", {"rank": 64}),
    ("mosaic", {"rank": 16}),
    ("fedmf", {}),
    ("popularity", {}),
)


@dataclass(frozen=True)
class Foreseen:
    """Bytes: what a device sends at most in a round and in all, what it receives in a round, what the machine needs."""

    up: int
    down: int
    rounds: int
    memory: int

    @property
    def sent(self) -> int:
        """By a device, in all rounds."""
        return self.up * self.rounds


def foreseen(method: Method[Any], events: npt.NDArray[np.int64], users: int) -> Foreseen:
    """What a method will cost. events: how often each item was met; users: how many there are.

    >>> found = foreseen(registry.entry("ease").build(), np.ones(10_000, np.int64), 500)
    >>> found.up, found.rounds
    (800000000, 1)
    """
    up, down = method.traffic(events.size)
    sizer = getattr(method, "largest_message", None)
    if sizer is not None:  # one large sum; those before it count little
        up = sizer(events)
        return Foreseen(up, down, 1, PAIRS * up)
    if isinstance(method, ClosedForm):
        return Foreseen(up, down, method.rounds, PAIRS * up)
    memory = COPIES * up
    algorithm = getattr(method, "algorithm", None)
    if isinstance(algorithm, Algorithm):
        for name, spec in algorithm.specs.items():
            if spec.axis is Axis.ITEM and algorithm.roles[name] in STORED:
                memory += TABLES * 4 * users * events.size * int(np.prod(spec.shape, dtype=np.int64))
    return Foreseen(up, down, method.rounds, memory)


def worries(name: str, method: Method[Any], events: npt.NDArray[np.int64], users: int) -> Iterator[str]:
    """Why one might not want to start, each with what to do instead.

    >>> list(worries("popularity", registry.entry("popularity").build(), np.ones(1000, np.int64), 500))
    []
    """
    seen, free = foreseen(method, events, users), available_memory()
    large, much = seen.sent > SENT and not getattr(method, "pooled", False), free is not None and seen.memory > free
    if not large and not much:
        return
    other = _smaller(seen, events, users)
    if large:
        per = f"{size(seen.up)} in each of {seen.rounds} rounds" if seen.rounds > 1 else "in one round"
        yield f"{name} on {events.size:,} items: every device sends about {size(seen.sent)} ({per}){other}"
    if much and free is not None:
        yield f"{name} needs about {size(seen.memory)} of memory here, and {size(free)} are free{other}"


def _smaller(seen: Foreseen, events: npt.NDArray[np.int64], users: int) -> str:
    for name, settings in ALTERNATIVES:
        found = foreseen(registry.entry(name).build(settings), events, users)
        if found.sent < min(seen.sent / 2, SENT):
            words = " ".join([name, *(f"{k}={v}" for k, v in settings.items())])
            return f"; {words} sends {size(found.sent)} and needs {size(found.memory)}"
    return ""


@dataclass(frozen=True)
class Advice:
    """Which method suits some data, in lines for people and in parts for programs."""

    method: str
    settings: Mapping[str, Any]
    lines: tuple[str, ...]
    cost: Foreseen

    def plain(self, dataset: str) -> dict[str, Any]:
        """For `--json`."""
        cost = vars(self.cost) | {"sent": self.cost.sent}
        command = self.lines[-1].removeprefix("command: ")
        return {
            "dataset": dataset, "method": self.method, "settings": dict(self.settings), "cost": cost,
            "command": command, "lines": list(self.lines),
        }  # fmt: skip


def advice(data: Interactions, dataset: str, said: str = "") -> Advice:
    """What suits some data: five lines. dataset, said: as they stand on the command line."""
    events = np.bincount(data.item, minlength=len(data.items)).astype(np.int64)
    per_user = np.bincount(data.user, minlength=len(data.users))
    users, items = len(data.users), len(data.items)
    pairs = np.unique(data.user.astype(np.int64) * items + data.item)
    timed = data.time is not None and np.unique(data.time).size > 1
    name, settings, why = _suiting(events, per_user, timed)
    cost = foreseen(registry.entry(name).build(settings), events, users)
    words = " ".join(["fedmosaic run", name, dataset, *said.split(), *(f"{k}={v}" for k, v in settings.items())])
    private = (
        "the server sees sums alone with secure=true; epsilon=8 bounds what the model tells of anybody"
        + ("" if users >= 5000 else f", at a price that {users:,} users make high")
        + " (docs/privacy.md)"
    )
    return Advice(
        name,
        settings,
        (
            f"data: {users:,} users, {items:,} items, {len(data):,} events ({np.median(per_user):g} per user, median; "
            f"density {pairs.size / (users * items):.2%}), {'with' if timed else 'without'} times",
            f"suits: {' '.join([name, *(f'{k}={v}' for k, v in settings.items())])}, {why}",
            f"costs: every device sends {size(cost.sent)} in all; the server needs about {size(cost.memory)} of memory",
            f"privacy: {private}",
            f"command: {words}",
        ),
        cost,
    )


def _suiting(
    events: npt.NDArray[np.int64], per_user: npt.NDArray[np.int64], timed: bool
) -> tuple[str, Mapping[str, Any], str]:
    """Measured on the five data sets of docs/next-items.md, and on Last.fm's plays, which have no times."""
    if np.median(per_user) < 3:
        return "popularity", {}, "because most histories are too short to say more (under three events)"
    why = (
        "next items from the order of events, by sums" if timed else "what goes with what, by sums (no times, no order)"
    )
    build = registry.entry("mosaic").build
    for settings in ({}, {"rank": 256}, {"rank": 64}, {"rank": 16}):
        found = foreseen(build(settings), events, per_user.size)
        free = available_memory()
        if found.sent <= SENT and (free is None or found.memory < free):
            short = (
                f"; {settings['rank']} numbers per item, because one per pair would be too much to send"
                if settings
                else ""
            )
            return "mosaic", settings, why + short
    return "popularity", {}, f"because anything else would send more than {size(SENT)} from every device"


def available_memory() -> int | None:
    """Bytes that are free for use, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found.split()[1]) << 10


def size(count: float) -> str:
    """Bytes as people write them.

    >>> size(658_000_000), size(1200)
    ('658 MB', '1 kB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return (
                f"{count / scale:.0f} {unit}" if count >= 10 * scale or unit == "kB" else f"{count / scale:.1f} {unit}"
            )
    return f"{count:.0f} bytes"
