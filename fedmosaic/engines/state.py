"""The state of a federation, as values with fields: what the server holds, what devices hold, what a replay needs.

Per-client state costs what was touched, never users × items × width:

    user axis    one row per user             an array [users, ...]
    whole        one tensor per client        an array [clients, ...]
    item axis    the rows a client trained    `Rows`: sorted keys client · items + item, and their values

A tuned copy of a server's table (PERSONALISED) is not stored at all: it is a function of what the device held and
received before its last round, so those are kept (`Replay`) and the round is run again when the copy is asked for.

Names in strings exist where a state is packed into a file: `pack` and `unpack`, at the end of this module.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import F32, Axis, Spec
from fedmosaic.core import buffers
from fedmosaic.core.errors import ForeignError, ScoreError
from fedmosaic.core.files import digest_of
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.secret import DeviceSecret
from fedmosaic.data.training_set import TrainingSet

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
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


@dataclass(frozen=True, eq=False)
class Rows:
    """Item rows that clients have trained; all others are as they began.

    Where decay reaches every row, `scale` [clients, 2] is what it has left of stored rows, and of all others.
    """

    keys: I64  # client · items + item, increasing
    values: Array
    scale: F32 | None = None

    def read(self, place: Place, fallback: Array) -> Array:
        """A block's own copy of its rows; `fallback` stands for what was never stored."""
        result, known = fallback.copy(), np.zeros(fallback.shape[0], dtype=bool)
        if self.keys.size:
            wanted = place.row_keys
            at = np.minimum(np.searchsorted(self.keys, wanted), self.keys.size - 1)
            known = self.keys[at] == wanted
            result[known] = self.values[at[known]]
        if self.scale is not None:
            owner = place.clients[place.touched.rows]
            factor = np.where(known, self.scale[owner, 0], self.scale[owner, 1])
            result *= factor.reshape(-1, *[1] * (result.ndim - 1))
        return result


Stored = Array | Rows  # a parameter on all devices


@dataclass(frozen=True, eq=False)
class DeviceStore:
    """What devices hold between rounds: parameters of their own, and the memory of optimisers that last."""

    params: Mapping[str, Stored] = field(default_factory=dict)
    memory: Mapping[str, tuple[Stored, ...]] = field(default_factory=dict)

    def dense(self, name: str) -> Array:
        """A parameter along the user axis, or a tensor per client."""
        value = self.params[name]
        assert not isinstance(value, Rows)
        return value

    def rows(self, name: str) -> Rows | None:
        """The rows of an item table, none if nobody has stored any yet."""
        value = self.params.get(name)
        assert value is None or isinstance(value, Rows)
        return value


@dataclass(frozen=True, eq=False)
class Piece:
    """A block's values of a parameter, to be stored."""

    axis: Axis
    place: Place
    values: Array
    shrunk: Array | None = None  # per client: what this round's decay has left of all its rows
    at: I64 | None = None  # where the rows lie among `values`, if not one after the other


@dataclass(frozen=True, eq=False)
class Kept:
    """What a block of clients keeps after a round."""

    params: Mapping[str, Piece] = field(default_factory=dict)
    memory: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)


def read(stored: Stored | None, axis: Axis, place: Place, fallback: Array) -> Array:
    """A block's own copy of a stored parameter."""
    if stored is None:
        return fallback.copy()
    if isinstance(stored, Rows):
        return stored.read(place, fallback)
    result: Array = stored[place.index(axis)]
    return result


def store(held: DeviceStore, kept: Sequence[Kept], data: TrainingSet) -> DeviceStore:
    """The device store with what blocks keep put in; arrays are replaced, never changed in place."""
    params, memory = dict(held.params), dict(held.memory)
    for name in {n for one in kept for n in one.params}:
        params[name] = _written(held.params.get(name), [one.params[name] for one in kept], data)
    for name in {n for one in kept for n in one.memory}:
        old = held.memory.get(name)
        pieces = zip(*(one.memory[name] for one in kept), strict=True)
        memory[name] = tuple(_written(old[i] if old else None, list(part), data) for i, part in enumerate(pieces))
    return DeviceStore(params, memory)


def _written(old: Stored | None, pieces: list[Piece], data: TrainingSet) -> Stored:
    first = pieces[0]
    if first.axis is Axis.ITEM:
        assert old is None or isinstance(old, Rows)
        return _merged(old, pieces, data.n_clients)
    assert not isinstance(old, Rows)
    count = data.n_users if first.axis is Axis.USER else data.n_clients
    new = allocate((count, *first.values.shape[1:]), first.values.dtype)
    if old is not None:
        new[:] = old
    for piece in pieces:
        new[piece.place.index(piece.axis)] = piece.values
    return new


