"""One round as four pure functions, for a block of clients; a device is a block of one.

    begin(algorithm, task, place)       -> Block      copies of what the clients received and what they hold
    advance(algorithm, block, batch)    -> Block      one batch: every phase takes a step
    finish(algorithm, block)            -> Sum, private
    apply(algorithm, server, total)     -> server'

Clients of a block are ordered by their number of batches, so that those still at work are always the first ones and
every tensor of the others is simply not looked at. The losses of all clients are added and differentiated once; no two
clients own the same row, so every gradient is the client's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmosaic.algorithm import Algorithm
from fedmosaic.data.batches import Examples, localise, make_examples, shuffled
from fedmosaic.local import Context, Optimiser, Pass, Phase, value_of
from fedmosaic.models.view import Batch, View
from fedmosaic.ragged import I64, Ragged
from fedmosaic.runtime import devices
from fedmosaic.runtime.devices import Array, Place
from fedmosaic.training import State, TrainingSet
from fedmosaic.tree import Axis, first_table
from fedmosaic.upload import Sum, add_rows

Held = dict[str, tuple[Place, Array]]  # name in the device store -> where, what


@dataclass(frozen=True, eq=False)
class Task:
    """What a round needs: data, the server's parameters, what devices hold, and what is asked of them at the end."""

    data: TrainingSet
    server: Mapping[str, Array]
    held: State  # private/..., memory/...
    ctx: Context
    cohort: I64
    probe: Ragged | None = None  # per user of the cohort: items to score with the state after local work


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a round yields: the sum of uploads, what devices hold now, the scores that were asked for."""

    total: Sum
    held: dict[str, Array]
    probed: Array | None  # flat, like the probe


@dataclass(eq=False)
class Block:
    """A group of clients at work. Tensors are the block's own copies and move in place."""

    place: Place
    examples: Examples
    rows: I64  # row of each example in the block's item tables
    params: dict[str, Tensor]
    before: dict[str, Tensor]  # what was received and will be sent, as it came
    memory: dict[str, tuple[Tensor, ...]]
    gradients: dict[str, Tensor]  # summed, for gradient uploads
    loss: float = 0.0


def plan(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool) -> tuple[Place, Examples, I64]:
    """Examples of some clients and the rows they need: touched items only, or (`dense`) the whole catalogue."""
    data, ctx = task.data, task.ctx
    examples = make_examples(data, clients, negatives=algorithm.negatives, seed=ctx.seed, round=ctx.round)
    if dense:
        whole = np.tile(np.arange(data.n_items, dtype=np.int32), clients.size)
        touched = Ragged(whole, np.arange(clients.size + 1) * data.n_items)
        first = np.repeat(touched.offsets[:-1], np.diff(examples.offsets))
        return Place(clients, examples.members, touched, data.n_items), examples, first + examples.items
    index, touched = localise(examples.items, examples.offsets, data.n_items)
    return Place(clients, examples.members, touched, data.n_items), examples, index


def begin(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool = False) -> Block:
    """Download and load: server rows for the items a client will touch, and its own private parameters."""
    place, examples, rows = plan(algorithm, task, clients, dense=dense)
    params: dict[str, Tensor] = {}
    for name in algorithm.received:
        value = torch.from_numpy(task.server[name])
        if algorithm.specs[name].axis is Axis.ITEM:
            params[name] = value[torch.from_numpy(place.touched.values.astype(np.int64))]
        else:
            params[name] = value.expand(clients.size, *value.shape).clone()
    for name in algorithm.private:
        spec = algorithm.specs[name]
        empty: Array = np.empty(0)
        if spec.axis is Axis.ITEM:
            empty = first_table(spec, task.ctx.seed, place.n_items)[place.touched.values]
        params[name] = torch.from_numpy(devices.read(task.held, f"private/{name}", spec, place, empty).copy())
    memory = {
        name: _memory(algorithm, task, name, params[name], move.rule, place, rows)
        for one in algorithm.local
        for phase in one.phases
        for move in phase.moves
        for name in move.names
    }
    tables = {n for n in params if algorithm.specs[n].axis is Axis.ITEM} if dense else set()
    before = {name: params[name].clone() for name in {*algorithm.sent, *tables}}
    gradients = {n: torch.zeros_like(before[n]) for n in algorithm.sent} if algorithm.upload.kind == "gradient" else {}
    return Block(place, examples, rows, params, before, memory, gradients)


