"""FedRecGEL's words in numbers: is its training stabler, do its item tasks lie closer, does its lemma say anything?

python benchmarks/generalisation.py [DATA ...] [--data-dir FOLDER] [--rounds N] [--seeds 3] [--pairs 16] [--json FILE]

Three models on each data set: the host (`fedneumf`), FedRecGEL with the paper's radii, and with radii of 0.2 (for which
no bound is computed). All of it under the strict pool and a leave-one-out split with validation. Formulas:
stability.py, item_tasks.py and bound.py in fedmosaic/reproduce.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

from fedmosaic.core.threads import use_threads
from fedmosaic.reproduce.bound import (
    DELTA,
    LIMIT,
    ZERO_SCORES,
    Bound,
    Perturbed,
    assumption_table,
    bound_table,
    bounds,
    held_out,
    perturbed,
    sigma_of,
)
from fedmosaic.reproduce.item_tasks import ItemTasks, Tasks, tasks_table
from fedmosaic.reproduce.stability import LAST, Stability, references, stability_table, watch
from fedmosaic.runs.run import Setup
from fedmosaic.runs.settings import Settings

ROUNDS = {"filmtrust-5": 60, "lastfm-2k-tags-dedup": 60, "amazon-video": 20}
RADII = {"filmtrust-5": 0.02, "lastfm-2k-tags-dedup": 0.01, "amazon-video": 0.01}  # the paper's
WIDE = 0.2
SMALL, LARGE = (0.001, 0.01, 0.1), (0.01, 0.1, 0.3, 1.0)  # sigmas, for the assumption and for the bound


def models(data: str) -> dict[str, tuple[str, dict[str, float]]]:
    """Name in the tables: method and settings."""
    paper = RADII.get(data, 0.02)
    sharp = {f"fedrecgel {r:g}": ("fedrecgel", {"rho_shared": r, "rho_private": r}) for r in (paper, WIDE)}
    return {"fedneumf": ("fedneumf", {}), **sharp}


def examine(
    name: str, method: Any, setup: Setup, state: Any, radius: float, pairs: int
) -> tuple[ItemTasks, list[tuple[str, Perturbed]], list[tuple[str, Bound]]]:
    """Tasks, assumption and bound of one trained model; the first sigma is the one of the paper's radius."""
    known, unknown = Tasks(method, setup.data, state), Tasks(method, held_out(setup.split), state)
    shared, own, _ = known.sizes()
    everything = shared + known.counts.size * own
    first = sigma_of(radius, everything, known.items.size)
    moved = [(name, perturbed(unknown, sigma, pairs=pairs)) for sigma in (first, *SMALL)]
    sigmas = () if name.endswith(f" {WIDE:g}") else (first, *LARGE)  # the lowest is shown: each has its share of delta
    found = [(name, bound) for sigma in sigmas for bound in bounds(known, sigma, pairs=1, delta=DELTA / len(sigmas))]
    return known.by_item(), moved, found


def best_of(found: list[tuple[str, Bound]]) -> list[tuple[str, Bound]]:
    """For each model and reading the sigma with the lowest bound."""
    best: dict[tuple[str, str], Bound] = {}
    for name, bound in found:
        key = (name, bound.reading)
        best[key] = min(best.get(key, bound), bound, key=lambda b: b.value)
    return [(name, bound) for (name, _), bound in best.items()]


def one(data: str, rounds: int, seeds: int, pairs: int, data_dir: str | None) -> dict[str, Any]:
    """Train, measure, print; the same numbers as plain values."""
    began = time.process_time()
    stable: dict[str, list[Stability]] = {}
    tasks: dict[str, ItemTasks] = {}
    moved: list[tuple[str, Perturbed]] = []
    found: list[tuple[str, Bound]] = []
    reference: dict[str, float] = {}
    for name, (method_name, given) in models(data).items():
        settings = Settings.make(method_name, data, {**given, "rounds": rounds})
        split = settings.split_data(settings.load_data(data_dir))
        setup, method = Setup.of(settings, split), settings.build()
        reference = reference or references(setup)
        for seed in range(seeds):
            seen, state = watch(method, setup, rounds, seed)
            stable.setdefault(name, []).append(seen)
            if not seed:
                tasks[name], more, bound = examine(name, method, setup, state, RADII.get(data, 0.02), pairs)
                moved, found = moved + more, found + bound
    title = f"{data}, {rounds} rounds"
    stability_table(f"{title}: stability, {seeds} seeds, last {LAST} rounds, 1 + 99", stable, reference).show()
    tasks_table(f"{title}: the trained objective, client by client and item by item, seed 0", tasks).show()
    assumption_table(f"{title}: lemma 1's assumption on test examples, seed 0", moved).show()
    bound_table(f"{title}: lemma 1's bound, losses cut at {LIMIT:g}, the best sigma, seed 0", best_of(found)).show()
    prior = log(5) - 0.8 * log(4)  # one positive in five
    print(f"to compare: all scores 0 lose {ZERO_SCORES:.3f}; all scores ln(1/4), the share of positives, {prior:.3f}")
    seconds = time.process_time() - began
    print(f"{data}: {seconds:.0f} CPU s\n", flush=True)
    return {
        "data": data,
        "rounds": rounds,
        "cpu_seconds": round(seconds, 1),
        "reference": reference,
        "stability": {name: [asdict(s) for s in many] for name, many in stable.items()},
        "tasks": {
            name: {
                "items": int(t.items.size),
                "client_centred": t.client_centred,
                "item_centred": t.item_centred,
                "mean": t.mean,
                "spread": t.spread,
                "weighted_spread": t.weighted_spread,
            }
            for name, t in tasks.items()
        },
        "assumption": [{"method": name, **asdict(p), "verdict": p.verdict} for name, p in moved],
        "bound": [{"method": name, **asdict(b)} for name, b in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=list(ROUNDS), metavar="DATA")
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=16, help="opposite moves for the assumption")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    use_threads(1)
    found = [
        one(data, args.rounds or ROUNDS.get(data, 60), args.seeds, args.pairs, args.data_dir) for data in args.data
    ]
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
