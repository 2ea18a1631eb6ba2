"""Low-rank item updates (CoLR, WWW 2024): what a client sends of its item rows has width r instead of d.

    E_j <- E_j + A_j · B        B: r × d, orthogonal rows of length sqrt(d / r), drawn anew each round from the seed

Only A is trained and sent; B is known to everybody, so the server adds up A and multiplies once. Training A with its
gradient scaled by sqrt(r / d) is training E with gradients g -> sqrt(d / r) · g · Q'Q, where Q are B's unit rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.local import Context, GradientRule, Losses
from fedmosaic.algorithm.parameters import F32, Axis, Spec
from fedmosaic.algorithm.upload import Parcel
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor


@lru_cache(maxsize=4)
def basis(rank: int, width: int, seed: int, round: int) -> F32:
    """Q: the round's r orthogonal unit rows."""
    rng = keys.generator(seed=seed, purpose=keys.Purpose.PROJECTION, round=round)
    columns, corner = np.linalg.qr(rng.standard_normal((width, rank)))
    return np.ascontiguousarray((columns * np.sign(np.diag(corner))).T, dtype=np.float32)


@dataclass(frozen=True)
class ProjectedGradient:
    """A host's gradient, item rows projected on the round's subspace."""

    host: GradientRule
    tables: Mapping[str, int]  # name -> width
    rank: int

    def __call__(
        self, losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """g -> sqrt(d / r) · g · Q'Q."""
        import torch

        value, gradients = self.host(losses, at, owners, ctx)
        for name in gradients.keys() & self.tables.keys():
            rows = torch.from_numpy(basis(self.rank, self.tables[name], ctx.seed, ctx.round))
            gradients[name] = gradients[name] @ rows.T @ rows * sqrt(self.tables[name] / self.rank)
        return value, gradients


@dataclass(frozen=True)
class LowRank:
    """The upload's two halves: a change of item rows to its r coordinates, and their sum back to d."""

    tables: Mapping[str, int]
    rank: int
    whole: ClassVar[bool] = False

    def encode(self, parcel: Parcel) -> Parcel:
        """A = change · Q' (· sqrt(r / d), left out here and in `decode`)."""
        changes = {
            n: v @ basis(self.rank, self.tables[n], parcel.ctx.seed, parcel.ctx.round).T if n in self.tables else v
            for n, v in parcel.changes.items()
        }
        return replace(parcel, changes=changes)

    def shape(self, spec: Spec) -> tuple[int, ...]:
        """r numbers per item."""
        return (self.rank,) if spec.name in self.tables else spec.shape

    def decode(self, spec: Spec, total: npt.NDArray[np.float64], ctx: Context) -> npt.NDArray[np.float64]:
        """Sum of A, times Q."""
        if spec.name not in self.tables:
            return total
        rows = basis(self.rank, self.tables[spec.name], ctx.seed, ctx.round).astype(np.float64)
        result: npt.NDArray[np.float64] = total @ rows
        return result


def low_rank(rank: int) -> Wrapper:
    """Wrap any host that sends item tables; `rank` numbers are sent per row.

    >>> from fedmosaic.methods.registry import entry
    >>> host = entry("fedmf").build().algorithm
    >>> low_rank(4)(host).traffic(100, 50.0)[0] / host.traffic(100, 50.0)[0]
    0.125
    """

    def wrap(host: Algorithm) -> Algorithm:
        specs = {n: host.specs[n] for n in host.sent if host.specs[n].axis is Axis.ITEM}
        tables = {n: s.shape[0] for n, s in specs.items()}
        if not tables or rank > min(tables.values()):
            raise SettingsError(
                f"a rank of {rank} needs sent item rows at least that wide; there are {tables or 'none'}"
            )
        upload = replace(host.upload, stack=(*host.upload.stack, LowRank(tables, rank)))
        return replace(host, gradient=ProjectedGradient(host.gradient, tables, rank), upload=upload)

    return wrap
