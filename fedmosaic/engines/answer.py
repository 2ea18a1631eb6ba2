"""Answers of the general engines: scores of items for users, from a block's parameters, by the model's own score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import STORED, Axis, Role, first_table
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.core.ragged import I64, Ragged, slots
from fedmosaic.data.batches import Examples
from fedmosaic.engines.block import Block
from fedmosaic.engines.round import load
from fedmosaic.engines.state import Array, Place
from fedmosaic.engines.task import Task

SCORES_PER_BLOCK = 50_000  # a layer's output stays below what is fetched from the system anew each time


def answer(algorithm: Algorithm, task: Task, users: I64, query: Ragged | None = None) -> Array:
    """Scores with the server's newest parameters and the devices' own: flat like the query, or [users, items]."""
    data = task.data
    if query is None:
        whole = np.empty((users.size, data.n_items), dtype=np.float32)
        everything, step = np.arange(data.n_items, dtype=np.int32), max(1, SCORES_PER_BLOCK // data.n_items)
        for at in range(0, users.size, step):
            part = users[at : at + step]
            items = np.broadcast_to(everything, (part.size, everything.size))
            whole[at : at + step] = _newest(algorithm, task, part, items)
        return whole
    width = max(int(query.lengths.max(initial=0)), 1)
    flat = np.empty(query.values.size, dtype=np.float32)
    read = data.histories.lengths[users] if algorithm.history else np.zeros(len(query), np.int64)
    for places in _blocks(width + read):
        items, mask = _padded(query.take(places), width)
        flat[slots(query, places)] = _newest(algorithm, task, users[places], items)[mask]
    return flat


def _newest(algorithm: Algorithm, task: Task, users: I64, items: Array) -> Array:
    """Scores [users, width] of given items."""
    data = task.data
    clients, of_client = np.unique(data.owners()[users], return_inverse=True)
    order = np.argsort(of_client, kind="stable")
    members = Ragged.group(of_client[order], users[order], clients.size)
    asked = Ragged.from_rows([[]] * clients.size)
    if any(algorithm.specs[n].axis is Axis.ITEM for n in algorithm.stored):
        many = items[:1] if clients.size == 1 and items.strides[0] == 0 else items
        asked = Ragged.group(np.repeat(of_client[: many.shape[0]], many.shape[1]), many.ravel(), clients.size)
    task = replace(task, cohort=clients)
    block = holding(algorithm, task, Place(clients, members, asked, data.n_items))
    result = np.empty(items.shape, dtype=np.float32)
    result[order] = score_users(algorithm, task, block, _some(items, order))
    return result


def query_scores(algorithm: Algorithm, task: Task, block: Block, asked: Ragged) -> Array:
    """Scores of the items asked of each of the block's users, with the block's parameters as they are now."""
    width = int(asked.lengths.max(initial=0))
    if width == 0:
        return np.empty(0, dtype=np.float32)
    items, mask = _padded(asked, width)
    result: Array = score_users(algorithm, task, block, items)[mask]
    return result


def _padded(rows: Ragged, width: int) -> tuple[Array, Array]:
    """Ragged rows as a rectangle, padded with item 0, and where it is real."""
    mask = np.arange(width) < rows.lengths[:, None]
    items = np.zeros(mask.shape, dtype=np.int32)
    items[mask] = rows.values
    return items, mask


def score_users(algorithm: Algorithm, task: Task, block: Block, items: Array) -> Array:
    """Scores [users, width] of given items, one row per user of the block.

    A row the block holds is read from it; any other item reads as the server sent it (or as it began).
    """
    n_users, width = items.shape
    history = None
    if algorithm.history:  # the user's positives are read too: they stand behind the items that are asked
        own = task.data.histories.take(block.place.users)
        extra, mask = _padded(own, max(int(own.lengths.max(initial=0)), 1))
        at = torch.arange(items.size + extra.size).reshape(n_users, -1)[:, width:]
        items = np.concatenate([items, extra], axis=1)
        weight = torch.from_numpy(mask.astype(np.float32))
        history = Batch(at, torch.arange(n_users)[:, None], weight, weight)
    params, given = gathered(algorithm, task, block, items)
    asked = torch.arange(items.size).reshape(n_users, -1)[:, :width]
    direct = history is None
    batch = Batch(asked, torch.arange(n_users)[:, None], torch.zeros(0), torch.zeros(0), direct)
    with torch.no_grad():
        return np.asarray(algorithm.model.score(View(params, batch, given, history), batch.items).numpy())


def gathered(
    algorithm: Algorithm, task: Task, block: Block, items: Array
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every parameter as each user of a block reads it for its own items, and item tables as the server sent them.

    Where everybody reads the same rows (the server's, of the same items), they are there once, not once per user.
    """
    owner, lone = block.place.members.rows, block.place.clients.size == 1
    common = items[:1] if items.strides[0] == 0 else items
    asked, by = (common, owner[: common.shape[0]]) if lone else (items, owner)
    order, at, held = _found(block.place, asked, by)
    params: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for name, value in block.params.items():
        spec, shared = algorithm.specs[name], algorithm.roles[name] in (Role.SHARED, Role.FROZEN)
        if spec.axis is not Axis.ITEM:
            if shared:  # answers as the server sent it, whatever local work has made of it
                value = torch.from_numpy(task.server[name])[None]
            one = shared or (lone and spec.axis is Axis.WHOLE)
            wide = value.expand(owner.size, *spec.shape) if one else value
            params[name] = wide if one or spec.axis is Axis.USER else value[torch.from_numpy(owner)]
            continue
        own = algorithm.roles[name] in (*STORED, Role.REBUILT)
        began = own and name not in task.server  # what was never stored: as it began, or as the server has it
        base = first_table(spec, task.ctx.seed, block.place.n_items) if began else task.server[name]
        rows = base[common if shared else asked]
        if shared:
            params[name] = given[name] = torch.from_numpy(rows.reshape(-1, *spec.shape))
            continue
        if name in task.server:
            received = task.server[name][asked] if own else rows.copy()
            given[name] = torch.from_numpy(received.reshape(-1, *spec.shape))
        if name in block.shrunk:
            rows *= block.shrunk[name].numpy()[by].reshape(-1, *[1] * (rows.ndim - 1))
        if held.any():
            rows[held] = value.numpy()[order[at[held]]]
        params[name] = torch.from_numpy(rows.reshape(-1, *spec.shape))
    return params, given


