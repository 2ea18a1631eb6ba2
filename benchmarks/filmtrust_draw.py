"""FilmTrust with the random times that FedRecGEL's released preparation gives it, as a file for `fedmosaic run`.

    python benchmarks/filmtrust_draw.py DIR/filmtrust/ratings.txt draw.csv [--seed 42]
    fedmosaic run fedrecgel draw.csv split=last-out rounds=25 seed=0

FilmTrust has no times, so these random ones decide which item of a user is held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("ratings", type=Path)
    asked.add_argument("out", type=Path)
    asked.add_argument("--seed", type=int, default=42)
    options = asked.parse_args()
    pairs = np.loadtxt(options.ratings)[:, :2].astype(np.int64)
    known = pl.DataFrame({"user": pairs[:, 0], "item": pairs[:, 1]}).unique(maintain_order=True)
    known = known.filter(pl.len().over("user") >= 5).sort("user", "item")
    drawn = np.random.default_rng(options.seed).integers(0, 10**9, known.height) * 10**6
    place = known.select(pl.int_range(pl.len()).over("user")).to_series().to_numpy()
    known.with_columns(pl.Series("time", drawn + place)).write_csv(options.out)


if __name__ == "__main__":
    main()
