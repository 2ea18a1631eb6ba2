"""The two exchanges of a secure sum between a server and its nodes; what they are about is `open_sum.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmosaic.core.ragged import I64
from fedmosaic.deploy.desk import Answer, Desk, Exchange, Tally
from fedmosaic.deploy.open_sum import Arrivals, OpenSum, spool
from fedmosaic.deploy.protocol import Bytes, OpeningMessage, Refused, UpdateMessage
from fedmosaic.deploy.roster import Member
from fedmosaic.privacy.secure_sum import Opening, SumTerms, TooFewError

LINGERS = 1.0  # seconds at least that openings are waited for when there are enough of them
TRIES = 3  # deadlines in which a sum may be opened; then its round is given up, where a method can do without
PATIENCE = 30.0  # seconds at most between two questions to open a sum

Make = Callable[[str, bool, I64, Bytes], bytes]  # a task to a node: whole or not, the parties, its neighbours' keys


@dataclass(frozen=True)
class Masked:
    """Both exchanges, at a server's desk; seconds: the deadline of each."""

    place: Path
    desk: Desk
    seconds: float

    def collected(
        self, terms: SumTerms, size: int, members: Mapping[str, Member], make: Make, wanted: int, tally: Tally
    ) -> OpenSum | None:
        """The first: masked numbers of all members; on disk when it is over. None where too few answered.

        size: how many numbers each sends. wanted: of how many clients they are enough.
        """
        counted, parties = 0, np.array(terms.parties, np.int64)
        sums = {member.party: member.sum for member in members.values()}
        with spool(self.place) as folder:
            arrivals = Arrivals(terms, size, Path(folder))

            def task(node: str, whole: bool) -> bytes:
                keys = b"".join(sums[j] for j in terms.graph[members[node].party])
                return make(node, whole, parties, np.frombuffer(keys, np.uint8).reshape(-1, 32))

            def take(node: str, answer: Answer) -> None:
                nonlocal counted
                if isinstance(answer, OpeningMessage):
                    raise Refused("protocol", "nothing was to be opened yet")
                arrivals.take(members[node].party, answer)
                counted += members[node].users

            exchange = Exchange(terms.round, terms.attempt, task, take, self.seconds, lambda: counted >= wanted)
            tally.add(self.desk.hold(members, exchange))
            try:
                found = arrivals.closed()
            except TooFewError as error:
                self.desk.refuse(terms.round, "all", Refused("least", str(error)))
                return None
        found.write(self.place)
        return found

    def opened(self, begun: OpenSum, nodes: Callable[[], Mapping[int, str]], tally: Tally, waits: bool) -> I64 | None:
        """The second: the sum, or None where it could not be opened.

        nodes: names of the admitted ones by their parties. waits: for as long as it takes; else for some deadlines.
        """
        clock, since = self.desk.clock, self.desk.clock()
        openings, pause = dict[int, Opening](), 0.5
        while True:
            if begun.can_be_opened(openings):
                try:
                    return begun.opened(openings)
                except TooFewError as error:  # shares that do not fit together: perhaps others do
                    self.desk.refuse(begun.terms.round, "all", Refused("finite", str(error)))
                    openings = {}
            if openings or clock() - since > self.seconds:
                what = f"{len(openings)} of {len(begun.here)} nodes have opened the sum, which is not enough"
                self.desk.refuse(begun.terms.round, "all", Refused("least", what))
            if not waits and clock() - since > TRIES * self.seconds:
                return None
            if openings or pause > 0.5:
                self._rest(pause, begun.terms.round)
            pause = min(2 * pause, PATIENCE)
            tally.add(self._asked(begun, nodes(), openings))

    def _rest(self, seconds: float, round: int) -> None:
        until = self.desk.clock() + seconds
        while self.desk.clock() < until:
            self.desk.sleep(min(self.desk.pause, 0.2))
            self.desk.settle(round)

    def _asked(self, begun: OpenSum, nodes: Mapping[int, str], openings: dict[int, Opening]) -> Tally:
        """Ask whoever has not opened it yet; openings gain what comes."""
        free, since, enough_at = self.desk.free(), self.desk.clock(), float("inf")
        party = {nodes[p]: p for p in begun.here if p not in openings and p in nodes and nodes[p] in free}

        def take(node: str, answer: Answer) -> None:
            if isinstance(answer, UpdateMessage):
                raise Refused("protocol", "its sum is to be opened")
            openings[party[node]] = begun.checked(party[node], answer)

        def enough() -> bool:
            nonlocal enough_at
            if begun.can_be_opened(openings):
                enough_at = min(enough_at, self.desk.clock())
            return self.desk.clock() - enough_at >= max(LINGERS, enough_at - since)

        exchange = Exchange(
            begun.terms.round, begun.terms.attempt, lambda node, _: begun.to(party[node]).encode(), take, self.seconds,
            enough,
        )  # fmt: skip
        return self.desk.hold(party, exchange)
