"""What happens to uploads outside the local work: they are encoded and added up, gain noise, and move the server."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.upload import Parcel, UploadSum, add_rows
from fedmosaic.core import keys
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64
from fedmosaic.engines.state import Array, ServerState


def summed(algorithm: Algorithm, parcel: Parcel, shrunk: Mapping[str, Array]) -> tuple[dict[str, Any], int]:
    """Encode what some clients send and add it up; also, how many numbers of item tables are not zero.

    shrunk: per table that decays everywhere, what is left of every client's rows.
    """
    upload, totals, numbers = algorithm.upload, {}, 0
    parcel = upload.encode(parcel)
    for name, change in parcel.changes.items():
        spec, before, item = algorithm.specs[name], parcel.before[name], name in parcel.items
        if item and upload.support == "nonzero":
            numbers += int(np.count_nonzero((change + before) if upload.kind == "value" else change))
        if name in algorithm.spread:
            change = change - (shrunk[name] - 1)[parcel.owners[name]][:, None] * before
        rows = parcel.items[name] if item else np.zeros(change.shape[0], dtype=np.int32)
        total = np.zeros((parcel.ctx.n_items if item else 1, *upload.shape(spec)), dtype=np.int64)
        add_rows(total, rows, np.ascontiguousarray(change, dtype=np.float32))
        totals[name] = total if item else total[0]
    return totals, numbers


def add_noise(algorithm: Algorithm, total: UploadSum, client_ids: I64, ctx: Context) -> None:
    """What the clients' own noise adds to their sum, in place; on a device, there is one client."""
    if algorithm.upload.noise is not None:
        for name, value in total.totals.items():
            algorithm.upload.noise.add(value, name, client_ids, ctx)
    for name, variance in total.rest.items():  # rows without examples: one draw has the law of all clients' steps
        shape, stream = total.totals[name].shape, ctx.noise("rows without examples", name)
        if stream is not None:
            drawn = stream.gaussian(1.0, total.totals[name].size).reshape(shape)
        else:
            key = keys.derive(seed=ctx.own_seed, purpose=keys.Purpose.NOISE, round=ctx.round, client=client_ids)
            drawn = np.random.Generator(
                np.random.Philox(key=int(np.bitwise_xor.reduce(key)) ^ zlib.crc32(name.encode()))
            ).standard_normal(shape)
        drawn = drawn * np.sqrt(variance)[:, None]
        total.totals[name][:] += np.floor(drawn * SCALE + 0.5).astype(np.int64)


def apply(algorithm: Algorithm, server: ServerState, total: UploadSum, ctx: Context) -> ServerState:
    """The server's step on every sent parameter; state in, state out."""
    params, memory = dict(server.params), dict(server.memory)
    for name in algorithm.sent:
        params[name], memory[name] = algorithm.server.step(
            algorithm.specs[name], algorithm.upload, params[name], memory[name], total, ctx
        )
    return ServerState(params, memory)
