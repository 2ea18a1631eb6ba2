"""A bound on uploads that follows a quantile of their norms, which nobody sees (Andrew et al., NeurIPS 2021).

    bit_u = 1 if |change_u| <= C else 0        C <- C · exp(-rate · (mean of bits - quantile))

Every device sends one number more, its wish for log C, -rate · (bit_u - quantile): it is masked, gains noise and is
averaged with all others, so that C is a parameter like any other: sent to the devices, in checkpoints, the same under a
secure sum. Under an epsilon the number has noise of its own, in the same budget: with a sensitivity of

    s = rate · max(quantile, 1 - quantile)        (a user is there with one wish, or not at all)

and deviations z · C / sqrt(1 - SHARE) on changes and z · s / sqrt(SHARE) on wishes, both together are one Gaussian
mechanism with multiplier z, because (1 - SHARE) / z² + SHARE / z² = 1 / z². So the noise on changes is 0.5 % larger
than that of a bound which stands still, and the epsilon is the same. The noisy mean is cut to what wishes can be
(nothing is asked again for that), so that a round moves C by a factor of exp(rate) at the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, sqrt
from typing import Any

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import F32, Axis, Init, Role, Spec
from fedmosaic.algorithm.upload import F64, I64, Parcel
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.privacy.noise import AddedNoise, OneSided, joint_norms, scaled_to

NAME = "upload_clip"  # of the parameter: log (C / start)
SHARE = 0.01  # of the budget that the wishes take
RATE = 0.5
FARTHEST = 12.0  # of log (C / start) from zero: beyond it noise would not fit into fixed point, or vanish in it


@dataclass(frozen=True)
class AdaptiveClip(OneSided):
    """Bound the joint norm of what a client sends by C = start · exp(parameter), and send a wish for it.

    start: C of the first round. quantile: share of the clients that are within C where it comes to rest.
    """

    start: float = 1.0
    quantile: float = 0.5
    rate: float = RATE

    @property
    def spec(self) -> Spec:
        """The parameter: log (C / start)."""
        return Spec(NAME, Axis.WHOLE, (1,), Init("zero"))

    @property
    def sensitivity(self) -> float:
        """How much one client moves the sum of wishes at the most."""
        return self.rate * max(self.quantile, 1 - self.quantile)

    def bound_of(self, params: Mapping[str, Any]) -> float:
        """C, as everybody is told it.

        >>> AdaptiveClip(start=2.0).bound_of({"upload_clip": np.zeros(1, np.float32)})
        2.0
        """
        moved = float(params[NAME][0])
        if not abs(moved) <= FARTHEST:  # false for NaN too
            raise ForeignError(f"upload_clip: no training reaches a bound of exp({moved:g}) times the first")
        return self.start * exp(moved)

    def encode(self, parcel: Parcel) -> Parcel:
        """Scale a client's changes down to C, and say whether they were within it."""
        bound = self.bound_of({NAME: parcel.before[NAME][0]})  # everybody has been sent the same
        rest = replace(parcel, changes={n: v for n, v in parcel.changes.items() if n != NAME})
        norms = joint_norms(rest)
        wishes = self.wishes(norms, bound)
        changes = {**scaled_to(bound, norms, rest).changes, NAME: wishes[parcel.owners[NAME]][:, None]}
        return replace(parcel, changes={n: changes[n] for n in parcel.changes})

    def wishes(self, norms: F64, bound: float) -> F32:
        """By how much clients whose uploads have these norms would have log C changed."""
        return np.asarray(-self.rate * ((norms <= bound) - self.quantile), dtype=np.float32)

    def summed_wishes(self, norms: F64, params: Mapping[str, Any]) -> I64:
        """Their sum in fixed point.

        >>> AdaptiveClip().summed_wishes(np.array([0.5, 2.0, 3.0]), {"upload_clip": np.zeros(1)}) / SCALE
        array([0.25])
        """
        wishes = self.wishes(norms, self.bound_of(params)).astype(np.float64)
        return np.asarray(np.floor(wishes * SCALE + 0.5).astype(np.int64).sum(keepdims=True))

    def moved(self, value: F32, change: F64) -> F32:
        """log C after a round. change: the mean of wishes, with its noise.

        >>> AdaptiveClip(rate=1.0).moved(np.zeros(1, np.float32), np.array([9.0]))
        array([0.5], dtype=float32)
        """
        within = np.clip(change, -self.rate * (1 - self.quantile), self.rate * self.quantile)
        return np.asarray(value + within, dtype=np.float32)

    def noise(self, multiplier: float, bound: float, shares: int) -> WishedNoise:
        """What each of so many shares adds to a sum with this bound, for one mechanism with this multiplier."""
        changes, wishes = bound / sqrt(1 - SHARE), self.sensitivity / sqrt(SHARE)
        each = multiplier / sqrt(shares)
        return WishedNoise(*(AddedNoise("gaussian", each * size, "summed") for size in (changes, wishes)))


@dataclass(frozen=True)
class WishedNoise:
    """Noise of one deviation on changes, and of another on wishes."""

    changes: AddedNoise
    wishes: AddedNoise

    def add(self, total: I64, name: str, clients: Any, ctx: Context) -> None:
        """Sum of the clients' noise, in place and in fixed point."""
        (self.wishes if name == NAME else self.changes).add(total, name, clients, ctx)


def adaptively_clipped(clip: AdaptiveClip) -> Wrapper:
    """Bound what a client of a host sends by a quantile of everybody's norms.

    >>> from fedmosaic.methods.registry import entry
    >>> sorted(adaptively_clipped(AdaptiveClip())(entry("fedmf").build().algorithm).sent)
    ['item', 'upload_clip']
    """

    def wrap(host: Algorithm) -> Algorithm:
        upload = replace(host.upload, stack=(*host.upload.stack, clip))
        return replace(host, upload=upload, roles={**host.roles, NAME: Role.SHARED})

    return wrap
