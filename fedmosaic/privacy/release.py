"""One-shot releases with an epsilon: sums whose parts are bounded, with Gaussian noise on the sum.

Every client's part of a sum is scaled to an L2 norm of at most 1; the sum gains N(0, sigma²) per number. With sigma
from `gaussian_scale` it is (epsilon, delta) differentially private for *users*: neighbouring data sets differ by one
user with all of the user's events, added or removed. The noise is added by whoever sums, who has to be trusted with
the sum (`trust=server`). Several releases of one training share a budget: noise of sigma / sqrt(share) for each, with
shares that add up to 1, composes exactly to one release with sigma, because Gaussian mechanisms add in squares.

Only what is released is covered: what a device derives from its own history stays on it, and everything that the server
computes from a release is covered by it. Settings chosen by looking at the same data are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core import keys
from fedmosaic.core.extras import require_extra
from fedmosaic.core.secret import Stream

Arrays = Mapping[str, npt.NDArray[Any]]


def check_accountant() -> None:
    """Refuse an epsilon where nothing can count it."""
    require_extra("an epsilon", "dp_accounting", "dp-accounting", "privacy")


@cache
def gaussian_scale(epsilon: float, delta: float) -> float:
    """The least sigma for which one Gaussian release of sensitivity 1 is (epsilon, delta) private (Balle, Wang 2018).

    >>> round(gaussian_scale(1.0, 1e-5), 2)
    3.73
    """
    check_accountant()
    from dp_accounting.pld import accountant, common

    return float(accountant.get_smallest_gaussian_noise(common.DifferentialPrivacyParameters(epsilon, delta), 1, 1.0))


def noised(total: Arrays, deviation: float, seed: int | Stream, round: int) -> dict[str, npt.NDArray[Any]]:
    """A sum and its noise: of a secret stream, or a simulation's, that whoever knows the seed can draw again.

    The law is the same.
    """
    if isinstance(seed, Stream):
        return {n: v + seed.gaussian(deviation, v.size).reshape(v.shape) for n, v in sorted(total.items())}
    key = keys.derive(seed=seed, round=round, purpose=keys.Purpose.NOISE)
    generator = np.random.Generator(np.random.Philox(key=int(np.ravel(key)[0])))
    return {name: value + generator.normal(0.0, deviation, value.shape) for name, value in sorted(total.items())}


def out_of_noise(part: npt.NDArray[Any], edge: float) -> npt.NDArray[Any]:
    """A Hermitian matrix without what noise alone would give it: eigenvalues e become sign(e) sqrt(max(e² - edge², 0)).

    A symmetric random matrix of size k with entries of variance s² has its eigenvalues within ±2 s sqrt(k).

    >>> out_of_noise(np.diag([5.0, -5.0, 2.0]), 3.0).round(6).diagonal().tolist()
    [4.0, -4.0, 0.0]
    """
    sizes, axes = np.linalg.eigh(part)
    shrunk = np.sign(sizes) * np.sqrt(np.maximum(sizes**2 - edge**2, 0))
    return np.asarray((axes * shrunk) @ axes.conj().T)


def statement(epsilon: float, delta: float) -> str:
    """What an epsilon means here, to be printed beside it."""
    return (
        f"epsilon {epsilon:g}, delta {delta:g}, user level (add or remove one user), one training, noise by the server "
        "that is trusted with the sums; the number of clients and the catalogue are public"
    )
