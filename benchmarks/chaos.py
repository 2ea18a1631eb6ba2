"""Chaos among devices that learn: 200 rounds in this process, with and without faults, HR@10 of both.

    python benchmarks/chaos.py [--data-dir DIR] [--devices 943] [--rounds 200]

10 % of answers are lost, 10 % come after the deadline, 5 % twice or replayed, 5 % damaged (NaN, other shape, truncated,
out of range, a flipped bit). Devices are users of ML-100K, strict pool, 1 + 99; answers are the devices' own, the mean
of the last rounds (one alone moves by a point or two either way).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.data.negatives import draw_candidates
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.roster import Member
from fedmosaic.deploy.work import LearntWork
from fedmosaic.runs.settings import Settings
from fedmosaic.testing import Chaos, Clock, LocalTransport

LEAST = 0.4  # share of the devices without which a round does not count
EVERY, LAST = 5, 10  # rounds between two looks; looks that are averaged


class Fixed(dict[str, Member]):
    """A roster that stays as it is."""

    def __call__(self) -> dict[str, Member]:
        return self


def hits(nodes: dict[str, Node], split: Any, candidates: Any) -> float:
    """Share of devices whose held-out item is among the first ten of 1 + 99, answered by the device itself."""
    found = []
    for number, node in enumerate(nodes.values()):
        assert isinstance(node.work, LearntWork)
        scorer = node.work.federation.scorer(node.data, node.state)
        scores = scorer.scores(np.zeros(1, np.int64))[0]
        held = split.test[number]
        if held.size:
            others = candidates.test[number]
            found.append((scores[others] > scores[held[0]]).sum() < 10)
    return float(np.mean(found))


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--data-dir")
    asked.add_argument("--devices", type=int, default=943)
    asked.add_argument("--rounds", type=int, default=200)
    options = asked.parse_args()
    settings = Settings.make("fedmf", "ml-100k")
    data = settings.load_data(options.data_dir)
    split = settings.split_data(data)
    candidates = draw_candidates(split)
    catalogue = pl.DataFrame({"item": data.items.ids})
    agreement = Agreement(
        method="fedmf", method_settings={"rounds": options.rounds, "dim": 16}, items=catalogue_digest(catalogue),
        least=round(LEAST * options.devices), deadline=10.0, own_draws=False, secure=False,
    )  # fmt: skip
    results = {}
    for kind in ("clean", "chaos"):
        with tempfile.TemporaryDirectory() as folder:
            place, nodes = Path(folder), dict[str, Node]()
            for number in range(options.devices):
                home = place / str(number)
                Node.create(home, agreement, catalogue, np.array([number]), str(number))
                take_history(home, {"item": data.items.take(split.train[number]).to_list()}, user=None)
                nodes[str(number)] = Node(home)
            agreement.write(place)
            clock = Clock()
            transport = Chaos(nodes, clock, 0, 15.0) if kind == "chaos" else LocalTransport(nodes, keep=False)
            roster = Fixed({name: Member(int(name)) for name in nodes})
            n_items = len(data.items)
            one = Coordinator(place, roster, transport, n_items=n_items, clock=clock, sleep=clock.sleep)
            lines, looks = [], []
            while one.version < options.rounds:
                lines.append(one.round())
                if len(lines) % EVERY == 0:
                    looks.append(hits(nodes, split, candidates))
                    print(f"{kind}: round {len(lines)}, HR@10 {looks[-1]:.4f}", file=sys.stderr, flush=True)
            results[kind] = float(np.mean(looks[-LAST:]))
            abandoned, fewest = sum(x["abandoned"] for x in lines), min(x["clients"] for x in lines)
            print(
                f"{kind}: {len(lines)} rounds, {abandoned} given up, at least {fewest} clients, HR {results[kind]:.4f}"
            )
            if isinstance(transport, Chaos):
                text = (place / "refused.jsonl").read_text()
                reasons = Counter(json.loads(line)["reason"] for line in text.splitlines())
                print(f"  faults {transport.fates}; refused {dict(reasons)}")
    print(f"difference: {100 * (results['chaos'] - results['clean']):+.2f} points")


if __name__ == "__main__":
    main()
