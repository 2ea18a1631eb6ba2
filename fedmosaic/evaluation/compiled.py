"""Compiled counts of ranks. Imported where they are first used: Numba takes its time."""

from __future__ import annotations

from typing import Any

import numba


@numba.njit(cache=True)
def count(scores: Any, probe_at: Any, held_at: Any, above: Any, tied: Any) -> None:
    for user in range(held_at.size - 1):
        first, last = probe_at[user], probe_at[user + 1]
        n_held = held_at[user + 1] - held_at[user]
        for h in range(n_held):
            target = scores[first + h]
            for k in range(first, last):
                above[held_at[user] + h] += scores[k] > target
                tied[held_at[user] + h] += scores[k] == target
            tied[held_at[user] + h] -= 1  # not with itself
