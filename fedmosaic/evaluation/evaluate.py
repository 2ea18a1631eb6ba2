"""Evaluation: rank the held-out items among all unseen items, and among frozen candidates, in one pass.

Scores are computed for blocks of users, so memory is bounded whatever the catalogue. Seen items are never candidates:
training items always, validation items when the test part is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import ScoreError
from fedmosaic.core.looks import Glance, Shown
from fedmosaic.core.ragged import I32, I64, Ragged
from fedmosaic.data.negatives import Candidates
from fedmosaic.data.split import Part, Split
from fedmosaic.evaluation.metrics import Ranks, by_group

BLOCK_BYTES = 128 << 20


class Scorer(Protocol):
    """What answers a query: scores of the whole catalogue for some users."""

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Array [len(users), items]; higher is better, any scale, finite."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Shown):
    """Ranks under both protocols, and what was put in front of people (top-10 lists of the evaluated users)."""

    part: Part
    full: Ranks
    sampled: Ranks | None
    top: I32
    popularity: I64  # training interactions per item
    activity: I64  # training interactions per user

    def glance(self) -> Glance:
        """The usual metrics of both rankings, in percent."""
        tables = {"full": self.full.table()} | ({"sampled": self.sampled.table()} if self.sampled is not None else {})
        names = ("hr@5", "hr@10", "ndcg@10", "hr@20")
        tables["chance (full)"] = self.full.chance().table()
        rows = [(name, *(f"{100 * table[n]:.2f}" for n in names)) for name, table in tables.items()]
        users = np.unique(self.full.user).size
        head = ("percent", *(n.upper() for n in names))
        return Glance(f"Evaluation: {self.part}, {users:,} users, coverage@10 {self.coverage:.1%}", (), head, rows)

    def summary(self) -> dict[str, Any]:
        """Means at all cuts, coverage, popularity bias, and results by activity and popularity group."""
        result: dict[str, Any] = {"full": self.full.table()}
        if self.sampled is not None:
            result["sampled"] = self.sampled.table()
        result["full"] |= {"coverage@10": self.coverage, "popularity@10": self.popularity_bias}
        result["groups"] = {
            "user activity": by_group(self.full, self._thirds(self.activity, self.full.user, "users")),
            "item popularity": by_group(self.full, self._thirds(self.popularity, self.full.item, "items")),
        }
        return result

    @property
    def coverage(self) -> float:
        """Share of the catalogue that appears in somebody's top 10."""
        return np.unique(self.top[self.top >= 0]).size / self.popularity.size

    @property
    def popularity_bias(self) -> float:
        """Mean popularity percentile of what is recommended: 0.5 is no bias, 1 is only the most popular item."""
        order = np.argsort(np.argsort(self.popularity, kind="stable"), kind="stable")
        percentile = (order + 0.5) / order.size
        return float(percentile[self.top[self.top >= 0]].mean())

    @staticmethod
    def _thirds(weight: I64, index: I32, noun: str) -> dict[str, npt.NDArray[np.bool_]]:
        """Held-out rows in three groups by weight, cut so that each holds about a third of them."""
        low, high = np.quantile(weight[index], [1 / 3, 2 / 3])
        w = weight[index]
        return {
            f"least ({noun} with up to {low:g})": w <= low,
            f"middle (up to {high:g})": (w > low) & (w <= high),
            f"most (over {high:g})": w > high,
        }


