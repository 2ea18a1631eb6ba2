"""The curious server against a method: what it sees of single clients under the chosen protections, attacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.audit.attacks import ATTACKS, Guess, direction, disaggregated, recovered
from fedmosaic.audit.poisoning import in_the_open
from fedmosaic.core import keys
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64
from fedmosaic.core.secret import DeviceSecret, new_secret
from fedmosaic.data.batches import draw_cohort
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import SecureTeam, unflat
from fedmosaic.engines.state import FederationState
from fedmosaic.methods.closed_form import ClosedForm
from fedmosaic.privacy.noise import AddedNoise
from fedmosaic.privacy.secure_sum import MaskedUpload, Pair, Party, SumTerms

F64 = npt.NDArray[np.float64]
COHORT = 0.1  # of the clients, where cohorts are drawn anew
REDRAWN = 20  # rounds of those
DRAWN = 4096  # numbers of noise


@dataclass(frozen=True)
class Finding:
    """An attack in a round, and how good its guesses were."""

    attack: str
    round: int
    f1: float
    auc: float


@dataclass(frozen=True)
class Messages:
    """Bytes of the messages of a round: how many sizes there are, and whether they follow the histories' lengths."""

    round: int
    sizes: int
    correlation: float


@dataclass(frozen=True)
class NoiseFound:
    """Of so many devices' noise, how often its key was found in one upload."""

    devices: int
    recovered: int


def victims(data: TrainingSet, count: int, seed: int) -> I64:
    """Clients that are attacked: drawn among those with a history that is not the whole catalogue."""
    lengths = data.histories.unique().lengths
    able = np.flatnonzero((lengths > 0) & (lengths < data.n_items))
    drawn = keys.generator(seed=seed, purpose=keys.Purpose.COHORT).permutation(able)[:count]
    return np.sort(drawn).astype(np.int64)


def prior(data: TrainingSet, users: I64) -> Guess:
    """The guess of somebody who sees nothing of a client: what is popular."""
    counts = np.bincount(data.histories.values, minlength=data.n_items).astype(np.float64)
    return Guess.of([counts] * users.size, truth(data, users))


def truth(data: TrainingSet, users: I64) -> list[npt.NDArray[Any]]:
    """What the clients were trained on."""
    return [np.unique(data.histories[int(user)]) for user in users]


def of_federation(
    method: Federation, data: TrainingSet, users: I64, rounds: Sequence[int], seed: int, say: Callable[[str], None]
) -> tuple[list[Finding], list[Messages]]:
    """Single uploads in some rounds, the rows of several, and sums over cohorts that are drawn anew."""
    found, sizes, own = [], [], truth(data, users)
    team = method.team
    groups = team.dealt(range(data.n_clients)) if isinstance(team, SecureTeam) and team.groups is not None else []
    plain = in_the_open(method, data) if groups else replace(method, team=None)
    state, touched = plain.start(data, seed), np.zeros((users.size, data.n_items))
    for number in range(1, max(rounds) + 1):
        ctx = Context(number, seed, data.n_items, data.n_clients)
        if number in rounds:
            say(f"single uploads of round {number}")
            sent = list(uploads(method, data, state, ctx, users))
            seen = [table for table, _ in sent]
            sizes.append(_messages(number, [size for _, size in sent], own))
            touched += [table.any(axis=1) for table in seen]
            found += _judged(seen, own, number)
            if groups:
                sums = group_sums(method, data, state, ctx, groups, users)
                found += [replace(f, attack=f"group {f.attack}") for f in _judged(sums, own, number)]
            if number > 1:
                guess = Guess.of(list(touched), own)
                found.append(Finding("frequency", number, guess.f1, guess.auc))
        state, _, _ = plain.advance(data, state, number, seed)
    if groups:  # the same in every round
        return found, sizes
    say(f"sums over {REDRAWN} cohorts")
    guess = Guess.of(_from_sums(plain, data, users, seed), own)
    found.append(Finding("disaggregation", REDRAWN, guess.f1, guess.auc))
    return found, sizes


def group_sums(
    method: Federation, data: TrainingSet, state: FederationState, ctx: Context, groups: Sequence[Sequence[int]],
    users: I64,
) -> list[F64]:  # fmt: skip
    """What the server sees of the group that every client is in, as rows of the items."""
    found, alone = dict[int, F64](), replace(method, team=None, budget=None)
    for group in groups:
        wanted = np.intersect1d(users, group)
        if wanted.size:
            _, done = alone.contribute(data, state, ctx, np.array(group))
            found |= dict.fromkeys(wanted.tolist(), item_rows(method, done.total))
    return [found[int(user)] for user in users]


def _messages(number: int, sizes: Sequence[int], own: Sequence[npt.NDArray[Any]]) -> Messages:
    different = len(set(sizes))
    lengths = [held.size for held in own]
    return Messages(number, different, float(np.corrcoef(sizes, lengths)[0, 1]) if different > 1 else 0.0)


