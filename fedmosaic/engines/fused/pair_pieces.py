"""Compiled pieces for two item tables: rows read as a · own + b · common, with the terms of FedRAP and of mixing."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from fedmosaic.algorithm.upload import SCALE
from fedmosaic.engines.fused.pieces import FAST

SPREAD = np.float32(1e-5)
NUMBERS = 1024  # of a table that are summed over all clients while they are in the cache


@numba.njit(cache=True, fastmath=FAST)
def trace_weight(codes: Any, count: Any, own: Any, common: Any, centred: Any, low: Any, high: Any) -> Any:
    """T_own / (T_own + T_common), T the sum of squares of the rows of some examples (repeats count)."""
    dim = own.shape[1]
    traces = np.zeros(2)
    for side in range(2):
        table = own if side == 0 else common
        for d in range(dim):
            total, middle = 0.0, 0.0
            if centred:
                for k in range(count):
                    middle += np.float64(table[codes[k] >> 1, d])
                middle /= max(count, 1)
            for k in range(count):
                x = np.float64(table[codes[k] >> 1, d]) - middle
                total += x * x
            traces[side] += total
    share = traces[0] / (traces[0] + traces[1] + 1e-12)
    return np.float32(min(max(share, low), high))


@numba.njit(cache=True, fastmath=FAST)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0)
    for d in range(a.size):
        total += a[d] * b[d]
    return total


@numba.njit(cache=True, parallel=True, fastmath=FAST)
def own_scores(
    common: Any, first: Any, user: Any, bias: Any, clients: Any, keys: Any, rows: Any, begin: Any, scale: Any,
    scores: Any,
) -> None:  # fmt: skip
    """scores[u, j] = w_u · (common_j + own_uj) + b_u; own rows that were never stored are as they began, decayed."""
    n_items = common.shape[0]
    for u in numba.prange(user.shape[0]):
        w, k = user[u], begin[u]
        for j in range(n_items):
            scores[u, j] = bias[u] + _dot(w, common[j])
            if k < keys.size and keys[k] == clients[u] * n_items + j:
                scores[u, j] += scale[u, 0] * _dot(w, rows[k])
                k += 1
            else:
                scores[u, j] += scale[u, 1] * _dot(w, first[j])


@numba.njit(cache=True, parallel=True, fastmath=FAST)
def own_pairs(
    common: Any, first: Any, user: Any, bias: Any, clients: Any, keys: Any, rows: Any, begin: Any, end: Any,
    scale: Any, probe: Any, probe_at: Any, scores: Any,
) -> None:  # fmt: skip
    """The same for a few items of each user, flat like the probe."""
    n_items = common.shape[0]
    for u in numba.prange(user.shape[0]):
        w = user[u]
        for e in range(probe_at[u], probe_at[u + 1]):
            j = probe[e]
            key, low, high = clients[u] * n_items + j, begin[u], end[u]
            while low < high:
                middle = (low + high) // 2
                if keys[middle] < key:
                    low = middle + 1
                else:
                    high = middle
            scores[e] = bias[u] + _dot(w, common[j])
            if low < end[u] and keys[low] == key:
                scores[e] += scale[u, 0] * _dot(w, rows[low])
            else:
                scores[e] += scale[u, 1] * _dot(w, first[j])


@numba.njit(cache=True)
def list_rows(at: Any, n: Any, tick: Any, stamp: Any, places: Any, listed: Any, times: Any) -> Any:
    """Distinct rows of a batch and how often each occurs; returns their number."""
    m = 0
    for e in range(n):
        k = at[e]
        if stamp[k] != tick:
            stamp[k], places[k], listed[m], times[m] = tick, m, k, 0
            m += 1
        times[places[k]] += 1
    return m


@numba.njit(cache=True, fastmath=FAST)
def read_rows(listed: Any, m: Any, own: Any, common: Any, a: Any, b: Any, seen: Any) -> None:
    """seen[k] = a · own[k] + b · common[k] for the listed rows."""
    for i in range(m):
        k = np.uint32(listed[i])
        o, c, s = own[k], common[k], seen[k]
        for d in range(o.size):
            s[d] = a * o[d] + b * c[d]


@numba.njit(cache=True, fastmath=FAST)
def terms(listed: Any, times: Any, m: Any, own: Any, common: Any, apart: Any, sparse: Any, norm: Any) -> Any:
    """Summed over the examples of a batch: -apart · mean (own - common)² + sparse · mean norm(common)."""
    total = 0.0
    for i in range(m):
        k = np.uint32(listed[i])
        o, c = own[k], common[k]
        distance, size = np.float32(0), np.float32(0)
        for d in range(o.size):
            gap = o[d] - c[d]
            distance += gap * gap
            size += abs(c[d]) if norm == 1 else c[d] * c[d]
        total += times[i] * (sparse * size * (norm > 0) - apart * distance) / o.size
    return total


@numba.njit(cache=True, fastmath=FAST)
def move_rows(
    listed: Any, times: Any, coef: Any, m: Any, n: Any, n_rows: Any, tick: Any, stamp: Any, w: Any, own: Any,
    common: Any, a: Any, b: Any, rates: Any, decays: Any, apart: Any, sparse: Any, norm: Any, push: Any, beta: Any,
) -> None:  # fmt: skip
    """One step of both tables: the listed rows by their gradients, all of the client's rows by decay.

    Gradients are taken before anything moves. `rates` and `decays` are those of own and common.
    """
    dim = w.size
    share = np.float32(2.0) * apart / np.float32(n * dim)
    small = sparse / np.float32(n * dim)
    rate_own, rate_common, zero, one = rates[0], rates[1], np.float32(0), np.float32(1)
    keep_own, keep_common = one - rate_own * decays[0], one - rate_common * decays[1]
    l1, l2 = small if norm == 1 else zero, np.float32(2) * small if norm == 2 else zero
    for i in range(m):
        k = np.uint32(listed[i])
        o, c = own[k], common[k]
        r, t = coef[i], np.float32(times[i])
        for d in range(dim):
            x, y = o[d], c[d]
            gap = share * t * (x - y)
            sign = (one if y > zero else zero) - (one if y < zero else zero)
            pull = l1 * t * sign + l2 * t * y
            o[d] = keep_own * x - rate_own * (a * r * w[d] - gap)
            c[d] = keep_common * y - rate_common * (b * r * w[d] + gap + pull)
        if beta > 0:
            for d in range(dim):
                o[d] -= rate_own * beta * push[i, d]
    if decays[0] > 0 or decays[1] > 0:
        for row in range(n_rows):
            if stamp[row] != tick:
                for d in range(dim):
                    own[row, d] *= keep_own
                    common[row, d] *= keep_common


@numba.njit(cache=True, fastmath=FAST)
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


@numba.njit(cache=True, fastmath=FAST)
def decorrelate(
    listed: Any, m: Any, left: Any, right: Any, same: Any, gamma: Any, z: Any, y: Any, spread: Any, other: Any,
    push: Any,
) -> Any:  # fmt: skip
    """The decorrelation term of the listed rows and its gradient by the left table's rows (`push`).

    `same`: both views are the left table, and both depend on it. Fewer than three rows: nothing.
    """
    dim = left.shape[1]
    if m < 3:
        push[:m] = 0
        return 0.0
    standardise(listed, m, left, z, spread)
    if not same:
        standardise(listed, m, right, y, other)
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


@numba.njit(cache=True, parallel=True)
def clip_factors(item: Any, sent: Any, items: Any, begin: Any, count: Any, left: Any, bound: Any, factors: Any) -> None:
    """factors[c] = min(1, bound / norm of what client c changed): rows it trained, and what decay did to all others."""
    whole = 0.0
    for i in range(item.shape[0]):
        for d in range(item.shape[1]):
            whole += np.float64(item[i, d]) * np.float64(item[i, d])
    for c in numba.prange(count.size):
        moved, covered = 0.0, 0.0
        for k in range(begin[c], begin[c] + count[c]):
            for d in range(item.shape[1]):
                old = np.float64(item[items[k], d])
                moved += (np.float64(sent[k, d]) - old) ** 2
                covered += old * old
        norm = np.sqrt(moved + (np.float64(left[c]) - 1) ** 2 * max(whole - covered, 0.0))
        factors[c] = np.float32(min(1.0, np.float64(bound) / max(norm, 1e-30)))


@numba.njit(cache=True, parallel=True)
def clipped_sum(item: Any, sent: Any, items: Any, begin: Any, count: Any, left: Any, factors: Any, totals: Any) -> None:
    """Sum of factor · change over clients in fixed point, every client's numbers rounded by themselves.

    First as if decay had reached all rows, a few numbers of the table at a time; then the rows that a client trained
    are put right, in sums of the workers' own.
    """
    one, flat, first = np.float32(1), item.reshape(-1), totals[0].reshape(-1)
    for block in numba.prange((flat.size + NUMBERS - 1) // NUMBERS):
        part = flat[block * NUMBERS : (block + 1) * NUMBERS]
        sums = np.zeros(part.size)
        for c in range(count.size):
            share = left[c] - one
            if share != 0:
                for j in range(part.size):
                    sums[j] += np.floor(np.float64(share * part[j] * factors[c]) * SCALE + 0.5)
        for j in range(part.size):
            first[block * NUMBERS + j] += np.int64(sums[j])
    for worker in numba.prange(totals.shape[0]):
        for c in range(worker, count.size, totals.shape[0]):
            share = left[c] - one
            for k in range(begin[c], begin[c] + count[c]):
                i = items[k]
                for d in range(item.shape[1]):
                    moved = np.floor(np.float64((sent[k, d] - item[i, d]) * factors[c]) * SCALE + 0.5)
                    decayed = np.floor(np.float64(share * item[i, d] * factors[c]) * SCALE + 0.5)
                    totals[worker, i, d] += np.int64(moved - decayed)
