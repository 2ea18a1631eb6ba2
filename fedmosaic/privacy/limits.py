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


def add_cut(total: Statistics, client: Statistics, limits: dict[str, StatisticLimits]) -> None:
    """Add one client's statistics, cut to the limits, to a sum.

    >>> total = {"count": np.zeros(2)}
    >>> add_cut(total, {"count": np.array([-5.0, 1e6])}, {"count": StatisticLimits(0.0, 4.0, 2.0)})
    >>> total["count"].tolist()
    [0.0, 2.0]
    """
    from fedmosaic.privacy.compiled import add_within, squares_within

    for name, value in client.items():
        limit, numbers = limits[name], np.ascontiguousarray(value, np.float64).reshape(-1)
        norm = float(np.sqrt(squares_within(numbers, limit.low, limit.high)))
        factor = limit.size / norm if norm > limit.size else 1.0
        add_within(total[name].reshape(-1), numbers, limit.low, limit.high, factor)


def bounded_total(send: Callable[[int], Statistics], clients: int) -> Statistics:
    """The sum of what every client sends, cut to what most of some clients keep.

    send: of a client; those who set the limits are asked twice, so that nothing has to be kept.
    """
    some = np.unique(np.linspace(0, clients - 1, min(clients, LOOKED_AT)).astype(np.int64))
    limits = limits_of(send(int(client)) for client in some)
    total = {name: np.zeros(value.shape) for name, value in send(0).items()}
    for client in range(clients):
        add_cut(total, send(client), limits)
    return total
