"""How much of what order tells is about events of one sitting? Next items with steps within a sitting left out.

python benchmarks/sittings.py [--data ml-100k ml-1m] [--data-dir DIR]

A sitting ends where a user pauses for longer than some time. Left out of training: the order within a sitting, whose
events all get one time, so that pairs of them count alike in both directions. Left out of the test: users whose
held-out item belongs to the sitting of the last item that the device knows (the validation item, `input=all-before`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from fedmosaic import FederatedRecommender, leave_one_out, load
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.negatives import training_set
from fedmosaic.data.split import Split
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.report.console import print_table

PAUSES = (("nothing left out", -1), ("within a minute", 60), ("within an hour", 3600))
ROWS = ("popularity", "ease", "mosaic")


def begun(items: Ragged, times: I64, pause: int) -> I64:
    """Per event the time at which its sitting began."""
    first = np.zeros(times.size, bool)
    first[items.offsets[:-1][items.lengths > 0]] = True
    first[1:] |= np.diff(times) > pause
    return np.asarray(times[np.maximum.accumulate(np.where(first, np.arange(times.size), 0))])


def coarse(split: Split, pause: int) -> Split:
    """The split with all events of a sitting at one time."""
    if pause < 0:
        return split
    known = split.held("train").followed_by(split.held("validation"))
    assert known.times is not None
    times = begun(known.items, known.times, pause)
    last = np.zeros(times.size, bool)
    last[known.items.offsets[1:][split.validation.lengths > 0] - 1] = True
    return replace(split, times={**split.times, "train": times[~last], "validation": times[last]})


def later(split: Split, pause: int) -> I64:
    """Users whose test item is not of the sitting of the item before it."""
    both = (split.validation.lengths > 0) & (split.test.lengths > 0)
    gap = np.full(split.n_users, -1)
    at = [split.held_out(part).offsets[:-1][both] for part in ("validation", "test")]
    gap[both] = split.times["test"][at[1]] - split.times["validation"][at[0]]
    return np.flatnonzero(both & (gap > pause))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["ml-100k", "ml-1m"])
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    rows = []
    for name in args.data:
        split = leave_one_out(load(name, args.data_dir))
        for words, pause in PAUSES:
            users, seen = later(split, pause), coarse(split, pause)
            found = [f"{name}, {words}", f"{users.size:,}"]
            for method in ROWS:
                model = FederatedRecommender(method).fit(seen)
                data = training_set(seen, "strict").followed_by(seen.held("validation"))
                ranks = evaluate(model.method_.scorer(data, model.state_), seen, top_k=0).full
                some = np.isin(ranks.users, users)
                hr, ndcg = (100 * ranks.per_user(metric, 10)[some].mean() for metric in ("hr", "ndcg"))
                found.append(f"{hr:.2f} / {ndcg:.2f}")
            rows.append(found)
    print_table("next items, all-before, full HR@10 / NDCG@10", ["steps", "users", *ROWS], rows)


if __name__ == "__main__":
    main()
