"""Parameters: what a model is made of, who holds it, and how it begins.

A parameter is a named tensor along one of three axes: one row per item, one row per user, or one whole tensor.
Parameters travel as plain dicts, name -> tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys
from fedmosaic.core.errors import one_of

F32 = npt.NDArray[np.float32]


class Axis(Enum):
    """What a parameter has rows for."""

    ITEM = "item"
    USER = "user"
    WHOLE = "whole"


class Role(Enum):
    """Who holds a parameter; the table in docs/design.md, section 3."""

    SHARED = "shared"  # the server's; trained on the device; sent back; not kept
    PRIVATE = "private"  # the device's; never leaves it
    PERSONALISED = "personalised"  # starts as the server's; sent back; the trained copy stays and answers queries
    FROZEN = "frozen"  # the server's; only read
    KEPT = "kept"  # begins as the server's first; from then on the device's own, and sent as well
    REBUILT = "rebuilt"  # begins afresh every time, never leaves, is not kept: made again from the history when needed


UPLOADED = (Role.SHARED, Role.PERSONALISED, Role.KEPT)
ON_SERVER = (*UPLOADED, Role.FROZEN)
STORED = (Role.PRIVATE, Role.KEPT)


@dataclass(frozen=True)
class Init:
    """How a parameter begins: `normal` with a deviation, `uniform` within a bound, or `zero`.

    `same` gives every user the same first row, as PFedRec's released code does.
    """

    kind: Literal["normal", "uniform", "zero"] = "normal"
    scale: float = 0.01
    same: bool = False

    def __post_init__(self) -> None:
        one_of("beginning", self.kind, ("normal", "uniform", "zero"))


@dataclass(frozen=True)
class Spec:
    """A parameter: name, axis, shape of one row (or of the whole), beginning."""

    name: str
    axis: Axis
    shape: tuple[int, ...]
    init: Init = Init()

    def count(self, n_items: int) -> int:
        """Numbers a client holds of it (one user)."""
        return prod(self.shape) * (n_items if self.axis is Axis.ITEM else 1)

    def rows(self, seed: int, positions: npt.NDArray[np.integer]) -> F32:
        """Initial rows at positions; each depends on (seed, name, position) alone.

        >>> Spec("user", Axis.USER, (2,), Init("uniform", 0.1)).rows(0, np.array([4, 9])).shape
        (2, 2)
        """
        if self.init.kind == "zero":
            return np.zeros((positions.size, *self.shape), dtype=np.float32)
        label = zlib.crc32(self.name.encode())
        at = np.zeros_like(positions) if self.init.same else positions
        key = keys.derive(seed=seed, purpose=keys.Purpose.INIT, round=label, client=at)
        draws = keys.uniform(keys.draws_of(key, 2 * prod(self.shape))).reshape(positions.size, 2, *self.shape)
        if self.init.kind == "uniform":
            values = (2 * draws[:, 0] - 1) * self.init.scale
        else:  # Box-Muller
            values = np.sqrt(-2 * np.log1p(-draws[:, 0])) * np.cos(2 * np.pi * draws[:, 1]) * self.init.scale
        result: F32 = values.astype(np.float32)
        return result

    def table(self, seed: int, n_items: int) -> F32:
        """The server's first copy: a row per item, or the whole tensor."""
        if self.axis is Axis.ITEM:
            return self.rows(seed, np.arange(n_items))
        whole: F32 = self.rows(seed, np.zeros(1, dtype=np.int64))[0]
        return whole


@lru_cache(maxsize=8)
def first_table(spec: Spec, seed: int, n_items: int) -> F32:
    """`spec.table`, remembered: private tables fall back on it row by row, in every block of every round."""
    table = spec.table(seed, n_items)
    table.flags.writeable = False
    return table


def by_name(specs: tuple[Spec, ...]) -> Mapping[str, Spec]:
    """Specs as a mapping."""
    return {s.name: s for s in specs}
