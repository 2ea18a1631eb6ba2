"""Compiled counts of ranks. Imported where they are first used: Numba takes its time."""

from __future__ import annotations

from typing import Any

from fedmosaic.core.compiler import entry


@entry()
def count(scores: Any, probe_at: Any, held_at: Any, above: Any, tied: Any) -> None:
    """Of every held-out item, how many asked items score higher, and how many the same."""
    for user in range(held_at.size - 1):
        first, last = probe_at[user], probe_at[user + 1]
        n_held = held_at[user + 1] - held_at[user]
        for h in range(n_held):
            target = scores[first + h]
            for k in range(first, last):
                above[held_at[user] + h] += scores[k] > target
                tied[held_at[user] + h] += scores[k] == target
            tied[held_at[user] + h] -= 1  # not with itself
