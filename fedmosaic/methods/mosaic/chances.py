"""Compiled sums of the softmax: chances of all items at every event, and the gradient. Imported where first used.

What stands before an event is x_t, as in `pairs.py`; among events of one moment, half of each other one stands before
an event. An item's chance to be event t is

    p_t[j] = open_t[j] exp(s_t[j]) / sum over items of the same        s_t = x_t B + b

where open_t is 0 for items of earlier moments, 1/2 for the others of the same moment, and else 1. With e_t the event
itself and d_t = e_t - p_t, devices add up

    slopes = sum x_t d_t'        chances = sum p_t        answers = sum e_t        loss = -sum log p_t[event t]

Neither needs x_t: weights fall alike for all that stands before, so m numbers are carried along, and back again.
W_s is the sum of B's rows of the events of moment s, D_s that of its d_t:

    V_s = exp(-(tau_s - tau_{s-1})) (V_{s-1} + W_{s-1})        s_t = b + V_s + (W_s - B[t]) / 2
    H_s = exp(-(tau_{s+1} - tau_s)) (H_{s+1} + D_{s+1})        slopes[p] += H_s + (D_s - d_p) / 2

O(m) per event therefore. An event that was there before has no chance, and is not asked for. Numbers of a client are
rounded to multiples of 2^-24, which float64 adds exactly in any order: threads share the clients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.methods.mosaic.pairs import GRID, places

FAST = {"contract", "reassoc", "nsz", "nnan"}  # sums and maxima over items in the processor's order
HALF = np.float32(0.5)


@piece(inline="always")
def _exp(value: Any) -> Any:
    """exp of a number that is not above 0, to seven digits: 2^n times a polynomial, which vectorises."""
    value = max(value, np.float32(-87.0))
    n = np.floor(value * np.float32(1.44269504) + HALF)
    r = (value - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + HALF
    y = y * r * r + r + np.float32(1)
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@piece(fastmath=FAST)
def _largest(stood: Any, own: Any, score: Any) -> Any:
    """score <- stood - own / 2; its largest."""
    top = np.float32(-3e38)
    for j in range(score.size):
        value = stood[j] - HALF * own[j]
        score[j] = value
        top = max(top, value)
    return top


@piece(fastmath=FAST)
def _powers(score: Any, top: Any, open_: Any) -> Any:
    """score <- open exp(score - top); its sum."""
    total = np.float32(0)
    for j in range(score.size):
        value = open_[j] * _exp(score[j] - top)
        score[j] = value
        total += value
    return total


@piece()
def _grid_add(total: Any, part: Any) -> None:
    """total += part, on the grid."""
    for j in range(part.size):
        total[j] += np.floor(np.float64(part[j]) * GRID + 0.5) / GRID


@piece()
def _missed(event: Any, stood: Any, own: Any, open_: Any, missed: Any, sums: Any) -> None:
    """missed <- e_t - p_t of one event; add its chances, the event and its loss to sums."""
    chances, answers, loss = sums
    if open_[event] == 0:  # it was there before
        missed[:] = 0
        return
    kept, open_[event] = open_[event], np.float32(1)
    top = _largest(stood, own, missed)
    score = missed[event] - top
    total = _powers(missed, top, open_)
    open_[event] = kept
    loss[0] += np.floor((np.log(np.float64(total)) - score) * GRID + 0.5) / GRID
    scale = np.float32(-1) / total
    for j in range(missed.size):
        missed[j] *= scale
        chances[j] += np.floor(-np.float64(missed[j]) * GRID + 0.5) / GRID
    missed[event] += np.float32(1)
    answers[event] += 1.0


@piece()
def _forward(items: Any, tau: Any, count: Any, inputs: Any, weights: Any, room: Any, sums: Any) -> None:
    """missed[t] <- e_t - p_t for every event of a history; `stood` begins with b, the score of an empty history."""
    stood, joined, open_, missed = room
    joined[:], open_[:] = 0, 1
    bias, at = stood.copy(), 0
    while at < items.size:
        stop = at + count[at]
        if at:
            fade = np.float32(np.exp(-(tau[at] - tau[at - 1])))
            for j in range(bias.size):  # joined: b + V + W of the moment before
                stood[j] = bias[j] + fade * (joined[j] - bias[j])
        joined[:] = stood
        for k in range(at, stop):
            row = inputs[items[k]]
            open_[items[k]] *= HALF
            if row >= 0:
                for j in range(bias.size):
                    joined[j] += weights[row, j]
        middle = HALF * (stood + joined)
        nothing = np.zeros_like(bias)
        for k in range(at, stop):
            row = inputs[items[k]]
            _missed(items[k], middle, weights[row] if row >= 0 else nothing, open_, missed[k], sums)
        for k in range(at, stop):
            open_[items[k]] = 0
        at = stop


@piece()
def _backward(items: Any, tau: Any, first: Any, inputs: Any, missed: Any, slopes: Any) -> None:
    """Add the slopes of one history, from its last moment back."""
    later, among = np.zeros_like(missed[0]), np.zeros_like(missed[0])
    at = items.size - 1
    while at >= 0:
        begin = first[at]
        among[:] = 0
        for k in range(begin, at + 1):
            for j in range(among.size):
                among[j] += missed[k, j]
        for k in range(begin, at + 1):
            row = inputs[items[k]]
            if row >= 0:
                for j in range(among.size):
                    missed[k, j] = later[j] + HALF * (among[j] - missed[k, j])
                _grid_add(slopes[row], missed[k])
        if begin > 0:
            fade = np.float32(np.exp(-(tau[begin] - tau[begin - 1])))
            for j in range(among.size):
                later[j] = fade * (later[j] + among[j])
        at = begin - 1


@entry()
def add_slopes(
    items: Any, offsets: Any, times: Any, decay: Any, inputs: Any, weights: Any, bias: Any, slopes: Any, sums: Any
) -> None:
    """Add slopes, and (chances, answers, loss) to `sums`, for all histories.

    decay: (moments, events) within which a weight falls by e. inputs: per item its row of `weights` (B), or -1.
    """
    longest, m = 0, bias.size
    for user in range(offsets.size - 1):
        longest = max(longest, offsets[user + 1] - offsets[user])
    tau, count, first = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    stood, joined, open_ = np.empty(m, np.float32), np.empty(m, np.float32), np.empty(m, np.float32)
    missed = np.empty((longest, m), np.float32)
    for user in range(offsets.size - 1):
        begin, end = offsets[user], offsets[user + 1]
        places(times, begin, end, decay[0], decay[1], tau, count, first)
        stood[:] = bias
        own = items[begin:end]
        _forward(own, tau, count, inputs, weights, (stood, joined, open_, missed), sums)
        _backward(own, tau, first, inputs, missed, slopes)
