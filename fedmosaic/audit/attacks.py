"""Attacks of a curious server: from what it sees of one client, a score for every item that it was trained on.

    rows        an item's numbers are not zero
    norm        how far an item's numbers moved
    direction   rows of positives and of negatives lie on opposite rays of one direction, because a row's gradient is
                residual · score vector: project on the leading right-singular vector; the fewer are the positives
    frequency   in how many rounds an item's numbers were not zero: negatives change, positives do not
    disaggregation   rounds with other cohorts, regressed on who was there, then direction

A guess is as many items as the client has, the best scored ones; with ties, in expectation. `f1` is then precision and
recall at once; `auc` the chance that an item of the client is scored above one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
RIDGE = 1.0  # of the regression on who was there


@dataclass(frozen=True)
class Guess:
    """How good guesses are, over some clients."""

    f1: float
    auc: float

    @staticmethod
    def of(scores: Sequence[F64], truth: Sequence[npt.NDArray[Any]]) -> Guess:
        """Means over clients: of every one the scores of all items, and the items that it holds."""
        found = np.array([_judged(s, t) for s, t in zip(scores, truth, strict=True)])
        return Guess(*(float(value) for value in found.mean(axis=0)))


def _judged(scores: F64, held: npt.NDArray[Any]) -> tuple[float, float]:
    """F1 of the best |held| items and area under the curve; ties in expectation.

    >>> _judged(np.array([3.0, 2.0, 1.0, 0.0]), np.array([0, 2]))
    (0.5, 0.75)
    """
    mine = np.zeros(scores.size, dtype=bool)
    mine[held] = True
    count = int(mine.sum())
    edge = np.partition(scores, -count)[-count]
    above, level = scores > edge, scores == edge
    hits = (above & mine).sum() + (count - above.sum()) * (level & mine).sum() / level.sum()
    order = np.argsort(scores, kind="stable")
    _, start, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.empty(scores.size)
    ranks[order] = np.repeat(start + (counts + 1) / 2, counts)  # mean rank of equals
    others = scores.size - count
    area = (ranks[mine].sum() - count * (count + 1) / 2) / (count * others)
    return float(hits / count), float(area)


def rows(seen: F64) -> F64:
    """Whether a row is not zero."""
    return np.asarray(seen.any(axis=1), dtype=np.float64)


def norm(seen: F64) -> F64:
    """The norm of every row."""
    found: F64 = np.linalg.norm(seen, axis=1)
    return found


def direction(seen: F64) -> F64:
    """The projection of every row on the leading direction, with the sign that fewer rows have."""
    moved = seen[seen.any(axis=1)]
    if not moved.size:
        return np.zeros(len(seen))
    _, axes = np.linalg.eigh(moved.T @ moved)
    along: F64 = seen @ axes[:, -1]
    return -along if (along > 0).sum() > (along < 0).sum() else along


ATTACKS = {"rows": rows, "norm": norm, "direction": direction}


def disaggregated(sums: F64, there: npt.NDArray[np.bool_]) -> F64:
    """What every client sent on average, as far as sums over cohorts tell: U = M' (M M' + ridge I)^-1 S.

    sums: [rounds, numbers]. there: [rounds, clients].
    """
    members = there.astype(np.float64)
    weights = np.linalg.solve(members @ members.T + RIDGE * np.eye(len(members)), sums)
    found: F64 = members.T @ weights
    return found
