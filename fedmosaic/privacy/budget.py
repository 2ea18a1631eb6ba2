"""User-level differential privacy in rounds: every client's upload is bounded, the sum of a round gains noise.

    change_u <- change_u · min(1, clip / |change_u|)        the joint norm of all that a client sends
    sum <- Σ change_u + N(0, (multiplier · clip)²)          per number, once a round

The multiplier follows from epsilon, delta, the rounds and the share of clients in each (`multiplier`). Neighbouring
data sets differ by one user with all events, added or removed. With a share below 1 every client is drawn by itself
with that chance (Poisson), because that is what is accounted for, and a mean divides by the expected number of them.
Numbers come from `dp-accounting` (privacy loss distributions).

Who adds the noise (`trust`):

    server     the server, which is trusted with every upload, or with the plain sum
    devices    every device adds its share, N(0, (multiplier · clip)² / least), before it masks: whoever learns the sum
               alone learns it with enough noise if at least `least` of the clients were added; as many as two thirds

A share is rounded to whole steps of 2^-32, and the sum of rounded Gaussians has the law of a Gaussian plus as many
uniform numbers of one step's width, looked at on the grid, up to exp(-2 pi² deviation²), deviation in steps: the
characteristic function of a rounded Gaussian is that of the Gaussian times a sinc, repeated. Further independent noise
costs no privacy, so the Gaussian's epsilon holds. (`tests/test_budget.py` checks it with steps as wide as the noise.)

What is covered: whatever is computed from the sums. What stays on the device needs no noise (joint differential
privacy: what others see of a user). Not covered: which round was chosen by validation, and settings chosen by looking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, sqrt
from typing import Any, Literal

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.upload import Noise
from fedmosaic.core.errors import FedmosaicError, SettingsError
from fedmosaic.privacy.adaptive_clip import AdaptiveClip, adaptively_clipped
from fedmosaic.privacy.noise import AddedNoise, clipped
from fedmosaic.privacy.release import check_accountant, gaussian_scale
from fedmosaic.privacy.secure_sum import TooFewError

Trust = Literal["devices", "server"]
ALIVE = 2 / 3  # of a cohort: so many are enough for the noise of a round


class BudgetSpentError(FedmosaicError):
    """An epsilon is used up: no further round may ask the devices."""


@cache
def spent(multiplier: float, rounds: int, participation: float, delta: float) -> float:
    """Epsilon after so many rounds.

    >>> round(spent(10.0, 100, 1.0, 1e-5), 2)
    4.38
    """
    check_accountant()
    from dp_accounting import dp_event
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    one: Any = dp_event.GaussianDpEvent(multiplier)
    if participation < 1:
        one = dp_event.PoissonSampledDpEvent(participation, one)
    accountant = PLDAccountant()
    accountant.compose(one, rounds)
    return float(accountant.get_epsilon(delta))


@cache
def multiplier(epsilon: float, delta: float, rounds: int, participation: float) -> float:
    """The least noise, in multiples of the clip, with which all rounds spend epsilon at the most; to three digits.

    >>> round(multiplier(8.0, 1e-5, 20, 1.0), 3), multiplier(8.0, 1e-5, 20, 0.1) < 1.0
    (2.684, True)
    """
    if participation == 1:  # Gaussian mechanisms add in squares
        return gaussian_scale(epsilon, delta) * sqrt(rounds)
    low, high = 0.0, 1.0
    while spent(high, rounds, participation, delta) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle, rounds, participation, delta) <= epsilon else (middle, high)
    return high


@dataclass(frozen=True)
class Budget:
    """An epsilon for a whole training, and how it is kept.

    clip: the bound on uploads; or how it follows their norms, and then `at` says what it is in a round.
    """

    epsilon: float
    delta: float
    clip: float | AdaptiveClip
    rounds: int
    participation: float
    trust: Trust
    bound: float | None = None  # of a round, where it follows

    @property
    def multiplier(self) -> float:
        """Of the mechanism that a round is: its noise in multiples of what one user changes."""
        return multiplier(self.epsilon, self.delta, self.rounds, self.participation)

    def at(self, params: Mapping[str, Any]) -> Budget:
        """The budget in a round that begins with these parameters."""
        return replace(self, bound=self.clip.bound_of(params)) if isinstance(self.clip, AdaptiveClip) else self

    def check_enough(self, clients: int, expected: int) -> None:
        """Refuse to open a sum whose shares of the noise are too few."""
        if self.trust == "devices" and clients < self.least(expected):
            raise TooFewError(f"{clients} clients of {expected} are too few for the noise of a round; begin it again")

    @staticmethod
    def least(expected: int) -> int:
        """Clients whose shares are enough, so many being expected in a round."""
        return max(1, ceil(ALIVE * expected))

    def noise(self, expected: int) -> Noise:
        """What every device adds, or what the server adds once."""
        shares = 1 if self.trust == "server" else self.least(expected)
        if not isinstance(self.clip, AdaptiveClip):
            return AddedNoise("gaussian", self.multiplier * self.clip / sqrt(shares), "summed")
        assert self.bound is not None, "an adaptive bound is that of a round: ask `at`"
        return self.clip.noise(self.multiplier, self.bound, shares)

    def spent_after(self, rounds: int) -> float:
        """The epsilon of so many rounds, of those that were paid for."""
        return min(spent(self.multiplier, rounds, self.participation, self.delta), self.epsilon)

    def check(self, round: int) -> None:
        """Refuse a round that was not paid for."""
        if not 1 <= round <= self.rounds:
            raise BudgetSpentError(
                f"epsilon {self.epsilon:g} is spent: its noise was for {self.rounds} rounds, and this would be round "
                f"{round}; begin a new training with rounds={round} or more"
            )

    @property
    def promise(self) -> str:
        """What the epsilon means, to be printed beside it."""
        who = {
            "server": "noise by a server that is trusted with every upload",
            "devices": "noise in shares by the devices, enough if two thirds of a cohort are added up; the server sees "
            "the sum alone (secure=true), and is trusted to follow the protocol",
        }[self.trust]
        if isinstance(self.clip, AdaptiveClip):
            bound = f"a private quantile of their norms ({self.clip.quantile:g}), which is paid for"
        else:
            bound = f"{self.clip:g}"
        return (
            f"epsilon {self.epsilon:g}, delta {self.delta:g}, user level (add or remove one user with all events), "
            f"{self.rounds} rounds of a share {self.participation:g} of the clients, uploads clipped to {bound}; "
            f"{who}; the number of clients and the catalogue are public, the choice of a round by validation is not "
            "covered"
        )


def bounded_by(clip: float | AdaptiveClip) -> Wrapper:
    """Bound the joint norm of what a client of a host sends: by a number, or by what follows the norms."""
    return adaptively_clipped(clip) if isinstance(clip, AdaptiveClip) else clipped(clip)


def bounded(budget: Budget) -> Wrapper:
    """Clip what a client of a host sends; the noise depends on how many a round draws (`Budget.noise`)."""

    def wrap(host: Algorithm) -> Algorithm:
        if host.upload.noise is not None or host.step_noise:
            raise SettingsError("epsilon= brings its own noise; leave the other noise out")
        if host.server.reduction.counts_senders:
            raise SettingsError(
                "epsilon=: rows averaged over their senders show who sent what; use preset=paper, or the mean"
            )
        if host.server.reduction.each:
            raise SettingsError("epsilon=: this server's reduction sees every upload by itself; use mean or sum")
        return bounded_by(budget.clip)(host)

    return wrap
