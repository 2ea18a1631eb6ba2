"""The server: how uploads become the next shared parameters.

A reduction (`reduction.py`) makes one change of them, which is handed to a step rule as a gradient: plain averaging is
SGD with rate 1. A `threshold` pulls every number of an item table that far towards zero after the step, so that small
ones are not sent at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedmosaic.algorithm.local import SGD, Context, Schedule, StepRule, value_of
from fedmosaic.algorithm.parameters import F32, Axis, Spec
from fedmosaic.algorithm.reduction import REDUCTIONS, Mean, Reduction
from fedmosaic.algorithm.upload import F64, Upload, UploadSum
from fedmosaic.core import buffers
from fedmosaic.core.errors import one_of

Weights = Literal["equal", "size"]


@dataclass(frozen=True)
class Server:
    """Reduction (by name, or one's own) and step rule; the rule's memory is part of the server's state.

    weights: `equal`, or `size`: every client multiplies its change by the number of examples it trained on, and a mean
    divides by all examples (equation 1 of PFedRec, alpha_i = a client's share of the data). A large client then has
    more say, and says itself how large it is.

    >>> Server("krum")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedmosaic.core.errors.UnknownNameError: unknown reduction 'krum'; did you mean 'sum'? known: mean, row-mean, ...
    """

    reduce: Reduction | str = "mean"
    rule: StepRule = SGD()
    rate: Schedule = 1.0
    threshold: float = 0.0
    weights: Weights = "equal"

    def __post_init__(self) -> None:
        one_of("weights of clients", self.weights, ("equal", "size"))
        if isinstance(self.reduce, str):
            one_of("reduction", self.reduce, REDUCTIONS)
            object.__setattr__(self, "reduce", REDUCTIONS[self.reduce])

    @property
    def reduction(self) -> Reduction:
        """The reduction, found by its name where one was given."""
        assert not isinstance(self.reduce, str)
        return self.reduce

    def memory(self, value: F32) -> tuple[F32, ...]:
        """Fresh memory of the rule for a parameter."""
        return self.rule.memory(_rows(value))

    def step(
        self, spec: Spec, upload: Upload, value: F32, memory: tuple[F32, ...], total: UploadSum, ctx: Context
    ) -> tuple[F32, tuple[F32, ...]]:
        """The next value of one parameter, and of the rule's memory."""
        if self.reduction.each:
            decoded = (upload.decode(spec, part.total(spec.name, value), ctx) for part in total.parts)
            changes = stacked(decoded, len(total.parts))
        else:
            changes = upload.decode(spec, total.total(spec.name, value), ctx)
        if spec.name in upload.steering:  # the bounds of a reduction that looks at uploads hold for it, too
            mean = self.reduction if self.reduction.each else Mean()
            return upload.steering[spec.name].moved(value, mean(spec, changes, total)), memory
        counted = replace(total, clients=total.examples) if self.weights == "size" else total
        change = self.reduction(spec, changes, counted)
        gradient = _rows(change if upload.kind == "gradient" else -change).astype(np.float32)
        moved, kept = _rows(value).copy(), tuple(m.copy() for m in memory)
        self.rule.step(moved, gradient, kept, value_of(self.rate, ctx))
        if self.threshold and spec.axis is Axis.ITEM:
            moved = soft_threshold(moved, self.threshold)
        return moved.reshape(value.shape), kept


def stacked(arrays: Iterable[F64], count: int) -> F64:
    """As np.stack, in memory that is used again: it may be gigabytes, and comes anew in every round.

    >>> stacked((np.full(2, float(i)) for i in range(3)), 3)[:, 0].tolist()
    [0.0, 1.0, 2.0]
    """
    rest = iter(arrays)
    first = next(rest)
    found = buffers.empty((count, *first.shape), np.float64)
    found[0] = first
    for place, one in enumerate(rest, 1):
        found[place] = one
    return found


def soft_threshold(value: F32, size: float) -> F32:
    """sign(x) · max(|x| - size, 0).

    >>> soft_threshold(np.array([0.5, -0.1, -2.0], dtype=np.float32), 0.25).tolist()
    [0.25, 0.0, -1.75]
    """
    far = np.float32(size)
    inner = np.where(value < -far, value + far, np.float32(0))
    result: F32 = np.where(value > far, value - far, inner)
    return result


def _rows(value: Any) -> Any:
    """At least one leading axis, so that step rules see rows."""
    return value if value.ndim else value.reshape(1)
