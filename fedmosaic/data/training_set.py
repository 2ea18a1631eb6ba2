"""What training may see: histories by user position, and who holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.histories import Histories


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """All that training may see: histories by user position, and what may never be a negative.

    A client is one user, or (`silos`) holds many; central training is one client that holds everybody. On a device
    these are only some of the federation's users: `client_ids` says which, because draws are keyed by them.
    """

    histories: Ragged
    excluded: Ragged
    n_items: int
    silos: Ragged | None = None
    client_ids: I64 | None = None
    times: I64 | None = None  # beside the items of all histories, where times are known

    def __post_init__(self) -> None:
        if self.client_ids is not None and (self.silos is not None or self.client_ids.shape != (self.n_users,)):
            raise ValueError("client ids are of users who are clients, one each")
        if self.silos is not None and np.sort(self.silos.values).tolist() != list(range(self.n_users)):
            raise ValueError("silos must hold every user exactly once")

    @cached_property
    def held(self) -> Histories:
        """What users hold, with times."""
        return Histories(self.histories, self.n_items, self.times)

    def followed_by(self, later: Histories) -> TrainingSet:
        """The same users with more of their histories, for answering; what may be a negative stays as it is."""
        held = self.held.followed_by(later)
        return replace(self, histories=held.items, times=held.times)

    @property
    def n_users(self) -> int:
        """Number of users."""
        return len(self.histories)

    @property
    def n_clients(self) -> int:
        """Number of clients."""
        return self.n_users if self.silos is None else len(self.silos)

    def owners(self) -> I64:
        """The client of each user."""
        owner = np.arange(self.n_users)
        if self.silos is not None:
            owner[self.silos.values] = self.silos.rows
        return owner

    def members(self, clients: I64) -> Ragged:
        """The users each of the clients holds."""
        if self.silos is not None:
            return self.silos.take(clients)
        return Ragged(clients.astype(np.int32), np.arange(clients.size + 1))

    def ids_of(self, clients: I64) -> I64:
        """The clients' (or users') numbers in the federation; their places here, unless said otherwise."""
        return clients if self.client_ids is None else self.client_ids[clients]

    def pooled(self) -> TrainingSet:
        """The same data as one client that holds everybody."""
        everybody = Ragged(np.arange(self.n_users, dtype=np.int32), np.array([0, self.n_users]))
        return replace(self, silos=everybody)
