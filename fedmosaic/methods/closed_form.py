"""What a closed-form recommender is: statistics that add up over clients, and a solution on the server.

    statistics(state, histories)  what a group of clients sends; a group of one is a device, a group of all is central
    apply(state, total)           what the server makes of the sum

Because statistics add, statistics(all) = sum of statistics(each): the central and the federated form are one function
at two granularities, and a test holds them to it. A device's own history and what it derives from it (a user vector)
never leave it; `scores` uses them on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedmosaic.core.errors import ForeignError, ScoreError, SettingsError
from fedmosaic.core.files import digest_of
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.secret import Stream
from fedmosaic.core.threads import deal, thread_count
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import Scorer
from fedmosaic.methods.base import MethodSettings
from fedmosaic.privacy.limits import bounded_total
from fedmosaic.privacy.secure_sum import SumTerms, check_installed, simulated
from fedmosaic.training.method import RoundRecord

State = Mapping[str, npt.NDArray[Any]]  # the server's, by name
Statistics = dict[str, npt.NDArray[Any]]  # of clients; they add up
Scores = npt.NDArray[np.floating]
LARGEST = 4 << 30  # bytes of sums over pairs of items, wherever there are any: 23,170 items for one matrix


class ClosedForm(MethodSettings, ABC):
    """A frozen value: its settings are its fields. It is trained like every other method (`training.Method`)."""

    from_history: ClassVar[bool] = True  # whatever it answers, it answers from the history it is given
    CLIENTS_AT_ONCE: ClassVar[int | None] = 2048  # in one array of clients x items; none: it makes no such array

    rounds: int = Field(default=1, ge=1, le=1, description="how many times the clients are asked: one sum is enough")

    secure: bool = Field(
        default=False,
        description="clients mask what they send, and the server learns the sum alone: the same numbers, in more time",
    )

    bounded: bool = Field(
        default=False,
        description="the server sees every client's statistics and cuts them to what most keep, against clients that "
        "lie; not with secure",
    )

    @model_validator(mode="after")
    def _seen_or_masked(self) -> ClosedForm:
        if self.secure and self.bounded:
            raise ValueError("secure hides what bounded looks at; give one of them")
        return self

    @abstractmethod
    def init(self, n_items: int, seed: int) -> State:
        """Server state before the first round."""

    @abstractmethod
    def statistics(self, state: State, histories: Histories) -> Statistics:
        """Additive statistics of a group of clients, one history each."""

    @abstractmethod
    def apply(self, state: State, total: Statistics) -> State:
        """Server state after a round."""

    def released(self, total: Statistics, round: int, seed: int | Stream) -> Statistics:
        """What the server learns of a sum: all of it, unless a form promises otherwise.

        seed: of a simulation's noise; a server that somebody relies on draws it from a secret stream.
        """
        return total

    def done(self, state: State) -> bool:
        """Whether no round is needed any more, though some are left."""
        return False

    def without_validation(self) -> ClosedForm:
        """The form where nothing is held out to choose by: with its stated defaults."""
        return self

    @abstractmethod
    def scores(self, state: State, histories: Histories) -> Scores:
        """Scores of all items for each history; computed on the device."""

    @abstractmethod
    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """One row per item; items with a high cosine are alike."""

    def shares(self, state: State, history: Histories, item: int) -> Scores:
        """What each event of one history adds to the score of an item, in the history's order; item-item forms know."""
        raise SettingsError(
            f"{type(self).__name__} does not score by items of the history; ease, itemknn and mosaic do"
        )

    def check_installed(self) -> None:
        """Closed forms need nothing beyond the library, but for their masks."""
        if self.secure:
            check_installed()

    def start(self, data: TrainingSet, seed: int) -> State:
        """State before round 1."""
        return self.init(data.n_items, seed)

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[State, RoundRecord, None]:
        """Ask every client once, sum, solve."""
        summed, up = self._total(state, data.held, round)
        summed, down = self.released(summed, round, seed), sum(a.nbytes for a in state.values())
        record = RoundRecord(clients=len(data.histories), bytes_up=up, bytes_down=down)
        return self.apply(state, summed), record, None

    def _total(self, state: State, held: Histories, round: int) -> tuple[Statistics, int]:
        """The sum as the server gets it, and the bytes that every client sends for it."""
        if self.secure:
            return masked_total(self, state, held, round)
        if not self.bounded:
            return plain_total(self, state, held)
        summed = bounded_total(lambda client: self.statistics(state, held.take(np.array([client]))), len(held))
        return summed, sum(a.nbytes for a in summed.values())

    def scorer(self, data: TrainingSet, state: State) -> Scorer:
        """Answers from the users' histories."""
        return HistoryScorer(self, state, data)

    def pack(self, state: State) -> State:
        """A state is named arrays already."""
        return state

    def unpack(self, arrays: State, what: str) -> State:
        """Named arrays, if they are this method's."""
        wanted = set(self.init(1, 0))
        if set(arrays) != wanted:
            raise ForeignError(f"{what} holds {', '.join(sorted(arrays))}; this method has {', '.join(sorted(wanted))}")
        return arrays

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Bytes a client sends and receives in a round, dense: one size for all; only a secure sum hides content."""
        one = Histories(Ragged.from_rows([[]]), n_items)
        state = self.init(n_items, 0)
        up = sum(a.nbytes for a in self.statistics(state, one).values())
        return up, sum(a.nbytes for a in state.values())


def total(form: ClosedForm, state: State, histories: Histories, clients_per_chunk: int | None = None) -> Statistics:
    """The sum of all clients' statistics, taken in chunks (not said: of as many as the form takes at once)."""
    result: Statistics = {}
    for chunk in _chunks(histories, clients_per_chunk or form.CLIENTS_AT_ONCE or max(len(histories), 1)):
        for name, value in form.statistics(state, chunk).items():
            result[name] = result[name] + value if name in result else value
    return result


