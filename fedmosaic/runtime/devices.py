"""The device store: what stays on devices between rounds, at the cost of what was touched.

    user axis    one row per user               private/NAME            [users, ...]
    whole        one tensor per client          private/NAME            [clients, ...]
    item axis    rows a client has touched      private/NAME.keys       sorted client · items + item
                                                private/NAME.rows       their values; all others are as they began

The memory of persistent optimisers is stored the same way, under memory/NAME.0, memory/NAME.1, ...
A tuned copy of a server's table (PERSONALISED) is not stored at all: it is a function of what the device held and
received before its last round, so those are kept and the round is replayed when the copy is asked for.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.ragged import I64, Ragged
from fedmosaic.training import State
from fedmosaic.tree import F32, Axis, Spec

Array = npt.NDArray[Any]
MAP_FROM = 4 << 30  # bytes of one array from which it lives in a temporary file instead of memory


@dataclass(frozen=True, eq=False)
class Place:
    """Where a block of clients reads and writes: its clients, its users, and the items whose rows it holds."""

    clients: I64
    members: Ragged  # users of each client
    touched: Ragged  # items of each client
    n_items: int

    @property
    def users(self) -> I64:
        """All users of the block, client by client."""
        return self.members.values.astype(np.int64)

    @property
    def row_keys(self) -> I64:
        """client · items + item, for every row the block holds."""
        return self.clients[self.touched.rows] * self.n_items + self.touched.values

    def index(self, axis: Axis) -> I64:
        """Positions of the block along an axis of the store."""
        return self.users if axis is Axis.USER else self.clients


def allocate(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An array of zeros: in memory, or in an unnamed temporary file when it is very large."""
    if int(np.prod(shape)) * np.dtype(dtype).itemsize < MAP_FROM:
        return np.zeros(shape, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:  # the mapping outlives the name
        return np.memmap(Path(folder) / "store", dtype=dtype, mode="w+", shape=shape)


def first_rows(spec: Spec, seed: int, n_users: int, n_clients: int) -> F32:
    """Private parameters before the first round; item tables begin empty and need none."""
    count = n_users if spec.axis is Axis.USER else n_clients
    values: F32 = allocate((count, *spec.shape))
    for begin in range(0, count, 1 << 16):
        part = np.arange(begin, min(begin + (1 << 16), count))
        # A whole tensor begins the same on every client, as if the server had sent it.
        values[part] = spec.rows(seed, part if spec.axis is Axis.USER else np.zeros_like(part))
    return values


def read(state: State, name: str, spec: Spec, place: Place, fallback: Array) -> Array:
    """A block's copy of a stored tensor; `fallback` stands for item rows (and memory) never stored."""
    if spec.axis is not Axis.ITEM:
        stored = state.get(name)
        return fallback if stored is None else stored[place.index(spec.axis)]
    keys, result = state.get(f"{name}.keys"), fallback.copy()
    if keys is not None and keys.size:
        wanted = place.row_keys
        at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
        known = keys[at] == wanted
        result[known] = state[f"{name}.rows"][at[known]]
    return result


def write(
    state: dict[str, Array], name: str, spec: Spec, parts: list[tuple[Place, Array]], n_users: int, n_clients: int
) -> None:
    """Put the blocks' copies back; `state` is a fresh dict whose arrays are replaced, never changed in place."""
    if spec.axis is not Axis.ITEM:
        old = state.get(name)
        count = n_users if spec.axis is Axis.USER else n_clients
        new = allocate((count, *parts[0][1].shape[1:]), parts[0][1].dtype)
        if old is not None:
            new[:] = old
        for place, values in parts:
            new[place.index(spec.axis)] = values
        state[name] = new
        return
    keys = np.concatenate([place.row_keys for place, _ in parts])
    rows = np.concatenate([values for _, values in parts])
    order = np.argsort(keys)
    keys, rows = keys[order], rows[order]
    old_keys = state.get(f"{name}.keys")
    if old_keys is not None and old_keys.size:
        old_rows = state[f"{name}.rows"].copy()
        at = np.searchsorted(old_keys, keys)
        known = old_keys[np.minimum(at, old_keys.size - 1)] == keys
        old_rows[at[known]] = rows[known]
        keys = np.insert(old_keys, at[~known], keys[~known])
        rows = np.insert(old_rows, at[~known], rows[~known], axis=0) if not known.all() else old_rows
    state[f"{name}.keys"], state[f"{name}.rows"] = keys, rows
