"""One round as four pure functions, for a block of clients; a device is a block of one.

    begin(algorithm, task, clients)     -> Block      copies of what the clients received and what they hold
    advance(algorithm, block, turn)     -> Block      one batch: every phase takes a step
    finish(algorithm, block)            -> Sum, what stays
    apply(algorithm, server, total)     -> server'

The losses of all clients are added and differentiated once; no two clients own the same row, so every gradient is the
client's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context, Move, Phase, Rate, value_of
from fedmosaic.algorithm.parameters import Axis, Role, Spec, first_table
from fedmosaic.algorithm.upload import Parcel, Sum, add_rows, fixed
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.core.ragged import I64
from fedmosaic.engines import devices
from fedmosaic.engines.block import Block, Task, Turn, history_of, plan
from fedmosaic.engines.devices import Array, Place, Stored
from fedmosaic.training.method import State

Held = dict[str, Stored]  # name in the device store -> along which axis, where, what


def begin(algorithm: Algorithm, task: Task, clients: I64, *, dense: bool = False) -> Block:
    """Download and load: server rows for the items a client will touch, and its own private parameters."""
    dense = dense or algorithm.dense
    place, examples, rows = plan(algorithm, task, clients, dense=dense)
    params = {name: load(algorithm, task, place, name) for name in algorithm.specs}
    memory = {
        name: _memory(algorithm, task, name, params[name], move, place, rows)
        for move in algorithm.moves
        for name in move.names
    }
    tables = {n for m in algorithm.moves for n in m.names if algorithm.specs[n].axis is Axis.ITEM} if dense else set()
    still = set(algorithm.sent) if algorithm.upload.kind == "gradient" else set()  # what is sent stands still meanwhile
    before = {n: params[n] if n in still else params[n].clone() for n in {*algorithm.sent, *tables}}
    given = {n: before[n] for n in algorithm.received if n in before}
    given |= {n: _received(algorithm, task, place, n) for n in algorithm.names(Role.KEPT)}
    gradients = {n: torch.zeros(params[n].shape) for n in still}
    shrunk = {n: torch.ones(clients.size) for move in algorithm.moves if move.spreads for n in move.names}
    history = history_of(examples, rows, place, algorithm.watches) if algorithm.watches else None
    return Block(place, examples, rows, params, before, given, memory, gradients, shrunk, history)


def load(algorithm: Algorithm, task: Task, place: Place, name: str) -> Tensor:
    """A block's copy of a parameter, from whoever holds it at the beginning of a round."""
    spec, role = algorithm.specs[name], algorithm.roles[name]
    if role in (Role.SHARED, Role.PERSONALISED, Role.FROZEN):
        return _received(algorithm, task, place, name)
    kept = role is Role.KEPT  # rows the device has never trained are the server's
    fresh = _received(algorithm, task, place, name).numpy() if kept else first_values(spec, task, place)
    if role is Role.REBUILT:
        return torch.from_numpy(fresh)
    return torch.from_numpy(devices.read(task.held, algorithm.shelf(name), spec.axis, place, fresh))


def first_values(spec: Spec, task: Task, place: Place) -> Array:
    """What a device's own parameter is before its first round."""
    if spec.axis is Axis.ITEM:
        return np.asarray(first_table(spec, task.ctx.seed, place.n_items)[place.touched.values])
    return spec.rows(task.ctx.seed, task.data.number(place.users) if spec.axis is Axis.USER else place.clients * 0)


def _received(algorithm: Algorithm, task: Task, place: Place, name: str) -> Tensor:
    value = torch.from_numpy(task.server[name])
    if algorithm.specs[name].axis is Axis.ITEM:
        return value[torch.from_numpy(place.touched.values.astype(np.int64))]
    copies = value.expand(place.clients.size, *value.shape)
    stays = algorithm.upload.kind == "gradient" or algorithm.roles[name] is Role.FROZEN  # nobody moves it: one will do
    return copies if stays else copies.clone()


