"""Mixing a local item table with the frozen global one (after PLGC, 2025): any host, one weight per client.

    item_j   = weight · local_j + (1 - weight) · global_j       global: as the server sent it, never trained
    weight_u = T_local / (T_local + T_global)                   T: trace of the neural tangent kernel's head part
    loss     = host's loss + beta · decorrelation

This is built from the paper's abstract and from the work it seems to rest on (LG-Mix, RecDCL), not from its equations,
which were not available. Ours are: one scalar per client, the trace over the client's positives without centring, the
weight anew for every batch, the local table restarted every round, local against global rows as the two views, beta
0.1 and gamma 0.01. All are switches. Numbers from this file must not be called PLGC's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper, sent_tables, wrapped_with
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.objective import Objective, Prepare
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec, by_name
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.core.errors import SettingsError, one_of

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["local-global", "self"]
Read = Callable[[View, str, "Tensor"], "Tensor"]
TINY = 1e-12
SPREAD = 1e-5  # added to column variances


@dataclass(frozen=True)
class MixedModel:
    """A host that reads item tables as a mix of the local rows and those the server sent.

    weight: the local share, one for all tables; none: as prepared.
    """

    host: Model
    tables: tuple[str, ...]
    weight: float | None

    @property
    def mix(self) -> str:
        """The private parameter that holds the weight, and how many rounds it is a mean of."""
        return f"{self.tables[0]}.mix"

    def specs(self) -> tuple[Spec, ...]:
        """The host's, and the weight."""
        if self.weight is not None:
            return self.host.specs()
        return (*self.host.specs(), Spec(self.mix, Axis.WHOLE, (2,), Init("zero")))

    def score(self, view: View, items: Tensor) -> Tensor:
        """The host's score of mixed rows."""
        return self.host.score(self.read(view), items)

    def read(self, view: View) -> View:
        """A view of weight · local + (1 - weight) · global, row by row."""
        for table in self.tables:
            view = view.reading(table, partial(self._mixed, table))
        return view

    def _mixed(self, table: str, view: View, items: Tensor) -> Tensor:
        weight = view.whole(self.mix)[:, :1, None] if self.weight is None else self.weight
        return weight * view.rows(table, items) + (1 - weight) * view.received(table, items)


