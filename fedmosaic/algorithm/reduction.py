"""Reductions: how the changes that clients send of a parameter become one.

    mean           total / clients of the round
    row-mean       total / clients that trained the row (whole tensors: clients)
    sum            total
    bounded        a mean of changes that are cut to norms which most clients keep
    trimmed-mean   per number, without the largest and the smallest tenth of those that were sent
    median         per number, of those that were sent

A reduction is a value that others can add (`fedmosaic.extend.register_reduction`). The last three are against clients
that lie. They must see every client's change by itself, and say so: no secure sum can hide what they look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.parameters import Axis, Spec
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import SettingsError, one_of

F64 = npt.NDArray[np.float64]
ROWS_AT_ONCE = 64


class Reduction(Protocol):
    """How the changes that clients send of a parameter become one."""

    @property
    def each(self) -> bool:
        """Whether it must see every client's change by itself; then no secure sum can hide it."""
        ...

    @property
    def counts_senders(self) -> bool:
        """Whether it must know how many clients trained each row."""
        ...

    def __call__(self, spec: Spec, changes: F64, total: UploadSum) -> F64:
        """The one change of a parameter.

        spec: the parameter. changes: the sum of the clients' changes; where the reduction needs `each`, all of them,
        along the first axis. total: how many clients there are (`clients`), and how many trained each item (`touched`).
        """
        ...


@dataclass(frozen=True)
class Mean:
    """total / clients of the round."""

    each: ClassVar[bool] = False
    counts_senders: ClassVar[bool] = False

    def __call__(self, spec: Spec, changes: F64, total: UploadSum) -> F64:
        """The mean."""
        return changes / max(total.clients, 1)


@dataclass(frozen=True)
class RowMean:
    """total / clients that trained the row; whole tensors: clients of the round."""

    each: ClassVar[bool] = False
    counts_senders: ClassVar[bool] = True

    def __call__(self, spec: Spec, changes: F64, total: UploadSum) -> F64:
        """The mean of each row."""
        if spec.axis is not Axis.ITEM:
            return changes / max(total.clients, 1)
        return changes / np.maximum(total.touched, 1).reshape(-1, *[1] * (changes.ndim - 1))


@dataclass(frozen=True)
class Total:
    """The sum of all changes, not divided by anything."""

    each: ClassVar[bool] = False
    counts_senders: ClassVar[bool] = False

    def __call__(self, spec: Spec, changes: F64, total: UploadSum) -> F64:
        """As it is."""
        return changes


@dataclass(frozen=True)
class Bounded:
    """Cut what clients send to norms that most of them keep, then reduce it as the inner reduction does.

    A row is cut to the median over clients of the norm that a share `rows` of a client's own rows keep; a whole change
    then to the norm that a share `uploads` of the clients keep. Every client counts once, so fewer liars than
    1 - `uploads` cannot move the bounds far; honest clients are cut at most, and nobody is refused. A node that sends
    the sum of several clients has as many times the bounds.
    """

    inner: Reduction
    rows: float = 0.95
    uploads: float = 0.95
    each: ClassVar[bool] = True

    @property
    def counts_senders(self) -> bool:
        """As the inner one."""
        return self.inner.counts_senders

    def __call__(self, spec: Spec, changes: F64, total: UploadSum) -> F64:
        """What the inner one makes of what is left."""
        clients = np.array([part.clients for part in total.parts] or [1] * len(changes), np.float64)
        rows = changes.reshape(len(changes), changes.shape[1] if spec.axis is Axis.ITEM else 1, -1)
        norms = np.sqrt(np.einsum("cri,cri->cr", rows, rows)) / clients[:, None]
        factors = np.ones_like(norms)
        if spec.axis is Axis.ITEM:
            own = [float(np.quantile(one[one > 0], self.rows)) for one in norms if one.any()]
            factors = _cut(norms, float(np.median(own)) if own else 0.0)
        sizes = np.linalg.norm(norms * factors, axis=1)
        factors *= _cut(sizes, float(np.quantile(sizes, self.uploads)))[:, None]
        kept = np.einsum("cr,cri->ri", factors, rows).reshape(changes.shape[1:])
        return self.inner(spec, kept, total)


@dataclass(frozen=True)
class Trimmed:
    """The mean of every number without the largest and the smallest `share` of those that were sent; 0.5: the median.

    Sums of groups of clients count as if all groups were of one size.

    Of a row of an item table those count who sent it, and the mean is taken as often as there are senders: else a row
    that few hold would stand still. Where liars are most of a row's senders, it does not help.
    """

    share: float
    each: ClassVar[bool] = True
    counts_senders: ClassVar[bool] = False

    def __call__(self, spec: Spec, changes: F64, total: UploadSum) -> F64:
        """Trimmed sums / clients."""
        sizes = np.array([part.clients for part in total.parts] or [1], np.float64)
        if sizes.min() != sizes.max():
            changes = changes * (sizes.mean() / sizes).reshape(-1, *[1] * (changes.ndim - 1))
        rows = changes if spec.axis is Axis.ITEM else changes[:, None]
        found = np.empty(rows.shape[1:])
        for begin in range(0, rows.shape[1], ROWS_AT_ONCE):
            part = rows[:, begin : begin + ROWS_AT_ONCE]
            sent = part.reshape(*part.shape[:2], -1).any(axis=2) if spec.axis is Axis.ITEM else np.ones(part.shape[:2])
            count = sent.sum(axis=0).astype(np.int64)
            wide = [-1, *[1] * (part.ndim - 2)]
            low = np.minimum((self.share * count).astype(np.int64), np.maximum(count - 1, 0) // 2)
            there = sent.reshape(*sent.shape, *[1] * (part.ndim - 2)).astype(bool)
            ordered = np.sort(np.where(there, part, np.inf), axis=0)
            place = np.arange(len(part)).reshape(-1, *[1] * (part.ndim - 1))
            kept = (place >= low.reshape(wide)) & (place < (count - low).reshape(wide))
            sums = np.where(kept, ordered, 0.0).sum(axis=0)
            often = count / np.maximum(count - 2 * low, 1)
            found[begin : begin + ROWS_AT_ONCE] = sums * often.reshape(wide)
        found /= max(total.clients, 1)
        return found if spec.axis is Axis.ITEM else np.asarray(found[0])


def _cut(norms: F64, limit: float) -> F64:
    """By what norms have to be multiplied so that none is above the limit."""
    found: F64 = np.minimum(limit / np.maximum(norms, 1e-30), 1)
    return found


REDUCTIONS: dict[str, Reduction] = {
    "mean": Mean(), "row-mean": RowMean(), "sum": Total(), "bounded": Bounded(Mean()), "trimmed-mean": Trimmed(0.1),
    "median": Trimmed(0.5),
}  # fmt: skip


def register_reduction(name: str, reduction: Reduction) -> None:
    """Add a reduction of one's own, so that `Server(name)` knows it."""
    if name in REDUCTIONS:
        raise SettingsError(f"there is a reduction {name!r} already; choose another name")
    REDUCTIONS[name] = reduction


def reduction_named(name: str, own: Reduction) -> Reduction:
    """A reduction by its name, for a method that has one of its own: bounds are put around that.

    >>> reduction_named("bounded", Total())
    Bounded(inner=Total(), rows=0.95, uploads=0.95)
    """
    one_of("reduction", name, REDUCTIONS)
    return Bounded(own) if name == "bounded" else REDUCTIONS[name]
