"""Ranking metrics from ranks, with ties at their expected value.

A held-out item with `above` candidates scored higher and `tied` scored the same takes rank above+1 .. above+tied+1
with equal chance, and every metric is the mean over those ranks. A constant scorer therefore gets exactly chance.

    HR@k      1 if a held-out item is among the first k
    Recall@k  share of the user's held-out items among the first k
    NDCG@k    sum over held-out items with rank r <= k of 1 / log2(r + 1), divided by its best possible value
    MRR@k     1 / r of the first held-out item, 0 if r > k
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError, one_of
from fedmosaic.core.ragged import I32, I64

F64 = npt.NDArray[np.float64]
CUTS = (5, 10, 20, 50)


@dataclass(frozen=True, eq=False)
class Ranks:
    """One entry per held-out interaction, grouped by user.

    >>> r = Ranks(*(np.array([v], dtype=np.int32) for v in (0, 7, 0, 99, 100)))   # a constant scorer, 1 + 99
    >>> round(r.mean("hr", 10), 4), round(r.mean("ndcg", 10), 4)
    (0.1, 0.0454)
    """

    user: I32
    item: I32
    above: I32
    tied: I32
    candidates: I32

    def chance(self) -> Ranks:
        """The same held-out items under a scorer that knows nothing."""
        return Ranks(self.user, self.item, np.zeros_like(self.above), self.candidates - 1, self.candidates)

    def only(self, mask: npt.NDArray[np.bool_]) -> Ranks:
        """A subset of the held-out interactions."""
        return Ranks(*(getattr(self, n)[mask] for n in ("user", "item", "above", "tied", "candidates")))

    @cached_property
    def users(self) -> I32:
        """The evaluated users, increasing: the order of every per-user array."""
        return np.unique(self.user)

    def mean(self, name: str, k: int) -> float:
        """The metric averaged over users."""
        return float(self.per_user(name, k).mean()) if self.users.size else float("nan")

    def table(self, cuts: Sequence[int] = CUTS) -> dict[str, float]:
        """All metrics at all cuts: {"hr@10": ...}."""
        return {f"{name}@{k}": self.mean(name, k) for name in METRICS for k in cuts}

    def per_user(self, name: str, k: int) -> F64:
        """One value per evaluated user, in the order of `users`."""
        one_of("metric", name, METRICS)
        values = np.asarray(METRICS[name].per_user(self, k), dtype=np.float64)
        if values.shape != self.users.shape:
            raise SettingsError(f"metric {name!r} gives one value per user, {self.users.size}; it gave {values.shape}")
        return values

    def by_user(self, values: F64) -> F64:
        """Values of held-out interactions, added up per user."""
        return np.bincount(self._row, weights=values, minlength=self.users.size).astype(np.float64)

    @cached_property
    def _row(self) -> I64:
        return np.searchsorted(self.users, self.user).astype(np.int64)

    @cached_property
    def relevant(self) -> I64:
        """Held-out interactions of each user."""
        return np.bincount(self._row, minlength=self.users.size)

    def expected(self, gain: F64) -> F64:
        """Mean of gain(rank) over the tied ranks, gain being 0 past its end."""
        prefix = np.concatenate([[0.0], np.cumsum(gain)])
        end = np.minimum(self.above + self.tied + 1, gain.size)
        begin = np.minimum(self.above, gain.size)
        return np.asarray((prefix[end] - prefix[begin]) / (self.tied + 1.0))

    def of_first(self, gain: F64) -> F64:
        """Expected gain of the best-ranked held-out item; ties among several relevant items are hypergeometric."""
        if (self.relevant == 1).all():
            return self.by_user(self.expected(gain))
        best = np.full(self.users.size, np.iinfo(np.int32).max)
        np.minimum.at(best, self._row, self.above)
        leads = self.above == best[self._row]
        group = np.zeros(self.users.size, dtype=np.int64)
        group[self._row[leads]] = self.tied[leads] + 1
        relevant = np.bincount(self._row[leads], minlength=self.users.size)
        result = np.zeros(self.users.size)
        for row in np.flatnonzero(best < gain.size):
            size, hits = int(group[row]), int(relevant[row])
            place = np.arange(1, min(size - hits + 1, gain.size - best[row]) + 1)
            # P(first hit at place j) = C(size - j, hits - 1) / C(size, hits)
            log_p = _log_choose(size - place, hits - 1) - _log_choose(size, hits)
            result[row] = float(np.exp(log_p) @ gain[best[row] + place - 1])
        return result


@dataclass(frozen=True)
class Metric:
    """A ranking metric: `per_user(ranks, k)` gives one value per evaluated user, in the order of `ranks.users`.

    `ranks.expected(gain)` is the mean gain of each held-out item over its tied ranks, `ranks.by_user` adds up per user,
    `ranks.of_first(gain)` is the expected gain of a user's best-ranked item, `ranks.relevant` counts held-out items.
    """

    title: str
    per_user: Callable[[Ranks, int], F64]


def _recall(ranks: Ranks, k: int) -> F64:
    return np.asarray(ranks.by_user(ranks.expected(np.ones(k))) / ranks.relevant)


def _ndcg(ranks: Ranks, k: int) -> F64:
    gain = 1 / np.log2(np.arange(k) + 2)
    ideal = np.cumsum(gain)[np.minimum(ranks.relevant, k) - 1]
    return np.asarray(ranks.by_user(ranks.expected(gain)) / ideal)


METRICS: dict[str, Metric] = {
    "hr": Metric("a held-out item is among the first k", lambda ranks, k: ranks.of_first(np.ones(k))),
    "recall": Metric("share of the held-out items among the first k", _recall),
    "ndcg": Metric("discounted gain of the held-out items, over its best value", _ndcg),
    "mrr": Metric("1 / rank of the first held-out item", lambda ranks, k: ranks.of_first(1 / (np.arange(k) + 1))),
}


def register_metric(name: str, metric: Metric) -> None:
    """Add a metric of one's own: it stands in results at all cuts, and `select=` chooses rounds by it at any cut."""
    if name in METRICS or not name.isidentifier():
        raise SettingsError(f"{name!r} is taken, or is no plain name; choose another")
    METRICS[name] = metric


