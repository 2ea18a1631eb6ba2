"""Scale: ML-1M with evaluation every round, and a million made-up users. Prints seconds and peak memory.

python benchmarks/scale.py [--data-dir FOLDER] [--skip-ml-1m] [--mosaic USERS ITEMS RANK]
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

import numpy as np

from fedmosaic.core.machine import peak_megabytes
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.synthetic import synthetic_chunks
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.registry import entry
from fedmosaic.report.console import print_table


def million(users: int = 1_000_000, items: int = 50_000, per_user: int = 20, rounds: int = 5) -> list[str]:
    """PFedRec with 1 % of a million clients a round."""
    rows = np.concatenate([np.sort(c, axis=1) for c in synthetic_chunks(users, items, per_user)])
    histories = Ragged(rows.ravel(), np.arange(users + 1, dtype=np.int64) * per_user)
    data = TrainingSet(histories, histories, items)  # rows are sorted and distinct: they are their own exclusions
    federation = entry("pfedrec").build({"participation": 0.01, "preset": "scale-free"})
    state = federation.start(data, 0)
    seconds = []
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        state, record, _ = federation.advance(data, state, number, 0)
        seconds.append(time.perf_counter() - began)
    what = f"{users:,} users x {items:,} items, {record.clients:,} clients a round"
    return [what, f"{statistics.median(seconds[1:]):.2f} a round", f"{peak_megabytes():,.0f}", "5 s, 6,000 MB"]


def walks(users: int, items: int, events: int, seed: int = 0) -> Histories:
    """Everybody walks: mostly to one of the next five items, else to an item of a power law. Order is all there is."""
    rng = np.random.default_rng(seed)
    popular = (items * rng.random((users, events)) ** 3).astype(np.int64)
    rows = np.empty((users, events), np.int32)
    rows[:, 0] = popular[:, 0]
    for at in range(1, events):
        steps = (rows[:, at - 1] + rng.integers(1, 6, users)) % items
        rows[:, at] = np.where(rng.random(users) < 0.7, steps, popular[:, at])
    times = np.tile(np.arange(events, dtype=np.int64), users)
    return Histories(Ragged(rows.ravel(), np.arange(users + 1, dtype=np.int64) * events), items, times)


def next_items(users: int, items: int, rank: int | None, events: int = 20) -> list[str]:
    """Mosaic: all its sums over all users, and the solution; then the next item of some who were not there."""
    held = walks(users, items, events)
    form = entry("mosaic").build({"rank": rank, "auto": False, "taste": 0.0})
    data = TrainingSet(held.items, held.items, items, times=held.times)
    state, seconds, bytes_up = form.start(data, 0), [], 0
    while not form.done(state):
        began = time.perf_counter()
        state, record, _ = form.advance(data, state, 0, 0)
        seconds.append(time.perf_counter() - began)
        bytes_up += record.bytes_up
    later = walks(1000, items, events + 1, seed=1)
    known = np.arange(1000 * (events + 1)).reshape(1000, -1)[:, :-1].ravel()
    assert later.times is not None
    asked = Histories(
        Ragged(later.items.values[known], np.arange(1001) * events), items, np.ascontiguousarray(later.times[known])
    )
    target, hits = later.items.values[events :: events + 1], 0
    for begin in range(0, 1000, 100):
        some = np.arange(begin, begin + 100)
        scores = form.scores(state, asked.take(some))
        found = np.argpartition(-scores, 10, axis=1)[:, :10]
        hits += int((found == target[some, None]).any(axis=1).sum())
    what = f"mosaic, {users:,} users x {items:,} items, {'full' if rank is None else f'rank {rank}'}"
    took = f"{sum(seconds):.0f} ({len(seconds)} rounds; HR@10 {hits / 10:.1f} %, {bytes_up / 1e6:,.0f} MB up)"
    return [what, took, f"{peak_megabytes():,.0f}", "600 s, 12,000 MB"]


def ml_1m(data_dir: str | None) -> list[str]:
    """100 rounds of PFedRec in a process of its own, validation ranked every round."""
    with tempfile.TemporaryDirectory() as place:
        command = ["run", "pfedrec", "ml-1m", "pool=legacy", "ties=file", "--quiet", "--out", f"{place}/run", "--json"]
        began = time.perf_counter()
        out = subprocess.run(
            [sys.executable, "-m", "fedmosaic", *command, *(["--data-dir", data_dir] if data_dir else [])],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        wall = time.perf_counter() - began
    cost = json.loads(out)["cost"]
    what = "ML-1M, PFedRec, 100 rounds, evaluated every round"
    return [what, f"{cost['seconds']:.1f} (whole command {wall:.1f})", f"{cost['peak_mb']:,.0f}", "180 s, 1,500 MB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    parser.add_argument("--skip-ml-1m", action="store_true")
    parser.add_argument(
        "--mosaic", nargs=3, type=int, metavar=("USERS", "ITEMS", "RANK"), help="only that; rank 0: full"
    )
    args = parser.parse_args()
    if args.mosaic:
        users, items, rank = args.mosaic
        rows = [next_items(users, items, rank or None)]
    else:
        rows = [] if args.skip_ml_1m else [ml_1m(args.data_dir)]
        rows += [million(), next_items(1_000_000, 100_000, 128)]
    print_table("scale, two cores", ["what", "seconds", "peak MB", "limit"], rows)


if __name__ == "__main__":
    main()
