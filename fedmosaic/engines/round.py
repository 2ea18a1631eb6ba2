"""One round as four functions, for a block of clients; a device is a block of one.

    begin(algorithm, task, clients)     -> Block      copies of what the clients received and what they hold
    train_batch(algorithm, block, turn) -> Block      every phase takes a step
    finish(algorithm, block)            -> UploadSum, what stays
    apply(algorithm, server, total)     -> server'    (uploads.py)

The block's copies move in place, nothing else does. The losses of all clients are added and differentiated once; no two
clients own the same row, so every gradient is the client's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context, ExampleGradients, Move, Phase, Rate, value_of
from fedmosaic.algorithm.objective import of_examples
from fedmosaic.algorithm.parameters import Axis, Role, Spec, first_table
from fedmosaic.algorithm.upload import Parcel, UploadSum
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import fixed
from fedmosaic.core.ragged import I64
from fedmosaic.engines.block import Block, Turn, history_of, plan
from fedmosaic.engines.state import Array, Kept, Piece, Place, read
from fedmosaic.engines.task import Task
from fedmosaic.engines.uploads import summed


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
    noised = [n for n in algorithm.step_noise if n in algorithm.sent and algorithm.specs[n].axis is Axis.ITEM]
    rest = {n: np.zeros(clients.size) for n in noised}
    history = history_of(examples, rows, place, algorithm.watches) if algorithm.watches else None
    return Block(place, examples, rows, params, before, given, memory, gradients, shrunk, history, rest)


def load(algorithm: Algorithm, task: Task, place: Place, name: str) -> Tensor:
    """A block's copy of a parameter, from whoever holds it at the beginning of a round."""
    spec, role = algorithm.specs[name], algorithm.roles[name]
    if role in (Role.SHARED, Role.PERSONALISED, Role.FROZEN):
        return _received(algorithm, task, place, name)
    kept = role is Role.KEPT  # rows the device has never trained are the server's
    fresh = _received(algorithm, task, place, name).numpy() if kept else first_values(spec, task, place)
    if role is Role.REBUILT:
        return torch.from_numpy(fresh)
    return torch.from_numpy(read(task.devices.params.get(name), spec.axis, place, fresh))


def first_values(spec: Spec, task: Task, place: Place) -> Array:
    """What a device's own parameter is before its first round."""
    if spec.axis is Axis.ITEM:
        return np.asarray(first_table(spec, task.ctx.seed, place.n_items)[place.touched.values])
    return spec.rows(task.ctx.seed, task.data.ids_of(place.users) if spec.axis is Axis.USER else place.clients * 0)


def _received(algorithm: Algorithm, task: Task, place: Place, name: str) -> Tensor:
    value = torch.from_numpy(task.server[name])
    if algorithm.specs[name].axis is Axis.ITEM:
        return value[torch.from_numpy(place.touched.values.astype(np.int64))]
    copies = value.expand(place.clients.size, *value.shape)
    stays = algorithm.upload.kind == "gradient" or algorithm.roles[name] is Role.FROZEN  # nobody moves it: one will do
    return copies if stays else copies.clone()


def _memory(
    algorithm: Algorithm, task: Task, name: str, value: Tensor, move: Move, place: Place, rows: I64
) -> tuple[Array, ...]:
    fresh = move.rule.memory(value.numpy())
    if not move.rule.persistent:
        return fresh
    axis, stored = algorithm.specs[name].axis, task.devices.memory.get(name)
    result = tuple(read(stored[i] if stored else None, axis, place, part) for i, part in enumerate(fresh))
    if axis is Axis.ITEM:
        still = np.ones(value.shape[0], dtype=bool)
        still[rows] = False
        for part in result:
            part[still] = 0  # a row that no example trains does not drift on old momentum
    return result


def train_batch(algorithm: Algorithm, block: Block, turn: Turn, phases: tuple[Phase, ...], ctx: Context) -> Block:
    """One batch of the first clients: each phase takes its gradient and moves."""
    history = None if block.history is None else _first(block.history, turn.active)
    given = {n: block.head(algorithm.specs[n].axis, v, turn.active) for n, v in block.given.items()}
    owners = {n: block.head(s.axis, block.owners[s.axis], turn.active) for n, s in algorithm.specs.items()}
    _prepare(algorithm, block, turn, history, given, ctx)
    for number, phase in enumerate(phases):
        heads = {n: block.head(algorithm.specs[n].axis, v, turn.active) for n, v in block.params.items()}
        losses = BlockLosses(algorithm, block, turn, heads, View(heads, turn.batch, given, history), ctx)
        value, gradients = algorithm.gradient(losses, {n: heads[n] for n in phase.names}, owners, ctx)
        if number == 0:
            counts = turn.batch.weight.sum(1).numpy().astype(np.int64)
            block.loss[: turn.active] += value.numpy() * counts
            block.seen[: turn.active] += counts
        for move in phase.moves:
            for name in move.names:
                _step(algorithm, block, turn, move, name, gradients[name], heads[name], owners[name], ctx)
    return block


