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

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import SGD, Context, plain_slope, value_of
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Role
from fedmosaic.core import keys
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.batches import shuffle_client
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.block import Outcome, Task
from fedmosaic.engines.fused import net as kernel_net
from fedmosaic.engines.fused import pair as kernel_pair
from fedmosaic.engines.fused import pool as kernel_pool
from fedmosaic.engines.fused.common import client_keys, collected, pass_tables, put_back, shuffle_keys, user_side
from fedmosaic.engines.fused.pieces import EMPTY, FAST, GROUP, add, choose, dots, flush, load, meet, step


def unfit(algorithm: Algorithm, data: TrainingSet) -> str:
    """Why no fused engine can run an algorithm; empty if one can."""
    if kernel_pool.meant_for(data):
        return kernel_pool.unfit(algorithm)
    if kernel_pair.meant_for(algorithm):
        return kernel_pair.unfit(algorithm, data)
    if kernel_net.meant_for(algorithm):
        return kernel_net.unfit(algorithm, data)
    moves, user_side = algorithm.moves, ("user", "bias")
    checks = {
        "its model is not the linear scorer": not isinstance(algorithm.model, LinearScorer),
        "its objective is not plain cross-entropy": algorithm.objective is not bce,
        "its gradients are not plain": algorithm.slope is not plain_slope,
        "clients hold several users": data.silos is not None,
        "it has no local work": not algorithm.local,
        "its item table is not shared or personalised": algorithm.roles.get("item")
        not in (Role.SHARED, Role.PERSONALISED),
        "an optimiser is not plain SGD": any(not isinstance(m.rule, SGD) or m.rule.decay for m in moves),
        "rates change inside a round, or clients stop early": any(
            one.step_decay != 1 or one.tolerance for one in algorithm.local
        ),
        "it uploads gradients": algorithm.upload.kind == "gradient",
        "its uploads are encoded": bool(algorithm.upload.stack),
        "uploads of numbers that are not zero are counted": algorithm.upload.support == "nonzero",
        "user and bias differ": "bias" in algorithm.specs
        and (
            any(("user" in m.names) != ("bias" in m.names) for m in moves)
            or len({algorithm.roles[n] for n in user_side}) > 1
        ),
    }
    return "; ".join(reason for reason, wrong in checks.items() if wrong)


def run_round(algorithm: Algorithm, task: Task, workers: int | None = None) -> Outcome:
    """The cohort in one compiled call."""
    if kernel_pool.meant_for(task.data):
        return kernel_pool.run_round(algorithm, task)
    if kernel_pair.meant_for(algorithm):
        return kernel_pair.run_round(algorithm, task, workers)
    if kernel_net.meant_for(algorithm):
        return kernel_net.run_round(algorithm, task, workers)
    data, ctx, cohort = task.data, task.ctx, task.cohort
    item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
    user, bias = user_side(algorithm, task)
    count = workers or numba.get_num_threads()
    totals = np.zeros((count, *item.shape), dtype=np.int64)
    healthy = np.ones(count, dtype=np.bool_)
    touched = np.zeros((count, data.n_items), dtype=np.int64)
    losses, seen = np.zeros(cohort.size), np.zeros(cohort.size, dtype=np.int64)
    probe = task.probe if task.probe is not None else Ragged.from_rows([[]] * cohort.size)
    probed = np.empty(probe.values.size, dtype=np.float32)
    _train(
        data.histories.values, data.histories.offsets, data.excluded.values, data.excluded.offsets, cohort,
        client_keys(task, keys.Purpose.NEGATIVES),
        shuffle_keys(algorithm, task), *pass_tables(algorithm), item, user, bias, "bias" in algorithm.specs,
        _rates(algorithm, ctx), algorithm.negatives, probe.values, probe.offsets, probed, totals, touched, losses, seen,
        healthy,
    )  # fmt: skip
    upload = collected(totals, touched, losses, seen, healthy)
    return Outcome(upload, put_back(algorithm, task, user, bias), probed if task.probe is not None else None)


