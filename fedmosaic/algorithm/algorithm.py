"""An algorithm is a value: model, roles, objective, local work, upload, server. Checked when it is made.

    fedmf   = Algorithm(LinearScorer(32), roles={"item": SHARED, "user": PRIVATE, "bias": PRIVATE}, ...)
    pfedrec = dual()(fedmf)                                       # a wrapper returns another algorithm

Private parameters cannot reach the upload: `finish` (engines/round.py) hands it only the names whose role says they are
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal, TypeVar

from fedmosaic.algorithm.local import SGD, GradientRule, Move, Pass, plain_gradient
from fedmosaic.algorithm.objective import Objective, Prepare, bce
from fedmosaic.algorithm.parameters import ON_SERVER, STORED, UPLOADED, Axis, Role, Spec, by_name
from fedmosaic.algorithm.reduction import reduction_named
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload, padded_count
from fedmosaic.algorithm.view import Model
from fedmosaic.core.errors import SettingsError

Wrapper = Callable[["Algorithm"], "Algorithm"]
M = TypeVar("M")


@dataclass(frozen=True)
class Algorithm:
    """The declaration of a federated recommender; what a wrapper does not fill has its plain meaning."""

    model: Model
    roles: Mapping[str, Role]
    local: tuple[Pass, ...]
    objective: Objective = bce
    upload: Upload = Upload()
    server: Server = Server()
    negatives: int = 4  # fresh ones per positive and round
    gradient: GradientRule = plain_gradient  # how a gradient is taken
    prepare: Prepare | None = None  # what is computed rather than trained
    serve: tuple[Pass, ...] = ()  # work a device does when it is asked, with the server's newest
    history: bool = False  # whether the model reads the client's positives
    whole: bool = False  # whether local work moves rows without examples too, in ways of its own
    specs: Mapping[str, Spec] = field(init=False)

    def __post_init__(self) -> None:
        own = (one.spec for one in self.upload.steering.values())
        object.__setattr__(self, "specs", by_name((*self.model.specs(), *own)))
        for check in (self._check_roles, self._check_moves, self._check_replay):
            check()

    def _check_roles(self) -> None:
        specs = self.specs
        absent, extra = sorted(set(specs) - set(self.roles)), sorted(set(self.roles) - set(specs))
        if absent or extra:
            raise SettingsError(
                f"every parameter needs exactly one role; without role: {absent or 'none'}, "
                f"unknown: {extra or 'none'}; the model has {', '.join(specs)}"
            )
        strange = [n for n, role in self.roles.items() if not isinstance(role, Role)]
        if strange:
            raise SettingsError(
                f"a role is one of {', '.join(map(str, Role))}; {strange[0]} has {self.roles[strange[0]]!r}"
            )
        never = (Role.PRIVATE, Role.REBUILT)
        wrong = [n for n, s in specs.items() if s.axis is Axis.USER and self.roles[n] not in never]
        if wrong:
            raise SettingsError(f"user parameters {wrong} would leave the device; their role must be private")
        wrong = [n for n in self.names(Role.KEPT) if specs[n].axis is not Axis.ITEM]
        if wrong:
            raise SettingsError(f"only item tables can be kept and sent; {wrong} are not")
        if self.names(Role.REBUILT) and not self.serve:
            raise SettingsError(
                f"{list(self.names(Role.REBUILT))} are rebuilt when needed: say in `serve` by which passes"
            )

    def _check_moves(self) -> None:
        moved = {name for move in self.moves for name in move.names}
        if moved - set(self.specs):
            raise SettingsError(
                f"phases move unknown parameters {sorted(moved - set(self.specs))}; known: {', '.join(self.specs)}"
            )
        frozen = [n for n in moved if self.roles[n] is Role.FROZEN]
        if frozen:
            raise SettingsError(f"phases move frozen parameters {sorted(frozen)}")
        rules = {(name, move.rule) for move in self.moves for name in move.names}
        twice = [name for name in moved if len({rule for n, rule in rules if n == name}) > 1]
        if twice:
            raise SettingsError(f"{sorted(twice)} move by two rules; a parameter has one, and one memory of it")
        for move in self.moves:
            kept = [n for n in move.names if move.rule.persistent and self.roles[n] is not Role.PRIVATE]
            if kept:
                raise SettingsError(f"a persistent optimiser needs private parameters; {kept} are not")
        uneven = any(one.uneven for one in (*self.local, *self.serve))
        if uneven and not all(isinstance(move.rule, SGD) for move in self.moves):
            raise SettingsError("step_decay, tolerance and parts of the examples need plain SGD on the device")
        self._check_upload()

    def _check_upload(self) -> None:
        hidden = self.upload.noise is not None or bool(self.upload.stack)
        if hidden and self.upload.support in ("touched", "padded"):
            raise SettingsError(
                f"support={self.upload.support} shows which rows a client trained; beside clipping, noise or any other "
                "wrapper of uploads use support=dense"
            )
        if self.upload.kind == "value" and replace(self.server, threshold=0.0, weights="equal") != Server():
            raise SettingsError("uploads of values need the plain mean, Server(); send deltas to any other server")

        if self.step_noise and (self.upload.kind == "gradient" or hidden):
            raise SettingsError(
                "noise in every step needs plain uploads of what the device stepped to, not encoded ones"
            )
        self._check_reduction()

    def _check_reduction(self) -> None:
        if self.server.weights == "size":
            if self.upload.noise is not None or self.upload.stack:
                raise SettingsError("clients that weigh by their size undo every bound on an upload; use equal weights")
            if self.server.reduction.counts_senders or self.server.reduction.each or any(m.spreads for m in self.moves):
                raise SettingsError("clients weigh by their size in a plain mean of trained rows; use reduce='mean'")
        by_rows = self.server.reduction.counts_senders
        if by_rows and self.upload.noise is not None:
            raise SettingsError("rows averaged over their senders cannot carry noise: the counts show who sent what")
        if by_rows and any(m.spreads for m in self.moves):
            raise SettingsError("rows averaged over their senders cannot decay everywhere; use reduce='mean'")
        if self.server.reduction.each and any(m.spreads for m in self.moves):
            raise SettingsError("a server that sees every upload by itself takes none in which all rows decay")

    def _check_replay(self) -> None:
        """A tuned copy is a function of what the device held before its last round; not all of it is remembered."""
        if self.serve and any(self.specs[n].axis is Axis.ITEM for n in self.stored):
            raise SettingsError("a device that rebuilds its answers (`serve`) cannot hold an item table of its own")
        if self.answers_with_tuned_copy and any(self.specs[n].axis is Axis.ITEM for n in self.stored):
            raise SettingsError(
                "a personalised table beside a private item table cannot be replayed; share one of them"
            )
        if self.answers_with_tuned_copy and any(move.rule.persistent for move in self.moves):
            raise SettingsError(
                "a personalised table with a persistent optimiser cannot be replayed; reset it each round"
            )

    def names(self, *roles: Role) -> tuple[str, ...]:
        """Parameters with one of the roles, in the model's order."""
        return tuple(n for n in self.specs if self.roles[n] in roles)

    @property
    def sent(self) -> tuple[str, ...]:
        """What leaves the device."""
        return self.names(*UPLOADED)

    @property
    def received(self) -> tuple[str, ...]:
        """What comes from the server."""
        return self.names(*ON_SERVER)

    @property
    def stored(self) -> tuple[str, ...]:
        """What stays on the device between rounds."""
        return self.names(*STORED)

    @property
    def answers_with_tuned_copy(self) -> bool:
        """Whether a device answers with a copy it tuned in its last round (rather than with the server's newest)."""
        return bool(self.names(Role.PERSONALISED)) and not self.serve

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves of all phases of all passes."""
        return tuple(move for one in self.local for phase in one.phases for move in phase.moves)

    @property
    def step_noise(self) -> Mapping[str, float]:
        """Parameters whose gradients gain noise in every step, and its deviation on the sum of a batch."""
        found: Mapping[str, float] = getattr(self.gradient, "noise", {})
        return found

    @property
    def spread(self) -> tuple[str, ...]:
        """Tables whose rows without examples change too, by the same share of a client (unless rows are encoded)."""
        if self.upload.stack or self.upload.kind == "gradient":
            return ()
        decayed = {name for move in self.moves if move.spreads for name in move.names}
        return tuple(n for n in self.sent if n in decayed and self.specs[n].axis is Axis.ITEM)

    @property
    def watches(self) -> Literal["positives", "examples", "all"] | None:
        """Which rows of a client are read as a whole, beside its batches."""
        if self.prepare is not None:
            return self.prepare.rows
        return "positives" if self.history else None

    @property
    def dense(self) -> bool:
        """Whether a client must hold the whole catalogue, not just the rows of its examples."""
        spread = any(isinstance(m.rule, SGD) and m.rule.everywhere for m in self.moves)
        shown = any(encoder.whole for encoder in self.upload.stack)
        return self.whole or shown or self.watches == "all" or (spread and bool(self.upload.stack))

    def traffic(
        self, n_items: int, touched_rows: float, numbers: float = 0.0, received: float | None = None
    ) -> tuple[int, int]:
        """Bytes a client sends and receives in a round.

        It touched some rows; of its item tables so many `numbers` were not zero, and of those it `received`, if that
        was counted. Rows averaged over their senders need the senders counted.
        """
        up = 4.0 * n_items if self.sent and self.server.reduction.counts_senders else 0.0
        tables = 0.0  # of which only what is not zero is sent, unless noise has left no zeros
        for name in self.sent:
            spec = self.specs[name]
            row = Spec(name, spec.axis, self.upload.shape(spec))
            if spec.axis is not Axis.ITEM or self.upload.support == "dense":
                up += 4 * row.count(n_items)
            elif self.upload.support in ("touched", "padded"):
                sent = touched_rows if self.upload.support == "touched" else padded_count(ceil(touched_rows), n_items)
                up += sent * (4 * row.count(1) + 4)  # values and the row's id
            else:
                tables += 4 * row.count(n_items)
        if self.upload.support == "nonzero":
            up += tables if self.upload.noise is not None else min(tables, 8 * numbers)  # a value and its place
        down = {n: 4 * self.specs[n].count(n_items) for n in self.received}
        if received is not None:
            whole = sum(size for n, size in down.items() if self.specs[n].axis is Axis.ITEM)
            return round(up), sum(down.values()) - whole + min(whole, round(8 * received))
        return round(up), sum(down.values())


def reduced_by(name: str) -> Wrapper:
    """Another reduction for a host, by its name; bounds are put around the host's own.

    A mean of values is the old value and a mean of changes, so uploads of values become uploads of changes.
    """

    def wrap(host: Algorithm) -> Algorithm:
        upload = replace(host.upload, kind="delta") if host.upload.kind == "value" else host.upload
        reduction = reduction_named(name, host.server.reduction)
        return replace(host, upload=upload, server=replace(host.server, reduce=reduction))

    return wrap


def compose(base: Algorithm, *wrappers: Wrapper) -> Algorithm:
    """Apply wrappers from left to right."""
    for wrap in wrappers:
        made: Any = wrap(base)
        if not isinstance(made, Algorithm):
            name = getattr(wrap, "__name__", type(wrap).__name__)
            raise SettingsError(f"the wrapper {name} gave no algorithm; was it called, as in `dual()`?")
        base = made
    return base


def sent_tables(wrapper: str, host: Algorithm, wanted: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The item tables that a wrapper of what is sent wraps: the wanted ones, or all; a host without them is refused."""
    tables = tuple(n for n, s in host.specs.items() if s.axis is Axis.ITEM and host.roles[n] in UPLOADED)
    unknown = [name for name in wanted if name not in tables]
    if unknown or not tables:
        what = f"the item table {unknown[0]!r}" if unknown else "item tables that are sent"
        raise SettingsError(f"{wrapper} wraps {what}; this host sends {', '.join(tables) or 'none'}")
    return wanted or tables


