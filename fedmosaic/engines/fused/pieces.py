"""Compiled pieces of the fused engines: drawing, loading, scoring and summing, for one client in a core's cache."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from fedmosaic.algorithm.upload import LIMIT, SCALE
from fedmosaic.core import keys
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.negatives import unseen_item

_mix = numba.njit(inline="always")(keys.mix)
_GOLDEN = keys.GOLDEN
_S32 = np.uint64(32)
EMPTY = np.float32(3e38)  # marks a row of a group's sum that nobody has added to; no healthy sum comes near
GROUP = 128  # clients summed in float32, in fixed order, before the sum turns to fixed point
FAST = {"contract", "reassoc", "nsz", "arcp"}  # not nnan/ninf: a diverged run must stay visible


def linear_pairs(item: Any, user: Any, bias: Any, probe: Ragged) -> Any:
    """w·e + b for the items asked of each user, flat like the probe."""
    scores = np.empty(probe.values.size, dtype=np.float32)
    _pairs(np.ascontiguousarray(item), user, bias, probe.values, probe.offsets, scores)
    return scores


@numba.njit(cache=True)
def _pairs(item: Any, user: Any, bias: Any, probe: Any, probe_at: Any, scores: Any) -> None:
    for u in range(probe_at.size - 1):
        begin, end = probe_at[u], probe_at[u + 1]
        dots(probe[begin:end], end - begin, item, user[u], bias[u], scores[begin:end])


@numba.njit(cache=True, fastmath=FAST)
def draw_examples(
    history: Any, excluded: Any, key: Any, negatives: Any, n_items: Any, pool_items: Any, items: Any
) -> Any:
    """A client's items, positives then negatives; returns their number."""
    n = history.size
    for e in range(n):
        items[e] = history[e]
    size = n_items - excluded.size
    if size <= 0:
        return n
    pool, wanted, state = np.uint64(size), n * negatives, key
    listed = wanted * 8 > n_items  # spelling the pool out once is cheaper than searching it for every draw
    if listed:
        j = 0
        for k in range(excluded.size + 1):
            stop = excluded[k] if k < excluded.size else n_items
            for i in range(j - k, stop - k):
                pool_items[i] = i + k
            j = stop + 1
        for e in range(n, n + wanted):
            state += _GOLDEN
            items[e] = pool_items[((_mix(state) >> _S32) * pool) >> _S32]
    else:
        for e in range(n, n + wanted):
            state += _GOLDEN
            items[e] = unseen_item(np.int64(((_mix(state) >> _S32) * pool) >> _S32), excluded, 0, excluded.size)
    return n + wanted


@numba.njit(cache=True, fastmath=FAST)
def meet(
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, who: Any, key: Any, negatives: Any, c: Any,
    pool_items: Any, items: Any, owner: Any, place: Any, met: Any, first: Any,
) -> Any:  # fmt: skip
    """Draw a client's examples and number the items it meets; returns positives, examples, distinct items.

    first[e] = 2 · row + label; owner[j] == c if item j is met, place[j] is its row, met[k] the item of row k.
    """
    own = history[history_at[who] : history_at[who + 1]]
    kept_out = excluded[excluded_at[who] : excluded_at[who + 1]]
    n = draw_examples(own, kept_out, key, negatives, owner.size, pool_items, items)
    n_rows = 0
    for e in range(n):
        j = np.uint32(items[e])
        if owner[j] != c:
            owner[j], place[j], met[n_rows] = c, n_rows, j
            n_rows += 1
        first[e] = place[j] * 2 + (e < own.size)
    return own.size, n, n_rows


@numba.njit(cache=True)
def choose(first: Any, n: Any, positives: Any, part: Any, code: Any) -> Any:
    """Copy a part's examples (0 all, 1 support, 2 query) to `code`; returns their number."""
    if part == 0 or positives < 2:
        code[:n] = first[:n]
        return n
    m = 0
    for e in range(n):
        place = e if e < positives else e - positives
        if place % 2 == part - 1:
            code[m] = first[e]
            m += 1
    return m


@numba.njit(cache=True)
def load(item: Any, met: Any, n: Any, rows: Any) -> None:
    """Copies of the rows a client meets."""
    for k in range(n):
        source, target = item[np.uint32(met[k])], rows[np.uint32(k)]
        for d in range(source.size):
            target[d] = source[d]


@numba.njit(cache=True, fastmath=FAST)
def add(item: Any, met: Any, n: Any, rows: Any, near: Any, listed: Any, held: Any, touched: Any) -> Any:
    """Add a client's changes to its group's sum; `listed` are the rows that sum holds, returns their number."""
    for k in range(n):
        j = np.uint32(met[k])
        touched[j] += 1
        before, after, target = item[j], rows[np.uint32(k)], near[j]
        if target[0] == EMPTY:
            listed[held] = j
            held += 1
            for d in range(before.size):
                target[d] = after[d] - before[d]
        else:
            for d in range(before.size):
                target[d] += after[d] - before[d]
    return held


