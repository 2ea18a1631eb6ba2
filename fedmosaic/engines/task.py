"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.state import Array, DeviceStore

PASSES = 1000  # shuffles of the second pass are numbered from here on, of the third from twice that


@dataclass(frozen=True, eq=False)
class Task:
    """A round's local work: data, the server's parameters, what devices hold, who takes part, and what is asked."""

    data: TrainingSet
    server: Mapping[str, Array]
    devices: DeviceStore
    ctx: Context
    cohort: I64
    query_items: Ragged | None = None  # per user of the cohort: items to score with the state after local work


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a round yields: the sum of uploads, what devices hold now, the scores that were asked for."""

    total: UploadSum
    devices: DeviceStore
    answers: Array | None  # flat, like the query
    sent: int | None = None  # bytes of a client, where they are not those of plain numbers


def users_of(members: Ragged, places: I64) -> I64:
    """Places among a cohort's users of the users of some of its clients."""
    everybody = Ragged(np.arange(members.values.size, dtype=np.int32), members.offsets)
    return everybody.take(places).values.astype(np.int64)
