"""The fused engine for two item tables on the linear scorer: FedRAP's sum of tables and mixing's weighted one.

    score = w · (a · own + b · common) + b_u        FedRAP: a = b = 1, both tables move
                                                    mixing: a = weight, b = 1 - weight, only the local one moves
                                                    local-only: a = b = 1, the common table is 0 and stands still

Rates that fall from batch to batch, early stopping, weight decay of all rows, the terms of both objectives and the
weight from the kernels' traces happen inside the compiled loop. See kernel.py for the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import SGD, Context, plain_slope, value_of
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Axis, Role, first_table
from fedmosaic.algorithm.upload import Parcel, fixed
from fedmosaic.algorithm.wrappers.additive import AdditiveModel, AdditiveObjective
from fedmosaic.algorithm.wrappers.mixing import Decorrelated, MixedModel, NTKWeight
from fedmosaic.core import buffers
from fedmosaic.core import keys
from fedmosaic.core.ragged import I64, Ragged, offsets_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines import devices
from fedmosaic.engines.block import Outcome, Task
from fedmosaic.engines.devices import Place
from fedmosaic.engines.fused import pair_pieces as fused_pair
from fedmosaic.engines.fused.common import client_keys, collected, put_back, shuffle_keys, user_side
from fedmosaic.engines.fused.pair_clients import Plan, Store, train_pairs
from fedmosaic.engines.round import summed
from fedmosaic.privacy.noise import Clip

NORMS = {"none": 0, "l1": 1, "l2": 2}
ENCODED_AT_ONCE = 32  # clients whose whole tables are there at the same time
MOMENTS = {"batch": 0, "epoch": 1, "round": 2}


def meant_for(algorithm: Algorithm) -> bool:
    """Whether an algorithm has two item tables, or one that stays on the device."""
    return isinstance(algorithm.model, AdditiveModel | MixedModel) or _lonely(algorithm)


def _lonely(algorithm: Algorithm) -> bool:
    return isinstance(algorithm.model, LinearScorer) and algorithm.roles["item"] is Role.PRIVATE


def unfit(algorithm: Algorithm, data: TrainingSet) -> str:
    """Why this engine cannot run an algorithm; empty if it can."""
    model, objective, prepare, moves = algorithm.model, algorithm.objective, algorithm.prepare, algorithm.moves
    paired = isinstance(model, AdditiveModel | MixedModel) and isinstance(model.host, LinearScorer)
    inner = objective.host if isinstance(objective, AdditiveObjective | Decorrelated) else objective
    norm = objective.norm if isinstance(objective, AdditiveObjective) else "none"
    checks = {
        "its model is not one or two tables on the linear scorer": not paired and not _lonely(algorithm),
        "its objective has other terms": inner is not bce or norm not in NORMS,
        "its gradients are not plain": algorithm.slope is not plain_slope,
        "its mixing weight needs more than a client's rows": prepare is not None
        and (not isinstance(prepare, NTKWeight) or prepare.exact or prepare.rows == "all"),
        "clients hold several users": data.silos is not None,
        "it has several passes": len(algorithm.local) != 1 or algorithm.local[0].part != "all",
        "its item table is not sent": not _lonely(algorithm)
        and algorithm.roles.get("item") not in (Role.SHARED, Role.PERSONALISED, Role.KEPT),
        "an optimiser is not SGD": any(not isinstance(m.rule, SGD) for m in moves),
        "a mixed table decays": isinstance(model, MixedModel) and any(getattr(m.rule, "decay", 0) for m in moves),
        "it uploads gradients": algorithm.upload.kind == "gradient",
        "its uploads are encoded, though not as whole tables": bool(algorithm.upload.stack)
        and not (isinstance(model, AdditiveModel) and algorithm.dense),
        "numbers that are not zero are counted": algorithm.upload.support == "nonzero" and not algorithm.upload.stack,
        "user and bias move differently": any(("user" in m.names) != ("bias" in m.names) for m in moves),
    }
    return "; ".join(reason for reason, wrong in checks.items() if wrong)


def _plan(algorithm: Algorithm, ctx: Context) -> Plan:
    """The algorithm as numbers."""
    model, objective, prepare, one = algorithm.model, algorithm.objective, algorithm.prepare, algorithm.local[0]
    own, common = ("item.own", "item") if isinstance(model, AdditiveModel) else ("item", "")
    rates: list[list[float]] = []
    decays: dict[str, float] = {}
    for phase in one.phases:
        found = {n: value_of(m.rate, ctx) for m in phase.moves for n in m.names}
        rates.append([found.get(n, 0.0) for n in ("user", own, common)])
        decays |= {n: m.rule.decay for m in phase.moves for n in m.names if isinstance(m.rule, SGD)}
    apart = sparse = beta = gamma = 0.0
    norm = form = 0
    if isinstance(objective, AdditiveObjective):
        apart, sparse, norm = value_of(objective.apart, ctx), value_of(objective.sparse, ctx), NORMS[objective.norm]
    if isinstance(objective, Decorrelated):
        beta, gamma, form = objective.beta, objective.gamma, 1 + (objective.form == "self")
    fixed_weight = model.weight if isinstance(model, MixedModel) else None
    ntk = prepare if isinstance(prepare, NTKWeight) else NTKWeight("item", "item.mix")
    return Plan(
        rates=np.array(rates, np.float32),
        decays=np.array([decays.get(n, 0.0) for n in ("user", own, common)], np.float32),
        apart=np.float32(apart),
        sparse=np.float32(sparse if norm else 0.0),
        norm=norm,
        beta=np.float32(beta),
        gamma=np.float32(gamma),
        form=form,
        mixed=isinstance(model, MixedModel),
        weight=-1.0 if fixed_weight is None else float(fixed_weight),
        low=float(ntk.clip[0]),
        high=float(ntk.clip[1]),
        moment=MOMENTS[ntk.when],
        centred=ntk.centred,
        smooth=ntk.smooth,
        positives=ntk.rows == "positives",
        size=one.batch_size,
        step_decay=np.float32(one.step_decay),
        tolerance=float(one.tolerance),
    )


def run_round(algorithm: Algorithm, task: Task, workers: int | None = None) -> Outcome:
    """The cohort in one compiled call."""
    data, ctx, cohort = task.data, task.ctx, task.cohort
    own = "item.own" if isinstance(algorithm.model, AdditiveModel) else "item"
    item = np.zeros((data.n_items, *algorithm.specs["item"].shape), np.float32)
    if not _lonely(algorithm):
        item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
    user, bias = user_side(algorithm, task)
    plan = _plan(algorithm, ctx)
    mix = np.zeros((cohort.size, 2), np.float32)
    if "item.mix" in algorithm.specs:
        mix = task.held["private/item.mix"][cohort]
    store = _store(algorithm, task, own)
    count = workers or numba.get_num_threads()
    totals, touched = np.zeros((count, *item.shape), np.int64), np.zeros((count, data.n_items), np.int64)
    healthy = np.ones(count, dtype=np.bool_)
    losses, seen = np.zeros(cohort.size), np.zeros(cohort.size, np.int64)
    shrunk = np.ones((cohort.size, 2), np.float32)
    probe = task.probe if task.probe is not None else Ragged.from_rows([[]] * cohort.size)
    probed = np.empty(probe.values.size, np.float32)
    train_pairs(
        data.histories.values, data.histories.offsets, data.excluded.values, data.excluded.offsets, cohort,
        client_keys(task, keys.Purpose.NEGATIVES),
        shuffle_keys(algorithm, task), item, user, bias, "bias" in algorithm.specs, mix, algorithm.negatives, plan,
        store, shrunk, probe.values, probe.offsets, probed, totals, touched, losses, seen, healthy,
    )  # fmt: skip
    shrink = {"item": sum(fixed(float(s) - 1) for s in shrunk[:, 1])} if "item" in algorithm.spread else {}
    upload = collected(totals, touched, losses, seen, healthy, shrink)
    if _lonely(algorithm):
        upload = replace(upload, totals={}, shrink={})
    if algorithm.upload.stack:
        sums, numbers = _encoded(algorithm, task, item, store, shrunk[:, 1])
        upload = replace(upload, totals=sums, numbers=numbers)
    held = put_back(algorithm, task, user, bias)
    kept, apart = _kept(algorithm, task, own, store, mix, shrunk)
    devices.write(held, kept, data.n_users, data.n_clients, apart)
    return Outcome(upload, held, probed if task.probe is not None else None)


def _encoded(algorithm: Algorithm, task: Task, item: Any, store: Store, left: Any) -> tuple[dict[str, Any], int]:
    """The sum of encoded uploads, some clients at a time: rows they trained, and what decay did to the others."""
    clip = algorithm.upload.stack[0]
    if isinstance(clip, Clip) and len(algorithm.upload.stack) == 1 and algorithm.upload.support == "dense":
        return {"item": _clipped(clip.bound, item, store, left)}, 0
    n_items, numbers = task.data.n_items, 0
    total = np.zeros((n_items, *algorithm.upload.shape(algorithm.specs["item"])), np.int64)
    for start in range(0, task.cohort.size, ENCODED_AT_ONCE):
        places = range(start, min(start + ENCODED_AT_ONCE, task.cohort.size))
        changes = (left[places.start : places.stop, None, None] - 1) * item
        for change, c in zip(changes, places, strict=True):
            rows = slice(store.out_at[c], store.out_at[c] + store.out_count[c])
            change[store.out_items[rows]] = store.sent[rows] - item[store.out_items[rows]]
        flat = {"item": torch.from_numpy(changes.reshape(-1, item.shape[1]))}
        before = {"item": torch.from_numpy(np.tile(item, (len(places), 1)))}
        owners = {"item": torch.arange(len(places)).repeat_interleave(n_items)}
        members = task.data.number(task.cohort[places.start : places.stop])
        items = {"item": np.tile(np.arange(n_items, dtype=np.int32), len(places))}
        more, count = summed(algorithm, Parcel(flat, before, owners, items, members, task.ctx), {})
        total += more["item"]
        numbers += count
    return {"item": total}, numbers


def _clipped(bound: float, item: Any, store: Store, left: Any) -> Any:
    """The sum of clipped uploads, without anybody's whole table."""
    rows = (item, store.sent, store.out_items, store.out_at, store.out_count, left)
    factors = np.empty(left.size, np.float32)
    fused_pair.clip_factors(*rows, bound, factors)
    totals = np.zeros((numba.get_num_threads(), *item.shape), np.int64)
    fused_pair.clipped_sum(*rows, factors, totals)
    return totals.sum(axis=0)


