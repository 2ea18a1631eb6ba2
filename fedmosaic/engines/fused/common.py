"""What all fused engines need of a round: the user side, put in and back, the keys of every shuffle, the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Role
from fedmosaic.algorithm.upload import Sum
from fedmosaic.core import keys
from fedmosaic.core.errors import ScoreError
from fedmosaic.engines.block import PASSES, Task

PARTS = ("all", "support", "query")


def pass_tables(algorithm: Algorithm) -> tuple[Any, Any, Any, Any]:
    """Of each pass: epochs, batch size, part of the examples, and where its phases begin."""
    local = algorithm.local
    counts = np.array([(one.epochs, one.batch_size, PARTS.index(one.part)) for one in local], dtype=np.int64)
    phases = np.concatenate([[0], np.cumsum([len(one.phases) for one in local])])
    return counts[:, 0].copy(), counts[:, 1].copy(), counts[:, 2].copy(), phases


def user_side(algorithm: Algorithm, task: Task) -> tuple[Any, Any]:
    """Vectors and biases of the cohort: what devices hold, or (rebuilt) what they begin with."""
    found = []
    for name in ("user", "bias"):
        if name not in algorithm.specs:
            found.append(np.zeros((task.cohort.size, 1), dtype=np.float32))
        elif algorithm.roles[name] is Role.REBUILT:
            found.append(algorithm.specs[name].rows(task.ctx.seed, task.data.number(task.cohort)))
        else:
            found.append(task.held[f"private/{name}"][task.cohort])
    return found[0], found[1][:, 0].copy()


def put_back(algorithm: Algorithm, task: Task, user: Any, bias: Any) -> dict[str, Any]:
    """The device store with the cohort's new vectors and biases."""
    held = dict(task.held)
    for name, values in (("user", user), ("bias", bias[:, None])):
        if algorithm.roles.get(name) is Role.PRIVATE:
            new = task.held[f"private/{name}"].copy()
            new[task.cohort] = values
            held[f"private/{name}"] = new
    return held


def client_keys(task: Task, purpose: keys.Purpose) -> keys.U64:
    """Keys of the cohort's own draws."""
    ctx = task.ctx
    return keys.derive(seed=ctx.own_seed, purpose=purpose, round=ctx.round, client=task.data.number(task.cohort))


def shuffle_keys(algorithm: Algorithm, task: Task) -> Any:
    """Keys of every epoch of every pass, [epochs, cohort]."""
    key = client_keys(task, keys.Purpose.SHUFFLE)
    return np.stack(
        [
            keys.fold(key, keys.words(epoch + PASSES * number))
            for number, one in enumerate(algorithm.local)
            for epoch in range(one.epochs)
        ]
    )


def collected(
    totals: Any, touched: Any, losses: Any, seen: Any, healthy: Any, shrink: Mapping[str, int] | None = None
) -> Sum:
    """The workers' sums as one; values that no healthy training reaches are refused."""
    if not healthy.all():
        raise ScoreError("an upload holds NaN or huge values: training diverged; lower the learning rate")
    return Sum(
        totals={"item": totals.sum(axis=0)},
        touched=touched.sum(axis=0),
        clients=seen.size,
        examples=int(seen.sum()),
        loss=float((losses / np.maximum(seen, 1)).sum()),
        shrink=shrink or {},
    )
