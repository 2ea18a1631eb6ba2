"""Compiled sums of the factored form: A Q and C'Q of histories, without A or C. Imported where they are first used.

A and C are those of `pairs.py`, Q has a row of r numbers for every item that predicts. What stands before a moment is
carried along in r numbers, and what comes after it on the way back, because weights fall alike for all of it:

    V_s = exp(-(tau_s - tau_{s-1})) (V_{s-1} + W_{s-1})       W_s = sum of Q's rows of the events of moment s
    H_s = exp(-(tau_{s+1} - tau_s)) (H_{s+1} + n V_{s+1} + (n - 1) / 2 · W_{s+1})        n: events of that moment

    (A Q)[p] += H_s + (n - 1) / 2 · V_s + (n - 2) / 3 · W_s + (n + 1) / 6 · Q[p]         every event p of moment s
    (C'Q)[t] += V_s + (W_s - Q[t]) / 2                                                   every event t of moment s

So a history of T events costs O(T r), whatever the catalogue. Columns are independent of each other: threads share
them. Numbers of a client are rounded to multiples of 2^-24, which float64 adds exactly in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.methods.mosaic.pairs import GRID, places


@piece(inline="always")
def _add(total: Any, part: Any) -> None:
    """total += part, on the grid."""
    for j in range(part.size):
        total[j] += np.floor(np.float64(part[j]) * GRID + 0.5) / GRID


@entry()
def project(items: Any, offsets: Any, times: Any, decay: Any, inputs: Any, basis: Any, before: Any, after: Any) -> None:
    """Add A Q to `before` and C'Q to `after` (where it has rows) for all histories.

    decay: (moments, events) within which a weight falls by e. inputs: per item its row of `basis`, or -1. basis: some
    columns of Q. before: a row per row of basis. after: a row per item, or none.
    """
    width, longest = basis.shape[1], 0
    for user in range(offsets.size - 1):
        longest = max(longest, offsets[user + 1] - offsets[user])
    tau, count, first = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    stood = np.empty((longest, width), np.float32)  # V of the moment that begins with an event
    joins = np.empty((longest, width), np.float32)  # W of it
    part, later = np.empty(width, np.float32), np.empty(width, np.float32)
    for user in range(offsets.size - 1):
        begin = offsets[user]
        length = offsets[user + 1] - begin
        places(times, begin, begin + length, decay[0], decay[1], tau, count, first)
        at, last = 0, -1
        while at < length:
            n = count[at]
            stood[at] = 0
            if last >= 0:
                fade = np.float32(np.exp(-(tau[at] - tau[last])))
                for j in range(width):
                    stood[at, j] = fade * (stood[last, j] + joins[last, j])
            joins[at] = 0
            for k in range(at, at + n):
                row = inputs[items[begin + k]]
                if row >= 0:
                    for j in range(width):
                        joins[at, j] += basis[row, j]
            if after.size:
                for k in range(at, at + n):
                    row = inputs[items[begin + k]]
                    for j in range(width):
                        own = basis[row, j] if row >= 0 else np.float32(0)
                        part[j] = stood[at, j] + np.float32(0.5) * (joins[at, j] - own)
                    _add(after[items[begin + k]], part)
            last, at = at, at + n
        later[:] = 0
        at = length - 1
        while at >= 0:
            f = first[at]
            n = np.float32(count[at])
            one = np.float32(1)
            for k in range(f, at + 1):
                row = inputs[items[begin + k]]
                if row >= 0:
                    for j in range(width):
                        among = (n - one) / 2 * stood[f, j] + (n - 2) / 3 * joins[f, j] + (n + one) / 6 * basis[row, j]
                        part[j] = later[j] + np.float32(among)
                    _add(before[row], part)
            if f > 0:
                fade = np.float32(np.exp(-(tau[f] - tau[f - 1])))
                for j in range(width):
                    later[j] = fade * (later[j] + n * stood[f, j] + (n - one) / 2 * joins[f, j])
            at = f - 1


@entry()
def project_together(items: Any, offsets: Any, inputs: Any, basis: Any, total: Any) -> None:
    """Add G Q to `total` for all histories, G = sum r r'; the items of a history are distinct."""
    part = np.empty(basis.shape[1], np.float32)
    for user in range(offsets.size - 1):
        part[:] = 0
        for k in range(offsets[user], offsets[user + 1]):
            row = inputs[items[k]]
            if row >= 0:
                part += basis[row]
        for k in range(offsets[user], offsets[user + 1]):
            row = inputs[items[k]]
            if row >= 0:
                _add(total[row], part)