def answers(algorithm: Algorithm, data: TrainingSet) -> bool:
    """Whether `scores` can answer for an algorithm: common rows plus own ones, each client a user."""
    model = algorithm.model
    added = isinstance(model, AdditiveModel) and isinstance(model.host, LinearScorer)
    private = all(algorithm.roles[n] is Role.PRIVATE for n in ("user", "bias") if n in algorithm.specs)
    newest = not algorithm.serve and not algorithm.keeps  # nothing is rebuilt or tuned for an answer
    return (added or _lonely(algorithm)) and private and newest and data.silos is None


def scores(algorithm: Algorithm, task: Task) -> devices.Array:
    """With the server's newest table and the devices' own rows: [cohort, items], or flat like the probe if any."""
    own = "item" if _lonely(algorithm) else "item.own"
    user, bias = user_side(algorithm, task)
    store = _store(algorithm, task, own)
    common = np.zeros_like(store.first) if _lonely(algorithm) else task.server["item"]
    read = (common, store.first, user, bias, task.cohort, store.keys, store.rows, store.begin)
    if task.probe is None:
        whole = np.empty((task.cohort.size, task.data.n_items), np.float32)
        fused_pair.own_scores(*read, store.scale, whole)
        return whole
    flat = np.empty(task.probe.values.size, np.float32)
    fused_pair.own_pairs(*read, store.end, store.scale, task.probe.values, task.probe.offsets, flat)
    return flat


