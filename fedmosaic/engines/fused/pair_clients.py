"""The compiled loop over clients with two item tables; kernel_pair.py explains and calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from fedmosaic.data.batches import shuffle_client
from fedmosaic.engines.fused.pair_pieces import decorrelate, list_rows, move_rows, read_rows, terms, trace_weight
from fedmosaic.engines.fused.pieces import EMPTY, FAST, GROUP, dots, flush, meet, residuals


class Plan(NamedTuple):
    """What the loop needs to know about the algorithm, as numbers."""

    rates: Any  # [phases, 3]: user, own, common
    decays: Any  # [3]
    apart: np.float32
    sparse: np.float32
    norm: int  # 0 none, 1 absolute values, 2 squares
    beta: np.float32
    gamma: np.float32
    form: int  # of the decorrelation: 0 none, 1 local-global, 2 self
    mixed: bool  # rows are weight · own + (1 - weight) · common, rather than own + common
    weight: float  # fixed, or -1: from the traces
    low: float
    high: float
    moment: int  # from which the weight is computed: 0 every batch, 1 every epoch, 2 once
    centred: bool
    smooth: bool
    positives: bool  # traces over the positives, rather than over all examples
    size: int  # of a batch
    step_decay: np.float32
    tolerance: float


class Store(NamedTuple):
    """The cohort's own rows: where they lie in the device store, and room for the new ones."""

    restart: bool  # own rows begin as the server's, and are not stored
    keys: Any
    rows: Any
    scale: Any
    begin: Any
    end: Any
    first: Any  # what rows never stored begin as
    out_at: Any
    out_items: Any
    out_rows: Any
    out_count: Any
    sent: Any  # likewise the common table's rows, where uploads are encoded client by client


class Room(NamedTuple):
    """A worker's scratch arrays; nothing per client is allocated."""

    own: Any
    common: Any
    base: Any  # the sent table's rows before training
    read: Any  # rows as they are scored
    stamp: Any  # last batch in which a row was listed
    places: Any
    listed: Any  # distinct rows of a batch
    times: Any
    coef: Any
    at: Any
    label: Any
    score: Any
    bits: Any
    power: Any
    part: Any
    left: Any  # standardised columns of the two views, their spreads, and the gradient
    right: Any
    spread: Any
    other: Any
    push: Any
    slope: Any
    rates: Any


@numba.njit(cache=True)
def _make_room(rows: Any, dim: Any, widest: Any, form: Any) -> Any:
    wide = rows if form else 1
    bits = np.empty(widest, np.int32)
    return Room(
        np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32),
        np.empty((rows, dim), np.float32), np.full(rows, -1, np.int64), np.empty(rows, np.int32),
        np.empty(rows, np.int32), np.empty(rows, np.int32), np.empty(rows, np.float32), np.empty(widest, np.int32),
        np.empty(widest, np.float32), np.empty(widest, np.float32), bits, bits.view(np.float32),
        np.empty(widest, np.float32), np.empty((wide, dim), np.float32), np.empty((wide, dim), np.float32),
        np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty((wide, dim), np.float32),
        np.empty(dim, np.float32), np.empty(2, np.float32),
    )  # fmt: skip


@numba.njit(cache=True)
def _load(met: Any, n: Any, item: Any, store: Any, who: Any, c: Any, owner: Any, place: Any, room: Any) -> None:
    """A client's rows: the server's, and its own from the store or (restart) the server's again."""
    n_items, dim = item.shape
    scale, untouched = store.scale[c, 0], store.scale[c, 1]
    for k in range(n):
        j = np.uint32(met[k])
        for d in range(dim):
            room.common[k, d] = item[j, d]
            room.own[k, d] = item[j, d] if store.restart else store.first[j, d] * untouched
    if not store.restart:
        for slot in range(store.begin[c], store.end[c]):
            j = store.keys[slot] - who * n_items
            if owner[j] == c:
                target = room.own[place[j]]
                for d in range(dim):
                    target[d] = store.rows[slot, d] * scale


@numba.njit(cache=True, fastmath=FAST)
def _add(base: Any, left: Any, met: Any, n: Any, rows: Any, near: Any, listed: Any, held: Any, touched: Any) -> Any:
    """Add rows - left · base to the group's sum: what goes beyond the share that decay has left of every row."""
    for k in range(n):
        j = np.uint32(met[k])
        touched[j] += 1
        before, after, target = base[k], rows[k], near[j]
        if target[0] == EMPTY:
            listed[held] = j
            held += 1
            for d in range(before.size):
                target[d] = after[d] - left * before[d]
        else:
            for d in range(before.size):
                target[d] += after[d] - left * before[d]
    return held


