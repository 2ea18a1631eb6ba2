"""Compiled pieces for a tower of layers on the pair of user vector and item row, for one client in a core's cache.

    z_0 = [u ; e],  z_l = ReLU(z_{l-1} W_l + b_l),  score = z_L W_out + b_out

Activations lie example by example along the last axis, so that every inner loop runs over a whole batch. A client's
layers are one flat vector: weights, then bias, layer by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import piece
from fedmosaic.engines.fused.pieces import FAST, residuals


@piece(fastmath=FAST)
def combine(weight: Any, x: Any, z: Any, k: Any) -> None:
    """z[j] += sum over m of weight[m, j] · x[m], over the first k examples; eight rows of x at a time."""
    rows = weight.shape[0]
    for j in range(weight.shape[1]):
        target = z[j]
        for m in range(0, rows - 7, 8):
            w0, w1, w2, w3 = weight[m, j], weight[m + 1, j], weight[m + 2, j], weight[m + 3, j]
            w4, w5, w6, w7 = weight[m + 4, j], weight[m + 5, j], weight[m + 6, j], weight[m + 7, j]
            x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
            x4, x5, x6, x7 = x[m + 4], x[m + 5], x[m + 6], x[m + 7]
            for e in range(k):
                low = w0 * x0[e] + w1 * x1[e] + w2 * x2[e] + w3 * x3[e]
                target[e] += low + (w4 * x4[e] + w5 * x5[e] + w6 * x6[e] + w7 * x7[e])
        for m in range(rows - rows % 8, rows):
            w, line = weight[m, j], x[m]
            for e in range(k):
                target[e] += w * line[e]


@piece(fastmath=FAST)
def _descend(weight: Any, x: Any, slope: Any, k: Any, rate: Any) -> None:
    """weight[m, j] -= rate · x[m]·slope[j]; four columns at a time. Into zeros, with rate -1: the gradient."""
    columns = weight.shape[1]
    for m in range(weight.shape[0]):
        line = x[m]
        for j in range(0, columns - 3, 4):
            s0, s1, s2, s3 = slope[j], slope[j + 1], slope[j + 2], slope[j + 3]
            t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for e in range(k):
                t0 += line[e] * s0[e]
                t1 += line[e] * s1[e]
                t2 += line[e] * s2[e]
                t3 += line[e] * s3[e]
            weight[m, j] -= rate * t0
            weight[m, j + 1] -= rate * t1
            weight[m, j + 2] -= rate * t2
            weight[m, j + 3] -= rate * t3
        for j in range(columns - columns % 4, columns):
            total = np.float32(0)
            for e in range(k):
                total += line[e] * slope[j, e]
            weight[m, j] -= rate * total


@piece()
def _layer(net: Any, widths: Any, layer: Any) -> Any:
    """Weight and bias of a layer; the first reads user vector and item row."""
    begin = 0
    for before in range(layer):
        begin += (widths[before] + 1) * widths[before + 1]
    wide, narrow = widths[layer], widths[layer + 1]
    middle = begin + wide * narrow
    return net[begin:middle].reshape(wide, narrow), net[middle : middle + narrow]


@piece(fastmath=FAST)
def forward(net: Any, widths: Any, u: Any, k: Any, acts: Any) -> None:
    """acts[l + 1] from acts[l]; acts[0] holds the item rows, the last one the scores.

    `u` is the vector that all examples share; it is empty where each has its own, in acts[0] above its item row.
    """
    depth = widths.size - 1
    for layer in range(depth):
        weight, bias = _layer(net, widths, layer)
        x, z = acts[layer], acts[layer + 1]
        for j in range(bias.size):
            base = bias[j]
            if layer == 0:
                for m in range(u.size):
                    base += u[m] * weight[m, j]
            for e in range(k):
                z[j, e] = base
        combine(weight[u.size :] if layer == 0 else weight, x, z, k)
        if layer < depth - 1:
            for j in range(bias.size):
                line = z[j]
                for e in range(k):
                    line[e] = max(line[e], np.float32(0))


@piece(fastmath=FAST)
def backward(
    k: Any, u: Any, net: Any, target: Any, widths: Any, rates: Any, room: Any, tower: Any, count_loss: Any
) -> Any:
    """Forward and backward for the k examples in acts[0]; returns the loss, and which of `slopes` is that of acts[0].

    `target` moves by the network's gradient times its rate: `net` itself (slopes are taken before a layer moves), or
    zeros that collect it. `tower.step` is the gradient of `u`. `rates`: network, user, item; 0: it stands still.
    """
    acts, slopes, sums, step, score = tower.acts, tower.slopes, tower.sums, tower.step, room.score
    depth, dim = widths.size - 1, u.size
    forward(net, widths, u, k, acts)
    for e in range(k):
        score[e] = acts[depth, 0, e]
    loss = residuals(score, room.label, k, room.bits, room.power, room.part, count_loss)
    now = depth % 2
    for e in range(k):
        slopes[now, 0, e] = score[e]
    for layer in range(depth - 1, -1, -1):
        weight, bias = _layer(net, widths, layer)
        moved, moved_bias = _layer(target, widths, layer)
        slope, below = slopes[now], slopes[1 - now]
        if layer > 0 or rates[2] != 0:
            inner = weight[dim:] if layer == 0 else weight
            for m in range(inner.shape[0]):
                for e in range(k):
                    below[m, e] = 0
            combine(inner.T, slope, below, k)
        for j in range(bias.size):
            total, line = np.float32(0), slope[j]
            for e in range(k):
                total += line[e]
            sums[j] = total
        if layer == 0:
            for m in range(dim):
                total, line = np.float32(0), weight[m]
                for j in range(bias.size):
                    total += line[j] * sums[j]
                step[m] = total
        if rates[0] != 0:
            if layer == 0:
                for m in range(dim):
                    for j in range(bias.size):
                        moved[m, j] -= rates[0] * u[m] * sums[j]
            _descend(moved[dim:] if layer == 0 else moved, acts[layer], slope, k, rates[0])
            for j in range(bias.size):
                moved_bias[j] -= rates[0] * sums[j]
        if layer > 0:
            for m in range(widths[layer]):
                line, seen = below[m], acts[layer, m]
                for e in range(k):
                    line[e] = line[e] if seen[e] > 0 else np.float32(0)
        now = 1 - now
    return loss, now


@piece(fastmath=FAST)
def net_step(start: Any, k: Any, room: Any, tower: Any, widths: Any, rates: Any, count_loss: Any) -> Any:
    """One phase of a batch, examples start ... start + k of an epoch; returns the loss."""
    u, net, acts = room.w, tower.net, tower.acts
    dim = u.size
    for e in range(k):
        room.at[e] = room.code[start + e] >> 1
        room.label[e] = np.float32(room.code[start + e] & 1)
        row = room.rows[room.at[e]]
        for m in range(dim):
            acts[0, m, e] = row[m]
    loss, now = backward(k, u, net, net, widths, rates, room, tower, count_loss)
    if rates[1] != 0:
        for m in range(dim):
            u[m] -= rates[1] * tower.step[m]
    if rates[2] != 0:
        for e in range(k):
            row = room.rows[room.at[e]]
            for m in range(dim):
                row[m] -= rates[2] * tower.slopes[now, m, e]
    return loss


@piece(fastmath=FAST)
def answer(cohort: Any, c: Any, item: Any, widths: Any, room: Any, tower: Any, answers: Any) -> None:
    """Scores of the items asked of a client; rows it tuned answer for themselves."""
    begin, end, acts, size = cohort.query_at[c], cohort.query_at[c + 1], tower.acts, tower.acts.shape[2]
    u, net = room.w, tower.net
    for start in range(begin, end, size):
        k = min(size, end - start)
        for e in range(k):
            j = cohort.query[start + e]
            row = room.rows[room.place[j]] if room.owner[j] == c else item[j]
            for m in range(u.size):
                acts[0, m, e] = row[m]
        forward(net, widths, u, k, acts)
        for e in range(k):
            answers[start + e] = acts[widths.size - 1, 0, e]
