"""Malicious clients against a method: what they send instead, what a server that sees uploads bounds, what comes out.

    boost     the target's row: (clients / attackers) · (1.5 · mean of the ten most popular rows - row); else nothing
    shilling  a made-up history: the target and popular items, trained on honestly
    flip      -10 times the honest upload
    huge      a million in every number, from one client

Bounds (`bounded`): rows of an upload are cut to a norm that nine tenths of the round's rows keep (the median over
clients of each one's own nine tenths), then the upload to one that nine tenths of the clients keep. Every client counts
once, so fewer than a tenth of them cannot move the bounds far; honest clients are cut at most, nobody is refused, and
every client weighs the same. Bounds need uploads in the open: under a secure sum a server sees none, and only what
devices do themselves is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.negatives import Candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.evaluation.evaluate import evaluate

Attack = Literal["none", "boost", "shilling", "flip", "huge"]
HUGE = 1e6
STRONGER = 1.5
FLIPPED = 10.0
MODELS = 10  # popular rows that a boosted one is made like
FILLERS = 60
KEPT = 0.9  # of honest rows and uploads that bounds leave as they are


@dataclass(frozen=True)
class Damage:
    """An attack by a share of the clients: exposure of the target, and how good lists are (1 + 99)."""

    attack: str
    share: float
    bounded: bool
    er: float
    hr: float


@dataclass(frozen=True)
class HostileTeam:
    """A round in which some clients lie (`engine.Team`); every upload is seen, and bounded or not."""

    attack: Attack
    liars: frozenset[int]
    target: int
    models: I64  # the most popular items
    bounded: bool

    def round(self, engine: Engine, algorithm: Algorithm, task: Task) -> Outcome:
        """Every client by itself; lies where there are some; the sum of what is left of them."""
        parts, devices, answers = list[UploadSum](), task.devices, []
        for at in range(task.cohort.size):
            asked: Ragged | None = None if task.query_items is None else task.query_items.take(np.array([at]))
            done = engine.run(replace(task, cohort=task.cohort[at : at + 1], devices=devices, query_items=asked))
            devices = done.devices
            lies = int(task.cohort[at]) in self.liars
            parts.append(self._lie(done.total, algorithm, task) if lies else done.total)
            if done.answers is not None:
                answers.append(done.answers)
        limits = NormBounds.of(algorithm, parts) if self.bounded else None
        total = parts[0] if limits is None else limits.cut(algorithm, parts[0])
        for part in parts[1:]:
            total = total + (part if limits is None else limits.cut(algorithm, part))
        return Outcome(total, devices, np.concatenate(answers) if answers else None)

    def _lie(self, honest: UploadSum, algorithm: Algorithm, task: Task) -> UploadSum:
        totals = {}
        for name, value in honest.totals.items():
            if self.attack == "flip":
                totals[name] = (-FLIPPED * value).astype(np.int64)
            elif self.attack == "huge":
                totals[name] = np.full_like(value, int(HUGE * SCALE))
            elif self.attack == "boost":
                totals[name] = np.zeros_like(value)
                if algorithm.specs[name].axis is Axis.ITEM:
                    table = task.server[name].astype(np.float64)
                    wanted = STRONGER * table[self.models].mean(axis=0) - table[self.target]
                    sign = -1.0 if algorithm.upload.kind == "gradient" else 1.0
                    step = sign * wanted * task.cohort.size / len(self.liars)
                    totals[name][self.target] = np.round(step * SCALE).astype(np.int64)
            else:
                return honest
        return replace(honest, totals=totals, shrink=dict.fromkeys(honest.shrink, 0))


@dataclass(frozen=True)
class NormBounds:
    """Norms that a round's rows and uploads are cut to."""

    row: dict[str, float]
    whole: float

    @staticmethod
    def of(algorithm: Algorithm, parts: list[UploadSum]) -> NormBounds:
        """What most clients keep."""
        found: dict[str, float] = {}
        for name in parts[0].totals:
            if algorithm.specs[name].axis is Axis.ITEM:
                own = [norms[norms > 0] for norms in (_norms(part.totals[name]) for part in parts)]
                found[name] = float(np.median([float(np.quantile(one, KEPT)) for one in own if one.size] or [0.0]))
        rows = NormBounds(found, np.inf)
        return NormBounds(found, float(np.quantile([_size(rows.cut(algorithm, part)) for part in parts], KEPT)))

    def cut(self, algorithm: Algorithm, part: UploadSum) -> UploadSum:
        """An upload within the limits."""
        totals = {}
        for name, value in part.totals.items():
            if name in self.row:
                norms = np.maximum(_norms(value), 1e-30)
                factor = np.minimum(self.row[name] / norms, 1).reshape(-1, *[1] * (value.ndim - 1))
                value = np.round(value * factor).astype(np.int64)
            totals[name] = value
        size = _size(replace(part, totals=totals))
        if size > self.whole:
            totals = {n: np.round(v * (self.whole / size)).astype(np.int64) for n, v in totals.items()}
        return replace(part, totals=totals)


def _norms(value: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.linalg.norm(value.reshape(len(value), -1) / SCALE, axis=1)
    return found


def _size(part: UploadSum) -> float:
    return float(np.sqrt(sum(float(np.square(value / SCALE).sum()) for value in part.totals.values())))


def damage(
    method: Federation, split: Split, candidates: Candidates, attack: Attack, share: float, *, bounded: bool,
    rounds: int, seed: int,
) -> Damage:  # fmt: skip
    """Train with liars among the clients, and look at what everybody is shown."""
    data = training_set(split, "strict")
    if data.silos is not None:
        raise SettingsError("poisoning is tried with one user per client")
    order = keys.generator(seed=seed, purpose=keys.Purpose.COHORT).permutation(data.n_clients)
    count = 0 if attack == "none" else 1 if attack == "huge" else max(1, round(share * data.n_clients))
    liars = frozenset(int(client) for client in order[:count])
    popular = np.bincount(data.histories.values, minlength=data.n_items)
    target = int(np.flatnonzero(popular == popular[popular > 0].min())[0])
    models = np.argsort(-popular, kind="stable")[:MODELS]
    if attack == "shilling":
        data = _with_profiles(data, liars, target, np.argsort(-popular, kind="stable")[:FILLERS])
    hostile = replace(method, team=HostileTeam(attack, liars, target, models, bounded), budget=None)
    state = hostile.start(data, seed)
    for number in range(1, rounds + 1):
        state, _, _ = hostile.advance(data, state, number, seed)
    seen = evaluate(replace(hostile, team=None).scorer(data, state), split, "test", candidates)
    assert seen.sampled is not None
    held = training_set(split, "strict").histories
    fresh = np.array([target not in held[int(user)] for user in seen.full.user])
    shown = (seen.top == target).any(axis=1)
    exposed = float(shown[fresh].mean()) if fresh.any() else 0.0
    return Damage(attack, count / data.n_clients, bounded, exposed, seen.sampled.mean("hr", 10))


def _with_profiles(data: TrainingSet, liars: frozenset[int], target: int, fillers: I64) -> TrainingSet:
    """The data with made-up histories of the liars."""
    made = np.unique(np.append(fillers, target)).astype(np.int32)
    rows = [made if user in liars else data.histories[user] for user in range(data.n_users)]
    histories = Ragged.from_rows([row.tolist() for row in rows])
    return replace(data, histories=histories, excluded=data.excluded.union(histories), times=None)
