"""Histories: what clients hold, item by item in order of time, with the times where they are known.

A closed form reads them as rows of an indicator matrix (`csr`), or in their order (`items`, `times`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedmosaic.core.ragged import I64, Ragged, slots

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True, eq=False)
class Histories:
    """Items of some clients, one row each, earliest first.

    times: beside every item, whole numbers of any unit; equal ones mean that the order is not known. None: no times.

    >>> seen = Histories(Ragged.from_rows([[2, 0], [1]]), 3, np.array([10, 20, 5]))
    >>> seen.take(np.array([1])).times.tolist(), seen.csr.toarray().tolist()
    ([5], [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    """

    items: Ragged
    n_items: int
    times: I64 | None = None

    def __post_init__(self) -> None:
        if self.times is not None and self.times.shape != self.items.values.shape:
            raise ValueError(f"{self.items.values.size} items have {self.times.size} times")

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def csr(self) -> sparse.csr_array:
        """The indicator matrix: clients x items, repeats count once."""
        return self.items.to_csr(self.n_items)

    def take(self, rows: npt.NDArray[np.integer]) -> Histories:
        """Some clients' histories."""
        times = None if self.times is None else self.times[slots(self.items, rows)]
        return Histories(self.items.take(rows), self.n_items, times)

    def followed_by(self, later: Histories) -> Histories:
        """Each client's history with a later part of it behind."""
        both = (self, later)
        rows = np.concatenate([h.items.rows for h in both])
        order = np.argsort(rows, kind="stable")
        times = None
        if self.times is not None and later.times is not None:
            times = np.concatenate([self.times, later.times])[order]
        values = np.concatenate([h.items.values for h in both])[order]
        return Histories(Ragged.group(rows[order], values, len(self)), self.n_items, times)
