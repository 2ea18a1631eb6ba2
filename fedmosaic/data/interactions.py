"""Interactions: the one border between the user's ids and positions.

Outside there are ids (text or integers, opaque); inside there are positions 0..n-1. Rows are kept in a canonical order
(user, time, tie key, item), so that nothing downstream can depend on the order of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic import keys
from fedmosaic.data.text import Table, TextFormat, read_table
from fedmosaic.data.values import Problems, check_ids, check_ratings, check_times
from fedmosaic.errors import DataError, UnknownNameError
from fedmosaic.ragged import I32, I64

Id = str | int
MAX_LEFT_OUT = 0.05


@dataclass(frozen=True, eq=False)
class Vocab:
    """Sorted distinct ids; a position is an index into them.

    >>> v = Vocab.of(pl.Series(["b", "a", "b"]))
    >>> v.positions(["a", "zz"]).tolist(), v.take(np.array([1])).to_list()
    ([0, -1], ['b'])
    """

    ids: pl.Series
    kind: str = "id"

    @classmethod
    def of(cls, column: pl.Series, kind: str = "id") -> Vocab:
        """The vocabulary of a column."""
        return cls(column.unique().sort().alias(kind), kind)

    def __len__(self) -> int:
        return self.ids.len()

    def encode(self, column: pl.Series) -> I32:
        """Positions of a column whose every id is known (fast, for whole tables)."""
        lookup = pl.DataFrame({"id": self.ids, "position": np.arange(len(self), dtype=np.int32)})
        joined = column.alias("id").to_frame().join(lookup, on="id", how="left", maintain_order="left")
        return joined["position"].to_numpy().astype(np.int32, copy=False)

    def positions(self, ids: Iterable[Id]) -> I64:
        """Positions of ids, -1 where unknown. A number finds the text that spells it, and the other way round."""
        return np.array([self._find(i) for i in ids], dtype=np.int64)

    def require(self, ids: Iterable[Id]) -> I64:
        """Positions of ids; an unknown one is an error that shows near names."""
        wanted = list(ids)
        found = self.positions(wanted)
        if (found < 0).any():
            missing = wanted[int(np.argmax(found < 0))]
            raise UnknownNameError(self.kind, missing, self.ids.to_list())
        return found

    def take(self, positions: npt.NDArray[np.integer]) -> pl.Series:
        """Ids at positions."""
        return self.ids.gather(positions)

    def digests(self) -> keys.U64:
        """One 64-bit hash per id, the same for 7 and "7"."""
        raw = b"".join(hashlib.blake2b(str(i).encode(), digest_size=8).digest() for i in self.ids)
        return np.frombuffer(raw, dtype="<u8").astype(np.uint64)

    def _find(self, key: Id) -> int:
        found = self._index.get(key)
        if found is not None:
            return found
        other: Id = str(key)
        if self.ids.dtype != pl.String:
            text = str(key)
            other = int(text) if text.removeprefix("-").isdigit() and str(int(text)) == text else text
        return self._index.get(other, -1)

    @cached_property
    def _index(self) -> dict[Id, int]:
        return {i: p for p, i in enumerate(self.ids.to_list())}


@dataclass(frozen=True, eq=False)
class Interactions:
    """Who met what, when: positions in canonical order, with the vocabularies that name them.

    >>> shop = Interactions.from_frame(
    ...     {"customer": ["ann", "ann", "bob"], "sku": ["x", "y", "x"]}, user="customer", item="sku")
    >>> len(shop), len(shop.users), len(shop.items)
    (3, 2, 2)
    """

    users: Vocab
    items: Vocab
    user: I32
    item: I32
    time: I64 | None = None
    rating: npt.NDArray[np.float32] | None = None
    row: I64 | None = None  # place in the file; read by ties="file" alone
    info: pl.DataFrame | None = None  # item, title, genres
    left_out: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0  # repeated (user, item) rows that were merged into their latest

    def __len__(self) -> int:
        return self.user.size

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        user: str = "user",
        item: str = "item",
        rating: str | None = None,
        time: str | None = None,
        titles: Any = None,
        min_rating: float | None = None,
        min_user_rows: int = 1,
        duplicates: Literal["merge", "keep"] = "merge",
        lenient: bool = False,
    ) -> Interactions:
        """From a Polars, pandas or Arrow table (or a dict of columns), columns by name.

        `titles` is a table with columns `item`, `title` and optionally `genres`. Rows with a rating under `min_rating`
        are not positives and are left out, counted; users with fewer than `min_user_rows` rows are left out.
        `duplicates="keep"` is for reproducing published runs only.
        """
        table = as_polars(frame)
        roles = {"user": user, "item": item, "rating": rating, "time": time}
        return cls._build(
            Table(_columns(table, roles, "table")),
            roles,
            source="table",
            unit="row",
            lenient=lenient,
            min_rating=min_rating,
            min_user_rows=min_user_rows,
            duplicates=duplicates,
            titles=titles,
        )

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        user: str | int = "user",
        item: str | int = "item",
        rating: str | int | None = None,
        time: str | int | None = None,
        separator: str | None = None,
        header: bool = True,
        encoding: str = "utf-8",
        titles: Any = None,
        min_rating: float | None = None,
        min_user_rows: int = 1,
        duplicates: Literal["merge", "keep"] = "merge",
        lenient: bool = False,
    ) -> Interactions:
        """From delimited text, plain or gzip; ids stay text ("007" is not "7").

        Columns are given by name, or by number from 1 for files without a header. The separator comes from the file's
        ending (.csv, .tsv, RecBole's .inter) unless given; any text works, `::` included. `lenient=True` sets bad rows
        apart and counts them in `left_out`, up to 5 % of the file.
        """
        source = Path(path)
        fmt = TextFormat.of(source, separator, header, encoding)
        roles = {"user": user, "item": item, "rating": rating, "time": time}
        named = {r: f"column_{c}" if isinstance(c, int) else c for r, c in roles.items()}
        for careful in (False, True):
            table = read_table(source, fmt, careful=careful, lenient=lenient)
            picked = replace(table, frame=_columns(table.frame, named, source))
            try:
                return cls._build(
                    picked,
                    named,
                    source=source,
                    unit="line",
                    lenient=lenient and picked.lines is not None,
                    min_rating=min_rating,
                    min_user_rows=min_user_rows,
                    duplicates=duplicates,
                    titles=titles,
                )
            except DataError:
                if picked.lines is not None:  # the careful reader has spoken
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def from_parquet(cls, path: str | Path, **columns: Any) -> Interactions:
        """From a Parquet file; arguments as in `from_frame`."""
        try:
            frame = pl.read_parquet(path)
        except FileNotFoundError:
            raise DataError("no such file", source=path) from None
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"cannot be read as Parquet ({error})", source=path) from None
        try:
            return cls.from_frame(frame, **columns)
        except DataError as error:
            raise DataError(error.reason, source=path, line=error.line, column=error.column) from None

    @classmethod
    def _build(
        cls,
        table: Table,
        roles: Mapping[str, Any],
        *,
        source: object,
        unit: str,
        lenient: bool,
        min_rating: float | None,
        min_user_rows: int,
        duplicates: str,
        titles: Any,
    ) -> Interactions:
        columns: dict[str, pl.Series] = {}
        problems: Problems = []
        for role in table.frame.columns:
            check = {"rating": check_ratings, "time": check_times}.get(role)
            raw = table.frame[role]
            columns[role], found = check(raw) if check else check_ids(raw, role)
            problems += found
        frame = pl.DataFrame(columns).with_columns(row=pl.Series(np.arange(table.frame.height)))
        frame, left_out = _refuse(frame, table, problems, roles, source, unit, lenient)
        if min_rating is not None:
            if "rating" not in frame.columns:
                raise DataError("min_rating was given, but no rating column", source=source)
            kept = frame.filter(pl.col("rating") >= min_rating)
            left_out[f"rating under {min_rating:g}"] = frame.height - kept.height
            frame = kept
        if min_user_rows > 1:  # counts rows as the papers do, before repeats of a pair are merged
            frame = frame.filter(pl.len().over("user") >= min_user_rows)
        if frame.height == 0:
            raise DataError("no row is left", source=source)
        rows, merged = frame.height, 0
        if duplicates == "merge":
            frame = _merge_duplicates(frame)
            merged = rows - frame.height
        return cls._from_clean(frame, left_out={k: v for k, v in left_out.items() if v}, merged=merged, titles=titles)

    @classmethod
    def _from_clean(
        cls, frame: pl.DataFrame, *, left_out: Mapping[str, int], merged: int, titles: Any = None
    ) -> Interactions:
        users, items = Vocab.of(frame["user"], "user"), Vocab.of(frame["item"], "item")
        made = cls(
            users=users,
            items=items,
            user=users.encode(frame["user"]),
            item=items.encode(frame["item"]),
            time=frame["time"].to_numpy().astype(np.int64) if "time" in frame.columns else None,
            rating=frame["rating"].to_numpy().astype(np.float32) if "rating" in frame.columns else None,
            row=frame["row"].to_numpy().astype(np.int64),
            info=None if titles is None else _info(as_polars(titles), items),
            left_out=left_out,
            merged=merged,
        )
        return made._canonical()

    def _canonical(self) -> Interactions:
        time = self.time if self.time is not None else np.zeros(len(self), dtype=np.int64)
        columns = {"user": self.user, "time": time, "tie": self.tie_keys(), "item": self.item}
        order = pl.DataFrame(columns).select(pl.arg_sort_by("user", "time", "tie", "item")).to_series().to_numpy()
        return replace(self, **{n: _at(getattr(self, n), order) for n in ("user", "item", "time", "rating", "row")})

    def tie_keys(self) -> keys.U64:
        """A hash of (user id, item id) for each row: the order of events that happened at the same time.

        It does not depend on the file, favours no item, and is the same for ids given as numbers or as text.
        """
        user_key = keys.fold(keys.words(int(keys.Purpose.TIES)), self.users.digests())
        result: keys.U64 = keys.fold(user_key[self.user], self.items.digests()[self.item])
        return result

    def titles(self, positions: npt.NDArray[np.integer]) -> list[str]:
        """Titles at item positions; the id where no title is known."""
        ids = [str(i) for i in self.items.take(positions)]
        if self.info is None:
            return ids
        return [t or i for t, i in zip(self.info["title"].gather(positions), ids, strict=True)]

    def digest(self) -> str:
        """SHA-256 of ids and rows; the same for any order of the input file."""
        h = hashlib.sha256()
        for vocab in (self.users, self.items):
            h.update("\x1f".join(map(str, vocab.ids)).encode() + b"\x1e")
        for part in (self.user, self.item, self.time, self.rating):
            h.update(b"-" if part is None else np.ascontiguousarray(part).tobytes())
        return h.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Counts a paper would print."""
        per_user = np.bincount(self.user, minlength=len(self.users))
        per_item = np.bincount(self.item, minlength=len(self.items))
        pairs = np.unique(self.user.astype(np.int64) * len(self.items) + self.item).size
        return {
            "interactions": len(self) + self.merged,
            "users": len(self.users),
            "items": len(self.items),
            "distinct pairs": pairs,
            "sparsity": 1 - pairs / (len(self.users) * len(self.items)),
            "per user": {
                "min": int(per_user.min()),
                "median": float(np.median(per_user)),
                "mean": round(float(per_user.mean()), 2),
                "max": int(per_user.max()),
            },
            "items met once": int((per_item == 1).sum()),
            "repeats merged": self.merged,
            "rows left out": dict(self.left_out),
            "timed": self.time is not None,
            "titles": self.info is not None,
            "digest": self.digest()[:16],
        }


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


def _columns(frame: pl.DataFrame, roles: Mapping[str, Any], source: object) -> pl.DataFrame:
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


def _refuse(
    frame: pl.DataFrame,
    table: Table,
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


def _merge_duplicates(frame: pl.DataFrame) -> pl.DataFrame:
    """Of rows with the same user and item keep the latest (then the best rated): file order plays no part."""
    if frame.select("user", "item").n_unique() == frame.height:
        return frame
    rank: list[str] = [c for c in ("time", "rating") if c in frame.columns] or ["row"]
    return frame.sort(rank, maintain_order=True).unique(["user", "item"], keep="last", maintain_order=True).sort("row")


def _info(titles: pl.DataFrame, items: Vocab) -> pl.DataFrame:
    """Titles in the order of the vocabulary, null where unknown."""
    wanted = pl.DataFrame({"item": items.ids})
    if "genres" not in titles.columns:
        titles = titles.with_columns(genres=pl.lit(None, dtype=pl.String))
    known = titles.select(
        pl.col("item").cast(items.ids.dtype),
        pl.col("title").cast(pl.String),
        pl.col("genres").cast(pl.String),
    )
    return wanted.join(known.unique("item", keep="first"), on="item", how="left", maintain_order="left")


def _at(part: Any, index: Any) -> Any:
    return None if part is None else part[index]