@dataclass(frozen=True)
class NTKWeight:
    """The local share of the kernels' traces, over a client's rows.

    With a linear head the head's part of the kernel is the Gram matrix of the item rows, whose trace is the sum of
    their squares. `exact` adds up the squared derivatives of every score by every score-side parameter instead.

        local = c · global   ->   weight = c² / (1 + c²)

    rows, centred: of which rows the traces are. when, smooth: how often the share is computed, and whether it is a mean
    over rounds. clip: its bounds. tables, name: what it is about; `mixing` sets them. Traces of several tables add up.
    """

    tables: tuple[str, ...] = ("item",)
    name: str = "item.mix"
    rows: Literal["positives", "examples", "all"] = "positives"
    centred: bool = False
    when: Literal["round", "epoch", "batch"] = "batch"
    smooth: bool = False
    clip: tuple[float, float] = (0.0, 1.0)
    exact: bool = False

    def __post_init__(self) -> None:
        one_of("rows of the traces", self.rows, ("positives", "examples", "all"))
        one_of("moment", self.when, ("round", "epoch", "batch"))
        if self.smooth and self.when != "round":
            raise SettingsError("a weight smoothed over rounds is computed once a round: when=round")

    def __call__(self, model: Model, view: View, ctx: Context) -> Tensor:
        """[clients, 2]: the weight, and the rounds it is a mean of."""
        import torch

        if self.exact:
            traces = [self._derivatives(model, view, read) for read in (View.stored, View.received)]
        else:
            traces = [self._squares(view, read) for read in (View.stored, View.received)]
        weight = (traces[0] / (traces[0] + traces[1] + TINY)).clamp(*self.clip)
        past = view.whole(self.name)
        count = past[:, 1] + 1
        if self.smooth:
            weight = past[:, 0] + (weight - past[:, 0]) / count
        return torch.stack([weight, count], dim=1).detach()

    def _squares(self, view: View, read: Read) -> Tensor:
        import torch

        real = view.batch.weight.unsqueeze(-1)
        found = []
        for table in self.tables:
            rows = read(view, table, view.batch.items)
            if self.centred:
                rows = rows - (rows * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
            found.append((rows.square() * real).sum((1, 2)))
        return torch.stack(found).sum(0)

    def _derivatives(self, model: Model, view: View, read: Read) -> Tensor:
        """Every example as a client of its own: its derivatives are then its own too."""
        import torch

        batch, mixed = view.batch, wrapped_with(model, MixedModel)
        assert mixed is not None
        clients, length = batch.items.shape
        owner = torch.arange(clients).repeat_interleave(length)
        specs = by_name(mixed.host.specs())
        alone: dict[str, Tensor] = {}
        for name, spec in specs.items():
            if spec.axis is Axis.WHOLE:
                alone[name] = view.params[name][owner].detach().requires_grad_()
            elif spec.axis is Axis.USER:
                users = batch.users.expand(clients, length).reshape(-1)
                alone[name] = view.params[name][users].detach().requires_grad_()
        tables = {n: v for n, v in view.params.items() if n not in alone}
        if read is View.received:
            tables |= {table: view.given[table] for table in self.tables}
        single = Batch(batch.items.reshape(-1, 1), torch.arange(owner.size(0))[:, None], batch.labels, batch.weight)
        scores = mixed.host.score(View({**tables, **alone}, single, view.given), single.items)
        slopes = torch.autograd.grad(scores.sum(), list(alone.values()))
        squares = torch.stack([s.square().flatten(1).sum(1) for s in slopes]).sum(0).reshape(clients, length)
        return (squares * batch.weight).sum(1)


@dataclass(frozen=True)
class Decorrelated:
    """The host's loss plus beta · L, a Barlow-Twins-like term on the distinct items of a batch.

        C = Zl' Zg / n       columns standardised        L = 1/d [ sum_k (1 - C_kk)² + gamma sum_{k≠m} C_km² ]

    local-global: Zl local rows, Zg global rows. self: both are the mixed rows, so only the second sum acts. Terms of
    several tables add up.
    """

    host: Objective
    tables: tuple[str, ...]
    beta: float
    gamma: float
    form: Form

    def __post_init__(self) -> None:
        one_of("form of decorrelation", self.form, ("local-global", "self"))

    def __call__(self, model: Model, view: View, batch: Batch, ctx: Context) -> Tensor:
        """One loss per client; a batch with fewer than three distinct items adds nothing."""
        loss, mask, mixed = self.host(model, view, batch, ctx), distinct(batch), wrapped_with(model, MixedModel)
        assert mixed is not None
        for table in self.tables:
            if self.form == "self":
                one = other = mixed.read(view).rows(table, batch.items)
            else:
                one, other = view.stored(table, batch.items), view.received(table, batch.items)
            loss = loss + self.beta * decorrelation(one, other, mask, self.gamma)
        return loss


def decorrelation(one: Tensor, other: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """L of two views of the same rows, [clients, length, width], over the rows of the mask; one value per client.

    >>> import torch
    >>> z = torch.linalg.qr(torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(0)))[0]
    >>> z = torch.linalg.qr(z - z.mean(1, keepdim=True))[0]
    >>> float(decorrelation(z, 3 * z + 1, torch.ones(1, 40), 1.0)) < 1e-4
    True
    """
    import torch

    count = mask.sum(1).clamp(min=1)[:, None, None]
    left, right = _standard(one, mask, count), _standard(other, mask, count)
    correlation = left.transpose(1, 2) @ right / count
    diagonal = correlation.diagonal(dim1=1, dim2=2)
    off = correlation.square().sum((1, 2)) - diagonal.square().sum(1)
    value = ((1 - diagonal).square().sum(1) + gamma * off) / one.shape[-1]
    return torch.where(mask.sum(1) < 3, torch.zeros_like(value), value)


def _standard(rows: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    real = mask.unsqueeze(-1)
    centred = (rows - (rows * real).sum(1, keepdim=True) / count) * real
    return centred / (centred.square().sum(1, keepdim=True) / count + SPREAD).sqrt()


def distinct(batch: Batch) -> Tensor:
    """1 for the first example of each item of a client, 0 for repeats and padding."""
    import torch

    items = torch.where(batch.weight > 0, batch.items, -1)
    ordered, order = items.sort(dim=1, stable=True)
    first = torch.ones_like(ordered, dtype=batch.weight.dtype)
    first[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).to(first.dtype)
    return torch.zeros_like(first).scatter_(1, order, first * (ordered >= 0))


FROM_TRACES = NTKWeight()


def mixing(
    weight: float | NTKWeight = FROM_TRACES,
    *,
    keep: bool = False,
    beta: float = 0.1,
    gamma: float = 0.01,
    form: Form = "local-global",
    tables: tuple[str, ...] = (),
) -> Wrapper:
    """Wrap any host that sends item tables.

    weight: the local share, fixed or from the kernels' traces. keep: the local table lives on from round to round; else
    it restarts from the global one. beta, gamma, form: weight, off-diagonal part and views of the decorrelation.
    tables: which item tables; none named: all that are sent.

    A fixed weight of 1 with a restart and beta 0 mixes nothing: the host itself.

    >>> from fedmosaic.methods.registry import entry
    >>> host = entry("pfedrec").build().algorithm
    >>> mixing(1.0, beta=0.0)(host) is host, mixing()(host).sent
    (True, ('item',))
    """

    def wrap(host: Algorithm) -> Algorithm:
        wrapped = sent_tables("mixing", host, tables)
        if wrapped_with(host.model, MixedModel) is not None:
            raise SettingsError("mixing: this host mixes its rows with the server's already")
        if weight == 1 and not keep and not beta:
            return host
        if host.upload.kind == "gradient":
            raise SettingsError(
                "mixing needs item rows that move on the device; this host sends their gradients instead"
            )
        model = MixedModel(host.model, wrapped, None if isinstance(weight, NTKWeight) else weight)
        roles = {**host.roles, **dict.fromkeys(wrapped, Role.KEPT if keep else Role.PERSONALISED)}
        prepare: Prepare | None = host.prepare
        if isinstance(weight, NTKWeight):
            roles[model.mix] = Role.PRIVATE
            prepare = replace(weight, tables=wrapped, name=model.mix)
        objective = Decorrelated(host.objective, wrapped, beta, gamma, form) if beta else host.objective
        # tables that live on are not all equal at the start of a round: what is averaged is how they moved
        upload = replace(host.upload, kind="delta") if keep and host.upload.kind == "value" else host.upload
        return replace(host, model=model, roles=roles, prepare=prepare, objective=objective, upload=upload)

    return wrap
