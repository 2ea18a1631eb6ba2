"""Compiled counts of pairs of items, R'R, without an array of clients x items. Imported where they are first used.

Every pair is counted once, in the row of its smaller item, and mirrored in the end; threads share rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry

TILE = 64  # rows and columns that are mirrored together


@entry()
def by_place(places: Any, starts: Any, order: Any) -> None:
    """Sort events by the places of their items; those without one (-1) are left out.

    starts[p] .. starts[p + 1]: where those of place p are in `order`; it begins as zeros, one more than there are
    places.
    """
    for place in places:
        if place >= 0:
            starts[place + 1] += 1
    for p in range(starts.size - 1):
        starts[p + 1] += starts[p]
    at = starts[:-1].copy()
    for k in range(places.size):
        if places[k] >= 0:
            order[at[places[k]]] = k
            at[places[k]] += 1


@entry()
def each_once(offsets: Any, rows: Any, order: Any, starts: Any, held: Any, ends: Any) -> Any:
    """held <- the places of every history's items, each once, ascending; how many there are.

    A history's begin where it begins among the events, and end at ends[history]. rows: whose event it is. order,
    starts: as in `by_place`; they become those of `held`.
    """
    last, count = np.full(ends.size, -1, np.int64), 0
    ends[:] = offsets[:-1]
    for place in range(starts.size - 1):
        begin, starts[place] = starts[place], count
        for k in range(begin, starts[place + 1]):
            row = rows[order[k]]
            if last[row] != place:
                last[row] = place
                held[ends[row]] = place
                order[count] = ends[row]  # never ahead of what is read
                ends[row] += 1
                count += 1
    starts[-1] = count
    return count


@entry()
def add_together(held: Any, ends: Any, rows: Any, order: Any, starts: Any, both: Any, low: Any, high: Any) -> None:
    """Add to `both` a matrix that with its mirror image makes r r', for all histories; arguments as in `each_once`.

    Only rows of places low <= p < high: a pair stands in the row of its smaller place, and a row is done before the
    next is begun, so that it stays in the cache.
    """
    for row in range(low, high):
        own = both[row]
        for k in range(starts[row], starts[row + 1]):
            p = order[k]
            own[row] += 0.5
            for q in range(p + 1, ends[rows[p]]):
                own[held[q]] += 1.0


@entry()
def mirror(half: Any, low: Any, high: Any) -> None:
    """half <- half + half', for pairs of places whose smaller one is in low .. high; tile by tile, for the cache."""
    size = half.shape[0]
    for top in range(low, high, TILE):
        for left in range(top, size, TILE):
            for p in range(top, min(top + TILE, high)):
                for q in range(max(p, left), min(left + TILE, size)):
                    both = half[p, q] + half[q, p]
                    half[p, q] = both
                    half[q, p] = both


@entry()
def without_diagonal(inverse: Any, diagonal: Any, weights: Any, low: Any, high: Any) -> None:
    """weights[p, q] <- -P[p, q] / P[q, q] for rows low .. high, 0 for p = q; of P the upper triangle is given."""
    size = weights.shape[0]
    for top in range(low, high, TILE):
        for left in range(0, size, TILE):
            for p in range(top, min(top + TILE, high)):
                for q in range(left, min(left + TILE, size)):
                    one = inverse[p, q] if p <= q else inverse[q, p]
                    weights[p, q] = 0 if p == q else -one / diagonal[q]
