"""Softmax by sums: chances of the next item, learnt in a few more rounds. For data that are large enough to pay for it.

Ridge regression asks for numbers near 0 and 1; the softmax asks which of all items comes next. With p_t the chances of
all items at event t under the scores x_t B + b (`chances.py`), it is the smallest

    -sum_t log p_t[event t]  +  PENALTY · sum_j w_j |B_j|²  +  BIAS_PENALTY · |b - b0|²

with b0 = log((n_j + 1/2) / N), n_j events of item j among N, and w_j = n_j / N + FLOOR. Devices send slopes,
chances and loss as sums; the server takes a step along the slope as A, which it knows, bends it:

    D = (A + 2 PENALTY I)^-1 (slopes - 2 PENALTY w B) / (4 w)        B <- B + a D

How far: the first time FIRST; then what would have been the best length of the last step, had the slope fallen evenly
along it (Barzilai and Borwein, 1988). So the last step is all that the server has to remember. It begins with the ridge
regression, SCALE times, since a unit of it is that many in logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core.threads import deal, thread_count
from fedmosaic.data.histories import Histories
from fedmosaic.methods.closed_form import State, Statistics
from fedmosaic.methods.mosaic import rows
from fedmosaic.methods.mosaic.full import ridge

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
PENALTY = 150.0
BIAS_PENALTY = 2.5
FLOOR = 0.01
SCALE = 100.0
FIRST = 1.0
LONGEST = 3.0  # times the last length: a slope that hardly fell would send the next step anywhere
ROOM = 2 << 30  # bytes of the sums of threads, which have one each


def init(n_items: int) -> dict[str, npt.NDArray[Any]]:
    """Nothing is known; B and b have no rows."""
    return {
        "soft_map": np.zeros((0, n_items), np.float32),
        "soft_bias": np.zeros(n_items, np.float32),
        "aims": np.zeros(0),  # what should become small, per event, before every step
        **_no_step(n_items),
    }


def _no_step(n_items: int) -> dict[str, npt.NDArray[Any]]:
    """The last step, where there was none: D for B and b; its length, and how steep it was."""
    return {
        "way": np.zeros((0, n_items), np.float32),
        "bias_way": np.zeros(n_items, np.float32),
        "walked": np.zeros(0),
    }


def dropped(state: State) -> dict[str, npt.NDArray[Any]]:
    """The last step is needed no longer."""
    return _no_step(state["bias_way"].size)


def begun(state: State) -> State:
    """Where the steps begin: the ridge regression of the first window, and how frequent items are."""
    return {
        **state,
        "soft_map": np.float32(SCALE) * state["sequence"][0],
        "soft_bias": _frequent(state),
    }


def _frequent(state: State) -> F32:
    """b0 = log((n_j + 1/2) / N)."""
    events = state["events"]
    return np.asarray(np.log((events + 0.5) / max(events.sum(), 1)), np.float32)


def sums(state: State, held: Histories, events: float) -> Statistics:
    """Slopes, chances, answers and loss of all events; clients are dealt to threads."""
    from fedmosaic.methods.mosaic.chances import add_slopes

    shape, m = state["soft_map"].shape, held.n_items
    workers = min(thread_count(), max(ROOM // max(8 * shape[0] * m, 1), 1)) if held.times is not None else 1
    ends = np.linspace(0, held.items.values.size, workers + 1)
    cuts = np.searchsorted(held.items.offsets, ends)
    cuts[-1] = len(held)
    decay = np.array([state["windows"][0], events])

    def work(worker: int) -> tuple[F64, F64, F64, F64]:
        slopes, chances, answers, loss = np.zeros(shape), np.zeros(m), np.zeros(m), np.zeros(1)
        if held.times is not None:
            part = held.take(np.arange(cuts[worker], cuts[worker + 1]))
            given = (part.items.values, part.items.offsets, part.times, decay, state["inputs"])
            add_slopes(*given, state["soft_map"], state["soft_bias"], slopes, (chances, answers, loss))
        return slopes, chances, answers, loss

    first, *others = deal(work, workers)
    for other in others:
        for whole, part in zip(first, other, strict=True):
            whole += part
    return dict(zip(("slopes", "chances", "answers", "loss"), first, strict=True))


def stepped(state: State, total: Statistics) -> State:
    """One step further; nothing where nothing was asked (no times)."""
    if not total["answers"].any():
        return state
    slopes, bias_slopes = _slopes(state, total)
    way, bias_way = _bent(state, slopes, bias_slopes)
    length = _length(state, slopes, bias_slopes)
    return {
        **state,
        "soft_map": state["soft_map"] + np.float32(length) * way,
        "soft_bias": state["soft_bias"] + np.float32(length) * bias_way,
        "way": way,
        "bias_way": bias_way,
        "walked": np.array([length, _inner(way, slopes) + _inner(bias_way, bias_slopes)]),
        "aims": np.append(state["aims"], _aim(state, total)),
    }


def _aim(state: State, total: Statistics) -> float:
    """The loss and both penalties, per event."""
    sizes = np.einsum("ij,ij->j", state["soft_map"], state["soft_map"])
    moved = state["soft_bias"] - _frequent(state)
    penalties = PENALTY * float(_weights(state) @ sizes) + BIAS_PENALTY * float(moved @ moved)
    return (float(total["loss"][0]) + penalties) / float(total["answers"].sum())


def _slopes(state: State, total: Statistics) -> tuple[F32, F32]:
    """How fast the aim falls, by B and by b."""
    slopes = total["slopes"].astype(np.float32)
    slopes -= np.float32(2 * PENALTY) * _weights(state) * state["soft_map"]
    pulled = 2 * BIAS_PENALTY * (state["soft_bias"] - _frequent(state))
    return slopes, (total["answers"] - total["chances"] - pulled).astype(np.float32)


def _weights(state: State) -> F32:
    events = state["events"]
    return np.asarray(events / max(events.sum(), 1) + FLOOR, np.float32)


def _bent(state: State, slopes: F32, bias_slopes: F32) -> tuple[F32, F32]:
    """The slopes divided by about how fast they change."""
    way = ridge(state["before"], slopes, 2 * PENALTY)
    way /= 4 * _weights(state)
    return way, (bias_slopes / (4 * (state["events"] + 2 * BIAS_PENALTY))).astype(np.float32)


def _length(state: State, slopes: F32, bias_slopes: F32) -> float:
    """Of the next step: a <D, g> / (<D, g> - <D, g'>) with D, a and g of the last step, and g' the slopes now."""
    if not state["walked"].size:
        return FIRST
    last, before = state["walked"]
    now = _inner(state["way"], slopes) + _inner(state["bias_way"], bias_slopes)
    return float(last * before / max(before - now, before / LONGEST))


def _inner(one: F32, other: F32) -> float:
    return float(np.vdot(one, other))


def scores(state: State, histories: Histories, window: float, events: float) -> F32:
    """x_u B + b, as they are weighed; nothing without a history."""
    weight = np.where(histories.items.lengths > 0, state["soft"][0], 0.0).astype(np.float32)
    logits = rows.before(state, histories, window, events) @ state["soft_map"] + state["soft_bias"]
    return np.asarray(weight[:, None] * logits)
