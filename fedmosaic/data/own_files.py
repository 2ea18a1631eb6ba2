"""Files of one's own: which are meant, how each is read, and their rows, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from fedmosaic.core.errors import DataError
from fedmosaic.data.clean import cleaned, pick_columns
from fedmosaic.data.recognise import Reading, recognise
from fedmosaic.data.text import decode, decode_any, read_bytes, read_table

PATTERN = "*?["


@dataclass(frozen=True, eq=False)
class OwnTable:
    """The clean rows of a file: columns user, item, rating, time, title (those it has), and their places."""

    frame: pl.DataFrame
    left_out: Mapping[str, int]
    source: str
    words: str
    columns: tuple[str, ...]


def matching(path: str | Path) -> list[Path]:
    """The file a path names, or those that match a pattern, in order of their names.

    >>> matching("shop.csv")
    [PosixPath('shop.csv')]
    """
    if Path(path).exists() or not any(sign in str(path) for sign in PATTERN):
        return [Path(path)]
    base = Path(Path(path).anchor)
    found = sorted(base.glob(str(Path(path).relative_to(base) if base.anchor else path)))
    if not found:
        raise DataError("no file matches this pattern", source=path)
    return found


def read_text(path: Path, encoding: str | None = None) -> tuple[str, str]:
    """The text of a file, plain or packed, and its encoding, recognised where it is not said."""
    data = read_bytes(path)
    return (decode(data, encoding, path), encoding) if encoding else decode_any(data, path)


def reading_of(path: Path, said: Mapping[str, Any]) -> tuple[Reading, str]:
    """How a file is read, and its text. said: what is known of it, as for `recognise`."""
    text, encoding = read_text(path, said.get("encoding"))
    return recognise(text, path, {**said, "encoding": encoding}), text


def read_own(path: Path, said: Mapping[str, Any], rated: bool, lenient: bool) -> OwnTable:
    """Rows of a text file, checked by the fast reader and, if that balks, by the one that knows line numbers.

    rated: whether ratings decide something; if not, a column that only looks like one is not held to be in order.
    """
    reading, text = reading_of(path, said)
    roles = {role: name for role, name in reading.roles.items() if name is not None}
    if not rated and said.get("rating") is None:
        roles.pop("rating", None)
    for careful in (False, True):
        table = read_table(path, reading.fmt, careful=careful, lenient=lenient, text=text)
        picked = pick_columns(table.frame, roles, path)
        if reading.fmt.decimal == "," and "rating" in picked.columns:
            picked = picked.with_columns(pl.col("rating").str.replace(",", ".", literal=True))
        try:
            frame, left_out = cleaned(
                replace(table, frame=picked), roles, source=path, unit="line",
                lenient=lenient and table.lines is not None,
            )  # fmt: skip
            return OwnTable(frame, left_out, str(path), reading.words, tuple(picked.columns))
        except DataError:
            if table.lines is not None:  # the careful reader has spoken
                raise
    raise AssertionError("unreachable")


def alike(columns: Mapping[str, Sequence[str]]) -> None:
    """Refuse files of one data set that do not have the same roles.

    >>> alike({"a.csv": ["user", "item"], "b.csv": ["user", "item", "time"]})
    Traceback (most recent call last):
    fedmosaic.core.errors.DataError: b.csv: has user, item, time, where a.csv has user, item; files that are read ...
    """
    first = next(iter(columns))
    for source, roles in columns.items():
        if list(roles) != list(columns[first]):
            raise DataError(
                f"has {', '.join(roles)}, where {first} has {', '.join(columns[first])}; files that are read together "
                "have the same columns (say time=no to leave one out)",
                source=source,
            )
