"""What a history says, in the shapes that the terms of the next-item method multiply: counts, weights, rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics

F32 = npt.NDArray[np.float32]
RECENT = 0.1  # of the time that the data span: in it, what an event counts for the trend falls by e


def counts(state: State, histories: Histories) -> Statistics:
    """Events per item, and those of late."""
    from fedmosaic.methods.mosaic.pairs import GRID

    events = np.bincount(histories.items.values, minlength=histories.n_items).astype(np.float64)
    now, span = state["clock"]
    if histories.times is None or not span:
        return {"events": events, "late": events}
    weighed = np.exp(-np.maximum(now - histories.times, 0) / (RECENT * span))  # what came after now is of now
    late = np.zeros(histories.n_items)
    np.add.at(late, histories.items.values, np.floor(weighed * GRID + 0.5) / GRID)
    return {"events": events, "late": late}


def weights(histories: Histories, window: float, events: float) -> Any:
    """What every event weighs for the item that comes next."""
    from fedmosaic.methods.mosaic.pairs import next_weights

    found = np.empty(histories.items.values.size, np.float64)
    next_weights(histories.items.offsets, histories.times, np.array([window, events]), found)
    return found


def before(state: State, histories: Histories, window: float, events: float) -> Any:
    """x_u: the items of every history, weighed for what comes next."""
    items = histories.items
    return _rows(state, items.values, items.rows, weights(histories, window, events), len(histories))


def whole(state: State, histories: Histories) -> Any:
    """r_u / sqrt|r_u|: the items of every history, each once."""
    items = histories.items.unique()
    weighed = (1 / np.sqrt(np.maximum(items.lengths, 1)))[items.rows]
    return _rows(state, items.values, items.rows, weighed, len(histories))


def _rows(state: State, items: Any, rows: Any, weighed: Any, users: int) -> Any:
    """A matrix of users x items that predict."""
    from scipy import sparse

    places = state["inputs"][items]
    near = (weighed > 0) & (places >= 0)
    shape = (users, int(state["inputs"].max(initial=-1)) + 1)
    return sparse.csr_array((weighed[near].astype(np.float32), (rows[near], places[near])), shape=shape)


def within(rows: Any, basis: F32) -> Any:
    """Rows in a factored form's basis; in the full form as they are."""
    return rows @ basis if basis.size else rows


def column(basis: F32, matrix: F32, places: Any, item: int) -> F32:
    """What some of the items that predict say about one item: rows of a factored product, or of a matrix."""
    return np.asarray(basis[places] @ matrix[:, item] if basis.size else matrix[places, item])


def vectors(state: State) -> npt.NDArray[np.floating]:
    """A row per item: from what goes with it it is predicted, or, with an epsilon, from what comes before it."""
    inputs = state["inputs"]
    if not state["co"].size and state["sequence"].size:
        return np.asarray(state["sequence"][0].T)
    found = np.zeros((inputs.size, state["co"].shape[0]), np.float32)
    found[inputs >= 0] = state["co"].T
    return found
