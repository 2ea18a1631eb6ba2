"""What every recommender is to the run loop: a state that goes in and comes out of rounds.

Closed forms and federated algorithms satisfy the same small protocol, so there is one loop, one run folder, one
evaluation for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.core import buffers
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import Scorer

State = Mapping[str, npt.NDArray[Any]]


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
        buffers.release()
