"""Sums of statistics that are cut to what most clients keep: for servers that see every client's, against liars.

    number <- cut to [low, high]       low, high: what nine tenths of the clients' own extremes keep
    part   <- part · min(1, size / |part|)       size: the norm that nine tenths of the clients keep, per part

Honest statistics are counts and weights of one history, so their extremes hardly differ between clients (a count of
pairs is 0 or 1), and a lie about them is cut to what one made-up history could say. Nobody is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Statistics = dict[str, npt.NDArray[Any]]
KEPT = 0.9
LOOKED_AT = 200  # clients whose statistics set the limits


@dataclass(frozen=True)
class StatisticLimits:
    """Bounds on a part of the statistics."""

    low: float
    high: float
    size: float


def limits_of(clients: Iterable[Statistics]) -> dict[str, StatisticLimits]:
    """What most clients keep, by part.

    >>> many = [{"count": np.array([0.0, 1.0])}] * 99 + [{"count": np.array([-5.0, 1e6])}]
    >>> limits_of(many)["count"]
    StatisticLimits(low=0.0, high=1.0, size=1.0)
    """
    seen: dict[str, list[tuple[float, float, float]]] = {}
    for client in clients:
        for name, value in client.items():
            extremes = (float(value.min(initial=0.0)), float(value.max(initial=0.0)))
            seen.setdefault(name, []).append((*extremes, float(np.linalg.norm(value))))
    found = {}
    for name, rows in seen.items():
        low, high, size = np.array(rows).T
        found[name] = StatisticLimits(
            float(np.quantile(low, 1 - KEPT)), float(np.quantile(high, KEPT)), float(np.quantile(size, KEPT))
        )
    return found


def cut(client: Statistics, limits: dict[str, StatisticLimits]) -> Statistics:
    """One client's statistics within the limits."""
    found = {}
    for name, value in client.items():
        limit, within = limits[name], value
        if value.min(initial=0.0) < limit.low or value.max(initial=0.0) > limit.high:
            within = np.clip(value, limit.low, limit.high)
        norm = float(np.linalg.norm(within))
        found[name] = within * (limit.size / norm) if norm > limit.size else within
    return found


def bounded_total(send: Callable[[int], Statistics], clients: int) -> Statistics:
    """The sum of what every client sends, cut to what most of some clients keep.

    send: of a client; those who set the limits are asked twice, so that nothing has to be kept.
    """
    some = np.unique(np.linspace(0, clients - 1, min(clients, LOOKED_AT)).astype(np.int64))
    limits = limits_of(send(int(client)) for client in some)
    total = cut(send(0), limits)
    total = {name: value.copy() for name, value in total.items()}
    for client in range(1, clients):
        for name, value in cut(send(client), limits).items():
            total[name] += value
    return total
