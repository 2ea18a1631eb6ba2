"""Sharpness-aware steps (FedRecGEL, 2026): gradients are taken at the worst point nearby, so that flat regions win.

    min over θ   max over |e_shared| ≤ ρ_shared   mean over clients   max over |e_private| ≤ ρ_private   L_k(θ + e)

To first order the worst point lies uphill: e = ρ · g / |g|, with one joint norm per group of parameters and client. The
shared gradient is taken with only the shared group moved uphill, the private one with only the private group (`joint`:
both moved for both). With both radii 0 this is the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.local import Context, GradientRule, Losses
from fedmosaic.core.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-12


@dataclass(frozen=True)
class UphillGradient:
    """A host's gradient, group by group, each at its own uphill point."""

    host: GradientRule
    groups: tuple[tuple[tuple[str, ...], float], ...]  # names, radius
    joint: bool

    def __call__(
        self, losses: Losses, at: Mapping[str, Tensor], owners: Mapping[str, Tensor], ctx: Context
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses at the point itself; gradients at the points uphill."""
        value, flat = self.host(losses, at, owners, ctx)
        uphill: dict[str, Tensor] = {}
        for names, radius in self.groups:
            here = [n for n in names if n in at]
            if radius and here:
                uphill |= climb({n: flat[n] for n in here}, owners, radius, value.shape[0])
        result = dict(flat)
        for names, radius in self.groups:
            here = [n for n in names if n in at]
            if not here or not (radius or (self.joint and uphill)):
                continue  # nothing was moved: the gradient is known
            moved = {n: at[n] + e for n, e in uphill.items() if self.joint or n in here}
            point = {**at, **moved}
            result |= self.host(losses.at(point), {n: point[n] for n in here}, owners, ctx)[1]
        return value, result


def climb(
    gradients: Mapping[str, Tensor], owners: Mapping[str, Tensor], radius: float, clients: int
) -> dict[str, Tensor]:
    """e = radius · g / |g|, with one norm per client over all the tensors together."""
    import torch

    squares = torch.zeros(clients)
    for name, gradient in gradients.items():
        squares.index_add_(0, owners[name], gradient.square().flatten(1).sum(1))
    factor = radius / (squares.sqrt() + TINY)
    return {n: g * factor[owners[n]].reshape(-1, *[1] * (g.ndim - 1)) for n, g in gradients.items()}


def sharpness_aware(rho_shared: float = 0.0, rho_private: float = 0.0, *, joint: bool = False) -> Wrapper:
    """Wrap any host: one that uploads gradients sends those taken uphill, any other steps by them on the device.

    rho_shared, rho_private: how far uphill the shared and the private group are moved. joint: both for both gradients.

    >>> from fedmosaic.methods.registry import entry
    >>> host = entry("fedneumf").build().algorithm
    >>> sharpness_aware(0.0, 0.0)(host) == host
    True
    """

    def wrap(host: Algorithm) -> Algorithm:
        if host.step_noise:
            raise SettingsError("sharpness_aware: the uphill point of a gradient with noise is not where it would lead")
        if isinstance(host.gradient, UphillGradient):
            raise SettingsError("sharpness_aware: this host takes its gradients uphill already")
        if not rho_shared and not rho_private:
            return host
        sent = host.sent
        groups = ((sent, rho_shared), (tuple(n for n in host.specs if n not in sent), rho_private))
        return replace(host, gradient=UphillGradient(host.gradient, groups, joint))

    return wrap
