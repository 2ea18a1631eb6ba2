"""Compiled merges of what devices hold. Imported where they are first used: Numba takes its time."""

from __future__ import annotations

from typing import Any

from fedmosaic.core.compiler import entry


@entry()
def union_size(old_keys: Any, keys: Any) -> Any:
    """How many keys two sorted lists have together."""
    size, a = old_keys.size, 0
    for b in range(keys.size):
        k = keys[b]
        while a < old_keys.size and old_keys[a] < k:
            a += 1
        size += a == old_keys.size or old_keys[a] != k
    return size


@entry()
def merge(before: Any, more: Any, all_keys: Any, all_rows: Any) -> None:
    """Union of two keyed tables, the second winning; one pass, one copy.

    before: keys, rows, per client what its decay leaves of them, items. more: keys, rows, where they lie, divisors.
    """
    old_keys, old_rows, fold, n_items = before
    keys, rows, where, divisor = more
    a, b = 0, 0
    for n in range(all_keys.size):
        if b < keys.size and (a == old_keys.size or keys[b] <= old_keys[a]):
            k = keys[b]
            all_keys[n] = k
            source, target = rows[where[b]], all_rows[n]
            by = 1 / (divisor[b] if divisor.size > 1 else divisor[0])
            for d in range(source.size):
                target[d] = source[d] * by
            b += 1
            a += a < old_keys.size and old_keys[a] == k
        else:
            all_keys[n] = old_keys[a]
            source, target, left = old_rows[a], all_rows[n], fold[old_keys[a] // n_items]
            for d in range(source.size):
                target[d] = source[d] * left
            a += 1
