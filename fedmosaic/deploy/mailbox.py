"""Messages between a server's rounds and the nodes that ask for them: what is out, what has come, who is there.

A node is asked one thing at a time. A message that was handed out and not answered is handed out again when its node
asks anew: the node has lost it, or died. Parts of an answer are kept until it is whole, so a node that was cut off
sends only what is missing. Nothing here is on disk: a server that dies begins its open round again.

>>> box = Mailbox(lambda: {"phone"})
>>> name = box.send("phone", b"a task", 60.0)
>>> box.next("phone").content(), box.receive()
(b'a task', [])
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fedmosaic.deploy.flower import PART, Packet, digest, names
from fedmosaic.deploy.protocol import Reply

THERE = 45.0  # seconds after its last call that a node counts as there: twice as long as its calls are held
GRACE = 2.0  # seconds that a node whose line was cut has for calling again
MOST = 4 << 30  # bytes of an answer
REPEATED = 256 << 20  # bytes of it that parts which are named again may stand for: they cost their sender nothing


@dataclass
class Out:
    """A message that is out, and what has come back for it."""

    packet: Packet
    node: str
    until: float
    order: tuple[str, ...] = ()  # of the answer's parts
    parts: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Contact:
    """A node's last call, and how many of its calls are held."""

    last: float
    held: int = 0


class Mailbox:
    """A transport (`protocol.Transport`) to rounds, and the other side of it to the gate; called from any thread.

    admitted: names of the nodes that are, now. clock: seconds.
    """

    def __init__(self, admitted: Callable[[], Container[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self.admitted, self.clock = admitted, clock
        self.wake: Callable[[str], None] = lambda node: None  # called when a node's message is there
        self.bytes_in = self.bytes_out = 0
        self._lock = threading.RLock()
        self._out: dict[str, Out] = {}  # by node
        self._seen: dict[str, Contact] = {}
        self._ready: list[Reply] = []

    # the side of the rounds

    def nodes(self) -> list[str]:
        """Admitted nodes that are there: they called a short time ago, or are at work on a message."""
        with self._lock:
            now, admitted = self.clock(), self.admitted()
            return [n for n, s in self._seen.items() if n in admitted and (s.held or now - s.last < THERE)]

    def send(self, node: str, content: bytes, seconds: float) -> str:
        """Hand a message out; it is forgotten when its time is over."""
        name = secrets.token_hex(16)
        with self._lock:
            self._out[node] = Out(Packet.of(name, content), node, self.clock() + seconds)
        self.wake(node)
        return name

    def receive(self) -> list[Reply]:
        """Answers that have come in whole."""
        with self._lock:
            now = self.clock()
            for node in [n for n, out in self._out.items() if out.until < now]:
                del self._out[node]
            found, self._ready = self._ready, []
        return found

    # the side of the nodes

    def came(self, node: str, held: int = 0) -> None:
        """A node has called; held: +1 when its call is kept waiting, -1 when that ends."""
        with self._lock:
            seen = self._seen.setdefault(node, Contact(0.0))
            seen.last, seen.held = self.clock(), max(seen.held + held, 0)

    def went(self, node: str) -> None:
        """A node says that it goes."""
        with self._lock:
            self._seen.pop(node, None)

    def cut(self, node: str) -> None:
        """A node's line was cut: it has died, or calls again at once."""
        with self._lock:
            if (seen := self._seen.get(node)) is not None:
                seen.last = min(seen.last, self.clock() - THERE + GRACE)

    def next(self, node: str) -> Packet | None:
        """The message a node is to answer, if there is one."""
        with self._lock:
            out = self._out.get(node)
            return None if out is None else out.packet

    def seconds(self, node: str) -> float:
        """How long the node's message is worth answering."""
        with self._lock:
            return max(self._out[node].until - self.clock(), 0.0) if node in self._out else 0.0

    def part(self, node: str, part: str) -> bytes | None:
        """A part of the node's message."""
        with self._lock:
            out = self._out.get(node)
            found = None if out is None else out.packet.parts.get(part)
            self.bytes_out += len(found or b"")
            return found

    def answer(self, node: str, name: str, order: tuple[str, ...]) -> list[str] | None:
        """A node begins to answer: the parts that are wanted; None where nobody waits for it (any longer)."""
        if not order or not names(order) or len(order) * PART > MOST + PART:
            raise ValueError("an answer has parts that are named by their digests, and not too many of them")
        if (len(order) - len(set(order))) * PART > REPEATED:
            raise ValueError("an answer names the same parts again and again")
        with self._lock:
            out = self._out.get(node)
            if out is None or out.packet.name != name:
                return None
            out.order, out.parts = order, {p: c for p, c in out.parts.items() if p in order}
            return list(dict.fromkeys(p for p in order if p not in out.parts))

    def take(self, node: str, part: str, content: bytes) -> bool:
        """A part of an answer; whether it was wanted, and is what its name says."""
        if len(content) > PART or digest(content) != part:
            return False
        with self._lock:
            out = self._out.get(node)
            if out is None or part not in out.order:
                return False
            out.parts[part] = content
            self.bytes_in += len(content)
            if set(out.order) <= set(out.parts):
                del self._out[node]
                self._ready.append(Reply(out.packet.name, Packet(name="", order=out.order, parts=out.parts).content()))
            return True
