"""The table of docs/mosaic.md: next items by sums beside everything else, under the strict pool, all items ranked.

python benchmarks/next_items.py [--data NAME ...] [--ask train all-before later] [--only forms|trained] [--runs DIR]
                                [--data-dir DIR] [-o FILE]

Two questions: the next item (leave-one-out, asked with the training items, and with the validation item fed too) and
everything later (one moment for all). Differences are paired over users, against EASE, with 95 % intervals. Finished
runs are kept in the folder of runs and not repeated.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmosaic.report.progress import study_progress
from fedmosaic.report.tables import Table
from fedmosaic.runs.comparison import Comparison, Contender, Row, compare, key_of, plan
from fedmosaic.runs.run import default_place
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings
from fedmosaic.runs.study import run_study

DATA = ("ml-100k", "ml-1m", "amazon-video", "lastfm-2k-tags-dedup", "filmtrust-5")
TIMED = ("ml-100k", "ml-1m", "amazon-video")
FORMS = ("popularity", "itemknn", "ease", "ials", "mosaic", "mosaic:folds=4", "mosaic:features=1000")
TRAINED = ("mf", "fedmf", "pfedrec", "fedrap:preset=retuned", "fedrecon", "local-only:rounds=30")
NEURAL = ("sasrec",)
FED: dict[str, Any] = {"split": "leave-one-out", "input": "all-before"}
QUESTIONS: tuple[tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...]], ...] = (
    # name, words, settings, data sets, what answers beside the forms
    ("train", "next item, input=train", {**FED, "input": "train"}, DATA, (*NEURAL, *TRAINED)),
    ("all-before", "next item, input=all-before", FED, DATA, NEURAL),
    ("later", "everything later, split=time", {"split": "time", "input": "train"}, TIMED, ()),
)
SEEDS = 3  # of what has luck, but for the neural row
HEAD = """# Next items by sums beside everything else

Written by `{}`. Strict pool, ties by hash, all unseen items ranked; percent, 1 + 99 beside. Rounds and settings are
chosen on validation. The last column is the paired difference in NDCG@10 over users, with its 95 % interval.
"""


def rows_of(only: str | None, others: Sequence[str]) -> list[Contender]:
    """Those that answer the question; EASE is what the others are compared with."""
    names = ["ease"] if only == "trained" else list(FORMS)
    return [Contender.parse(name) for name in [*names, *(others if only != "forms" else ())]]


def ask_again(settings: Settings, runs: Path, data_dir: Path | None) -> None:
    """Answer for a network that was trained already: what it is fed for the test changes nothing in training."""
    place, trained = default_place(settings, runs), default_place(settings.model_copy(update={"input": "train"}), runs)
    if not (trained / "checkpoint" / "best.safetensors").is_file() or RunFolder(place).started:
        return
    old, method = RunFolder.open(trained), settings.build()
    new = RunFolder.create(place, settings, data_dir, old.data or "")
    state, position = old.load_state(method, "best")
    assert settings.patience is not None
    for name in ("best", "latest"):  # a training that had stopped here
        new.save_state(name, method.pack(state), replace(position, rose=position.round - settings.patience))
    shutil.copy(trained / "metrics.jsonl", place)


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
    for name, words, given, sets, others in QUESTIONS:
        for data in [d for d in sets if d in args.data and name in args.ask]:
            planned, networks = [], set()
            for one in rows_of(args.only, others):
                certain = one.method in ("popularity", "itemknn", "ease", "mosaic", *NEURAL)
                seeds = range(1 if certain else SEEDS)
                own = {"select": "full:ndcg@10", "patience": 8} if one.method in NEURAL else {}
                runs = plan([one], data, ["strict"], seeds, {**given, **own})
                networks |= {s.key() for _, s in runs if one.method in NEURAL}
                planned += runs
            if name == "all-before":
                for settings in (s for _, s in planned if s.key() in networks):
                    ask_again(settings, args.runs, args.data_dir)
            with study_progress(quiet=False) as tell:
                every = [s for _, s in planned]
                done = run_study(every, args.runs, data_dir=args.data_dir, tell=tell, largest=0, keep=networks)
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
