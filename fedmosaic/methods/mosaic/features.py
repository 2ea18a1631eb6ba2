"""Features: a further sum that lets histories interact, for data that are large enough to pay for it.

The linear map B_s gives every item of a history its own say. Random features of the whole of it (`lifts.py`) stand
beside the items as further inputs of the same ridge regression:

    [A + lam I    X'F        ] [B_s]   [C  ]
    [F'X          F'F + lam I] [B_f] = [F'Y]          score of order: x B_s + f B_f

Items have rows of RANK numbers, the leading directions of D A D with D = 1 / sqrt(events + DAMPED), which the server
knows from its first sums and publishes; which coordinates a feature reads is drawn once, for everybody. One more round
therefore, with F'F, X'F and F'Y as its sums.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core.ragged import Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics, by_rows
from fedmosaic.methods.mosaic.factored import DAMPED
from fedmosaic.methods.mosaic.full import ridge

F32 = npt.NDArray[np.float32]
Drawn = tuple[npt.NDArray[np.int64], F32, F32]
RANK = 64  # numbers per item
READ = 16  # coordinates that a feature reads
EXACT = 16_384  # events whose products of features float32 adds without an error
EVENTS_AT_ONCE = 8_192


@cache
def drawn(features: int, rank: int) -> Drawn:
    """Which coordinates every feature reads, with which signs, and its bias; the same for everybody."""
    from fedmosaic.methods.mosaic.lifts import BLOCKS

    rng, width = np.random.default_rng(0), BLOCKS * rank
    read = min(READ, width)
    coordinates = np.argsort(rng.random((features, width)), axis=1)[:, :read].astype(np.int64)
    signs = rng.choice(np.array([-1, 1], np.float32), (features, read)) * np.float32(np.sqrt(width / read))
    return coordinates, signs, rng.uniform(-1, 1, features).astype(np.float32)


def item_vectors(before: npt.NDArray[np.floating], events: npt.NDArray[np.floating]) -> F32:
    """A row of numbers for every item that predicts, centred by how often items occur.

    before: A. events: of every such item.
    """
    from scipy.sparse.linalg import eigsh

    damp = 1 / np.sqrt(events + DAMPED)
    rank = min(RANK, len(damp) - 1)
    if rank < 1 or not before.any():
        return np.zeros((len(damp), 1), np.float32)
    _, axes = eigsh(damp[:, None] * before * damp, k=rank, v0=np.ones(len(damp)))
    rows = damp[:, None] * axes
    return np.asarray(rows - (events @ rows) / events.sum(), np.float32)


def begun(state: State, total: Statistics) -> State:
    """What the next round needs: the items' rows."""
    before = total[f"before {state['windows'][0]:g}"]
    return {**state, "vectors": item_vectors(before, state["events"][state["inputs"] >= 0])}


def sums(state: State, held: Histories, events: float, features: int) -> Statistics:
    """F'F, X'F and F'Y of all events before which something stands."""
    from fedmosaic.methods.mosaic.lifts import lift_events

    vectors, inputs = state["vectors"], state["inputs"]
    whole = drawn(features, vectors.shape[1])
    square, own = np.zeros((features, features)), dict[int, tuple[Any, Any]]()  # X'F and Y'F by the first column
    k, m = len(vectors), held.n_items
    decay = np.array([state["windows"][0], events])
    for part in _parts(held) if held.times is not None else []:
        lifted = np.zeros((part.items.values.size, features), np.float32)

        def work(low: int, high: int, part: Histories = part, lifted: F32 = lifted) -> None:
            added = own.setdefault(low, (np.zeros((k, high - low)), np.zeros((m, high - low))))
            some = tuple(np.ascontiguousarray(array[low:high]) for array in whole)
            out = np.zeros((len(lifted), high - low), np.float32)
            lift_events(part.items.values, part.items.offsets, part.times, decay, inputs, vectors, some, out, added)
            lifted[:, low:high] = out

        by_rows(features, work)
        for begin in range(0, len(lifted), EXACT):
            rows = lifted[begin : begin + EXACT]
            square += rows.T @ rows
    found = [np.hstack(parts) for parts in zip(*(own[low] for low in sorted(own)), strict=True)]
    cross, answers = found or (np.zeros((k, features)), np.zeros((m, features)))
    return {"features": square, "cross": cross, "answers": answers}


def _parts(held: Histories) -> list[Histories]:
    """Histories in parts of so many events, more where one alone has more."""
    ends = held.items.offsets[1:] // EVENTS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(held)]
    return [held.take(np.arange(low, high)) for low, high in pairwise(cuts) if high > low]


def solved(state: State, total: Statistics, lam: float) -> State:
    """B_s and B_f of the joint regression, as one more candidate beside those without features."""
    from fedmosaic.methods.mosaic.lifts import STEPS

    k, features = total["cross"].shape
    left = np.empty((k + features, k + features), np.float32)
    left[:k, :k], left[:k, k:], left[k:, :k] = state["before"], total["cross"], total["cross"].T
    left[k:, k:] = total["features"]
    left[np.arange(k, k + features), np.arange(k, k + features)] += np.float32((STEPS**2 - 1) * lam)  # and lam below
    joint = ridge(left, np.concatenate([state["after"], total["answers"].T]), lam)
    return {
        **state,
        "sequence": np.concatenate([state["sequence"], joint[None, :k]]),
        "windows": np.append(state["windows"], state["windows"][0]),
        "lifted": joint[k:],
    }


def scores(state: State, histories: Histories, events: float) -> Any:
    """f B_f of every history; nothing where nothing stands before."""
    from fedmosaic.methods.mosaic.lifts import lift_next

    found = np.zeros((len(histories), state["lifted"].shape[0]), np.float32)
    items: Ragged = histories.items
    decay = np.array([state["windows"][-1], events])
    some = drawn(found.shape[1], state["vectors"].shape[1])
    lift_next(items.values, items.offsets, histories.times, decay, state["inputs"], state["vectors"], some, found)
    return found @ state["lifted"]
