"""Who takes part in a round, and with which examples in which order. All of it keyed, none of it carried.

A client's examples are its positives, then fresh negatives; every epoch shuffles them with the client's own key and
cuts batches from the front, the last one as short as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import I32, I64, Ragged, offsets_of
from fedmosaic.data.negatives import sample_negatives
from fedmosaic.data.training_set import TrainingSet

ExamplePart = Literal["all", "support", "query"]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of some clients, grouped by client: item, label, and which of the group's users each belongs to."""

    items: I32
    labels: npt.NDArray[np.float32]
    users: I32  # place among all members
    places: I32  # among the user's positives, or among its negatives
    offsets: I64  # per client
    members: Ragged  # users of each client
    client_ids: I64  # in the federation

    def part(self, part: ExamplePart) -> tuple[I64, I64]:
        """Places of a part's examples, and where each client's begin: every other positive and negative, or the rest.

        A user with one positive has all of its examples in both parts.
        """
        if part == "all":
            return np.arange(self.items.size), self.offsets
        wanted = self.places % 2 == (part == "query")
        positives = np.bincount(self.users[self.labels == 1], minlength=self.members.values.size)
        wanted |= (positives < 2)[self.users]
        before = np.concatenate([[0], np.cumsum(wanted)])
        return np.flatnonzero(wanted), before[self.offsets]


def draw_cohort(n_clients: int, share: float, *, seed: int, round: int) -> I64:
    """The clients of a round, increasing: a keyed draw without replacement; at least one.

    >>> draw_cohort(10, 0.3, seed=0, round=1).size
    3
    """
    wanted = max(1, round_half_up(share * n_clients))
    if wanted >= n_clients:
        return np.arange(n_clients)
    ticket = keys.draws(keys.derive(seed=seed, purpose=keys.Purpose.COHORT, round=round), n_clients)
    return np.sort(np.argpartition(ticket, wanted)[:wanted])


def cohort_of(data: TrainingSet, share: float, *, seed: int, round: int, alone: bool = False) -> I64:
    """The clients of a round among those that hold at least one event; a device without has nothing to train on.

    alone: every client is drawn by itself, so that how many there are depends on luck; else as many as the share says.
    """
    members = data.members(np.arange(data.n_clients))
    events = np.bincount(members.rows, weights=data.histories.lengths[members.values], minlength=data.n_clients)
    able = np.flatnonzero(events > 0)
    if not able.size:
        raise SettingsError("nobody has a history; there is nothing to train on")
    if alone and share < 1:
        ticket = keys.draws(keys.derive(seed=seed, purpose=keys.Purpose.COHORT, round=round), data.n_clients)
        return able[ticket[able] < share * 2.0**64]
    return able[draw_cohort(able.size, share, seed=seed, round=round)]


def round_half_up(value: float) -> int:
    """Nearest whole number, halves upwards."""
    return int(np.floor(value + 0.5))


def make_examples(data: TrainingSet, clients: I64, *, negatives: int, seed: int, round: int) -> Examples:
    """Positives and fresh negatives of some clients; a user with an empty pool gets positives only."""
    users = data.members(clients)
    histories = data.histories.take(users.values)
    drawn = sample_negatives(
        data.excluded.take(users.values),
        negatives * histories.lengths,
        data.n_items,
        seed=seed,
        round=round,
        users=data.ids_of(users.values.astype(np.int64)),
    )
    # User by user: positives, then negatives.
    per_user = histories.lengths + drawn.lengths
    starts = offsets_of(per_user)
    items = np.empty(starts[-1], dtype=np.int32)
    labels = np.zeros(starts[-1], dtype=np.float32)
    places = np.empty(starts[-1], dtype=np.int32)
    at = np.repeat(starts[:-1] - histories.offsets[:-1], histories.lengths) + np.arange(histories.values.size)
    items[at], labels[at], places[at] = histories.values, 1, within(histories)
    at = np.repeat(starts[:-1] + histories.lengths - drawn.offsets[:-1], drawn.lengths) + np.arange(drawn.values.size)
    items[at], places[at] = drawn.values, within(drawn)
    owner = np.repeat(np.arange(users.values.size, dtype=np.int32), per_user)
    return Examples(items, labels, owner, places, starts[users.offsets], users, data.ids_of(clients))


def within(ragged: Ragged) -> I64:
    """Place of each value in its row."""
    return np.arange(ragged.values.size) - np.repeat(ragged.offsets[:-1], ragged.lengths)


def shuffled(offsets: I64, clients: I64, *, seed: int, round: int, epoch: int) -> I64:
    """For each client a keyed permutation of its examples, as positions in the flat arrays."""
    key = keys.derive(seed=seed, purpose=keys.Purpose.SHUFFLE, round=round, client=clients)
    order = np.arange(offsets[-1], dtype=np.int64)
    from fedmosaic.data.compiled import shuffle

    shuffle(order, offsets, keys.fold(key, keys.words(epoch)))
    return order


def localise(items: I32, offsets: I64, n_items: int) -> tuple[I64, Ragged]:
    """Number the distinct items of each client by first appearance: (row of each example, item of each row)."""
    index = np.empty(items.size, dtype=np.int64)
    touched = np.empty(items.size, dtype=np.int32)
    row_offsets = np.zeros(offsets.size, dtype=np.int64)
    from fedmosaic.data.compiled import localise as number

    number(items, offsets, n_items, index, touched, row_offsets)
    return index, Ragged(touched[: row_offsets[-1]], row_offsets)
