"""Compiled pieces for two item tables: rows read as a · own + b · common, with the terms of FedRAP and of mixing."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.engines.fused.pieces import FAST

SPREAD = np.float32(1e-5)
NUMBERS = 1024  # of a table that are summed over all clients while they are in the cache


@piece(fastmath=FAST)
def trace(table: Any, codes: Any, count: Any, centred: Any) -> Any:
    """The sum of squares of the rows of some examples (repeats count), columns centred if asked."""
    result = 0.0
    for d in range(table.shape[1]):
        total, middle = 0.0, 0.0
        if centred:
            for k in range(count):
                middle += np.float64(table[codes[k] >> 1, d])
            middle /= max(count, 1)
        for k in range(count):
            x = np.float64(table[codes[k] >> 1, d]) - middle
            total += x * x
        result += total
    return result


@piece(fastmath=FAST)
def trace_weight(plan: Any, room: Any, pair: Any, count: Any) -> Any:
    """T_own / (T_own + T_common), within the plan's bounds."""
    own = trace(room.rows, room.first, count, plan.centred)
    common = trace(pair.common, room.first, count, plan.centred)
    return np.float32(min(max(own / (own + common + 1e-12), plan.low), plan.high))


@piece(fastmath=FAST)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0)
    for d in range(a.size):
        total += a[d] * b[d]
    return total


@entry(fastmath=FAST)
def own_scores(tables: Any, begin: Any, end: Any, scores: Any) -> None:
    """scores[u, j] = w_u · (a_u · own_uj + b_u · common_j) + bias_u; rows never stored are as they began, decayed."""
    n_items = tables.common.shape[0]
    for u in range(begin, end):
        w, k = tables.user[u], tables.begin[u]
        for j in range(n_items):
            scores[u, j] = tables.bias[u] + tables.weights[u, 1] * _dot(w, tables.common[j])
            if k < tables.keys.size and tables.keys[k] == tables.clients[u] * n_items + j:
                scores[u, j] += tables.weights[u, 0] * tables.scale[u, 0] * _dot(w, tables.rows[k])
                k += 1
            else:
                scores[u, j] += tables.weights[u, 0] * tables.scale[u, 1] * _dot(w, tables.first[j])


@entry(fastmath=FAST)
def own_pairs(tables: Any, query: Any, query_at: Any, begin: Any, end: Any, scores: Any) -> None:
    """The same for a few items of each user, flat like the query."""
    n_items = tables.common.shape[0]
    for u in range(begin, end):
        w = tables.user[u]
        for e in range(query_at[u], query_at[u + 1]):
            j = query[e]
            key, low, high = tables.clients[u] * n_items + j, tables.begin[u], tables.end[u]
            while low < high:
                middle = (low + high) // 2
                if tables.keys[middle] < key:
                    low = middle + 1
                else:
                    high = middle
            scores[e] = tables.bias[u] + tables.weights[u, 1] * _dot(w, tables.common[j])
            if low < tables.end[u] and tables.keys[low] == key:
                scores[e] += tables.weights[u, 0] * tables.scale[u, 0] * _dot(w, tables.rows[low])
            else:
                scores[e] += tables.weights[u, 0] * tables.scale[u, 1] * _dot(w, tables.first[j])


@piece()
def list_rows(room: Any, pair: Any, n: Any, tick: Any) -> Any:
    """Distinct rows of a batch and how often each occurs; returns their number."""
    m, at, stamp, places, listed, times = 0, room.at, pair.stamp, pair.places, pair.distinct, pair.times
    for e in range(n):
        k = at[e]
        if stamp[k] != tick:
            stamp[k], places[k], listed[m], times[m] = tick, m, k, 0
            m += 1
        times[places[k]] += 1
    return m


@piece(fastmath=FAST)
def read_rows(room: Any, pair: Any, m: Any, a: Any, b: Any) -> None:
    """seen[k] = a · own[k] + b · common[k] for the distinct rows of a batch."""
    for i in range(m):
        k = np.uint32(pair.distinct[i])
        o, c, s = room.rows[k], pair.common[k], pair.read[k]
        for d in range(o.size):
            s[d] = a * o[d] + b * c[d]


