"""Scale-out: one round of ML-1M on two processes against one, each with one thread; interleaved, medians.

python benchmarks/workers.py [--data-dir DIR] [--method pfedrec] [--rounds 8]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmosaic.core.threads import use_threads
from fedmosaic.data.negatives import training_set
from fedmosaic.engines.distributed import joined
from fedmosaic.methods.registry import entry
from fedmosaic.runs.settings import Settings
from fedmosaic.testing import digest


def rank(place: str, number: int, size: int, method: str, rounds: int, data_dir: str | None) -> None:
    use_threads(1)
    settings = Settings.make(method, "ml-1m")
    data = training_set(settings.split_data(settings.load_data(data_dir)), "strict")
    with joined(number, size, f"file://{place}/meet") as team:
        federation = replace(entry(method).build({}), team=team)
        state = federation.start(data, 0)
        seconds = []
        for one in range(1, rounds + 2):
            begun = time.perf_counter()
            state, _, _ = federation.advance(data, state, one, 0)
            seconds.append(time.perf_counter() - begun)
    if number == 0:
        kept = {name: value for name, value in state.pack().items() if name.startswith(("server/", "private/"))}
        found = {"seconds": seconds[1:], "digest": digest(kept)}
        (Path(place) / "found.json").write_text(json.dumps(found))


def measure(size: int, options: argparse.Namespace) -> dict[str, Any]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        words = (size, options.method, options.rounds, options.data_dir)
        ranks = [context.Process(target=rank, args=(place, n, *words)) for n in range(size)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        found: dict[str, Any] = json.loads((Path(place) / "found.json").read_text())
        return found


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--data-dir")
    asked.add_argument("--method", default="pfedrec")
    asked.add_argument("--rounds", type=int, default=8)
    options = asked.parse_args()
    times: dict[int, list[float]] = {1: [], 2: []}
    digests = set()
    for _ in range(3):
        for size, found in times.items():
            one = measure(size, options)
            found += one["seconds"]
            digests.add(one["digest"])
    alone, both = (statistics.median(times[n]) for n in (1, 2))
    same = "same bytes" if len(digests) == 1 else "BYTES DIFFER"
    print(
        f"{options.method} on ml-1m, 6040 clients: 1 worker {alone:.3f} s, 2 workers {both:.3f} s a round, "
        f"ratio {alone / both:.2f} (medians of {len(times[1])} rounds each); {same}"
    )


if __name__ == "__main__":
    main()
