"""Compiled loops of step rules and of fixed-point sums. Imported where they are first used: Numba takes its time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core.compiler import entry, piece
from fedmosaic.core.fixed_point import LIMIT, SCALE

I64 = npt.NDArray[np.int64]


@piece(error_model="numpy")
def move_by_adam(value: Any, gradient: Any, first: Any, second: Any, clock: Any, rates: Any, settings: Any) -> None:
    """Every row of a tensor once: its clock, its moments, itself."""
    one, time = np.float32(1), np.float64(0)
    keep1, keep2 = np.float32(settings[0]), np.float32(settings[1])
    eps, decay, left1, left2 = np.float32(settings[2]), np.float32(settings[3]), one, one
    for i in range(clock.size):
        clock[i] += one
        if clock[i] != time:  # neighbours mostly share a clock
            time = clock[i]
            left1, left2 = np.float32(1 - settings[0] ** time), np.float32(1 - settings[1] ** time)
        rate = rates[i] if rates.size > 1 else rates[0]
        x, g, m, v = value[i], gradient[i], first[i], second[i]
        for d in range(x.size):
            slope = g[d] + decay * x[d]
            m[d] += (one - keep1) * (slope - m[d])
            v[d] = keep2 * v[d] + (one - keep2) * slope * slope
            x[d] -= rate * (m[d] / left1) / (np.sqrt(v[d] / left2) + eps)


@entry(error_model="numpy")
def adam_rows(value: Any, gradient: Any, first: Any, second: Any, clock: Any, rates: Any, settings: Any) -> None:
    """`move_by_adam`, for Python to call."""
    move_by_adam(value, gradient, first, second, clock, rates, settings)


@entry(fastmath={"contract"})
def descend(value: Any, gradient: Any, rate: Any) -> None:
    """value -= rate · gradient, product and difference rounded once."""
    for i in range(value.shape[0]):
        for d in range(value.shape[1]):
            value[i, d] -= rate * gradient[i, d]


@entry()
def add_rows(total: I64, rows: npt.NDArray[np.int32], change: npt.NDArray[np.float32]) -> bool:
    """total[rows[k]] += change[k] in fixed point; false if a number is NaN or too large."""
    healthy = True
    for k in range(rows.size):
        row = np.uint32(rows[k])
        for d in range(change.shape[1]):
            healthy &= abs(change[k, d]) < LIMIT  # false for NaN too
            total[row, d] += np.int64(np.floor(np.float64(change[k, d]) * SCALE + 0.5))
    return healthy