def wrapped_with(model: Model, kind: type[M]) -> M | None:
    """The wrapper of some kind among those around a model, if there is one."""
    while not isinstance(model, kind):
        inner = getattr(model, "host", None)
        if inner is None:
            return None
        model = inner
    return model


def describe(algorithm: Algorithm, n_items: int) -> list[dict[str, Any]]:
    """One row per parameter: who holds it, what leaves the device, in bytes.

    >>> from fedmosaic.methods.registry import entry
    >>> [(r["parameter"], r["role"], r["bytes up"]) for r in describe(entry("pfedrec").build().algorithm, 100)]
    [('item', 'personalised', 12800), ('user', 'private', 0), ('bias', 'private', 0)]
    """
    answers = {
        Role.SHARED: "server's",
        Role.PRIVATE: "device's",
        Role.PERSONALISED: "device's copy",
        Role.FROZEN: "as sent",
        Role.KEPT: "device's copy",
        Role.REBUILT: "rebuilt from the history",
    }
    rows = []
    for name, spec in algorithm.specs.items():
        role, size = algorithm.roles[name], 4 * spec.count(n_items)
        rows.append(
            {
                "parameter": name,
                "axis": spec.axis.value,
                "role": role.value,
                "answers with": answers[role],
                "bytes on device": size,
                "bytes up": 4 * Spec(name, spec.axis, algorithm.upload.shape(spec)).count(n_items)
                if role in UPLOADED
                else 0,
                "bytes down": size if role in ON_SERVER else 0,
            }
        )
    return rows