def _log_choose(n: Any, k: Any) -> Any:
    from scipy import special

    return special.gammaln(n + 1.0) - special.gammaln(k + 1.0) - special.gammaln(n - k + 1.0)


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: F64, *, level: float = 0.95, samples: int = 2000, seed: int = 0) -> Interval:
    """Percentile interval of the mean, resampling users.

    values: one per user. level: coverage. samples: how many resamples. seed: draws them.

    >>> bootstrap(np.ones(10))
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    means = _resampled_means(values, samples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high))


@dataclass(frozen=True)
class Paired:
    """Difference of two methods on the same users: interval by bootstrap, p by random sign flips (two-sided)."""

    difference: float
    low: float
    high: float
    p: float


def paired_test(a: F64, b: F64, *, samples: int = 5000, seed: int = 0) -> Paired:
    """Is `a` different from `b`, user by user?"""
    if a.shape != b.shape:
        raise ValueError(f"paired test of different users: {a.size} against {b.size} values")
    delta = a - b
    interval = bootstrap(delta, seed=seed)
    rng = keys.generator(seed=seed, purpose=keys.Purpose.BOOTSTRAP, round=1)
    extreme = 0
    for _ in range(samples):
        signs = rng.integers(0, 2, delta.size) * 2 - 1
        extreme += abs(float((delta * signs).mean())) >= abs(interval.mean) - 1e-15
    return Paired(interval.mean, interval.low, interval.high, (extreme + 1) / (samples + 1))


def holm(ps: Sequence[float]) -> list[float]:
    """p values adjusted for their number (Holm 1979): the chance of one false alarm among all stays below the level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for done, at in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, ps[at] * (len(ps) - done)))
        adjusted[at] = largest
    return adjusted


def _resampled_means(values: F64, samples: int, seed: int) -> F64:
    rng = keys.generator(seed=seed, purpose=keys.Purpose.BOOTSTRAP)
    return np.array([values[rng.integers(0, values.size, values.size)].mean() for _ in range(samples)])


def by_group(ranks: Ranks, group: Mapping[str, npt.NDArray[np.bool_]], k: int = 10) -> dict[str, dict[str, float]]:
    """HR and NDCG inside named groups of held-out interactions, with the number of each."""
    result = {}
    for name, mask in group.items():
        part = ranks.only(mask)
        if part.user.size:
            result[name] = {
                "n": float(part.user.size),
                f"hr@{k}": part.mean("hr", k),
                f"ndcg@{k}": part.mean("ndcg", k),
            }
    return result
