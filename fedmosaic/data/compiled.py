"""Compiled draws and orders. Imported where they are first used: Numba takes its time."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core import keys
from fedmosaic.core.compiler import entry, piece
from fedmosaic.core.ragged import I32, I64

mix = piece(inline="always")(keys.mix)
GOLDEN = keys.GOLDEN
S32 = np.uint64(32)


@piece(inline="always")
def unseen_item(rank: Any, excluded: Any, low: Any, high: Any) -> Any:
    """The item of a given rank among those not in the sorted `excluded[low:high]` (binary search)."""
    first, last = low, high
    while first < last:
        middle = (first + last) >> 1
        if excluded[middle] - (middle - low) > rank:
            last = middle
        else:
            first = middle + 1
    return rank + (first - low)


@entry()
def draw(excluded: I32, starts: I64, client_keys: keys.U64, offsets: I64, n_items: int, out: I32) -> None:
    """Uniform draws for each client from the items outside its sorted `excluded`."""
    for client in range(offsets.size - 1):
        low, high = starts[client], starts[client + 1]
        pool = np.uint64(n_items - (high - low))
        state = client_keys[client]
        for slot in range(offsets[client], offsets[client + 1]):
            state += GOLDEN
            rank = np.int64(((mix(state) >> S32) * pool) >> S32)
            out[slot] = unseen_item(rank, excluded, low, high)


@entry()
def draw_distinct(excluded: I32, starts: I64, client_keys: keys.U64, offsets: I64, n_items: int, out: I32) -> None:
    """Distinct draws for each client from the items outside its sorted `excluded`."""
    taken = np.empty(n_items, dtype=np.int64)  # the last client that took this rank: never needs clearing
    ranks = np.empty(n_items, dtype=np.int64)
    for i in range(n_items):
        taken[i] = -1
    for client in range(offsets.size - 1):
        low, high = starts[client], starts[client + 1]
        size, wanted = n_items - (high - low), offsets[client + 1] - offsets[client]
        state, pool = client_keys[client], np.uint64(size)
        if size < 2 * wanted:  # rejection would stall near the end: shuffle the whole pool
            for i in range(size):
                ranks[i] = i
            for i in range(wanted):
                state += GOLDEN
                j = i + np.int64(((mix(state) >> S32) * np.uint64(size - i)) >> S32)
                ranks[i], ranks[j] = ranks[j], ranks[i]
        else:
            got = 0
            while got < wanted:
                state += GOLDEN
                rank = np.int64(((mix(state) >> S32) * pool) >> S32)
                if taken[rank] != client:
                    taken[rank] = client
                    ranks[got] = rank
                    got += 1
        for i in range(wanted):
            out[offsets[client] + i] = unseen_item(ranks[i], excluded, low, high)


@piece(inline="always")
def shuffle_client(order: Any, begin: Any, end: Any, key: Any) -> None:
    """Fisher-Yates on order[begin:end], draws from the key's counter."""
    state = key
    for i in range(end - 1, begin, -1):
        state += GOLDEN
        j = begin + np.int64(((mix(state) >> S32) * np.uint64(i - begin + 1)) >> S32)
        order[i], order[j] = order[j], order[i]


@entry()
def shuffle(order: I64, offsets: I64, client_keys: keys.U64) -> None:
    """A keyed permutation of every client's part of `order`."""
    for client in range(offsets.size - 1):
        shuffle_client(order, offsets[client], offsets[client + 1], client_keys[client])


@entry()
def localise(items: I32, offsets: I64, n_items: int, index: I64, touched: I32, row_offsets: I64) -> None:
    """Number the distinct items of each client by first appearance."""
    owner, place = np.empty(n_items, np.int64), np.empty(n_items, np.int64)
    for i in range(n_items):
        owner[i] = -1
    rows = 0
    for client in range(offsets.size - 1):
        for e in range(offsets[client], offsets[client + 1]):
            item = items[e]
            if owner[item] != client:
                owner[item] = client
                place[item] = rows
                touched[rows] = item
                rows += 1
            index[e] = place[item]
        row_offsets[client + 1] = rows
