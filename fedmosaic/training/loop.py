"""The one loop: train, look at validation, keep the best, stop early when asked.

Runs, recommenders and searches all go through `train`; what they do with a round (store it, show it, cut a trial short)
is a few lines on what it yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from fedmosaic.core import buffers
from fedmosaic.core.errors import ScoreError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.negatives import Candidates
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import evaluate, make_probe, rank_probe
from fedmosaic.evaluation.metrics import Ranks
from fedmosaic.training.method import Chooses, Ends, Method, RoundRecord

S = TypeVar("S")
FEWEST = 500  # users who speak for all, at least
LOOK = 10_000_000  # scores that a look at validation may take where nobody said otherwise
OnRound = Callable[[int, int, dict[str, Any]], None]  # (round, rounds, what is known about the round)


@dataclass(frozen=True, eq=False)
class Validation:
    """What rounds are judged by: the held-out validation items, one metric of one protocol, every so many rounds.

    split, candidates: what is held out, and what it is ranked among. select: `sampled:hr@10`, `full:ndcg@10`, ...
    scores: where it ranks the whole catalogue, how many scores a look may take; of more, some users speak for all.
    """

    split: Split
    candidates: Candidates
    select: str = "sampled:hr@10"
    every: int = 1
    scores: int | None = None

    @cached_property
    def judged(self) -> Split:
        """The split with the validation items of those users alone who are looked at."""
        held = self.split.validation
        users = np.flatnonzero(held.lengths > 0)
        most = users.size if self.scores is None else max(self.scores // max(self.split.n_items, 1), FEWEST)
        if users.size <= most:
            return self.split
        some = np.zeros(len(held), dtype=bool)
        some[users[np.linspace(0, users.size - 1, most).astype(np.int64)]] = True
        kept = some[held.rows]
        return replace(self.split, validation=Ragged.group(held.rows[kept], held.values[kept], len(held)))

    @property
    def users(self) -> int | None:
        """How many users are looked at, where they are not all."""
        return None if self.judged is self.split else int((self.judged.validation.lengths > 0).sum())

    @cached_property
    def query(self) -> Ragged:
        """The items whose scores a round should tell: validation items and their candidates."""
        return make_probe(self.split, "validation", self.candidates)

    @property
    def exists(self) -> bool:
        """Whether anything is held out; if not, the last round is taken."""
        return self.split.validation.values.size > 0

    def look(self, method: Method[S], data: TrainingSet, step: Step[S]) -> dict[str, dict[str, float]]:
        """1 + n metrics from the round's own answers where it gave them; the full ranking where it decides."""
        ranks: dict[str, Ranks] = {}
        if step.answers is not None:
            ranks["sampled"] = rank_probe(step.answers, self.query, self.split.validation)
        if self.select.startswith("full") or step.answers is None:
            split = self.judged if self.select.startswith("full") else self.split
            found = evaluate(method.scorer(data, step.state), split, "validation", self.candidates, top_k=0)
            assert found.sampled is not None
            ranks = {"sampled": found.sampled} | ranks | {"full": found.full}
        names = dict.fromkeys(["hr@10", "ndcg@10", self.select.split(":")[1]])
        return {p: {n: r.mean(n.split("@")[0], int(n.split("@")[1])) for n in names} for p, r in ranks.items()}

    def value(self, found: dict[str, dict[str, float]]) -> float:
        """The number that decides."""
        protocol, metric = self.select.split(":")
        return found[protocol][metric]


@dataclass(frozen=True, eq=False)
class Step(Generic[S]):
    """The end of a round."""

    round: int
    state: S
    record: RoundRecord
    answers: npt.NDArray[np.floating] | None


@dataclass(frozen=True, eq=False)
class Seen(Generic[S]):
    """A round and what validation said of it."""

    step: Step[S]
    validation: dict[str, dict[str, float]] | None  # none: this round was not looked at
    value: float  # of the best round so far
    rose: int  # the round in which that value last rose
    best: bool  # whether this round is the best so far, or as good
    last: bool  # whether training ends with it

    @property
    def line(self) -> dict[str, Any]:
        """What is known about the round, for a log."""
        line: dict[str, Any] = {"round": self.step.round, **vars(self.step.record)}
        return line if self.validation is None else line | {"validation": self.validation}


@dataclass(frozen=True, eq=False)
class Begun(Generic[S]):
    """Where training goes on: a state, its round, and the best value so far with the round in which it last rose."""

    state: S
    round: int
    rose: int
    best_value: float


def steps(
    method: Method[S], data: TrainingSet, seed: int, begun: Begun[S] | None = None, query: Ragged | None = None
) -> Iterator[Step[S]]:
    """The rounds of a training, from its beginning or from where it was."""
    state, done = (method.start(data, seed), 0) if begun is None else (begun.state, begun.round)
    try:
        for number in range(done + 1, method.rounds + 1):
            if _ended(method, state):
                return
            try:
                state, record, answers = method.advance(data, state, number, seed, query)
            except ScoreError as error:
                if number == 1:
                    raise
                said = f"{error} (in round {number}; with rounds={number - 1} the run ends before, its best kept)"
                raise ScoreError(said) from None
            yield Step(number, state, record, answers)
    finally:
        buffers.release()


def _ended(method: Method[S], state: S) -> bool:
    return isinstance(method, Ends) and bool(method.done(state))


def train(
    method: Method[S],
    data: TrainingSet,
    seed: int,
    validation: Validation | None = None,
    begun: Begun[S] | None = None,
    patience: int | None = None,
) -> Iterator[Seen[S]]:
    """Train, and judge every round; the caller keeps the state of the round that is `best`.

    method, data, seed: what is trained, on what. validation: what judges; none, or nothing held out: the last round is
    the best. begun: where to go on. patience: stop after so many rounds in which it did not rise.
    """
    judge = validation if validation is not None and validation.exists else None
    rose, best = (0, -1.0) if begun is None else (begun.rose, begun.best_value)

    def enough(round: int) -> bool:
        return patience is not None and judge is not None and round - rose >= patience

    if begun is not None and enough(begun.round):  # it had stopped, and was cut before it could say so
        return
    for step in steps(method, data, seed, begun, None if validation is None else validation.query):
        last, found, better = step.round == method.rounds or _ended(method, step.state), None, False
        if judge is not None and isinstance(method, Chooses):
            if not last:  # there is nothing to judge before it has chosen
                yield Seen(step, None, best, rose, False, False)
                continue
            chosen = method.choose(data, step.state, judge.split.validation)
            step = replace(step, state=chosen, answers=None)
        if judge is None:
            better = last
        elif step.round % judge.every == 0 or last:
            found = judge.look(method, data, step)
            value = judge.value(found)
            better = value >= best  # ties: the later
            rose, best = (step.round, value) if value > best else (rose, best)
        stop = enough(step.round)
        yield Seen(step, found, best, rose, better, last or stop)
        if stop:
            return
