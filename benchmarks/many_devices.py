"""Many devices against one server, over the real protocol on loopback: TLS, keys, messages, masks, coordinator.

    python benchmarks/many_devices.py [--devices 1000] [--items 300] [--rounds 5] [--json]

Every device is a node with a folder, keys and a connection of its own; all of them live in one process beside the
server's, a thread each, so their CPU is stated apart. What is measured is the server: seconds and CPU of a round,
memory, bytes, calls; and what it costs while its nodes do nothing but wait.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.files import read_lines
from fedmosaic.deploy import fleet
from fedmosaic.deploy.admission import asked
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.attend import answer_tasks
from fedmosaic.deploy.flower import AwayError, FleetLine
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.keys import CA, NODE_KEY
from fedmosaic.deploy.node import Node
from fedmosaic.testing import free_port

LONGEST = 900.0  # seconds that all of it may take
IDLE = 20.0  # seconds in which nothing happens
CALLS = 1000  # that carry nothing


def prepared(place: Path, agreement: Agreement, histories: list[dict[str, Any]], catalogue: pl.DataFrame) -> list[Node]:
    """Folders for everybody, with histories, and all of them let in."""
    names = [f"d{n}" for n in range(len(histories))]
    fleet.init(place, agreement, catalogue, dict.fromkeys(names, 1), fleet.Link(f"127.0.0.1:{free_port()}"))
    for name, own in zip(names, histories, strict=True):
        take_history(place / name, own, user=None)
    fleet.admit(place, [asked(place / name) for name in names])
    return [Node(place / name) for name in names]


def made_up(place: Path, devices: int, items: int, rounds: int) -> list[Node]:
    """Devices with twenty items each, drawn."""
    catalogue = pl.DataFrame({"item": [f"i{n}" for n in range(items)]})
    agreement = Agreement(
        method="fedmf", method_settings={"rounds": rounds, "dim": 16}, items=catalogue_digest(catalogue),
        deadline=600.0, cohort=max(3, 2 * devices // 3),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    drawn = [rng.choice(items, min(20, items // 2), replace=False) for _ in range(devices)]
    return prepared(place, agreement, [{"item": [f"i{n}" for n in own]} for own in drawn], catalogue)


def line_of(node: Node) -> FleetLine:
    """A node's connection, as its folder says."""
    return FleetLine(fleet.Link.read(node.place).address, node.place / CA, node.place / NODE_KEY)