def _rates(algorithm: Algorithm, ctx: Context) -> Any:
    """Rates of user and item side in each phase of each pass, in order; 0 where a side stands still."""
    pairs = []
    for phase in (phase for one in algorithm.local for phase in one.phases):
        rates = {name: value_of(move.rate, ctx) for move in phase.moves for name in move.names}
        pairs.append((rates.get("user", 0.0), rates.get("item", 0.0)))
    return np.array(pairs, dtype=np.float32)


@numba.njit(parallel=True, cache=True, fastmath=FAST)
def _train(
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, epoch_keys: Any,
    epochs: Any, sizes: Any, parts: Any, phase_at: Any, item: Any, user: Any, bias: Any, has_bias: Any, rates: Any,
    negatives: Any, probe: Any, probe_at: Any, probed: Any, totals: Any, touched: Any, losses: Any, seen: Any,
    healthy: Any,
) -> None:  # fmt: skip
    """All clients of the cohort, dealt to the workers in turn."""
    n_items, dim = item.shape
    longest = 0
    for c in range(cohort.size):
        longest = max(longest, history_at[cohort[c] + 1] - history_at[cohort[c]])
    longest *= 1 + negatives
    groups = (cohort.size + GROUP - 1) // GROUP
    for worker in numba.prange(totals.shape[0]):
        near = np.full((n_items, dim), EMPTY, dtype=np.float32)
        listed = np.empty(n_items, dtype=np.int32)
        owner = np.full(n_items, -1, dtype=np.int32)
        place = np.zeros(n_items, dtype=np.int32)
        met = np.empty(n_items, dtype=np.int32)
        pool_items = np.empty(n_items, dtype=np.int32)
        rows = np.empty((min(n_items, longest), dim), dtype=np.float32)
        items = np.empty(longest, dtype=np.int32)
        first = np.empty(longest, dtype=np.int32)
        code = np.empty(longest, dtype=np.int32)
        widest = min(sizes.max(), longest)
        bits = np.empty(widest, dtype=np.int32)
        power = bits.view(np.float32)
        score, label, part = np.empty(widest, np.float32), np.empty(widest, np.float32), np.empty(widest, np.float32)
        at = np.empty(widest, dtype=np.int32)
        slope, w = np.empty(dim, np.float32), np.empty(dim, np.float32)
        for group in range(worker, groups, totals.shape[0]):
            held = 0
            for c in range(group * GROUP, min((group + 1) * GROUP, cohort.size)):
                who = cohort[c]
                positives, n, n_rows = meet(
                    history, history_at, excluded, excluded_at, who, negative_keys[c], negatives, c, pool_items, items,
                    owner, place, met, first,
                )  # fmt: skip
                load(item, met, n_rows, rows)
                w[:] = user[c]
                b, loss, count, turn = bias[c], 0.0, 0, 0
                for one in range(epochs.size):
                    for _ in range(epochs[one]):
                        m = choose(first, n, positives, parts[one], code)
                        shuffle_client(code, 0, m, epoch_keys[turn, c])
                        turn += 1
                        count += m
                        for start in range(0, m, sizes[one]):
                            k = min(sizes[one], m - start)
                            for phase in range(phase_at[one], phase_at[one + 1]):
                                b, more = step(
                                    code[start : start + k], k, rows, w, b, has_bias, rates[phase, 0], rates[phase, 1],
                                    score, label, bits, power, part, slope, at, phase == phase_at[one],
                                )  # fmt: skip
                                loss += more
                losses[c], seen[c] = loss, count
                held = add(item, met, n_rows, rows, near, listed, held, touched[worker])
                user[c] = w
                bias[c] = b
                asked, answer = probe[probe_at[c] : probe_at[c + 1]], probed[probe_at[c] : probe_at[c + 1]]
                dots(asked, asked.size, item, w, b, answer)
                for k in range(asked.size):  # rows the client tuned answer for themselves
                    j = np.uint32(asked[k])
                    if owner[j] == c:
                        row, s = rows[np.uint32(place[j])], b
                        for d in range(dim):
                            s += w[d] * row[d]
                        answer[k] = s
            if not flush(near, listed, held, totals[worker]):
                healthy[worker] = False