def _merged(old: Rows | None, pieces: list[Piece], n_clients: int) -> Rows:
    """Rows with those of some blocks put in; with a scale, rows are stored relative to it."""
    from fedmosaic.engines.compiled import merge, union_size

    scale, fold = _rescaled(None if old is None else old.scale, pieces, n_clients)
    shape, n_items = pieces[0].values.shape[1:], pieces[0].place.n_items
    keys, rows, at = pieces[0].place.row_keys, pieces[0].values, pieces[0].at
    if len(pieces) > 1:
        keys = np.concatenate([piece.place.row_keys for piece in pieces])
        rows = np.concatenate([piece.values for piece in pieces])
    width, order = int(np.prod(shape)), np.argsort(keys)
    keys, where = keys[order], order if at is None else at[order]
    divisor = np.ones(1, dtype=rows.dtype) if scale is None else scale[keys // n_items, 0]
    if old is None:
        old = Rows(np.zeros(0, dtype=keys.dtype), np.zeros((0, *shape), dtype=rows.dtype))
    size = union_size(old.keys, keys)
    all_keys, all_rows = buffers.empty((size,), keys.dtype), buffers.empty((size, width), rows.dtype)
    before = (old.keys, old.values.reshape(-1, width), fold, n_items)
    merge(before, (keys, rows.reshape(-1, width), where, divisor), all_keys, all_rows)
    return Rows(all_keys, all_rows.reshape(-1, *shape), scale)


def _rescaled(old: F32 | None, pieces: list[Piece], n_clients: int) -> tuple[F32 | None, F32]:
    """What decay has left of every client's rows, and the factors to fold into stored rows.

    A factor that gets too small begins again at 1, and is folded into the client's stored rows.
    """
    if pieces[0].shrunk is None:
        return old, np.ones(n_clients, np.float32)
    scale = np.ones((n_clients, 2), dtype=np.float32) if old is None else old.copy()
    for piece in pieces:
        assert piece.shrunk is not None
        if (piece.shrunk <= 0).any():
            raise ScoreError("rate times weight decay is above 1, so that rows change sign; lower one of them")
        scale[piece.place.clients] *= piece.shrunk[:, None]
    small = scale[:, 0] < SMALL
    fold: F32 = np.where(small, scale[:, 0], np.float32(1))
    scale[small, 0] = 1
    return scale, fold


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
        values[part] = spec.rows(seed, data.ids_of(part) if spec.axis is Axis.USER else np.zeros_like(part))
    return values


def first_devices(algorithm: Algorithm, data: TrainingSet, seed: int) -> DeviceStore:
    """What devices hold before round 1."""
    names = [n for n in algorithm.stored if algorithm.specs[n].axis is not Axis.ITEM]
    return DeviceStore({n: first_rows(algorithm.specs[n], seed, data) for n in names})


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server holds: parameters, and the memory of its step rule for those that are sent to it."""

    params: Arrays
    memory: Mapping[str, tuple[Array, ...]]

    @classmethod
    def first(cls, algorithm: Algorithm, n_items: int, seed: int) -> ServerState:
        """What the server holds before round 1."""
        params = {n: algorithm.specs[n].table(seed, n_items) for n in algorithm.received}
        return cls(params, {n: algorithm.server.memory(params[n]) for n in algorithm.sent})

    def pack(self) -> dict[str, Array]:
        """Parameters and memory as named arrays, for a file."""
        rules = {f"rule/{n}.{i}": part for n, parts in self.memory.items() for i, part in enumerate(parts)}
        return {f"server/{n}": v for n, v in self.params.items()} | rules

    @classmethod
    def unpack(cls, algorithm: Algorithm, arrays: Arrays, n_items: int, what: str, memory: bool = True) -> ServerState:
        """Read `pack` back; parameters of another model or width are refused. `memory`: whether the rule's is there."""
        params = {}
        for name in algorithm.received:
            spec = algorithm.specs[name]
            shape = (n_items, *spec.shape) if spec.axis is Axis.ITEM else spec.shape
            params[name] = checked(arrays, f"server/{name}", shape, what)
        fresh = {n: algorithm.server.memory(params[n]) for n in algorithm.sent if memory}
        found = {
            n: tuple(checked(arrays, f"rule/{n}.{i}", part.shape, what) for i, part in enumerate(parts))
            for n, parts in fresh.items()
        }
        return cls(params, found)


@dataclass(frozen=True, eq=False)
class Replay:
    """What running a client's last round again needs: what it held before, and the tables that were sent then."""

    rounds: npt.NDArray[np.int32]  # whose tables are kept: every round that is some client's last
    received: Arrays  # [rounds, ...]
    before: Arrays  # [users or clients, ...]


def received_digest(algorithm: Algorithm, params: Arrays) -> str:
    """Digest of what a device received at the beginning of a round."""
    return digest_of({name: params[name] for name in algorithm.received})


@dataclass(frozen=True, eq=False)
class FederationState:
    """Server and devices between two rounds."""

    seed: int
    n_items: int
    server: ServerState
    devices: DeviceStore
    last: npt.NDArray[np.int32]  # per client, the round of its last participation (0: never)
    replay: Replay | None = None
    answers: Array | None = None  # to a query, where tuned copies answered it
    asked: Ragged | None = None  # that query; a state that was read from a file goes on with the query of its run
    secret: DeviceSecret | None = None  # of the device whose state this is: a replay needs its draws; never packed

    def pack(self) -> dict[str, Array]:
        """As named arrays, for a file."""
        arrays = {"seed": np.array([self.seed]), "n_items": np.array([self.n_items]), "last": self.last}
        arrays |= self.server.pack() | pack_devices(self.devices)
        if self.replay is not None:
            arrays |= {"given.round": self.replay.rounds}
            arrays |= {f"given/{n}": v for n, v in self.replay.received.items()}
            arrays |= {f"before/{n}": v for n, v in self.replay.before.items()}
        return arrays if self.answers is None else arrays | {"answers": self.answers}

    @classmethod
    def unpack(cls, algorithm: Algorithm, arrays: Arrays, what: str, memory: bool = True) -> FederationState:
        """Read `pack` back; a state of another method or width is refused by name. A node has no server's `memory`."""
        seed, n_items = (int(checked(arrays, n, (1,), what)[0]) for n in ("seed", "n_items"))
        given = _under("given/", arrays)
        replay = Replay(arrays["given.round"], given, _under("before/", arrays)) if given else None
        last = arrays.get("last")
        if last is None:
            raise ForeignError(f"{what} does not say when clients last took part; it belongs to another method")
        return cls(
            seed,
            n_items,
            ServerState.unpack(algorithm, arrays, n_items, what, memory),
            unpack_devices(algorithm, arrays, what),
            last,
            replay,
            arrays.get("answers"),
        )


def pack_devices(devices: DeviceStore) -> dict[str, Array]:
    """A device store as named arrays."""
    arrays: dict[str, Array] = {}
    for name, stored in devices.params.items():
        arrays |= _packed(f"private/{name}", stored)
    for name, parts in devices.memory.items():
        for i, part in enumerate(parts):
            arrays |= _packed(f"memory/{name}.{i}", part)
    return arrays


def unpack_devices(algorithm: Algorithm, arrays: Arrays, what: str) -> DeviceStore:
    """Read `pack_devices` back; parameters that the algorithm does not keep, or of another width, are refused."""
    params: dict[str, Stored] = {}
    for name in algorithm.stored:
        stored = _unpacked(f"private/{name}", arrays)
        if stored is None:
            if algorithm.specs[name].axis is Axis.ITEM:
                continue  # nobody has trained a row yet
            raise ForeignError(f"{what} holds no {name!r} of its devices; it belongs to another method")
        width = (stored.values if isinstance(stored, Rows) else stored).shape[1:]
        if width != algorithm.specs[name].shape:
            raise ForeignError(
                f"{what} holds {name!r} of width {width}; this method's is {algorithm.specs[name].shape}"
            )
        params[name] = stored
    memory: dict[str, tuple[Stored, ...]] = {}
    for name in (n for move in algorithm.moves if move.rule.persistent for n in move.names):
        found: list[Stored] = []
        while (part := _unpacked(f"memory/{name}.{len(found)}", arrays)) is not None:
            found.append(part)
        if found:
            memory[name] = tuple(found)
    return DeviceStore(params, memory)


def checked(arrays: Arrays, name: str, shape: tuple[int, ...], what: str) -> Array:
    """A named array of a known shape."""
    value = arrays.get(name)
    if value is None:
        raise ForeignError(f"{what} holds no {name!r}; it belongs to another method")
    if value.shape != shape:
        raise ForeignError(f"{what} holds {name!r} of shape {value.shape}; this method's is {shape}")
    return value


def _under(prefix: str, arrays: Arrays) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _packed(name: str, stored: Stored) -> dict[str, Array]:
    if not isinstance(stored, Rows):
        return {name: stored}
    scale = {} if stored.scale is None else {f"{name}.scale": stored.scale}
    return {f"{name}.keys": stored.keys, f"{name}.rows": stored.values, **scale}


def _unpacked(name: str, arrays: Arrays) -> Stored | None:
    if f"{name}.keys" in arrays:
        return Rows(arrays[f"{name}.keys"], arrays[f"{name}.rows"], arrays.get(f"{name}.scale"))
    return arrays.get(name)
