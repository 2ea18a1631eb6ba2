"""The form with an epsilon: two releases, counts and what follows what, each client's part bounded.

    counts   sum of r / |r|            (share `COUNTS` of the budget): the `most` frequent items predict each other
    C        sum of C_u / max(1, |C_u|)   over pairs of these items

G is not sent, and A follows from C at no further cost: where weights fall evenly, A is about C + C' off its diagonal,
and on it what an item weighs in all. Noise is taken off C where it drowns what was there (`release.out_of_noise`):
entries of its symmetric and of its antisymmetric part have noise of variance sigma²/2, and so eigenvalues up to
sigma sqrt(2 k).

    B_s = (C + C' + diag(degree + RIDGE))^-1 C
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics
from fedmosaic.privacy.release import out_of_noise

F64 = npt.NDArray[np.float64]
COUNTS = 0.05  # of the budget
RIDGE = 50.0


def counts(held: Histories) -> Statistics:
    """sum of r / |r|."""
    distinct = held.items.unique()
    weights = (1 / np.sqrt(np.maximum(distinct.lengths, 1)))[distinct.rows]
    return {"events": np.bincount(distinct.values, weights, minlength=held.n_items)}


def begun(state: State, total: Statistics, most: int) -> State:
    """The most frequent items, by the counts as released."""
    order = np.argsort(-total["events"], kind="stable")[:most]
    inputs = np.full(total["events"].size, -1, np.int32)
    inputs[np.sort(order)] = np.arange(order.size)
    seen = np.maximum(total["events"], 0)
    return {**state, "inputs": inputs, "events": seen, "recent": (seen / max(seen.max(), 1e-9)).astype(np.float32)}


def sums(state: State, held: Histories, events: float) -> Statistics:
    """C of pairs of frequent items, every client's part with a norm of at most 1."""
    from fedmosaic.methods.mosaic.pairs import add_bounded

    k = int(state["inputs"].max()) + 1
    after = np.zeros((k, k))
    if held.times is not None:
        decay = np.array([state["windows"][0], events])
        add_bounded(held.items.values, held.items.offsets, held.times, decay, state["inputs"], after)
    return {"after": after}


def solved(state: State, total: Statistics, deviation: float) -> State:
    """B_s from the C that stands out of the noise; there is no taste term."""
    after = total["after"]
    k, some = after.shape[0], state["inputs"] >= 0
    edge = deviation * np.sqrt(2 * k)
    clean = out_of_noise((after + after.T) / 2, edge) + out_of_noise((after - after.T) / 2j, edge) * 1j
    c: F64 = np.real(clean)
    known = np.maximum(state["events"][some], 1)
    degree = known * (np.abs(c).sum() / known.sum())  # the counts, in the units of C
    sizes, axes = np.linalg.eigh(c + c.T + np.diag(degree + RIDGE))
    inverse = (axes / np.maximum(sizes, RIDGE / 2)) @ axes.T  # noise must not make it indefinite
    sequence = np.zeros((1, k, some.size), np.float32)
    sequence[0][:, some] = inverse @ c
    return {**state, "sequence": sequence}
