"""Engines against the slow twin: CPU seconds per round, sampling and evaluation included, interleaved in one run.

python benchmarks/engines.py [--data-dir FOLDER] [--repeats 3] [--only pfedrec fedncf fedrap fedrecgel central]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from slow_personal import SlowFedRAP, SlowGEL
from slow_twin import SlowTwin

from fedmosaic import leave_one_out, load
from fedmosaic.core.ragged import Ragged
from fedmosaic.core.threads import use_threads
from fedmosaic.data.negatives import draw_candidates, training_set
from fedmosaic.data.split import Part
from fedmosaic.evaluation.evaluate import make_probe, rank_probe
from fedmosaic.methods.registry import entry
from fedmosaic.report.console import print_table


def bandwidth() -> float:
    """Bytes per second of a plain copy, read and write counted."""
    source = np.ones(1 << 26, dtype=np.float32)
    target = np.empty_like(source)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


class Ours:
    """One federation advanced round after round, every held-out part evaluated every round."""

    def __init__(self, method: str, engine: str, split: Any, candidates: Any, **settings: Any) -> None:
        self.method = entry(method).build({"engine": engine} | settings)
        self.data = training_set(split, "legacy")
        both: tuple[Part, Part] = ("validation", "test")
        self.round, parts = 0, [part for part in both if split.held_out(part).values.size]
        self.held = [split.held_out(part) for part in parts]
        self.parts = [make_probe(split, part, candidates) for part in parts]
        rows = np.concatenate([p.rows for p in self.parts])
        self.asked = Ragged.group(rows, np.concatenate([p.values for p in self.parts]), split.n_users)
        self.state = self.method.start(self.data, 0)

    def __call__(self) -> float:
        self.round += 1
        self.state, record, answers = self.method.advance(self.data, self.state, self.round, 0, self.asked)
        table = answers.reshape(len(self.asked), len(self.parts), -1)
        found = [
            rank_probe(np.ascontiguousarray(table[:, i]).ravel(), part, held).mean("hr", 10)
            for i, (part, held) in enumerate(zip(self.parts, self.held, strict=True))
        ]
        self.touched = record.touched_rows * record.clients
        return float(found[-1])


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(title: str, twin: SlowTwin | SlowGEL | None, ours: dict[str, tuple[Ours, int]], repeats: int) -> None:
    """Ratios are against the twin, or the last of ours where there is none."""
    taken: dict[str, list[float]] = {name: [] for name in ([] if twin is None else ["slow twin"]) + list(ours)}
    for one, _ in ours.values():
        one()  # compile and warm up
    for _ in range(repeats):
        if twin is not None:
            taken["slow twin"].append(cpu_seconds(twin.round))
        for name, (one, times) in ours.items():
            taken[name] += [cpu_seconds(one) for _ in range(times)]
    base = statistics.median(taken["slow twin" if twin is not None else list(ours)[-1]])
    speed = bandwidth()
    rows = []
    for name, values in taken.items():
        middle = statistics.median(values)
        share = ""
        if name in ours:  # every touched row is read, written and summed: 4 passes of 128 bytes, at the least
            share = f"{100 * ours[name][0].touched * 4 * 128 / middle / speed:.0f} %"
        rows.append([name, str(len(values)), f"{middle:.4f}", f"{base / middle:.3g}x", share])
    print_table(title, ["what", "rounds", "CPU s per round", "ratio", "of copy bandwidth"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["pfedrec", "fedncf", "fedrap", "fedrecgel", "central"])
    args = parser.parse_args()
    use_threads(1)
    films = leave_one_out(load("ml-100k", args.data_dir), ties="file")
    lists = draw_candidates(films)
    if "pfedrec" in args.only:
        compare(
            "PFedRec on ML-100K, one thread, median",
            SlowTwin(films, lists),
            {
                "fused": (Ours("pfedrec", "fused", films, lists), 20),
                "general (autograd)": (Ours("pfedrec", "simulate", films, lists), 4),
            },
            args.repeats,
        )
    if "fedncf" in args.only:
        compare(
            "FedNCF on ML-100K, one thread, median",
            SlowTwin(films, lists, tower=True),
            {
                "fused": (Ours("fedncf", "fused", films, lists), 8),
                "general (autograd)": (Ours("fedncf", "simulate", films, lists), 4),
            },
            args.repeats,
        )
    if "fedrap" in args.only:
        compare(
            "FedRAP on ML-100K, 10 local epochs, one thread, median",
            SlowFedRAP(films, lists),
            {
                "fused": (Ours("fedrap", "fused", films, lists, ramp="as-released"), 4),
                "general (autograd)": (Ours("fedrap", "simulate", films, lists, ramp="as-released"), 1),
            },
            args.repeats,
        )
    for method in ("mf", "ncf") if "central" in args.only else ():
        compare(
            f"Central {method.upper()} on ML-100K, an epoch, one thread, median",
            None,
            {
                "fused": (Ours(method, "fused", films, lists), 4),
                "general (autograd)": (Ours(method, "simulate", films, lists), 2),
            },
            args.repeats,
        )
    if "fedrecgel" in args.only:
        trust = leave_one_out(load("filmtrust-5", args.data_dir), validation=False)
        lists = draw_candidates(trust)
        compare(
            "FedRecGEL on FilmTrust, a tenth of the clients, one thread, median",
            SlowGEL(trust, lists),
            {"general (autograd)": (Ours("fedrecgel", "simulate", trust, lists), 4)},
            args.repeats,
        )


if __name__ == "__main__":
    main()
