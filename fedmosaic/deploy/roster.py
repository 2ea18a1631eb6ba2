"""Who is admitted: the nodes of a federation, the clients each of them holds, and its public keys.

    roster.json    {NAME: {"first": 3, "users": 100, "generation": 0, "key": "ecdsa-...", "sum": "9f...", "out": false}}

The server reads the file again when it changes, so whoever is admitted or revoked is so at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import read_json
from fedmosaic.core.ragged import I64

ROSTER = "roster.json"
GENERATIONS = 1 << 32  # numbers of parties are apart by so much for each renewal of a node's keys


def party_of(first: int, generation: int) -> int:
    """A node's number among the parties of secure sums.

    It changes when its keys do: others have pinned the key of a number, and a number's key never changes.

    >>> party_of(7, 0), party_of(7, 1) == 7 + 2**32
    (7, True)
    """
    return first + generation * GENERATIONS


@dataclass(frozen=True)
class Member:
    """An admitted node. key: by which it is let in, as OpenSSH writes it. sum: its public key for masks."""

    first: int
    users: int = 1
    generation: int = 0
    key: str = field(default="", repr=False)
    sum: bytes = field(default=b"", repr=False)

    @property
    def clients(self) -> I64:
        """The numbers of its clients in the federation."""
        return np.arange(self.first, self.first + self.users, dtype=np.int64)

    @property
    def party(self) -> int:
        """Its number in secure sums."""
        return party_of(self.first, self.generation)


Roster = dict[str, Member]  # by name


def read_entries(server: Path) -> dict[str, dict[str, Any]]:
    """The file as it is: also of nodes that were invited and have not shown their keys yet."""
    found: dict[str, dict[str, Any]] = read_json(server / ROSTER)
    return found


def read_roster(server: Path) -> Roster:
    """The nodes of a server's folder that are admitted."""
    try:
        return {
            name: Member(
                int(e["first"]), int(e["users"]), int(e["generation"]), str(e["key"]), bytes.fromhex(e["sum"] or "")
            )
            for name, e in read_entries(server).items()
            if e["key"] and not e["out"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{server / ROSTER} is damaged: {error!r}") from None


class LiveRoster:
    """A roster that is read again when its file changes."""

    def __init__(self, server: Path) -> None:
        self.server, self._lock = server, threading.Lock()  # the gate's thread asks, and that of the rounds
        self._seen, self._known, self._by_key = (-1, -1), Roster(), dict[bytes, str]()

    def __call__(self) -> Roster:
        """Who is admitted now."""
        with self._lock:
            self._look()
            return self._known

    def _look(self) -> None:
        """Names by the public keys that requests carry belong to the roster they were made of."""
        from fedmosaic.deploy.flower import public_pem

        told = (self.server / ROSTER).stat()
        if (told.st_mtime_ns, told.st_ino) != self._seen:
            known = read_roster(self.server)
            by_key = {public_pem(member.key): name for name, member in known.items()}
            self._known, self._by_key, self._seen = known, by_key, (told.st_mtime_ns, told.st_ino)

    def name_of(self, key: bytes) -> str | None:
        """Whose key it is, of those that are admitted now."""
        with self._lock:
            self._look()
            return self._by_key.get(key)
