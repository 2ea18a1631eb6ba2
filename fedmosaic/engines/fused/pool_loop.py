"""Compiled epochs of one client that holds everybody; pool.py explains and calls them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.algorithm.compiled import move_by_adam
from fedmosaic.core.compiler import entry, piece
from fedmosaic.engines.fused.net_pieces import backward
from fedmosaic.engines.fused.pieces import FAST, residuals


@piece(fastmath=FAST)
def _move(table: Any, gradient: Any, rates: Any, settings: Any) -> None:
    """Adam on every row; the gradient is zero again afterwards."""
    move_by_adam(table[0], gradient, table[1], table[2], table[3], rates, settings)
    gradient[:] = 0


@entry(fastmath=FAST)
def linear_epoch(order: Any, examples: Any, sides: Any, rates: Any, settings: Any) -> Any:
    """One pass over the examples in order; returns the summed loss."""
    rows, users, labels, size = examples
    item, user, bias = sides
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


@entry(fastmath=FAST)
def net_epoch(
    order: Any, examples: Any, sides: Any, widths: Any, room: Any, tower: Any, rates: Any, settings: Any
) -> Any:
    """One pass over the examples in order, some at once within a batch; returns the summed loss."""
    rows, users, labels, size = examples
    item, user, net = sides
    widest, dim, loss, slopes, nobody = room.score.size, item[0].shape[1], 0.0, tower.slopes, np.empty(0, np.float32)
    collects = np.empty(3, np.float32)
    g_item, g_user, g_net = np.zeros_like(item[0]), np.zeros_like(user[0]), np.zeros_like(net[0])
    for start in range(0, order.size, size):
        end = min(start + size, order.size)
        for first in range(start, end, widest):
            k = min(widest, end - first)
            share = np.float32(k) / np.float32(end - start)  # a slice's mean is a part of the batch's
            for e in range(k):
                at = order[first + e]
                row, w = item[0][rows[at]], user[0][users[at]]
                room.label[e] = labels[at]
                for d in range(dim):
                    tower.acts[0, d, e], tower.acts[0, dim + d, e] = w[d], row[d]
            for side in range(3):
                collects[side] = -share
            more, now = backward(k, nobody, net[0][0], g_net[0], widths, collects, room, tower, True)
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
