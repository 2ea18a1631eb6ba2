"""Matrix factorisation and the linear scorer: one model, two readings.

    score(u, j) = w_u · e_j + b_u

In FedMF w_u is a user vector; in PFedRec (w_u, b_u) is a private score function. The numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedmosaic.algorithm.parameters import Axis, Init, Spec
from fedmosaic.algorithm.view import View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearScorer:
    """score = w·e + b. The compiled engine runs this very class, and no subclass of it."""

    dim: int = 32
    bias: bool = True
    item_init: Init = Init("normal", 0.01)
    user_init: Init = Init("normal", 0.01)

    def specs(self) -> tuple[Spec, ...]:
        """Item rows, user vectors, and a number per user."""
        table = Spec("item", Axis.ITEM, (self.dim,), self.item_init)
        user = Spec("user", Axis.USER, (self.dim,), self.user_init)
        if not self.bias:
            return table, user
        return table, user, Spec("bias", Axis.USER, (1,), self.user_init)

    def score(self, view: View, items: Tensor) -> Tensor:
        """w·e + b, one score per example."""
        product = (view.rows("item", items) * view.vector("user")).sum(-1)
        return product + view.vector("bias").squeeze(-1) if self.bias else product
