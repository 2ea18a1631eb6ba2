"""Compiled features of histories: what the linear map of the next-item method cannot see. Imported where first used.

What stands before an event, in three blocks of r numbers (V: a centred row of r numbers per item that predicts):

    z = (short / |short|, last / |last|, whole / |whole|)
    short = sum exp(-gap) V_p       last = sum exp(-4 gap) V_p       whole = sum V_p        p before the event

    feature = floor(8 max(0, bias + scale · sum of some coordinates of z, each with a sign))       0 ... 31

Among events of one moment, half of each other one stands before an event, as in `pairs.py` on average. Features are
whole numbers below 32, so that products of them add up exactly, even in float32, for 16,384 events; what else is added
lies on the grid of `pairs.py`. Columns are independent of each other: threads share them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.methods.mosaic.pairs import FAR, GRID, places

STEPS = 8.0  # of a feature in a unit
TOP = 31.0
BLOCKS = 3
QUICKLY = 4.0  # how much faster than `short` the block `last` falls


@piece()
def _lift(stood: Any, joins: Any, own: Any, z: Any, coordinates: Any, signs: Any, bias: Any, out: Any) -> Any:
    """out <- the features of what stands before an event; False, and zeros, where nothing does."""
    rank, known = own.size, False
    for block in range(BLOCKS):
        size = np.float32(0)
        for j in range(rank):
            value = stood[block, j] + np.float32(0.5) * (joins[j] - own[j])
            z[block * rank + j] = value
            size += value * value
        if size > 0:
            known = True
            size = np.float32(1) / np.sqrt(size)
            for j in range(rank):
                z[block * rank + j] *= size
    for d in range(bias.size):
        total = bias[d]
        for c in range(coordinates.shape[1]):
            total += signs[d, c] * z[coordinates[d, c]]
        out[d] = min(np.floor(max(total * np.float32(STEPS), np.float32(0))), np.float32(TOP)) if known else 0
    return known


@piece()
def _fade(stood: Any, joins: Any, gap: Any) -> None:
    """From what stood before a moment to what stands before the next one, `gap` later."""
    short, last = np.float32(np.exp(-gap)), np.float32(np.exp(-QUICKLY * gap))
    for j in range(joins.size):
        stood[0, j] = short * (stood[0, j] + joins[j])
        stood[1, j] = last * (stood[1, j] + joins[j])
        stood[2, j] += joins[j]


@piece()
def _join(items: Any, begin: Any, end: Any, inputs: Any, vectors: Any, joins: Any) -> None:
    """joins <- the sum of the vectors of some events."""
    joins[:] = 0
    for k in range(begin, end):
        row = inputs[items[k]]
        if row >= 0:
            for j in range(joins.size):
                joins[j] += vectors[row, j]


@piece()
def _room(offsets: Any, rank: Any) -> Any:
    """Arrays that all histories share: places, counts and first events of moments; blocks, sums, z, and zeros."""
    longest = 0
    for user in range(offsets.size - 1):
        longest = max(longest, offsets[user + 1] - offsets[user])
    tau, count, first = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    stood, joins = np.empty((BLOCKS, rank), np.float32), np.empty(rank, np.float32)
    return tau, count, first, stood, joins, np.empty(BLOCKS * rank, np.float32), np.zeros(rank, np.float32)


@entry()
def lift_events(
    items: Any, offsets: Any, times: Any, decay: Any, inputs: Any, vectors: Any, drawn: Any, found: Any, sums: Any
) -> None:
    """found[k] <- the features of what stands before event k; add X'F and Y'F to sums.

    decay: (moments, events) within which a weight falls by e. inputs: per item its row of `vectors`, or -1. drawn:
    coordinates, signs and biases of some features. sums: rows per item that predicts, and per item.
    """
    coordinates, signs, bias = drawn
    cross, answers = sums
    tau, count, first, stood, joins, z, nobody = _room(offsets, vectors.shape[1])
    for user in range(offsets.size - 1):
        begin = offsets[user]
        length = offsets[user + 1] - begin
        places(times, begin, begin + length, decay[0], decay[1], tau, count, first)
        stood[:] = 0
        at = 0
        while at < length:
            stop = at + count[at]
            _join(items, begin + at, begin + stop, inputs, vectors, joins)
            for t in range(at, stop):
                row = inputs[items[begin + t]]
                own = vectors[row] if row >= 0 else nobody
                features = found[begin + t]
                if not _lift(stood, joins, own, z, coordinates, signs, bias, features):
                    continue
                answer = answers[items[begin + t]]
                for d in range(bias.size):
                    answer[d] += features[d]
                for p in range(stop - 1, -1, -1):
                    gap = tau[at] - tau[p]
                    if gap > FAR:
                        break
                    other = inputs[items[begin + p]]
                    if other < 0 or p == t:
                        continue
                    weight = np.floor((0.5 if p >= at else np.exp(-gap)) * GRID + 0.5) / GRID
                    for d in range(bias.size):
                        cross[other, d] += weight * features[d]
            if stop < length:
                _fade(stood, joins, tau[stop] - tau[at])
            at = stop


@entry()
def lift_next(
    items: Any, offsets: Any, times: Any, decay: Any, inputs: Any, vectors: Any, drawn: Any, found: Any
) -> None:
    """found[u] <- the features of what stands before the item that comes next in history u."""
    coordinates, signs, bias = drawn
    tau, count, first, stood, joins, z, nobody = _room(offsets, vectors.shape[1])
    for user in range(offsets.size - 1):
        begin = offsets[user]
        length = offsets[user + 1] - begin
        now = places(times, begin, begin + length, decay[0], decay[1], tau, count, first)
        stood[:] = 0
        at = 0
        while at < length:
            stop = at + count[at]
            _join(items, begin + at, begin + stop, inputs, vectors, joins)
            _fade(stood, joins, (tau[stop] if stop < length else now) - tau[at])
            at = stop
        joins[:] = 0
        _lift(stood, joins, nobody, z, coordinates, signs, bias, found[user])
