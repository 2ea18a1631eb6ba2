"""The full form: A, C and G themselves, items x items, and two ridge regressions. For catalogues whose sums fit."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import SettingsError
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import (
    State,
    Statistics,
    by_rows,
    mirrored,
    pair_counts,
    sorted_by_place,
    zero_diagonal,
)

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def sums(state: State, held: Histories, events: float) -> Statistics:
    """A and C for every window, and G."""
    from fedmosaic.methods.mosaic.pairs import add_pairs, stand

    inputs, items = state["inputs"], held.items.values
    load = state["events"][inputs >= 0]
    found, k = {"together": pair_counts(held, inputs, load)}, load.size
    places = inputs[items]
    order, starts = sorted_by_place(places, k)
    numbers = tuple(np.empty(items.size, kind) for kind in (np.float64, np.float64, np.int64, np.int64, np.int64))
    for window in state["windows"]:
        before, after = np.zeros((k, k)), np.zeros((k, held.n_items))
        if held.times is not None:
            stand(held.items.offsets, held.times, np.array([window, events]), numbers)
            by_rows(k, partial(add_pairs, items, places, numbers, order, starts, before, after), load)
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
    from scipy.linalg import blas, lapack

    if not c.any():
        return np.zeros(c.shape, np.float32)
    left = a.astype(np.float32).T  # symmetric, so its transpose is itself, as LAPACK reads it
    left[np.diag_indices_from(left)] += np.float32(lam)
    factor, wrong = lapack.spotrf(left, lower=1, overwrite_a=1)
    if wrong:
        raise SettingsError(f"the sums cannot be inverted with a penalty of {lam:g}; use a larger one")
    found = c.astype(np.float32, order="C").T  # X' = C' L'^-1 L^-1: nothing has to be turned round
    for turned in (1, 0):
        found = blas.strsm(1.0, factor, found, side=1, lower=1, trans_a=turned, overwrite_b=1)
    return np.asarray(found.T)
