"""Gradients clipped example by example, with noise in every step: DP-SGD on the device (Abadi et al., CCS 2016).

    g = 1/n Σ_i g_i · min(1, clip / |g_i|)  +  N(0, (multiplier · clip)²) / n        n examples of a client's batch

The norm of an example is over all the named parameters together. Every number of a named parameter gains noise, rows
without an example too: those of a table that is sent are noised once, when they are sent, by the law of all the steps
(`Block.rest`); rows of private tables without an example are left alone.

It is FedRAP's noise as its released code has it, commented out (Opacus, clip 0.1, multiplier 1). What follows from it:
with the shared table alone (`names`), nothing; an example also moves the private parameters, without noise, and those
move the next gradients of the shared table. With everything that moves, each step is a Gaussian mechanism for one
example (not for a user) against whoever sees the upload; with multiplier 1 and ten full-batch steps a round, 100 rounds
spend an epsilon of several hundred, which protects nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.local import Context, Losses, plain_gradient
from fedmosaic.core.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PerExampleGradient:
    """The rule: plain gradients, those of `names` made of clipped examples and noise."""

    names: tuple[str, ...]
    clip: float
    multiplier: float

    def __call__(
        self, losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses at the point itself; gradients of clipped examples."""
        import torch

        value, gradients = plain_gradient(losses, at, owners, ctx)
        here = [name for name in self.names if name in at]
        if not here:
            return value, gradients
        each, counts = losses.each(here), losses.counts
        squares = torch.stack([part.gradient.square().flatten(2).sum(2) for part in each.values()]).sum(0)
        norms = squares.sqrt() * counts[:, None]  # a loss is a mean: an example's own gradient is n times its part
        factor = self.clip / norms.clamp(min=self.clip)
        for name, part in each.items():
            clipped = part.gradient * factor.reshape(*factor.shape, *[1] * (part.gradient.ndim - 2))
            total = torch.zeros_like(at[name])
            total.index_add_(0, part.rows.reshape(-1), clipped.flatten(0, 1))
            if self.multiplier:
                scale = (self.noise[name] / counts)[owners[name]]
                total += losses.normal(name) * scale.reshape(-1, *[1] * (total.ndim - 1))
            gradients[name] = total
        return value, gradients

    @property
    def noise(self) -> dict[str, float]:
        """Per parameter, the deviation of the noise on the sum of a batch."""
        return dict.fromkeys(self.names, self.multiplier * self.clip)


def per_example(clip: float, multiplier: float = 0.0, names: tuple[str, ...] = ()) -> Wrapper:
    """Clip every example's gradient to `clip` and add noise of deviation multiplier · clip to their sum.

    names: the parameters it is about; none named: everything that moves.
    """

    def wrap(host: Algorithm) -> Algorithm:
        if host.gradient is not plain_gradient or host.prepare is not None or host.history:
            raise SettingsError("per_example: this host takes gradients its own way; wrap it first")
        moved = tuple(dict.fromkeys(n for move in host.moves for n in move.names))
        unknown = [n for n in names if n not in moved]
        if unknown:
            raise SettingsError(f"per_example: {unknown[0]!r} does not move; what moves is {', '.join(moved)}")
        return replace(host, gradient=PerExampleGradient(names or moved, clip, multiplier))

    return wrap
