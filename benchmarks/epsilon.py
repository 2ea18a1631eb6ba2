"""What an epsilon costs: methods by sums and in rounds with noise, all unseen items ranked.

python benchmarks/epsilon.py [--data ml-100k ml-1m] [--methods mosaic ease ...] [--seeds 3] [--runs DIR] [-o FILE]

One training is one budget: user level (add or remove one user with all events), delta 1e-5, noise by the server that is
trusted with the sums. Fixed settings; under an epsilon nothing is chosen by validation, what is judged is the last
round. The rows without one are the methods with their own settings. Strict pool, leave-one-out, ties by hash,
input=train; mean and deviation over seeds.

Finished runs are kept in DIR, with a ledger beside them, and are not run again; one that was cut goes on. With
`--seconds N` nothing further is begun after so long; the table then has what is finished, and says how many seeds. A
file that has the marks `<!-- epsilon DATA -->` and `<!-- end -->` gets each table between them, another one at its end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from fedmosaic.report.tables import Table
from fedmosaic.runs.ledger import Ledger, Record
from fedmosaic.runs.settings import Settings
from fedmosaic.runs.study import StudyProgress, run_study

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, None)
LARGEST = 1 << 20  # bytes of a trained state that is kept
# Methods in rounds under an epsilon: few numbers per item, because each has its noise; a bound that nearly all uploads
# reach, so that signal and noise have one scale, and an optimiser on the server to which that scale is nothing; rates
# that do not depend on the size of the data. Found on the validation of ML-100K with seed 0; ML-1M had no say in it.
LEARNT = {"preset": "scale-free", "reduce": "mean", "dim": 8, "negatives": 8, "local_epochs": 3, "item_rate": 3.0}
ROUNDS: dict[str, Any] = {**LEARNT, "upload_clip": 0.03, "rounds": 100, "evaluate_every": 100}
METHODS: dict[str, dict[str, Any]] = {"popularity": {}, "ease": {}, "mosaic": {}, "fedmf": ROUNDS, "pfedrec": ROUNDS}
HEADS = ("method", "epsilon", "seeds", "full HR@10 / NDCG@10", "1+99")


def settings_of(method: str, data: str, epsilon: float | None, seeds: int) -> list[Settings]:
    """The runs of a row; closed forms without noise have no luck, so that one is enough."""
    lucky = epsilon is not None or bool(METHODS[method])
    given: dict[str, Any] = {"select": "sampled:hr@10"}  # matters to rows without an epsilon alone
    if epsilon is not None:
        given |= METHODS[method] | {"epsilon": epsilon}
    return [Settings.make(method, data, given | {"seed": seed}) for seed in range(seeds if lucky else 1)]


def row(method: str, epsilon: float | None, records: list[Record]) -> tuple[str, ...]:
    """HR@10 / NDCG@10 of the full ranking and of 1 + 99."""
    words = "none, no bounds" if epsilon is None else f"{epsilon:g}"
    tests = [record.summary["test"] for record in records]
    cells = [[(100 * t[part]["hr@10"], 100 * t[part]["ndcg@10"]) for t in tests] for part in ("full", "sampled")]
    return (method, words, str(len(records)), *map(_cell, cells))


def _cell(values: list[tuple[float, float]]) -> str:
    parts = []
    for column in zip(*values, strict=True):
        spread = f" ± {statistics.stdev(column):.2f}" if len(column) > 1 else ""
        parts.append(f"{statistics.mean(column):.2f}{spread}")
    return " / ".join(parts)


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between a data set's marks; a file without them gets the text at its end."""
    whole, mark = path.read_text() if path.is_file() else "", f"<!-- epsilon {name} -->"
    if mark not in whole:
        path.write_text(f"{whole}\n{mark}\n\n{text}\n<!-- end -->\n")
        return
    before, _, rest = whole.partition(mark)
    _, _, after = rest.partition("<!-- end -->")
    path.write_text(f"{before}{mark}\n\n{text}\n<!-- end -->{after}")


def said(progress: StudyProgress) -> None:
    """Failures stop everything: a table with holes in it would look like a finding."""
    for cell, words in progress.failed:
        raise SystemExit(f"{cell.title}: {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["ml-100k", "ml-1m"])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir")
    parser.add_argument("--runs", type=Path, default=Path("runs/epsilon"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    begun, ledger = time.monotonic(), Ledger.read(args.runs / "ledger.jsonl")
    for name in args.data:
        rows = []
        for method in args.methods:
            for epsilon in EPSILONS:
                settings = settings_of(method, name, epsilon, args.seeds)
                if time.monotonic() - begun < args.seconds:
                    keep: dict[str, Any] = {"largest": LARGEST, "ledger": ledger, "tell": said}
                    run_study(settings, args.runs, workers=1, data_dir=args.data_dir, **keep)
                done = [ledger.records[s.key()] for s in settings if s.key() in ledger.records]
                if done:
                    rows.append(row(method, epsilon, done))
                    print(*rows[-1], flush=True)
        found = Table(name, HEADS, tuple(rows))
        found.show()
        if args.out is not None:
            put(args.out, name, f"`python benchmarks/epsilon.py --data {name} -o FILE`:\n\n{found.markdown()}")


if __name__ == "__main__":
    main()