@dataclass(frozen=True, eq=False)
class BlockLosses:
    """The losses of one step of a block (`Losses`), around the parameters in `heads`."""

    algorithm: Algorithm
    block: Block
    turn: Turn
    heads: Mapping[str, Tensor]
    view: View
    ctx: Context

    @property
    def counts(self) -> Tensor:
        """Examples of every client's batch; resting clients have one of weight 0."""
        return self.turn.batch.weight.sum(1).clamp(min=1)

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """One loss per client."""
        view = replace(self.view, params={**self.heads, **values}, gathered={})
        losses = self.algorithm.objective(self.algorithm.model, view, self.turn.batch, self.ctx)
        return _checked(losses, self.turn.active)

    def at(self, point: Mapping[str, Tensor]) -> BlockLosses:
        """The same around another point."""
        return replace(self, heads={**self.heads, **point})

    def each(self, names: Sequence[str]) -> dict[str, ExampleGradients]:
        """Every example with rows of its own: one derivative of the sum is then every example's."""
        specs, batch = self.algorithm.specs, self.turn.batch
        layers = [n for n in names if specs[n].axis is Axis.WHOLE]
        if not of_examples(self.algorithm.objective):
            raise SettingsError("this loss is no mean over examples, so that no example has a gradient of its own")
        if layers:
            raise SettingsError(f"gradients example by example are of rows; {', '.join(layers)} are layers")
        users = batch.users.expand(batch.items.shape)
        index = {n: users if s.axis is Axis.USER else batch.items for n, s in specs.items() if s.axis is not Axis.WHOLE}

        def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: v[index[n].reshape(-1)] if n in index else v for n, v in tensors.items()}

        params, grid = apart(self.heads), torch.arange(batch.items.numel()).reshape(batch.items.shape)
        leaves = {n: params[n].detach().requires_grad_() for n in names}
        alone = replace(batch, items=grid, users=grid)
        view = View({**params, **leaves}, alone, apart(self.view.given))
        losses = self.algorithm.objective(self.algorithm.model, view, alone, self.ctx)
        slopes = torch.autograd.grad(losses.sum(), list(leaves.values()))
        return {
            n: ExampleGradients(index[n], slope.reshape(*batch.items.shape, *slope.shape[1:]))
            for n, slope in zip(leaves, slopes, strict=True)
        }

    def normal(self, name: str) -> Tensor:
        """Draws keyed by (seed, round, client, step, name, row): the same for a device and for a block of many."""
        from fedmosaic.privacy.compiled import normal_rows

        axis, value, active = self.algorithm.specs[name].axis, self.heads[name], self.turn.active
        key = keys.derive(
            seed=self.ctx.own_seed, purpose=keys.Purpose.NOISE, round=self.ctx.round,
            client=self.block.examples.client_ids[:active],
        )  # fmt: skip
        key = keys.fold(key, keys.words(self.block.steps[:active] + (zlib.crc32(name.encode()) << 20)))
        owned = self.block.place.touched if axis is Axis.ITEM else self.block.place.members
        rows = int(owned.offsets[active])
        drawn = np.empty((rows, value[0].numel()), np.float32)
        if self.ctx.secret is None:
            normal_rows(drawn, keys.fold(key[owned.rows[:rows]], keys.words(owned.values[:rows])))
        else:
            for place, client in enumerate(self.block.examples.client_ids[:active]):
                own = drawn[owned.offsets[place] : owned.offsets[place + 1]]
                stream = self.ctx.noise("step", name, int(client), int(self.block.steps[place]))
                assert stream is not None
                own[:] = stream.gaussian(1.0, own.size).reshape(own.shape)
        if axis is Axis.ITEM:
            drawn[~self.block.trained[:rows]] = 0  # rows without examples gain theirs when they are sent
        return torch.from_numpy(drawn).reshape(value.shape)


def _checked(losses: Any, clients: int) -> Tensor:
    """One loss per client: a mean over clients would give everybody a share of the others' gradients."""
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (clients,):
        found = f"shape {list(losses.shape)}" if hasattr(losses, "shape") else type(losses).__name__
        raise SettingsError(
            f"an objective gives one loss per client, a tensor of shape [clients], here [{clients}]; this one gave "
            f"{found}. `mean(values, batch)` takes the mean over each client's examples"
        )
    return losses


