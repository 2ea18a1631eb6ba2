"""What a deployment costs: `examples/devices/run.py --calm` on this machine, its processes looked at while it runs.

    python benchmarks/devices.py [--rounds 100] [--plain] [--example FILE] [--json]

Seconds of a round (median over rounds after the third), CPU seconds of a round for a node and for the server (with all
that they started), memory of each (PSS: its own pages, and its share of those that processes have in common; and RSS),
seconds from the start of the server to the first committed round. --example: the same of another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedmosaic.core.files import read_lines

TICKS = os.sysconf("SC_CLK_TCK")
FIRST = 3  # rounds before anything is counted


def everybody() -> dict[int, tuple[int, float]]:
    """Every process: its parent, and the CPU seconds that it and its ended children have had."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = (int(words[1]), sum(map(int, words[11:15])) / TICKS)
    return found


def roots(place: Path) -> dict[str, int]:
    """The programs of a deployment, by the folders they were given."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_text().split("\0")
                if "deploy" in words and {"server", "device", "silo"} & set(words):
                    folder = next((Path(w) for w in words if w.startswith(str(place / "fleet"))), None)
                    if folder is not None:
                        found.setdefault(folder.name, int(entry.name))
                        found[folder.name] = min(found[folder.name], int(entry.name))
    return found


def family(pid: int, known: dict[int, tuple[int, float]]) -> list[int]:
    below = [pid]
    for one in below:
        below += [child for child, (parent, _) in known.items() if parent == one]
    return below


def looked_at(place: Path) -> dict[str, dict[str, float]]:
    """CPU seconds so far, and megabytes now, of every program with what it started."""
    known, seen = everybody(), {}
    for name, pid in roots(place).items():
        pids = [p for p in family(pid, known) if p in known]
        sizes = {"Pss:": 0, "Rss:": 0}
        for one in pids:
            with suppress(OSError):
                for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                    if line.split()[0] in sizes:
                        sizes[line.split()[0]] += int(line.split()[1])
        seen[name] = {
            "cpu": sum(known[p][1] for p in pids), "pss": sizes["Pss:"] / 1024, "rss": sizes["Rss:"] / 1024,
            "processes": len(pids),
        }  # fmt: skip
    return seen


def measured(example: Path, rounds: int, extra: list[str]) -> dict[str, Any]:
    """One run of the example, looked at after its third and its last round."""
    with tempfile.TemporaryDirectory(prefix="fedmosaic-bench-") as folder:
        place, begun = Path(folder), 0.0
        words = [sys.executable, str(example), "--calm", "--rounds", str(rounds), "--folder", folder, *extra]
        env = {**os.environ, "PYTHONPATH": str(example.parents[2])}
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=env, cwd=example.parents[2]
        )
        log, first = place / "fleet" / "server" / "rounds.jsonl", 0.0
        before, after, largest = dict[str, Any](), dict[str, Any](), dict[str, float]()
        told = -1
        while process.poll() is None:
            known = len(read_lines(log))
            if not begun and "server" in roots(place):
                begun = time.monotonic()
            if known >= 1 and not first:
                first = time.monotonic() - begun
            if known >= FIRST and not before:
                before, counted = looked_at(place), known
            if before and known < rounds and known > told:
                after, told = looked_at(place), known
                for name, seen in after.items():
                    largest[name] = max(largest.get(name, 0.0), seen["pss"])
            if known >= rounds:
                break
            time.sleep(0.05)
        lines = read_lines(log)
        process.wait()
    if not after:
        raise SystemExit("the example ended before its rounds were held")
    held = told - counted
    nodes = [name for name in after if name != "server"]

    def per_round(name: str) -> float:
        return float(after[name]["cpu"] - before[name]["cpu"]) / held

    return {
        "rounds": rounds,
        "seconds of a round": statistics.median(line["seconds"] for line in lines[FIRST:]),
        "CPU seconds of a round, a node": statistics.median(per_round(n) for n in nodes),
        "CPU seconds of a round, the server": per_round("server"),
        "MB of a node (PSS)": statistics.median(largest[n] for n in nodes),
        "MB of a node (RSS)": statistics.median(after[n]["rss"] for n in nodes),
        "MB of the server (PSS)": largest["server"],
        "processes of a node": statistics.median(after[n]["processes"] for n in nodes),
        "seconds to the first round": first,
        "CPU seconds of a node before its third round": statistics.median(before[n]["cpu"] for n in nodes),
        "kB up, a node and round": sum(x["bytes_up"] for x in lines) / sum(x["nodes"] for x in lines) / 1000,
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=100)
    asked.add_argument("--plain", action="store_true")
    asked.add_argument("--json", action="store_true")
    here = Path(__file__).resolve().parents[1] / "examples" / "devices" / "run.py"
    asked.add_argument("--example", type=Path, default=here)
    options = asked.parse_args()
    found = measured(options.example.resolve(), options.rounds, ["--plain"] if options.plain else [])
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:50} {value:10.3f}")


if __name__ == "__main__":
    main()
