"""The fused engine for the linear scorer: one client at a time inside a core's cache, clients in parallel.

    score = w·e + b, binary cross-entropy, plain SGD, one item table that is shared or personalised

Sampling, shuffling, all phases of all batches, the upload and the asked scores happen while a client's rows are hot;
nothing per client is allocated. Each worker adds fixed-point values (whole numbers in float64, exact below 2^53) to its
own sum; sums are merged at the end, so the result has the same bits for any number of workers. Randomness is the same
function of (seed, round, client, slot) as everywhere else, and the general engine is this one's test.
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
from fedmosaic.upload import SCALE, Sum

EXACT = float(1 << 52)
_mix = numba.njit(inline="always")(keys.mix)
_GOLDEN = keys.GOLDEN
_S32 = np.uint64(32)
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
        "it uploads gradients": algorithm.upload.kind != "delta",
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
    totals = np.zeros((count, *item.shape))
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
        probe.values, probe.offsets, probed, totals, touched, losses,
    )  # fmt: skip
    total = totals.sum(axis=0)
    if not np.abs(total).max(initial=0) < EXACT:
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
        totals={"item": total.astype(np.int64)},
        touched=touched.sum(axis=0),
        clients=cohort.size,
        examples=int((positives * (1 + drawn)).sum()),
        loss=float(losses.sum()),
    )
    return Outcome(upload, held, probed if task.probe is not None else None)


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
        k = 0
        for j in range(n_items):
            if k < excluded.size and excluded[k] == j:
                k += 1
            else:
                pool_items[j - k] = j
    for e in range(n, n + wanted):
        state += _GOLDEN
        rank = np.int64(((_mix(state) >> _S32) * pool) >> _S32)
        items[e] = pool_items[rank] if listed else unseen_item(rank, excluded, 0, excluded.size)
    return n + wanted


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
    if count_loss:  # the log of a product of eight is the sum of their logs, at an eighth of the price
        for e in range(0, n, 8):
            product = 1.0
            for k in range(e, min(e + 8, n)):
                product *= max(np.float64(1.0) - abs(np.float64(score[k])), 1e-30)
            loss -= np.log(product)
    for e in range(n):
        score[e] *= share
    return loss


@numba.njit(cache=True, fastmath=_FAST)
def _step(
    code: Any, n: Any, rows: Any, w: Any, b: Any, has_bias: Any, user_rate: Any, item_rate: Any, score: Any, label: Any,
    bits: Any, power: Any, part: Any, slope: Any, count_loss: Any,
) -> Any:  # fmt: skip
    """One phase of one batch; returns the bias and the loss. Rows move along w, w along the sum of rows."""
    dim = w.size
    for e in range(n):
        row = rows[np.uint32(code[e] >> 1)]
        s = np.float32(0)
        for d in range(dim):
            s += w[d] * row[d]
        score[e] = s + b
        label[e] = np.float32(code[e] & 1)
    loss = _residuals(score, label, n, bits, power, part, count_loss)
    if user_rate > 0:
        slope[:] = 0
        slope_b = np.float32(0)
        for e in range(n):
            row, r = rows[np.uint32(code[e] >> 1)], score[e]
            slope_b += r
            for d in range(dim):
                slope[d] += r * row[d]
    if item_rate > 0:
        for e in range(n):
            row, r = rows[np.uint32(code[e] >> 1)], item_rate * score[e]
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
    probe: Any, probe_at: Any, probed: Any, totals: Any, touched: Any, losses: Any,
) -> None:  # fmt: skip
    """All clients of the cohort, dealt to the workers in turn."""
    n_items, dim = item.shape
    longest = 0
    for c in range(cohort.size):
        longest = max(longest, history_at[cohort[c] + 1] - history_at[cohort[c]])
    longest *= 1 + negatives
    for worker in numba.prange(totals.shape[0]):
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
        slope, w = np.empty(dim, np.float32), np.empty(dim, np.float32)
        for c in range(worker, cohort.size, totals.shape[0]):
            who = cohort[c]
            own = history[history_at[who] : history_at[who + 1]]
            kept_out = excluded[excluded_at[who] : excluded_at[who + 1]]
            n = _draw_examples(own, kept_out, negative_keys[c], negatives, n_items, pool_items, items)
            n_rows = 0
            for e in range(n):
                j = np.uint32(items[e])
                if owner[j] != c:
                    owner[j], place[j], met[n_rows] = c, n_rows, j
                    rows[n_rows] = item[j]
                    n_rows += 1
                first[e] = place[j] * 2 + (e < own.size)
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
                            item_rates[phase], score, label, bits, power, part, slope, phase == 0,
                        )  # fmt: skip
                        loss += more
            losses[c] = loss
            for k in range(n_rows):
                j = np.uint32(met[k])
                touched[worker, j] += 1
                for d in range(dim):
                    totals[worker, j, d] += np.floor(np.float64(rows[k, d] - item[j, d]) * SCALE + 0.5)
            user[c] = w
            bias[c] = b
            for k in range(probe_at[c], probe_at[c + 1]):
                j = np.uint32(probe[k])
                row = rows[place[j]] if owner[j] == c else item[j]
                s = np.float32(0)
                for d in range(dim):
                    s += w[d] * row[d]
                probed[k] = s + b
