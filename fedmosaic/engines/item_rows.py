"""Item rows as one device sees them: what it scores with, wrappers applied. For figures and for spectra."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.algorithm.wrappers.additive import AdditiveModel
from fedmosaic.algorithm.wrappers.mixing import MixedModel
from fedmosaic.core.ragged import Ragged
from fedmosaic.engines.answer import gathered, holding
from fedmosaic.engines.block import Block
from fedmosaic.engines.loop import work
from fedmosaic.engines.scorer import DeviceScorer
from fedmosaic.engines.state import Array, Place
from fedmosaic.engines.task import Task


def item_rows(scorer: DeviceScorer, user: int) -> dict[str, Array]:
    """Every item table of the model, [items, width], as the user's device reads it when it answers."""
    algorithm, task, block = _answering(scorer, user)
    items = np.arange(scorer.data.n_items, dtype=np.int32)[None]
    members = Ragged(np.array([user], dtype=np.int32), np.array([0, 1]))
    block.place = replace(block.place, members=members)
    params, given = gathered(algorithm, task, block, items)
    at = torch.arange(items.size)[None]
    model, view = _unwrapped(
        algorithm.model, View(params, Batch(at, torch.zeros(1, 1, dtype=torch.long), at, at), given)
    )
    names = [s.name for s in model.specs() if s.axis is Axis.ITEM]
    with torch.no_grad():
        return {name: np.asarray(view.rows(name, at)[0].numpy()) for name in names}


def _unwrapped(model: Model, view: View) -> tuple[Model, View]:
    """The innermost model, and the view through which its wrappers let it read."""
    while isinstance(model, AdditiveModel | MixedModel):
        view = model.read(view)
        model = model.host
    return model, view


def _answering(scorer: DeviceScorer, user: int) -> tuple[Algorithm, Task, Block]:
    """The block of a user's client in the state in which it answers."""
    algorithm, data, state = scorer.algorithm, scorer.data, scorer.state
    clients = data.owners()[[user]]
    last = int(state.last[clients[0]])
    if algorithm.serve:
        served = replace(algorithm, local=algorithm.serve)
        task = replace(scorer.newest(int(state.last.max())), cohort=clients)
        return served, task, work(served, task, clients, dense=False)
    if algorithm.answers_with_tuned_copy and last:
        task = replace(scorer.before(last), cohort=clients)
        return algorithm, task, work(algorithm, task, clients, dense=False)
    task = replace(scorer.newest(0), cohort=clients)
    everything = Ragged(np.arange(data.n_items, dtype=np.int32), np.array([0, data.n_items]))
    return algorithm, task, holding(algorithm, task, Place(clients, data.members(clients), everything, data.n_items))
