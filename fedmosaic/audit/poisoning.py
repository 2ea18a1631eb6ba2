"""Malicious clients against a method: what they send instead, what a server that sees uploads bounds, what comes out.

    boost     the target's row: (clients / attackers) · (1.5 · mean of the ten most popular rows - row); else nothing;
              to a closed form: the statistics of a history of popular items with the target in between, so many times
    shilling  a made-up history: the target and popular items, trained on honestly
    sybils    the same from many more, who need no history of their own
    flip      -10 times the honest upload
    huge      a million in every second number and minus a million in all others, from one client

Against them stand reductions that see every upload (`algorithm/reduction.py`; of closed forms `privacy/limits.py`).
Under a secure sum a server sees none, and only what devices do themselves is left.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm, reduced_by
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core import keys
from fedmosaic.core.errors import ScoreError, SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.histories import Histories
from fedmosaic.data.negatives import Candidates, training_set
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.engine import Engine
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import SecureTeam
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.evaluation.evaluate import Scorer, evaluate
from fedmosaic.methods.closed_form import ClosedForm, State, Statistics, total
from fedmosaic.privacy.limits import bounded_total

Attack = Literal["none", "boost", "shilling", "sybils", "flip", "huge"]
HUGE = 1e6
STRONGER = 1.5
FLIPPED = 10.0
MODELS = 10  # popular rows that a boosted one is made like
FILLERS = 60


@dataclass(frozen=True)
class Damage:
    """An attack by a share of the clients: exposure of the target to others, and how good lists are (1 + 99).

    A training that breaks shows nobody anything: both are 0.
    """

    attack: str
    share: float
    reduction: str
    er: float
    hr: float


@dataclass(frozen=True)
class Scene:
    """Who lies how, and about what."""

    attack: Attack
    liars: frozenset[int]
    target: int
    models: I64  # the most popular items

    @staticmethod
    def of(data: TrainingSet, attack: Attack, share: float, seed: int) -> Scene:
        """A share of the clients, drawn; the target is an item that hardly anybody has."""
        order = keys.generator(seed=seed, purpose=keys.Purpose.COHORT).permutation(data.n_clients)
        count = 0 if attack == "none" else 1 if attack == "huge" else max(1, round(share * data.n_clients))
        popular = np.bincount(data.histories.values, minlength=data.n_items)
        target = int(np.flatnonzero(popular == popular[popular > 0].min())[0])
        return Scene(attack, frozenset(int(c) for c in order[:count]), target, np.argsort(-popular, kind="stable"))

    @property
    def profile(self) -> list[int]:
        """A made-up history: what is popular, and the target last, as if it came next."""
        return [*(int(item) for item in self.models[:FILLERS] if item != self.target), self.target]


@dataclass(frozen=True)
class HostileTeam:
    """A round in which some clients lie (`engine.Team`).

    Liars work alone, and everybody does where the server looks at every upload, or at sums of groups.
    """

    scene: Scene
    engine: Engine  # of honest clients
    secure: SecureTeam | None = None  # whose groups the server sees

    def round(self, engine: Engine, algorithm: Algorithm, task: Task) -> Outcome:
        """Honest work and lies; the sum, and for a server that looks at them all parts of it."""
        assert task.query_items is None, "lists are looked at when the training is over"
        lies = np.isin(task.cohort, list(self.scene.liars))
        looked_at = algorithm.server.reduction.each
        alone = [task.cohort[at : at + 1] for at in np.flatnonzero(lies | looked_at)]
        groups = [group for group in (*alone, task.cohort[~lies & (not looked_at)]) if group.size]
        parts, devices = list[UploadSum](), task.devices
        for group in groups:
            done = self.engine.run(replace(task, cohort=group, devices=devices))
            devices = done.devices
            liar = int(group[0]) in self.scene.liars
            parts.append(self._lie(done.total, algorithm, task) if liar else done.total)
        total = reduce(operator.add, parts)
        if looked_at and self.secure is not None:
            at = {int(party): place for place, party in enumerate(task.data.ids_of(task.cohort))}
            parts = [reduce(operator.add, (parts[at[p]] for p in group)) for group in self.secure.dealt(sorted(at))]
        return Outcome(replace(total, parts=tuple(parts)) if looked_at else total, devices, None)

    def _lie(self, honest: UploadSum, algorithm: Algorithm, task: Task) -> UploadSum:
        totals = {}
        for name, value in honest.totals.items():
            if self.scene.attack == "flip":
                totals[name] = (-FLIPPED * value).astype(np.int64)
            elif self.scene.attack == "huge":
                totals[name] = (huge(value) * SCALE).astype(np.int64)
            elif self.scene.attack == "boost":
                totals[name] = np.zeros_like(value)
                if algorithm.specs[name].axis is Axis.ITEM:
                    table = task.server[name].astype(np.float64)
                    wanted = STRONGER * table[self.scene.models[:MODELS]].mean(axis=0) - table[self.scene.target]
                    sign = -1.0 if algorithm.upload.kind == "gradient" else 1.0
                    step = sign * wanted * task.cohort.size / len(self.scene.liars)
                    totals[name][self.scene.target] = np.round(step * SCALE).astype(np.int64)
            else:
                return honest
        return replace(honest, totals=totals, shrink=dict.fromkeys(honest.shrink, 0))


def damage(
    method: Federation | ClosedForm, split: Split, candidates: Candidates, attack: Attack, share: float, *,
    reduction: str | None = None, rounds: int, seed: int,
) -> Damage:  # fmt: skip
    """Train with liars among the clients, and look at what everybody is shown.

    reduction: in place of the method's own; `bounded` for a closed form, too.
    """
    data = training_set(split, "strict")
    if data.silos is not None:
        raise SettingsError("poisoning is tried with one user per client")
    scene = Scene.of(data, attack, share, seed)
    fed = _with_profiles(data, scene) if attack in ("shilling", "sybils") else data
    words = reduction or "own"
    try:
        if isinstance(method, ClosedForm):
            scorer = method.scorer(data, _hostile_form(method, fed, scene, bounded=reduction is not None, seed=seed))
        else:
            scorer = _hostile_federation(method, fed, scene, reduction, rounds=rounds, seed=seed)
    except (SettingsError, ScoreError):  # the training broke, and nobody is shown anything
        return Damage(attack, len(scene.liars) / data.n_clients, words, 0.0, 0.0)
    seen = evaluate(scorer, split, "test", candidates)
    assert seen.sampled is not None
    fresh = np.array([scene.target not in data.histories[int(user)] for user in seen.full.user])
    fresh &= ~np.isin(seen.full.user, list(scene.liars))  # what they show themselves harms nobody
    shown = (seen.top == scene.target).any(axis=1)
    exposed = float(shown[fresh].mean()) if fresh.any() else 0.0
    return Damage(attack, len(scene.liars) / data.n_clients, words, exposed, seen.sampled.mean("hr", 10))


def huge(like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A million and minus a million in turns.

    >>> huge(np.zeros(3)).tolist()
    [1000000.0, -1000000.0, 1000000.0]
    """
    places = np.arange(like.size).reshape(like.shape)
    return np.where(places % 2, -HUGE, HUGE)


