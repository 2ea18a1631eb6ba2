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


@numba.njit(parallel=True, cache=True, fastmath=_FAST)
def _train(
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, shuffle_keys: Any,
    item: Any, user: Any, bias: Any, has_bias: Any, user_rates: Any, item_rates: Any, negatives: Any, size: Any,
    probe: Any, probe_at: Any, probed: Any, totals: Any, touched: Any, losses: Any,
) -> None:  # fmt: skip
    n_items, dim = item.shape
    longest = 0
    for c in range(cohort.size):
        longest = max(longest, history_at[cohort[c] + 1] - history_at[cohort[c]])
    for worker in numba.prange(totals.shape[0]):
        owner = np.full(n_items, -1, dtype=np.int64)
        place = np.zeros(n_items, dtype=np.int32)
        met = np.empty(n_items, dtype=np.int32)
        rows = np.empty((min(n_items, longest * (1 + negatives)), dim), dtype=np.float32)
        index = np.empty(longest * (1 + negatives), dtype=np.int32)
        order = np.empty(longest * (1 + negatives), dtype=np.int64)
        residual = np.empty(size, dtype=np.float32)
        slope = np.empty(dim, dtype=np.float32)
        w = np.empty(dim, dtype=np.float32)
        for c in range(worker, cohort.size, totals.shape[0]):
            n_rows = 0
            begin, end = history_at[cohort[c]], history_at[cohort[c] + 1]
            positives = end - begin
            low, high = excluded_at[cohort[c]], excluded_at[cohort[c] + 1]
            pool = np.uint64(n_items - (high - low))
            state = negative_keys[c]
            n = positives * (1 + negatives) if pool > np.uint64(0) else positives
            for e in range(n):
                if e < positives:
                    j = history[begin + e]
                else:
                    state += _GOLDEN
                    j = unseen_item(np.int64(((_mix(state) >> _S32) * pool) >> _S32), excluded, low, high)
                if owner[j] != c:
                    owner[j] = c
                    place[j] = n_rows
                    met[n_rows] = j
                    for d in range(dim):
                        rows[n_rows, d] = item[j, d]
                    n_rows += 1
                index[e] = place[j]
            for d in range(dim):
                w[d] = user[c, d]
            b = bias[c]
            loss = 0.0
            for epoch in range(shuffle_keys.shape[0]):
                for e in range(n):
                    order[e] = e
                shuffle_client(order, 0, n, shuffle_keys[epoch, c])
                for start in range(0, n, size):
                    stop = min(start + size, n)
                    share = np.float32(1.0) / np.float32(stop - start)
                    for phase in range(user_rates.size):
                        user_rate, item_rate = user_rates[phase], item_rates[phase]
                        slope[:] = 0
                        slope_b = np.float32(0)
                        for e in range(start, stop):
                            at = index[order[e]]
                            s = b
                            for d in range(dim):
                                s += w[d] * rows[at, d]
                            p = np.float32(1.0) / (np.float32(1.0) + np.exp(-s))
                            positive = order[e] < positives
                            r = (p - np.float32(1.0) if positive else p) * share
                            residual[e - start] = r
                            if phase == 0:
                                loss -= np.log(max(p if positive else np.float32(1.0) - p, np.float32(1e-37)))
                            if user_rate > 0:
                                slope_b += r
                                for d in range(dim):
                                    slope[d] += r * rows[at, d]
                        if item_rate > 0:
                            for e in range(start, stop):
                                at = index[order[e]]
                                step = item_rate * residual[e - start]
                                for d in range(dim):
                                    rows[at, d] -= step * w[d]
                        if user_rate > 0:
                            for d in range(dim):
                                w[d] -= user_rate * slope[d]
                            if has_bias:
                                b -= user_rate * slope_b
            losses[c] = loss
            for k in range(n_rows):
                j = met[k]
                touched[worker, j] += 1
                for d in range(dim):
                    totals[worker, j, d] += np.floor(np.float64(rows[k, d] - item[j, d]) * SCALE + 0.5)
            for d in range(dim):
                user[c, d] = w[d]
            bias[c] = b
            for k in range(probe_at[c], probe_at[c + 1]):
                j = probe[k]
                s = b
                if owner[j] == c:
                    for d in range(dim):
                        s += w[d] * rows[place[j], d]
                else:
                    for d in range(dim):
                        s += w[d] * item[j, d]
                probed[k] = s