@piece(fastmath=FAST)
def terms(plan: Any, room: Any, pair: Any, m: Any) -> Any:
    """Summed over the examples of a batch: -apart · mean (own - common)² + sparse · mean norm(common)."""
    total, norm = 0.0, plan.norm
    for i in range(m):
        k = np.uint32(pair.distinct[i])
        o, c = room.rows[k], pair.common[k]
        distance, size = np.float32(0), np.float32(0)
        for d in range(o.size):
            gap = o[d] - c[d]
            distance += gap * gap
            size += abs(c[d]) if norm == 1 else c[d] * c[d]
        total += pair.times[i] * (plan.sparse * size * (norm > 0) - plan.apart * distance) / o.size
    return total


@piece(fastmath=FAST)
def move_rows(plan: Any, room: Any, pair: Any, batch: Any, rates: Any, a: Any, b: Any) -> None:
    """One step of both tables: the batch's rows by their gradients, all of the client's rows by decay.

    Gradients are taken before anything moves. `batch`: examples, distinct rows, the client's rows, number of the batch.
    """
    n, m, n_rows, tick = batch
    rate_own, rate_common = rates[1], rates[2]
    w, own, common, norm, apart, sparse = room.w, room.rows, pair.common, plan.norm, plan.apart, plan.sparse
    decay_own, decay_common = plan.decays[1], plan.decays[2]
    beta = plan.beta * (a if plan.form == 2 else np.float32(1))
    dim = w.size
    share = np.float32(2.0) * apart / np.float32(n * dim)
    small = sparse / np.float32(n * dim)
    zero, one = np.float32(0), np.float32(1)
    keep_own, keep_common = one - rate_own * decay_own, one - rate_common * decay_common
    l1, l2 = small if norm == 1 else zero, np.float32(2) * small if norm == 2 else zero
    for i in range(m):
        k = np.uint32(pair.distinct[i])
        o, c = own[k], common[k]
        r, t = pair.coef[i], np.float32(pair.times[i])
        for d in range(dim):
            x, y = o[d], c[d]
            gap = share * t * (x - y)
            sign = (one if y > zero else zero) - (one if y < zero else zero)
            pull = l1 * t * sign + l2 * t * y
            o[d] = keep_own * x - rate_own * (a * r * w[d] - gap)
            c[d] = keep_common * y - rate_common * (b * r * w[d] + gap + pull)
        if beta > 0:
            for d in range(dim):
                o[d] -= rate_own * beta * pair.push[i, d]
    if decay_own > 0 or decay_common > 0:
        for row in range(n_rows):
            if pair.stamp[row] != tick:
                for d in range(dim):
                    own[row, d] *= keep_own
                    common[row, d] *= keep_common


@piece(fastmath=FAST)
def standardise(listed: Any, m: Any, table: Any, out: Any, spread: Any) -> None:
    """Columns of the listed rows: mean 0, variance 1 (plus 1e-5); `spread` keeps the divisors."""
    dim = table.shape[1]
    middle = np.zeros(dim, np.float32)
    for i in range(m):
        row = table[np.uint32(listed[i])]
        for d in range(dim):
            middle[d] += row[d]
    for d in range(dim):
        middle[d] /= np.float32(m)
        spread[d] = 0
    for i in range(m):
        row = table[np.uint32(listed[i])]
        for d in range(dim):
            x = row[d] - middle[d]
            out[i, d] = x
            spread[d] += x * x
    for d in range(dim):
        spread[d] = np.sqrt(spread[d] / np.float32(m) + SPREAD)
    for i in range(m):
        for d in range(dim):
            out[i, d] /= spread[d]