def _found(place: Place, items: Array, owner: Array) -> tuple[I64, I64, Array]:
    """Rows of a block in order, where among them each asked item of each owner would stand, and whether it does."""
    keys = place.row_keys
    if not keys.size:
        return keys, keys, np.zeros(items.shape, dtype=bool)
    order = np.argsort(keys)
    wanted = place.clients[owner][:, None] * place.n_items + items
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), keys.size - 1)
    return order, at, keys[order[at]] == wanted


def _blocks(widths: I64) -> Iterator[I64]:
    """Rows that are answered together, widest first, so that little of a block is padding."""
    order = np.argsort(-widths, kind="stable")
    start = 0
    while start < order.size:
        stop = start + max(1, SCORES_PER_BLOCK // int(widths[order[start]]))
        yield order[start:stop]
        start = stop


def _some(items: Array, rows: I64) -> Array:
    """Some rows of a rectangle; a row that everybody shares stays one."""
    return np.broadcast_to(items[0], (rows.size, items.shape[1])) if items.strides[0] == 0 else items[rows]


def holding(algorithm: Algorithm, task: Task, place: Place) -> Block:
    """A block that only holds: no examples, no steps to come."""
    nothing = np.zeros(0, dtype=np.int32)
    none, offsets = nothing.astype(np.float32), np.zeros(place.clients.size + 1, np.int64)
    client_ids = task.data.ids_of(place.clients)
    examples = Examples(nothing, none, nothing, nothing, offsets, place.members, client_ids)
    params = {name: load(algorithm, task, place, name) for name in algorithm.specs}
    return Block(place, examples, nothing.astype(np.int64), params, {}, {}, {}, {}, {})