def _kept(
    algorithm: Algorithm, task: Task, name: str, store: Store, mix: Any, shrunk: Any
) -> tuple[dict[str, list[devices.Stored]], I64]:
    """What the devices keep beside their user side: own rows, what decay left of the others, mixing weights.

    Rows are not copied: they lie in the store's room, at the places that are returned.
    """
    starts = np.repeat(store.out_at[:-1] - offsets_of(store.out_count)[:-1], store.out_count)
    at = starts + np.arange(starts.size)
    touched = Ragged(store.out_items[at], offsets_of(store.out_count))
    place = Place(task.cohort, task.data.members(task.cohort), touched, task.data.n_items)
    parts: dict[str, list[devices.Stored]] = {}
    if not store.restart:
        parts[algorithm.shelf(name)] = [(Axis.ITEM, place, store.out_rows)]
        if any(move.spreads for move in algorithm.moves if name in move.names):
            parts[f"{algorithm.shelf(name)}.scale"] = [(Axis.WHOLE, place, shrunk[:, 0])]
    if "item.mix" in algorithm.specs:
        parts["private/item.mix"] = [(Axis.WHOLE, place, mix)]
    return parts, at


def _store(algorithm: Algorithm, task: Task, name: str) -> Store:
    """Where the cohort's own rows lie, and room for the new ones."""
    data, cohort, spec = task.data, task.cohort, algorithm.specs[name]
    dim, shelf, restart = spec.shape[0], algorithm.shelf(name), algorithm.roles[name] is Role.PERSONALISED
    stored = task.held.get(f"{shelf}.keys", np.zeros(0, np.int64))
    drawn = np.where(data.excluded.lengths[cohort] < data.n_items, algorithm.negatives, 0)
    room = np.minimum(data.histories.lengths[cohort] * (1 + drawn), data.n_items) * (not restart)
    out_at = offsets_of(room)
    return Store(
        restart=restart,
        keys=stored,
        rows=task.held.get(f"{shelf}.rows", np.zeros((0, dim), np.float32)),
        scale=task.held.get(f"{shelf}.scale", np.ones((data.n_clients, 2), np.float32))[cohort],
        begin=np.searchsorted(stored, cohort * data.n_items),
        end=np.searchsorted(stored, (cohort + 1) * data.n_items),
        first=np.array(task.server[name] if name in task.server else first_table(spec, task.ctx.seed, data.n_items)),
        out_at=out_at,
        out_items=buffers.empty((out_at[-1],), np.int32),
        out_rows=buffers.empty((out_at[-1], dim), np.float32),
        out_count=np.zeros(cohort.size, np.int64),
        sent=np.empty((out_at[-1] if algorithm.upload.stack else 0, dim), np.float32),
    )
