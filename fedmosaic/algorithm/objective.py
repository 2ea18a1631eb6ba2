"""Objectives: one loss per client, never a mean over clients, so that every client's gradient is its own.

Beside them, what an algorithm computes rather than trains (`Prepare`), for example a mixing weight per client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.view import Batch, Model, View

if TYPE_CHECKING:
    from torch import Tensor


class Objective(Protocol):
    """(model, view, batch, context) -> one loss per client, shape [clients]."""

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        """Evaluate the loss."""
        ...


class Prepare(Protocol):
    """Sets one private parameter (a tensor per client) at the beginning of every round, epoch or batch.

    It reads the block's parameters through the client's positives, through all its examples, or through all items.
    """

    @property
    def name(self) -> str:
        """The parameter it sets."""
        ...

    @property
    def when(self) -> Literal["round", "epoch", "batch"]:
        """At the beginning of which moments it is called."""
        ...

    @property
    def rows(self) -> Literal["positives", "examples", "all"]:
        """What the view's batch holds."""
        ...

    def __call__(self, model: Model, view: View, ctx: Context) -> Tensor:
        """The parameter's new value, [clients, ...]."""
        ...


def bce(model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
    """Mean over the client's examples of -y log s(score) - (1 - y) log(1 - s(score))."""
    return mean(_cross_entropy(model, view, batch), batch)


def bpr(model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
    """Mean over pairs of the batch, a positive p and a negative n, of -log s(score_p - score_n) (Rendle et al., 2009).

    Every positive of a client's batch meets every negative of it; a batch that lacks either adds nothing.
    """
    from torch.nn import functional

    scores = model.score(view, batch.items)
    positive, negative = batch.weight * batch.labels, batch.weight * (1 - batch.labels)
    losses = functional.softplus(scores.unsqueeze(1) - scores.unsqueeze(2))  # [clients, positive, negative]
    pairs = positive.unsqueeze(2) * negative.unsqueeze(1)
    return (losses * pairs).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)


def innermost(objective: Objective, plain: Objective) -> Objective:
    """The same objective with another loss at its heart: terms that wrappers added stay."""
    inner = getattr(objective, "host", None)
    if inner is None:
        return plain
    wrapped: Any = objective
    changed: Objective = replace(wrapped, host=innermost(inner, plain))
    return changed


def of_examples(objective: Objective) -> bool:
    """Whether a client's loss is a mean over its examples, so that each has a gradient that can be clipped alone."""
    return objective is bce or bool(getattr(objective, "of_examples", False))


@dataclass(frozen=True)
class ChunkedBCE:
    """Sum over chunks of `size` examples of the chunk's mean cross-entropy (FedRecGEL's released code).

    It grows with the number of chunks, so a client with more data weighs more in the server's mean.
    """

    size: int = 128

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        """The client's examples in their order, the last chunk as short as it comes."""
        import torch

        chunk = torch.arange(batch.weight.shape[1]) // self.size
        counts = batch.weight.new_zeros(batch.weight.shape[0], int(chunk[-1]) + 1).index_add_(1, chunk, batch.weight)
        share = batch.weight / counts.clamp(min=1)[:, chunk]
        return (_cross_entropy(model, view, batch) * share).sum(1)


def _cross_entropy(model: Model, view: View, batch: Batch) -> Tensor:
    from torch.nn import functional

    scores = model.score(view, batch.items)
    return functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Mean over each client's examples, padding left out."""
    return (values * batch.weight).sum(1) / batch.weight.sum(1).clamp(min=1)