def _memory(
    algorithm: Algorithm, task: Task, name: str, value: Tensor, move: Move, place: Place, rows: I64
) -> tuple[Tensor, ...]:
    fresh = move.rule.memory(value)
    if not move.rule.persistent:
        return tuple(fresh)
    axis = algorithm.specs[name].axis
    stored = (devices.read(task.held, f"memory/{name}.{i}", axis, place, part.numpy()) for i, part in enumerate(fresh))
    result = tuple(torch.from_numpy(part) for part in stored)
    if axis is Axis.ITEM:
        still = torch.ones(value.shape[0], dtype=torch.bool)
        still[torch.from_numpy(rows)] = False
        for part in result:
            part[still] = 0  # a row that no example trains does not drift on old momentum
    return result


def advance(algorithm: Algorithm, block: Block, turn: Turn, phases: tuple[Phase, ...], ctx: Context) -> Block:
    """One batch of the first clients: each phase takes its gradient and moves."""
    history = None if block.history is None else _first(block.history, turn.active)
    given = {n: block.head(algorithm.specs[n].axis, v, turn.active) for n, v in block.given.items()}
    owners = {n: block.head(s.axis, block.owners[s.axis], turn.active) for n, s in algorithm.specs.items()}
    _prepare(algorithm, block, turn, history, given, ctx)
    for number, phase in enumerate(phases):
        heads = {n: block.head(algorithm.specs[n].axis, v, turn.active) for n, v in block.params.items()}

        def losses(values: Any, heads: dict[str, Tensor] = heads) -> Tensor:
            view = View({**heads, **values}, turn.batch, given, history)
            return algorithm.objective(algorithm.model, view, turn.batch, ctx)

        value, gradients = algorithm.slope(losses, {n: heads[n] for n in phase.names}, owners, ctx)
        if number == 0:
            counts = turn.batch.weight.sum(1).numpy().astype(np.int64)
            block.loss[: turn.active] += value.numpy() * counts
            block.seen[: turn.active] += counts
        for move in phase.moves:
            for name in move.names:
                _step(algorithm, block, turn, move, name, gradients[name], heads[name], owners[name], ctx)
    return block


def _step(
    algorithm: Algorithm, block: Block, turn: Turn, move: Move, name: str, gradient: Tensor, value: Tensor,
    owner: Tensor, ctx: Context,
) -> None:  # fmt: skip
    axis, rate = algorithm.specs[name].axis, value_of(move.rate, ctx)
    by_row: Rate = rate
    if turn.factor is not None:
        spread = turn.factor[owner].reshape(-1, *[1] * (gradient.ndim - 1))
        by_row = rate * spread
    if name in block.gradients:
        total = block.head(axis, block.gradients[name], turn.active)
        total.add_(gradient if turn.factor is None else gradient * spread)
        return
    memory = tuple(block.head(axis, m, turn.active) for m in block.memory[name])
    move.rule.step(value, gradient, memory, by_row)
    if name in block.shrunk:
        factor = 1.0 if turn.factor is None else turn.factor
        block.shrunk[name][: turn.active] *= 1 - move.spreads * rate * factor


def _prepare(
    algorithm: Algorithm, block: Block, turn: Turn, history: Batch | None, given: dict[str, Tensor], ctx: Context
) -> None:
    """Let the algorithm set what it computes rather than trains, at the moments it asked for."""
    prepare = algorithm.prepare
    moments = ("batch", "epoch", "round")
    if prepare is None or history is None or moments.index(turn.begins) < moments.index(prepare.when):
        return
    heads = {n: block.head(algorithm.specs[n].axis, v, turn.active) for n, v in block.params.items()}
    value = prepare(algorithm.model, View(heads, history, given, history), ctx)
    target = heads[prepare.name]
    if turn.factor is not None:
        value = torch.where(turn.factor.reshape(-1, *[1] * (value.ndim - 1)) > 0, value, target)
    target.copy_(value)


def _first(batch: Batch, active: int) -> Batch:
    return Batch(batch.items[:active], batch.users[:active], batch.labels[:active], batch.weight[:active])


