"""The full form: A, C and G themselves, items x items, and two ridge regressions. For catalogues whose sums fit."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics, by_rows, mirrored, pair_counts, zero_diagonal

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def sums(state: State, held: Histories, events: float) -> Statistics:
    """A and C for every window, and G."""
    from fedmosaic.methods.mosaic.pairs import add_pairs

    inputs, items, offsets = state["inputs"], held.items.values, held.items.offsets
    load = state["events"][inputs >= 0]
    found, k = {"together": pair_counts(held, inputs, load)}, load.size
    for window in state["windows"]:
        before, after = np.zeros((k, k)), np.zeros((k, held.n_items))
        if held.times is not None:
            decay = np.array([window, events])
            by_rows(k, partial(add_pairs, items, offsets, held.times, decay, inputs, before, after), load)
            mirrored(before)
        found |= {f"before {window:g}": before, f"after {window:g}": after}
    return found


def solved(state: State, total: Statistics, lam: float, taste_lam: float) -> State:
    """B_s for every window, and B_e."""
    windows = [f"{w:g}" for w in state["windows"]]
    sequence = [ridge(total.pop(f"before {w}"), total.pop(f"after {w}"), lam) for w in windows]
    return {**state, "sequence": np.stack(sequence), "co": zero_diagonal(total["together"], taste_lam, np.float32)}


def kept(state: State, total: Statistics) -> State:
    """A and C of the first window once more, for rounds that come."""
    window = f"{state['windows'][0]:g}"
    before, after = (total[f"{name} {window}"].astype(np.float32) for name in ("before", "after"))
    return {**state, "before": before, "after": after}


def dropped() -> dict[str, F32]:
    """What stands in their place while no round needs them."""
    return {name: np.zeros((0, 0), np.float32) for name in ("before", "after")}


def ridge(a: npt.NDArray[np.floating], c: npt.NDArray[np.floating], lam: float) -> F32:
    """(A + lam I)^-1 C, in float32."""
    from scipy import linalg

    if not c.any():
        return np.zeros(c.shape, np.float32)
    left = a.astype(np.float32)
    left[np.diag_indices_from(left)] += np.float32(lam)
    factor = linalg.cho_factor(left, lower=True, overwrite_a=True, check_finite=False)
    right = np.asfortranarray(c, dtype=np.float32)
    found: F32 = linalg.cho_solve(factor, right, overwrite_b=True, check_finite=False)
    return np.ascontiguousarray(found)
