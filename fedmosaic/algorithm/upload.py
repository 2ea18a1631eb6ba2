"""Uploads: what leaves a device, and how uploads add up.

    value      the trained copy itself; only a plain mean can use it, and it is computed from deltas, which sum alike
    delta      trained copy minus the copy received
    gradient   the sum of the gradients of the round's steps; the device's copy of the table stands still meanwhile

A stack of encoders may change what is sent; each has a half on the device and a half on the server, which sees only the
sum. Noise, if any, is added last, on the device. Sums are kept in fixed point: integers add the same in any order and
grouping, so the server's state does not depend on chunk, worker or arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.local import Array, Context
from fedmosaic.algorithm.parameters import F32, Spec
from fedmosaic.core.errors import ScoreError, one_of
from fedmosaic.core.fixed_point import SCALE

SMALLEST_PAD = 64
KINDS = ("value", "delta", "gradient")
SUPPORTS = ("dense", "padded", "touched", "nonzero")

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Parcel:
    """Changes of a block of clients on their way out: rows that changed, what they were, and whose they are."""

    changes: Mapping[str, Array]
    before: Mapping[str, Array]
    owners: Mapping[str, Array]  # per row, the client's place in the block
    items: Mapping[str, I32]  # per row of an item table, its item; other tensors are not named here
    client_ids: I64  # in the federation
    ctx: Context

    @property
    def clients(self) -> int:
        """How many clients there are in it."""
        return self.client_ids.size


class Encoder(Protocol):
    """A two-sided transform of uploads."""

    @property
    def whole(self) -> bool:
        """Whether it must be shown the whole catalogue, not only the rows that were trained."""
        ...

    def encode(self, parcel: Parcel) -> Parcel:
        """The device's half: other changes, or more rows of them."""
        ...

    def shape(self, spec: Spec) -> tuple[int, ...]:
        """Shape of one encoded row."""
        ...

    def decode(self, spec: Spec, total: npt.NDArray[np.float64], ctx: Context) -> npt.NDArray[np.float64]:
        """The server's half, on the sum of encoded changes."""
        ...


@runtime_checkable
class Steering(Protocol):
    """An encoder with a parameter of its own: everybody is sent it, and devices say which way it should go."""

    @property
    def spec(self) -> Spec:
        """The parameter."""
        ...

    def moved(self, value: F32, change: F64) -> F32:
        """The server's next value; no optimiser of the model's is asked. change: the mean of what devices say."""
        ...


class Noise(Protocol):
    """Noise that every client adds to every number it sends."""

    def add(self, total: I64, name: str, clients: Any, ctx: Context) -> None:
        """Add the noise of all the clients to a sum, in place and in fixed point."""
        ...


@dataclass(frozen=True)
class Upload:
    """What kind of change is sent, for which rows, and what is done to it on the way.

    `dense` sends every row, zeros included: all messages have one size, and under a secure sum or noise the support is
    hidden. On its own it hides nothing, since rows that were not trained are exactly zero. `touched` sends the trained
    rows and their ids, and shows them to anybody who counts bytes; `padded` sends other rows with them, up to the next
    power of two, and hides from those who see sizes, not from the server, how many there are; `nonzero` sends the
    numbers that are not zero, with their places. Support decides bytes, not results.
    """

    kind: Literal["value", "delta", "gradient"] = "delta"
    support: Literal["dense", "padded", "touched", "nonzero"] = "dense"
    stack: tuple[Encoder, ...] = ()
    noise: Noise | None = None

    def __post_init__(self) -> None:
        one_of("kind of upload", self.kind, KINDS)
        one_of("support of uploads", self.support, SUPPORTS)

    @property
    def steering(self) -> Mapping[str, Steering]:
        """Encoders with a parameter of their own, by its name."""
        return {one.spec.name: one for one in self.stack if isinstance(one, Steering)}

    def encode(self, parcel: Parcel) -> Parcel:
        """The device's halves, in order."""
        return reduce(lambda so_far, encoder: encoder.encode(so_far), self.stack, parcel)

    def shape(self, spec: Spec) -> tuple[int, ...]:
        """Shape of one row as it is sent."""
        shape = spec.shape
        for encoder in self.stack:
            shape = encoder.shape(Spec(spec.name, spec.axis, shape, spec.init))
        return shape

    def decode(self, spec: Spec, total: npt.NDArray[np.float64], ctx: Context) -> npt.NDArray[np.float64]:
        """The server's halves, last first."""
        for encoder in reversed(self.stack):
            total = encoder.decode(spec, total, ctx)
        return total


@dataclass(frozen=True)
class UploadSum:
    """Uploads of a group of clients: fixed-point totals, rows' counts of senders, clients, examples, loss.

    Decay that reaches rows without examples changes them by the same share for a whole client: `shrink` is the sum of
    those shares, and the totals of rows with examples hold only what goes beyond it.
    """

    totals: Mapping[str, I64]
    touched: I64  # per item: clients that trained it
    clients: int
    examples: int  # seen, each as often as it was
    loss: float  # clients' mean losses, added up
    shrink: Mapping[str, int] = field(default_factory=dict)
    numbers: int = 0  # that are not zero, among those sent of item tables
    parts: tuple[UploadSum, ...] = ()  # every client's own, where the server must see them
    rest: Mapping[str, F64] = field(default_factory=dict)  # per item: variance of noise that its rows have yet to gain

    def __add__(self, other: UploadSum) -> UploadSum:
        """Totals add; integers, so in any order."""
        return UploadSum(
            {name: value + other.totals[name] for name, value in self.totals.items()},
            self.touched + other.touched,
            self.clients + other.clients,
            self.examples + other.examples,
            self.loss + other.loss,
            {name: value + other.shrink[name] for name, value in self.shrink.items()},
            self.numbers + other.numbers,
            self.parts + other.parts,
            {name: value + other.rest[name] for name, value in self.rest.items()},
        )

    def total(self, name: str, value: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """The sum of all clients' changes of a parameter whose value was `value`, as floats."""
        total = np.asarray(self.totals[name] / SCALE)
        return total + self.shrink[name] / SCALE * value if name in self.shrink else total


def padded_count(rows: int, n_items: int) -> int:
    """How many rows are sent for so many trained ones, so that the size of a message tells little.

    >>> padded_count(3, 1000), padded_count(100, 1000), padded_count(600, 1000)
    (64, 128, 1000)
    """
    return min(max(SMALLEST_PAD, 1 << max(rows - 1, 0).bit_length()), n_items)


def add_rows(total: I64, rows: npt.NDArray[np.int32], change: npt.NDArray[np.float32]) -> None:
    """total[rows[k]] += change[k] in fixed point; values that no healthy training reaches are refused."""
    from fedmosaic.algorithm.compiled import add_rows as add

    width = prod(total.shape[1:])
    if not add(total.reshape(-1, width), rows, change.reshape(-1, width)):
        raise ScoreError("an upload holds NaN or huge values: training diverged; lower the learning rate")
