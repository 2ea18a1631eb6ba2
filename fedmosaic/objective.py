"""Objectives: one loss per client, never a mean over clients, so that every client's gradient is its own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from fedmosaic.local import Context
from fedmosaic.models.view import Batch, Model, View


class Objective(Protocol):
    """(model, view, batch, context) -> one loss per client, shape [clients]."""

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        """Evaluate the loss."""
        ...


def bce(model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
    """Mean over the client's examples of -y log s(score) - (1 - y) log(1 - s(score))."""
    scores = model.score(view, batch.items)
    losses = functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")
    return (losses * batch.weight).sum(1) / batch.weight.sum(1).clamp(min=1)
