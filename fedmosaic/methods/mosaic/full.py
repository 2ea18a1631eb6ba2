"""The full form: A, C and G themselves, items x items, and two ridge regressions. For catalogues whose sums fit."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import SettingsError
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics, by_rows

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def sums(state: State, held: Histories, events: float) -> Statistics:
    """A and C for every window, and G."""
    from fedmosaic.methods.mosaic.pairs import add_pairs, add_together

    inputs, items, offsets = state["inputs"], held.items.values, held.items.offsets
    load = state["events"][inputs >= 0]  # of every row; pairs of G stand in the upper half
    k = load.size
    found = {"together": np.zeros((k, k))}
    upper = load * np.arange(k, 0, -1.0)
    by_rows(k, partial(add_together, items, offsets, inputs, found["together"]), upper)
    for window in state["windows"]:
        before, after = np.zeros((k, k)), np.zeros((k, held.n_items))
        if held.times is not None:
            decay = np.array([window, events])
            by_rows(k, partial(add_pairs, items, offsets, held.times, decay, inputs, before, after), load)
        found |= {f"before {window:g}": before, f"after {window:g}": after}
    for name, half in found.items():
        if not name.startswith("after"):
            mirrored(half)
    return found


def mirrored(half: F64) -> None:
    """half <- half + half', in place."""
    from fedmosaic.methods.mosaic.pairs import mirror

    size = len(half)
    by_rows(size, partial(mirror, half), np.arange(size, 0, -1.0))


def solved(state: State, total: Statistics, lam: float, taste_lam: float) -> State:
    """B_s for every window, and B_e."""
    windows = [f"{w:g}" for w in state["windows"]]
    sequence = [ridge(total.pop(f"before {w}"), total.pop(f"after {w}"), lam) for w in windows]
    return {**state, "sequence": np.stack(sequence), "co": zero_diagonal(total["together"], taste_lam)}


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


def zero_diagonal(g: F64, lam: float) -> F32:
    """B = -P / diag P with a diagonal of zeros, P = (G + lam I)^-1: EASE."""
    from scipy.linalg import lapack

    left = np.asfortranarray(g, dtype=np.float32)
    left[np.diag_indices_from(left)] += np.float32(lam)
    factor, wrong = lapack.spotrf(left, lower=1, overwrite_a=1)
    inverse, failed = lapack.spotri(factor, lower=1, overwrite_c=1)
    if wrong or failed:
        raise SettingsError(f"the sums cannot be inverted with a penalty of {lam:g}; use a larger one")
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    weights = np.ascontiguousarray(-inverse / np.diag(inverse))
    np.fill_diagonal(weights, 0)
    return weights
