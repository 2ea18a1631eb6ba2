"""An algorithm is a value: model, roles, objective, local work, upload, server. Checked when it is made.

    fedmf   = Algorithm(LinearScorer(32), roles={"item": SHARED, "user": PRIVATE, "bias": PRIVATE}, ...)
    pfedrec = dual()(fedmf)                                       # a wrapper returns another algorithm

Private parameters cannot reach the upload: `finish` hands it only the names whose role says they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

from fedmosaic.errors import SettingsError
from fedmosaic.local import Pass
from fedmosaic.models.view import Model
from fedmosaic.objective import Objective, bce
from fedmosaic.server import Server
from fedmosaic.tree import ON_SERVER, UPLOADED, Axis, Role, Spec, by_name
from fedmosaic.upload import Upload

Wrapper = Callable[["Algorithm"], "Algorithm"]


@dataclass(frozen=True)
class Algorithm:
    """The declaration of a federated recommender."""

    model: Model
    roles: Mapping[str, Role]
    local: tuple[Pass, ...]
    objective: Objective = bce
    upload: Upload = Upload()
    server: Server = Server()
    negatives: int = 4  # fresh ones per positive and round
    specs: Mapping[str, Spec] = field(init=False)

    def __post_init__(self) -> None:
        specs = by_name(self.model.specs())
        object.__setattr__(self, "specs", specs)
        absent, extra = sorted(set(specs) - set(self.roles)), sorted(set(self.roles) - set(specs))
        if absent or extra:
            raise SettingsError(
                f"every parameter needs exactly one role; without role: {absent or 'none'}, "
                f"unknown: {extra or 'none'}; the model has {', '.join(specs)}"
            )
        moved = {name for p in self.local for phase in p.phases for name in phase.names}
        if moved - set(specs):
            raise SettingsError(
                f"phases move unknown parameters {sorted(moved - set(specs))}; known: {', '.join(specs)}"
            )
        frozen = [n for n in moved if self.roles[n] is Role.FROZEN]
        if frozen:
            raise SettingsError(f"phases move frozen parameters {sorted(frozen)}")
        wrong = [n for n, s in specs.items() if s.axis is Axis.USER and self.roles[n] is not Role.PRIVATE]
        if wrong:
            raise SettingsError(f"user parameters {wrong} would leave the device; their role must be private")
        for move in (move for p in self.local for phase in p.phases for move in phase.moves):
            kept = [n for n in move.names if move.rule.persistent and self.roles[n] is not Role.PRIVATE]
            if kept:
                raise SettingsError(f"a persistent optimiser needs private parameters; {kept} are not")

        if self.upload.kind == "value" and self.server != Server():
            raise SettingsError("uploads of values need the plain mean, Server(); send deltas to any other server")
        if self.keeps and any(specs[n].axis is Axis.ITEM for n in self.private):
            raise SettingsError(
                "a personalised table beside a private item table cannot be replayed; share one of them"
            )
        if self.keeps and any(m.rule.persistent for p in self.local for phase in p.phases for m in phase.moves):
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
    def private(self) -> tuple[str, ...]:
        """What never leaves the device."""
        return self.names(Role.PRIVATE)

    @property
    def keeps(self) -> bool:
        """Whether a device answers with a copy it tuned (rather than with the server's newest)."""
        return bool(self.names(Role.PERSONALISED))

    def traffic(self, n_items: int, touched_rows: float) -> tuple[int, int]:
        """Bytes a client sends and receives in a round; rows averaged over their senders need the senders counted."""
        up = 4.0 * n_items if self.sent and self.server.reduce == "row-mean" else 0.0
        for name in self.sent:
            spec = self.specs[name]
            if self.upload.support == "touched" and spec.axis is Axis.ITEM:
                up += touched_rows * (4 * spec.count(1) + 4)  # values and the row's id
            else:
                up += 4 * spec.count(n_items)
        return round(up), sum(4 * self.specs[n].count(n_items) for n in self.received)


def compose(base: Algorithm, *wrappers: Wrapper) -> Algorithm:
    """Apply wrappers from left to right."""
    return reduce(lambda algorithm, wrap: wrap(algorithm), wrappers, base)


def describe(algorithm: Algorithm, n_items: int) -> list[dict[str, Any]]:
    """One row per parameter: who holds it, what leaves the device, in bytes.

    >>> from fedmosaic.zoo import entry
    >>> [(r["parameter"], r["role"], r["bytes up"]) for r in describe(entry("pfedrec").build().algorithm, 100)]
    [('item', 'personalised', 12800), ('user', 'private', 0), ('bias', 'private', 0)]
    """
    answers: dict[Role, Literal["server's", "device's", "device's copy", "as sent"]] = {
        Role.SHARED: "server's",
        Role.PRIVATE: "device's",
        Role.PERSONALISED: "device's copy",
        Role.FROZEN: "as sent",
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
                "bytes up": size if role in UPLOADED else 0,
                "bytes down": size if role in ON_SERVER else 0,
            }
        )
    return rows
