"""Additive personalisation (FedRAP, ICLR 2024): an item is what all share plus what is one's own.

    item_j = common_j + own_j            common: shared; own: private, kept from round to round
    loss   = host's loss - apart(a) · mean (own - common)² + sparse(a) · norm(common)

Both terms are means over the rows of a batch and their numbers, as in the released code. The
minus sign pushes the two views apart, the norm is meant to make the shared one sparse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import sin, tanh
from typing import TYPE_CHECKING, Literal

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper, sent_tables, wrapped_with
from fedmosaic.algorithm.local import Context, Move, Pass, Phase, Schedule, value_of
from fedmosaic.algorithm.objective import Objective, mean, of_examples
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec, by_name
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.core.errors import SettingsError, one_of

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["l1", "l2", "nuclear", "infinity", "none"]
NORMS: tuple[Norm, ...] = ("l1", "l2", "nuclear", "infinity", "none")
Shape = Literal["tanh", "fixed", "sin", "square", "frac"]
SHAPES: dict[Shape, Callable[[int], float]] = {
    "tanh": lambda a: tanh(a / 10),
    "fixed": lambda a: 1.0,
    "sin": lambda a: (sin(a / 10) + 1) / 2,
    "square": lambda a: float(a // 5 % 2 == 0),
    "frac": lambda a: 1 / (a + 1),
}


@dataclass(frozen=True)
class Ramp:
    """A weight that changes over rounds: top · shape(a), where a counts rounds from 0 and lags by one.

    The released code computes its weights when a round is over, for the next: the first round has them as given, the
    second those of a = 0.

    >>> [round(Ramp(1.0, "tanh")(Context(r, 0, 1, 1)), 4) for r in (1, 2, 12)]
    [1.0, 0.0, 0.7616]
    """

    top: float
    shape: Shape = "tanh"

    def __post_init__(self) -> None:
        one_of("ramp", self.shape, SHAPES)

    def __call__(self, ctx: Context) -> float:
        """The weight in a round."""
        return self.top * (SHAPES[self.shape](ctx.round - 2) if ctx.round > 1 else 1.0)


def own(table: str) -> str:
    """The name of the own table beside a shared one."""
    return f"{table}.own"


@dataclass(frozen=True)
class AdditiveModel:
    """A host that reads some item tables as the sum of the shared rows and rows of one's own.

    init: how own rows begin; none: as the shared ones.
    """

    host: Model
    tables: tuple[str, ...]
    init: Init | None = None

    def specs(self) -> tuple[Spec, ...]:
        """The host's, and beside each of the tables one of the same shape."""
        shared = by_name(self.host.specs())
        beside = (Spec(own(t), Axis.ITEM, shared[t].shape, self.init or shared[t].init) for t in self.tables)
        return (*self.host.specs(), *beside)

    def score(self, view: View, items: Tensor) -> Tensor:
        """The host's score of common + own."""
        return self.host.score(self.read(view), items)

    def read(self, view: View) -> View:
        """A view of common + own, row by row."""
        for table in self.tables:
            view = view.reading(table, partial(_with_own, table))
        return view


def _with_own(table: str, view: View, items: Tensor) -> Tensor:
    return view.rows(table, items) + view.stored(own(table), items)


@dataclass(frozen=True)
class AdditiveObjective:
    """The host's loss, less `apart` times the distance of the views, plus `sparse` times a norm of the shared one."""

    host: Objective
    tables: tuple[str, ...]
    apart: Schedule
    sparse: Schedule
    norm: Norm

    def __post_init__(self) -> None:
        one_of("norm", self.norm, NORMS)

    @property
    def of_examples(self) -> bool:
        """Whether all its terms are means over examples; some norms are of all rows together."""
        return self.norm in ("l1", "l2", "none") and of_examples(self.host)

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        """One loss per client; of several tables the terms are added."""
        loss = self.host(model, view, batch, ctx)
        apart = value_of(self.apart, ctx)
        sparse = value_of(self.sparse, ctx) if self.norm != "none" else 0.0
        for table in self.tables if apart or sparse else ():
            common = view.stored(table, batch.items)
            if apart:
                loss = loss - apart * mean((view.stored(own(table), batch.items) - common).square().mean(-1), batch)
            if sparse:
                loss = loss + sparse * self._norm(common, batch)
        return loss

    def _norm(self, rows: Tensor, batch: Batch) -> Tensor:
        """Of each client's rows in the batch, [clients, length, width]; all but the largest entry are per number."""
        if self.norm == "l1":
            return mean(rows.abs().mean(-1), batch)
        if self.norm == "l2":
            return mean(rows.square().mean(-1), batch)
        import torch

        real = rows * batch.weight.unsqueeze(-1)
        if self.norm == "infinity":
            return real.abs().flatten(1).amax(1)
        values: Tensor = torch.linalg.svdvals(real).sum(-1)
        return values / (batch.weight.sum(1).clamp(min=1) * rows.shape[-1])


def additive(
    apart: Schedule = 0.0,
    sparse: Schedule = 0.0,
    *,
    norm: Norm = "l1",
    own_rate: Schedule | None = None,
    init: Init | None = None,
    tables: tuple[str, ...] = (),
) -> Wrapper:
    """Give every client an item table of its own beside the shared one; it moves by the shared one's rule and rate.

    apart, sparse: weights of the two terms, numbers or schedules. norm: of the shared rows. own_rate: of the own table,
    if not the shared one's. init: how own rows begin. tables: which item tables; none named: all
    that are sent.

    >>> from fedmosaic.methods.registry import entry
    >>> wrapped = additive(apart=0.1)(entry("fedmf").build().algorithm)
    >>> wrapped.roles["item.own"].value, wrapped.sent
    ('private', ('item',))
    """

    def wrap(host: Algorithm) -> Algorithm:
        wrapped = sent_tables("additive", host, tables)
        if wrapped_with(host.model, AdditiveModel) is not None:
            raise SettingsError("additive: this host has tables of its own beside the shared ones already")
        return replace(
            host,
            model=AdditiveModel(host.model, wrapped, init),
            roles={**host.roles, **{own(table): Role.PRIVATE for table in wrapped}},
            local=tuple(_beside(one, wrapped) for one in host.local),
            objective=AdditiveObjective(host.objective, wrapped, apart, sparse, norm),
        )

    def _beside(one: Pass, wrapped: tuple[str, ...]) -> Pass:
        phases = []
        for phase in one.phases:
            moved = ((m, tuple(own(n) for n in m.names if n in wrapped)) for m in phase.moves)
            moves = [Move(names, m.rate if own_rate is None else own_rate, m.rule) for m, names in moved if names]
            phases.append(Phase((*phase.moves, *moves)))
        return replace(one, phases=tuple(phases))

    return wrap
