"""Attacks of a curious server: from what it sees of one client, a score for every item that it was trained on.

    rows        an item's numbers are not zero
    norm        how far an item's numbers moved
    direction   rows of positives and of negatives lie on opposite rays of one direction, because a row's gradient is
                residual · score vector: project on the leading right-singular vector; the fewer are the positives
    frequency   in how many rounds an item's numbers were not zero: negatives change, positives do not
    disaggregation   rounds with other cohorts, regressed on who was there, then direction
    noise recovery   the key of noise that a fast generator drew, from two numbers of an upload

A guess is as many items as the client has, the best scored ones; with ties, in expectation. `f1` is then precision and
recall at once; `auc` the chance that an item of the client is scored above one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys

F64 = npt.NDArray[np.float64]
RIDGE = 1.0  # of the regression on who was there
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


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


def unmixed(words: Any) -> Any:
    """The states of SplitMix64 that gave some words: its finaliser is a bijection."""
    for by, factor in ((31, _M2), (27, _M1), (30, None)):
        found = words.copy()
        for _ in range(64 // by):
            found = words ^ (found >> np.uint64(by))
        words = found if factor is None else found * np.uint64(pow(factor, -1, 1 << 64))
    return words


def halves(draw: float, scale: float) -> Any:
    """32-bit words that a Laplace draw may have come from: 31 bits of its size, one of its sign."""
    size = round(float(np.exp(-abs(draw) / scale)) * 2.0**31) - 1
    spread = int(size * 1e-6) + 4  # the fast generator works in float32
    near = np.arange(max(size - spread, 0), min(size + spread + 1, 1 << 31), dtype=np.uint64)
    return near * np.uint64(2) + np.uint64(draw > 0)


def drawn_from(words: Any, scale: float) -> Any:
    """The two Laplace draws of 64-bit words."""
    pair = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=-1)
    size = -np.log(((pair >> np.uint64(1)).astype(np.float64) + 1) / 2.0**31)
    return scale * size * ((pair & np.uint64(1)).astype(np.float64) * 2 - 1)


def steps(at: int) -> Any:
    """How far the counter is from its key."""
    return np.array([(at + 1) * int(keys.GOLDEN) % (1 << 64)], np.uint64)


def recovered(noise: Any, scale: float) -> bool:
    """Whether Laplace noise gives its key away: keys that two neighbouring numbers leave possible, tried on others."""
    pairs = noise.reshape(-1, 2)
    at, check = (int(n) for n in np.argsort(-np.abs(pairs).min(axis=1))[:2])  # of rare draws few words are possible
    high, low = halves(pairs[at, 0], scale), halves(pairs[at, 1], scale)
    words = (high[:, None] << np.uint64(32) | low).ravel()
    found = unmixed(words) - steps(at)
    guesses = drawn_from(keys.mix(found + steps(check)), scale)
    return bool(np.isclose(guesses, pairs[check], atol=1e-4 * scale).all(axis=1).any())
