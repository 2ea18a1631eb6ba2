"""iALS beside `implicit` (pip install implicit): CPU seconds of a pass over users and items, one thread, interleaved.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/references.py [--data ml-1m] [--widths 64 128] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmosaic import leave_one_out, load
from fedmosaic.core.threads import use_threads
from fedmosaic.methods.closed_form import total
from fedmosaic.methods.ials import IALS
from fedmosaic.report.console import print_table


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def peer(dim: int, held: Any, passes: int) -> Callable[[], object]:
    """`implicit`'s exact solver on the same matrix."""
    from implicit.als import AlternatingLeastSquares

    def work() -> None:
        model = AlternatingLeastSquares(
            factors=dim, regularization=4.0, iterations=passes, use_cg=False, use_gpu=False, num_threads=1
        )
        model.fit(held, show_progress=False)

    return work


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
    held = leave_one_out(load(args.data, args.data_dir)).held("train")
    rows = []
    for dim in args.widths:
        form = IALS(dim=dim)
        state = form.init(held.n_items, 0)

        def ours(form: IALS = form, state: Any = state) -> None:
            form.apply(state, total(form, state, held))

        ours()  # compile
        taken: dict[str, list[float]] = {"ours": [], "implicit": []}
        one, three = (peer(dim, held.csr.tocsr().astype(np.float32), passes) for passes in (1, 3))
        for _ in range(args.repeats):
            taken["ours"].append(cpu_seconds(ours))
            taken["implicit"].append((cpu_seconds(three) - cpu_seconds(one)) / 2)  # without its preparation
        middle = {name: statistics.median(values) for name, values in taken.items()}
        ratio = f"{middle['ours'] / middle['implicit']:.2f}"
        rows.append([str(dim), f"{middle['ours']:.3f}", f"{middle['implicit']:.3f}", ratio])
    print_table(f"iALS on {args.data}, a pass, one thread, median of {args.repeats}",
                ["width", "ours, float64, CPU s", "implicit, exact, float32, CPU s", "ratio"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
