"""What travels between a server and its nodes: a task down, an update up. Bytes are safetensors with a JSON header.

A node is a device (one user) or a silo (many). A task carries the server's parameters, whole or (`base`) as the rows
that changed since a version the node said it holds. An update carries the sum of what the node's clients send, and
nothing else of them:

    NAME                    every row                                      support dense, and whole tensors
    NAME.rows, NAME         rows with examples, increasing, and their changes       touched; padded with other rows
    touched                 per row, how many clients trained it           only where the server divides by it

One client without noise sends float32, which the server turns into fixed point without loss; sums of many clients, and
sums with noise, are in fixed point already. `Rules.open_sum` is the only way in: it checks everything before it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum, add_rows, padded_count
from fedmosaic.core.errors import FedmosaicError, RunError, ScoreError
from fedmosaic.core.files import pack, unpack
from fedmosaic.core.fixed_point import LIMIT, SCALE
from fedmosaic.core.ragged import I64
from fedmosaic.engines.state import Array

VERSION = 2  # 1 told the loss and how long the work took, which tell how much there was
WHOLE = -1  # the base of a task that carries everything
LARGEST_SUM = float(1 << 22)  # of a node: a thousand of them stay far from the edge of 64 bits

RefusalKind = Literal[
    "damaged", "protocol", "federation", "round", "duplicate", "late", "clients", "tensors", "dtype", "shape", "ids",
    "quota", "finite", "norm", "resync", "failed", "least",
]  # fmt: skip


class Refused(FedmosaicError):  # noqa: N818  (what it is, rather than an error of ours)
    """A message that does not count, and why; the round goes on without it."""

    def __init__(self, reason: RefusalKind, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RefusalKind = reason
        self.detail = detail

    def line(self) -> dict[str, str]:
        """Reason and detail, as a line of a log has them."""
        return {"reason": self.reason, "detail": self.detail}


@dataclass(frozen=True, eq=False)
class TaskMessage:
    """Work for a node: round, who of its clients takes part, and the server's parameters."""

    federation: str  # digest of what everybody agreed on
    round: int
    attempt: str  # nobody else knows it: an answer repeats it
    seed: int
    version: int  # the committed round these parameters are the outcome of
    stamp: str  # digest of all parameters of that version
    clients: I64  # numbers
    tensors: Mapping[str, Array]  # NAME, or NAME.rows and NAME
    base: int = WHOLE
    upload: bool = True  # else the node takes the parameters (a new one adapts to them) and sends nothing

    def encode(self) -> bytes:
        """The message as bytes."""
        return pack({**self.tensors, "clients": self.clients}, _header(self, "task"))

    @staticmethod
    def decode(content: bytes) -> TaskMessage:
        """Read bytes; refused unless they are a whole task of this protocol."""
        tensors, head = _opened(content, "task", TASK)
        clients = tensors.pop("clients", None)
        if clients is None or clients.dtype != np.int64 or clients.ndim != 1:
            raise Refused("tensors", "it does not say whom it asks")
        return TaskMessage(**head, clients=clients, tensors=tensors)


@dataclass(frozen=True, eq=False)
class UpdateMessage:
    """A node's answer. `resync` asks for whole parameters; `failed` says why there is nothing."""

    federation: str
    round: int
    attempt: str
    status: Literal["done", "resync", "failed"]
    version: int  # which the node now holds
    clients: int = 0
    shrink: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""
    tensors: Mapping[str, Array] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The message as bytes."""
        return pack(self.tensors, _header(self, "update"))

    @staticmethod
    def decode(content: bytes) -> UpdateMessage:
        """Read bytes; refused unless they are a whole update of this protocol."""
        tensors, head = _opened(content, "update", UPDATE)
        if head["status"] not in ("done", "resync", "failed"):
            raise Refused("protocol", "its status is none of done, resync, failed")
        return UpdateMessage(**head, tensors=tensors)


# What headers hold; JSON can bring anything.
TASK = {
    "federation": str, "round": int, "attempt": str, "seed": int, "version": int, "stamp": str, "base": int,
    "upload": bool,
}  # fmt: skip
UPDATE = {
    "federation": str, "round": int, "attempt": str, "status": str, "version": int, "clients": int, "shrink": dict,
    "detail": str,
}  # fmt: skip


def _header(value: TaskMessage | UpdateMessage, kind: str) -> dict[str, Any]:
    left_out = ("tensors",) if isinstance(value, UpdateMessage) else ("tensors", "clients")
    return {"protocol": VERSION, "kind": kind, **{k: v for k, v in vars(value).items() if k not in left_out}}


def _opened(content: bytes, kind: str, types: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        tensors, head = unpack(content, f"a message of {len(content)} bytes")
    except RunError as error:
        raise Refused("damaged", str(error)) from None
    if head.pop("protocol", None) != VERSION or head.pop("kind", None) != kind:
        raise Refused("protocol", f"not a {kind} of protocol {VERSION}")
    if set(head) != set(types):
        raise Refused("protocol", f"its header has other fields: {', '.join(sorted(set(head) ^ set(types)))[:200]}")
    for name, expected in types.items():
        value = head[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise Refused("protocol", f"{name} in its header is of the wrong type")
    return tensors, head


@dataclass(frozen=True)
class Reply:
    """What came back for a message that was sent: bytes, or the transport's reason why there are none."""

    message: str
    content: bytes | None
    error: str = ""


