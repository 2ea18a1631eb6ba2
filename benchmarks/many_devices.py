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
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.files import read_lines
from fedmosaic.deploy import fleet
from fedmosaic.deploy.admission import asked
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.attend import answer_tasks
from fedmosaic.deploy.flower import FleetLine
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.keys import CA, NODE_KEY
from fedmosaic.deploy.node import Node
from fedmosaic.testing import free_port

LONGEST = 900.0  # seconds that all of it may take
IDLE = 20.0  # seconds in which nothing happens


def prepared(place: Path, devices: int, items: int, rounds: int) -> tuple[list[Node], str]:
    """Folders for everybody, with histories, and all of them let in."""
    catalogue = pl.DataFrame({"item": [f"i{n}" for n in range(items)]})
    agreement = Agreement(
        method="fedmf", method_settings={"rounds": rounds, "dim": 16}, items=catalogue_digest(catalogue),
        deadline=120.0, cohort=max(3, 2 * devices // 3),
    )  # fmt: skip
    names = [f"d{n}" for n in range(devices)]
    address = f"127.0.0.1:{free_port()}"
    fleet.init(place, agreement, catalogue, dict.fromkeys(names, 1), fleet.Link(address))
    rng = np.random.default_rng(0)
    for name in names:
        own = rng.choice(items, min(20, items // 2), replace=False)
        take_history(place / name, {"item": [f"i{n}" for n in own]}, user=None)
    fleet.admit(place, [asked(place / name) for name in names])
    return [Node(place / name) for name in names], address


def cpu(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def held(place: Path, nodes: list[Node], address: str, rounds: int) -> dict[str, Any]:
    """All rounds, with every node on a thread of its own, and then a pause in which nobody has anything to do."""
    words = [sys.executable, "-m", "fedmosaic", "deploy", "server", str(place / "server"), "--serve", "600"]
    server = subprocess.Popen(words, stderr=(place / "server.log").open("wb"))
    threading.stack_size(1 << 20)
    until, log = time.monotonic() + LONGEST, place / "server" / "rounds.jsonl"
    first = nodes[0]
    first.warm_up()

    def device(node: Node) -> None:
        with FleetLine(address, place / node.place.name / CA, place / node.place.name / NODE_KEY) as line:
            answer_tasks(node, line, lambda text: None)

    pool = ThreadPoolExecutor(len(nodes))
    begun = time.monotonic()
    jobs = [pool.submit(device, node) for node in nodes]
    spent, mine = [], []
    try:
        for number in range(1, rounds + 1):
            while len(read_lines(log)) < number:
                if time.monotonic() > until or server.poll() is not None:
                    raise SystemExit(f"round {number} did not come: {(place / 'server.log').read_text()[-1000:]}")
                time.sleep(0.02)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            spent.append(cpu(server.pid))
            mine.append(usage.ru_utime + usage.ru_stime)
            print(f"round {number}: {read_lines(log)[-1]}", file=sys.stderr, flush=True)
        largest = megabytes(server.pid)
        for job in jobs:
            job.result(until - time.monotonic())
        lines = read_lines(log)
        later = lines[1:] or lines
        return {
            "devices": len(nodes), "items": len(nodes[0].items), "rounds": rounds,
            "seconds to the first round": lines[0]["waited"] + lines[0]["seconds"],
            "seconds of a round": statistics.median(line["seconds"] for line in later),
            "server: CPU seconds of a round": statistics.median(np.diff(spent)) if rounds > 1 else spent[0],
            "devices: CPU seconds of a round, each": statistics.median(np.diff(mine)) / len(nodes) if rounds > 1 else 0,
            "server: MB at most": largest,
            "kB up, a device and round": sum(x["bytes_up"] for x in lines) / sum(x["nodes"] for x in lines) / 1000,
            "kB down, a device and round": sum(x["bytes_down"] for x in lines) / sum(x["nodes"] for x in lines) / 1000,
            "clients of a round, at least": min(line["clients"] for line in lines),
            "refused": sum(line["refused"] for line in lines), "seconds in all": time.monotonic() - begun,
        }  # fmt: skip
    finally:
        server.terminate()
        server.wait()
        pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    asked_for = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked_for.add_argument("--devices", type=int, default=1000)
    asked_for.add_argument("--items", type=int, default=300)
    asked_for.add_argument("--rounds", type=int, default=5)
    asked_for.add_argument("--json", action="store_true")
    options = asked_for.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedmosaic-many-") as folder:
        begun = time.monotonic()
        nodes, address = prepared(Path(folder), options.devices, options.items, options.rounds)
        print(f"{len(nodes)} devices prepared in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        found = held(Path(folder), nodes, address, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:45} {value:12.3f}")


if __name__ == "__main__":
    main()
