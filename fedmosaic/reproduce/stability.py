"""Is training stable? Three spreads of a training, from what its rounds leave behind.

    over rounds    standard deviation of validation HR@10 over the last k rounds; and what is left of it about the
                   straight line through them, because a model that still learns moves without being unstable
    over seeds     standard deviation of the test HR@10 of the last round
    of item rows   m_t = |E_t - E_(t-1)| / |E_(t-1)|, Frobenius norms of the shared item tables after rounds t, t - 1;
                   its mean and standard deviation over the last k rounds

FedRecGEL (arXiv 2603.11503) says that sharpness-aware steps make the learning of item rows stable, and what we have of
its text defines no measure of that: these are ours. HR@10 is of 1 + n ranking throughout. The test set is looked at
once, after the last round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmosaic.core import buffers
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.batches import within
from fedmosaic.data.split import Part
from fedmosaic.evaluation.evaluate import evaluate, make_probe, rank_probe
from fedmosaic.methods.closed_form import fit
from fedmosaic.methods.popularity import Popularity
from fedmosaic.report.tables import Table
from fedmosaic.runs.ledger import Record
from fedmosaic.runs.run import Setup
from fedmosaic.training.method import Method

LAST = 10  # rounds that are looked at
PARTS: tuple[Part, Part] = ("validation", "test")


@dataclass(frozen=True)
class Stability:
    """What the rounds of one training left behind; HR@10 as shares of users, not percent."""

    rounds: int
    seed: int
    validation: tuple[float, ...]  # HR@10 after each of the last k rounds
    movement: tuple[float, ...]  # m_t of every round; empty where there is no common item table
    test: float  # HR@10 after the last round

    @property
    def over_rounds(self) -> float:
        """Standard deviation of validation HR@10 over the last k rounds."""
        return spread(self.validation)

    @property
    def about_line(self) -> float:
        """The same about the straight line through those rounds."""
        return about_line(self.validation)

    @property
    def moved(self) -> float:
        """Mean of m_t over the last k rounds."""
        return float(np.mean(self.late)) if self.late else float("nan")

    @property
    def moved_spread(self) -> float:
        """Standard deviation of m_t over the last k rounds."""
        return spread(self.late)

    @property
    def late(self) -> tuple[float, ...]:
        """m_t of the last k rounds."""
        return self.movement[-len(self.validation) :]


def spread(values: Sequence[float]) -> float:
    """Standard deviation with n - 1; not a number where there are fewer than two values.

    >>> spread([1.0, 3.0]) == 2**0.5, spread([1.0])
    (True, nan)
    """
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def about_line(values: Sequence[float]) -> float:
    """Standard deviation about the least-squares line, with n - 2; not a number below three values.

    >>> about_line([1.0, 2.0, 3.0, 4.0]) < 1e-12
    True
    """
    if len(values) < 3:
        return float("nan")
    at = np.arange(len(values))
    rest = np.asarray(values) - np.polyval(np.polyfit(at, values, 1), at)
    return float(np.sqrt(rest @ rest / (len(values) - 2)))


def movement(before: npt.NDArray[np.floating], after: npt.NDArray[np.floating]) -> float:
    """|after - before| / |before|, Frobenius norms; 0 for equal tables, infinite where a table of zeros moved.

    >>> movement(np.ones((2, 2)), np.ones((2, 2))), movement(np.ones((2, 2)), 1.5 * np.ones((2, 2)))
    (0.0, 0.5)
    """
    change = float(np.linalg.norm(np.asarray(after, np.float64) - before))
    return change / float(np.linalg.norm(before.astype(np.float64))) if before.any() else np.inf if change else 0.0


def measure(method: Method[Any], setup: Setup, rounds: int, seed: int, last: int = LAST) -> Stability:
    """Train for so many rounds and measure; `watch` gives the trained state too."""
    return watch(method, setup, rounds, seed, last)[0]


def watch(method: Method[Any], setup: Setup, rounds: int, seed: int, last: int = LAST) -> tuple[Stability, Any]:
    """Train, look at the item tables every round and at validation in the last ones; the state after the last round.

    method, setup: what is trained, on what. rounds, seed: for how long, keyed by what. last: rounds that are looked at.
    """
    if not 1 <= last <= rounds:
        raise SettingsError(f"the last {last} of {rounds} rounds cannot be looked at")
    probes = {part: make_probe(setup.split, part, setup.candidates) for part in PARTS}
    state, moved, seen = method.start(setup.data, seed), [], []
    table = _table(method, state)
    found: dict[Part, float] = {}
    try:
        for number in range(1, rounds + 1):
            asked = PARTS if number == rounds else PARTS[:1] if number > rounds - last else ()
            query = _joined([probes[part] for part in asked])
            state, _, answers = method.advance(setup.data, state, number, seed, query)
            new = _table(method, state)
            if table is not None and new is not None:
                moved.append(movement(table, new))
            table = new
            if query is not None:
                found = _hits(method, setup, state, {part: probes[part] for part in asked}, query, answers)
                seen.append(found["validation"])
    finally:
        buffers.release()
    return Stability(rounds, seed, tuple(seen), tuple(moved), found["test"]), state


def _table(method: Method[Any], state: Any) -> npt.NDArray[np.floating] | None:
    """The common item rows, as they are now; none where nothing is common."""
    try:
        return np.array(method.vectors(state))
    except SettingsError:
        return None


def _joined(probes: Sequence[Ragged]) -> Ragged | None:
    """The items of several probes, user by user, those of the first one first."""
    if len(probes) < 2:
        return probes[0] if probes else None
    rows, values = (np.concatenate([getattr(p, n) for p in probes]) for n in ("rows", "values"))
    return Ragged.group(rows, values, len(probes[0]))


def _hits(
    method: Method[Any], setup: Setup, state: Any, probes: Mapping[Part, Ragged], query: Ragged, answers: Any
) -> dict[Part, float]:
    """HR@10 of each part, from a round's answers to the joined query; by a scorer where a round gave none."""
    found: dict[Part, float] = {}
    place, passed = within(query), np.zeros(len(query), dtype=np.int64)
    for part, probe in probes.items():
        if answers is None:
            ranks = evaluate(method.scorer(setup.data, state), setup.split, part, setup.candidates, top_k=0).sampled
            assert ranks is not None
        else:
            begin = passed[query.rows]
            own = (place >= begin) & (place < begin + probe.lengths[query.rows])
            ranks = rank_probe(np.ascontiguousarray(answers[own]), probe, setup.split.held_out(part))
            passed += probe.lengths
        found[part] = ranks.mean("hr", 10)
    return found


