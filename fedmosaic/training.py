"""What every recommender is to the run loop: a state that goes in and comes out of rounds.

Closed forms and federated algorithms satisfy the same small protocol, so there is one loop, one run folder, one
evaluation for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.evaluate import Scorer
from fedmosaic.ragged import Ragged

State = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """All that training may see: histories by user position, and what may never be a negative."""

    histories: Ragged
    excluded: Ragged
    n_items: int


@dataclass(frozen=True)
class RoundRecord:
    """What a round cost; bytes are per client."""

    clients: int
    bytes_up: int
    bytes_down: int
    loss: float | None = None


class Method(Protocol):
    """A recommender that learns in rounds."""

    @property
    def rounds(self) -> int:
        """How many rounds a full training takes."""
        ...

    def start(self, data: TrainingSet, seed: int) -> State:
        """State before round 1."""
        ...

    def advance(self, data: TrainingSet, state: State, round: int, seed: int) -> tuple[State, RoundRecord]:
        """State after a round, and what the round cost."""
        ...

    def scorer(self, data: TrainingSet, state: State) -> Scorer:
        """What answers queries for the users of `data`."""
        ...

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """One row per item, for similarity."""
        ...


def train(
    method: Method, data: TrainingSet, seed: int, *, state: State | None = None, done: int = 0
) -> Iterator[tuple[int, State, RoundRecord]]:
    """Rounds done+1 .. method.rounds, yielding (round, state, record); the caller evaluates, stores, or stops."""
    current = method.start(data, seed) if state is None else state
    for number in range(done + 1, method.rounds + 1):
        current, record = method.advance(data, current, number, seed)
        yield number, current, record
