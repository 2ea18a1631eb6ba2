"""The server of a deployment, a program of one process: its gate, its rounds, and who looks on. Nodes: `attend.py`."""

from __future__ import annotations

import errno
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmosaic.core.ending import ending
from fedmosaic.core.errors import RunError
from fedmosaic.core.files import locked
from fedmosaic.deploy.agreement import Agreement, read_catalogue
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.fleet import Link, ServerFolder
from fedmosaic.deploy.gate import Gate, opened
from fedmosaic.deploy.mailbox import Mailbox
from fedmosaic.deploy.roster import LiveRoster
from fedmosaic.deploy.watch import Metrics, Watch

FILES = 65_536
SHARES = 1.0  # seconds between two looks for who lacks the outcome
Tell = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Serving:
    """How a server runs: for how long it gives the outcome to newcomers, where it listens, and who looks on.

    listen: host:port here, if it is not the agreed address. metrics: a port of the loopback interface for Prometheus.
    """

    seconds: float = 0.0
    listen: str | None = None
    metrics: int | None = None
    watch: bool = False


def serve(place: Path, how: Serving, tell: Tell = lambda line: None, say: Say = lambda text: None) -> None:
    """Hold all rounds that are left, then give the outcome to whoever lacks it. tell: is given every round's line."""
    folder = ServerFolder(place)
    folder.check_locks()
    door = Link(how.listen) if how.listen else folder.link
    with ExitStack() as stack:
        stack.enter_context(ending())
        stack.enter_context(locked(place, "server", patience=30.0))
        allow_files()
        items, _ = read_catalogue(place, folder.agreement)
        roster = LiveRoster(place)
        mailbox = Mailbox(roster)
        gate = Gate(mailbox, roster)
        one = Coordinator(place, roster, mailbox, n_items=len(items))
        check_port(door.host, int(door.port))
        stack.enter_context(opened(gate, place, door.host, int(door.port)))
        metrics = stack.enter_context(Metrics(gate, one).served(how.metrics))
        if how.watch:
            tell = stack.enter_context(Watch(gate, one).shown())
        words = "masked" if folder.agreement.secure else "plain"
        say(f"{door.address} is open to {len(roster())} admitted nodes; uploads are {words}; {one.work.rounds} rounds")
        say(costs_of(one, folder.agreement))
        while not one.over:
            line = one.round()
            metrics.round(line)
            tell(line)
        _share(one, how.seconds)


def allow_files() -> None:
    """Every line is an open file: as many as this machine lets a program have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _share(one: Coordinator, seconds: float) -> None:
    """The outcome for everybody who is there, and for newcomers as long as it is served."""
    now = time.monotonic()
    owed, until = now + 2 * one.agreement.deadline, now + seconds
    while (one.lacking() and time.monotonic() < owed) or time.monotonic() < until:
        one.share()
        time.sleep(SHARES)


def costs_of(one: Coordinator, agreement: Agreement) -> str:
    """What a round takes of a node, before the first is held."""
    numbers = one.work.size(one.state, one.n_items)
    down = sum(v.nbytes for v in one.parameters().values())
    up = f"{8 * numbers / 1e6:,.2f} MB up" if agreement.secure else f"up to {4 * numbers / 1e6:,.2f} MB up"
    memory = f"about {one.work.memory(one.n_items) / 1e6:,.1f} MB of memory"
    return f"a round: {up} and up to {down / 1e6:,.2f} MB down for each node, and {memory} for it there"


def check_port(host: str, port: int) -> None:
    """Refuse an address nobody can listen on, by name, before anything is started."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
    except OSError as error:
        hint = {
            errno.EADDRINUSE: "is another server running?",
            errno.EADDRNOTAVAIL: "that address is not this machine's; say --listen 0.0.0.0:PORT",
            errno.EACCES: "small ports need rights; choose one above 1023",
        }.get(error.errno or 0, "")
        raise RunError(f"cannot listen on {host}:{port}: {error.strerror or error}; {hint}".rstrip("; ")) from None
