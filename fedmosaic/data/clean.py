"""Tables into clean columns: any common frame in, bad rows refused or set apart, repeats merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.errors import DataError
from fedmosaic.data.text import TextTable
from fedmosaic.data.values import Problems, check_ids, check_ratings, check_times

MAX_LEFT_OUT = 0.05  # share of rows that `lenient` may set apart


def as_polars(frame: Any) -> pl.DataFrame:
    """Any common table as a Polars frame."""
    if isinstance(frame, pl.DataFrame):
        return frame
    if isinstance(frame, pl.LazyFrame):
        return frame.collect()
    if isinstance(frame, Mapping):
        return pl.DataFrame(frame, strict=False)
    if hasattr(frame, "__arrow_c_stream__") or hasattr(frame, "to_batches"):
        return pl.DataFrame(frame)
    if hasattr(frame, "columns") and hasattr(frame, "iloc"):  # pandas before it spoke Arrow
        return pl.DataFrame({str(c): frame[c].tolist() for c in frame.columns}, strict=False)
    raise DataError(f"cannot read a table from {type(frame).__name__}; give Polars, pandas, Arrow or a dict of columns")


def pick_columns(frame: pl.DataFrame, roles: Mapping[str, Any], source: object) -> pl.DataFrame:
    """The columns that play a role, named by it; a missing one is an error that lists what there is."""
    picked = {}
    for role, name in roles.items():
        if name is None:
            continue
        if name not in frame.columns:
            raise DataError(
                f"no column {name!r} for the {role}; the columns are {', '.join(map(repr, frame.columns))}. "
                f"Say {role}=...",
                source=source,
            )
        picked[role] = frame[name]
    return pl.DataFrame(picked)


def cleaned(
    table: TextTable, roles: Mapping[str, Any], *, source: object, unit: str, lenient: bool
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Columns with their values checked and parsed, bad rows refused or set apart; titles pass as they are."""
    columns: dict[str, pl.Series] = {}
    problems: Problems = []
    for role in table.frame.columns:
        raw = table.frame[role]
        if role == "title":
            columns[role] = raw
            continue
        check = {"rating": check_ratings, "time": check_times}.get(role)
        columns[role], found = check(raw) if check else check_ids(raw, role)
        problems += found
    frame = pl.DataFrame(columns).with_columns(row=pl.Series(np.arange(table.frame.height)))
    return refuse_rows(frame, table, problems, roles, source, unit, lenient)


def refuse_rows(
    frame: pl.DataFrame,
    table: TextTable,
    problems: Problems,
    roles: Mapping[str, Any],
    source: object,
    unit: str,
    lenient: bool,
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Strict: raise for the first bad row. Lenient: drop bad rows, count them by reason, refuse if they are many."""
    left_out = dict(table.left_out)
    bad = np.zeros(frame.height, dtype=bool)
    first: tuple[int, str, str] | None = None
    for role, reason, mask in problems:
        hits = np.flatnonzero(mask.to_numpy() & ~bad)
        if hits.size == 0:
            continue
        bad[hits] = True
        left_out[f"{role} {reason}"] = int(hits.size)
        if first is None or hits[0] < first[0]:
            first = (int(hits[0]), role, reason)
    if first is not None and not lenient:
        row, role, reason = first
        value = table.frame[role][row]
        shown = "" if value is None or reason.startswith("ids must") else f": {value!r}"
        where = table.lines[row] if table.lines is not None else row + 1
        named = DataError(reason + shown, source=source, line=where, column=roles[role])
        if unit == "row":
            named.args = (str(named).replace(f"line {where}", f"row {where}"),)
        raise named
    total = frame.height + sum(table.left_out.values())
    refused = sum(left_out.values())
    if refused > MAX_LEFT_OUT * total:
        counts = "; ".join(f"{n:,} x {reason}" for reason, n in left_out.items())
        raise DataError(f"{refused:,} of {total:,} rows are bad, more than {MAX_LEFT_OUT:.0%}: {counts}", source=source)
    return (frame.filter(~pl.Series(bad)) if bad.any() else frame), left_out


def merge_duplicates(frame: pl.DataFrame) -> pl.DataFrame:
    """Of rows with the same user and item keep the latest (then the best rated): file order plays no part."""
    if frame.select("user", "item").n_unique() == frame.height:
        return frame
    rank: list[str] = [c for c in ("time", "rating") if c in frame.columns] or ["row"]
    return frame.sort(rank, maintain_order=True).unique(["user", "item"], keep="last", maintain_order=True).sort("row")
