"""Uploads: what leaves a device, and how uploads add up.

    delta      trained copy minus the copy received (the same as sending the copy itself, under a mean)
    gradient   the sum of the gradients of the round's steps; the device's copy of the table stands still meanwhile

Sums are kept in fixed point: integers add the same in any order and grouping, so the server's state does not depend on
chunk, worker or arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.errors import ScoreError

SCALE = float(1 << 32)  # resolution 2.3e-10
LIMIT = float(1 << 20)

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Upload:
    """What kind of change is sent, and for which rows.

    `dense` sends every row, so that the message tells nothing about the history; `touched` sends the rows that were
    trained, which tells the server (nearly) what the user holds. It decides bytes, not results.
    """

    kind: Literal["delta", "gradient"] = "delta"
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


def fixed(values: npt.NDArray[Any]) -> I64:
    """Floats as fixed point; values that no healthy training reaches are refused."""
    if values.size and not np.abs(values).max() < LIMIT:
        raise ScoreError("an upload holds NaN or huge values: training diverged; lower the learning rate")
    return np.floor(values.astype(np.float64) * SCALE + 0.5).astype(np.int64)


def floating(total: I64) -> npt.NDArray[np.float64]:
    """Fixed point back to floats."""
    return np.asarray(total / SCALE)
