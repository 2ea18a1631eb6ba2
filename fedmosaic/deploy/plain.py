"""Plain uploads: a node's sum as the tensors of an update, and the only way in, which checks all of them.

    NAME                    every row                                      support dense, and whole tensors
    NAME.rows, NAME         rows with examples, increasing, and their changes       touched; padded with other rows
    touched                 per row, how many clients trained it           only where the server divides by it

One client without noise sends float32, which the server turns into fixed point without loss; sums of many clients, and
sums with noise, are in fixed point already. `Rules.open_sum` checks everything before it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum, add_rows, padded_count
from fedmosaic.core.errors import ScoreError
from fedmosaic.core.fixed_point import LIMIT, SCALE
from fedmosaic.core.ragged import I64
from fedmosaic.deploy.protocol import Refused, UpdateMessage
from fedmosaic.engines.state import Array

LARGEST_SUM = float(1 << 22)  # of a node: a thousand of them stay far from the edge of 64 bits


def put_sum(algorithm: Algorithm, total: UploadSum, ctx: Context) -> dict[str, Array]:
    """A node's sum as the tensors of an update; the round's context draws the rows that pad."""
    upload = algorithm.upload
    tensors: dict[str, Array] = {}
    exact = total.clients == 1 and upload.noise is None
    for name, value in total.totals.items():
        sent: Array = (value / SCALE).astype(np.float32) if exact else value
        if algorithm.specs[name].axis is Axis.ITEM and upload.support in ("touched", "padded"):
            rows = np.flatnonzero(total.touched).astype(np.int32)
            if upload.support == "padded":
                rows = padded(rows, value.shape[0], ctx)
            tensors[f"{name}.rows"], sent = rows, sent[rows]
        tensors[name] = sent
    if algorithm.server.reduction.counts_senders:
        tensors["touched"] = total.touched.astype(np.int32)
    return tensors


def padded(rows: npt.NDArray[np.int32], n_items: int, ctx: Context) -> npt.NDArray[np.int32]:
    """Rows and others beside them, up to the next power of two: the size of a message then tells little.

    >>> padded(np.array([3, 5, 8], dtype=np.int32), 100, Context(1, 0, 100, 1)).size
    64
    """
    others = np.setdiff1d(np.arange(n_items, dtype=np.int32), rows)
    more = padded_count(rows.size, n_items) - rows.size
    stream = ctx.noise("padding")
    if stream is None:
        chosen = np.random.default_rng(abs(ctx.own_seed)).choice(others, more, replace=False)
    else:
        chosen = others[stream.some_of(others.size, more)]
    return np.sort(np.concatenate([rows, chosen])).astype(np.int32)


@dataclass(frozen=True)
class Rules:
    """What an update must be like to count."""

    algorithm: Algorithm
    n_items: int
    largest_norm: float | None = None  # of all a client sends
    row_quota: int | None = None  # rows a client may send

    def open_sum(self, update: UpdateMessage, server: Mapping[str, Array]) -> UploadSum:
        """The sum an update carries, every tensor checked; `Refused` names the first thing that is wrong.

        `server` has the parameters the update is about: a share of decay moves all of their rows.
        """
        names, left = self.algorithm.sent, dict(update.tensors)
        totals, square = {}, 0.0
        touched = np.zeros(self.n_items, dtype=np.int64)
        if self.algorithm.server.reduction.counts_senders:
            touched = self._touched(update, left)
        for name in names:
            rows = self._rows(name, left)
            value = left.pop(name, None)
            if value is None:
                raise Refused("tensors", f"{name} is missing")
            totals[name] = self._total(name, value, rows, update.clients)
            square += float(np.square(totals[name] / SCALE).sum())
            self._check_quota(name, totals[name], update.clients)
            if rows is not None and not self.algorithm.server.reduction.counts_senders:
                touched[rows] = 1
        if left:
            raise Refused("tensors", f"{', '.join(sorted(left))} were not asked for")
        shrink = self._shrink(update)
        square += sum(float(np.square(server[n]).sum()) * (s / SCALE) ** 2 for n, s in shrink.items())
        if self.largest_norm is not None and square > (self.largest_norm * update.clients) ** 2:
            raise Refused("norm", f"norm {square**0.5:.3g} of {update.clients} clients; {self.largest_norm:g} each")
        return UploadSum(totals, touched, update.clients, 0, 0.0, shrink)

    def _rows(self, name: str, left: dict[str, Array]) -> Array | None:
        rows = left.pop(f"{name}.rows", None)
        sparse = self.algorithm.specs[name].axis is Axis.ITEM and self.algorithm.upload.support in ("touched", "padded")
        if sparse != (rows is not None):
            raise Refused("tensors", f"{name}.rows " + ("is missing" if sparse else "was not asked for"))
        if rows is None:
            return None
        if rows.dtype != np.int32 or rows.ndim != 1:
            raise Refused("dtype", f"{name}.rows is {rows.dtype} of shape {rows.shape}, not a list of int32")
        if rows.size and (rows.min() < 0 or rows.max() >= self.n_items or (rows[1:] <= rows[:-1]).any()):
            raise Refused("ids", f"{name}.rows must increase and lie in 0 .. {self.n_items - 1}")
        return rows

    def _check_quota(self, name: str, total: I64, clients: int) -> None:
        if self.row_quota is None or self.algorithm.specs[name].axis is not Axis.ITEM or self._noisy:
            return
        moved = int(total.reshape(self.n_items, -1).any(1).sum())
        if moved > self.row_quota * clients:
            raise Refused("quota", f"{moved} rows of {clients} clients; {self.row_quota} each")

    @property
    def _noisy(self) -> bool:
        return self.algorithm.upload.noise is not None

    def _total(self, name: str, value: Array, rows: Array | None, clients: int) -> I64:
        spec, exact = self.algorithm.specs[name], clients == 1 and not self._noisy
        dtype = np.dtype(np.float32 if exact else np.int64)
        if value.dtype != dtype:
            raise Refused("dtype", f"{name} is {value.dtype}, not {dtype}")
        row, item = self.algorithm.upload.shape(spec), spec.axis is Axis.ITEM
        shape = (self.n_items if rows is None else rows.size, *row) if item else row
        if value.shape != shape:
            raise Refused("shape", f"{name} has shape {value.shape}, not {shape}")
        total = np.zeros((self.n_items, *row) if item else (1, *row), dtype=np.int64)
        at = np.arange(value.shape[0] if item else 1, dtype=np.int32) if rows is None else rows
        if not exact:
            limit = int(min(clients * LIMIT, LARGEST_SUM) * SCALE)
            if value.size and (int(value.max()) >= limit or int(value.min()) <= -limit):
                raise Refused("finite", f"{name} holds values that no healthy training reaches")
            total[at] = value if item else value[None]
        else:
            try:
                add_rows(total, at, value if item else value[None])
            except ScoreError:
                raise Refused("finite", f"{name} holds NaN or values that no healthy training reaches") from None
        return total if item else total[0]

    def _touched(self, update: UpdateMessage, left: dict[str, Array]) -> I64:
        value = left.pop("touched", None)
        if value is None or value.dtype != np.int32 or value.shape != (self.n_items,):
            raise Refused("tensors", "the counts of senders are missing or of another shape")
        if value.size and (value.min() < 0 or value.max() > update.clients):
            raise Refused("ids", "a row cannot have more senders than there are clients")
        return value.astype(np.int64)

    def _shrink(self, update: UpdateMessage) -> dict[str, int]:
        allowed = set(self.algorithm.spread)
        if set(update.shrink) != allowed:
            raise Refused("tensors", f"shares of decay for {sorted(update.shrink)}, expected {sorted(allowed)}")
        for name, value in update.shrink.items():
            if type(value) is not int or not -update.clients * SCALE <= value <= 0:
                raise Refused("finite", f"{name} decayed by an impossible share")
        return dict(update.shrink)
