"""Ragged arrays: `values` cut into rows by `offsets`. One form for histories, held-out items and candidates.

>>> r = Ragged.from_rows([[3, 1], [], [2]])
>>> len(r), r[0].tolist(), r.lengths.tolist()
(3, [3, 1], [2, 0, 1])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy import sparse

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Row i is `values[offsets[i]:offsets[i + 1]]`; checked once, at construction."""

    values: I32
    offsets: I64

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or self.offsets.size == 0 or self.offsets[0] != 0:
            raise ValueError("offsets must be one-dimensional and start at 0")
        if self.offsets[-1] != self.values.size or (np.diff(self.offsets) < 0).any():
            raise ValueError("offsets must not decrease and must end at the number of values")

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Build from nested lists."""
        lengths = np.array([len(r) for r in rows], dtype=np.int64)
        flat = [v for row in rows for v in row]
        return cls(np.array(flat, dtype=np.int32), offsets_of(lengths))

    @classmethod
    def group(cls, rows: npt.NDArray[np.integer], values: npt.NDArray[np.integer], n_rows: int) -> Ragged:
        """Group `values` by their row number, keeping the given order inside a row."""
        order = np.argsort(rows, kind="stable") if (np.diff(rows) < 0).any() else slice(None)
        lengths = np.bincount(rows, minlength=n_rows).astype(np.int64)
        return cls(values[order].astype(np.int32, copy=False), offsets_of(lengths))

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of several, one after the other.

        >>> [row.tolist() for row in Ragged.join([Ragged.from_rows([[1], [2, 3]]), Ragged.from_rows([[], [4]])])]
        [[1], [2, 3], [], [4]]
        """
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __getitem__(self, row: int) -> I32:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[I32]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> I64:
        """Number of values in each row."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> I32:
        """The row number of each value."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.lengths)

    def take(self, rows: npt.NDArray[np.integer]) -> Ragged:
        """The chosen rows, in the given order."""
        return Ragged(self.values[slots(self, rows)], offsets_of(self.lengths[rows]))

    def only(self, mask: npt.NDArray[np.bool_]) -> Ragged:
        """The chosen values of each row."""
        if mask.all():
            return self
        lengths = np.bincount(self.rows[mask], minlength=len(self))
        return Ragged(self.values[mask], offsets_of(lengths))

    def unique(self) -> Ragged:
        """Each row sorted, without repeats."""
        key = np.unique(self.rows.astype(np.int64) << 32 | self.values.astype(np.int64))
        return Ragged.group(key >> 32, key & 0xFFFFFFFF, len(self))

    def union(self, *others: Ragged) -> Ragged:
        """Row-wise union, sorted, without repeats."""
        parts = (self, *others)
        rows = np.concatenate([p.rows for p in parts])
        return Ragged.group(rows, np.concatenate([p.values for p in parts]), len(self)).unique()

    def to_csr(self, n_columns: int) -> sparse.csr_array:
        """Indicator matrix rows × columns (repeats count once)."""
        from scipy import sparse

        clean = self.unique()
        data = np.ones(clean.values.size, dtype=np.float32)
        shape = (len(clean), n_columns)
        return sparse.csr_array((data, clean.values.astype(np.int32), clean.offsets), shape=shape)


def offsets_of(lengths: npt.NDArray[np.integer]) -> I64:
    """Cumulative row starts: [0, l0, l0 + l1, ...]."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def slots(ragged: Ragged, rows: npt.NDArray[np.integer]) -> I64:
    """Places in the flat values of some rows, row after row.

    >>> slots(Ragged.from_rows([[5, 6], [7], [8]]), np.array([2, 0])).tolist()
    [3, 0, 1]
    """
    lengths = ragged.lengths[rows]
    starts = np.repeat(ragged.offsets[:-1][rows] - offsets_of(lengths)[:-1], lengths)
    return starts + np.arange(int(lengths.sum()), dtype=np.int64)