@piece(fastmath=FAST)
def decorrelate(plan: Any, room: Any, pair: Any, m: Any) -> Any:
    """The decorrelation term of a batch's rows and its gradient by the left table's rows (`push`).

    Form 2: both views are the mixed rows, and both depend on them. Fewer than three rows: nothing.
    """
    same, gamma, listed, push = plan.form == 2, plan.gamma, pair.distinct, pair.push
    left = pair.read if same else room.rows
    z, y, spread = pair.left, pair.right, pair.spread
    dim = left.shape[1]
    if m < 3:
        for i in range(m):
            for d in range(dim):
                push[i, d] = 0
        return 0.0
    standardise(listed, m, left, z, spread)
    if not same:
        standardise(listed, m, pair.common, y, pair.other)
    view = z if same else y
    corr = np.zeros((dim, dim), np.float32)
    for i in range(m):
        for k in range(dim):
            x, line = z[i, k], corr[k]
            for d in range(dim):
                line[d] += x * view[i, d]
    loss = 0.0
    for k in range(dim):
        for d in range(dim):
            value = corr[k, d] / np.float32(m)
            if k == d:
                loss += (1 - value) ** 2
                corr[k, d] = -2 * (1 - value) / (dim * m)
            else:
                loss += gamma * value * value
                corr[k, d] = 2 * gamma * value / (dim * m)
    factor = np.float32(2 if same else 1)  # a symmetric matrix: both sides of the product give the same
    first, second = np.zeros(dim, np.float32), np.zeros(dim, np.float32)
    for i in range(m):
        for k in range(dim):
            total, line = np.float32(0), corr[k]
            for d in range(dim):
                total += line[d] * view[i, d]
            push[i, k] = factor * total
            first[k] += push[i, k]
            second[k] += push[i, k] * z[i, k]
    for k in range(dim):
        first[k] /= np.float32(m)
        second[k] /= np.float32(m)
    for i in range(m):
        for k in range(dim):
            push[i, k] = (push[i, k] - first[k] - z[i, k] * second[k]) / spread[k]
    return loss / dim


@entry()
def clip_factors(item: Any, sent: Any, left: Any, bound: Any, begin: Any, end: Any, factors: Any) -> None:
    """factors[c] = min(1, bound / norm of what client c changed): rows it trained, and what decay did to all others.

    `sent`: rows, their items, where each client's begin, and how many there are.
    """
    rows, items, starts, count = sent
    whole = 0.0
    for i in range(item.shape[0]):
        for d in range(item.shape[1]):
            whole += np.float64(item[i, d]) * np.float64(item[i, d])
    for c in range(begin, end):
        moved, covered = 0.0, 0.0
        for k in range(starts[c], starts[c] + count[c]):
            for d in range(item.shape[1]):
                old = np.float64(item[items[k], d])
                moved += (np.float64(rows[k, d]) - old) ** 2
                covered += old * old
        norm = np.sqrt(moved + (np.float64(left[c]) - 1) ** 2 * max(whole - covered, 0.0))
        factors[c] = np.float32(min(1.0, np.float64(bound) / max(norm, 1e-30)))


@entry()
def clipped_decay(item: Any, left: Any, factors: Any, begin: Any, end: Any, total: Any) -> None:
    """Sum of factor · change over clients in fixed point as if decay had reached all rows, some blocks of the table."""
    one, flat = np.float32(1), item.reshape(-1)
    for block in range(begin, end):
        part = flat[block * NUMBERS : (block + 1) * NUMBERS]
        sums = np.zeros(part.size)
        for c in range(left.size):
            share = left[c] - one
            if share != 0:
                for j in range(part.size):
                    sums[j] += np.floor(np.float64(share * part[j] * factors[c]) * SCALE + 0.5)
        for j in range(part.size):
            total[block * NUMBERS + j] += np.int64(sums[j])


@entry()
def clipped_rows(item: Any, sent: Any, left: Any, factors: Any, worker: Any, workers: Any, total: Any) -> None:
    """The rows that clients trained, put right, in a sum of the worker's own."""
    rows, items, starts, count = sent
    one = np.float32(1)
    for c in range(worker, count.size, workers):
        share = left[c] - one
        for k in range(starts[c], starts[c] + count[c]):
            i = items[k]
            for d in range(item.shape[1]):
                moved = np.floor(np.float64((rows[k, d] - item[i, d]) * factors[c]) * SCALE + 0.5)
                decayed = np.floor(np.float64(share * item[i, d] * factors[c]) * SCALE + 0.5)
                total[i, d] += np.int64(moved - decayed)
