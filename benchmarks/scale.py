"""Scale: ML-1M with evaluation every round, and a million made-up users. Prints seconds and peak memory.

python benchmarks/scale.py [--data-dir FOLDER] [--skip-ml-1m]
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
    args = parser.parse_args()
    rows = [] if args.skip_ml_1m else [ml_1m(args.data_dir)]
    rows.append(million())
    print_table("scale, two cores", ["what", "seconds", "peak MB", "limit"], rows)


if __name__ == "__main__":
    main()
