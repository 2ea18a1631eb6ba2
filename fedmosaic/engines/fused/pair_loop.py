"""The compiled loop over clients with two item tables; pair.py explains and calls it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.data.compiled import shuffle_client
from fedmosaic.engines.fused.pair_pieces import decorrelate, list_rows, move_rows, read_rows, terms, trace_weight
from fedmosaic.engines.fused.pieces import FAST, dots, flush, meet, residuals
from fedmosaic.engines.fused.skeleton import EMPTY, GROUP


@piece()
def _load(item: Any, store: Any, mixed: Any, c: Any, who: Any, n: Any, room: Any, pair: Any) -> None:
    """A client's rows: the server's, and its own from the store or (restart) the server's again."""
    n_items, dim = item.shape
    scale, untouched = store.scale[c, 0], store.scale[c, 1]
    for k in range(n):
        j = np.uint32(room.met[k])
        for d in range(dim):
            pair.common[k, d] = item[j, d]
            room.rows[k, d] = item[j, d] if store.restart else store.first[j, d] * untouched
    if not store.restart:
        for slot in range(store.begin[c], store.end[c]):
            j = store.keys[slot] - who * n_items
            if room.owner[j] == c:
                target = room.rows[room.place[j]]
                for d in range(dim):
                    target[d] = store.rows[slot, d] * scale
    for k in range(n):
        for d in range(dim):
            pair.base[k, d] = room.rows[k, d] if mixed else pair.common[k, d]


@piece(fastmath=FAST)
def _add(left: Any, n: Any, rows: Any, room: Any, base: Any, held: Any, touched: Any) -> Any:
    """Add rows - left · base to the group's sum: what goes beyond the share that decay has left of every row."""
    for k in range(n):
        j = np.uint32(room.met[k])
        touched[j] += 1
        before, after, target = base[k], rows[k], room.near[j]
        if target[0] == EMPTY:
            room.listed[held] = j
            held += 1
            for d in range(before.size):
                target[d] = after[d] - left * before[d]
        else:
            for d in range(before.size):
                target[d] += after[d] - left * before[d]
    return held


@piece(fastmath=FAST)
def _phase(plan: Any, room: Any, pair: Any, batch: Any, b: Any, a: Any, first: Any, shrunk: Any) -> Any:
    """One phase of a batch of k examples on m distinct rows; returns the bias and the summed loss.

    `pair.rates`: of user side, own and common rows. `batch`: k, m, the client's rows, number of the batch.
    """
    k, m, rate = batch[0], batch[1], pair.rates
    other, dim, loss = np.float32(1) - a if plan.mixed else np.float32(1), room.w.size, 0.0
    read_rows(room, pair, m, a, other)
    dots(room.at, k, pair.read, room.w, b, room.score)
    loss += residuals(room.score, room.label, k, room.bits, room.power, room.part, first)
    if first and (plan.apart != 0 or plan.sparse != 0):
        loss += terms(plan, room, pair, m)
    if plan.form > 0 and (first or rate[1] != 0):
        value = decorrelate(plan, room, pair, m)
        if first:
            loss += k * plan.beta * value
    for i in range(m):
        pair.coef[i] = 0
    for e in range(k):
        pair.coef[pair.places[room.at[e]]] += room.score[e]
    for d in range(dim):
        room.slope[d] = 0
    slope_b = np.float32(0)
    if rate[0] != 0:
        for i in range(m):
            row, r = pair.read[np.uint32(pair.distinct[i])], pair.coef[i]
            slope_b += r
            for d in range(dim):
                room.slope[d] += r * row[d]
    if rate[1] != 0 or rate[2] != 0:
        move_rows(plan, room, pair, batch, rate, a, other)
        shrunk[0] *= 1 - rate[1] * plan.decays[1]
        shrunk[1] *= 1 - rate[2] * plan.decays[2]
    if rate[0] != 0:
        keep = np.float32(1) - rate[0] * plan.decays[0]
        for d in range(dim):
            room.w[d] = keep * room.w[d] - rate[0] * room.slope[d]
        if plan.has_bias:
            b = keep * b - rate[0] * slope_b
    return b, loss


