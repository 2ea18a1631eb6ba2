"""Closed forms with an epsilon: bounded parts, and noise on the sum before anybody learns it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fedmosaic.core.secret import Stream
from fedmosaic.methods.closed_form import ClosedForm, Statistics
from fedmosaic.privacy import release
from fedmosaic.privacy.budget import spent


class PrivateRelease(ClosedForm):
    """A closed form whose sums can be released once, with Gaussian noise; `privacy/release.py` says what that means.

    With an epsilon its `statistics` of one client have a norm of at most 1.
    """

    NO_EPSILON: ClassVar[str] = ""

    epsilon: float | None = Field(default=None, gt=0, description="privacy of a user's whole history; none: no noise")
    delta: float = Field(default=1e-5, gt=0, lt=1, description="chance that epsilon leaves open")

    def check_installed(self) -> None:
        """An epsilon needs something that can count it."""
        super().check_installed()
        if self.epsilon is not None:
            release.check_accountant()

    @property
    def promise(self) -> str | None:
        """What the epsilon means."""
        return None if self.epsilon is None else release.statement(self.epsilon, self.delta)

    def spent_after(self, rounds: int) -> float:
        """The epsilon of so many sums: all of it after the last."""
        if self.epsilon is None or not rounds:
            return 0.0
        share = min(sum(self.budget_share(round) for round in range(1, min(rounds, self.rounds) + 1)), 1.0)
        return min(spent(self.deviation(share), 1, 1.0, self.delta), self.epsilon)

    def budget_share(self, round: int) -> float:
        """Share of the budget that a round's sum takes."""
        return 1.0

    def deviation(self, share: float) -> float:
        """Standard deviation of the noise on every number of a sum with a share of the budget."""
        if self.epsilon is None:
            return 0.0
        return float(release.gaussian_scale(self.epsilon, self.delta) / np.sqrt(share))

    def released(self, total: Statistics, round: int, seed: int | Stream) -> Statistics:
        """The sum with its noise."""
        if self.epsilon is None:
            return total
        return release.noised(total, self.deviation(self.budget_share(round)), seed, round)
