"""Compiled pieces that the programs share: drawing, loading, scoring and summing, for one client in a core's cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import piece
from fedmosaic.core.fixed_point import LIMIT, SCALE
from fedmosaic.data.compiled import GOLDEN, S32, mix, unseen_item
from fedmosaic.engines.fused.skeleton import EMPTY, GROUP

FAST = {"contract", "reassoc", "nsz", "arcp"}  # not nnan/ninf: a diverged run must stay visible


@piece(fastmath=FAST)
def draw_examples(history: Any, excluded: Any, key: Any, negatives: Any, room: Any) -> Any:
    """A client's items, positives then negatives; returns their number."""
    n, n_items, items, pool_items = history.size, room.owner.size, room.items, room.pool_items
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
            state += GOLDEN
            items[e] = pool_items[((mix(state) >> S32) * pool) >> S32]
    else:
        for e in range(n, n + wanted):
            state += GOLDEN
            items[e] = unseen_item(np.int64(((mix(state) >> S32) * pool) >> S32), excluded, 0, excluded.size)
    return n + wanted


@piece(fastmath=FAST)
def meet(cohort: Any, c: Any, room: Any) -> Any:
    """Draw a client's examples and number the items it meets; returns positives, examples, distinct items.

    first[e] = 2 · row + label; owner[j] == c if item j is met, place[j] is its row, met[k] the item of row k.
    """
    who = cohort.clients[c]
    own = cohort.history[cohort.history_at[who] : cohort.history_at[who + 1]]
    kept_out = cohort.excluded[cohort.excluded_at[who] : cohort.excluded_at[who + 1]]
    n = draw_examples(own, kept_out, cohort.negative_keys[c], cohort.negatives, room)
    n_rows, owner, place = 0, room.owner, room.place
    for e in range(n):
        j = np.uint32(room.items[e])
        if owner[j] != c:
            owner[j], place[j], room.met[n_rows] = c, n_rows, j
            n_rows += 1
        room.first[e] = place[j] * 2 + (e < own.size)
    return own.size, n, n_rows


@piece()
def choose(n: Any, positives: Any, part: Any, room: Any) -> Any:
    """Copy a part's examples (0 all, 1 support, 2 query) to `code`; returns their number."""
    if part == 0 or positives < 2:
        for e in range(n):
            room.code[e] = room.first[e]
        return n
    m = 0
    for e in range(n):
        place = e if e < positives else e - positives
        if place % 2 == part - 1:
            room.code[m] = room.first[e]
            m += 1
    return m


@piece()
def load(item: Any, room: Any, n: Any) -> None:
    """Copies of the rows a client meets."""
    for k in range(n):
        source, target = item[np.uint32(room.met[k])], room.rows[np.uint32(k)]
        for d in range(source.size):
            target[d] = source[d]


@piece(fastmath=FAST)
def add(item: Any, room: Any, n: Any, held: Any, touched: Any) -> Any:
    """Add a client's changes to its group's sum; returns how many rows that sum holds."""
    for k in range(n):
        j = np.uint32(room.met[k])
        touched[j] += 1
        before, after, target = item[j], room.rows[np.uint32(k)], room.near[j]
        if target[0] == EMPTY:
            room.listed[held] = j
            held += 1
            for d in range(before.size):
                target[d] = after[d] - before[d]
        else:
            for d in range(before.size):
                target[d] += after[d] - before[d]
    return held


@piece(fastmath=FAST)
def add_bounded(item: Any, room: Any, n: Any, bounds: Any, touched: Any, total: Any) -> Any:
    """Add a client's changes, cut to a norm per row and a joint one, to a sum in fixed point; the norm before that.

    Not as floats of a group: with and without this client the sum must differ by what it sends and by nothing else.
    """
    row_bound, bound = bounds
    squares, healthy = 0.0, True
    for k in range(n):
        kept, square = _row_factor(item, room, k, row_bound)
        squares += kept * kept * square
    norm = np.sqrt(squares)
    factor = np.float32(min(bound / max(norm, 1e-30), 1.0))
    for k in range(n):
        j = np.uint32(room.met[k])
        touched[j] += 1
        before, after, target = item[j], room.rows[np.uint32(k)], total[j]
        kept, _ = _row_factor(item, room, k, row_bound)
        for d in range(before.size):
            change = (after[d] - before[d]) * np.float32(kept) * factor
            healthy &= abs(change) < LIMIT  # false for NaN too
            target[d] += np.int64(np.floor(np.float64(change) * SCALE + 0.5))
    return norm, healthy


@piece(fastmath=FAST)
def _row_factor(item: Any, room: Any, k: Any, row_bound: Any) -> Any:
    """By what a row of changes is multiplied so that its norm is within a bound, and the square of that norm."""
    before, after, square = item[np.uint32(room.met[k])], room.rows[np.uint32(k)], 0.0
    for d in range(before.size):
        change = np.float64(after[d] - before[d])
        square += change * change
    return np.float64(np.float32(min(row_bound / max(np.sqrt(square), 1e-30), 1.0))), square


@piece()
def flush(room: Any, held: Any, total: Any) -> Any:
    """Add a group's sum to the worker's, in fixed point, and empty it; false if it holds what no training should."""
    healthy = True
    for k in range(held):
        source, target = room.near[np.uint32(room.listed[k])], total[np.uint32(room.listed[k])]
        for d in range(source.size):
            healthy &= abs(source[d]) < LIMIT * GROUP  # false for NaN too
            target[d] += np.int64(np.floor(np.float64(source[d]) * SCALE + 0.5))
        source[0] = EMPTY
    return healthy


@piece(fastmath=FAST)
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


@piece(fastmath=FAST)
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


@piece(fastmath=FAST)
def step(start: Any, n: Any, room: Any, b: Any, has_bias: Any, rates: Any, count_loss: Any) -> Any:
    """One phase of a batch, examples start ... start + n of an epoch; returns the bias and the loss.

    Rows move along w, w along the sum of rows. `rates`: user side, items.
    """
    rows, w, score, slope, at = room.rows, room.w, room.score, room.slope, room.at
    user_rate, item_rate = rates[0], rates[1]
    dim = w.size
    for e in range(n):
        at[e] = room.code[start + e] >> 1
        room.label[e] = np.float32(room.code[start + e] & 1)
    dots(at, n, rows, w, b, score)
    loss = residuals(score, room.label, n, room.bits, room.power, room.part, count_loss)
    if user_rate != 0:
        for d in range(dim):
            slope[d] = 0
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
    if item_rate != 0:
        for e in range(n):
            row, r = rows[np.uint32(at[e])], item_rate * score[e]
            for d in range(dim):
                row[d] -= r * w[d]
    if user_rate != 0:
        for d in range(dim):
            w[d] -= user_rate * slope[d]
        if has_bias:
            b -= user_rate * slope_b
    return b, loss