def plain_total(form: ClosedForm, state: State, histories: Histories) -> tuple[Statistics, int]:
    """The sum, and the bytes that every client sends for it."""
    summed = total(form, state, histories)
    return summed, sum(a.nbytes for a in summed.values())


def masked_total(form: ClosedForm, state: State, histories: Histories, round: int) -> tuple[Statistics, int]:
    """The same by a secure sum over clients, in fixed point; numbers on a coarser grid lose nothing by it."""
    like = form.statistics(state, histories.take(np.zeros(0, np.int64)))

    def work(client: int) -> I64:
        return as_whole_numbers(form.statistics(state, histories.take(np.array([client]))), len(histories))

    terms = SumTerms("simulation", round, digest_of(state), tuple(range(len(histories))))
    vector, _, size = simulated(work, terms)
    return as_statistics(like, vector), size


def as_whole_numbers(own: Statistics, clients: int) -> I64:
    """Statistics as one vector in fixed point; refused where those of so many clients would not fit into 64 bits.

    >>> as_whole_numbers({"count": np.array([0.5, 1.0])}, 10).tolist() == [2**31, 2**32]
    True
    """
    numbers = np.concatenate([value.reshape(-1) for value in own.values()]) * SCALE
    if not np.abs(numbers).max(initial=0) * clients < 2.0**63:
        raise ScoreError("a secure sum: numbers this large, or no numbers, would not fit into 64 bits")
    return np.floor(numbers + 0.5).astype(np.int64)


def as_statistics(like: Statistics, vector: I64) -> Statistics:
    """A sum of such vectors as statistics again. like: some, for names and shapes."""
    cuts = np.cumsum([value.size for value in like.values()])[:-1]
    parts = zip(like.items(), np.split(vector / SCALE, cuts), strict=True)
    return {name: part.reshape(value.shape).astype(value.dtype) for (name, value), part in parts}


def fit(form: ClosedForm, histories: Histories, *, seed: int = 0, clients_per_chunk: int | None = None) -> State:
    """All rounds: central with one chunk of everybody (the default), per device with chunks of one.

    >>> from fedmosaic.methods.popularity import Popularity
    >>> fit(Popularity(), Histories(Ragged.from_rows([[0, 1], [1]]), 3))["count"].tolist()
    [1.0, 2.0, 0.0]
    """
    state = form.init(histories.n_items, seed)
    for round in range(1, form.rounds + 1):
        if not form.done(state):
            summed = total(form, state, histories, clients_per_chunk or len(histories))
            state = form.apply(state, form.released(summed, round, seed))
    return state


class HistoryScorer:
    """Answers for users by their position, from their training histories."""

    def __init__(self, form: ClosedForm, state: State, data: TrainingSet) -> None:
        self.form, self.state, self.data = form, state, data

    def scores(self, users: npt.NDArray[np.int64]) -> Scores:
        """Scores of the whole catalogue for some users."""
        return self.form.scores(self.state, self.data.held.take(users))