@numba.njit(cache=True, fastmath=FAST)
def _phase(
    plan: Any, room: Any, rate: Any, k: Any, m: Any, n_rows: Any, tick: Any, w: Any, b: Any, has_bias: Any, a: Any,
    first: Any, shrunk: Any,
) -> Any:  # fmt: skip
    """One phase of a batch of k examples on m distinct rows; returns the bias and the summed loss."""
    other, dim, loss = np.float32(1) - a if plan.mixed else np.float32(1), w.size, 0.0
    read_rows(room.listed, m, room.own, room.common, a, other, room.read)
    dots(room.at, k, room.read, w, b, room.score)
    loss += residuals(room.score, room.label, k, room.bits, room.power, room.part, first)
    if first and (plan.apart != 0 or plan.sparse != 0):
        loss += terms(room.listed, room.times, m, room.own, room.common, plan.apart, plan.sparse, plan.norm)
    if plan.form > 0 and (first or rate[1] > 0):
        both = plan.form == 2
        value = decorrelate(
            room.listed, m, room.read if both else room.own, room.common, both, plan.gamma, room.left, room.right,
            room.spread, room.other, room.push,
        )  # fmt: skip
        if first:
            loss += k * plan.beta * value
    room.coef[:m] = 0
    for e in range(k):
        room.coef[room.places[room.at[e]]] += room.score[e]
    room.slope[:] = 0
    slope_b = np.float32(0)
    if rate[0] > 0:
        for i in range(m):
            row, r = room.read[np.uint32(room.listed[i])], room.coef[i]
            slope_b += r
            for d in range(dim):
                room.slope[d] += r * row[d]
    if rate[1] > 0 or rate[2] > 0:
        room.rates[0], room.rates[1] = rate[1], rate[2]
        move_rows(
            room.listed, room.times, room.coef, m, k, n_rows, tick, room.stamp, w, room.own, room.common, a, other,
            room.rates, plan.decays[1:], plan.apart, plan.sparse, plan.norm, room.push,
            plan.beta * (a if plan.form == 2 else np.float32(1)),
        )  # fmt: skip
        shrunk[0] *= 1 - rate[1] * plan.decays[1]
        shrunk[1] *= 1 - rate[2] * plan.decays[2]
    if rate[0] > 0:
        keep = np.float32(1) - rate[0] * plan.decays[0]
        for d in range(dim):
            w[d] = keep * w[d] - rate[0] * room.slope[d]
        if has_bias:
            b = keep * b - rate[0] * slope_b
    return b, loss


@numba.njit(cache=True, fastmath=FAST)
def _client(
    plan: Any, room: Any, first: Any, code: Any, n: Any, n_rows: Any, positives: Any, epoch_keys: Any, c: Any,
    tick: Any, w: Any, b: Any, has_bias: Any, mix: Any, shrunk: Any,
) -> Any:  # fmt: skip
    """A client's epochs; returns bias, weight, summed loss, examples seen, and the last batch's number."""
    loss, seen, factor, last = 0.0, 0, np.float32(1), np.nan
    a = np.float32(1)
    if plan.mixed:
        a = np.float32(plan.weight) if plan.weight >= 0 else mix[0]
    for epoch in range(epoch_keys.shape[0]):
        code[:n] = first[:n]
        shuffle_client(code, 0, n, epoch_keys[epoch, c])
        for start in range(0, n, plan.size):
            k = min(plan.size, n - start)
            tick += 1
            for e in range(k):
                room.at[e] = code[start + e] >> 1
                room.label[e] = np.float32(code[start + e] & 1)
            m = list_rows(room.at, k, tick, room.stamp, room.places, room.listed, room.times)
            moment = 0 if start else 1 if epoch else 2
            if plan.mixed and plan.weight < 0 and moment >= plan.moment:
                count = positives if plan.positives else n
                share = trace_weight(first, count, room.own, room.common, plan.centred, plan.low, plan.high)
                mix[1] += 1
                a = mix[0] + (share - mix[0]) / mix[1] if plan.smooth else share
                mix[0] = a
            for phase in range(plan.rates.shape[0]):
                b, more = _phase(
                    plan, room, plan.rates[phase] * factor, k, m, n_rows, tick, w, b, has_bias, a, phase == 0, shrunk
                )
                loss += more
            seen += k
            factor *= plan.step_decay
        mean = loss / max(seen, 1)
        if plan.tolerance > 0 and abs(mean - last) < plan.tolerance * abs(last):
            break
        last = mean
    return b, a, loss, seen, tick


