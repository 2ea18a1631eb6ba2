"""A secure sum on the server, between its two exchanges: what has come, who counts, and what opens it.

    first exchange       `Arrivals`: masked numbers and letters of every party, checked; numbers wait on disk
    sum.safetensors      `OpenSum`: their sum, who arrived, and all letters; on disk before anybody is asked to open it
    second exchange      shares of seeds, checked against what was asked for (`OpenSum.checked`)

A node that has opened a sum takes part in no other sum of its round. So a server that dies goes on with the sum that it
has, instead of beginning another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedmosaic.core.files import load_tensors, save_tensors
from fedmosaic.core.ragged import I64
from fedmosaic.deploy.agreement import Agreement
from fedmosaic.deploy.protocol import SHARE, Bytes, OpeningMessage, Refused, RevealMessage, UpdateMessage
from fedmosaic.privacy.secure_sum import Opening, SumTerms, Words, arrived, can_open, opened

FILE = "sum.safetensors"
SEALED = 28  # bytes by which a sealed letter is longer than what it says: what was drawn for it, and its tag


@dataclass(eq=False)
class Arrivals:
    """What has come in for a sum. size: how many numbers each party sends. spool: a folder for them."""

    terms: SumTerms
    size: int
    spool: Path
    letters: dict[int, Bytes] = field(default_factory=dict)  # by party: a row for every neighbour
    total: Words | None = None

    def take(self, party: int, update: UpdateMessage) -> None:
        """Count one party; refused unless its tensors are what parties send."""
        if set(update.tensors) != {"masked", "letters"} or update.clients or update.shrink:
            raise Refused("tensors", "a masked upload is `masked` and `letters`, and nothing beside them")
        masked, letters = update.tensors["masked"], update.tensors["letters"]
        near = len(self.terms.graph[party])
        if masked.dtype != self.terms.words or masked.shape != (self.size,):
            raise Refused(
                "shape", f"masked is {masked.dtype} of shape {masked.shape}; {self.size} numbers were asked for"
            )
        if letters.dtype != np.uint8 or letters.shape != (near, SHARE * (near + 1) + SEALED):
            raise Refused("shape", f"letters of shape {letters.shape} are none to {near} neighbours")
        if party in self.letters:
            raise Refused("duplicate", "it has sent its masked numbers already")
        masked.tofile(self.spool / str(party))  # whoever turns out to have too few neighbours is taken out again
        self.letters[party] = letters
        self.total = masked.copy() if self.total is None else self.total + masked

    def closed(self) -> OpenSum:
        """Who counts, and their masked sum; `TooFewError` where they are too few."""
        here = arrived(self.terms, self.letters)
        assert self.total is not None
        total = self.total
        for party in set(self.letters) - set(here):
            total = total - np.fromfile(self.spool / str(party), self.terms.words)
        return OpenSum(self.terms, here, total, {party: self.letters[party] for party in here})


@dataclass(frozen=True, eq=False)
class OpenSum:
    """A sum whose first exchange is over. here: who arrived. letters: of them, a row for every neighbour."""

    terms: SumTerms
    here: tuple[int, ...]
    masked: Words
    letters: Mapping[int, Bytes]

    def write(self, place: Path) -> None:
        """On disk, whole or not at all."""
        lists = {"parties": np.array(self.terms.parties, np.int64), "here": np.array(self.here, np.int64)}
        letters = {f"letters/{party}": rows for party, rows in self.letters.items()}
        bound = {"round": self.terms.round, "attempt": self.terms.attempt, "table": self.terms.table}
        save_tensors(place / FILE, {**lists, **letters, "masked": self.masked}, bound)

    @staticmethod
    def read(place: Path, agreement: Agreement) -> OpenSum | None:
        """The sum that a server was at when it died."""
        if not (place / FILE).is_file():
            return None
        arrays, meta = load_tensors(place / FILE)
        parties, here = tuple(arrays["parties"].tolist()), tuple(arrays["here"].tolist())
        terms = agreement.terms(int(meta["round"]), meta["attempt"], meta["table"], parties)
        return OpenSum(terms, here, arrays["masked"], {party: arrays[f"letters/{party}"] for party in here})

    @staticmethod
    def forget(place: Path) -> None:
        """It was opened, or is lost."""
        (place / FILE).unlink(missing_ok=True)

    def to(self, party: int) -> RevealMessage:
        """What a party is asked in the second exchange."""
        near, here = self.terms.graph, set(self.here)
        senders = [i for i in near[party] if i in here]
        rows = [self.letters[i][near[i].index(party)] for i in senders]
        widest = max((row.size for row in rows), default=0)
        letters = np.stack(rows) if rows else np.zeros((0, widest), np.uint8)
        return RevealMessage(
            self.terms.federation, self.terms.round, self.terms.attempt, np.array(self.here, np.int64),
            np.array(senders, np.int64), letters,
        )  # fmt: skip

    def checked(self, party: int, message: OpeningMessage) -> Opening:
        """A party's opening; refused unless it holds just the shares that it was asked for."""
        near, here = self.terms.graph, set(self.here)
        there = [i for i in near[party] if i in here]
        pairs = [(i, d) for i in there for d in near[i] if d not in here]
        wanted = {
            "own_of": there, "lost_of": [d for d in near[party] if d not in here],
            "theirs_of": [number for pair in pairs for number in pair],
        }  # fmt: skip
        for name, numbers in wanted.items():
            if getattr(message, name).tolist() != numbers:
                raise Refused("tensors", f"{name} of an opening are not the parties that were asked for")
        return message.opening()

    def can_be_opened(self, openings: Mapping[int, Opening]) -> bool:
        """Whether so many are enough."""
        return can_open(self.terms, self.here, openings)

    def opened(self, openings: Mapping[int, Opening]) -> I64:
        """The sum of the numbers of all who arrived."""
        return opened(self.terms, self.masked, self.here, openings)


def spool(place: Path) -> TemporaryDirectory[str]:
    """A folder for masked numbers, gone when its exchange is over."""
    return TemporaryDirectory(prefix=".arrivals-", dir=place)