def of_records(records: Sequence[Record], last: int = LAST) -> dict[str, float]:
    """Spreads that stored runs tell, one record a seed: over rounds (mean over runs that had validation), over seeds.

    records: of one method and setting, from a ledger or `Cell.record()`. last: rounds that are looked at.
    """
    tests = [float(r.summary["test"]["sampled"]["hr@10"]) for r in records]
    curves = [[v for v in r.curve.get("validation", []) if v is not None][-last:] for r in records]
    curves = [c for c in curves if len(c) > 1]
    mean = float(np.mean([spread(c) for c in curves])) if curves else float("nan")
    line = float(np.mean([about_line(c) for c in curves])) if curves else float("nan")
    return {
        "test": float(np.mean(tests)) if tests else float("nan"),
        "over seeds": spread(tests),
        "over rounds": mean,
        "about line": line,
    }


def references(setup: Setup) -> dict[str, float]:
    """Test HR@10 of chance and of popularity, the rows that stand beside every metric."""
    split, form = setup.split, Popularity()
    scorer = form.scorer(setup.data, fit(form, setup.data.held))
    ranks = evaluate(scorer, split, "test", setup.candidates, top_k=0).sampled
    assert ranks is not None
    return {"chance": ranks.chance().mean("hr", 10), "popularity": ranks.mean("hr", 10)}


def stability_table(
    title: str, found: Mapping[str, Sequence[Stability]], reference: Mapping[str, float] | None = None
) -> Table:
    """A row a method, HR in percent; with several seeds, spreads over rounds and movements are means over them.

    found: by method, a measurement a seed. reference: test HR@10 of methods that have no rounds.
    """
    header = ("method", "test HR@10", "over seeds", "over last rounds", "about their line", "rows move", "their spread")
    rows = [(name, f"{100 * hr:.2f}", *[""] * 5) for name, hr in (reference or {}).items()]
    for name, many in found.items():
        tests = [s.test for s in many]
        shares: list[float] = [
            float(np.mean(tests)),
            spread(tests),
            float(np.mean([s.over_rounds for s in many])),
            float(np.mean([s.about_line for s in many])),
            float(np.mean([s.moved for s in many])),
            float(np.mean([s.moved_spread for s in many])),
        ]
        cells = [f"{100 * v:.{digits}f}" for v, digits in zip(shares, (2, 2, 2, 2, 3, 3), strict=True)]
        rows.append((name, *("" if cell == "nan" else cell for cell in cells)))
    return Table(title, header, tuple(rows), ("All in percent: of users, or of the length of the item tables.",))
