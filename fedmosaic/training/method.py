"""What every recommender is to the training loop: a state that goes in and comes out of rounds.

Closed forms and federated algorithms satisfy the same small protocol, so there is one loop, one run folder, one
evaluation for all of them. What a state is, is the method's own business; in files it is named arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import Scorer

S = TypeVar("S")
In = TypeVar("In", contravariant=True)


@dataclass(frozen=True)
class RoundRecord:
    """What a round cost; bytes are per client."""

    clients: int
    bytes_up: int
    bytes_down: int
    loss: float | None = None
    touched_rows: float | None = None


@runtime_checkable
class Chooses(Protocol[S]):
    """A method that sets a few of its numbers by the devices' validation scores, once, when training is over.

    Every device scores its own held-out items under a few candidates and sends the scores; they are added up.
    """

    def choose(self, data: TrainingSet, state: S, held_out: Ragged) -> S:
        """The state with the numbers that did best. held_out: per user, what was kept from training."""
        ...


@runtime_checkable
class Ends(Protocol[In]):
    """A method that may know before its last round that it has learnt all it will."""

    def done(self, state: In) -> bool:
        """Whether no further round would change anything."""
        ...


@runtime_checkable
class Promises(Protocol):
    """A method that can say what privacy its training gives."""

    @property
    def promise(self) -> str | None:
        """An epsilon and all that belongs to it, in words; none where nothing is promised."""
        ...

    def spent_after(self, rounds: int) -> float:
        """The epsilon of what was released in so many rounds."""
        ...


class Method(Protocol[S]):
    """A recommender that learns in rounds."""

    @property
    def rounds(self) -> int:
        """How many rounds a full training takes, at most."""
        ...

    def check_installed(self) -> None:
        """Refuse what this installation cannot run, before anything is written; names the extra to install."""
        ...

    def start(self, data: TrainingSet, seed: int) -> S:
        """State before round 1."""
        ...

    def advance(
        self, data: TrainingSet, state: S, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[S, RoundRecord, npt.NDArray[np.floating] | None]:
        """State after a round, what the round cost, and the scores of a few items per user where they come cheaply.

        data: what may be seen. round: counted from 1. query: per user, the items whose scores are asked for.
        """
        ...

    def scorer(self, data: TrainingSet, state: S) -> Scorer:
        """What answers queries for the users of `data`."""
        ...

    def vectors(self, state: S) -> npt.NDArray[np.floating]:
        """One row per item, for similarity."""
        ...

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Bytes a client sends and receives in a round."""
        ...

    def pack(self, state: S) -> Mapping[str, npt.NDArray[Any]]:
        """The state as named arrays, for a file."""
        ...

    def unpack(self, arrays: Mapping[str, npt.NDArray[Any]], what: str) -> S:
        """Read `pack` back; arrays of another method or width are refused, `what` names where they came from."""
        ...
