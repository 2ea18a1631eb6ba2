"""Loss landscapes: how the training loss rises around a trained model when its shared parameters are moved.

    loss(a, b) = L(θ + a · d1 + b · d2)          θ: shared parameters; private ones stay as the devices hold them

Two models can be compared only on the same footing: fixed examples (each positive with the same negatives for both),
the exact mean over them, the same directions (zero-mean, unit length or scaled to the model's own rows), one scale. The
recipe of FedRecGEL's released code (entries N(1, 1), shuffled batches) is there as `recipe="paper"`; its noise is
about as large as the differences it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis, Role
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.algorithm.wrappers.mixing import MixedModel
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.block import Block, history_of
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.round import begin
from fedmosaic.engines.state import Array, FederationState
from fedmosaic.engines.task import Task
from fedmosaic.training.loop import OnRound

Recipe = Literal["zero-mean", "filter", "paper"]
RECIPES: tuple[Recipe, ...] = ("zero-mean", "filter", "paper")
Direction = dict[str, Tensor]
CLIENTS_PER_CHUNK = 64
SHUFFLED_BATCH = 1024


@dataclass(frozen=True, eq=False)
class Sharpness:
    """Scalars of a landscape: the loss itself, and by how much it rises nearby."""

    loss: float
    radius: float
    mean_rise: float  # over random directions, at the radius; negative where most ways lead down
    worst_rise: float
    uphill_rise: float  # along the gradient, as far as a random direction goes: what sharpness-aware steps shrink


@dataclass(frozen=True, eq=False)
class Surface:
    """Losses on a square grid of (a, b)."""

    steps: Array
    losses: Array


class Landscape:
    """A trained federation's loss as a function of its shared parameters.

    Private parameters are read once; examples are drawn once, `negatives` for each positive.
    """

    def __init__(
        self, federation: Federation, data: TrainingSet, state: FederationState, *, negatives: int = 1, seed: int = 0
    ):
        algorithm = federation.algorithm
        if algorithm.serve or algorithm.names(Role.KEPT) or isinstance(algorithm.model, MixedModel):
            raise SettingsError("no landscape for methods whose devices rebuild, keep or mix the shared table")
        self.algorithm: Algorithm = replace(algorithm, local=(), negatives=negatives)
        self.shared: Direction = {n: torch.from_numpy(state.server.params[n]) for n in self.algorithm.sent}
        if not self.shared:
            raise SettingsError("nothing is shared, so there is nothing to move")
        sizes = np.bincount(data.owners(), weights=data.histories.lengths, minlength=data.n_clients)
        clients = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]  # alike ones in a chunk: little padding
        # examples are keyed by a round of their own; the seed must be the run's, which decides rows never stored
        ctx = Context(-1 - seed, state.seed, data.n_items, data.n_clients)
        task = Task(data, state.server.params, state.devices, ctx, clients)
        self._blocks = [
            _ready(begin(self.algorithm, task, clients[at : at + CLIENTS_PER_CHUNK]))
            for at in range(0, clients.size, CLIENTS_PER_CHUNK)
        ]

    def loss(self, moved: Direction | None = None) -> float:
        """Exact mean of the cross-entropy over all examples, with the shared parameters moved."""
        with torch.no_grad():
            losses = self._losses(self._at(moved))
        return float(torch.cat(losses).double().mean())

    def noisy_loss(self, moved: Direction, seed: int) -> float:
        """The paper's way: the mean of the means of shuffled batches, the last one as short as it comes."""
        with torch.no_grad():
            losses = torch.cat(self._losses(self._at(moved)))
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(losses.numel())
        shuffled = losses.numpy()[order]
        means = [shuffled[at : at + SHUFFLED_BATCH].mean() for at in range(0, shuffled.size, SHUFFLED_BATCH)]
        return float(np.mean(means))

    def uphill(self) -> Direction:
        """The unit direction in which the loss rises fastest."""
        leaves = {n: v.clone().requires_grad_() for n, v in self.shared.items()}
        total = {n: torch.zeros_like(v) for n, v in leaves.items()}
        for block, batch in self._blocks:
            loss = self._block_losses(block, batch, leaves).sum()
            for name, slope in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                total[name] += slope
        return _unit(total)

    def direction(self, number: int, recipe: Recipe = "zero-mean", seed: int = 0) -> Direction:
        """Direction `number`: the same for every model of the same shape; `filter` scales rows to the model's own."""
        draws = {}
        for place, (name, value) in enumerate(self.shared.items()):
            rng = keys.generator(seed=seed, purpose=keys.Purpose.DIRECTIONS, round=number, client=place)
            drawn = rng.standard_normal(tuple(value.shape)) + (recipe == "paper")
            draws[name] = torch.from_numpy(drawn.astype(np.float32))
        if recipe != "filter":
            return _unit(draws)
        return {n: d * _row_norms(self.shared[n]) / _row_norms(d).clamp(min=1e-12) for n, d in draws.items()}

    def surface(
        self, *, radius: float = 1.0, points: int = 21, recipe: Recipe = "zero-mean", seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Surface:  # fmt: skip
        """Losses on a points × points grid of [-radius, radius]², two directions."""
        first, second = self.direction(0, recipe, seed), self.direction(1, recipe, seed)
        steps = np.linspace(-radius, radius, points)
        losses = np.empty((points, points))
        for i, a in enumerate(steps):
            for j, b in enumerate(steps):
                moved = {n: float(a) * first[n] + float(b) * second[n] for n in first}
                losses[i, j] = self.noisy_loss(moved, i * points + j) if recipe == "paper" else self.loss(moved)
                if progress is not None:
                    progress(i * points + j + 1, points * points)
        return Surface(steps, losses)

    def sharpness(
        self, *, radius: float = 1.0, directions: int = 8, recipe: Recipe = "zero-mean", seed: int = 0
    ) -> Sharpness:
        """The loss, and its rise at a radius: over random directions of a recipe, and straight uphill."""
        centre = self.loss()
        rises = []
        for number in range(directions):
            way = self.direction(2 + number, recipe, seed)
            rises.append(self.loss({n: radius * v for n, v in way.items()}) - centre)
        far = radius * (_length(self.shared) if recipe == "filter" else 1.0)  # as long as the random ones are
        top = self.loss({n: far * v for n, v in self.uphill().items()}) - centre
        return Sharpness(centre, radius, float(np.mean(rises)), float(np.max(rises)), top)

    def _at(self, moved: Direction | None) -> Direction:
        return self.shared if moved is None else {n: v + moved[n] for n, v in self.shared.items()}

    def _losses(self, shared: Direction) -> list[Tensor]:
        """One loss per example, block by block, padding left out."""
        found = []
        for block, batch in self._blocks:
            found.append(self._block_losses(block, batch, shared)[batch.weight > 0])
        return found

    def _block_losses(self, block: Block, batch: Batch, shared: Direction) -> Tensor:
        params = dict(block.params)
        for name, value in shared.items():
            if self.algorithm.specs[name].axis is Axis.ITEM:
                params[name] = value[torch.from_numpy(block.place.touched.values.astype(np.int64))]
            else:
                params[name] = value.expand(block.place.clients.size, *value.shape)
        view = View(params, batch, block.given, block.history)
        scores = self.algorithm.model.score(view, batch.items)
        return functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none") * batch.weight


def look(
    method: object, data: TrainingSet, state: FederationState, radius: float, points: int, recipe: str, seed: int,
    progress: OnRound | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Sharpness and surface of a trained method, as plain numbers."""
    if not isinstance(method, Federation):
        raise SettingsError("a landscape needs a federated method with shared parameters")
    if not 0 < radius < np.inf:
        raise SettingsError(f"radius: a length above 0 is wanted, not {radius:g}")
    chosen = next(r for r in RECIPES if r == recipe)
    land = Landscape(method, data, state, seed=seed)
    scalars = land.sharpness(radius=radius, recipe=chosen, seed=seed)
    tell = None if progress is None else lambda done, total: progress(done, total, {})
    surface = land.surface(radius=radius, points=points, recipe=chosen, seed=seed, progress=tell)
    extremes = {"lowest": float(surface.losses.min()), "highest": float(surface.losses.max())}
    return {**vars(scalars), **extremes, "steps": surface.steps.tolist(), "surface": surface.losses.tolist()}


def _ready(block: Block) -> tuple[Block, Batch]:
    """A block and all of its examples as one batch."""
    batch = history_of(block.examples, block.rows, block.place, "examples")
    labels = torch.zeros_like(batch.weight)
    labels[batch.weight > 0] = torch.from_numpy(block.examples.labels)
    return block, replace(batch, labels=labels)


def _unit(direction: Direction) -> Direction:
    """One joint length of 1."""
    length = max(_length(direction), 1e-12)
    return {n: (v.double() / length).float() for n, v in direction.items()}


def _length(direction: Direction) -> float:
    return float(torch.stack([v.double().square().sum() for v in direction.values()]).sum().sqrt())


def _row_norms(value: Tensor) -> Tensor:
    """Length of each row (of the whole, for a vector), ready to be multiplied."""
    squares = value.square().sum() if value.ndim < 2 else value.square().flatten(1).sum(1)
    return squares.sqrt().reshape(-1, *[1] * (value.ndim - 1)) if value.ndim > 1 else squares.sqrt()
