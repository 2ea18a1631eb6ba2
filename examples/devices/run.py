"""A server, two devices and two silos on this machine: they train, are killed and come back, and recommend.

    python examples/devices/run.py [--rounds 10] [--folder DIR] [--calm] [--plain]

Every part is a command of its own (`fedmosaic deploy ...`), as it would be on several machines: TLS, keys made on the
nodes, secure sums. --calm leaves out the kills, to see what a round costs; --plain agrees on uploads that are seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl

import fedmosaic
from fedmosaic.core.files import load_tensors, read_lines
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.status import costs
from fedmosaic.testing import free_port

SILO = 100  # users
NODES = {"phone": 1, "tablet": 1, "shop-a": SILO, "shop-b": SILO}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedmosaic", *map(str, words)]


class Stage:
    """The parts that run, each with its log beside the folders."""

    def __init__(self, place: Path) -> None:
        self.place, self.parts = place, dict[str, subprocess.Popen[bytes]]()

    def start(self, name: str, *words: object) -> None:
        with (self.place / f"{name}.log").open("ab") as log:
            self.parts[name] = subprocess.Popen(command(*words), stdout=log, stderr=subprocess.STDOUT)

    def kill(self, name: str) -> None:
        """As a power cut would, at once."""
        self.parts[name].kill()
        self.parts.pop(name).wait()

    def end(self, name: str) -> None:
        self.parts[name].terminate()
        self.parts.pop(name).wait()

    def rounds(self) -> list[dict[str, Any]]:
        return read_lines(self.place / "fleet" / "server" / "rounds.jsonl")

    def until_round(self, number: int, patience: float = 600.0) -> None:
        until, told = time.monotonic() + patience, len(self.rounds())
        while len(lines := self.rounds()) < number:
            if time.monotonic() > until or self.parts["server"].poll() is not None:
                raise SystemExit(f"round {number} did not come:\n{(self.place / 'server.log').read_text()}")
            time.sleep(0.2)
        for line in lines[told:]:
            print(f"  round {line['round']}: {line['clients']} clients, {line['nodes']} nodes, {line['seconds']} s")


def private(folder: Path) -> dict[str, bytes]:
    """What a node holds that nobody else may have."""
    tensors, _ = load_tensors(folder / "state.safetensors")
    return {name: value.tobytes() for name, value in tensors.items() if name.startswith("private/")}


def prepare(place: Path, rounds: int, plain: bool) -> None:
    """A shop's catalogue and histories, made up; folders for everybody, who make their keys and are let in."""
    data = fedmosaic.load("synthetic", users=sum(NODES.values()) + 1, items=300, per_user=20)
    items = data.items.ids.cast(pl.String)
    pl.DataFrame({"item": items, "title": "Thing " + items}).write_csv(place / "items.csv")
    frame = pl.DataFrame({"user": data.users.take(data.user).cast(pl.String), "item": items.gather(data.item)})
    people, first = frame["user"].unique(maintain_order=True).to_list(), 0
    for name, count in {**NODES, "newcomer": 1}.items():
        own = frame.filter(pl.col("user").is_in(people[first : first + count]))
        (own.select("item") if count == 1 else own).write_csv(place / f"{name}.csv")
        first += count
    silos = [word for name, count in NODES.items() if count > 1 for word in ("--silos", f"{name}={count}")]
    agreed = [f"rounds={rounds}", "dim=16", "deadline=20", "preset=scale-free", f"secure={str(not plain).lower()}"]
    subprocess.run(
        command(
            "deploy", "init", place / "fleet", "--method", "pfedrec", "--items", place / "items.csv", *silos,
            "--address", f"127.0.0.1:{free_port()}", *(word for pair in agreed for word in ("--set", pair)),
        ),
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    for name in ("phone", "tablet"):
        quietly("deploy", "invite", place / "fleet", name)
    for name in NODES:
        let_in(place / "fleet", name)


def quietly(*words: object) -> None:
    subprocess.run(command(*words), check=True, stdout=subprocess.DEVNULL)


def let_in(fleet: Path, name: str) -> None:
    """What the owner does on the node, and what the operator does then."""
    quietly("deploy", "keys", fleet / name)
    quietly("deploy", "admit", fleet, fleet / name / "request.json")


def attend(stage: Stage, name: str, *, first: bool = False) -> None:
    many = NODES.get(name, 1) > 1
    file = ("--data" if many else "--history", stage.place / f"{name}.csv") if first else ()
    stage.start(name, "deploy", "silo" if many else "device", stage.place / "fleet" / name, *file)


def trouble(stage: Stage, rounds: int) -> None:
    """A node loses its power, another is stopped, the server dies; all come back to what they held."""
    fleet = stage.place / "fleet"
    stage.until_round(min(3, rounds))
    print("phone: kill -9")
    stage.kill("phone")
    held = private(fleet / "phone")
    attend(stage, "phone")
    print("shop-b: SIGTERM")
    stage.end("shop-b")
    attend(stage, "shop-b")
    stage.until_round(min(6, rounds))
    Node(fleet / "phone")  # readable, whole
    print(f"phone: what it holds has {'changed' if private(fleet / 'phone') != held else 'stayed'} since the kill")
    print("server: kill -9")
    stage.kill("server")
    done = load_tensors(fleet / "server" / "server.safetensors")[1]["round"]
    stage.start("server", "deploy", "server", fleet / "server", "--serve", "600")
    print(f"server: goes on after round {done}")


def welcome(stage: Stage) -> None:
    """A new device joins what is trained: it adapts once, and sends nothing."""
    fleet = stage.place / "fleet"
    quietly("deploy", "invite", fleet, "newcomer")
    let_in(fleet, "newcomer")
    stage.start("server", "deploy", "server", fleet / "server", "--serve", "600")
    attend(stage, "newcomer", first=True)
    until = time.monotonic() + 120
    while not (fleet / "newcomer" / "state.safetensors").is_file() and time.monotonic() < until:
        time.sleep(0.5)
    print("a newcomer, after one adaptation of its own:")
    subprocess.run(command("recommend", "--device", fleet / "newcomer", "-k", "5"), check=True)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=10)
    asked.add_argument("--folder", type=Path)
    asked.add_argument("--calm", action="store_true")
    asked.add_argument("--plain", action="store_true")
    options = asked.parse_args()
    place = options.folder or Path(tempfile.mkdtemp(prefix="fedmosaic-devices-"))
    place.mkdir(parents=True, exist_ok=True)
    prepare(place, options.rounds, options.plain)
    fleet, stage = place / "fleet", Stage(place)
    try:
        print(f"starting a server, {', '.join(NODES)} in {place}")
        stage.start("server", "deploy", "server", fleet / "server", "--serve", "600")
        for name in NODES:
            attend(stage, name, first=True)
        if not options.calm:
            trouble(stage, options.rounds)
        stage.until_round(options.rounds)
        print(json.dumps({k: round(v, 2) for k, v in costs(stage.rounds()).items()}, indent=1))
        until = time.monotonic() + 120
        while Node(fleet / "phone").meta["version"] != options.rounds and time.monotonic() < until:
            time.sleep(0.5)
        stage.end("server")
        print("the phone, with no server running:")
        subprocess.run(command("recommend", "--device", fleet / "phone", "-k", "5"), check=True)
        welcome(stage)
    finally:
        for name in list(stage.parts):
            stage.end(name)
    print("everything is stopped")


if __name__ == "__main__":
    main()
