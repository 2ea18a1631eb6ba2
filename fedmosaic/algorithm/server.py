"""The server: how summed uploads become the next shared parameters.

    mean       total / clients of the round
    row-mean   total / clients that trained the row (whole tensors: clients)
    sum        total

The reduced change is handed to a step rule as a gradient: plain averaging is the rule SGD with rate 1. A `threshold`
pulls every number of an item table that far towards zero after the step, so that small ones are not sent at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedmosaic.algorithm.local import SGD, Context, Optimiser, Schedule, value_of
from fedmosaic.algorithm.parameters import F32, Axis, Spec
from fedmosaic.algorithm.upload import Sum, Upload


@dataclass(frozen=True)
class Server:
    """Reduction and step rule; the rule's memory is part of the server's state."""

    reduce: Literal["mean", "row-mean", "sum"] = "mean"
    rule: Optimiser = SGD()
    rate: Schedule = 1.0
    threshold: float = 0.0

    def memory(self, value: F32) -> tuple[F32, ...]:
        """Fresh memory of the rule for a parameter."""
        return tuple(m.numpy() for m in self.rule.memory(torch.from_numpy(_rows(value))))

    def step(
        self, spec: Spec, upload: Upload, value: F32, memory: tuple[F32, ...], total: Sum, ctx: Context
    ) -> tuple[F32, tuple[F32, ...]]:
        """The next value of one parameter, and of the rule's memory."""
        change = upload.decode(spec, total.total(spec.name, value), ctx)
        if self.reduce == "row-mean" and spec.axis is Axis.ITEM:
            change = change / np.maximum(total.touched, 1).reshape(-1, *[1] * (change.ndim - 1))
        elif self.reduce != "sum":
            change = change / max(total.clients, 1)
        gradient = torch.from_numpy(_rows(change if upload.kind == "gradient" else -change).astype(np.float32))
        moved = torch.from_numpy(_rows(value).copy())
        kept = tuple(torch.from_numpy(m.copy()) for m in memory)
        self.rule.step(moved, gradient, kept, value_of(self.rate, ctx))
        if self.threshold and spec.axis is Axis.ITEM:
            moved = torch.nn.functional.softshrink(moved, self.threshold)
        return moved.numpy().reshape(value.shape), tuple(m.numpy() for m in kept)


def _rows(value: Any) -> Any:
    """At least one leading axis, so that step rules see rows."""
    return value if value.ndim else value.reshape(1)
