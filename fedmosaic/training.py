"""What every recommender is to the run loop: a state that goes in and comes out of rounds.

Closed forms and federated algorithms satisfy the same small protocol, so there is one loop, one run folder, one
evaluation for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic import memory
from fedmosaic.evaluate import Scorer
from fedmosaic.ragged import I64, Ragged

State = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """All that training may see: histories by user position, and what may never be a negative.

    A client is one user, or (`silos`) holds many; central training is one client that holds everybody. On a device
    these are only some of the federation's users: `numbers` says which, because draws are keyed by them.
    """

    histories: Ragged
    excluded: Ragged
    n_items: int
    silos: Ragged | None = None
    numbers: I64 | None = None

    def __post_init__(self) -> None:
        if self.numbers is not None and (self.silos is not None or self.numbers.shape != (self.n_users,)):
            raise ValueError("numbers are of users who are clients, one each")
        if self.silos is not None and np.sort(self.silos.values).tolist() != list(range(self.n_users)):
            raise ValueError("silos must hold every user exactly once")

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

    def number(self, clients: I64) -> I64:
        """The clients' (or users') numbers in the federation; their places here, unless said otherwise."""
        return clients if self.numbers is None else self.numbers[clients]

    def pooled(self) -> TrainingSet:
        """The same data as one client that holds everybody."""
        everybody = Ragged(np.arange(self.n_users, dtype=np.int32), np.array([0, self.n_users]))
        return replace(self, silos=everybody)


@dataclass(frozen=True)
class RoundRecord:
    """What a round cost; bytes are per client."""

    clients: int
    bytes_up: int
    bytes_down: int
    loss: float | None = None
    touched_rows: float | None = None


class Method(Protocol):
    """A recommender that learns in rounds."""

    @property
    def rounds(self) -> int:
        """How many rounds a full training takes."""
        ...

    def start(self, data: TrainingSet, seed: int) -> State:
        """State before round 1."""
        ...

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, probe: Ragged | None = None
    ) -> tuple[State, RoundRecord, npt.NDArray[np.floating] | None]:
        """State after a round, what the round cost, and the scores of a few items per user where they come cheaply."""
        ...

    def scorer(self, data: TrainingSet, state: State) -> Scorer:
        """What answers queries for the users of `data`."""
        ...

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """One row per item, for similarity."""
        ...


Progress = Callable[[int, int, dict[str, Any]], None]  # (round, rounds, what is known about the round)


@dataclass(frozen=True, eq=False)
class Step:
    """The end of a round."""

    round: int
    state: State
    record: RoundRecord
    answers: npt.NDArray[np.floating] | None


def train(
    method: Method,
    data: TrainingSet,
    seed: int,
    *,
    state: State | None = None,
    done: int = 0,
    probe: Ragged | None = None,
) -> Iterator[Step]:
    """Rounds done+1 .. method.rounds; the caller evaluates, stores, or stops."""
    current = method.start(data, seed) if state is None else state
    try:
        for number in range(done + 1, method.rounds + 1):
            current, record, answers = method.advance(data, current, number, seed, probe)
            yield Step(number, current, record, answers)
    finally:
        memory.release()