@contextmanager
def server_of(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The fleet's server, a process of its own, for as long as this lasts."""
    words = [sys.executable, "-m", "fedmosaic", "deploy", "server", str(place / "server"), "--serve", "600"]
    with (place / "server.log").open("wb") as log:
        server = subprocess.Popen(words, stderr=log, stdout=log)
        try:
            yield server
        finally:
            server.terminate()
            server.wait()


def rounds_held(
    place: Path, nodes: list[Node], server: subprocess.Popen[bytes], rounds: int
) -> Iterator[dict[str, Any]]:
    """Lines of rounds as they come, every node on a thread of its own; ends when all nodes have."""
    until, log = time.monotonic() + LONGEST, place / "server" / "rounds.jsonl"

    def device(node: Node) -> None:
        with line_of(node) as line:
            answer_tasks(node, line, lambda text: None)

    with ThreadPoolExecutor(len(nodes)) as pool:
        jobs = [pool.submit(device, node) for node in nodes]
        for number in range(1, rounds + 1):
            while len(read_lines(log)) < number:
                broken = [job.exception() for job in jobs if job.done() and job.exception()]
                if time.monotonic() > until or server.poll() is not None or broken:
                    print(*broken[:1], file=sys.stderr)
                    print(f"round {number} did not come: {(place / 'server.log').read_text()[-1000:]}", file=sys.stderr)
                    os._exit(1)  # the threads would knock for ever
                time.sleep(0.02)
            yield read_lines(log)[-1]
        for job in jobs:
            job.result(until - time.monotonic())


def joined(line: FleetLine) -> None:
    """The gate holds few lines of one address that have shown no key yet, and all of these come from one."""
    while True:
        try:
            return line.join()
        except AwayError:
            time.sleep(0.5)


def idle(nodes: list[Node], server: subprocess.Popen[bytes]) -> tuple[float, float]:
    """CPU seconds of the server, and of each node, in a second in which all only wait for messages."""
    ready, over = threading.Barrier(len(nodes) + 1), threading.Event()

    def waiting(node: Node) -> None:
        with line_of(node) as line:
            joined(line)
            ready.wait(LONGEST)
            while not over.is_set():
                line.receive()

    with ThreadPoolExecutor(len(nodes)) as pool:
        for node in nodes:
            pool.submit(waiting, node)
        ready.wait(LONGEST)
        time.sleep(2.0)  # the last of them ask
        before, mine = cpu(server.pid), time.process_time()
        time.sleep(IDLE)
        spent = cpu(server.pid) - before, time.process_time() - mine
        over.set()
    return spent[0] / IDLE, spent[1] / IDLE / len(nodes)


def cpu(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def a_call(node: Node, server: subprocess.Popen[bytes]) -> tuple[float, float]:
    """CPU seconds of the server, and of a node, for a call that carries nothing: what Flower's protocol costs here."""
    with line_of(node) as line:
        line.join()
        before, mine = cpu(server.pid), time.process_time()
        for _ in range(CALLS):
            line.join()
        return (cpu(server.pid) - before) / CALLS, (time.process_time() - mine) / CALLS


def measured(place: Path, nodes: list[Node], rounds: int) -> dict[str, Any]:
    """All rounds, and then a pause in which nobody has anything to do."""
    threading.stack_size(1 << 20)
    nodes[0].warm_up()
    begun, spent, mine, lines = time.monotonic(), list[float](), list[float](), list[dict[str, Any]]()
    with server_of(place) as server:
        for line in rounds_held(place, nodes, server, rounds):
            lines.append(line)
            spent.append(cpu(server.pid))
            mine.append(time.process_time())
            print(f"round {line['round']}: {line}", file=sys.stderr, flush=True)
        largest, over = megabytes(server.pid), time.monotonic() - begun
        waiting, call = idle(nodes, server), a_call(nodes[0], server)
    later = lines[1:] or lines
    answers = sum(line["nodes"] for line in lines)
    return {
        "devices": len(nodes), "items": len(nodes[0].items), "rounds": rounds,
        "seconds to the first round": lines[0]["waited"] + lines[0]["seconds"],
        "seconds of a round": statistics.median(line["seconds"] for line in later),
        "server: CPU seconds of a round": statistics.median(np.diff(spent)) if rounds > 1 else spent[0],
        "devices: CPU seconds of a round, each": statistics.median(np.diff(mine)) / len(nodes) if rounds > 1 else 0,
        "server: MB at most": largest,
        "kB up, a device and round": sum(x["bytes_up"] for x in lines) / answers / 1000,
        "kB down, a device and round": sum(x["bytes_down"] for x in lines) / answers / 1000,
        "clients of a round, at least": min(line["clients"] for line in lines),
        "refused": sum(line["refused"] for line in lines), "seconds in all": over,
        "idle, server: CPU ms a second": 1000 * waiting[0], "idle, a device: CPU ms a second": 1000 * waiting[1],
        "a call, server: CPU ms": 1000 * call[0], "a call, a device: CPU ms": 1000 * call[1],
    }  # fmt: skip


def main() -> None:
    asked_for = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked_for.add_argument("--devices", type=int, default=1000)
    asked_for.add_argument("--items", type=int, default=300)
    asked_for.add_argument("--rounds", type=int, default=5)
    asked_for.add_argument("--json", action="store_true")
    options = asked_for.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedmosaic-many-") as folder:
        begun = time.monotonic()
        nodes = made_up(Path(folder), options.devices, options.items, options.rounds)
        print(f"{len(nodes)} devices prepared in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        found = measured(Path(folder), nodes, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:45} {value:12.3f}")


if __name__ == "__main__":
    main()
