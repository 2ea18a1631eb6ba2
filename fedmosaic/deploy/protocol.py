"""What travels between a server and its nodes: a task down, an update up. Bytes are safetensors with a JSON header.

A node is a device (one user) or a silo (many). A task carries the server's parameters, whole or (`base`) as the rows
that changed since a version the node said it holds. By default (`secure` of the agreement) it names the parties of a
secure sum, the update carries masked numbers and sealed letters (`masked`), and a second exchange opens the sum:

    reveal          who arrived, and the letters of neighbours           down
    opening         shares of seeds                                      up

Where the agreement says that uploads are plain, an update carries the sum of what the node's clients send, and nothing
else of them: `plain.py` says in which form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.core.errors import FedmosaicError, RunError
from fedmosaic.core.files import header_of, pack, unpack
from fedmosaic.core.ragged import I64
from fedmosaic.engines.state import Array
from fedmosaic.privacy.secure_sum import Opening

VERSION = 3  # 1 told the loss and how long the work took, which tell how much there was; 2 had no masks
LARGEST_NUMBER, LARGEST_ROUND = 1 << 62, 1 << 31
SEED, SHARE = 16, 17  # bytes of a seed and of a share of one, as `privacy/secure_sum.py` has them
WHOLE = -1  # the base of a task that carries everything

Bytes = npt.NDArray[np.uint8]
NOBODY, NO_BYTES = np.zeros(0, np.int64), np.zeros((0, 32), np.uint8)

RefusalKind = Literal[
    "damaged", "protocol", "federation", "round", "duplicate", "late", "clients", "tensors", "dtype", "shape", "ids",
    "quota", "finite", "norm", "resync", "failed", "least", "unmasked", "cohort", "key", "opened", "budget",
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
    ends: bool = False  # whether all rounds are over, and this is their outcome
    parties: I64 = field(default_factory=lambda: NOBODY)  # of a secure sum, ascending; none: of no such sum
    publics: Bytes = field(default_factory=lambda: NO_BYTES)  # keys of the node's neighbours among them, a row each

    def encode(self) -> bytes:
        """The message as bytes."""
        sum_of: dict[str, Array] = {"parties": self.parties, "publics": self.publics} if self.parties.size else {}
        return pack({**self.tensors, **sum_of, "clients": self.clients}, _header(self, "task"))

    @staticmethod
    def decode(content: bytes) -> TaskMessage:
        """Read bytes; refused unless they are a whole task of this protocol."""
        tensors, head = _opened(content, "task", TASK)
        clients = _listed(tensors, "clients")
        sum_of: dict[str, Any] = {}
        if "parties" in tensors:
            sum_of = {"parties": _listed(tensors, "parties"), "publics": _bytes_of(tensors, "publics", 32)}
            if (np.diff(sum_of["parties"]) <= 0).any():
                raise Refused("tensors", "its parties are not different and ascending")
        return TaskMessage(**head, clients=clients, tensors=tensors, **sum_of)


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


@dataclass(frozen=True, eq=False)
class RevealMessage:
    """The second half of a secure sum: who arrived, and what their letters to this node are."""

    federation: str
    round: int
    attempt: str
    arrived: I64
    senders: I64  # neighbours of the node that arrived
    letters: Bytes  # of each of them, a row each

    def encode(self) -> bytes:
        """The message as bytes."""
        return pack({n: getattr(self, n) for n in ("arrived", "senders", "letters")}, _header(self, "reveal"))

    @staticmethod
    def decode(content: bytes) -> RevealMessage:
        """Read bytes; refused unless they are a whole one of this protocol."""
        tensors, head = _opened(content, "reveal", REVEAL)
        arrived, senders, letters = (
            _listed(tensors, "arrived"),
            _listed(tensors, "senders"),
            _bytes_of(tensors, "letters"),
        )
        if tensors or len(letters) != senders.size:
            raise Refused("tensors", "it does not have a letter of every sender, or more than letters")
        return RevealMessage(**head, arrived=arrived, senders=senders, letters=letters)


@dataclass(frozen=True, eq=False)
class OpeningMessage:
    """A node's shares: of own seeds of who arrived, seeds with who did not, shares of such seeds of its neighbours."""

    federation: str
    round: int
    attempt: str
    own_of: I64
    own: Bytes
    lost_of: I64
    lost: Bytes
    theirs_of: I64  # pairs (neighbour that arrived, its neighbour that did not), one after the other
    theirs: Bytes

    @staticmethod
    def of(task: RevealMessage, opening: Opening) -> OpeningMessage:
        """As tensors."""
        shares = {n: _packed(getattr(opening, n).values()) for n in ("own", "theirs")}
        lost = np.frombuffer(b"".join(opening.lost.values()), np.uint8).reshape(-1, SEED)
        return OpeningMessage(
            task.federation, task.round, task.attempt, np.array(list(opening.own), np.int64), shares["own"],
            np.array(list(opening.lost), np.int64), lost,
            np.array(list(opening.theirs), np.int64).reshape(-1), shares["theirs"],
        )  # fmt: skip

    def opening(self) -> Opening:
        """As the secure sum has it."""
        own = dict(zip(self.own_of.tolist(), map(_number, self.own), strict=True))
        lost = {int(d): seed.tobytes() for d, seed in zip(self.lost_of, self.lost, strict=True)}
        pairs = [(int(i), int(d)) for i, d in self.theirs_of.reshape(-1, 2)]
        return Opening(own, lost, dict(zip(pairs, map(_number, self.theirs), strict=True)))

    def encode(self) -> bytes:
        """The message as bytes."""
        names = ("own_of", "own", "lost_of", "lost", "theirs_of", "theirs")
        return pack({n: getattr(self, n) for n in names}, _header(self, "opening"))

    @staticmethod
    def decode(content: bytes) -> OpeningMessage:
        """Read bytes; refused unless they are a whole one of this protocol."""
        tensors, head = _opened(content, "opening", REVEAL)
        lists: dict[str, Any] = {n: _listed(tensors, n) for n in ("own_of", "lost_of", "theirs_of")}
        widths = {"own": SHARE, "lost": SEED, "theirs": SHARE}
        found: dict[str, Any] = {n: _bytes_of(tensors, n, width) for n, width in widths.items()}
        sizes = [lists["own_of"].size, lists["lost_of"].size, lists["theirs_of"].size / 2]
        if tensors or sizes != [len(found[n]) for n in ("own", "lost", "theirs")]:
            raise Refused("tensors", "its shares do not fit to whose they are")
        return OpeningMessage(**head, **lists, **found)


