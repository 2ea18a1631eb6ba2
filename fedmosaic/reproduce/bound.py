"""FedRecGEL's lemma 1 in numbers: is its assumption true of a trained model, and does its bound say anything?

    assumption    L_D(θ) <= E[L_D(θ + e)],   e ~ N(0, σ² I)
    bound         L_D(θ) <= E[L_S(θ + e)] + f(|θ|²)            with probability 1 - δ over the examples S

What we have of the paper (arXiv 2603.11503) states the assumption in full and ends at "f^k(|θ^k|²) is a regularization
term, equals to": neither the inequality nor f stands there. In f's place we put the one that the lemma is modelled
after, Foret et al. (Sharpness-aware minimization, ICLR 2021, appendix, the step before the worst case is taken):

    f(|θ|²) = L · sqrt( (k/4 · ln(1 + |θ|² / (k σ²)) + 1/4 + ln(n/δ) + 2 ln(6n + 3k)) / (n - 1) )

k: parameters, n: examples, L: the most that an example's loss can be. It is McAllester's PAC-Bayes bound with the
posterior N(θ, σ² I) and a prior around 0 whose width is chosen from a grid. Taking the worst case within the radius
ρ = σ (sqrt k + sqrt(ln n)) instead of the mean can only make it larger, so what the mean form does not say the other
does not either. Cross-entropy has no upper end; losses are cut at L.

Three readings of "task", because the text does not settle it:

    pooled    one task: all shared parameters and everybody's own, all examples
    client    a task per client: all shared parameters and its own, its examples; θ^k as the lemma writes it
    item      a task per item: only its rows, everything else taken as given. That is no theorem, because the rest was
              learned from the same examples; it is the reading with the fewest parameters per task

The theorem asks for independent examples. A history split by time and negatives drawn per positive are not that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import SettingsError
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.report.tables import Table

if TYPE_CHECKING:
    from fedmosaic.reproduce.item_tasks import Tasks

F64 = npt.NDArray[np.float64]
Reading = Literal["pooled", "client", "item"]
READINGS: tuple[Reading, ...] = get_args(Reading)
ZERO_SCORES = log(2)  # loss of a model that scores everything 0: a bound from here on says nothing
LIMIT = 4.0  # L: a positive scored -4, at 1.8 %, costs as much
DELTA = 0.05
ROUNDING = 1e-7  # relative, of losses that are computed in float32


@dataclass(frozen=True)
class Perturbed:
    """A loss, its mean over Gaussian moves of the parameters, and how well that mean is known."""

    sigma: float
    pairs: int  # of opposite moves
    loss: float
    mean: float
    error: float  # standard error of the mean over pairs
    risen: float  # share of clients whose own loss rose

    @property
    def rise(self) -> float:
        """E[L(θ + e)] - L(θ); the lemma assumes that it is not negative."""
        return self.mean - self.loss

    @property
    def verdict(self) -> str:
        """Whether the assumption holds, beyond two standard errors and what float32 can tell apart."""
        if abs(self.rise) <= max(2 * self.error, ROUNDING * self.loss):
            return "undecided"
        return "holds" if self.rise > 0 else "fails"


@dataclass(frozen=True)
class Bound:
    """The bound under one reading; where there are many tasks, medians over them."""

    reading: Reading
    sigma: float
    tasks: int
    parameters: int  # of a task
    examples: float  # of a task
    squared_norm: float
    loss: float  # cut at L, at the point itself
    perturbed: float  # cut at L, mean over moves
    term: float  # f for L = 1
    value: float
    lowest: float  # of any task
    vacuous: float  # share of tasks whose bound is no lower than the loss of a model that scores everything 0


def regularisation(
    squared_norm: float, parameters: int, examples: float, sigma: float, *, limit: float = 1.0, delta: float = DELTA
) -> float:
    """f(|θ|²) as above; infinite for fewer than two examples, or without noise.

    squared_norm: |θ|². parameters, examples: k and n. limit: L. delta: chance that the bound is wrong.

    >>> regularisation(4.0, 10, 100, 0.5) < regularisation(9.0, 10, 100, 0.5)
    True
    >>> regularisation(4.0, 10, 100, 0.5) > regularisation(4.0, 10, 200, 0.5)
    True
    """
    if squared_norm < 0 or parameters < 1 or not 0 < delta < 1 or limit <= 0 or sigma < 0:
        raise SettingsError("|θ|² >= 0, parameters >= 1, 0 < delta < 1, limit > 0 and sigma >= 0 are wanted")
    if examples < 2 or not sigma:
        return float("inf")
    complexity = parameters / 4 * float(np.log1p(squared_norm / (parameters * sigma**2))) + 1 / 4
    chance = log(examples / delta) + 2 * log(6 * examples + 3 * parameters)
    return limit * sqrt((complexity + chance) / (examples - 1))


def sigma_of(radius: float, parameters: int, examples: float) -> float:
    """The σ whose moves stay within a radius with probability 1 - 1/sqrt n: ρ = σ (sqrt k + sqrt(ln n))."""
    return radius / (sqrt(parameters) + sqrt(log(examples)))


def held_out(split: Split) -> TrainingSet:
    """Test items as examples: negatives are drawn from what the user has in no part."""
    return TrainingSet(split.test, split.train.union(split.validation, split.test), split.n_items)


def perturbed(tasks: Tasks, sigma: float, *, pairs: int = 8, names: Sequence[str] | None = None) -> Perturbed:
    """E[L(θ + e)] by pairs of opposite moves (their first-order parts cancel, so the mean is known far better).

    tasks: a trained model on some examples; on `held_out` ones this checks the lemma's assumption. names: parameters
    that move; all of a task's, if not said.
    """
    still = tasks.example_losses()
    total, means = np.zeros_like(still), []
    for draw in range(pairs):
        both = (tasks.example_losses(sigma, draw, names) + tasks.example_losses(sigma, -1 - draw, names)) / 2
        total += both
        means.append(float(both.mean()))
    rises = np.bincount(tasks.clients, weights=total / pairs - still)
    error = float(np.std(means, ddof=1)) / sqrt(pairs) if pairs > 1 else float("inf")
    return Perturbed(sigma, pairs, float(still.mean()), float(np.mean(means)), error, float((rises > 0).mean()))


def bounds(
    tasks: Tasks, sigma: float, *, pairs: int = 2, limit: float = LIMIT, delta: float = DELTA
) -> tuple[Bound, ...]:
    """The bound under each reading; for many tasks it holds for all of them at once (each gets its share of delta).

    tasks: a trained model on its training examples. limit: L, where losses are cut. delta: chance that it is wrong.
    """
    still = np.minimum(tasks.example_losses(), limit)
    everything, rows = (_cut_mean(tasks, sigma, pairs, limit, names) for names in (None, tasks.tables))
    (shared, own, row), (length, own_lengths, row_lengths) = tasks.sizes(), tasks.squared_lengths()
    users = tasks.counts.size
    counts, (there, by_item) = tasks.counts, np.unique(tasks.items, return_counts=True)
    whole = (np.array([still.size]), np.array([length + own_lengths.sum()]), np.zeros_like(tasks.clients))
    given: dict[Reading, tuple[int, tuple[Any, Any, Any], F64]] = {
        "pooled": (shared + users * own, whole, everything),
        "client": (shared + own, (counts, length + own_lengths, tasks.clients), everything),
        "item": (row, (by_item, row_lengths[there], np.searchsorted(there, tasks.items)), rows),
    }
    found = []
    for reading, (parameters, (examples, squares, owner), moved) in given.items():
        many = examples.size
        losses, raised = (np.bincount(owner, weights=v, minlength=many) / examples for v in (still, moved))
        terms = np.array(
            [
                regularisation(float(s), parameters, float(n), sigma, delta=delta / many)
                for s, n in zip(squares, examples, strict=True)
            ]
        )
        values = raised + limit * terms
        middle = [float(np.median(v)) for v in (examples, squares, losses, raised, terms, values)]
        size, square, loss, mean, term, value = middle
        lowest, vacuous = float(values.min()), float((values >= ZERO_SCORES).mean())
        found.append(Bound(reading, sigma, many, parameters, size, square, loss, mean, term, value, lowest, vacuous))
    return tuple(found)


def _cut_mean(tasks: Tasks, sigma: float, pairs: int, limit: float, names: Sequence[str] | None) -> F64:
    """Every example's cut loss, mean over moves."""
    total = np.zeros(tasks.items.size)
    for draw in range(pairs):
        for side in (draw, -1 - draw):
            total += np.minimum(tasks.example_losses(sigma, side, names), limit)
    return np.asarray(total / (2 * pairs))


