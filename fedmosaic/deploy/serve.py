"""The two programs of a deployment: the server with its gate, and a node."""

from __future__ import annotations

import json
import re
import secrets
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomli_w

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import is_locked, locked, read_json, read_lines, write_atomic
from fedmosaic.deploy.fleet import OUTCOME, Link, ServerFolder
from fedmosaic.deploy.keys import CA, CERTIFICATE, KEY, NODE_KEY
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.processes import Processes, check_port, environment, free_port, program
from fedmosaic.deploy.relay import listening

STARTS_WITHIN = 60.0
REFUSED_AGAIN = 5.0  # seconds before a refused node knocks again
KNOCKS_FOR = 90.0  # Flower forgets a node that was killed only after a minute
Tell = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]

APP = """
[project]
name = "fedmosaic-app"
version = "1.0.0"
description = "Rounds of a fedmosaic deployment"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "fedmosaic"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
folder = ""
token = ""
serve = 0.0
"""
SERVER = "from fedmosaic.deploy.fleet import hold_rounds\nfrom fedmosaic.deploy.flower import server_app\n"
CLIENT = "from fedmosaic.deploy.flower import client_app\n"


def serve(
    place: Path, *, seconds: float = 0.0, listen: str | None = None, tell: Tell | None = None, say: Say | None = None
) -> None:  # fmt: skip
    """Hold all rounds that are left, then serve newcomers for some seconds. Ends with everything it started.

    Flower listens on the loopback interface; what others can reach is the gate, at `listen` or the agreed address.
    """
    folder = ServerFolder(place)
    folder.check_locks()
    folder.forget_half_registered()
    door, inside = Link(listen) if listen else folder.link, free_port()
    check_port(door.host, int(door.port))
    with Processes(place) as processes:
        _start_superlink(processes, folder, inside)
        words = ["deploy", "gate", str(place), "--server", f"127.0.0.1:{inside}", "--listen", door.address]
        processes.start("gate", [sys.executable, "-m", "fedmosaic", *words])
        _register(folder, processes)
        token = secrets.token_hex(8)
        _submit(folder, processes, token, seconds)
        if say is not None:
            say(f"{door.address} is open to the {len(folder.entries())} nodes that are admitted")
        _watch(folder, processes, token, tell)


