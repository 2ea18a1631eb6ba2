"""Vocabularies: sorted distinct ids. Outside there are ids (text or integers, opaque), inside there are positions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core import keys
from fedmosaic.core.errors import UnknownNameError
from fedmosaic.core.ragged import I32, I64

Id = str | int


@dataclass(frozen=True, eq=False)
class Vocab:
    """Sorted distinct ids; a position is an index into them.

    >>> v = Vocab.of(pl.Series(["b", "a", "b"]))
    >>> v.positions(["a", "zz"]).tolist(), v.take(np.array([1])).to_list()
    ([0, -1], ['b'])
    """

    ids: pl.Series
    kind: str = "id"

    @classmethod
    def of(cls, column: pl.Series, kind: str = "id") -> Vocab:
        """The vocabulary of a column."""
        return cls(column.unique().sort().alias(kind), kind)

    def __len__(self) -> int:
        return self.ids.len()

    def encode(self, column: pl.Series) -> I32:
        """Positions of a column whose every id is known (fast, for whole tables)."""
        lookup = pl.DataFrame({"id": self.ids, "position": np.arange(len(self), dtype=np.int32)})
        joined = column.alias("id").to_frame().join(lookup, on="id", how="left", maintain_order="left")
        return joined["position"].to_numpy().astype(np.int32, copy=False)

    def positions(self, ids: Iterable[Id]) -> I64:
        """Positions of ids, -1 where unknown. A number finds the text that spells it, and the other way round."""
        return np.array([self._find(i) for i in ids], dtype=np.int64)

    def require(self, ids: Iterable[Id]) -> I64:
        """Positions of ids; an unknown one is an error that shows near names."""
        wanted = list(ids)
        found = self.positions(wanted)
        if (found < 0).any():
            missing = wanted[int(np.argmax(found < 0))]
            raise UnknownNameError(self.kind, missing, self.ids.to_list())
        return found

    def take(self, positions: npt.NDArray[np.integer]) -> pl.Series:
        """The ids that stand at some positions."""
        return self.ids.gather(positions)

    def digests(self) -> keys.U64:
        """One 64-bit hash per id, the same for 7 and "7"."""
        raw = b"".join(hashlib.blake2b(str(i).encode(), digest_size=8).digest() for i in self.ids)
        return np.frombuffer(raw, dtype="<u8").astype(np.uint64)

    def _find(self, key: Id) -> int:
        found = self._index.get(key)
        if found is not None:
            return found
        other: Id = str(key)
        if self.ids.dtype != pl.String:
            text = str(key)
            other = int(text) if text.removeprefix("-").isdigit() and str(int(text)) == text else text
        return self._index.get(other, -1)

    @cached_property
    def _index(self) -> dict[Id, int]:
        return {i: p for p, i in enumerate(self.ids.to_list())}
