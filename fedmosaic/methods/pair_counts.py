"""Compiled counts of pairs of items, R'R, without an array of clients x items. Imported where they are first used.

Every pair is counted once, in the row of its smaller item, and mirrored in the end; threads share rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry

TILE = 64  # rows and columns that are mirrored together


@entry()
def add_together(items: Any, offsets: Any, inputs: Any, both: Any, low: Any, high: Any) -> None:
    """Add to `both` a matrix that with its mirror image makes r r', for all histories; an item counts once in each.

    Only rows of places low <= p < high: a pair stands in the row of its smaller place.
    """
    longest = 0
    for user in range(offsets.size - 1):
        longest = max(longest, offsets[user + 1] - offsets[user])
    held, last = np.empty(longest, np.int64), np.full(inputs.size, -1, np.int64)  # by whom an item was last met
    for user in range(offsets.size - 1):
        length = 0
        for k in range(offsets[user], offsets[user + 1]):
            item = items[k]
            if inputs[item] >= low and last[item] != user:
                last[item] = user
                held[length] = inputs[item]
                length += 1
        own = held[:length]
        own.sort()
        for p in range(length):
            row = own[p]
            if row >= high:
                break
            both[row, row] += 0.5
            for q in range(p + 1, length):
                both[row, own[q]] += 1.0


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
