"""Interactions: the one border between the user's ids and positions.

Outside there are ids (text or integers, opaque); inside there are positions 0..n-1. Rows are kept in a canonical order
(user, time, tie key, item), so that nothing downstream can depend on the order of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core import keys
from fedmosaic.core.errors import DataError, SettingsError
from fedmosaic.core.ragged import I32, I64
from fedmosaic.data.clean import as_polars, merge_duplicates, pick_columns, refuse_rows
from fedmosaic.data.text import TextFormat, TextTable, read_table
from fedmosaic.data.values import Problems, check_ids, check_ratings, check_times
from fedmosaic.data.vocab import Vocab


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
    repeats: bool = False  # repeated rows were kept, to reproduce published runs

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
            TextTable(pick_columns(table, roles, "table")),
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
            picked = replace(table, frame=pick_columns(table.frame, named, source))
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
        table: TextTable,
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
        frame, left_out = refuse_rows(frame, table, problems, roles, source, unit, lenient)
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
        if duplicates not in ("merge", "keep"):
            raise SettingsError(f"duplicates must be 'merge' or 'keep', not {duplicates!r}")
        if duplicates == "merge":
            frame = merge_duplicates(frame)
            merged = rows - frame.height
        return cls._from_clean(
            frame,
            left_out={k: v for k, v in left_out.items() if v},
            merged=merged,
            titles=titles,
            repeats=duplicates == "keep",
        )

    @classmethod
    def _from_clean(
        cls, frame: pl.DataFrame, *, left_out: Mapping[str, int], merged: int, titles: Any, repeats: bool
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
            repeats=repeats,
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