def kind_of(content: bytes) -> str:
    """What a message says that it is; an empty text where it cannot be read."""
    try:
        return str(header_of(content).get("kind", ""))
    except RunError:
        return ""


def _packed(shares: Iterable[int]) -> Bytes:
    return np.frombuffer(b"".join(s.to_bytes(SHARE, "big") for s in shares), np.uint8).reshape(-1, SHARE)


def _number(share: Bytes) -> int:
    return int.from_bytes(share.tobytes(), "big")


# What headers hold; JSON can bring anything.
TASK = {
    "federation": str, "round": int, "attempt": str, "seed": int, "version": int, "stamp": str, "base": int,
    "upload": bool, "ends": bool,
}  # fmt: skip
REVEAL = {"federation": str, "round": int, "attempt": str}
UPDATE = {
    "federation": str, "round": int, "attempt": str, "status": str, "version": int, "clients": int, "shrink": dict,
    "detail": str,
}  # fmt: skip


def _header(value: Any, kind: str) -> dict[str, Any]:
    kept = {"task": TASK, "update": UPDATE}.get(kind, REVEAL)
    return {"protocol": VERSION, "kind": kind, **{k: v for k, v in vars(value).items() if k in kept}}


def _listed(tensors: dict[str, Array], name: str) -> I64:
    value = tensors.pop(name, None)
    if value is None or value.dtype != np.int64 or value.ndim != 1:
        raise Refused("tensors", f"{name} is missing or no list of numbers")
    return value


def _bytes_of(tensors: dict[str, Array], name: str, width: int | None = None) -> Bytes:
    value = tensors.pop(name, None)
    if value is None or value.dtype != np.uint8 or value.ndim != 2 or (width is not None and value.shape[1] != width):
        raise Refused("tensors", f"{name} is missing or of another shape")
    return value


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
        limit = LARGEST_ROUND if name in ("round", "version", "base") else LARGEST_NUMBER
        if isinstance(value, int) and not -limit < value < limit:
            raise Refused("protocol", f"{name} in its header is no number that this protocol has")
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
