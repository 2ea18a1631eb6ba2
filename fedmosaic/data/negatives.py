"""Negative pools, keyed sampling, and frozen candidate lists.

    strict     all items minus the user's *training* positives (the default: what a device can know)
    legacy     all items minus *all* of the user's items, held-out ones included (published code; it leaks, because
               the held-out item is then the one unseen item that is never pushed down)
    isolated   legacy, minus the sampled evaluation candidates too (symmetric inside them, still peeks)

A negative is the r-th item outside the excluded list, r drawn from the client's key: one draw each, no rejection, so
the result depends on nothing but (seed, round, client, slot). Draws are with replacement. A user whose pool is empty
gets no negatives.

The compiled engine draws the same numbers in a loop of its own: `draw_examples` in engines/fused/pieces.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys
from fedmosaic.core.errors import UnknownNameError
from fedmosaic.core.ragged import Ragged, offsets_of
from fedmosaic.data.split import Part, Split
from fedmosaic.data.training_set import TrainingSet

Pool = Literal["strict", "legacy", "isolated"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Frozen lists for 1 + n ranking: disjoint for validation and test where the user has enough unseen items."""

    validation: Ragged
    test: Ragged
    wanted: int
    evaluated: npt.NDArray[np.bool_]

    def of(self, part: Part) -> Ragged:
        """The lists of a part."""
        return self.validation if part == "validation" else self.test

    @property
    def short(self) -> int:
        """Evaluated users with fewer than the wanted number of test candidates."""
        return int(((self.test.lengths < self.wanted) & self.evaluated).sum())


def excluded_items(split: Split, pool: Pool, candidates: Candidates | None = None) -> Ragged:
    """The sorted items that can never be a training negative, per user."""
    if pool == "strict":
        return split.train.unique()
    everything = split.train.union(split.validation, split.test)
    if pool == "legacy":
        return everything
    if pool == "isolated":
        if candidates is None:
            raise ValueError("the isolated pool needs the candidate lists it keeps out")
        return everything.union(candidates.validation, candidates.test)
    raise UnknownNameError("pool", pool, get_args(Pool))


def sample_negatives(
    excluded: Ragged,
    counts: npt.NDArray[np.integer],
    n_items: int,
    *,
    seed: int,
    round: int,
    users: npt.NDArray[np.integer] | None = None,
) -> Ragged:
    """`counts[u]` uniform draws for each user from the items outside `excluded[u]`.

    `users` names the rows when `excluded` holds only some of the users.

    >>> r = sample_negatives(Ragged.from_rows([[0, 2], [1]]), np.array([3, 2]), 4, seed=0, round=1)
    >>> r.lengths.tolist(), bool(np.isin(r[0], [1, 3]).all())
    ([3, 2], True)
    """
    counts = np.where(excluded.lengths < n_items, counts, 0)
    who = np.arange(len(excluded)) if users is None else users
    client_keys = keys.derive(seed=seed, purpose=keys.Purpose.NEGATIVES, round=round, client=who)
    offsets = offsets_of(counts)
    out = np.empty(offsets[-1], dtype=np.int32)
    from fedmosaic.data.compiled import draw

    draw(excluded.values, excluded.offsets, client_keys, offsets, n_items, out)
    return Ragged(out, offsets)


def draw_candidates(split: Split, wanted: int = 99, *, seed: int = 0) -> Candidates:
    """Distinct items outside all of the user's history, drawn once: first half for validation, second for test.

    A user with fewer than 2·wanted unseen items gets what there is, half and half, never the same item twice.
    """
    history = split.train.union(split.validation, split.test)
    evaluated = (split.test.lengths + split.validation.lengths) > 0
    unseen = split.n_items - history.lengths
    counts = np.where(evaluated, np.minimum(2 * wanted, unseen), 0)
    client_keys = keys.derive(seed=seed, purpose=keys.Purpose.CANDIDATES, client=np.arange(split.n_users))
    offsets = offsets_of(counts)
    out = np.empty(offsets[-1], dtype=np.int32)
    from fedmosaic.data.compiled import draw_distinct

    draw_distinct(history.values, history.offsets, client_keys, offsets, split.n_items, out)
    drawn = Ragged(out, offsets)
    first = np.arange(out.size) - np.repeat(offsets[:-1], counts) < np.repeat(counts // 2, counts)
    rows = drawn.rows
    validation, test = (Ragged.group(rows[mask], out[mask], split.n_users) for mask in (first, ~first))
    return Candidates(validation, test, wanted, split.test.lengths > 0)


def training_set(split: Split, pool: Pool, candidates: Candidates | None = None) -> TrainingSet:
    """What training may see of a split under a negative pool (`isolated` needs to know the candidate lists)."""
    if pool == "isolated" and candidates is None:
        candidates = draw_candidates(split)
    excluded = excluded_items(split, pool, candidates)
    return TrainingSet(split.train, excluded, split.n_items, times=split.times.get("train"))
