"""Hosts with and without mixing (PLGC-style), both pools, several seeds, with the spectra of global and device tables.

python benchmarks/plgc_table.py [--data-dir FOLDER] [--rounds 60] [--seeds 0 1 2] [--out runs/plgc.csv]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.report.console import print_table, progress_bar
from fedmosaic.runtime.tables import item_rows
from fedmosaic.spectrum import effective_rank, information_abundance

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("FedMF", "fedmf", {}),
    ("FedMF + mixing", "fedmf-plgc", {}),
    ("PFedRec", "pfedrec", {}),
    ("PFedRec + mixing", "pfedrec-plgc", {}),
    ("PFedRec + mixing, self form", "pfedrec-plgc", {"form": "self", "gamma": 1.0}),
    ("PFedRec + mixing, local table kept", "pfedrec-plgc", {"local": "keep"}),
]
CLIENTS = 16


def measure(model: Any, split: Any) -> dict[str, float]:
    """Test metrics and spectra of one trained model."""
    found = model.evaluate()
    table = model.method_.vectors(model.state_)
    scorer = model.method_.scorer(model.training_, model.state_)
    rows = [(item_rows(scorer, user)["item"], split.train[user]) for user in range(CLIENTS)]
    return {
        "hr": 100 * found.sampled.mean("hr", 10),
        "ndcg": 100 * found.sampled.mean("ndcg", 10),
        "full hr": 100 * found.full.mean("hr", 10),
        "global abundance": information_abundance(table),
        "global rank": effective_rank(table),
        "device abundance": float(np.mean([information_abundance(all_rows) for all_rows, _ in rows])),
        "device abundance, own items": float(np.mean([information_abundance(r[own]) for r, own in rows])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--pools", nargs="*", default=["legacy", "strict"])
    parser.add_argument("--out", type=Path, default=Path("runs/plgc.csv"))
    args = parser.parse_args()
    split = leave_one_out(load("ml-100k", args.data_dir), ties="file")
    lines = []
    for pool in args.pools:
        for title, method, settings in ROWS:
            for seed in args.seeds:
                model = FederatedRecommender(method, seed=seed, pool=pool, rounds=args.rounds, **settings)
                with progress_bar(f"{title}, {pool}, seed {seed}", quiet=False) as progress:
                    model.fit(split, progress)
                lines.append({"pool": pool, "method": title, "seed": seed, **measure(model, split)})
    frame = pl.DataFrame(lines)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    frame.write_csv(args.out)
    names = [c for c in frame.columns if c not in ("pool", "method", "seed")]
    for pool in args.pools:
        table = []
        for title, _, _ in ROWS:
            own = frame.filter((pl.col("pool") == pool) & (pl.col("method") == title)).select(names)
            mean, spread = own.mean().row(0), own.std().row(0)
            table.append([title, *(f"{m:.2f} ± {s or 0:.2f}" for m, s in zip(mean, spread, strict=True))])
        note = f"ML-100K, pool {pool}, {args.rounds} rounds, seeds {args.seeds}, mean ± sd (1 + 99, percent)"
        print_table(note, ["method", *names], table)
    print(f"every run: {args.out}")


if __name__ == "__main__":
    main()
