"""Answers: scores of items for users, as their devices would give them.

newest     with the server's newest parameters and the device's own
tuned      with the copy a device tuned in its last round; that round is run again from what it held and received
served     with what the device rebuilds from its history when it is asked (`Algorithm.serve`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.parameters import STORED, Axis, Role, first_table
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.core.ragged import I64, Ragged, offsets_of, slots
from fedmosaic.data.batches import Examples
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines import devices
from fedmosaic.engines.block import Block, Outcome, Task
from fedmosaic.engines.devices import Array, Place
from fedmosaic.engines.fused import pair as kernel_pair
from fedmosaic.engines.fused import pieces as fused
from fedmosaic.engines.round import load
from fedmosaic.training.method import State

SCORES_PER_BLOCK = 50_000  # a layer's output stays below what is fetched from the system anew each time
SCORES_PER_CALL = 8_000_000  # of a fused engine, which holds no layer's output for more than a batch
Engine = Callable[[Algorithm, Task], Outcome]


def probe_scores(algorithm: Algorithm, task: Task, block: Block, asked: Ragged) -> Array:
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
    numbers = task.data.number(place.clients)
    examples = Examples(nothing, none, nothing, nothing, offsets, place.members, numbers)
    params = {name: load(algorithm, task, place, name) for name in algorithm.specs}
    return Block(place, examples, nothing.astype(np.int64), params, {}, {}, {}, {}, {})


def common_tables(algorithm: Algorithm, state: State) -> dict[str, Array]:
    """Rows and layers of one client that holds everybody."""
    n_items, found = int(state["n_items"][0]), {}
    everything = Ragged(np.arange(n_items, dtype=np.int32), np.array([0, n_items]))
    place = Place(np.zeros(1, np.int64), Ragged.from_rows([[]]), everything, n_items)
    for name, spec in algorithm.specs.items():
        if spec.axis is Axis.ITEM:
            first = first_table(spec, int(state["seed"][0]), n_items)
            found[name] = devices.read(state, algorithm.shelf(name), spec.axis, place, first)
        elif spec.axis is Axis.WHOLE:
            found[name] = state[algorithm.shelf(name)][0]
    return found


def in_common(algorithm: Algorithm, data: TrainingSet, state: State) -> tuple[Algorithm, TrainingSet, State]:
    """One client that holds everybody, seen as a server and its users: rows and layers are common, vectors their own.

    Answers are the same, and found in the ways that are short for common tables.
    """
    tables = common_tables(algorithm, state)
    roles = {**algorithm.roles, **dict.fromkeys(tables, Role.SHARED)}
    server = {f"server/{name}": table for name, table in tables.items()}
    last = {"last": np.zeros(data.n_users, np.int64)}
    return replace(algorithm, roles=roles, local=()), replace(data, silos=None), {**state, **server, **last}


@dataclass(frozen=True, eq=False)
class DeviceScorer:
    """Scores for users, from what their devices hold."""

    algorithm: Algorithm
    run: Engine
    data: TrainingSet
    state: State
    fused: bool = False  # whether `run` is a fused engine

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue, [users, items]."""
        if kernel_pair.answers(self.algorithm, self.data):
            task = task_of(self.algorithm, self.data, self.state, self.context(0), users)
            return kernel_pair.scores(self.algorithm, task)
        result = np.empty((users.size, self.data.n_items), dtype=np.float32)
        worked = self.fused and (self.algorithm.keeps or self.algorithm.serve)
        step = max(1, (SCORES_PER_CALL if worked else SCORES_PER_BLOCK) // self.data.n_items)
        everything = np.arange(self.data.n_items, dtype=np.int32)
        for at in range(0, users.size, step):
            part = users[at : at + step]
            items = np.broadcast_to(everything, (part.size, everything.size))
            result[at : at + step] = self._answer(part, items)
        return result

    def pairs(self, probe: Ragged, who: I64 | None = None) -> Array:
        """Scores of a few items per user (all, or `who`) with the newest state, flat like the probe."""
        shared = self._linear()
        if shared is not None:
            item, user, bias = shared
            chosen = slice(None) if who is None else who
            flat: Array = fused.linear_pairs(item, user[chosen], bias[chosen], probe)
            return flat
        everybody = np.arange(self.data.n_users) if who is None else who
        if kernel_pair.answers(self.algorithm, self.data):
            task = task_of(self.algorithm, self.data, self.state, self.context(0), everybody, probe)
            return kernel_pair.scores(self.algorithm, task)
        width = max(int(probe.lengths.max(initial=0)), 1)
        result = np.empty(probe.values.size, dtype=np.float32)
        answer = self._served if self.algorithm.serve else self._newest
        read = self.data.histories.lengths[everybody] if self.algorithm.history else np.zeros(len(probe), np.int64)
        for places in _blocks(width + read):
            items, mask = _padded(probe.take(places), width)
            result[slots(probe, places)] = answer(everybody[places], items)[mask]
        return result

    def _answer(self, users: I64, items: Array) -> Array:
        if self.algorithm.serve:
            return self._served(users, items)
        result = np.empty(items.shape, dtype=np.float32)
        last = self.state["last"][self.data.owners()[users]] * int(self.algorithm.keeps)
        for round in np.unique(last):
            who = np.flatnonzero(last == round)
            one = self._newest if round == 0 else partial(self._tuned, round=int(round))
            result[who] = one(users[who], _some(items, who))
        return result

    def context(self, round: int) -> Context:
        """What a device knows about a round."""
        return Context(round, int(self.state["seed"][0]), self.data.n_items, self.data.n_clients)

    def _linear(self) -> tuple[Array, Array, Array] | None:
        """Table, vectors and biases, where scores are plain products with the server's table."""
        algorithm, state = self.algorithm, self.state
        shared = algorithm.roles.get("item") in (Role.SHARED, Role.PERSONALISED)
        if not isinstance(algorithm.model, LinearScorer) or not shared or algorithm.serve:
            return None
        user = state["private/user"]
        bias = state["private/bias"][:, 0] if "private/bias" in state else np.zeros(user.shape[0], dtype=np.float32)
        return state["server/item"], user, np.ascontiguousarray(bias)

    def _newest(self, users: I64, items: Array) -> Array:
        """With the server's newest parameters and the device's own."""
        shared = self._linear()
        if shared is not None:
            item, user, bias = shared
            asked = Ragged(items.ravel(), np.arange(users.size + 1) * items.shape[1])
            scores: Array = fused.linear_pairs(item, user[users], bias[users], asked).reshape(items.shape)
            return scores
        algorithm, data = self.algorithm, self.data
        owners = data.owners()[users]
        clients, of_client = np.unique(owners, return_inverse=True)
        order = np.argsort(of_client, kind="stable")
        members = Ragged.group(of_client[order], users[order], clients.size)
        own_rows = any(algorithm.specs[n].axis is Axis.ITEM for n in algorithm.stored)
        asked = Ragged.from_rows([[]] * clients.size)
        if own_rows:
            many = items[:1] if clients.size == 1 and items.strides[0] == 0 else items
            asked = Ragged.group(np.repeat(of_client[: many.shape[0]], many.shape[1]), many.ravel(), clients.size)
        task = task_of(algorithm, data, self.state, self.context(0), clients)
        block = holding(algorithm, task, Place(clients, members, asked, data.n_items))
        result = np.empty(items.shape, dtype=np.float32)
        result[order] = score_users(algorithm, task, block, _some(items, order))
        return result

    def _tuned(self, users: I64, items: Array, round: int) -> Array:
        """Run the owners' last round again, from what they held and received then, and answer with the outcome."""
        return self._worked(self.algorithm, past_of(self.algorithm, self.state, round), users, items, round)

    def _served(self, users: I64, items: Array) -> Array:
        """Do the work a device does when it is asked, and answer with the outcome."""
        algorithm = replace(self.algorithm, local=self.algorithm.serve)
        return self._worked(algorithm, self.state, users, items, int(self.state["last"].max(initial=0)))

    def _worked(self, algorithm: Algorithm, state: State, users: I64, items: Array, round: int) -> Array:
        """Scores after local work of the users' clients."""
        owners = np.unique(self.data.owners()[users])
        members = self.data.members(owners).values.astype(np.int64)
        row = np.full(self.data.n_users, -1)
        row[users] = np.arange(users.size)
        wanted = row[members] >= 0  # the other users of a silo are not asked
        lengths = np.where(wanted, items.shape[1], 0)
        asked = Ragged(items[row[members[wanted]]].ravel(), offsets_of(lengths))
        done = self.run(algorithm, task_of(algorithm, self.data, state, self.context(round), owners, asked))
        assert done.probed is not None
        result = np.empty(items.shape, dtype=np.float32)
        result[row[members[wanted]]] = done.probed.reshape(-1, items.shape[1])
        return result


def past_of(algorithm: Algorithm, state: State, round: int) -> State:
    """What clients that were last drawn in a round held and received before it."""
    version = int(np.flatnonzero(state["given.round"] == round)[0])
    past = {f"server/{n}": state[f"given/{n}"][version] for n in algorithm.received}
    return past | {algorithm.shelf(n): state[f"before/{n}"] for n in algorithm.stored}


def task_of(
    algorithm: Algorithm, data: TrainingSet, state: State, ctx: Context, cohort: I64, probe: Ragged | None = None
) -> Task:
    """What an engine needs for a round."""
    server = {n: state[f"server/{n}"] for n in algorithm.received}
    held = {k: v for k, v in state.items() if k.startswith(("private/", "kept/", "memory/"))}
    return Task(data, server, held, ctx, cohort, probe)
