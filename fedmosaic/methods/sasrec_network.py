"""The network of SASRec, the gradient of its loss, and threads that compute alone.

    x_t = sqrt(d) · E[item_t] + P[steps from t to the end]
    x   = x + drop(attention(norm(x)))        x = x + drop(W2 relu(W1 norm(x)))        as many times as there are blocks
    score(j) = norm(x_last) · E[j]

Padding exists only inside attention, behind the events, where no event can see it; all other work is done on the events
alone. The gradient of the loss is written down, p - [j is the target], and taken in pieces that fit a cache: the scores
of an epoch (all events times all items) are most of the work and never exist as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmosaic.core import keys
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.threads import deal, thread_count
from fedmosaic.data.batches import within

T = TypeVar("T")
SCORES = 1 << 20  # of a piece of the loss


@dataclass(frozen=True, eq=False)
class Walks:
    """Events of some users, user after user: item, steps to the user's last, and place in a padded grid."""

    items: Tensor
    ago: Tensor
    slot: Tensor
    grid: tuple[int, int]  # users, longest history

    @classmethod
    def of(cls, events: Ragged) -> Walks:
        """Histories as they are read."""
        width = int(events.lengths.max(initial=1))
        places = events.rows.astype(np.int64) * width + within(events)
        items, ago, slot = (torch.from_numpy(p) for p in (events.values.astype(np.int64), to_last(events), places))
        return cls(items, ago, slot, (len(events), width))


@dataclass(frozen=True, eq=False)
class Network:
    """Parameters by name (`item` is E with one row more, that of the beginning), and how they are arranged."""

    params: Mapping[str, Tensor]
    blocks: int
    heads: int

    @classmethod
    def of(cls, arrays: Mapping[str, Any], blocks: int, heads: int) -> Network:
        """A copy, in memory of PyTorch's own: where a state came from, and its alignment, changes no bit of a sum."""
        return cls({n: torch.tensor(v) for n, v in arrays.items()}, blocks, heads)

    def read(self, walks: Walks, drop: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """norm(x) after each event, [events, width]; drop: what training does to numbers."""
        x = sqrt(self.params["item"].shape[1]) * functional.embedding(walks.items, self.params["item"])
        x = drop(x + functional.embedding(walks.ago, self.params["place"]))
        for b in range(self.blocks):
            x = x + drop(self._attention(self._norm(x, f"{b}.before"), walks, b))
            inner = torch.relu(self._linear(self._norm(x, f"{b}.between"), f"{b}.inner"))
            x = x + drop(self._linear(inner, f"{b}.outer"))
        return self._norm(x, "after")

    def _attention(self, x: Tensor, walks: Walks, b: int) -> Tensor:
        (users, width), d = walks.grid, x.shape[1]
        padded = x.new_zeros(users * width, 3 * d).index_copy(0, walks.slot, self._linear(x, f"{b}.mixed"))
        query, key, value = padded.view(users, width, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        flat = seen.transpose(1, 2).reshape(users * width, d)
        return self._linear(functional.embedding(walks.slot, flat), f"{b}.joined")  # a gather with a quick gradient

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.params[name], self.params[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[1:], self.params[f"{name}.scale"], self.params[f"{name}.bias"])

    def scores(self, events: Ragged) -> Tensor:
        """Scores of the whole catalogue behind each history."""
        with torch.no_grad():
            last = self.read(Walks.of(events))[torch.from_numpy(events.offsets[1:] - 1)]
            return last @ self.params["item"][:-1].T

    def slopes(self, events: Ragged, drawn: Tensor, drop: Callable[[Tensor], Tensor]) -> tuple[float, list[Tensor]]:
        """The sum of the losses of predicting every event but the first of each row, and its gradient, by parameter.

        drawn: the items of the softmax, see `cross_entropy`.
        """
        leaves = {n: v.detach().requires_grad_() for n, v in self.params.items()}
        targets = torch.from_numpy(events.values[within(events) > 0].astype(np.int64))
        found = Network(leaves, self.blocks, self.heads).read(Walks.of(events.only(to_last(events) > 0)), drop)
        wanted = functional.embedding(targets, leaves["item"])
        loss, of_found, of_wanted, of_drawn = cross_entropy(
            found.detach(), wanted.detach(), targets, self.params["item"], drawn
        )
        found_slopes = torch.autograd.grad([found, wanted], list(leaves.values()), [of_found, of_wanted])
        slopes = dict(zip(leaves, found_slopes, strict=True))
        slopes["item"].index_add_(0, drawn, of_drawn)
        return loss, list(slopes.values())


def cross_entropy(
    found: Tensor, wanted: Tensor, targets: Tensor, table: Tensor, drawn: Tensor
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Sum over events of log(sum over j of w_j exp(x · E_j)) - x · E_target, and its slopes: of x, E_target, E_drawn.

    found: x, a row per event. wanted: the targets' rows of the table. drawn: which items stand for all, n of N; those
    that are not the target have weight w = N / n, and the target is always among them, with weight 1.
    """
    rows, weight = table[drawn], log((table.shape[0] - 1) / drawn.numel())
    column = torch.full((table.shape[0],), -1).index_copy_(0, drawn, torch.arange(drawn.numel()))[targets]
    loss, of_found, of_wanted, of_rows = 0.0, torch.empty_like(found), torch.empty_like(found), torch.zeros_like(rows)
    size = max(1, SCORES // drawn.numel())
    for at in range(0, found.shape[0], size):
        part = slice(at, at + size)
        own = (found[part] * wanted[part]).sum(1, keepdim=True) - weight  # instead of adding it to all others
        scores = found[part] @ rows.T
        hit = column[part].ge(0).nonzero().squeeze(1)
        scores[hit, column[part][hit]] = -torch.inf
        top = torch.maximum(scores.amax(1, keepdim=True), own)
        likely, right = scores.sub_(top).exp_(), (own - top).exp()
        whole = likely.sum(1, keepdim=True) + right
        loss += float((whole.log() + top - own).sum())
        likely /= whole
        miss = right / whole - 1
        of_found[part] = torch.addmm(miss * wanted[part], likely, rows)
        of_wanted[part] = miss * found[part]
        of_rows.addmm_(likely.T, found[part])
    return loss, of_found, of_wanted, of_rows


def dropping(share: float, draws: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Numbers set to zero at random, the others raised so that the mean stays."""
    return lambda x: x * torch.empty_like(x).bernoulli_(1 - share, generator=draws).div_(1 - share)


def drawing(key: keys.U64, part: int) -> torch.Generator:
    """Draws of a part of something that has a key."""
    return torch.Generator().manual_seed(int(keys.fold(key, keys.words(part)).astype(np.int64)[0]))


def to_last(events: Ragged) -> I64:
    """Steps from each event to the last of its row.

    >>> to_last(Ragged.from_rows([[7, 8, 9], [5]])).tolist()
    [2, 1, 0, 0]
    """
    return np.repeat(events.lengths, events.lengths) - 1 - within(events)


def side_by_side(work: Callable[[int], T], count: int) -> list[T]:
    """work(0) ... work(count - 1) on all threads, each of which computes alone; results in order.

    PyTorch's own threads wait for one another after every operation, which on a busy machine takes ten times as long.
    """
    todo, found, before = iter(range(count)), dict[int, T](), torch.get_num_threads()

    def run(worker: int) -> None:
        torch.set_num_threads(1)
        for at in todo:
            found[at] = work(at)

    try:
        deal(run, min(thread_count(), count))
    finally:
        torch.set_num_threads(before)
    return [found[at] for at in range(count)]