def finish(algorithm: Algorithm, block: Block, ctx: Context) -> tuple[Sum, Held]:
    """What is sent, summed in fixed point, and what stays. Only names whose role says so are sent."""
    trained = np.ones_like(block.trained) if algorithm.whole else block.trained
    if not trained.all():  # a dense block: rows without examples stand still, unless decay reaches everywhere
        still = torch.from_numpy(~trained)
        for name in block.before:
            if algorithm.specs[name].axis is Axis.ITEM and name not in block.shrunk:
                block.params[name][still] = block.before[name][still]
    totals, numbers = _totals(algorithm, block, ctx)
    upload = Sum(
        totals=totals,
        touched=np.bincount(block.place.touched.values[trained], minlength=block.place.n_items),
        clients=block.place.clients.size,
        examples=int(block.seen.sum()),
        loss=float((block.loss / np.maximum(block.seen, 1)).sum()),
        shrink={n: sum(fixed(float(s) - 1) for s in block.shrunk[n]) for n in algorithm.spread},
        numbers=numbers,
    )
    return upload, _stays(algorithm, block, trained)


def _totals(algorithm: Algorithm, block: Block, ctx: Context) -> tuple[dict[str, Any], int]:
    """Sums of what a block sends, and how many numbers of item tables are not zero."""
    owners = {n: block.owners[algorithm.specs[n].axis] for n in algorithm.sent}
    changes = {n: block.gradients.get(n, block.params[n] - block.before[n]) for n in algorithm.sent}
    before = {n: block.before[n] for n in algorithm.sent}
    items = {n: block.place.touched.values for n in algorithm.sent if algorithm.specs[n].axis is Axis.ITEM}
    return summed(algorithm, Parcel(changes, before, owners, items, block.examples.numbers, ctx), block.shrunk)


def summed(algorithm: Algorithm, parcel: Parcel, shrunk: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Encode what some clients send and add it up."""
    upload, totals, numbers = algorithm.upload, {}, 0
    parcel = upload.encode(parcel)
    for name, change in parcel.changes.items():
        spec, before, item = algorithm.specs[name], parcel.before[name], name in parcel.items
        if item and upload.support == "nonzero":
            numbers += int(((change + before) if upload.kind == "value" else change).count_nonzero())
        if name in algorithm.spread:
            change = change - (shrunk[name] - 1)[parcel.owners[name]][:, None] * before
        rows = parcel.items[name] if item else np.zeros(change.shape[0], dtype=np.int32)
        total = np.zeros((parcel.ctx.n_items if item else 1, *upload.shape(spec)), dtype=np.int64)
        add_rows(total, rows, change.numpy())
        totals[name] = total if item else total[0]
    return totals, numbers


def _stays(algorithm: Algorithm, block: Block, trained: Array) -> Held:
    """What the devices keep: their own parameters and the memory of optimisers that last."""
    values = {algorithm.shelf(name): (name, block.params[name]) for name in algorithm.stored}
    for move in algorithm.moves:
        if move.rule.persistent:
            for name in move.names:
                values |= {f"memory/{name}.{i}": (name, m) for i, m in enumerate(block.memory[name])}
    rows = replace(block.place, touched=block.place.touched.only(trained))
    held: Held = {}
    for key, (name, value) in values.items():
        axis, kept = algorithm.specs[name].axis, value.numpy()
        if axis is not Axis.ITEM:
            held[key] = (axis, block.place, kept)
            continue
        held[key] = (axis, rows, kept[trained])
        if key == algorithm.shelf(name) and name in block.shrunk:
            held[f"{key}.scale"] = (Axis.WHOLE, block.place, block.shrunk[name].numpy())
    return held


def add_noise(algorithm: Algorithm, total: Sum, numbers: I64, ctx: Context) -> None:
    """What the clients' own noise adds to their sum, in place; on a device, there is one client."""
    if algorithm.upload.noise is not None:
        for name, value in total.totals.items():
            algorithm.upload.noise.add(value, name, numbers, ctx)


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
