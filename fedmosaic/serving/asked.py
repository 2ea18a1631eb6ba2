"""What is asked of a recommender: for whom, from which history, among which items. Ids in, positions out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.clean import as_polars, cleaned, pick_columns
from fedmosaic.data.text import TextTable
from fedmosaic.data.vocab import Id, Vocab

OnUnknown = Literal["popular", "error"]
SHOWN = 5  # ids of a kind that a note names
GUEST = "guest"  # whom a history belongs to, if nobody is named


@dataclass(frozen=True, eq=False)
class GivenHistories:
    """Histories by position, and the names of whom they belong to. times: beside every item, where they are known."""

    names: list[Id]
    items: Ragged
    times: I64 | None

    def take(self, rows: npt.NDArray[np.integer]) -> tuple[Ragged, I64 | None]:
        """Some of the histories, with their times."""
        from fedmosaic.core.ragged import slots

        return self.items.take(rows), None if self.times is None else self.times[slots(self.items, rows)]


def asked_histories(history: Any, users: Any, items: Vocab, on_unknown: OnUnknown) -> GivenHistories:
    """Histories as people have them.

    history: ids of one person, earliest first; or a table (a dict of columns, too) with a column `item` and, if known,
    `time` and `user`. users: whom a history of one person belongs to. Items that are not in the catalogue are left out,
    with a note, or an error.

    >>> shop = Vocab.of(pl.Series(["cup", "pot", "tea"]))
    >>> found = asked_histories({"item": ["tea", "cup"], "time": [7, 3]}, None, shop, "error")
    >>> found.names, found.items[0].tolist(), found.times.tolist()
    (['guest'], [0, 2], [3, 7])
    """
    table, times = _as_table(history), None
    roles: dict[str, Any] = {role: role for role in ("user", "item", "time") if role in table.columns}
    frame, _ = cleaned(
        TextTable(pick_columns(table, {"item": "item", **roles}, "history")), roles, source="history", unit="row",
        lenient=False,
    )  # fmt: skip
    named = as_ids(users) if users is not None else None
    if "user" in frame.columns:
        if named is not None:
            raise SettingsError("the history says whom its rows belong to; leave users out")
        names = frame["user"].unique(maintain_order=True).to_list()
        place = {name: at for at, name in enumerate(names)}
        owner = np.array([place[name] for name in frame["user"]], np.int64)
    else:
        if named is not None and len(named) != 1:
            raise SettingsError(
                f"one history belongs to one user, not to {len(named)}; give a table with a column user"
            )
        names, owner = named or [GUEST], np.zeros(frame.height, np.int64)
    positions = known_items(items, frame["item"].to_list(), on_unknown)
    if "time" in frame.columns:
        times = frame["time"].to_numpy().astype(np.int64)
    order = np.lexsort((np.arange(owner.size), times if times is not None else np.zeros(owner.size), owner))
    order = order[positions[order] >= 0]
    return GivenHistories(
        names,
        Ragged.group(owner[order], positions[order], len(names)),
        # a list tells an order and no times; each event then comes a tick after the one before
        times[order] if times is not None else np.arange(order.size, dtype=np.int64),
    )


def known_items(items: Vocab, ids: Sequence[Id], on_unknown: OnUnknown) -> I64:
    """Positions of ids, -1 for those that are not in the catalogue: left out with a note, or refused."""
    found = items.positions(ids)
    if (found < 0).any():
        missing = [str(one) for one, at in zip(ids, found, strict=True) if at < 0]
        if on_unknown == "error":
            raise UnknownNameError(items.kind, missing[0], items.ids.to_list())
        more = ", ..." if len(missing) > SHOWN else ""
        warnings.warn(f"left out, not in the catalogue: {', '.join(missing[:SHOWN])}{more}", stacklevel=4)
    return found


def shut_out(items: Vocab, exclude: Any, only: Any, on_unknown: OnUnknown) -> npt.NDArray[np.bool_]:
    """Which items of the catalogue no list may hold."""
    out = np.zeros(len(items), dtype=bool)
    if only is not None:
        allowed = known_items(items, as_ids(only), on_unknown)
        out[:] = True
        out[allowed[allowed >= 0]] = False
    if exclude is not None:
        found = items.positions(as_ids(exclude))  # what is not there is not shown, either
        out[found[found >= 0]] = True
    return out


def as_ids(ids: Iterable[Id] | Id) -> list[Id]:
    """One id, or several."""
    if isinstance(ids, str | int | np.integer):
        return [ids]
    if isinstance(ids, Mapping):
        raise SettingsError("give ids as one value or a list")
    return list(ids)


def _as_table(history: Any) -> pl.DataFrame:
    if isinstance(history, pl.DataFrame | Mapping) or hasattr(history, "columns"):
        table = as_polars(history)
        if "item" not in table.columns:
            raise SettingsError(f"a history needs a column item; it has {', '.join(table.columns)}")
        return table
    ids = as_ids(history)
    kind = pl.Int64 if ids and all(isinstance(i, int | np.integer) for i in ids) else pl.String
    return pl.DataFrame({"item": pl.Series([i if kind == pl.Int64 else str(i) for i in ids], dtype=kind)})
