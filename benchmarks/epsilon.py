"""What an epsilon costs: methods by sums and in rounds with noise, all unseen items ranked.

python benchmarks/epsilon.py [--data ml-100k ml-1m] [--methods mosaic ease ...] [--seeds 3] [--data-dir DIR] [-o FILE]

One training is one budget: user level (add or remove one user with all events), delta 1e-5, noise by the server that is
trusted with the sums. Fixed settings, nothing is chosen by validation but the round of methods that learn in rounds.
Strict pool, leave-one-out, ties by hash, input=train; mean and deviation over seeds. A file that has the marks
`<!-- epsilon DATA -->` and `<!-- end -->` gets each table between them; another one is written anew.
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

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, None)
# Settings of methods in rounds: few rounds, because noise grows with them; a bound that few uploads reach.
ROUNDS: dict[str, Any] = {"rounds": 20, "upload_clip": 20.0}
METHODS: dict[str, dict[str, Any]] = {"mosaic": {}, "ease": {}, "popularity": {}, "fedmf": ROUNDS, "pfedrec": ROUNDS}


def measured(split: Split, method: str, epsilon: float | None, seeds: int) -> list[str]:
    """HR@10 / NDCG@10 of the full ranking and of 1 + 99."""
    found: dict[str, list[tuple[float, float]]] = {"full": [], "sampled": []}
    given = METHODS[method] | {"epsilon": epsilon} if epsilon is not None else {}
    lucky = epsilon is not None or bool(METHODS[method])
    for seed in range(seeds if lucky else 1):
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


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between a data set's marks."""
    whole, mark = path.read_text(), f"<!-- epsilon {name} -->"
    before, _, rest = whole.partition(mark)
    _, _, after = rest.partition("<!-- end -->")
    path.write_text(f"{before}{mark}\n\n{text}\n<!-- end -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["ml-100k", "ml-1m"])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    told = " ".join(word for word in sys.argv[1:] if word not in ("--data-dir", args.data_dir))
    for name in args.data:
        split = leave_one_out(load(name, args.data_dir))
        rows = []
        for method in args.methods:
            for epsilon in EPSILONS:
                words = "none, no bounds" if epsilon is None else f"{epsilon:g}"
                rows.append((method, words, *measured(split, method, epsilon, args.seeds)))
                print(*rows[-1], flush=True)
        heads = ("method", "epsilon", "full HR@10 / NDCG@10", "1+99")
        found = Table(f"{name}, {args.seeds} seeds", heads, tuple(rows))
        found.show()
        if args.out is None:
            continue
        text = f"`python benchmarks/epsilon.py {told}`, {args.seeds} seeds:\n\n{found.markdown()}"
        if args.out.is_file() and f"<!-- epsilon {name} -->" in args.out.read_text():
            put(args.out, name, text)
        else:
            with args.out.open("a") as stream:
                stream.write(text + "\n")


if __name__ == "__main__":
    main()
