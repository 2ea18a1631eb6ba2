"""Processes that are started, watched and ended.

Flower's programs start others in sessions of their own, so a process group is not enough: descendants are noted in a
file while they live. Children of a parent that was killed are told (on Linux), and whoever comes next in the same
folder ends what is still there.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import write_json

GRACE = 5.0  # seconds between asking and killing
NOTED = "processes.json"
PR_SET_PDEATHSIG = 1
NOT_EPHEMERAL = range(10_000, 32_768)  # below what Linux, macOS and Windows give to outgoing connections
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}


class Processes:
    """Children of this process, with logs and a way to end them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.family: dict[int, str] = {}  # descendants seen so far, and when each began
        end_leftovers(folder)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop(*self.children)
        _end(self.family)
        (self.folder / NOTED).unlink(missing_ok=True)

    def stop(self, *names: str) -> None:
        """End programs and what they have started: asked first, killed if they do not go."""
        self.note()
        chosen = [self.children[name] for name in names]
        family = descendants([child.pid for child in chosen])
        for child in chosen:
            with suppress(ProcessLookupError):
                child.terminate()
        until = time.monotonic() + GRACE
        while time.monotonic() < until and any(child.poll() is None for child in chosen):
            time.sleep(0.05)
        _end(family)
        for child in chosen:
            child.wait()

    def start(self, name: str, words: Sequence[str]) -> None:
        """Start a program; what it says goes to logs/NAME.log."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as stream:
            self.children[name] = subprocess.Popen(
                words, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=_die_with_parent,
                env=environment(self.folder),
            )  # fmt: skip
        self.note()

    def note(self) -> None:
        """Write down who is alive, if that has changed; to be called every second or so."""
        alive = descendants([*self.family, *(child.pid for child in self.children.values())])
        strangers = {pid for pid, began in self.family.items() if alive.get(pid, began) != began}  # a number used again
        family = {pid: began for pid, began in alive.items() if pid not in strangers}
        if family != self.family:
            self.family = family
            write_json(self.folder / NOTED, {str(pid): began for pid, began in family.items()})

    def ended(self, name: str) -> int | None:
        """The exit code of a program, if it has ended."""
        return self.children[name].poll()

    def last_words(self, name: str, lines: int = 5) -> str:
        """The end of a program's log."""
        return " | ".join(line.strip() for line in self.said(name).splitlines()[-lines:] if line.strip())

    def said(self, name: str) -> str:
        """Everything a program has said since it was started."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")


def environment(folder: Path) -> dict[str, str]:
    """For Flower's programs: they start each other by name, and keep their files in the folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **FLOWER, "FLWR_HOME": str((folder / ".flwr").resolve()), "PATH": path}


def program(name: str) -> str:
    """A program of this Python environment."""
    found = Path(sys.executable).parent / name
    if not found.is_file():
        raise RunError(f"{name} is not installed: pip install 'fedmosaic[flower]'")
    return str(found)


def free_port() -> int:
    """A port of the loopback interface that nobody uses now, nor is given by chance before it is used.

    Port 0 would answer with one of the range from which the system takes the near end of every outgoing connection;
    between this call and the program's start, Flower's own connections have been seen to take it.
    """
    for port in random.SystemRandom().sample(NOT_EPHEMERAL, 100):
        with socket.socket() as door, suppress(OSError):
            door.bind(("127.0.0.1", port))
            return port
    raise RunError("no free port on the loopback interface: 100 were tried")


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


def descendants(parents: Sequence[int]) -> dict[int, str]:
    """Processes below some, and those themselves, with the time each began (pids are used again, times are not)."""
    children: dict[int, list[int]] = {}
    began: dict[int, str] = {}
    for pid, parent, start in _everybody():
        children.setdefault(parent, []).append(pid)
        began[pid] = start
    found: dict[int, str] = {}
    left = list(parents)
    while left:
        pid = left.pop()
        if pid in began and pid not in found:
            found[pid] = began[pid]
            left += children.get(pid, [])
    return found


def _everybody() -> list[tuple[int, int, str]]:
    """Every process of the machine: number, parent, when it began."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,lstart="], capture_output=True, text=True, check=False)
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        return [(int(pid), int(parent), start) for pid, parent, start in rows]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it may end while we look
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                found.append((int(entry.name), int(words[1]), f"{boot}-{words[19]}"))
    return found


def end_leftovers(folder: Path) -> int:
    """End what an earlier, killed parent has left in a folder."""
    try:
        noted: dict[str, Any] = json.loads((folder / NOTED).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
    alive = _end({int(pid): began for pid, began in noted.items()})
    (folder / NOTED).unlink(missing_ok=True)
    return alive


def _end(family: dict[int, str]) -> int:
    """Kill those of the noted processes that are still the same ones, and whatever they have started since."""
    now = descendants(list(family))
    still = [pid for pid, began in family.items() if now.get(pid) == began]
    same = set(descendants(still)) - {os.getpid()}
    for pid in same:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(same)


def _die_with_parent() -> None:
    """On Linux, let a child be told when its parent dies, even of kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
