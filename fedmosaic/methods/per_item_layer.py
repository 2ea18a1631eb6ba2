"""A layer that has outputs for every item, of which each client is asked for a few.

    y_k = W[item_k] x[client_k] + b[item_k]        for the pairs k = (client, item) that are asked

A product of matrices would make all items of all clients. Here pairs are visited item by item, so that the rows of an
item are read once, and their gradient is written once, however many clients asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmosaic.core.compiler import entry
from fedmosaic.core.ragged import I64, Ragged, offsets_of
from fedmosaic.core.threads import deal, thread_count
from fedmosaic.engines.fused.pieces import FAST

BLOCKS = 16  # of items; their shares of a client's gradient are added in order, for any number of threads


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a client and an item, client after client, and their order by item.

    >>> asked = Pairs.of(Ragged.from_rows([[2, 0], [2]]), 3)
    >>> x, weight, bias = torch.eye(2), torch.arange(6.0).reshape(3, 1, 2), torch.zeros(3, 1)
    >>> asked.rows(x, weight, bias).flatten().tolist()
    [4.0, 0.0, 5.0]
    """

    clients: I64  # per pair
    order: I64  # pairs, item after item
    starts: I64  # where an item's begin

    @classmethod
    def of(cls, items: Ragged, n_items: int) -> Pairs:
        """The items that each client is asked for."""
        order = np.argsort(items.values, kind="stable")
        return cls(items.rows.astype(np.int64), order, offsets_of(np.bincount(items.values, minlength=n_items)))

    @property
    def arrays(self) -> tuple[I64, I64, I64]:
        """As compiled code reads them."""
        return self.clients, self.order, self.starts

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """y of every pair; x is [clients, inputs], weight [items, outputs, inputs], bias [items, outputs]."""
        found: Tensor = _Rows.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, asked: Pairs) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.asked = asked
        result = torch.empty(asked.order.size, bias.shape[1])
        tables, pairs = (_array(x), _array(weight), _array(bias), _array(result)), asked.arrays
        workers = thread_count()
        cuts = np.linspace(0, asked.starts.size - 1, workers + 1).astype(np.int64)
        deal(lambda w: _forward(*tables, pairs, cuts[w], cuts[w + 1]), workers)
        return result

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        asked, slope = ctx.asked, slopes[0].contiguous().numpy()
        shares = np.zeros((BLOCKS, *x.shape), np.float32)
        of_weight, of_bias = torch.empty_like(weight), torch.empty(weight.shape[:2])
        moved = (_array(of_weight), _array(of_bias), shares)
        tables, workers = (slope, _array(x), _array(weight), moved, asked.arrays), thread_count()
        cuts = np.linspace(0, BLOCKS, workers + 1).astype(np.int64)
        deal(lambda w: _backward(*tables, cuts[w], cuts[w + 1]), workers)
        return torch.from_numpy(shares.sum(0)), of_weight, of_bias, None


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


@entry(fastmath=FAST)
def _forward(x: Any, weight: Any, bias: Any, result: Any, pairs: Any, begin: Any, end: Any) -> None:
    clients, order, starts = pairs
    for item in range(begin, end):
        for k in range(starts[item], starts[item + 1]):
            own = x[clients[order[k]]]
            for n in range(bias.shape[1]):
                row, total = weight[item, n], np.float32(0)
                for h in range(own.size):
                    total += row[h] * own[h]
                result[order[k], n] = total + bias[item, n]


@entry(fastmath=FAST)
def _backward(slope: Any, x: Any, weight: Any, moved: Any, pairs: Any, first: Any, last: Any) -> None:
    of_weight, of_bias, shares = moved
    clients, order, starts = pairs
    items = starts.size - 1
    for block in range(first, last):
        share = shares[block]
        for item in range(block * items // shares.shape[0], (block + 1) * items // shares.shape[0]):
            of_weight[item] = 0
            of_bias[item] = 0
            for k in range(starts[item], starts[item + 1]):
                pair = order[k]
                own, mine = x[clients[pair]], share[clients[pair]]
                for n in range(of_bias.shape[1]):
                    part, row, change = slope[pair, n], weight[item, n], of_weight[item, n]
                    of_bias[item, n] += part
                    for h in range(own.size):
                        change[h] += part * own[h]
                        mine[h] += part * row[h]
