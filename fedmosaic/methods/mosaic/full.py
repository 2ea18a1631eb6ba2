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

    inputs, distinct = state["inputs"], held.items.unique()
    k = int(inputs.max()) + 1
    found = {"together": np.zeros((k, k))}
    by_rows(k, partial(add_together, distinct.values, distinct.offsets, inputs, found["together"]))
    for window in state["windows"]:
        before, after = np.zeros((k, k)), np.zeros((k, held.n_items))
        if held.times is not None:
            decay = np.array([window, events])
            by_rows(
                k, partial(add_pairs, held.items.values, held.items.offsets, held.times, decay, inputs, before, after)
            )
        found |= {f"before {window:g}": before, f"after {window:g}": after}
    return found


def solved(state: State, total: Statistics, lam: float, taste_lam: float) -> State:
    """B_s for every window, and B_e."""
    windows = [f"{w:g}" for w in state["windows"]]
    sequence = [ridge(total.pop(f"before {w}"), total.pop(f"after {w}"), lam) for w in windows]
    return {**state, "sequence": np.stack(sequence), "co": zero_diagonal(total["together"], taste_lam)}


def ridge(a: F64, c: F64, lam: float) -> F32:
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
