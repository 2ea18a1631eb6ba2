"""The device store: what stays on devices between rounds, at the cost of what was touched.

    user axis    one row per user               private/NAME            [users, ...]
    whole        one tensor per client          private/NAME            [clients, ...]
    item axis    rows a client has touched      private/NAME.keys       sorted client · items + item
                                                private/NAME.rows       their values; all others are as they began
                                                private/NAME.scale      [clients, 2] where decay reaches every row: what
                                                                        it has left of stored rows, of all others

Tables that are sent as well (KEPT) are stored likewise, under kept/NAME. The memory of persistent optimisers is stored
the same way, under memory/NAME.0, memory/NAME.1, ...
A tuned copy of a server's table (PERSONALISED) is not stored at all: it is a function of what the device held and
received before its last round, so those are kept and the round is replayed when the copy is asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.parameters import F32, Axis, Spec
from fedmosaic.core import buffers
from fedmosaic.core.errors import ScoreError
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.training.method import State

Array = npt.NDArray[Any]
SMALL = np.float32(1e-12)  # below it, what decay has left is multiplied into the stored rows
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


Stored = tuple[Axis, Place, Array]  # a block's values of a stored tensor


def allocate(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An array of zeros: in memory, or in an unnamed temporary file when it is very large."""
    if int(np.prod(shape)) * np.dtype(dtype).itemsize < MAP_FROM:
        return np.zeros(shape, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:  # the mapping outlives the name
        return np.memmap(Path(folder) / "store", dtype=dtype, mode="w+", shape=shape)


def first_rows(spec: Spec, seed: int, data: TrainingSet) -> F32:
    """Private parameters before the first round; item tables begin empty and need none."""
    count = data.n_users if spec.axis is Axis.USER else data.n_clients
    values: F32 = allocate((count, *spec.shape))
    for begin in range(0, count, 1 << 16):
        part = np.arange(begin, min(begin + (1 << 16), count))
        # A whole tensor begins the same on every client, as if the server had sent it.
        values[part] = spec.rows(seed, data.number(part) if spec.axis is Axis.USER else np.zeros_like(part))
    return values


def read(state: State, name: str, axis: Axis, place: Place, fallback: Array) -> Array:
    """A block's own copy of a stored tensor; `fallback` stands for what was never stored."""
    if axis is not Axis.ITEM:
        stored = state.get(name)
        return fallback.copy() if stored is None else stored[place.index(axis)]
    keys, result = state.get(f"{name}.keys"), fallback.copy()
    if keys is not None and keys.size:
        wanted = place.row_keys
        at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
        known = keys[at] == wanted
        result[known] = state[f"{name}.rows"][at[known]]
    else:
        known = np.zeros(result.shape[0], dtype=bool)
    scale = state.get(f"{name}.scale")
    if scale is not None:
        owner = place.clients[place.touched.rows]
        factor = np.where(known, scale[owner, 0], scale[owner, 1])
        result *= factor.reshape(-1, *[1] * (result.ndim - 1))
    return result


def write(
    state: dict[str, Array], held: Mapping[str, list[Stored]], n_users: int, n_clients: int, apart: I64 | None = None
) -> None:
    """Put the blocks' copies back; `state` is a fresh dict whose arrays are replaced, never changed in place.

    Where there is one block, its rows of items may lie `apart`, at the given places of a longer array.
    """
    for name, parts in held.items():
        if name.endswith(".scale"):
            continue
        if parts[0][0] is Axis.ITEM:
            factors = held.get(f"{name}.scale")
            fold = np.ones(n_clients, np.float32) if factors is None else _rescale(state, name, factors, n_clients)
            _write_rows(state, name, parts, fold, apart)
            continue
        old, (axis, _, first) = state.get(name), parts[0]
        new = allocate((n_users if axis is Axis.USER else n_clients, *first.shape[1:]), first.dtype)
        if old is not None:
            new[:] = old
        for _, place, values in parts:
            new[place.index(axis)] = values
        state[name] = new


def _rescale(state: dict[str, Array], name: str, factors: list[Stored], n_clients: int) -> F32:
    """Let decay act on every row by one factor per client. One that gets too small begins again at 1: it is returned,
    to be folded into the client's stored rows."""
    old = state.get(f"{name}.scale")
    scale = np.ones((n_clients, 2), dtype=np.float32) if old is None else old.copy()
    for _, place, factor in factors:
        if (factor <= 0).any():
            raise ScoreError("rate times weight decay is above 1, so that rows change sign; lower one of them")
        scale[place.clients] *= factor[:, None]
    small = scale[:, 0] < SMALL
    fold: F32 = np.where(small, scale[:, 0], np.float32(1))
    scale[small, 0] = 1
    state[f"{name}.scale"] = scale
    return fold


def _write_rows(state: dict[str, Array], name: str, parts: list[Stored], fold: F32, apart: I64 | None) -> None:
    """Merge touched rows into the sorted store; with a scale, rows are stored relative to it."""
    shape, scale, n_items = parts[0][2].shape[1:], state.get(f"{name}.scale"), parts[0][1].n_items
    keys, rows = parts[0][1].row_keys, parts[0][2]
    if len(parts) > 1:
        keys = np.concatenate([place.row_keys for _, place, _ in parts])
        rows = np.concatenate([values for _, _, values in parts])
    width, order = int(np.prod(shape)), np.argsort(keys)
    keys, where = keys[order], order if apart is None else apart[order]
    divisor = np.ones(1, dtype=rows.dtype)
    if scale is not None:
        divisor = scale[keys // n_items, 0]
    old_keys = state.get(f"{name}.keys", np.zeros(0, dtype=keys.dtype))
    old_rows = state.get(f"{name}.rows", np.zeros((0, *shape), dtype=rows.dtype))
    size = _size(old_keys, keys)
    all_keys, all_rows = buffers.empty((size,), keys.dtype), buffers.empty((size, width), rows.dtype)
    old = (old_keys, old_rows.reshape(-1, width), fold, n_items)
    _merge(*old, keys, rows.reshape(-1, width), where, divisor, all_keys, all_rows)
    state[f"{name}.keys"], state[f"{name}.rows"] = all_keys, all_rows.reshape(-1, *shape)


@numba.njit(cache=True)
def _size(old_keys: Any, keys: Any) -> Any:
    """How many keys two sorted lists have together."""
    size, a = old_keys.size, 0
    for b in range(keys.size):
        k = keys[b]
        while a < old_keys.size and old_keys[a] < k:
            a += 1
        size += a == old_keys.size or old_keys[a] != k
    return size


@numba.njit(cache=True)
def _merge(
    old_keys: Any, old_rows: Any, fold: Any, n_items: Any, keys: Any, rows: Any, where: Any, divisor: Any,
    all_keys: Any, all_rows: Any,
) -> None:  # fmt: skip
    """Union of two keyed tables, the second (its rows lie at `where`, and are divided) winning; one pass, one copy.

    Rows of the first are multiplied by what their client's decay leaves of them.
    """
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