def assumption_table(title: str, found: Sequence[tuple[str, Perturbed]]) -> Table:
    """A row a model and sigma."""
    header = ("method", "sigma", "test loss", "moved", "rise", "standard error", "clients that rise", "assumption")
    rows = [
        (
            name,
            f"{p.sigma:.2g}",
            f"{p.loss:.5f}",
            f"{p.mean:.5f}",
            f"{p.rise:+.1e}",
            f"{p.error:.0e}",
            f"{100 * p.risen:.0f} %",
            p.verdict,
        )
        for name, p in found
    ]
    return Table(title, header, tuple(rows))


def bound_table(title: str, found: Sequence[tuple[str, Bound]]) -> Table:
    """A row a model and reading."""
    header = (
        "method",
        "task",
        "sigma",
        "tasks",
        "k",
        "n",
        "|θ|²",
        "moved loss",
        "f at L = 1",
        "bound",
        "lowest",
        "says",
    )
    rows = [
        (
            name,
            b.reading,
            f"{b.sigma:.2g}",
            f"{b.tasks:,}",
            f"{b.parameters:,}",
            f"{b.examples:,.0f}",
            f"{b.squared_norm:.1f}",
            f"{b.perturbed:.3f}",
            f"{b.term:.2f}",
            f"{b.value:.2f}",
            f"{b.lowest:.2f}",
            "nothing" if b.vacuous == 1 else f"something of {100 * (1 - b.vacuous):.1f} % of tasks",
        )
        for name, b in found
    ]
    return Table(title, header, tuple(rows))