class Transport(Protocol):
    """Carries bytes to nodes and back, in any order, or not at all."""

    def nodes(self) -> Iterable[str]:
        """Names of the nodes that can be reached now."""
        ...

    def send(self, node: str, content: bytes, seconds: float) -> str:
        """Hand a task over, worth so many seconds; returns the message's name."""
        ...

    def receive(self) -> list[Reply]:
        """What has come in since."""
        ...


def changed_since(base: int, tensors: Mapping[str, Array], moved: Mapping[str, Array]) -> dict[str, Array]:
    """Parameters for a node that holds version `base`: of item tables the rows that moved since; all, if that is less.

    `moved` has, for every row of an item table, the version in which it moved last.
    """
    result: dict[str, Array] = {}
    for name, value in tensors.items():
        rows = np.flatnonzero(moved[name] > base).astype(np.int32) if name in moved else None
        if rows is None or rows.size * (value[:1].nbytes + rows.itemsize) >= value.nbytes:
            result[name] = value
        else:
            result |= {f"{name}.rows": rows, name: value[rows]}
    return result


def brought_up(algorithm: Algorithm, n_items: int, held: Mapping[str, Array], task: TaskMessage) -> dict[str, Array]:
    """The server's parameters on the node: what it held, with the rows of the task put in; shapes are checked."""
    result: dict[str, Array] = {}
    for name in algorithm.received:
        value, rows, spec = task.tensors.get(name), task.tensors.get(f"{name}.rows"), algorithm.specs[name]
        shape = (n_items, *spec.shape) if spec.axis is Axis.ITEM else spec.shape
        if value is None or value.dtype != np.float32:
            raise Refused("tensors", f"{name} is missing or not of float32")
        if rows is None:
            result[name] = value
        else:
            known = held.get(name)
            fits = rows.dtype == np.int32 and rows.ndim == 1 and value.shape == (rows.size, *spec.shape)
            if known is None or not fits or (rows.size and (rows.min() < 0 or rows.max() >= n_items)):
                raise Refused("ids", f"the rows of {name} do not fit")
            result[name] = known.copy()
            result[name][rows] = value
        if result[name].shape != shape:
            raise Refused("shape", f"{name} has shape {result[name].shape}, not {shape}")
    return result


def put_sum(algorithm: Algorithm, total: UploadSum, ctx: Context) -> dict[str, Array]:
    """A node's sum as the tensors of an update; the round's context draws the rows that pad."""
    upload = algorithm.upload
    tensors: dict[str, Array] = {}
    exact = total.clients == 1 and upload.noise is None
    for name, value in total.totals.items():
        sent: Array = (value / SCALE).astype(np.float32) if exact else value
        if algorithm.specs[name].axis is Axis.ITEM and upload.support in ("touched", "padded"):
            rows = np.flatnonzero(total.touched).astype(np.int32)
            if upload.support == "padded":
                rows = padded(rows, value.shape[0], ctx)
            tensors[f"{name}.rows"], sent = rows, sent[rows]
        tensors[name] = sent
    if algorithm.server.reduction.counts_senders:
        tensors["touched"] = total.touched.astype(np.int32)
    return tensors


def padded(rows: npt.NDArray[np.int32], n_items: int, ctx: Context) -> npt.NDArray[np.int32]:
    """Rows and others beside them, up to the next power of two: the size of a message then tells little.

    >>> padded(np.array([3, 5, 8], dtype=np.int32), 100, Context(1, 0, 100, 1)).size
    64
    """
    others = np.setdiff1d(np.arange(n_items, dtype=np.int32), rows)
    more = padded_count(rows.size, n_items) - rows.size
    stream = ctx.noise("padding")
    if stream is None:
        chosen = np.random.default_rng(abs(ctx.own_seed)).choice(others, more, replace=False)
    else:
        chosen = others[stream.some_of(others.size, more)]
    return np.sort(np.concatenate([rows, chosen])).astype(np.int32)


