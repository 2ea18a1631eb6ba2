"""Uploads: what leaves a device, and how uploads add up.

    value      the trained copy itself; only a plain mean can use it, and it is computed from deltas, which sum alike
    delta      trained copy minus the copy received
    gradient   the sum of the gradients of the round's steps; the device's copy of the table stands still meanwhile

Sums are kept in fixed point: integers add the same in any order and grouping, so the server's state does not depend on
chunk, worker or arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import numba
import numpy as np
import numpy.typing as npt

from fedmosaic.errors import ScoreError

SCALE = float(1 << 32)  # resolution 2.3e-10
LIMIT = float(1 << 20)

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Upload:
    """What kind of change is sent, and for which rows.

    `dense` sends every row, zeros included: all messages have one size, and under a secure sum or noise the support is
    hidden. On its own it hides nothing, since rows that were not trained are exactly zero. `touched` sends the trained
    rows and their ids, and shows them to anybody who counts bytes. It decides bytes, not results.
    """

    kind: Literal["value", "delta", "gradient"] = "delta"
    support: Literal["dense", "touched"] = "dense"


@dataclass(frozen=True)
class Sum:
    """Uploads of a group of clients: fixed-point totals, rows' counts of senders, clients, examples, loss."""

    totals: Mapping[str, I64]
    touched: I64  # per item: clients that trained it
    clients: int
    examples: int
    loss: float

    def __add__(self, other: Sum) -> Sum:
        """Totals add; integers, so in any order."""
        return Sum(
            {name: value + other.totals[name] for name, value in self.totals.items()},
            self.touched + other.touched,
            self.clients + other.clients,
            self.examples + other.examples,
            self.loss + other.loss,
        )


def add_rows(total: I64, rows: npt.NDArray[np.int32], change: npt.NDArray[np.float32]) -> None:
    """total[rows[k]] += change[k] in fixed point; values that no healthy training reaches are refused."""
    width = prod(total.shape[1:])
    if not _add_rows(total.reshape(-1, width), rows, change.reshape(-1, width)):
        raise ScoreError("an upload holds NaN or huge values: training diverged; lower the learning rate")


def floating(total: I64) -> npt.NDArray[np.float64]:
    """Fixed point back to floats."""
    return np.asarray(total / SCALE)


@numba.njit(cache=True)
def _add_rows(total: I64, rows: npt.NDArray[np.int32], change: npt.NDArray[np.float32]) -> bool:
    healthy = True
    for k in range(rows.size):
        row = np.uint32(rows[k])
        for d in range(change.shape[1]):
            healthy &= abs(change[k, d]) < LIMIT  # false for NaN too
            total[row, d] += np.int64(np.floor(np.float64(change[k, d]) * SCALE + 0.5))
    return healthy
