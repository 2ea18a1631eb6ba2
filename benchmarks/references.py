"""References beside peers (pip install implicit), one thread, interleaved, CPU seconds.

iALS: a pass over users and items, beside `implicit`'s exact solver. ItemKNN: 100 neighbours by cosine, beside its
`CosineRecommender`. EASE: beside the few lines of NumPy that were published with it.

`implicit` weighs an observed pair by c and an unobserved one by 1: c = 1 + 1/w0 gives it our systems. With c = 1, a
matrix of ones, it adds 0 · y y' for every pair, at which BLAS returns at once; the last columns have that time, too.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/references.py [--data ml-1m] [--widths 64 128] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from fedmosaic import leave_one_out, load
from fedmosaic.core.threads import use_threads
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.ease import EASE
from fedmosaic.methods.ials import IALS
from fedmosaic.methods.itemknn import ItemKNN
from fedmosaic.report.console import print_table


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def peer(form: IALS, weights: Any) -> float:
    """CPU seconds of a pass of `implicit`'s exact solver, without its preparation."""
    from implicit.als import AlternatingLeastSquares

    taken = []
    for passes in (1, 3):
        model = AlternatingLeastSquares(form.dim, regularization=form.reg / form.w0, iterations=passes, use_cg=False,
                                        use_gpu=False, num_threads=1)  # fmt: skip
        taken.append(cpu_seconds(partial(model.fit, weights, show_progress=False)))
    return (taken[1] - taken[0]) / 2


def closed_forms(data: TrainingSet, ones: Any, repeats: int) -> list[list[str]]:
    """EASE and ItemKNN: everything between histories and weights."""
    from implicit.nearest_neighbours import CosineRecommender

    def published() -> None:
        held = ones.astype(np.float64)
        gram = (held.T @ held).toarray()
        gram[np.diag_indices_from(gram)] += EASE().lam
        inverse = np.linalg.inv(gram)
        weights = inverse / -np.diag(inverse)
        weights[np.diag_indices_from(weights)] = 0

    rows = []

    def neighbours() -> None:
        CosineRecommender(K=100, num_threads=1).fit(ones, show_progress=False)

    for name, form, other in (("EASE", EASE(), published), ("ItemKNN", ItemKNN(neighbours=100), neighbours)):
        form.advance(data, form.start(data, 0), 1, 0)  # compile
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(cpu_seconds(partial(form.advance, data, form.start(data, 0), 1, 0)))
            theirs.append(cpu_seconds(other))
        mine, his = statistics.median(ours), statistics.median(theirs)
        rows.append([name, f"{mine:.2f}", f"{his:.2f}", f"{mine / his:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("FEDMOSAIC_DATA"))
    parser.add_argument("--data", default="ml-1m")
    parser.add_argument("--widths", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        parser.error("one thread is said before NumPy starts: OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python ...")
    use_threads(1)
    split = leave_one_out(load(args.data, args.data_dir))
    data = TrainingSet(split.train, split.train, split.n_items)
    ones = csr_matrix(data.held.csr).astype(np.float32)
    rows = []
    for dim in args.widths:
        form = IALS(dim=dim)
        state, _, _ = form.advance(data, form.start(data, 0), 1, 0)  # compile
        taken: dict[str, list[float]] = {"ours": [], "same": [], "ones": []}
        for _ in range(args.repeats):
            taken["ours"].append(cpu_seconds(partial(form.advance, data, state, 2, 0)))
            taken["same"].append(peer(form, ones * np.float32(1 + 1 / form.w0)))
            taken["ones"].append(peer(form, ones))
        ours, same, skipping = (statistics.median(values) for values in taken.values())
        found = [f"{ours:.3f}", f"{same:.3f}", f"{ours / same:.2f}", f"{skipping:.3f}", f"{ours / skipping:.2f}"]
        rows.append([str(dim), *found])
    print_table(f"iALS on {args.data}, a pass, one thread, float32, CPU seconds, median of {args.repeats}",
                ["width", "ours", "implicit, exact", "ratio", "with c = 1", "ratio"], rows)  # fmt: skip
    forms = closed_forms(data, ones, args.repeats)
    print_table(f"closed forms on {args.data}, one thread, CPU seconds", ["method", "ours", "peer", "ratio"], forms)


if __name__ == "__main__":
    main()
