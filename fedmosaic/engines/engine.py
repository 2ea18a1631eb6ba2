"""What an engine is: the same round, run in one of several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.engines.state import Array
from fedmosaic.engines.task import Outcome, Task

Holding = Literal["user", "silo", "everybody"]  # whose data a client holds


class Engine(Protocol):
    """Runs an algorithm's local work, and answers with what devices hold."""

    @property
    def name(self) -> str:
        """As users choose it."""
        ...

    @property
    def scores_at_once(self) -> int:
        """How many scores a call of `run` may be asked for."""
        ...

    def parts(self, task: Task) -> list[I64]:
        """The cohort in the groups the engine works in (places in the cohort); processes share those."""
        ...

    def run(self, task: Task, parts: Sequence[I64] | None = None) -> Outcome:
        """Local work of the cohort, in its own groups or in given ones."""
        ...

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """Scores with the server's newest parameters and the devices' own, without any work.

        Flat, like the query; without one, of the whole catalogue, [users, items].
        """
        ...


class Team(Protocol):
    """Processes that share a round's work."""

    def round(self, engine: Engine, algorithm: Algorithm, task: Task) -> Outcome:
        """A round of the whole cohort, of which this process runs a part."""
        ...


@dataclass(frozen=True)
class Refusal:
    """Why an engine does not run an algorithm."""

    reason: str
