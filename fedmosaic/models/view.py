"""The view: how a model reads parameters, the same for one client and for thousands.

A batch is a block of examples [clients, length]; every client in it has its own rows, vectors and layers. A model asks
three verbs and never sees how many clients there are:

    rows("item", items)    the rows this example's client sees        [clients, length, width]
    vector("user")         the vector of this example's user          [clients, length, width]
    linear("mlp.0", x)     this client's layer applied to x           [clients, length, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from fedmosaic.tree import Spec


@dataclass(frozen=True)
class Batch:
    """One step of a block of clients. `items` and `users` index the block's own tables; padding has weight 0."""

    items: Tensor  # [clients, length] rows of the block's item tables
    users: Tensor  # [clients, length] or [clients, 1] rows of the block's user tables
    labels: Tensor  # [clients, length]
    weight: Tensor  # [clients, length] 1 for an example, 0 for padding


@dataclass(frozen=True)
class View:
    """Parameters of a block of clients, read through a batch."""

    params: Mapping[str, Tensor]
    batch: Batch

    def rows(self, name: str, items: Tensor) -> Tensor:
        """Rows of an item table."""
        return self._gather(name, items)

    def vector(self, name: str) -> Tensor:
        """Row of a user table for each example; one that all examples of a client share keeps length 1."""
        return self._gather(name, self.batch.users)

    def linear(self, name: str, *parts: Tensor) -> Tensor:
        """A layer of the client's own on the concatenated parts: [x_1 ; x_2 ; ...] W + b.

        The parts are never joined: each meets its own rows of W, and one that all examples share (length 1) only once.
        """
        weight = self.params[f"{name}.weight"]
        begins = accumulate((part.shape[-1] for part in parts), initial=0)
        result = self.params[f"{name}.bias"].unsqueeze(1)
        for part, begin in sorted(zip(parts, begins, strict=False), key=lambda pair: pair[0].shape[1]):
            result = torch.baddbmm(result, part, weight[:, begin : begin + part.shape[-1]])
        return result

    def _gather(self, name: str, index: Tensor) -> Tensor:
        table = self.params[name]
        return table.index_select(0, index.reshape(-1)).reshape(*index.shape, *table.shape[1:])


class Model(Protocol):
    """A score function and the parameters it reads."""

    def specs(self) -> tuple[Spec, ...]:
        """Its parameters."""
        ...

    def score(self, view: View, items: Tensor) -> Tensor:
        """One score per example, shape [clients, length]; the probability is its sigmoid."""
        ...