@dataclass(frozen=True)
class Rules:
    """What an update must be like to count."""

    algorithm: Algorithm
    n_items: int
    largest_norm: float | None = None  # of all a client sends
    row_quota: int | None = None  # rows a client may send

    def open_sum(self, update: UpdateMessage, server: Mapping[str, Array]) -> UploadSum:
        """The sum an update carries, every tensor checked; `Refused` names the first thing that is wrong.

        `server` has the parameters the update is about: a share of decay moves all of their rows.
        """
        names, left = self.algorithm.sent, dict(update.tensors)
        totals, square = {}, 0.0
        touched = np.zeros(self.n_items, dtype=np.int64)
        if self.algorithm.server.reduction.counts_senders:
            touched = self._touched(update, left)
        for name in names:
            rows = self._rows(name, left)
            value = left.pop(name, None)
            if value is None:
                raise Refused("tensors", f"{name} is missing")
            totals[name] = self._total(name, value, rows, update.clients)
            square += float(np.square(totals[name] / SCALE).sum())
            self._check_quota(name, totals[name], update.clients)
            if rows is not None and not self.algorithm.server.reduction.counts_senders:
                touched[rows] = 1
        if left:
            raise Refused("tensors", f"{', '.join(sorted(left))} were not asked for")
        shrink = self._shrink(update)
        square += sum(float(np.square(server[n]).sum()) * (s / SCALE) ** 2 for n, s in shrink.items())
        if self.largest_norm is not None and square > (self.largest_norm * update.clients) ** 2:
            raise Refused("norm", f"norm {square**0.5:.3g} of {update.clients} clients; {self.largest_norm:g} each")
        return UploadSum(totals, touched, update.clients, 0, 0.0, shrink)

    def _rows(self, name: str, left: dict[str, Array]) -> Array | None:
        rows = left.pop(f"{name}.rows", None)
        sparse = self.algorithm.specs[name].axis is Axis.ITEM and self.algorithm.upload.support in ("touched", "padded")
        if sparse != (rows is not None):
            raise Refused("tensors", f"{name}.rows " + ("is missing" if sparse else "was not asked for"))
        if rows is None:
            return None
        if rows.dtype != np.int32 or rows.ndim != 1:
            raise Refused("dtype", f"{name}.rows is {rows.dtype} of shape {rows.shape}, not a list of int32")
        if rows.size and (rows.min() < 0 or rows.max() >= self.n_items or (rows[1:] <= rows[:-1]).any()):
            raise Refused("ids", f"{name}.rows must increase and lie in 0 .. {self.n_items - 1}")
        return rows

    def _check_quota(self, name: str, total: I64, clients: int) -> None:
        if self.row_quota is None or self.algorithm.specs[name].axis is not Axis.ITEM or self._noisy:
            return
        moved = int(total.reshape(self.n_items, -1).any(1).sum())
        if moved > self.row_quota * clients:
            raise Refused("quota", f"{moved} rows of {clients} clients; {self.row_quota} each")

    @property
    def _noisy(self) -> bool:
        return self.algorithm.upload.noise is not None

    def _total(self, name: str, value: Array, rows: Array | None, clients: int) -> I64:
        spec, exact = self.algorithm.specs[name], clients == 1 and not self._noisy
        dtype = np.dtype(np.float32 if exact else np.int64)
        if value.dtype != dtype:
            raise Refused("dtype", f"{name} is {value.dtype}, not {dtype}")
        row, item = self.algorithm.upload.shape(spec), spec.axis is Axis.ITEM
        shape = (self.n_items if rows is None else rows.size, *row) if item else row
        if value.shape != shape:
            raise Refused("shape", f"{name} has shape {value.shape}, not {shape}")
        total = np.zeros((self.n_items, *row) if item else (1, *row), dtype=np.int64)
        at = np.arange(value.shape[0] if item else 1, dtype=np.int32) if rows is None else rows
        if not exact:
            limit = int(min(clients * LIMIT, LARGEST_SUM) * SCALE)
            if value.size and (int(value.max()) >= limit or int(value.min()) <= -limit):
                raise Refused("finite", f"{name} holds values that no healthy training reaches")
            total[at] = value if item else value[None]
        else:
            try:
                add_rows(total, at, value if item else value[None])
            except ScoreError:
                raise Refused("finite", f"{name} holds NaN or values that no healthy training reaches") from None
        return total if item else total[0]

    def _touched(self, update: UpdateMessage, left: dict[str, Array]) -> I64:
        value = left.pop("touched", None)
        if value is None or value.dtype != np.int32 or value.shape != (self.n_items,):
            raise Refused("tensors", "the counts of senders are missing or of another shape")
        if value.size and (value.min() < 0 or value.max() > update.clients):
            raise Refused("ids", "a row cannot have more senders than there are clients")
        return value.astype(np.int64)

    def _shrink(self, update: UpdateMessage) -> dict[str, int]:
        allowed = set(self.algorithm.spread)
        if set(update.shrink) != allowed:
            raise Refused("tensors", f"shares of decay for {sorted(update.shrink)}, expected {sorted(allowed)}")
        for name, value in update.shrink.items():
            if type(value) is not int or not -update.clients * SCALE <= value <= 0:
                raise Refused("finite", f"{name} decayed by an impossible share")
        return dict(update.shrink)
