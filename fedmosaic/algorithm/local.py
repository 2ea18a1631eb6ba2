"""Local work: what moves, in which order, by which rule and rate, for how many epochs.

A `Pass` runs epochs over the client's examples; for every batch each of its `Phase`s takes one step, in order. PFedRec
is one pass of two phases (score function, then item rows); FedMF is one pass of one phase that moves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import SettingsError, one_of
from fedmosaic.core.secret import DeviceSecret, Stream

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]
ExamplePart = Literal["all", "support", "query"]
PARTS: tuple[ExamplePart, ...] = ("all", "support", "query")


@dataclass(frozen=True)
class Context:
    """What a step may know about the round; read-only."""

    round: int
    seed: int
    n_items: int
    n_clients: int
    secret: DeviceSecret | None = None  # of a device that keeps its draws to itself; none: they follow from the seed
    table: str = ""  # digest of the parameters received, where there is a secret

    @property
    def own_seed(self) -> int:
        """What a client's fast draws (negatives, order of examples) are keyed by, and in simulations its noise, too."""
        return self.seed if self.secret is None else self.secret.seed(self.round)

    def noise(self, *labels: str | int) -> Stream | None:
        """A device's stream for noise in this round on this table; none in a simulation, which draws faster."""
        return None if self.secret is None else self.secret.stream("noise", self.round, self.table, *labels)


Schedule = float | Callable[[Context], float]  # a number is a constant schedule
Rate = float | npt.NDArray[np.float32]  # one for all, or one per row


@dataclass(frozen=True)
class PerItem:
    """A rate that grows with the catalogue, as in PFedRec's code: factor · number of items · gamma^(round - 1)."""

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


class StepRule(Protocol):
    """How a parameter moves by a gradient: an optimiser. Arrays move in place; rows are along the first axis."""

    @property
    def persistent(self) -> bool:
        """Whether the memory stays on the device between rounds."""
        ...

    def memory(self, value: Array) -> tuple[Array, ...]:
        """Fresh memory for a parameter: arrays with as many rows."""
        ...

    def step(self, value: Array, gradient: Array, memory: tuple[Array, ...], rate: Rate) -> None:
        """Move the parameter and its memory; the rate is one for all, or one per row."""
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

    def memory(self, value: Array) -> tuple[Array, ...]:
        """SGD remembers nothing."""
        return ()

    def step(self, value: Array, gradient: Array, memory: tuple[Array, ...], rate: Rate) -> None:
        """Move the parameter against its gradient."""
        if self.decay:
            gradient = gradient + np.float32(self.decay) * value
        if isinstance(rate, np.ndarray):
            value -= gradient * rate
        elif rate == 1:
            value -= gradient
        else:
            from fedmosaic.algorithm.compiled import descend

            descend(_flat(value), _flat(gradient), np.float32(rate))


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

    def memory(self, value: Array) -> tuple[Array, ...]:
        """First moment, second moment, steps taken."""
        clock = np.zeros((value.shape[0], *[1] * (value.ndim - 1)), value.dtype)
        return np.zeros_like(value), np.zeros_like(value), clock

    def step(self, value: Array, gradient: Array, memory: tuple[Array, ...], rate: Rate) -> None:
        """One step with bias correction."""
        from fedmosaic.algorithm.compiled import adam_rows

        first, second, clock = memory
        rates = np.full(1, rate, np.float32) if not isinstance(rate, np.ndarray) else rate.reshape(-1)
        adam_rows(_flat(value), _flat(gradient), _flat(first), _flat(second), clock.reshape(-1), rates, self.numbers)


@dataclass(frozen=True)
class Adagrad:
    """x <- x - rate · g / (sqrt(sum of g²) + eps) (Duchi et al. 2011); a server rule of FedRecon's paper."""

    eps: float = 1e-10
    persistent: bool = False

    def memory(self, value: Array) -> tuple[Array, ...]:
        """Sum of squared gradients."""
        return (np.zeros_like(value),)

    def step(self, value: Array, gradient: Array, memory: tuple[Array, ...], rate: Rate) -> None:
        """Move the parameter against its gradient."""
        memory[0][:] += gradient * gradient
        value -= gradient / (np.sqrt(memory[0]) + np.float32(self.eps)) * rate


def _flat(value: Array) -> Array:
    """An array as rows of numbers; a view, so that it moves in place."""
    return value.reshape(value.shape[0], -1)


@dataclass(frozen=True)
class Move:
    """Some parameters, the rate and the rule they move by."""

    names: tuple[str, ...]
    rate: Schedule
    rule: StepRule = SGD()

    def __post_init__(self) -> None:
        if type(self.names) is not tuple:
            raise SettingsError(f"names of a move are a tuple, ('user',); got {self.names!r}")

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
    part: ExamplePart = "all"

    def __post_init__(self) -> None:
        one_of("part of the examples", self.part, PARTS)

    @property
    def uneven(self) -> bool:
        """Whether clients of a block may be at different rates, or rest while others work."""
        return self.step_decay != 1 or self.tolerance > 0 or self.part != "all"


class ExampleGradients(NamedTuple):
    """Every example's part of its client's gradient of one parameter."""

    rows: Tensor  # [clients, length] the row of the block's tensor that an example reads
    gradient: Tensor  # [clients, length, ...] they add up to the client's gradient


class Losses(Protocol):
    """Losses of a block of clients, as a function of some of its parameters."""

    @property
    def counts(self) -> Tensor:
        """Examples of every client's batch."""
        ...

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """One loss per client, with some parameters changed."""
        ...

    def at(self, point: Mapping[str, Tensor]) -> Losses:
        """The same losses around another point."""
        ...

    def each(self, names: Sequence[str]) -> dict[str, ExampleGradients]:
        """Gradients example by example, where the parameters are."""
        ...

    def normal(self, name: str) -> Tensor:
        """Standard normal draws for this step, one for every number of the rows that examples train."""
        ...


class GradientRule(Protocol):
    """How a gradient is taken: (losses, where, owner of each row, context) -> losses, gradients.

    One that adds noise says so by `noise` (`Algorithm.step_noise`); rows without examples gain theirs later.
    """

    def __call__(
        self, losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses per client at the point, and one gradient per parameter named in `at`."""
        ...


def plain_gradient(
    losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient at the point itself; losses of all clients are added, since no two own the same row."""
    import torch

    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    value = losses(leaves)
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if value.requires_grad:
        found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
    unused = [name for name in leaves if name not in gradients]
    if unused:
        raise SettingsError(f"a phase moves {', '.join(unused)}, which the loss does not use; take it out of the moves")
    return value.detach(), gradients
