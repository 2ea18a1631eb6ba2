"""The fused engine for the MLP scorer (FedNCF): one client at a time, its layers and rows inside a core's cache.

Plain SGD and cross-entropy on one item table; the network is shared with a shared table, or private beside a
personalised one (dual). Clients are summed as in kernel.py, so the bits do not depend on the number of workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import SGD, Context, plain_slope, value_of
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Axis, Role
from fedmosaic.algorithm.upload import LIMIT, SCALE
from fedmosaic.core import keys
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.batches import shuffle_client
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.block import Outcome, Task
from fedmosaic.engines.fused.common import client_keys, collected, pass_tables, shuffle_keys
from fedmosaic.engines.fused.net_pieces import answer, net_step
from fedmosaic.engines.fused.pieces import EMPTY, FAST, GROUP, add, choose, flush, load, meet

LONGEST_BATCH = 1024  # examples whose activations still fit a core's cache


def meant_for(algorithm: Algorithm) -> bool:
    """Whether an algorithm's model is the MLP."""
    return isinstance(algorithm.model, NCF)


def unfit(algorithm: Algorithm, data: TrainingSet) -> str:
    """Why this engine cannot run an algorithm; empty if it can."""
    moves, layers = algorithm.moves, network(algorithm)
    together = {Role.SHARED: Role.SHARED, Role.PERSONALISED: Role.PRIVATE}.get(algorithm.roles["item"])
    checks = {
        "its objective is not plain cross-entropy": algorithm.objective is not bce,
        "its gradients are not plain": algorithm.slope is not plain_slope,
        "clients hold several users": data.silos is not None,
        "it has no local work": not algorithm.local,
        "table and network are not both shared, or tuned and private": any(
            algorithm.roles[n] is not together for n in layers
        ),
        "user vectors are not private": algorithm.roles["user"] is not Role.PRIVATE,
        "an optimiser is not plain SGD": any(not isinstance(m.rule, SGD) or m.rule.decay for m in moves),
        "rates change inside a round, or clients stop early": any(
            one.step_decay != 1 or one.tolerance for one in algorithm.local
        ),
        "batches are too long for a core's cache": any(one.batch_size > LONGEST_BATCH for one in algorithm.local),
        "layers move at different rates": any(0 < len(set(m.names) & set(layers)) < len(layers) for m in moves),
        "it uploads gradients": algorithm.upload.kind == "gradient",
        "its uploads are encoded": bool(algorithm.upload.stack),
        "uploads of numbers that are not zero are counted": algorithm.upload.support == "nonzero",
        "something is computed as the round goes": algorithm.prepare is not None or bool(algorithm.history),
    }
    return "; ".join(reason for reason, wrong in checks.items() if wrong)


def tower_widths(model: NCF) -> Any:
    """Width of every layer's input, and of the score."""
    return np.array([2 * model.dim, *model.tower, 1])


def network(algorithm: Algorithm) -> list[str]:
    """Names of the layers' parameters: weight, bias, layer by layer."""
    return [s.name for s in algorithm.model.specs() if s.axis is Axis.WHOLE]


def run_round(algorithm: Algorithm, task: Task, workers: int | None = None) -> Outcome:
    """The cohort in one compiled call."""
    assert isinstance(algorithm.model, NCF)
    data, ctx, cohort = task.data, task.ctx, task.cohort
    item = np.ascontiguousarray(task.server["item"], dtype=np.float32)
    names, private = network(algorithm), algorithm.roles["item"] is Role.PERSONALISED
    source = {n: task.held[f"private/{n}"][cohort] if private else task.server[n][None] for n in names}
    nets = np.concatenate([v.reshape(v.shape[0], -1) for v in source.values()], axis=1).astype(np.float32)
    user = task.held["private/user"][cohort]
    count = workers or numba.get_num_threads()
    totals = np.zeros((count, *item.shape), dtype=np.int64)
    net_totals = np.zeros((count, nets.shape[1]), dtype=np.int64)
    healthy = np.ones(count, dtype=np.bool_)
    touched = np.zeros((count, data.n_items), dtype=np.int64)
    losses, seen = np.zeros(cohort.size), np.zeros(cohort.size, dtype=np.int64)
    probe = task.probe if task.probe is not None else Ragged.from_rows([[]] * cohort.size)
    probed = np.empty(probe.values.size, dtype=np.float32)
    _train(
        data.histories.values, data.histories.offsets, data.excluded.values, data.excluded.offsets, cohort,
        client_keys(task, keys.Purpose.NEGATIVES), shuffle_keys(algorithm, task), *pass_tables(algorithm), item, user,
        nets, not private, tower_widths(algorithm.model), _rates(algorithm, ctx),
        algorithm.negatives, probe.values, probe.offsets, probed, totals, net_totals, touched, losses, seen, healthy,
    )  # fmt: skip
    upload = collected(totals, touched, losses, seen, healthy)
    held = {**task.held, "private/user": _changed(task, "user", user)}
    cuts = np.cumsum([v[0].size for v in source.values()])[:-1]
    if private:
        parts = zip(names, np.split(nets, cuts, axis=1), strict=True)
        held |= {f"private/{n}": _changed(task, n, part.reshape(source[n].shape)) for n, part in parts}
    else:
        sums = zip(names, np.split(net_totals.sum(0), cuts), strict=True)
        whole = {n: part.reshape(source[n].shape[1:]) for n, part in sums}
        upload = replace(upload, totals={n: {**upload.totals, **whole}[n] for n in algorithm.sent})
    return Outcome(upload, held, probed if task.probe is not None else None)


