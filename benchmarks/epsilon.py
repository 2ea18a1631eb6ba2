"""What an epsilon costs: next items and popularity by sums with noise, all unseen items ranked.

python benchmarks/epsilon.py [--data ml-100k ml-1m] [--seeds 5] [--data-dir DIR] [-o FILE]

One training is one budget: user level (add or remove one user with all events), delta 1e-5, noise by the server that is
trusted with the sums. Fixed defaults, nothing is chosen by validation. Strict pool, leave-one-out, ties by hash,
input=train; mean and deviation over seeds of the noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.data.split import Split
from fedmosaic.report.tables import Table

EPSILONS = (1.0, 2.0, 4.0, 8.0, None)
METHODS = ("mosaic", "popularity")


def measured(split: Split, method: str, epsilon: float | None, seeds: int) -> list[str]:
    """HR@10 / NDCG@10 of the full ranking and of 1 + 99."""
    found: dict[str, list[tuple[float, float]]] = {"full": [], "sampled": []}
    for seed in range(seeds if epsilon is not None else 1):
        given: dict[str, Any] = {} if epsilon is None else {"epsilon": epsilon}
        model = FederatedRecommender(method, seed=seed, **given).fit(split)
        seen = model.evaluate()
        assert seen.sampled is not None
        for name, ranks in (("full", seen.full), ("sampled", seen.sampled)):
            found[name].append((100 * ranks.mean("hr", 10), 100 * ranks.mean("ndcg", 10)))
    return [_cell(values) for values in found.values()]


def _cell(values: list[tuple[float, float]]) -> str:
    parts = []
    for column in zip(*values, strict=True):
        spread = f" ± {statistics.stdev(column):.2f}" if len(column) > 1 else ""
        parts.append(f"{statistics.mean(column):.2f}{spread}")
    return " / ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["ml-100k", "ml-1m"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    tables = []
    for name in args.data:
        split = leave_one_out(load(name, args.data_dir))
        rows = []
        for epsilon in EPSILONS:
            cells = [cell for method in METHODS for cell in measured(split, method, epsilon, args.seeds)]
            rows.append(("none, without bounds" if epsilon is None else f"{epsilon:g}", *cells))
        heads = [f"{method}, {protocol}" for method in METHODS for protocol in ("full HR@10 / NDCG@10", "1+99")]
        tables.append(Table(f"{name}, {args.seeds} seeds", ("epsilon", *heads), tuple(rows)))
        tables[-1].show()
    if args.out is not None:
        words = " ".join(["python benchmarks/epsilon.py", *sys.argv[1:]])
        args.out.write_text("\n".join([f"Written by `{words}`.\n", *(t.markdown() for t in tables)]))


if __name__ == "__main__":
    main()
