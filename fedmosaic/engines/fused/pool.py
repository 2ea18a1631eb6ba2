"""The fused engine for one client that holds everybody (central MF and NCF): compiled batches, dense Adam.

A block is begun and finished as in the general engine; only the batches in between are compiled. Gradients of a batch
are collected row by row, then Adam moves every row, those without examples by their momentum.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, adam_rows, plain_slope, value_of
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Role
from fedmosaic.core.ragged import I64
from fedmosaic.data.batches import shuffled
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines import simulate
from fedmosaic.engines.block import Block, Outcome, Task
from fedmosaic.engines.fused.net import network, tower_widths
from fedmosaic.engines.fused.net_pieces import backward
from fedmosaic.engines.fused.pieces import FAST, residuals
from fedmosaic.engines.round import begin

AT_ONCE = 128  # examples whose activations stay in a core's cache


def meant_for(data: TrainingSet) -> bool:
    """Whether one client holds everybody."""
    return data.silos is not None and data.n_clients == 1


def unfit(algorithm: Algorithm) -> str:
    """Why this engine cannot run an algorithm; empty if it can."""
    phases = [phase for one in algorithm.local for phase in one.phases]
    moves = [move for phase in phases for move in phase.moves]
    checks = {
        "its model is neither the linear scorer nor the MLP": not isinstance(algorithm.model, LinearScorer | NCF),
        "its objective is not plain cross-entropy": algorithm.objective is not bce,
        "its gradients are not plain": algorithm.slope is not plain_slope,
        "not everything is private": any(role is not Role.PRIVATE for role in algorithm.roles.values()),
        "not everything moves at once by one Adam": len(moves) != 1
        or not isinstance(moves[0].rule, Adam)
        or set(moves[0].names) != set(algorithm.specs),
        "rates change inside a round, or the client stops early": any(one.uneven for one in algorithm.local),
        "something is computed as the round goes": algorithm.prepare is not None or bool(algorithm.history),
    }
    return "; ".join(reason for reason, wrong in checks.items() if wrong)


def run_round(algorithm: Algorithm, task: Task) -> Outcome:
    """The round of the general engine, its batches compiled."""
    return simulate.run_round(algorithm, task, work=_work)


def _work(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool) -> Block:
    block, ctx = begin(algorithm, task, clients, dense=dense), task.ctx
    (one,) = algorithm.local
    (move,) = one.phases[0].moves
    assert isinstance(move.rule, Adam)
    rates, settings = np.full(1, value_of(move.rate, ctx), dtype=np.float32), move.rule.numbers
    model, layers = algorithm.model, network(algorithm)
    widths = tower_widths(model) if isinstance(model, NCF) else None
    third = _table(block, "bias") if widths is None else _joined(block, layers)
    sides = (_table(block, "item"), _table(block, "user"), third, rates, settings)
    examples = (block.rows, block.examples.users, block.examples.labels, one.batch_size)
    chosen, offsets = block.examples.part(one.part)
    for epoch in range(one.epochs):
        order = chosen[shuffled(offsets, block.examples.numbers, seed=ctx.own_seed, round=ctx.round, epoch=epoch)]
        if widths is None:
            block.loss += _linear_epoch(order, *examples, *sides)
        else:
            block.loss += _net_epoch(order, *examples, widths, *sides)
        block.seen += order.size
        block.steps += -(-order.size // one.batch_size)
    if widths is not None:
        _put_back(block, layers, third)
    return block


def _table(block: Block, name: str) -> tuple[Any, ...]:
    """A parameter, its two moments and its clock as tables of rows, which move in place; empty if there is none."""
    if name not in block.params:
        return *(np.zeros((0, 0), np.float32) for _ in range(3)), np.zeros(0, np.float32)
    value, first, second, clock = (part.numpy() for part in (block.params[name], *block.memory[name]))
    return *(part.reshape(value.shape[0], -1) for part in (value, first, second)), clock.reshape(-1)


def _joined(block: Block, names: list[str]) -> tuple[Any, ...]:
    """The same of several parameters, as one row: copies."""
    parts = [_table(block, name) for name in names]
    return *(np.concatenate([part[i] for part in parts], axis=1) for i in range(3)), parts[0][3].copy()


def _put_back(block: Block, names: list[str], joined: tuple[Any, ...]) -> None:
    """One row of several parameters, back to where they came from."""
    begin = 0
    for table in (_table(block, name) for name in names):
        end = begin + table[0].shape[1]
        for part, row in zip(table[:3], joined[:3], strict=True):
            part[:] = row[:, begin:end]
        table[3][:] = joined[3]
        begin = end


@numba.njit(cache=True, fastmath=FAST)
def _move(table: Any, gradient: Any, rates: Any, settings: Any) -> None:
    """Adam on every row; the gradient is zero again afterwards."""
    adam_rows(table[0], gradient, table[1], table[2], table[3], rates, settings)
    gradient[:] = 0


@numba.njit(cache=True, fastmath=FAST)
def _linear_epoch(
    order: Any, rows: Any, users: Any, labels: Any, size: Any, item: Any, user: Any, bias: Any, rates: Any,
    settings: Any,
) -> Any:  # fmt: skip
    """One pass over the examples in order; returns the summed loss."""
    widest, dim, loss = min(size, order.size), item[0].shape[1], 0.0
    bits, score = np.empty(widest, np.int32), np.empty(widest, np.float32)
    label, part, power = np.empty(widest, np.float32), np.empty(widest, np.float32), bits.view(np.float32)
    g_item, g_user, g_bias = np.zeros_like(item[0]), np.zeros_like(user[0]), np.zeros_like(bias[0])
    for start in range(0, order.size, size):
        k = min(size, order.size - start)
        for e in range(k):
            at = order[start + e]
            row, w, s = item[0][rows[at]], user[0][users[at]], np.float32(0)
            for d in range(dim):
                s += w[d] * row[d]
            score[e] = s + bias[0][users[at], 0] if bias[0].size else s
            label[e] = labels[at]
        loss += residuals(score, label, k, bits, power, part, True)
        for e in range(k):
            at, r = order[start + e], score[e]
            row, w, g_row, g_w = item[0][rows[at]], user[0][users[at]], g_item[rows[at]], g_user[users[at]]
            for d in range(dim):
                g_row[d] += r * w[d]
                g_w[d] += r * row[d]
            if bias[0].size:
                g_bias[users[at], 0] += r
        _move(item, g_item, rates, settings)
        _move(user, g_user, rates, settings)
        if bias[0].size:
            _move(bias, g_bias, rates, settings)
    return loss


@numba.njit(cache=True, fastmath=FAST)
def _net_epoch(
    order: Any, rows: Any, users: Any, labels: Any, size: Any, widths: Any, item: Any, user: Any, net: Any, rates: Any,
    settings: Any,
) -> Any:  # fmt: skip
    """One pass over the examples in order, some at once within a batch; returns the summed loss."""
    widest, dim, wide, loss = min(size, order.size, AT_ONCE), item[0].shape[1], widths.max(), 0.0
    bits, score = np.empty(widest, np.int32), np.empty(widest, np.float32)
    label, part, power = np.empty(widest, np.float32), np.empty(widest, np.float32), bits.view(np.float32)
    acts, slopes = np.empty((widths.size, wide, widest), np.float32), np.empty((2, wide, widest), np.float32)
    sums, nobody, collects = np.empty(wide, np.float32), np.empty(0, np.float32), np.empty(3, np.float32)
    g_item, g_user, g_net = np.zeros_like(item[0]), np.zeros_like(user[0]), np.zeros_like(net[0])
    for start in range(0, order.size, size):
        end = min(start + size, order.size)
        for first in range(start, end, widest):
            k = min(widest, end - first)
            share = np.float32(k) / np.float32(end - start)  # a slice's mean is a part of the batch's
            for e in range(k):
                at = order[first + e]
                row, w = item[0][rows[at]], user[0][users[at]]
                label[e] = labels[at]
                for d in range(dim):
                    acts[0, d, e], acts[0, dim + d, e] = w[d], row[d]
            collects[:] = -share
            more, now = backward(
                k, nobody, net[0][0], g_net[0], widths, collects, acts, slopes, sums, nobody, score, label, bits, power,
                part, True,
            )  # fmt: skip
            loss += more
            for e in range(k):
                at = order[first + e]
                g_row, g_w = g_item[rows[at]], g_user[users[at]]
                for d in range(dim):
                    g_w[d] += share * slopes[now, d, e]
                    g_row[d] += share * slopes[now, dim + d, e]
        _move(item, g_item, rates, settings)
        _move(user, g_user, rates, settings)
        _move(net, g_net, rates, settings)
    return loss