def _start_superlink(processes: Processes, folder: ServerFolder, port: int) -> None:
    place = folder.place
    safe = ["--ssl-ca-certfile", CA, "--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY]
    safe = [word if word.startswith("--") else str(place / word) for word in safe]
    words = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    processes.start("superlink", [*words, "--database", str(place / "flower.db"), *safe])
    home = place / ".flwr"
    home.mkdir(exist_ok=True)
    here = {"address": f"127.0.0.1:{port}", "root-certificates": str((place / CA).resolve())}
    write_atomic(home / "config.toml", tomli_w.dumps({"superlink": {"default": "here", "here": here}}))
    context = ssl.create_default_context(cafile=str(place / CA))
    until = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < until and processes.ended("superlink") is None:
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", context=context, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RunError(f"Flower's server did not start: {processes.last_words('superlink')}")


def _flwr(folder: ServerFolder, *words: str) -> dict[str, Any]:
    """One call of Flower's command; it exits with 0 when it fails, and says so in JSON."""
    call, env = [program("flwr"), *words, "--format", "json"], environment(folder.place)
    done = subprocess.run(call, capture_output=True, text=True, env=env, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except (ValueError, json.JSONDecodeError):
        raise RunError(f"flwr {words[0]} failed: {(done.stderr or done.stdout).strip()[-300:]}") from None
    if not found.get("success"):
        raise RunError(f"flwr {words[0]} failed: {found.get('error-message', found)}")
    return found


def _register(folder: ServerFolder, processes: Processes) -> None:
    """Make the keys of all admitted nodes known; ids are remembered, so this is done once for each."""
    keys = folder.place / "keys"
    keys.mkdir(exist_ok=True)
    missing = {n: e for n, e in folder.entries().items() if e["flower"] is None}

    def one(name: str) -> int:
        write_atomic(keys / f"{name}.pub", missing[name]["key"])
        return int(_flwr(folder, "supernode", "register", str(keys / f"{name}.pub"), "here")["node-id"])

    with folder.registering(), ThreadPoolExecutor(4) as pool:
        folder.remember(dict(zip(missing, pool.map(one, missing), strict=True)))
    processes.note()


def _submit(folder: ServerFolder, processes: Processes, token: str, seconds: float) -> None:
    app = folder.place / "app"
    app.mkdir(exist_ok=True)
    write_atomic(app / "pyproject.toml", APP)
    write_atomic(app / "server_app.py", f"{SERVER}\napp = server_app(hold_rounds)\n")
    write_atomic(app / "client_app.py", f"{CLIENT}\napp = client_app\n")
    config = f'folder="{folder.place.resolve()}" token="{token}" serve={seconds:.1f}'
    _flwr(folder, "run", str(app), "here", "--run-config", config)
    processes.note()


def _watch(folder: ServerFolder, processes: Processes, token: str, tell: Tell | None) -> None:
    """Until the rounds are over: report them as they are committed, and notice what ends too early."""
    log, outcome = folder.place / "rounds.jsonl", folder.place / OUTCOME
    told = len(read_lines(log))
    until, begun = time.monotonic() + STARTS_WITHIN, False
    while True:
        found = read_json(outcome) if outcome.is_file() else {}
        lines = read_lines(log)
        for line in lines[told:]:
            if tell is not None:
                tell(line)
        told = len(lines)
        if found.get("token") == token:
            begun = True
            if found["status"] == "done":
                return
            if found["status"] == "failed":
                raise RunError(found["error"])
        if not begun and time.monotonic() > until:
            raise RunError(f"the rounds did not begin: {processes.last_words('superlink')}")
        if begun and not is_locked(folder.place) and read_json(outcome)["status"] == "running":
            raise RunError(f"the process that holds the rounds has died: {processes.last_words('superlink')}")
        for name in processes.children:
            if processes.ended(name) is not None:
                raise RunError(f"{name} has ended: {processes.last_words(name)}")
        processes.note()
        time.sleep(0.5)


def attend(place: Path, *, say: Say = lambda _: None) -> None:
    """Be a node: answer tasks until stopped. A node that is refused knocks again for a while."""
    link = Link.read(place)
    words = [program("flower-supernode"), "--superlink", link.address, "--host", "127.0.0.1"]
    words += ["--root-certificates", str((place / CA).resolve())]
    words += ["--auth-supernode-private-key", str((place / NODE_KEY).resolve())]
    first = time.monotonic()
    with locked(place, "node"), listening(Node(place).answer) as address, Processes(place) as processes:
        while True:
            begun = time.monotonic()
            mine = [*words, "--port", str(free_port()), "--node-config", f'socket="{address}"']
            processes.start("supernode", mine)
            say(f"connecting to {link.address}")
            if _watch_node(processes, link):
                say("the server was away and is back")
                first = time.monotonic()
                continue
            reason = _reason(processes.said("supernode"))
            if time.monotonic() - begun > KNOCKS_FOR:
                first = time.monotonic()  # it was connected for a while: begin anew
            if time.monotonic() - first > KNOCKS_FOR:
                raise RunError(f"{link.address} does not let this node in: {reason}")
            say(f"not let in ({reason}); trying again")
            time.sleep(REFUSED_AGAIN)


def _watch_node(processes: Processes, link: Link) -> bool:
    """Until Flower's node ends by itself, or (true) is ended here, because a server that was away has come back.

    It would connect again by itself, but may then wait for an answer to what it sent to the server that died.
    """
    seen = away = False
    while processes.ended("supernode") is None:
        processes.note()
        time.sleep(1.0)
        answers = _answers(link)
        if seen and away and answers:
            processes.stop("supernode")
            return True
        seen, away = seen or answers, not answers
    return False


def _answers(link: Link) -> bool:
    try:
        with socket.create_connection((link.host, int(link.port)), timeout=5):
            return True
    except OSError:
        return False


def _reason(said: str) -> str:
    """What Flower's words mean."""
    if re.search(r"SSL/TLS handshake|certificate verify failed|CERTIFICATE_VERIFY_FAILED", said):
        return "its certificate is not signed by this federation's authority (ca.crt)"
    if "Failed to activate" in said:
        return "this node's key is not admitted there, or the server has not noticed yet that the node had gone"
    return "Flower's node has ended: " + " | ".join(line for line in said.splitlines()[-3:])