def evaluate(
    scorer: Scorer,
    split: Split,
    part: Part = "test",
    candidates: Candidates | None = None,
    *,
    top_k: int = 10,
) -> Evaluation:
    """Rank every held-out item of a part; see `Ranks` for the metrics and their handling of ties.

    scorer: what answers queries. split, part: what is held out. candidates: frozen lists for 1 + n ranking, if wanted.
    top_k: length of the lists that are kept, for coverage and popularity bias.
    """
    held_out, seen = split.held_out(part), split.seen(part)
    users = np.flatnonzero(held_out.lengths > 0)
    block = max(1, BLOCK_BYTES // (8 * max(split.n_items, 1)))
    full: list[Ranks] = []
    sampled: list[Ranks] = []
    top: list[I32] = []
    for begin in range(0, users.size, block):
        chosen = users[begin : begin + block]
        scores = np.array(checked_scores(scorer, chosen, split.n_items))
        positives = held_out.take(chosen)
        if candidates is not None:
            sampled.append(_rank_sampled(scores, chosen, positives, candidates.of(part).take(chosen)))
        hidden = seen.take(chosen)
        target = scores[positives.rows, positives.values]
        scores[hidden.rows, hidden.values] = -np.inf
        if top_k:
            top.append(top_items(scores, top_k))
        scores[positives.rows, positives.values] = target  # a pair kept on both sides is still ranked
        full.append(_rank_full(scores, chosen, positives, target))
    return Evaluation(
        part=part,
        full=_join(full),
        sampled=_join(sampled) if candidates is not None else None,
        top=np.concatenate(top) if top else np.empty((0, 0), dtype=np.int32),
        popularity=np.bincount(split.train.values, minlength=split.n_items),
        activity=split.train.lengths,
    )


def rank_unseen(scores: npt.NDArray[np.floating], positives: Ragged, seen: Ragged) -> Ranks:
    """Ranks of held-out items among all items that a user has not seen; a row of scores per user, changed in place."""
    target = scores[positives.rows, positives.values]
    scores[seen.rows, seen.values] = -np.inf
    scores[positives.rows, positives.values] = target  # a pair kept on both sides is still ranked
    return _rank_full(scores, np.arange(len(positives)), positives, target)


def make_probe(split: Split, part: Part, candidates: Candidates) -> Ragged:
    """Per user the items that 1 + n ranking needs scores of: the held-out ones, then the candidates."""
    held, lists = split.held_out(part), candidates.of(part)
    listed = np.where(held.lengths > 0, lists.lengths, 0)
    rows = np.concatenate([held.rows, lists.rows[np.repeat(listed > 0, lists.lengths)]])
    values = np.concatenate([held.values, lists.values[np.repeat(listed > 0, lists.lengths)]])
    return Ragged.group(rows, values, split.n_users)


def rank_probe(scores: npt.NDArray[np.floating], probe: Ragged, held: Ragged) -> Ranks:
    """Ranks of the held-out items from the flat scores of a probe."""
    if not np.isfinite(scores).all():
        raise ScoreError("scores hold NaN or infinite values; did training diverge?")
    above, tied = np.zeros(held.values.size, dtype=np.int32), np.zeros(held.values.size, dtype=np.int32)
    from fedmosaic.evaluation.compiled import count

    count(scores, probe.offsets, held.offsets, above, tied)
    rows = held.rows
    candidates = probe.lengths[rows]
    return Ranks(rows, held.values, above, tied, candidates.astype(np.int32))


def checked_scores(scorer: Scorer, users: I64, n_items: int) -> npt.NDArray[np.floating]:
    """Scores of a block, refused when they cannot be ranked."""
    scores = scorer.scores(users)
    if scores.shape != (users.size, n_items):
        raise ScoreError(f"scores have shape {scores.shape}, expected {(users.size, n_items)}")
    if not np.isfinite(scores).all():
        row = int(np.argmax(~np.isfinite(scores).all(axis=1)))
        raise ScoreError(f"scores of user position {users[row]} hold NaN or infinite values; did training diverge?")
    return scores


def top_items(scores: npt.NDArray[np.floating], k: int) -> I32:
    """Best items of each row, best first, ties to the lower position; -1 where a row has fewer (scores of -inf)."""
    k = min(k, scores.shape[1])
    top = np.argpartition(-scores, k - 1, axis=1)[:, :k].astype(np.int32)
    values = np.take_along_axis(scores, top, axis=1)
    edge = values.min(axis=1)
    split_ties = (scores >= edge[:, None]).sum(axis=1) > k
    for row in np.flatnonzero(split_ties & np.isfinite(edge)):  # the cut runs through a tie: choose by position
        certain = np.flatnonzero(scores[row] > edge[row])
        level = np.flatnonzero(scores[row] == edge[row])[: k - certain.size]
        top[row] = np.concatenate([certain, level])
    values = np.take_along_axis(scores, top, axis=1)
    order = np.lexsort((top, -values), axis=1)
    top, values = np.take_along_axis(top, order, axis=1), np.take_along_axis(values, order, axis=1)
    return np.where(np.isneginf(values), np.int32(-1), top)


def _rank_full(scores: Any, users: I64, positives: Ragged, target: Any) -> Ranks:
    rows = positives.rows
    above = np.empty(rows.size, dtype=np.int32)
    tied = np.empty(rows.size, dtype=np.int32)
    step = max(1, BLOCK_BYTES // (8 * scores.shape[1]))
    single = rows.size == users.size and (positives.lengths == 1).all()
    for i in range(0, rows.size, step):
        part = slice(i, i + step)
        block = scores[part] if single else scores[rows[part]]
        above[part] = (block > target[part, None]).sum(axis=1)
        tied[part] = (block == target[part, None]).sum(axis=1) - 1
    candidates = np.isfinite(scores).sum(axis=1).astype(np.int32)[rows]
    return Ranks(users[rows].astype(np.int32), positives.values, above, tied, candidates)


def _rank_sampled(scores: Any, users: I64, positives: Ragged, candidates: Ragged) -> Ranks:
    rows = positives.rows
    # One list per held-out item: the candidates, and the user's other held-out items, so that all share one ranking.
    lists = Ragged.group(
        np.concatenate([candidates.rows, rows]), np.concatenate([candidates.values, positives.values]), users.size
    ).take(rows)
    owner = lists.rows
    value = scores[rows[owner], lists.values]
    target = scores[rows, positives.values]
    above = np.bincount(owner[value > target[owner]], minlength=rows.size).astype(np.int32)
    tied = np.bincount(owner[value == target[owner]], minlength=rows.size).astype(np.int32) - 1  # not with itself
    return Ranks(users[rows].astype(np.int32), positives.values, above, tied, lists.lengths.astype(np.int32))


def _join(parts: list[Ranks]) -> Ranks:
    names = ("user", "item", "above", "tied", "candidates")
    return Ranks(*(np.concatenate([getattr(p, n) for p in parts] or [np.empty(0, np.int32)]) for n in names))
