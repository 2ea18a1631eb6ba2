"""Neural collaborative filtering (He et al., WWW 2017): the MLP and NeuMF; and a score function without a user vector.

MLP     z_0 = [u ; e],  z_l = ReLU(z_{l-1} W_l + b_l),  score = z_L · h + b
scorer  z_0 = e, the same: what is the user's own is the network (PFedRec, section 4)
NeuMF   score = [p * q ; z_L] · h + b, with separate vectors for the product and the tower
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING

from fedmosaic.algorithm.parameters import Axis, Init, Spec
from fedmosaic.algorithm.view import View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NCF:
    """The MLP form; `tower` are the widths after the concatenated vectors."""

    dim: int = 32
    tower: tuple[int, ...] = (32, 16, 8)
    init: Init = Init("normal", 0.01)

    def specs(self) -> tuple[Spec, ...]:
        """Vectors of width `dim`, then the tower and its output."""
        return (
            Spec("item", Axis.ITEM, (self.dim,), self.init),
            Spec("user", Axis.USER, (self.dim,), self.init),
            *_layers("mlp", (2 * self.dim, *self.tower)),
            *_layers("out", (self.tower[-1], 1)),
        )

    def score(self, view: View, items: Tensor) -> Tensor:
        """Tower over the pair."""
        return view.linear("out.0", _tower(view, items, "user", "item", len(self.tower))).squeeze(-1)


@dataclass(frozen=True)
class ScoreFunction:
    """A network on the item's row alone; without `layers` it is w · e + b, the linear scorer with w as a layer."""

    dim: int = 32
    layers: tuple[int, ...] = ()
    init: Init = Init("normal", 0.01)

    def specs(self) -> tuple[Spec, ...]:
        """Item rows, then the layers and the output."""
        widths = (self.dim, *self.layers)
        item = Spec("item", Axis.ITEM, (self.dim,), self.init)
        return (item, *_layers("mlp", widths), *_layers("out", (widths[-1], 1)))

    def score(self, view: View, items: Tensor) -> Tensor:
        """The network on the rows."""
        x = view.rows("item", items)
        for layer in range(len(self.layers)):
            x = view.linear(f"mlp.{layer}", x).relu_()
        return view.linear("out.0", x).squeeze(-1)


@dataclass(frozen=True)
class NeuMF:
    """Product and tower side by side; factor f: product width f, tower 4f -> 2f -> f."""

    factor: int = 8
    depth: int = 2
    init: Init = Init("normal", 0.01)
    xavier: bool = False  # layers begin as in the authors' NeuMF, rather than PyTorch's way

    def specs(self) -> tuple[Spec, ...]:
        """Two pairs of vectors, the tower, the output."""
        wide = self.factor * 2 ** (self.depth - 1)
        widths = tuple(wide * 2 // 2**i for i in range(self.depth + 1))
        last = self.factor + widths[-1]
        return (
            Spec("item.gmf", Axis.ITEM, (self.factor,), self.init),
            Spec("item.mlp", Axis.ITEM, (wide,), self.init),
            Spec("user.gmf", Axis.USER, (self.factor,), self.init),
            Spec("user.mlp", Axis.USER, (wide,), self.init),
            *_layers("mlp", widths, [sqrt(6 / (a + b)) for a, b in pairwise(widths)] if self.xavier else None),
            *_layers("out", (last, 1), [sqrt(3 / last)] if self.xavier else None),
        )

    def score(self, view: View, items: Tensor) -> Tensor:
        """Both parts into one output."""
        product = view.rows("item.gmf", items) * view.vector("user.gmf")
        deep = _tower(view, items, "user.mlp", "item.mlp", self.depth)
        return view.linear("out.0", product, deep).squeeze(-1)


def _tower(view: View, items: Tensor, user: str, item: str, depth: int) -> Tensor:
    x = view.linear("mlp.0", view.vector(user), view.rows(item, items)).relu_()
    for layer in range(1, depth):
        x = view.linear(f"mlp.{layer}", x).relu_()
    return x


def _layers(name: str, widths: tuple[int, ...], bounds: list[float] | None = None) -> list[Spec]:
    """Weights and biases of successive layers: PyTorch's usual uniform beginning, or given bounds and biases of 0."""
    specs = []
    for i, (wide, narrow) in enumerate(pairwise(widths)):
        usual = Init("uniform", 1 / sqrt(wide))
        weight, bias = (usual, usual) if bounds is None else (Init("uniform", bounds[i]), Init("zero"))
        specs += [
            Spec(f"{name}.{i}.weight", Axis.WHOLE, (wide, narrow), weight),
            Spec(f"{name}.{i}.bias", Axis.WHOLE, (narrow,), bias),
        ]
    return specs