def refuse_many_items(method: str, n_items: int) -> None:
    """Refuse a catalogue whose items x items matrix would be larger than any method here makes.

    >>> refuse_many_items("ease", 30_000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedmosaic.core.errors.SettingsError: ease sums over pairs of items, and 30,000 items would need 7 GiB (the limit ...
    """
    size = 8 * n_items**2
    if size > LARGEST:
        raise SettingsError(
            f"{method} sums over pairs of items, and {n_items:,} items would need {size / 2**30:.0f} GiB (the limit is "
            f"{LARGEST >> 30} GiB, {int((LARGEST / 8) ** 0.5):,} items); mosaic and ials do without"
        )


def gram(histories: Histories) -> npt.NDArray[np.float64]:
    """Co-occurrence counts R'R of a group of clients; exact integers in float64.

    >>> gram(Histories(Ragged.from_rows([[0, 1], [1, 1]]), 3)).tolist()
    [[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    """
    events = np.bincount(histories.items.values, minlength=histories.n_items)
    return pair_counts(histories, np.arange(histories.n_items, dtype=np.int32), events)


def pair_counts(histories: Histories, inputs: npt.NDArray[np.int32], events: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same of some items: `inputs` has every item's place, ascending, or -1. events: of each, to share work by."""
    from fedmosaic.methods.pair_counts import add_together, each_once

    k, items = events.size, histories.items
    both, held, ends = np.zeros((k, k)), np.empty(items.values.size, np.int32), np.empty(len(items), np.int64)
    order, starts = sorted_by_place(inputs[items.values], k)
    each_once(items.offsets, items.rows, order, starts, held, ends)
    work = partial(add_together, held, ends, items.rows, order, starts, both)
    by_rows(k, work, events * np.arange(k, 0, -1.0))
    mirrored(both)
    return both


def sorted_by_place(places: npt.NDArray[np.int32], k: int) -> tuple[I64, I64]:
    """Events in the order of their items' places, and where those of each of k places begin.

    >>> [found.tolist() for found in sorted_by_place(np.array([1, -1, 0, 1], np.int32), 2)]
    [[2, 0, 3], [0, 1, 3]]
    """
    from fedmosaic.methods.pair_counts import by_place

    starts, order = np.zeros(k + 1, np.int64), np.empty(int((places >= 0).sum()), np.int64)
    by_place(places, starts, order)
    return order, starts


def mirrored(half: npt.NDArray[np.float64]) -> None:
    """half <- half + half', in place."""
    from fedmosaic.methods.pair_counts import mirror

    size = len(half)
    by_rows(size, partial(mirror, half), np.arange(size, 0, -1.0))


def zero_diagonal(
    g: npt.NDArray[np.float64], lam: float, precision: type[np.floating[Any]] = np.float64
) -> npt.NDArray[np.float32]:
    """B = -P / diag P with a diagonal of zeros, P = (G + lam I)^-1: EASE. By Cholesky, in place.

    >>> zero_diagonal(np.ones((2, 2)), 1.0).tolist()
    [[0.0, 0.5], [0.5, 0.0]]
    """
    from scipy.linalg import lapack

    from fedmosaic.methods.pair_counts import without_diagonal

    left = np.array(g, dtype=precision).T  # symmetric, so its transpose is itself, as LAPACK reads it
    left[np.diag_indices_from(left)] += precision(lam)
    factorise, invert = lapack.get_lapack_funcs(("potrf", "potri"), (left,))
    factor, wrong = factorise(left, lower=1, overwrite_a=1)
    inverse, failed = invert(factor, lower=1, overwrite_c=1)
    if wrong or failed:
        raise SettingsError(f"the sums cannot be inverted with a penalty of {lam:g}; use a larger one")
    weights = np.empty(left.shape, np.float32)
    by_rows(len(weights), partial(without_diagonal, inverse.T, np.diag(inverse).copy(), weights))
    return weights


def _chunks(histories: Histories, size: int) -> Iterator[Histories]:
    if size >= len(histories):
        yield histories
        return
    for begin in range(0, len(histories), size):
        yield histories.take(np.arange(begin, min(begin + size, len(histories))))


def by_rows(rows: int, work: Callable[[int, int], None], load: npt.NDArray[np.floating] | None = None) -> None:
    """work(low, high) on parts of some rows, dealt to threads; each touches no rows but its own.

    load: what every row costs, so that all have as much to do; not said: rows cost the same.
    """
    workers = thread_count()
    shares = np.linspace(0, 1, workers + 1)
    cuts = (shares * rows).astype(np.int64)
    if load is not None and rows:
        done = np.cumsum(load, dtype=np.float64)
        cuts[1:-1] = np.searchsorted(done, shares[1:-1] * done[-1])
    deal(lambda worker: work(int(cuts[worker]), int(cuts[worker + 1])), workers)
