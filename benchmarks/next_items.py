"""The table of docs/mosaic.md: next items by sums beside everything else, under the strict pool, all items ranked.

python benchmarks/next_items.py [--data NAME ...] [--ask train all-before later] [--only forms|trained] [--runs DIR]
                                [--data-dir DIR] [-o FILE]

Two questions: the next item (leave-one-out, asked with the training items, and with the validation item fed too) and
everything later (one moment for all). Differences are paired over users, against EASE, with 95 % intervals. Finished
runs are kept in the folder of runs and not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedmosaic.report.progress import study_progress
from fedmosaic.report.tables import Table
from fedmosaic.runs.comparison import Comparison, Contender, Row, compare, key_of, plan
from fedmosaic.runs.study import run_study

DATA = ("ml-100k", "ml-1m", "amazon-video", "lastfm-2k-tags-dedup", "filmtrust-5")
TIMED = ("ml-100k", "ml-1m", "amazon-video")
FORMS = ("popularity", "itemknn", "ease", "ials", "mosaic", "mosaic:folds=4", "mosaic:features=1000")
TRAINED = ("mf", "fedmf", "pfedrec", "fedrap:preset=retuned", "fedrecon", "local-only:rounds=30")
NEURAL = ("sasrec",)
QUESTIONS = (  # name, words, settings, data sets, whether what was trained answers too
    ("train", "next item, input=train", {"split": "leave-one-out", "input": "train"}, DATA, True),
    ("all-before", "next item, input=all-before", {"split": "leave-one-out", "input": "all-before"}, DATA, False),
    ("later", "everything later, split=time", {"split": "time", "input": "train"}, TIMED, False),
)
SEEDS = 3  # of what has luck, but for the neural row
HEAD = """# Next items by sums beside everything else

Written by `{}`. Strict pool, ties by hash, all unseen items ranked; percent, 1 + 99 beside. Rounds and settings are
chosen on validation. The last column is the paired difference in NDCG@10 over users, with its 95 % interval.
"""


def rows_of(only: str | None, trained: bool) -> list[Contender]:
    """Those that answer the question."""
    names: list[str] = [] if only == "trained" else list(FORMS)
    if only != "forms":
        names += [*NEURAL, *(TRAINED if trained else ())]
    return [Contender.parse(name) for name in names]


def cell(row: Row, protocol: str) -> str:
    """HR@10 / NDCG@10 in percent, with the deviation over seeds where there are several."""
    found = []
    for metric in ("hr", "ndcg"):
        key = key_of(protocol, metric)
        spread = row.deviation[key]
        found.append(f"{100 * row.mean[key]:.2f}" + (f" ± {100 * spread:.2f}" if spread else ""))
    return " / ".join(found)


def table(words: str, found: Comparison) -> Table:
    """A row per method."""
    rows = []
    for row in found.rows:
        paired = row.paired.get(key_of("full", "ndcg"))
        low, high = ("", "") if paired is None else (f"{100 * paired.low:+.2f}", f"{100 * paired.high:+.2f}")
        words_of = "" if paired is None else f"{100 * paired.difference:+.2f} [{low}, {high}]"
        rows.append((row.name, cell(row, "full"), cell(row, "sampled"), words_of, str(len(row.seeds) or "")))
    heads = ("row", "full HR@10 / NDCG@10", f"1+{found.candidates}", "NDCG against EASE", "seeds")
    return Table(f"{found.dataset}, {words}", heads, tuple(rows))


def asked(args: argparse.Namespace) -> Sequence[Table]:
    """Run what is missing; a table per question and data set."""
    tables = []
    for name, words, given, sets, trained in QUESTIONS:
        for data in [d for d in sets if d in args.data and name in args.ask]:
            planned = []
            for one in rows_of(args.only, trained):
                certain = one.method in ("popularity", "itemknn", "ease", "mosaic", *NEURAL)
                seeds = range(1 if certain else SEEDS)
                own = {"select": "full:ndcg@10", "patience": 8} if one.method in NEURAL else {}
                planned += plan([one], data, ["strict"], seeds, {**given, **own})
            with study_progress(quiet=False) as tell:
                done = run_study([s for _, s in planned], args.runs, data_dir=args.data_dir, tell=tell, largest=0)
            for failed, why in done.failed:
                print(f"{failed.title} failed: {why}")
            tables.append(table(words, compare(planned, args.runs, "ease")))
            tables[-1].show()
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=DATA)
    parser.add_argument("--ask", nargs="*", choices=[q[0] for q in QUESTIONS], default=[q[0] for q in QUESTIONS])
    parser.add_argument("--only", choices=("forms", "trained"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    found = asked(args)
    if args.out is not None:
        asked_for = [
            f"--ask {' '.join(args.ask)}",
            *([f"--only {args.only}"] if args.only else []),
            f"--data {' '.join(args.data)}",
        ]
        words = " ".join(["python benchmarks/next_items.py", *asked_for])
        args.out.write_text("\n".join([HEAD.format(words), *(f"## {t.title}\n\n{t.markdown()}" for t in found)]))


if __name__ == "__main__":
    main()