def noise_of_devices(algorithm: Algorithm, n_items: int, devices: int = 100) -> NoiseFound | None:
    """Try to find the keys of devices' Laplace noise; none where a method adds none."""
    noise = algorithm.upload.noise
    if not isinstance(noise, AddedNoise) or noise.kind != "laplace":
        return None
    found = 0
    for device in range(devices):
        ctx = Context(1, 0, n_items, 1, DeviceSecret(new_secret(), "audit"), "table")
        drawn = np.zeros(DRAWN, np.int64)
        noise.add(drawn, "item", np.array([device]), ctx)
        found += recovered(drawn / SCALE, noise.scale)
    return NoiseFound(devices, found)


def _judged(seen: Sequence[F64], own: Sequence[npt.NDArray[Any]], number: int) -> list[Finding]:
    guesses = {name: Guess.of([attack(table) for table in seen], own) for name, attack in ATTACKS.items()}
    return [Finding(name, number, guess.f1, guess.auc) for name, guess in guesses.items()]


def uploads(
    method: Federation, data: TrainingSet, state: FederationState, ctx: Context, users: I64
) -> Iterator[tuple[F64, int]]:
    """What the server sees of each client: its upload as rows of the items, masked where sums are secure; its bytes."""
    algorithm = method.algorithm
    alone = replace(method, team=None, budget=None)
    for user in users:
        _, done = alone.contribute(data, state, ctx, np.array([user]))
        total = done.total
        size = algorithm.traffic(data.n_items, float(total.touched.sum()), total.numbers)[0]
        if isinstance(method.team, SecureTeam):
            vector = method.team.sent(algorithm, total, data.n_clients)
            sent = masked(vector, int(user), data.n_clients, ctx.round, method.team.bits)
            total, size = unflat(algorithm, total, sent.masked.astype(np.int64), 1), sent.nbytes
        yield item_rows(method, total), int(size)


def masked(vector: I64, user: int, clients: int, round: int, bits: Literal[32, 64] = 64) -> MaskedUpload:
    """What the server receives of a client in a secure sum of everybody."""
    terms = SumTerms("audit", round, "", tuple(range(clients)), bits=bits)
    near = terms.graph[user]
    publics = {other: Pair.new().public for other in near}
    return Party.begin(user, Pair.new(), publics, terms).mask(vector)


def item_rows(method: Federation, total: UploadSum) -> F64:
    """The item tables of a sum beside each other: a row per item."""
    algorithm = method.algorithm
    tables = [n for n in sorted(total.totals) if algorithm.specs[n].axis is Axis.ITEM]
    return np.concatenate([total.totals[n].reshape(len(total.totals[n]), -1) / SCALE for n in tables], axis=1)


def _from_sums(method: Federation, data: TrainingSet, users: I64, seed: int) -> list[F64]:
    """Direction on what cohort sums tell of each client."""
    state, sums, there = method.start(data, seed), [], np.zeros((REDRAWN, data.n_clients), dtype=bool)
    cohorts = replace(method, participation=COHORT, team=None, budget=None)
    for number in range(1, REDRAWN + 1):
        ctx = Context(number, seed, data.n_items, data.n_clients)
        cohort = draw_cohort(data.n_clients, COHORT, seed=seed, round=number)
        there[number - 1, cohort] = True
        _, done = cohorts.contribute(data, state, ctx, cohort)
        sums.append(item_rows(cohorts, done.total).ravel())
        state, _, _ = cohorts.advance(data, state, number, seed)
    each = disaggregated(np.stack(sums), there)
    width = each.shape[1] // data.n_items
    return [direction(each[user].reshape(data.n_items, width)) for user in users]


def of_closed_form(form: ClosedForm, data: TrainingSet, users: I64, seed: int) -> list[Finding]:
    """Every round's statistics of single clients: rows or columns of items."""
    found, own, state = [], truth(data, users), form.start(data, seed)
    for number in range(1, form.rounds + 1):
        if form.done(state):
            break
        seen = []
        for user in users:
            parts = form.statistics(state, data.held.take(np.array([user])))
            if form.secure:
                vector = np.concatenate([np.round(parts[n] * SCALE).astype(np.int64).ravel() for n in sorted(parts)])
                masks = masked(vector, int(user), data.n_clients, number).masked.view(np.int64) / SCALE
                cuts = np.cumsum([parts[n].size for n in sorted(parts)])[:-1]
                split = np.split(masks, cuts)
                parts = {n: part.reshape(parts[n].shape) for n, part in zip(sorted(parts), split, strict=True)}
            seen.append(by_item(parts, data.n_items))
        found += [f for f in _judged(seen, own, number) if f.attack == "norm"]
        state, _, _ = replace_secure(form).advance(data, state, number, seed)
    return found


def replace_secure(form: ClosedForm) -> ClosedForm:
    """The form with plain sums, whose numbers are the same."""
    return form.model_copy(update={"secure": False})


def by_item(parts: dict[str, npt.NDArray[Any]], n_items: int) -> F64:
    """The norm of everything that is one item's, as one column."""
    total = np.zeros(n_items)
    for value in parts.values():
        if value.ndim and value.shape[-1] == n_items:
            total += np.square(value, dtype=np.float64).reshape(-1, n_items).sum(axis=0)
        elif value.ndim and value.shape[0] == n_items:
            total += np.square(value, dtype=np.float64).reshape(n_items, -1).sum(axis=1)
    return np.sqrt(total)[:, None]
