"""Dual personalisation (PFedRec, IJCAI 2023): a private score function and locally tuned item rows.

item tables become PERSONALISED, everything else PRIVATE; for every batch first the score side takes a step with the
items held still, then the items with the score side held still; a device answers with the rows it tuned.
"""

from __future__ import annotations

from dataclasses import replace

from fedmosaic.algorithm import Algorithm, Wrapper
from fedmosaic.local import Move, Pass, Phase, Schedule
from fedmosaic.tree import Axis, Role


def dual(score_rate: Schedule | None = None, item_rate: Schedule | None = None) -> Wrapper:
    """Wrap any host; rates not given are the host's own.

    >>> from fedmosaic.zoo import entry
    >>> wrapped = dual()(entry("fedncf").build().algorithm)
    >>> wrapped.sent, wrapped.keeps
    (('item',), True)
    """

    def wrap(host: Algorithm) -> Algorithm:
        items = tuple(n for n, s in host.specs.items() if s.axis is Axis.ITEM)
        score = tuple(n for n in host.specs if n not in items)
        roles = dict.fromkeys(items, Role.PERSONALISED) | dict.fromkeys(score, Role.PRIVATE)
        return replace(host, roles=roles, local=tuple(_alternate(p, score, items) for p in host.local))

    def _alternate(whole: Pass, score: tuple[str, ...], items: tuple[str, ...]) -> Pass:
        return replace(whole, phases=(_phase(whole, score, score_rate), _phase(whole, items, item_rate)))

    def _phase(whole: Pass, names: tuple[str, ...], rate: Schedule | None) -> Phase:
        """The host's own moves, cut down to some names; its first rate for names that it never moved."""
        moves = [m for phase in whole.phases for m in phase.moves]
        kept = [Move(own, m.rate if rate is None else rate, m.rule) for m in moves if (own := _common(m.names, names))]
        missing = tuple(n for n in names if not any(n in m.names for m in kept))
        if missing:
            kept.append(Move(missing, moves[0].rate if rate is None else rate, moves[0].rule))
        return Phase(tuple(kept))

    return wrap


def _common(names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in names if n in wanted)
