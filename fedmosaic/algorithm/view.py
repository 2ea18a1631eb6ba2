"""The view: how a model reads parameters, the same for one client and for thousands.

A batch is a block of examples [clients, length]; every client in it has its own rows, vectors and layers. A model asks
three verbs and never sees how many clients there are:

    rows("item", items)    the rows this example's client sees        [clients, length, width]
    vector("user")         the vector of this example's user          [clients, length, width]
    linear("mlp.0", x)     this client's layer applied to x           [clients, length, out]

Wrappers may also ask for a client's own tensor (`whole`), for rows as they are (`stored`) or as the server sent them
(`received`), and for the client's positives (`history`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from fedmosaic.algorithm.parameters import Spec
from fedmosaic.core.errors import UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One step of a block of clients. `items` and `users` index the block's own tables; padding has weight 0."""

    items: Tensor  # [clients, length] rows of the block's item tables
    users: Tensor  # [clients, length] or [clients, 1] rows of the block's user tables
    labels: Tensor  # [clients, length]
    weight: Tensor  # [clients, length] 1 for an example, 0 for padding
    direct: bool = False  # tables are read as they lie: a row per example, or rows that all clients share


@dataclass(frozen=True)
class View:
    """Parameters of a block of clients, read through a batch.

    `given` holds item tables as the server sent them, for those who compare; `history` the clients' own positives.
    `gathered` remembers which items were read last and what was found: terms of one loss read the same rows, which are
    then gathered, and differentiated, once.
    A wrapper changes what `rows` means for a name with `reading`.
    """

    params: Mapping[str, Tensor]
    batch: Batch
    given: Mapping[str, Tensor] = field(default_factory=dict)
    history: Batch | None = None
    readings: Mapping[str, tuple[Reading, ...]] = field(default_factory=dict)
    gathered: dict[tuple[str, str], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def rows(self, name: str, items: Tensor) -> Tensor:
        """Rows of an item table, as wrappers have it read; inside a reading, as the wrappers around it have."""
        readings = self.readings.get(name, ())
        if not readings:
            return self.stored(name, items)
        return readings[-1](replace(self, readings={**self.readings, name: readings[:-1]}), items)

    def stored(self, name: str, items: Tensor) -> Tensor:
        """Rows of an item table, as they are."""
        return self._rows("stored", self.params, name, items)

    def received(self, name: str, items: Tensor) -> Tensor:
        """Rows of an item table, as the server sent them."""
        return self._rows("received", self.given, name, items)

    @staticmethod
    def _named(params: Mapping[str, Tensor], name: str) -> Tensor:
        if name not in params:
            raise UnknownNameError("parameter", name, params)
        return params[name]

    def _rows(self, kind: str, params: Mapping[str, Tensor], name: str, items: Tensor) -> Tensor:
        table = self._named(params, name)
        if self.batch.direct and items is self.batch.items:
            rows = table.reshape(-1, items.shape[1], *table.shape[1:])
            return rows.expand(*items.shape, *table.shape[1:])
        asked, found = self.gathered.get((kind, name), (None, None))
        if found is None or asked is not items:
            found = _gather(table, items)
            self.gathered[kind, name] = items, found
        return found

    def reading(self, name: str, reading: Reading) -> View:
        """The same view, with `rows(name, ...)` read in another way, on top of how it was read."""
        return replace(self, readings={**self.readings, name: (*self.readings.get(name, ()), reading)})

    def vector(self, name: str) -> Tensor:
        """Row of a user table for each example; one that all examples of a client share keeps length 1."""
        return _gather(self._named(self.params, name), self.batch.users)

    def whole(self, name: str) -> Tensor:
        """A client's own tensor, [clients, ...]."""
        return self._named(self.params, name)

    def linear(self, name: str, *parts: Tensor) -> Tensor:
        """A layer of the client's own on the concatenated parts: [x_1 ; x_2 ; ...] W + b.

        The parts are never joined: each meets its own rows of W, and one that all examples share (length 1) only once.
        """
        weight, bias = self.params[f"{name}.weight"], self.params[f"{name}.bias"]
        begins = accumulate((part.shape[-1] for part in parts), initial=0)
        if weight.stride(0) == 0 and not weight.requires_grad:  # one layer for all clients: one product
            return _one_layer(weight[0], bias[0], parts, list(begins))
        result = bias.unsqueeze(1)
        for part, begin in sorted(zip(parts, begins, strict=False), key=lambda pair: pair[0].shape[1]):
            result = result.baddbmm(part, weight[:, begin : begin + part.shape[-1]])
        return result


def _one_layer(weight: Tensor, bias: Tensor, parts: tuple[Tensor, ...], begins: list[int]) -> Tensor:
    """[x_1 ; x_2 ; ...] W + b with one W for everybody; a part that all clients share meets it once."""
    result = bias
    for part, begin in sorted(zip(parts, begins, strict=False), key=lambda pair: pair[0].shape[1]):
        once = part[:1] if part.stride(0) == 0 else part
        product = once @ weight[begin : begin + part.shape[-1]]
        fits = result.dim() == 1 or product.shape[0] == result.shape[0]
        result = product.add_(result) if fits else product + result
    return result


Reading = Callable[[View, "Tensor"], "Tensor"]


def _gather(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1)).reshape(*index.shape, *table.shape[1:])


class Model(Protocol):
    """A score function and the parameters it reads."""

    def specs(self) -> tuple[Spec, ...]:
        """The parameters it reads: names, axes, shapes, beginnings."""
        ...

    def score(self, view: View, items: Tensor) -> Tensor:
        """One score per example, shape [clients, length]; the probability is its sigmoid."""
        ...
