"""Local work: what moves, in which order, by which rule and rate, for how many epochs.

A `Pass` runs epochs over the client's examples; for every batch each of its `Phase`s takes one step, in order. PFedRec
is one pass of two phases (score function, then item rows); FedMF is one pass of one phase that moves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmosaic.core import keys
from fedmosaic.data.batches import Part


@dataclass(frozen=True)
class Context:
    """What a step may know about the round; read-only."""

    round: int
    seed: int
    n_items: int
    n_clients: int
    secret: int = 0  # of a device that keeps its draws to itself; 0: they follow from the seed alone

    @property
    def own_seed(self) -> int:
        """What a device's own draws (negatives, order, noise) are keyed by."""
        if not self.secret:
            return self.seed
        return int(keys.fold(keys.words(self.seed), keys.words(self.secret)).astype(np.int64)[0])


Schedule = float | Callable[[Context], float]  # a number is a constant schedule
Rate = float | Tensor  # one for all, or one per row


@dataclass(frozen=True)
class PerItem:
    """A rate that grows with the catalogue, as in PFedRec's released code: factor · items · gamma^(round - 1)."""

    factor: float
    gamma: float = 1.0

    def __call__(self, ctx: Context) -> float:
        """The rate of a round."""
        return float(self.factor * ctx.n_items * self.gamma ** (ctx.round - 1))


@dataclass(frozen=True)
class Decay:
    """start · gamma^(round - 1)."""

    start: float
    gamma: float

    def __call__(self, ctx: Context) -> float:
        """The rate of a round."""
        return float(self.start * self.gamma ** (ctx.round - 1))


def value_of(schedule: Schedule, ctx: Context) -> float:
    """The schedule's value in a round."""
    return schedule(ctx) if callable(schedule) else schedule


class Optimiser(Protocol):
    """A step rule on one tensor; its memory is a tuple of tensors of the same leading size."""

    @property
    def persistent(self) -> bool:
        """Whether the memory stays on the device between rounds."""
        ...

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """Fresh memory for a tensor."""
        ...

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: Rate) -> None:
        """Move the tensor and its memory, in place."""
        ...


@dataclass(frozen=True)
class SGD:
    """x <- x - rate · (g + decay · x).

    Item rows that no example of the round touches stand still, unless the decay reaches `everywhere`, as in a dense
    optimiser: then they shrink by 1 - rate · decay in every step, which costs one number per client.
    """

    decay: float = 0.0
    everywhere: bool = False
    persistent: bool = field(default=False, init=False)

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """None."""
        return ()

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: Rate) -> None:
        """One step."""
        if self.decay:
            gradient = gradient + self.decay * value
        if isinstance(rate, Tensor):
            value.sub_(gradient * rate)
        else:
            value.sub_(gradient, alpha=rate)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015); the number of steps is counted per row, so that clients keep their own clocks."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    persistent: bool = False

    @property
    def numbers(self) -> npt.NDArray[np.float64]:
        """Its settings as compiled code reads them."""
        return np.array([self.beta1, self.beta2, self.eps, self.decay])

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """First moment, second moment, steps taken."""
        clock = torch.zeros(value.shape[0], *([1] * (value.ndim - 1)))
        return torch.zeros_like(value), torch.zeros_like(value), clock

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: Rate) -> None:
        """One step with bias correction."""
        rows = (value.shape[0], value[:1].numel())
        x, first, second = (part.view(rows).numpy() for part in (value, *memory[:2]))  # a view: they move in place
        rates = rate.reshape(-1).numpy() if isinstance(rate, Tensor) else np.full(1, rate, dtype=np.float32)
        adam_rows(x, gradient.reshape(rows).numpy(), first, second, memory[2].view(-1).numpy(), rates, self.numbers)


@numba.njit(cache=True, error_model="numpy")
def adam_rows(value: Any, gradient: Any, first: Any, second: Any, clock: Any, rates: Any, settings: Any) -> None:
    """Every row of a tensor once: its clock, its moments, itself."""
    one, time = np.float32(1), np.float64(0)
    keep1, keep2 = np.float32(settings[0]), np.float32(settings[1])
    eps, decay, left1, left2 = np.float32(settings[2]), np.float32(settings[3]), one, one
    for i in range(clock.size):
        clock[i] += one
        if clock[i] != time:  # neighbours mostly share a clock
            time = clock[i]
            left1, left2 = np.float32(1 - settings[0] ** time), np.float32(1 - settings[1] ** time)
        rate = rates[i] if rates.size > 1 else rates[0]
        x, g, m, v = value[i], gradient[i], first[i], second[i]
        for d in range(x.size):
            slope = g[d] + decay * x[d]
            m[d] += (one - keep1) * (slope - m[d])
            v[d] = keep2 * v[d] + (one - keep2) * slope * slope
            x[d] -= rate * (m[d] / left1) / (np.sqrt(v[d] / left2) + eps)


@dataclass(frozen=True)
class Adagrad:
    """x <- x - rate · g / (sqrt(sum of g²) + eps) (Duchi et al. 2011); a server rule of FedRecon's paper."""

    eps: float = 1e-10
    persistent: bool = False

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """Sum of squared gradients."""
        return (torch.zeros_like(value),)

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: Rate) -> None:
        """One step."""
        memory[0].addcmul_(gradient, gradient)
        value.sub_(gradient / memory[0].sqrt().add_(self.eps) * rate)


@dataclass(frozen=True)
class Move:
    """Some parameters, the rate and the rule they move by."""

    names: tuple[str, ...]
    rate: Schedule
    rule: Optimiser = SGD()

    @property
    def spreads(self) -> float:
        """The decay that reaches rows without examples, if any does."""
        return self.rule.decay if isinstance(self.rule, SGD) and self.rule.everywhere else 0.0


@dataclass(frozen=True)
class Phase:
    """One step: the gradient is taken once, then all moves are made; what is not named stands still."""

    moves: tuple[Move, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters that move."""
        return tuple(n for move in self.moves for n in move.names)


@dataclass(frozen=True)
class Pass:
    """Epochs over the client's examples; every batch runs all phases in order.

    `step_decay` multiplies every rate after each of the client's batches, anew each round. With a `tolerance` a client
    stops when its running mean loss has changed by less than that share from one epoch to the next. `part` takes every
    other example of a user (support) or the rest (query); a user with a single positive uses it for both.
    """

    phases: tuple[Phase, ...]
    epochs: int = 1
    batch_size: int = 256
    step_decay: float = 1.0
    tolerance: float = 0.0
    part: Part = "all"

    @property
    def uneven(self) -> bool:
        """Whether clients of a block may be at different rates, or rest while others work."""
        return self.step_decay != 1 or self.tolerance > 0 or self.part != "all"


Losses = Callable[[Mapping[str, Tensor]], Tensor]  # parameters of a block -> one loss per client


class Slope(Protocol):
    """How a gradient is taken: (losses, where, owner of each row, context) -> losses, gradients."""

    def __call__(
        self, losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses per client at the point, and one gradient per parameter named in `at`."""
        ...


def plain_slope(
    losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient at the point itself; losses of all clients are added, since no two own the same row."""
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    value = losses(leaves)
    gradients = torch.autograd.grad(value.sum(), list(leaves.values()))
    return value.detach(), dict(zip(leaves, gradients, strict=True))
