"""A node's side of secure sums: what it takes part in, what it opens, and what it never does twice.

The server says who takes part and who arrived. A node goes by the agreement in its own folder instead of the server's
word wherever it can, and keeps in `Pledge` what it has promised, on disk before anything leaves:

    least parties        fewer than the agreement's `cohort`, or itself not among them: refused
    keys                 pinned when they are seen first; a key that changed is refused
    forward              rounds do not go back, and an attempt that another has followed is over: the same masks would
                         stand under other numbers
    once                 a sum is opened for one set of arrivals; a round whose sum was opened is not summed again, and
                         statistics that follow from a history alone (closed forms) are opened once for each table
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import read_json, write_atomic
from fedmosaic.core.ragged import I64
from fedmosaic.deploy.agreement import Agreement
from fedmosaic.deploy.keys import SUM_KEY, sum_key
from fedmosaic.deploy.protocol import OpeningMessage, Refused, RevealMessage, TaskMessage
from fedmosaic.engines.state import Array
from fedmosaic.privacy.secure_sum import Pair, Party, RevealError, SumTerms

PINNED = "pinned.json"


@dataclass(frozen=True)
class Pledge:
    """The sum that a node takes part in, and what it has opened.

    round, attempt, table, parties, clients: of the sum. own: its seed, as hex. opened: for whom it was, if it was.
    done: rounds and tables whose sums were opened, newest last. tried: attempts of the round, this one last.
    """

    round: int = 0
    attempt: str = ""
    table: str = ""
    parties: tuple[int, ...] = ()
    clients: str = ""  # digest of who of the node's clients was asked for
    own: str = ""
    opened: tuple[int, ...] = ()
    done: tuple[tuple[int, str], ...] = ()
    tried: tuple[str, ...] = ()

    def packed(self) -> dict[str, Any]:
        """For the header of a file."""
        return {**vars(self), "done": [list(one) for one in self.done]}

    @staticmethod
    def read(given: Mapping[str, Any] | None) -> Pledge:
        """Read `packed` back."""
        if given is None:
            return Pledge()
        lists = {n: tuple(int(v) for v in given[n]) for n in ("parties", "opened")}
        done = tuple((int(r), str(t)) for r, t in given["done"])
        return Pledge(**{**given, **lists, "done": done, "tried": tuple(map(str, given["tried"]))})


class NodeSums:
    """What a node needs for them: its folder's key, and the keys of others as it has seen them first."""

    def __init__(self, place: Path, agreement: Agreement, me: int, once: bool) -> None:
        self.place, self.agreement, self.me, self.once = place, agreement, me, once
        self.pair = sum_key(place / SUM_KEY) if agreement.secure else None
        pinned = read_json(place / PINNED) if (place / PINNED).is_file() else {}
        try:
            self.pinned = {int(party): bytes.fromhex(key) for party, key in pinned.items()}
        except (AttributeError, TypeError, ValueError):
            raise RunError(f"{place / PINNED} is damaged: it has no keys of parties") from None

    def joined(self, task: TaskMessage, pledge: Pledge) -> tuple[Pledge, Party]:
        """Take part in the sum that a task names, or refuse to."""
        parties = tuple(int(p) for p in task.parties)
        if self.me not in parties:
            raise Refused("cohort", "this node is not among the parties of the sum it is asked for")
        if len(parties) < self.agreement.cohort:
            raise Refused("cohort", f"a sum of {len(parties)} nodes; this one takes part in {self.agreement.cohort} up")
        if any(round == task.round or (self.once and table == task.stamp) for round, table in pledge.done):
            raise Refused("opened", f"this node has opened a sum of round {task.round} or of this table; not another")
        clients = hashlib.sha256(task.clients.tobytes()).hexdigest()
        asked, before = (task.round, task.attempt), (pledge.round, pledge.attempt)
        tried = pledge.tried if task.round == pledge.round else ()
        if task.round < pledge.round or (asked != before and task.attempt in tried):
            raise Refused("round", "that attempt is over: its masks stand under other numbers already")
        if asked == before and (pledge.table, pledge.parties, pledge.clients) != (task.stamp, parties, clients):
            raise Refused(
                "round", "asked for two things in one attempt: under one set of masks they would show each other"
            )
        terms = self.agreement.terms(task.round, task.attempt, task.stamp, parties)
        self._pin(terms.graph[self.me], task)
        own = bytes.fromhex(pledge.own) if asked == before else None
        begun = Party.begin(self.me, self._pair(), self.pinned, terms, own)
        fresh = replace(
            pledge, round=task.round, attempt=task.attempt, table=task.stamp, parties=parties, clients=clients,
            own=begun.own.hex(), opened=(), tried=tried if asked == before else (*tried, task.attempt),
        )  # fmt: skip
        return fresh, begun

    def masked(self, party: Party, values: I64) -> dict[str, Array]:
        """The first answer, as tensors of an update; a row per neighbour, in order."""
        upload = party.mask(values)
        letters = np.frombuffer(b"".join(upload.letters.values()), np.uint8).reshape(len(upload.letters), -1)
        return {"masked": upload.masked, "letters": letters}

    def opened(self, asked: RevealMessage, pledge: Pledge) -> tuple[Pledge, OpeningMessage]:
        """The second answer, or a refusal."""
        arrived = tuple(int(i) for i in asked.arrived)
        if (asked.round, asked.attempt) != (pledge.round, pledge.attempt) or not pledge.own:
            raise Refused("round", "this node takes part in another sum, or in none")
        if pledge.opened and pledge.opened != arrived:
            raise Refused(
                "opened", "this node has opened this sum for others; two sets would tell who is in one of them"
            )
        begun = Party.begin(self.me, self._pair(), self.pinned, self._terms(pledge), bytes.fromhex(pledge.own))
        letters = {int(i): row.tobytes() for i, row in zip(asked.senders, asked.letters, strict=True)}
        missing = [j for j in begun.pairs if j in arrived and j not in letters]
        if missing:
            raise Refused("tensors", f"letters of {len(missing)} neighbours that arrived are missing")
        try:
            opening = begun.open(arrived, letters)
        except RevealError as error:
            raise Refused("cohort", str(error)) from None
        done = pledge.done if pledge.opened else (*pledge.done[-1000:], (pledge.round, pledge.table))
        return replace(pledge, opened=arrived, done=done), OpeningMessage.of(asked, opening)

    def _terms(self, pledge: Pledge) -> SumTerms:
        return self.agreement.terms(pledge.round, pledge.attempt, pledge.table, pledge.parties)

    def _pair(self) -> Pair:
        if self.pair is None:
            raise Refused("protocol", "uploads are plain here: no sum is secure")
        return self.pair

    def _pin(self, near: tuple[int, ...], task: TaskMessage) -> None:
        """Keep the neighbours' keys; they must be those that were kept before."""
        if len(task.publics) != len(near):
            raise Refused("key", "it does not bring the keys of this node's neighbours")
        told = {party: key.tobytes() for party, key in zip(near, task.publics, strict=True)}
        changed = [party for party, key in told.items() if self.pinned.get(party, key) != key]
        if changed:
            raise Refused("key", f"the key of party {changed[0]} is not the one that was pinned here ({PINNED})")
        if set(told) - set(self.pinned):
            self.pinned |= told
            named = {str(party): key.hex() for party, key in sorted(self.pinned.items())}
            write_atomic(self.place / PINNED, json.dumps(named, indent=1))
