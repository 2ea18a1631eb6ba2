"""Dual personalisation (PFedRec, IJCAI 2023): a private score function and locally tuned item rows.

item tables become PERSONALISED, everything else PRIVATE; for every batch first the score side takes a step with the
items held still, then the items with the score side held still; a device answers with the rows it tuned.
"""

from __future__ import annotations

from dataclasses import replace

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.local import Move, Pass, Phase, Schedule
from fedmosaic.algorithm.parameters import UPLOADED, Axis, Role
from fedmosaic.core.errors import SettingsError


def dual(user_rate: Schedule | None = None, item_rate: Schedule | None = None) -> Wrapper:
    """Wrap any host; rates of score side and items that are not given are the host's own.

    >>> from fedmosaic.methods.registry import entry
    >>> wrapped = dual()(entry("fedncf").build().algorithm)
    >>> wrapped.sent, wrapped.answers_with_tuned_copy
    (('item',), True)
    """

    def wrap(host: Algorithm) -> Algorithm:
        items = tuple(n for n, s in host.specs.items() if s.axis is Axis.ITEM)
        score = tuple(n for n in host.specs if n not in items)
        hidden = [n for n in items if host.roles[n] not in UPLOADED]
        if hidden:
            raise SettingsError(f"dual would send item tables that this host does not: {hidden}")
        own = {n: Role.REBUILT if host.roles[n] is Role.REBUILT else Role.PRIVATE for n in score}
        local = tuple(_alternate(one, score, items) for one in host.local)
        # what is rebuilt when it is asked for tunes its items then, too, and with all there is
        serve = tuple(replace(one, part="all") for one in local) if host.serve else ()
        return replace(host, roles=dict.fromkeys(items, Role.PERSONALISED) | own, local=local, serve=serve)

    def _alternate(one: Pass, score: tuple[str, ...], items: tuple[str, ...]) -> Pass:
        moves = [m for phase in one.phases for m in phase.moves]
        phases = (_phase(moves, score, user_rate), _phase(moves, items, item_rate))
        return replace(one, phases=tuple(phase for phase in phases if phase.moves))

    def _phase(moves: list[Move], names: tuple[str, ...], rate: Schedule | None) -> Phase:
        """The host's own moves, cut down to some names."""
        kept = ((m, tuple(n for n in m.names if n in names)) for m in moves)
        return Phase(tuple(Move(own, m.rate if rate is None else rate, m.rule) for m, own in kept if own))

    return wrap
