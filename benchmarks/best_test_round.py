"""What choosing the round on the test set is worth: test HR@10 / NDCG@10 at the end, and in the round with the best HR.

    python benchmarks/best_test_round.py fedrecgel filmtrust-5 split=last-out rho_shared=0.02 rho_private=0.02

Some papers report the latter. Nothing else in this project looks at the test set before the last round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedmosaic.evaluation.evaluate import make_probe, rank_probe
from fedmosaic.runs.run import Setup
from fedmosaic.runs.settings import Settings, parse_pairs
from fedmosaic.training.loop import steps


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("method")
    asked.add_argument("dataset")
    asked.add_argument("pairs", nargs="*", metavar="KEY=VALUE")
    asked.add_argument("--data-dir", type=Path)
    options = asked.parse_args()
    settings = Settings.make(options.method, options.dataset, parse_pairs(options.pairs))
    split = settings.split_data(settings.load_data(options.data_dir))
    setup, method = Setup.of(settings, split), settings.build()
    probe = make_probe(split, "test", setup.candidates)
    seen = []
    for step in steps(method, setup.data, settings.seed, query=probe):
        assert step.answers is not None
        ranks = rank_probe(step.answers, probe, split.test)
        seen.append([100 * ranks.mean(metric, 10) for metric in ("hr", "ndcg")])
    best = int(np.argmax([hr for hr, _ in seen]))
    found = {"last": (len(seen), *seen[-1]), "best test HR": (best + 1, *seen[best])}
    print(json.dumps({k: {"round": r, "hr@10": round(h, 2), "ndcg@10": round(n, 2)} for k, (r, h, n) in found.items()}))


if __name__ == "__main__":
    main()
