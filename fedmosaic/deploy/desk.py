"""The server's correspondence: who was asked what, which answers count, and what is written down about the others.

An answer counts once: for the attempt it was asked in, from the node that was asked, while the exchange is open. Nodes
that still owe an answer are not asked again until it comes or its time is up. What does not count is a line of
`refused.jsonl`, with the reason.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmosaic.core.files import append_line
from fedmosaic.deploy.protocol import OpeningMessage, Refused, Reply, Transport, UpdateMessage, kind_of

PAUSE = 0.02  # seconds between two looks for answers, at least,
LOOKS = 5.0  # and so many times as long as a look takes: of many nodes, it takes a while
OWED = 1.0  # deadlines after its exchange closed until an unanswered message is forgotten
TOGETHER = 256 << 20  # bytes that are out at once: everything that is out lies in memory

Answer = UpdateMessage | OpeningMessage


@dataclass
class Asked:
    """A message that is out."""

    node: str
    attempt: str
    until: float
    size: int
    whole: bool  # whether it carried all parameters
    open: bool = True  # whether its exchange is


@dataclass
class Tally:
    """What an exchange cost, and who was counted."""

    nodes: list[str] = field(default_factory=list)
    refused: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, other: Tally) -> None:
        """That of a second exchange of the same round."""
        self.refused += other.refused
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down


@dataclass(frozen=True)
class Exchange:
    """One question to several nodes.

    make: the message to a node; again: whether it said that it cannot use the first. take: counts an answer, or refuses
    it. enough: whether no more answers are needed, though some are missing.
    """

    round: int
    attempt: str
    make: Callable[[str, bool], bytes]
    take: Callable[[str, Answer], None]
    seconds: float
    enough: Callable[[], bool] = lambda: False


class Desk:
    """Exchanges over a transport. federation: whose messages these are. clock, sleep: of a simulation, or real ones."""

    def __init__(
        self, place: Path, federation: str, transport: Transport, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep, pause: float = PAUSE,
    ) -> None:  # fmt: skip
        self.place, self.federation, self.transport = place, federation, transport
        self.clock, self.sleep, self.pause = clock, sleep, pause
        self.holds: dict[str, int] = {}  # version that each node said it holds
        self._asked: dict[str, Asked] = {}  # by message

    def there(self) -> set[str]:
        """Nodes that can be reached."""
        return set(self.transport.nodes())

    def free(self) -> set[str]:
        """Nodes that can be reached and owe no answer."""
        for name in [m for m, one in self._asked.items() if one.until < self.clock()]:
            del self._asked[name]
        return self.there() - {asked.node for asked in self._asked.values()}

    def settle(self, round: int) -> None:
        """Take what came in between exchanges: nobody waits for it, but who sent it owes nothing any more."""
        tally = Tally()
        for reply in self.transport.receive():
            self._refusing(reply, round, tally, None)

    def hold(self, nodes: Iterable[str], exchange: Exchange) -> Tally:
        """Ask nodes, and take answers until all that are there have answered, enough have, or the time is up."""
        tally, closes, waiting, mine = Tally(), self.clock() + exchange.seconds, deque(nodes), set[str]()
        while not exchange.enough() and (since := self.clock()) < closes:
            there, out = self.there(), sum(self._asked[name].size for name in mine)
            look = self.clock() - since
            while waiting and (not out or out < TOGETHER):
                mine.add(name := self._send(waiting.popleft(), exchange, closes, tally, again=False))
                out += self._asked[name].size
            for reply in self.transport.receive():
                node = self._refusing(reply, exchange.round, tally, exchange)
                if node is not None:
                    mine.add(self._send(node, exchange, closes, tally, again=True))
            mine &= set(self._asked)
            if not waiting and not any(self._asked[name].node in there for name in mine):
                break
            self.sleep(max(self.pause, LOOKS * look))
        for name in mine & set(self._asked):
            self._asked[name].open = False
        return tally

    def _send(self, node: str, exchange: Exchange, closes: float, tally: Tally, *, again: bool) -> str:
        content = exchange.make(node, again)
        tally.bytes_down += len(content)
        patience = max(closes - self.clock(), 0.0) + OWED * exchange.seconds
        name = self.transport.send(node, content, patience)
        whole = again or node not in self.holds
        self._asked[name] = Asked(node, exchange.attempt, self.clock() + patience, len(content), whole)
        return name

    def _refusing(self, reply: Reply, round: int, tally: Tally, exchange: Exchange | None) -> str | None:
        """Count an answer or write down why not; the name of a node that wants to be asked again."""
        asked = self._asked.pop(reply.message, None)
        try:
            return self._counted(reply, asked, round, tally, exchange)
        except Refused as error:
            tally.refused += 1
            self.refuse(round, "unknown" if asked is None else asked.node, error)
            return None

    def _counted(
        self, reply: Reply, asked: Asked | None, round: int, tally: Tally, exchange: Exchange | None
    ) -> str | None:
        if reply.content is None:
            raise Refused("failed", reply.error)
        answer = read_answer(reply.content)
        if answer.federation != self.federation:
            detail = answer.detail[:200] if isinstance(answer, UpdateMessage) else ""
            raise Refused("federation", f"it belongs to another federation: {detail}")
        if asked is None or answer.attempt != asked.attempt:
            raise Refused(
                "duplicate" if answer.round == round else "round", f"round {answer.round}: nobody waits for it"
            )
        if isinstance(answer, UpdateMessage):
            self.holds[asked.node] = answer.version
        if exchange is None or not asked.open or answer.attempt != exchange.attempt or answer.round != round:
            raise Refused("late", f"round {answer.round} is closed")
        if isinstance(answer, UpdateMessage) and answer.status != "done":
            if answer.status == "failed":
                raise Refused("failed", answer.detail[:200])
            if asked.whole:
                raise Refused("resync", "it was sent everything and asks again")
            self.holds.pop(asked.node, None)  # so that the next task is whole
            return asked.node
        exchange.take(asked.node, answer)
        tally.bytes_up += len(reply.content)
        tally.nodes.append(asked.node)
        return None

    def refuse(self, round: int, node: str, error: Refused) -> None:
        """Write down what did not count."""
        self.log("refused.jsonl", {"round": round, "node": node, **error.line()})

    def log(self, name: str, line: dict[str, Any]) -> None:
        """A line of a file in the server's folder."""
        append_line(self.place / name, line)


def read_answer(content: bytes) -> Answer:
    """What a node sent; `Refused` where it is nothing that nodes send."""
    return OpeningMessage.decode(content) if kind_of(content) == "opening" else UpdateMessage.decode(content)