def _changed(task: Task, name: str, values: Any) -> Any:
    """A private tensor of the device store with the cohort's new values."""
    if task.cohort.size == task.held[f"private/{name}"].shape[0]:
        return values
    new = task.held[f"private/{name}"].copy()
    new[task.cohort] = values
    return new


def _rates(algorithm: Algorithm, ctx: Context) -> Any:
    """Rates of network, user and item side in each phase of each pass, in order; 0 where a side stands still."""
    layer, found = network(algorithm)[0], []
    for phase in (phase for one in algorithm.local for phase in one.phases):
        rates = {name: value_of(move.rate, ctx) for move in phase.moves for name in move.names}
        found.append([rates.get(name, 0.0) for name in (layer, "user", "item")])
    return np.array(found, dtype=np.float32)


@numba.njit(cache=True)
def _send(before: Any, after: Any, total: Any) -> Any:
    """Add a client's change of the network in fixed point; false if it holds what no training should."""
    healthy = True
    for i in range(after.size):
        change = after[i] - before[i]
        healthy &= abs(change) < LIMIT
        total[i] += np.int64(np.floor(np.float64(change) * SCALE + 0.5))
    return healthy


@numba.njit(cache=True, fastmath=FAST)
def _work(
    worker: Any, workers: Any,
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, epoch_keys: Any,
    epochs: Any, sizes: Any, parts: Any, phase_at: Any, item: Any, user: Any, nets: Any, shared: Any, widths: Any,
    rates: Any, negatives: Any, probe: Any, probe_at: Any, probed: Any, total: Any, net_total: Any, touched: Any,
    losses: Any, seen: Any,
) -> Any:  # fmt: skip
    """The groups of clients dealt to one worker."""
    n_items, dim = item.shape
    longest = 0
    for c in range(cohort.size):
        longest = max(longest, history_at[cohort[c] + 1] - history_at[cohort[c]])
    longest *= 1 + negatives
    near = np.full((n_items, dim), EMPTY, dtype=np.float32)
    listed, met, pool_items = np.empty(n_items, np.int32), np.empty(n_items, np.int32), np.empty(n_items, np.int32)
    owner, place = np.full(n_items, -1, np.int32), np.zeros(n_items, np.int32)
    rows = np.empty((min(n_items, longest), dim), dtype=np.float32)
    items, first, code = np.empty(longest, np.int32), np.empty(longest, np.int32), np.empty(longest, np.int32)
    widest = min(sizes.max(), longest)
    bits, at = np.empty(widest, np.int32), np.empty(widest, np.int32)
    power = bits.view(np.float32)
    score, label, part = np.empty(widest, np.float32), np.empty(widest, np.float32), np.empty(widest, np.float32)
    wide = max(widths.max(), dim)
    acts, slopes = np.empty((widths.size, wide, widest), np.float32), np.empty((2, wide, widest), np.float32)
    sums, move, u, net = (
        np.empty(wide, np.float32),
        np.empty(dim, np.float32),
        np.empty(dim, np.float32),
        nets[0].copy(),
    )
    healthy = True
    for group in range(worker, (cohort.size + GROUP - 1) // GROUP, workers):
        held = 0
        for c in range(group * GROUP, min((group + 1) * GROUP, cohort.size)):
            positives, n, n_rows = meet(
                history, history_at, excluded, excluded_at, cohort[c], negative_keys[c], negatives, c, pool_items,
                items, owner, place, met, first,
            )  # fmt: skip
            load(item, met, n_rows, rows)
            u[:] = user[c]
            net[:] = nets[0] if shared else nets[c]
            loss, seen_now, turn = 0.0, 0, 0
            for one in range(epochs.size):
                for _ in range(epochs[one]):
                    m = choose(first, n, positives, parts[one], code)
                    shuffle_client(code, 0, m, epoch_keys[turn, c])
                    turn += 1
                    seen_now += m
                    for start in range(0, m, sizes[one]):
                        k = min(sizes[one], m - start)
                        for phase in range(phase_at[one], phase_at[one + 1]):
                            loss += net_step(
                                code[start : start + k], k, rows, u, net, widths, rates[phase], acts, slopes, sums,
                                move, score, label, bits, power, part, at, phase == phase_at[one],
                            )  # fmt: skip
            losses[c], seen[c] = loss, seen_now
            held = add(item, met, n_rows, rows, near, listed, held, touched)
            user[c] = u
            if shared:
                healthy &= _send(nets[0], net, net_total)
            else:
                nets[c] = net
            asked, found = probe[probe_at[c] : probe_at[c + 1]], probed[probe_at[c] : probe_at[c + 1]]
            answer(asked, item, rows, owner, place, c, u, net, widths, acts, found)
        healthy &= flush(near, listed, held, total)
    return healthy


@numba.njit(parallel=True, cache=True, fastmath=FAST)
def _train(
    history: Any, history_at: Any, excluded: Any, excluded_at: Any, cohort: Any, negative_keys: Any, epoch_keys: Any,
    epochs: Any, sizes: Any, parts: Any, phase_at: Any, item: Any, user: Any, nets: Any, shared: Any, widths: Any,
    rates: Any, negatives: Any, probe: Any, probe_at: Any, probed: Any, totals: Any, net_totals: Any, touched: Any,
    losses: Any, seen: Any, healthy: Any,
) -> None:  # fmt: skip
    """All clients of the cohort, dealt to the workers in turn."""
    for worker in numba.prange(totals.shape[0]):
        healthy[worker] = _work(
            worker, totals.shape[0], history, history_at, excluded, excluded_at, cohort, negative_keys, epoch_keys,
            epochs, sizes, parts, phase_at, item, user, nets, shared, widths, rates, negatives, probe, probe_at, probed,
            totals[worker], net_totals[worker], touched[worker], losses, seen,
        )  # fmt: skip
