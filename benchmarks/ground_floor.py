"""Speed of the ground floor: loading, evaluation from factors, negative sampling. Prints medians and their limits.

python benchmarks/ground_floor.py [--data-dir FOLDER]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmosaic import leave_one_out, load
from fedmosaic.data.negatives import draw_candidates, excluded_items, sample_negatives
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.report.console import print_table


class Factors:
    def __init__(self, users: int, items: int, dim: int = 32) -> None:
        rng = np.random.default_rng(0)
        self.user = rng.normal(size=(users, dim)).astype(np.float32)
        self.item = rng.normal(size=(items, dim)).astype(np.float32)

    def scores(self, users: Any) -> Any:
        return self.user[users] @ self.item.T


def median_seconds(work: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median wall and processor seconds."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    data_dir = parser.parse_args().data_dir
    data = load("ml-1m", data_dir)
    split = leave_one_out(data)
    candidates = draw_candidates(split)
    excluded = excluded_items(split, "strict")
    factors = Factors(split.n_users, split.n_items)
    counts = 4 * split.train.lengths
    rounds = iter(range(1, 1000))

    def draw() -> object:
        return sample_negatives(excluded, counts, split.n_items, seed=0, round=next(rounds))

    draw()  # compiled once, cached on disk
    rows = []
    for name, limit, work in (
        ("load ml-1m from its text file", 2.0, lambda: load("ml-1m", data_dir)),
        ("full ranking, 6,040 users x 3,706 items, from factors", 2.0, lambda: evaluate(factors, split, top_k=0)),
        ("the same with 1 + 99 and top-10 lists", None, lambda: evaluate(factors, split, "test", candidates)),
        (f"strict negatives of one round, {int(counts.sum()):,} draws, one core", 0.3, draw),
    ):
        wall, cpu = median_seconds(work)
        rows.append([name, f"{wall:.3f}", f"{cpu:.3f}", "" if limit is None else f"{limit:g}"])
    print_table("ground floor, median of 5", ["what", "seconds", "CPU seconds", "limit"], rows)


if __name__ == "__main__":
    main()
