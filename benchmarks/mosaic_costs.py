"""What mosaic costs: its sums and its solution, thin forms beside the full one, and how both grow.

python benchmarks/mosaic_costs.py sums|ranks|growth [--data ml-1m] [--data-dir DIR] [-o FIGURE]

sums: seconds of every stage, median of some repeats, beside what BLAS alone takes for the same solution. ranks: quality
of the factored form. growth: seconds and peak memory against users and against items, made-up walks, a process each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.core.machine import peak_megabytes
from fedmosaic.data.negatives import training_set
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.methods.closed_form import ClosedForm, total
from fedmosaic.methods.mosaic.method import Mosaic
from fedmosaic.report.console import print_table

REPEATS = 5
RANKS = (64, 128, 256, 512, None)
USERS, ITEMS, RANK = (20_000, 50_000, 100_000, 200_000, 400_000), (5_000, 10_000, 20_000, 50_000, 100_000), 128
FIXED_USERS, FIXED_ITEMS = 100_000, 20_000


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sums(data: str, data_dir: str | None) -> None:
    """One window, as with fixed settings, and two, as where devices choose."""
    held = training_set(leave_one_out(load(data, data_dir)), "strict")
    rows = []
    for words, form in (("one window", Mosaic(auto=False)), ("two windows", Mosaic())):
        counted = form.apply(form.start(held, 0), total(form, form.start(held, 0), held.held))
        summed = total(form, counted, held.held)
        taken: dict[str, list[float]] = {"sums": [], "solution": [], "BLAS alone": []}
        for _ in range(REPEATS):
            taken["sums"].append(seconds(lambda f=form, c=counted: total(f, c, held.held)))  # type: ignore[misc]
            fresh = {name: value.copy() for name, value in summed.items()}
            taken["solution"].append(seconds(lambda f=form, c=counted, s=fresh: f.apply(c, s)))  # type: ignore[misc]
            taken["BLAS alone"].append(blas(len(summed["together"]), held.n_items, len(form._windows)))
        size = sum(value.nbytes for value in summed.values()) / 1e6
        rows.append([words, *(f"{statistics.median(v):.2f}" for v in taken.values()), f"{size:,.0f}"])
    print_table(f"{data}, seconds, median of {REPEATS}", ["form", *taken, "MB up per client"], rows)
    print(f"peak {peak_megabytes():,.0f} MB")


def blas(k: int, m: int, windows: int) -> float:
    """Seconds of the Cholesky factors, solutions and inverse that the form needs, on numbers of no meaning."""
    from scipy.linalg import lapack

    left = np.asfortranarray(np.eye(k, dtype=np.float32) * 2)
    right = np.ones((k, m), np.float32, order="F")

    def work() -> None:
        for _ in range(windows):
            factor, _ = lapack.spotrf(left, lower=1)
            lapack.spotrs(factor, right, lower=1)
        factor, _ = lapack.spotrf(left, lower=1)
        lapack.spotri(factor, lower=1)

    return seconds(work)


def ranks(data: str, data_dir: str | None) -> None:
    split = leave_one_out(load(data, data_dir))
    known = training_set(split, "strict")
    longer, rows = known.followed_by(split.held("validation")), []
    for rank in RANKS:
        given: dict[str, Any] = {} if rank is None else {"rank": rank}
        model = FederatedRecommender("mosaic", **given)
        took = seconds(lambda m=model: m.fit(split))  # type: ignore[misc]
        found = []
        for fed in (known, longer):
            full = evaluate(model.method_.scorer(fed, model.state_), split, top_k=0).full
            found.append(f"{100 * full.mean('hr', 10):.2f} / {100 * full.mean('ndcg', 10):.2f}")
        assert isinstance(model.method_, ClosedForm)
        rows.append(["full" if rank is None else str(rank), *found, f"{took:.0f}"])
    print_table(f"{data}, full HR@10 / NDCG@10", ["rank", "train", "all-before", "seconds"], rows)


def growth(out: Path) -> None:
    """A figure of two panels."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, what, values in ((axes[0], "users", USERS), (axes[1], "items", ITEMS)):
        found = []
        for value in values:
            users, items = (value, FIXED_ITEMS) if what == "users" else (FIXED_USERS, value)
            made = subprocess.run(
                [sys.executable, __file__, "one", str(users), str(items)], capture_output=True, text=True, check=True
            )
            found.append(json.loads(made.stdout))
            print(f"{users:,} users x {items:,} items: {found[-1]}", flush=True)
        axis.plot(values, [f["seconds"] for f in found], "o-", color="#4477aa", label="seconds, two cores")
        axis.set(xlabel=what, ylabel="seconds", xscale="log", yscale="log")
        beside = axis.twinx()
        beside.plot(values, [f["mb"] for f in found], "s--", color="#aa7733", label="peak memory, MB")
        beside.set(ylabel="MB", yscale="log")
        fixed = f"{FIXED_ITEMS:,} items" if what == "users" else f"{FIXED_USERS:,} users"
        axis.set_title(f"{fixed}, rank {RANK}, 20 events a user")
        axis.legend(loc="upper left")
        beside.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def one(users: int, items: int) -> None:
    """Seconds and memory of one size, as JSON."""
    from scale import next_items

    began = time.perf_counter()
    next_items(users, items, RANK)
    print(json.dumps({"seconds": round(time.perf_counter() - began, 1), "mb": round(peak_megabytes())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sums", "ranks", "growth", "one"))
    parser.add_argument("size", nargs="*", type=int)
    parser.add_argument("--data", default="ml-1m")
    parser.add_argument("--data-dir")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/figures/mosaic-growth.png"))
    args = parser.parse_args()
    if args.part == "sums":
        sums(args.data, args.data_dir)
    elif args.part == "ranks":
        ranks(args.data, args.data_dir)
    elif args.part == "growth":
        growth(args.out)
    else:
        one(*args.size)


if __name__ == "__main__":
    main()