def _memory(
    algorithm: Algorithm, task: Task, name: str, value: Tensor, rule: Optimiser, place: Place, rows: I64
) -> tuple[Tensor, ...]:
    fresh = rule.memory(value)
    if not rule.persistent:
        return tuple(fresh)
    stored = (
        devices.read(task.held, f"memory/{name}.{i}", algorithm.specs[name], place, part.numpy())
        for i, part in enumerate(fresh)
    )
    result = tuple(torch.from_numpy(np.array(part)) for part in stored)
    if algorithm.specs[name].axis is Axis.ITEM:
        still = torch.from_numpy(~_trained(place, rows))
        for part in result:
            part[still] = 0  # a row that no example trains does not drift on old momentum
    return result


def _trained(place: Place, rows: I64) -> Array:
    """Which of a block's item rows some example trains; a dense block holds others too, and they stand still."""
    mask = np.zeros(place.touched.values.size, dtype=bool)
    mask[rows] = True
    return mask


def batches(block: Block, one: Pass, ctx: Context) -> Iterator[tuple[int, Batch]]:
    """Steps of a pass: (number of clients still at work, their batch)."""
    examples, size = block.examples, one.batch_size
    lengths = np.diff(examples.offsets)
    for epoch in range(one.epochs):
        order = shuffled(examples.offsets, block.place.clients, seed=ctx.seed, round=ctx.round, epoch=epoch)
        for start in range(0, int(lengths.max(initial=0)), size):
            left = np.clip(lengths - start, 0, size)
            active = int((left > 0).sum())
            width = int(left[:active].max())
            column = np.minimum(np.arange(width), (left[:active] - 1)[:, None])  # padding repeats the last example
            at = order[examples.offsets[:active, None] + start + column]
            weight = np.arange(width) < left[:active, None]
            yield active, _batch(block, at, weight)


def _batch(block: Block, at: I64, weight: Array) -> Batch:
    lone = (block.place.members.lengths == 1).all()  # one user each: one vector serves the whole row
    users = np.arange(at.shape[0])[:, None] if lone else block.examples.users[at].astype(np.int64)
    return Batch(
        items=torch.from_numpy(block.rows[at]),
        users=torch.from_numpy(users),
        labels=torch.from_numpy(block.examples.labels[at]),
        weight=torch.from_numpy(weight.astype(np.float32)),
    )


def advance(
    algorithm: Algorithm, block: Block, active: int, batch: Batch, phases: tuple[Phase, ...], ctx: Context
) -> Block:
    """One batch of the first `active` clients: each phase takes its gradient and moves."""
    for number, phase in enumerate(phases):
        heads = {name: _head(algorithm, block, name, value, active) for name, value in block.params.items()}
        leaves = {name: heads[name].detach().requires_grad_() for name in phase.names}
        losses = algorithm.objective(algorithm.model, View(heads | leaves, batch), batch, ctx)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        if number == 0:
            block.loss += float((losses.detach() * batch.weight.sum(1)).sum())
        for move in phase.moves:
            rate = value_of(move.rate, ctx)
            for name in move.names:
                gradient = gradients[list(leaves).index(name)]
                if name in block.gradients:
                    _head(algorithm, block, name, block.gradients[name], active).add_(gradient)
                    continue
                memory = tuple(_head(algorithm, block, name, m, active) for m in block.memory[name])
                move.rule.step(heads[name], gradient, memory, rate)
    return block


def _head(algorithm: Algorithm, block: Block, name: str, value: Tensor, active: int) -> Tensor:
    """The part of a block's tensor that belongs to its first clients (a view: it moves with the whole)."""
    axis = algorithm.specs[name].axis
    if axis is Axis.WHOLE:
        return value[:active]
    owned = block.place.touched if axis is Axis.ITEM else block.place.members
    return value[: int(owned.offsets[active])]


