"""Local work: what moves, in which order, by which rule and rate, for how many epochs.

A `Pass` runs epochs over the client's examples; for every batch each of its `Phase`s takes one step, in order. PFedRec
is one pass of two phases (score function, then item rows); FedMF is one pass of one phase that moves both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """What a step may know about the round; read-only."""

    round: int
    seed: int
    n_items: int
    n_clients: int


Schedule = float | Callable[[Context], float]  # a number is a constant schedule


@dataclass(frozen=True)
class PerItem:
    """A rate proportional to the size of the catalogue: factor · items (PFedRec's released code)."""

    factor: float

    def __call__(self, ctx: Context) -> float:
        """factor · items."""
        return self.factor * ctx.n_items


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

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: float) -> None:
        """Move the tensor and its memory, in place."""
        ...


@dataclass(frozen=True)
class SGD:
    """x <- x - rate · (g + decay · x)."""

    decay: float = 0.0
    persistent: bool = field(default=False, init=False)

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """None."""
        return ()

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: float) -> None:
        """One step."""
        if self.decay:
            gradient = gradient + self.decay * value
        value.sub_(gradient, alpha=rate)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015); the number of steps is counted per row, so that clients keep their own clocks."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    persistent: bool = False

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """First moment, second moment, steps taken."""
        clock = torch.zeros(value.shape[0], *([1] * (value.ndim - 1)))
        return torch.zeros_like(value), torch.zeros_like(value), clock

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: float) -> None:
        """One step with bias correction."""
        first, second, clock = memory
        if self.decay:
            gradient = gradient + self.decay * value
        clock.add_(1)
        first.lerp_(gradient, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        ahead = first / (1 - self.beta1**clock)
        spread = (second / (1 - self.beta2**clock)).sqrt_().add_(self.eps)
        value.addcdiv_(ahead, spread, value=-rate)


@dataclass(frozen=True)
class Adagrad:
    """x <- x - rate · g / (sqrt(sum of g²) + eps) (Duchi et al. 2011); a server rule of FedRecon's paper."""

    eps: float = 1e-10
    persistent: bool = False

    def memory(self, value: Tensor) -> tuple[Tensor, ...]:
        """Sum of squared gradients."""
        return (torch.zeros_like(value),)

    def step(self, value: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], rate: float) -> None:
        """One step."""
        memory[0].addcmul_(gradient, gradient)
        value.addcdiv_(gradient, memory[0].sqrt().add_(self.eps), value=-rate)


@dataclass(frozen=True)
class Move:
    """Some parameters, the rate and the rule they move by."""

    names: tuple[str, ...]
    rate: Schedule
    rule: Optimiser = SGD()


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
    """Epochs over the client's examples; every batch runs all phases in order."""

    phases: tuple[Phase, ...]
    epochs: int = 1
    batch_size: int = 256