@numba.njit(cache=True)
def flush(near: Any, listed: Any, held: Any, total: Any) -> Any:
    """Add a group's sum to the worker's, in fixed point, and empty it; false if it holds what no training should."""
    healthy = True
    for k in range(held):
        source, target = near[np.uint32(listed[k])], total[np.uint32(listed[k])]
        for d in range(source.size):
            healthy &= abs(source[d]) < LIMIT * GROUP  # false for NaN too
            target[d] += np.int64(np.floor(np.float64(source[d]) * SCALE + 0.5))
        source[0] = EMPTY
    return healthy


@numba.njit(cache=True, fastmath=FAST)
def residuals(score: Any, label: Any, n: Any, bits: Any, power: Any, part: Any, count_loss: Any) -> Any:
    """score <- (sigmoid(score) - label) / n, over the first n; returns the summed cross-entropy if asked.

    exp is 2^whole · 2^fraction: the whole part is written as exponent bits, the fraction is a polynomial (relative
    error 2e-7), so that the loops vectorise.
    """
    for e in range(n):
        x = min(max(score[e] * np.float32(-1.4426950408889634), np.float32(-126)), np.float32(126))
        whole = np.floor(x)
        f = x - whole
        bits[e] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        p = np.float32(0.0018775767) * f + np.float32(0.0089893397)
        p = p * f + np.float32(0.055826318)
        p = p * f + np.float32(0.24015361)
        p = p * f + np.float32(0.69315308)
        part[e] = p * f + np.float32(0.99999994)
    share = np.float32(1.0) / np.float32(n)
    for e in range(n):
        score[e] = np.float32(1.0) / (np.float32(1.0) + part[e] * power[e]) - label[e]
    loss = 0.0
    if count_loss:  # the log of a product is the sum of the logs, at a fraction of the price
        for e in range(0, n, 32):
            product = 1.0
            for k in range(e, min(e + 32, n)):
                product *= np.float64(max(np.float32(1.0) - abs(score[k]), np.float32(1e-9)))
            loss -= np.log(product)
    for e in range(n):
        score[e] *= share
    return loss


@numba.njit(cache=True, fastmath=FAST)
def dots(at: Any, n: Any, rows: Any, w: Any, b: Any, score: Any) -> None:
    """score[e] = w·rows[at[e]] + b; four at a time, so that their sums overlap in the pipeline."""
    dim = w.size
    for e in range(0, n - 3, 4):
        r0, r1, r2, r3 = (
            rows[np.uint32(at[e])],
            rows[np.uint32(at[e + 1])],
            rows[np.uint32(at[e + 2])],
            rows[np.uint32(at[e + 3])],
        )
        s0, s1, s2, s3 = b, b, b, b
        for d in range(dim):
            s0 += w[d] * r0[d]
            s1 += w[d] * r1[d]
            s2 += w[d] * r2[d]
            s3 += w[d] * r3[d]
        score[e], score[e + 1], score[e + 2], score[e + 3] = s0, s1, s2, s3
    for e in range(n - n % 4, n):
        row, s = rows[np.uint32(at[e])], b
        for d in range(dim):
            s += w[d] * row[d]
        score[e] = s


@numba.njit(cache=True, fastmath=FAST)
def step(
    code: Any, n: Any, rows: Any, w: Any, b: Any, has_bias: Any, user_rate: Any, item_rate: Any, score: Any, label: Any,
    bits: Any, power: Any, part: Any, slope: Any, at: Any, count_loss: Any,
) -> Any:  # fmt: skip
    """One phase of one batch; returns the bias and the loss. Rows move along w, w along the sum of rows."""
    dim = w.size
    for e in range(n):
        at[e] = code[e] >> 1
        label[e] = np.float32(code[e] & 1)
    dots(at, n, rows, w, b, score)
    loss = residuals(score, label, n, bits, power, part, count_loss)
    if user_rate > 0:
        slope[:] = 0
        slope_b = np.float32(0)
        for e in range(n):
            slope_b += score[e]
        for e in range(0, n - 3, 4):
            r0, r1 = rows[np.uint32(at[e])], rows[np.uint32(at[e + 1])]
            r2, r3 = rows[np.uint32(at[e + 2])], rows[np.uint32(at[e + 3])]
            c0, c1, c2, c3 = score[e], score[e + 1], score[e + 2], score[e + 3]
            for d in range(dim):
                slope[d] += c0 * r0[d] + c1 * r1[d] + c2 * r2[d] + c3 * r3[d]
        for e in range(n - n % 4, n):
            row, r = rows[np.uint32(at[e])], score[e]
            for d in range(dim):
                slope[d] += r * row[d]
    if item_rate > 0:
        for e in range(n):
            row, r = rows[np.uint32(at[e])], item_rate * score[e]
            for d in range(dim):
                row[d] -= r * w[d]
    if user_rate > 0:
        for d in range(dim):
            w[d] -= user_rate * slope[d]
        if has_bias:
            b -= user_rate * slope_b
    return b, loss