def finish(algorithm: Algorithm, block: Block) -> tuple[Sum, Held]:
    """What is sent, summed in fixed point, and what stays. Only names whose role says so are sent."""
    trained = _trained(block.place, block.rows)
    if not trained.all():  # a dense block: weight decay and momentum have no business in rows without examples
        still = torch.from_numpy(~trained)
        for name in (n for n in block.before if algorithm.specs[n].axis is Axis.ITEM):
            block.params[name][still] = block.before[name][still]
    upload = Sum(
        totals={name: _total(algorithm, block, name) for name in algorithm.sent},
        touched=np.bincount(block.place.touched.values[trained], minlength=block.place.n_items),
        clients=block.place.clients.size,
        examples=block.examples.items.size,
        loss=block.loss,
    )
    stays = {f"private/{name}": (name, block.params[name]) for name in algorithm.private}
    for one in algorithm.local:
        for move in (move for phase in one.phases for move in phase.moves if move.rule.persistent):
            for name in move.names:
                stays |= {f"memory/{name}.{i}": (name, m) for i, m in enumerate(block.memory[name])}
    rows = replace(block.place, touched=block.place.touched.only(trained))
    held = {
        key: (rows, value.numpy()[trained]) if algorithm.specs[name].axis is Axis.ITEM else (block.place, value.numpy())
        for key, (name, value) in stays.items()
    }
    return upload, held


def _total(algorithm: Algorithm, block: Block, name: str) -> Any:
    change = block.gradients[name] if name in block.gradients else block.params[name] - block.before[name]
    spec = algorithm.specs[name]
    rows = block.place.touched.values if spec.axis is Axis.ITEM else np.zeros(change.shape[0], dtype=np.int32)
    total = np.zeros((block.place.n_items if spec.axis is Axis.ITEM else 1, *spec.shape), dtype=np.int64)
    add_rows(total, rows, change.numpy())
    return total if spec.axis is Axis.ITEM else total[0]


def apply(algorithm: Algorithm, server: State, total: Sum, ctx: Context) -> dict[str, Array]:
    """The server's step on every sent parameter; state in, state out."""
    result = dict(server)
    for name in algorithm.sent:
        count = len([k for k in server if k.startswith(f"rule/{name}.")])
        memory = tuple(server[f"rule/{name}.{i}"] for i in range(count))
        value, memory = algorithm.server.step(
            algorithm.specs[name], algorithm.upload, server[f"server/{name}"], memory, total, ctx
        )
        result[f"server/{name}"] = value
        result |= {f"rule/{name}.{i}": m for i, m in enumerate(memory)}
    return result


def probe_scores(algorithm: Algorithm, task: Task, block: Block, asked: Ragged) -> Array:
    """Scores of the items asked of each of the block's users, with the block's parameters as they are now."""
    width = int(asked.lengths.max(initial=0))
    if width == 0:
        return np.empty(0, dtype=np.float32)
    spread = np.minimum(np.arange(width), np.maximum(asked.lengths - 1, 0)[:, None]) + asked.offsets[:-1, None]
    items = asked.values[np.minimum(spread, asked.values.size - 1)]
    scores = score_users(algorithm, task, block, items)
    mask = np.arange(width) < asked.lengths[:, None]
    result: Array = scores[mask]
    return result


def score_users(algorithm: Algorithm, task: Task, block: Block, items: Array) -> Array:
    """Scores [users, width] of given items, one row per user of the block.

    A row the block holds is read from it; any other item reads as the server sent it (or as it began).
    """
    owner = block.place.members.rows
    keys = block.place.row_keys
    order = np.argsort(keys)
    wanted = block.place.clients[owner][:, None] * block.place.n_items + items
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), max(keys.size - 1, 0))
    held = keys[order[at]] == wanted if keys.size else np.zeros(wanted.shape, dtype=bool)
    params: dict[str, Tensor] = {}
    for name, value in block.params.items():
        spec = algorithm.specs[name]
        if spec.axis is Axis.ITEM:
            base = task.server[name] if name in task.server else first_table(spec, task.ctx.seed, block.place.n_items)
            rows = base[items]
            rows[held] = value.numpy()[order[at[held]]]
            params[name] = torch.from_numpy(rows.reshape(-1, *spec.shape))
        else:
            params[name] = value if spec.axis is Axis.USER else value[torch.from_numpy(owner)]
    n_users, width = items.shape
    batch = Batch(
        items=torch.arange(n_users * width).reshape(n_users, width),
        users=torch.arange(n_users)[:, None],
        labels=torch.zeros(0),
        weight=torch.zeros(0),
    )
    with torch.no_grad():
        return np.asarray(algorithm.model.score(View(params, batch), batch.items).numpy())