@piece(fastmath=FAST)
def _client(plan: Any, room: Any, pair: Any, cohort: Any, c: Any, sizes: Any, tick: Any, state: Any, b: Any) -> Any:
    """A client's epochs; returns bias, weight, summed loss, examples seen, and the last batch's number.

    `sizes`: positives, examples, rows. `state`: the client's mixing weight, and what decay has left of its tables.
    """
    positives, n, n_rows = sizes
    mix, shrunk = state
    loss, seen, factor, last = 0.0, 0, np.float32(1), np.nan
    a = np.float32(1)
    if plan.mixed:
        a = np.float32(plan.weight) if plan.weight >= 0 else mix[0]
    for epoch in range(cohort.epoch_keys.shape[0]):
        for e in range(n):
            room.code[e] = room.first[e]
        shuffle_client(room.code, 0, n, cohort.epoch_keys[epoch, c])
        for start in range(0, n, plan.size):
            k = min(plan.size, n - start)
            tick += 1
            for e in range(k):
                room.at[e] = room.code[start + e] >> 1
                room.label[e] = np.float32(room.code[start + e] & 1)
            m = list_rows(room, pair, k, tick)
            moment = 0 if start else 1 if epoch else 2
            if plan.mixed and plan.weight < 0 and moment >= plan.moment:
                share = trace_weight(plan, room, pair, positives if plan.positives else n)
                mix[1] += 1
                a = mix[0] + (share - mix[0]) / mix[1] if plan.smooth else share
                mix[0] = a
            for phase in range(plan.rates.shape[0]):
                for side in range(3):
                    pair.rates[side] = plan.rates[phase, side] * factor
                b, more = _phase(plan, room, pair, (k, m, n_rows, tick), b, a, phase == 0, shrunk)
                loss += more
            seen += k
            factor *= plan.step_decay
        mean = loss / max(seen, 1)
        if plan.tolerance > 0 and abs(mean - last) < plan.tolerance * abs(last):
            break
        last = mean
    return b, a, loss, seen, tick


@piece()
def _keep(store: Any, c: Any, n_rows: Any, room: Any, pair: Any) -> None:
    """Put a client's own rows (and the common ones, where uploads are encoded) into the room for new ones."""
    begin = store.out_at[c]
    store.out_count[c] = n_rows
    for k in range(n_rows):
        store.out_items[begin + k] = room.met[k]
        for d in range(room.w.size):
            store.out_rows[begin + k, d] = room.rows[k, d]
        if store.sent.shape[0] > 0:
            for d in range(room.w.size):
                store.sent[begin + k, d] = pair.common[k, d]


@piece(fastmath=FAST)
def _answer(cohort: Any, c: Any, item: Any, a: Any, b: Any, room: Any, answers: Any) -> None:
    """Scores of what a client of a mixed table is asked: a · own + (1 - a) · common."""
    for k in range(cohort.query_at[c], cohort.query_at[c + 1]):
        j = np.uint32(cohort.query[k])
        local, s = room.rows[room.place[j]] if room.owner[j] == c else item[j], b
        for d in range(room.w.size):
            s += room.w[d] * (a * local[d] + (np.float32(1) - a) * item[j, d])
        answers[k] = s


@entry(fastmath=FAST)
def train(
    worker: Any, workers: Any, cohort: Any, plan: Any, table: Any, store: Any, room: Any, pair: Any, sums: Any
) -> Any:  # fmt: skip
    """The groups dealt to one worker; `table`: common rows, user vectors, biases, weights, what decay left."""
    item, user, bias, mix, shrunk = table
    count, dim = cohort.clients.size, item.shape[1]
    tick, healthy = 0, True
    for group in range(worker, (count + GROUP - 1) // GROUP, workers):
        held = 0
        for c in range(group * GROUP, min((group + 1) * GROUP, count)):
            sizes = meet(cohort, c, room)
            n_rows = sizes[2]
            _load(item, store, plan.mixed, c, cohort.clients[c], n_rows, room, pair)
            for d in range(dim):
                room.w[d] = user[c, d]
            state = (mix[c], shrunk[c])
            bias[c], a, sums.losses[c], sums.seen[c], tick = _client(
                plan, room, pair, cohort, c, sizes, tick, state, bias[c]
            )
            for d in range(dim):
                user[c, d] = room.w[d]
            if plan.mixed:
                held = _add(np.float32(1), n_rows, room.rows, room, pair.base, held, sums.touched)
            else:
                held = _add(shrunk[c, 1], n_rows, pair.common, room, pair.base, held, sums.touched)
            if not store.restart:
                _keep(store, c, n_rows, room, pair)
            if plan.mixed:
                _answer(cohort, c, item, a, bias[c], room, sums.answers)
        healthy &= flush(room, held, sums.total)
    return healthy