def in_the_open(method: Federation, data: TrainingSet, scene: Scene | None = None) -> Federation:
    """The method with uploads that are added without masks, in groups where it has them: the same sums, in less time.

    Local work does not depend on the reduction, so that honest clients run on the engine of a mean.
    """
    plain = replace(method.algorithm, server=replace(method.algorithm.server, reduce="mean"))
    engine = Federation(plain, engine=method.engine).engine_for(data)
    nobody = Scene.of(data, "none", 0.0, 0)
    team = HostileTeam(scene or nobody, engine, method.team if isinstance(method.team, SecureTeam) else None)
    return replace(method, team=team, budget=None)


def _hostile_federation(
    method: Federation, data: TrainingSet, scene: Scene, reduction: str | None, *, rounds: int, seed: int
) -> Scorer:
    """A training with liars; honest clients run on the engine that the method has."""
    algorithm = method.algorithm
    if reduction is not None:
        algorithm = reduced_by(reduction)(algorithm)
    hostile = replace(in_the_open(method, data, scene), algorithm=algorithm)
    state = hostile.start(data, seed)
    for number in range(1, rounds + 1):
        state, _, _ = hostile.advance(data, state, number, seed)
    return replace(method, team=None, budget=None).scorer(data, state)


def _hostile_form(form: ClosedForm, data: TrainingSet, scene: Scene, *, bounded: bool, seed: int) -> State:
    """All rounds of a closed form with liars among its clients."""
    held, state = data.held, form.start(data, seed)
    latest = 0 if held.times is None else int(held.times.max())

    once = [[int(item), scene.target] for item in scene.models[:MODELS] if item != scene.target]
    walk = [item for pair in once for item in pair]  # popular, target, popular, target ...
    times = None if held.times is None else np.arange(len(walk)) + latest
    profile = Histories(Ragged.from_rows([walk]), data.n_items, times)
    louder = len(held) / max(len(scene.liars), 1)
    for number in range(1, form.rounds + 1):
        if form.done(state):
            break

        def send(client: int, state: State = state) -> Statistics:
            own = form.statistics(state, held.take(np.array([client])))
            if client not in scene.liars:
                return own
            if scene.attack == "boost":
                return {name: louder * value for name, value in form.statistics(state, profile).items()}
            if scene.attack == "flip":
                return {name: -FLIPPED * value for name, value in own.items()}
            return {name: huge(value) for name, value in own.items()} if scene.attack == "huge" else own

        if bounded:
            summed = bounded_total(send, len(held))
        else:
            honest = np.setdiff1d(np.arange(len(held)), list(scene.liars))
            summed = total(form, state, held.take(honest))
            for liar in scene.liars:
                summed = {name: value + summed[name] for name, value in send(liar).items()}
        state = form.apply(state, form.released(summed, number, seed))
    return state


def _with_profiles(data: TrainingSet, scene: Scene) -> TrainingSet:
    """The data with made-up histories of the liars; where times are known, theirs are the latest of all."""
    made = scene.profile
    rows = [made if user in scene.liars else data.histories[user].tolist() for user in range(data.n_users)]
    histories, times = Ragged.from_rows(rows), None
    if data.times is not None:
        old, late = np.split(data.times, data.histories.offsets[1:-1]), np.arange(len(made)) + int(data.times.max())
        times = np.concatenate([late if user in scene.liars else own for user, own in enumerate(old)])
    return replace(data, histories=histories, excluded=data.excluded.union(histories), times=times)