@numba.njit(cache=True, fastmath=FAST)
def _work(
    worker: Any, workers: Any,
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, epoch_keys: Any,
    item: Any, user: Any, bias: Any, has_bias: Any, mix: Any, negatives: Any, plan: Any, store: Any, shrunk: Any,
    probe: Any, probe_at: Any, probed: Any, total: Any, touched: Any, losses: Any, seen: Any,
) -> Any:  # fmt: skip
    """The groups of clients dealt to one worker. Its arrays live here: inside a parallel loop they might not."""
    n_items, dim = item.shape
    longest = 0
    for c in range(cohort.size):
        longest = max(longest, history_at[cohort[c] + 1] - history_at[cohort[c]])
    longest *= 1 + negatives
    groups = (cohort.size + GROUP - 1) // GROUP
    room = _make_room(min(n_items, longest), dim, min(plan.size, longest), plan.form)
    near = np.full((n_items, dim), EMPTY, dtype=np.float32)
    summed = np.empty(n_items, np.int32)
    owner, place = np.full(n_items, -1, np.int32), np.zeros(n_items, np.int32)
    met, pool_items = np.empty(n_items, np.int32), np.empty(n_items, np.int32)
    items, first, code = np.empty(longest, np.int32), np.empty(longest, np.int32), np.empty(longest, np.int32)
    w = np.empty(dim, np.float32)
    tick, healthy = 0, True
    for group in range(worker, groups, workers):
        held = 0
        for c in range(group * GROUP, min((group + 1) * GROUP, cohort.size)):
            who = cohort[c]
            positives, n, n_rows = meet(
                history, history_at, excluded, excluded_at, who, negative_keys[c], negatives, c, pool_items, items,
                owner, place, met, first,
            )  # fmt: skip
            _load(met, n_rows, item, store, who, c, owner, place, room)
            room.base[:n_rows] = room.own[:n_rows] if plan.mixed else room.common[:n_rows]
            w[:] = user[c]
            bias[c], a, losses[c], seen[c], tick = _client(
                plan, room, first, code, n, n_rows, positives, epoch_keys, c, tick, w, bias[c], has_bias, mix[c],
                shrunk[c],
            )  # fmt: skip
            user[c] = w
            if plan.mixed:
                held = _add(
                    room.base, np.float32(1), met, n_rows, room.own, near, summed, held, touched
                )  # fmt: skip
            else:
                held = _add(room.base, shrunk[c, 1], met, n_rows, room.common, near, summed, held, touched)
            if not store.restart:
                store.out_count[c] = n_rows
                for k in range(n_rows):
                    store.out_items[store.out_at[c] + k] = met[k]
                    store.out_rows[store.out_at[c] + k] = room.own[k]
                    if store.sent.shape[0] > 0:
                        store.sent[store.out_at[c] + k] = room.common[k]
            for k in range(probe_at[c], probe_at[c + 1]):
                j = np.uint32(probe[k])
                local, s = room.own[place[j]] if owner[j] == c else item[j], bias[c]
                for d in range(dim):
                    s += w[d] * (a * local[d] + (np.float32(1) - a) * item[j, d])
                probed[k] = s
        healthy &= flush(near, summed, held, total)
    return healthy


@numba.njit(parallel=True, cache=True, fastmath=FAST)
def train_pairs(
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, epoch_keys: Any,
    item: Any, user: Any, bias: Any, has_bias: Any, mix: Any, negatives: Any, plan: Any, store: Any, shrunk: Any,
    probe: Any, probe_at: Any, probed: Any, totals: Any, touched: Any, losses: Any, seen: Any, healthy: Any,
) -> None:  # fmt: skip
    """All clients of the cohort, dealt to the workers in turn."""
    for worker in numba.prange(totals.shape[0]):
        healthy[worker] = _work(
            worker, totals.shape[0], history, history_at, excluded, excluded_at, cohort, negative_keys, epoch_keys,
            item, user, bias, has_bias, mix, negatives, plan, store, shrunk, probe, probe_at, probed, totals[worker],
            touched[worker], losses, seen,
        )  # fmt: skip