def _step(
    algorithm: Algorithm, block: Block, turn: Turn, move: Move, name: str, gradient: Tensor, value: Tensor,
    owner: Tensor, ctx: Context,
) -> None:  # fmt: skip
    axis, rate = algorithm.specs[name].axis, value_of(move.rate, ctx)
    by_row: Rate = rate
    if turn.factor is not None:
        spread = turn.factor[owner].reshape(-1, *[1] * (gradient.ndim - 1))
        by_row = np.float32(rate) * spread.numpy()
    if name in block.gradients:
        total = block.head(axis, block.gradients[name], turn.active)
        total.add_(gradient if turn.factor is None else gradient * spread)
        return
    memory = tuple(block.head(axis, m, turn.active) for m in block.memory[name])
    move.rule.step(value.numpy(), gradient.contiguous().numpy(), memory, by_row)  # views: they move in place
    if name in block.shrunk:
        factor = 1.0 if turn.factor is None else turn.factor
        block.shrunk[name][: turn.active] *= 1 - move.spreads * rate * factor
    if name in block.rest:
        rates = rate * (np.ones(turn.active) if turn.factor is None else turn.factor.numpy().astype(np.float64))
        noise = algorithm.step_noise[name] / turn.batch.weight.sum(1).clamp(min=1).numpy()
        left = 1 - move.spreads * rates  # decay shrinks the noise of earlier steps too
        block.rest[name][: turn.active] = block.rest[name][: turn.active] * left**2 + (rates * noise) ** 2


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


def finish(algorithm: Algorithm, block: Block, ctx: Context) -> tuple[UploadSum, Kept]:
    """What is sent, summed in fixed point, and what stays. Only names whose role says so are sent."""
    trained = np.ones_like(block.trained) if algorithm.whole else block.trained
    if not trained.all():  # a dense block: rows without examples stand still, unless decay reaches everywhere
        still = torch.from_numpy(~trained)
        for name in block.before:
            if algorithm.specs[name].axis is Axis.ITEM and name not in block.shrunk:
                block.params[name][still] = block.before[name][still]
    totals, numbers = _totals(algorithm, block, ctx)
    upload = UploadSum(
        totals=totals,
        touched=np.bincount(block.place.touched.values[trained], minlength=block.place.n_items),
        clients=block.place.clients.size,
        examples=int(block.seen.sum()),
        loss=float((block.loss / np.maximum(block.seen, 1)).sum()),
        shrink={n: sum(fixed(float(s) - 1) for s in block.shrunk[n]) for n in algorithm.spread},
        numbers=numbers,
        rest={n: _rest(block, variance) for n, variance in block.rest.items()},
    )
    if algorithm.server.reduction.each:
        assert upload.clients == 1, "a server that sees every upload by itself needs blocks of one client"
        upload = replace(upload, parts=(upload,))
    return upload, _stays(algorithm, block, trained)


def _rest(block: Block, variance: Array) -> Array:
    """Per item, the noise that is due from clients without an example of it."""
    touched = block.place.touched.only(block.trained)
    there = np.bincount(touched.values, variance[touched.rows], minlength=block.place.n_items)
    return np.asarray(np.maximum(variance.sum() - there, 0))


def _totals(algorithm: Algorithm, block: Block, ctx: Context) -> tuple[dict[str, Any], int]:
    """Sums of what a block sends, and how many numbers of item tables are not zero."""
    axes = {n: algorithm.specs[n].axis for n in algorithm.sent}
    changes = {n: block.gradients.get(n, block.params[n] - block.before[n]).numpy() for n in axes}
    before = {n: block.before[n].numpy() for n in axes}
    owners = {n: block.owners[axis].numpy() for n, axis in axes.items()}
    if algorithm.server.weights == "size":
        size = block.seen.astype(np.float32)
        changes = {n: v * size[owners[n]].reshape(-1, *[1] * (v.ndim - 1)) for n, v in changes.items()}
    items = {n: block.place.touched.values for n, axis in axes.items() if axis is Axis.ITEM}
    shrunk = {n: left.numpy() for n, left in block.shrunk.items()}
    return summed(algorithm, Parcel(changes, before, owners, items, block.examples.client_ids, ctx), shrunk)


def _stays(algorithm: Algorithm, block: Block, trained: Array) -> Kept:
    """What the devices keep: their own parameters and the memory of optimisers that last."""
    rows = replace(block.place, touched=block.place.touched.only(trained))

    def piece(name: str, value: Array, shrunk: Array | None = None) -> Piece:
        axis = algorithm.specs[name].axis
        if axis is Axis.ITEM:
            return Piece(axis, rows, value[trained], shrunk)
        return Piece(axis, block.place, value)

    params = {}
    for name in algorithm.stored:
        left = block.shrunk[name].numpy() if name in block.shrunk else None
        params[name] = piece(name, block.params[name].numpy(), left)
    lasting = [n for move in algorithm.moves if move.rule.persistent for n in move.names]
    memory = {n: tuple(piece(n, part) for part in block.memory[n]) for n in lasting}
    return Kept(params, memory)
