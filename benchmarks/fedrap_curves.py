"""Learning curves of FedRAP and its eight ablations, one command: HR@10 per round under both pools.

python benchmarks/fedrap_curves.py [--data-dir FOLDER] [--rounds 30] [--pools legacy strict] [--out FILE.csv]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import polars as pl

from fedmosaic import leave_one_out, load
from fedmosaic.data.negatives import draw_candidates
from fedmosaic.evaluate import make_probe, rank_probe
from fedmosaic.recommender import training_set
from fedmosaic.report.console import print_table, progress_bar
from fedmosaic.training import train
from fedmosaic.zoo import entry

METHODS = ["fedrap", *(f"fedrap-{name}" for name in ("c", "d", "no", "l2", "fixed", "sin", "square", "frac"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pools", nargs="*", default=["legacy", "strict"])
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fedrap-curves.csv"))
    args = parser.parse_args()
    split = leave_one_out(load("ml-100k", args.data_dir), ties="file")
    lists = draw_candidates(split)
    probe = make_probe(split, "test", lists)
    rows = []
    for pool in args.pools:
        data = training_set(split, pool, lists)
        for name in args.methods:
            method = entry(name).build({"rounds": args.rounds})
            with progress_bar(f"{name:<13} {pool}", quiet=False) as progress:
                for step in train(method, data, args.seed, probe=probe):
                    assert step.answers is not None
                    ranks = rank_probe(step.answers, probe, split.test)
                    hr, ndcg = ranks.mean("hr", 10), ranks.mean("ndcg", 10)
                    zeros = 0.0
                    if "server/item" in step.state:
                        zeros = float((abs(step.state["server/item"]) <= 1e-4).mean())
                    rows.append((pool, name, step.round, step.record.loss, hr, ndcg, zeros))
                    progress(step.round, args.rounds, {"validation": {"sampled": {"hr@10": hr}}})
    columns = ["pool", "method", "round", "loss", "hr@10", "ndcg@10", "zeros"]
    frame = pl.DataFrame(rows, schema=columns, orient="row")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    frame.write_csv(args.out)
    marks = [r for r in (1, 2, 5, 10, 20, 30, 50, 100) if r <= args.rounds]
    for pool in args.pools:
        table = []
        for name in args.methods:
            own = frame.filter((pl.col("pool") == pool) & (pl.col("method") == name))
            cells = [f"{100 * own.filter(pl.col('round') == r)['hr@10'][0]:.1f}" for r in marks]
            table.append([name, *cells, f"{100 * own['zeros'][-1]:.2f}"])
        head = ["method", *(f"round {r}" for r in marks), "zeros, %"]
        print_table(f"test HR@10 (1 + 99), ML-100K, pool {pool}, seed {args.seed} (percent)", head, table)
    print(f"every round: {args.out}")


if __name__ == "__main__":
    main()
