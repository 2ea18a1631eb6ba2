"""The fused engine for the linear scorer: one client at a time inside a core's cache, clients in parallel.

    score = w·e + b, binary cross-entropy, plain SGD, one item table that is shared or personalised

Sampling, shuffling, all phases of all batches, the upload and the asked scores happen while a client's rows are hot;
nothing per client is allocated. Clients are summed in fixed groups, in order, and the groups' sums are added in
fixed point (64-bit integers), so the result has the same bits for any number of workers.
Randomness is the same function of (seed, round, client, slot) as everywhere else, and the general engine is this
one's test.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from fedmosaic import keys
from fedmosaic.algorithm import Algorithm
from fedmosaic.data.batches import shuffle_client
from fedmosaic.data.negatives import unseen_item
from fedmosaic.errors import ScoreError
from fedmosaic.local import SGD, Context, value_of
from fedmosaic.models.mf import LinearScorer
from fedmosaic.objective import bce
from fedmosaic.ragged import Ragged
from fedmosaic.runtime.round import Outcome, Task
from fedmosaic.training import TrainingSet
from fedmosaic.tree import UPLOADED, Role
from fedmosaic.upload import LIMIT, SCALE, Sum

_mix = numba.njit(inline="always")(keys.mix)
_GOLDEN = keys.GOLDEN
_S32 = np.uint64(32)
_EMPTY = np.float32(3e38)  # marks a row of a group's sum that nobody has added to; no healthy sum comes near
GROUP = 128  # clients summed in float32, in fixed order, before the sum turns to fixed point
_FAST = {"contract", "reassoc", "nsz", "arcp"}  # not nnan/ninf: a diverged run must stay visible


def unfit(algorithm: Algorithm, data: TrainingSet) -> str:
    """Why this engine cannot run an algorithm; empty if it can."""
    moves = [m for one in algorithm.local for phase in one.phases for m in phase.moves]
    checks = {
        "its model is not the linear scorer": not isinstance(algorithm.model, LinearScorer),
        "its objective is not plain cross-entropy": algorithm.objective is not bce,
        "clients hold several users": data.silos is not None,
        "it has more than one pass": len(algorithm.local) != 1,
        "its item table is not sent": algorithm.roles.get("item") not in UPLOADED,
        "user parameters are not private": any(
            algorithm.roles.get(n) not in (Role.PRIVATE, None) for n in ("user", "bias")
        ),
        "an optimiser is not plain SGD": any(not isinstance(m.rule, SGD) or m.rule.decay for m in moves),
        "it uploads gradients": algorithm.upload.kind == "gradient",
        "user and bias move differently": any(("user" in m.names) != ("bias" in m.names) for m in moves)
        and "bias" in algorithm.specs,
    }
    return "; ".join(reason for reason, wrong in checks.items() if wrong)


def run_round(algorithm: Algorithm, task: Task, workers: int | None = None) -> Outcome:
    """The cohort in one compiled call."""
    data, ctx, cohort = task.data, task.ctx, task.cohort
    item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
    user = task.held["private/user"][cohort]
    has_bias = "bias" in algorithm.specs
    bias = task.held["private/bias"][cohort, 0].copy() if has_bias else np.zeros(cohort.size, dtype=np.float32)
    one = algorithm.local[0]
    user_rates, item_rates = _rates(algorithm, ctx)
    count = workers or numba.get_num_threads()
    totals = np.zeros((count, *item.shape), dtype=np.int64)
    healthy = np.ones(count, dtype=np.bool_)
    touched = np.zeros((count, data.n_items), dtype=np.int64)
    losses = np.zeros(cohort.size)
    probe = task.probe if task.probe is not None else Ragged.from_rows([[]] * cohort.size)
    probed = np.empty(probe.values.size, dtype=np.float32)
    shuffle = keys.derive(seed=ctx.seed, purpose=keys.Purpose.SHUFFLE, round=ctx.round, client=cohort)
    _train(
        data.histories.values, data.histories.offsets, data.excluded.values, data.excluded.offsets, cohort,
        keys.derive(seed=ctx.seed, purpose=keys.Purpose.NEGATIVES, round=ctx.round, client=cohort),
        np.stack([keys.fold(shuffle, keys.words(epoch)) for epoch in range(one.epochs)]),
        item, user, bias, has_bias, user_rates, item_rates, algorithm.negatives, one.batch_size,
        probe.values, probe.offsets, probed, totals, touched, losses, healthy,
    )  # fmt: skip
    if not healthy.all():
        raise ScoreError("an upload holds NaN or huge values: training diverged; lower the learning rate")
    positives = data.histories.lengths[cohort]
    drawn = np.where(data.excluded.lengths[cohort] < data.n_items, algorithm.negatives, 0)
    held = dict(task.held)
    for name, values in (("user", user), ("bias", bias[:, None])):
        if name in algorithm.specs:
            new = task.held[f"private/{name}"].copy()
            new[cohort] = values
            held[f"private/{name}"] = new
    upload = Sum(
        totals={"item": totals.sum(axis=0)},
        touched=touched.sum(axis=0),
        clients=cohort.size,
        examples=int((positives * (1 + drawn)).sum()),
        loss=float(losses.sum()),
    )
    return Outcome(upload, held, probed if task.probe is not None else None)


def linear_pairs(item: Any, user: Any, bias: Any, probe: Ragged) -> Any:
    """w·e + b for the items asked of each user, flat like the probe."""
    scores = np.empty(probe.values.size, dtype=np.float32)
    _pairs(np.ascontiguousarray(item), user, bias, probe.values, probe.offsets, scores)
    return scores


@numba.njit(cache=True)
def _pairs(item: Any, user: Any, bias: Any, probe: Any, probe_at: Any, scores: Any) -> None:
    for u in range(probe_at.size - 1):
        begin, end = probe_at[u], probe_at[u + 1]
        _score(probe[begin:end], end - begin, item, user[u], bias[u], scores[begin:end])


def _rates(algorithm: Algorithm, ctx: Context) -> tuple[Any, Any]:
    """Rates of user and item side in each phase; 0 where a side stands still."""
    pairs = []
    for phase in algorithm.local[0].phases:
        rates = {name: value_of(move.rate, ctx) for move in phase.moves for name in move.names}
        pairs.append((rates.get("user", 0.0), rates.get("item", 0.0)))
    both = np.array(pairs, dtype=np.float32)
    return both[:, 0].copy(), both[:, 1].copy()


@numba.njit(cache=True, fastmath=_FAST)
def _draw_examples(
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


@numba.njit(cache=True)
def _load(item: Any, met: Any, n: Any, rows: Any) -> None:
    """Copies of the rows a client meets."""
    for k in range(n):
        source, target = item[np.uint32(met[k])], rows[np.uint32(k)]
        for d in range(source.size):
            target[d] = source[d]


@numba.njit(cache=True, fastmath=_FAST)
def _add(item: Any, met: Any, n: Any, rows: Any, near: Any, listed: Any, held: Any, touched: Any) -> Any:
    """Add a client's changes to its group's sum; `listed` are the rows that sum holds, returns their number."""
    for k in range(n):
        j = np.uint32(met[k])
        touched[j] += 1
        before, after, target = item[j], rows[np.uint32(k)], near[j]
        if target[0] == _EMPTY:
            listed[held] = j
            held += 1
            for d in range(before.size):
                target[d] = after[d] - before[d]
        else:
            for d in range(before.size):
                target[d] += after[d] - before[d]
    return held


@numba.njit(cache=True)
def _flush(near: Any, listed: Any, held: Any, total: Any) -> Any:
    """Add a group's sum to the worker's, in fixed point, and empty it; false if it holds what no training should."""
    healthy = True
    for k in range(held):
        source, target = near[np.uint32(listed[k])], total[np.uint32(listed[k])]
        for d in range(source.size):
            healthy &= abs(source[d]) < LIMIT * GROUP  # false for NaN too
            target[d] += np.int64(np.floor(np.float64(source[d]) * SCALE + 0.5))
        source[0] = _EMPTY
    return healthy


@numba.njit(cache=True, fastmath=_FAST)
def _residuals(score: Any, label: Any, n: Any, bits: Any, power: Any, part: Any, count_loss: Any) -> Any:
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


@numba.njit(cache=True, fastmath=_FAST)
def _score(at: Any, n: Any, rows: Any, w: Any, b: Any, score: Any) -> None:
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


@numba.njit(cache=True, fastmath=_FAST)
def _step(
    code: Any, n: Any, rows: Any, w: Any, b: Any, has_bias: Any, user_rate: Any, item_rate: Any, score: Any, label: Any,
    bits: Any, power: Any, part: Any, slope: Any, at: Any, count_loss: Any,
) -> Any:  # fmt: skip
    """One phase of one batch; returns the bias and the loss. Rows move along w, w along the sum of rows."""
    dim = w.size
    for e in range(n):
        at[e] = code[e] >> 1
        label[e] = np.float32(code[e] & 1)
    _score(at, n, rows, w, b, score)
    loss = _residuals(score, label, n, bits, power, part, count_loss)
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


@numba.njit(parallel=True, cache=True, fastmath=_FAST)
def _train(
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, shuffle_keys: Any,
    item: Any, user: Any, bias: Any, has_bias: Any, user_rates: Any, item_rates: Any, negatives: Any, size: Any,
    probe: Any, probe_at: Any, probed: Any, totals: Any, touched: Any, losses: Any, healthy: Any,
) -> None:  # fmt: skip
    """All clients of the cohort, dealt to the workers in turn."""
    n_items, dim = item.shape
    longest = 0
    for c in range(cohort.size):
        longest = max(longest, history_at[cohort[c] + 1] - history_at[cohort[c]])
    longest *= 1 + negatives
    groups = (cohort.size + GROUP - 1) // GROUP
    for worker in numba.prange(totals.shape[0]):
        near = np.full((n_items, dim), _EMPTY, dtype=np.float32)
        listed = np.empty(n_items, dtype=np.int32)
        owner = np.full(n_items, -1, dtype=np.int32)
        place = np.zeros(n_items, dtype=np.int32)
        met = np.empty(n_items, dtype=np.int32)
        pool_items = np.empty(n_items, dtype=np.int32)
        rows = np.empty((min(n_items, longest), dim), dtype=np.float32)
        items = np.empty(longest, dtype=np.int32)
        first = np.empty(longest, dtype=np.int32)
        code = np.empty(longest, dtype=np.int32)
        bits = np.empty(size, dtype=np.int32)
        power = bits.view(np.float32)
        score, label, part = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
        at = np.empty(size, dtype=np.int32)
        slope, w = np.empty(dim, np.float32), np.empty(dim, np.float32)
        for group in range(worker, groups, totals.shape[0]):
            held = 0
            for c in range(group * GROUP, min((group + 1) * GROUP, cohort.size)):
                who = cohort[c]
                own = history[history_at[who] : history_at[who + 1]]
                kept_out = excluded[excluded_at[who] : excluded_at[who + 1]]
                n = _draw_examples(own, kept_out, negative_keys[c], negatives, n_items, pool_items, items)
                n_rows = 0
                for e in range(n):
                    j = np.uint32(items[e])
                    if owner[j] != c:
                        owner[j], place[j], met[n_rows] = c, n_rows, j
                        n_rows += 1
                    first[e] = place[j] * 2 + (e < own.size)
                _load(item, met, n_rows, rows)
                w[:] = user[c]
                b, loss = bias[c], 0.0
                for epoch in range(shuffle_keys.shape[0]):
                    code[:n] = first[:n]
                    shuffle_client(code, 0, n, shuffle_keys[epoch, c])
                    for start in range(0, n, size):
                        count = min(size, n - start)
                        for phase in range(user_rates.size):
                            b, more = _step(
                                code[start : start + count], count, rows, w, b, has_bias, user_rates[phase],
                                item_rates[phase], score, label, bits, power, part, slope, at, phase == 0,
                            )  # fmt: skip
                            loss += more
                losses[c] = loss
                held = _add(item, met, n_rows, rows, near, listed, held, touched[worker])
                user[c] = w
                bias[c] = b
                asked, answer = probe[probe_at[c] : probe_at[c + 1]], probed[probe_at[c] : probe_at[c + 1]]
                _score(asked, asked.size, item, w, b, answer)
                for k in range(asked.size):  # rows the client tuned answer for themselves
                    j = np.uint32(asked[k])
                    if owner[j] == c:
                        row, s = rows[np.uint32(place[j])], b
                        for d in range(dim):
                            s += w[d] * row[d]
                        answer[k] = s
            if not _flush(near, listed, held, totals[worker]):
                healthy[worker] = False
