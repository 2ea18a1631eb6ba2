"""Interactions: the one border between the user's ids and positions.

Outside there are ids (text or integers, opaque); inside there are positions 0..n-1. Rows are kept in a canonical order
(user, time, tie key, item), so that nothing downstream can depend on the order of a file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core import keys
from fedmosaic.core.errors import DataError, SettingsError
from fedmosaic.core.looks import Glance, Shown
from fedmosaic.core.ragged import I32, I64
from fedmosaic.data.clean import as_polars, cleaned, merge_duplicates, pick_columns
from fedmosaic.data.own_files import alike, matching, read_own
from fedmosaic.data.recognise import by_name
from fedmosaic.data.text import TextTable
from fedmosaic.data.titles import own_titles, titled
from fedmosaic.data.vocab import Vocab

TEXT_ONLY = ("separator", "header", "encoding", "decimal")  # what only files of text have


@dataclass(frozen=True, eq=False, repr=False)
class Interactions(Shown):
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
    read_as: str | None = None  # how a file of one's own was read, in words
    repeats: bool = False  # repeated rows were kept, to reproduce published runs

    def __len__(self) -> int:
        return self.user.size

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        user: str | None = None,
        item: str | None = None,
        rating: str | None = None,
        time: str | None = None,
        title: str | None = None,
        titles: Any = None,
        min_rating: float | None = None,
        min_user_rows: int = 1,
        duplicates: Literal["merge", "keep"] = "merge",
        lenient: bool = False,
    ) -> Interactions:
        """From a Polars, pandas or Arrow table (or a dict of columns), columns by name.

        user, item: found by their names where they are not said; rating, time: used where they are said.

        title: a column with the items' titles. `titles` is a table (or a file) of its own, with a column of ids, by any
        name, one of titles, and optionally `genres`. Rows with a rating under `min_rating`
        are not positives and are left out, counted; users with fewer than `min_user_rows` rows are left out.
        `duplicates="keep"` is for reproducing published runs only.
        """
        table = as_polars(frame)
        user = user or by_name("user", table.columns) or "user"
        item = item or by_name("item", table.columns) or "item"
        roles = {"user": user, "item": item, "rating": rating, "time": time}
        own = own_titles(table.rename({item: "item", title: "title"})) if title in table.columns else None
        clean, left_out = cleaned(
            TextTable(pick_columns(table, roles, "table")), roles, source="table", unit="row", lenient=lenient
        )
        return cls._finished(
            clean,
            left_out,
            source="table",
            min_rating=min_rating,
            min_user_rows=min_user_rows,
            duplicates=duplicates,
            titles=own if titles is None else titles,
        )

    @classmethod
    def from_csv(
        cls,
        path: str | Path | Sequence[str | Path],
        *,
        user: str | int | None = None,
        item: str | int | None = None,
        rating: str | int | None = None,
        time: str | int | None = None,
        title: str | int | None = None,
        separator: str | None = None,
        header: bool | None = None,
        encoding: str | None = None,
        decimal: Literal[".", ","] | None = None,
        titles: Any = None,
        min_rating: float | None = None,
        min_user_rows: int = 1,
        duplicates: Literal["merge", "keep"] = "merge",
        lenient: bool = False,
    ) -> Interactions:
        """From delimited text, plain, gzip or zip; ids stay text ("007" is not "7"). Several files count as one.

        Whatever is not said is recognised and told in `read_as`: the separator (any text works, `::` included), the
        header, the encoding, decimal commas, and which columns are for what. user, item, rating, time, title: columns
        by name, or by number from 1; `no` where a column that is there should not be used. titles: a table or a file
        with titles of items. min_rating: rows with a lower rating are no positives. lenient: sets bad rows apart and
        counts them in `left_out`, up to 5 % of the file.
        """
        said = {
            "user": user, "item": item, "rating": rating, "time": time, "title": title,
            "separator": separator, "header": header, "encoding": encoding, "decimal": decimal,
        }  # fmt: skip
        files = [path] if isinstance(path, str | Path) else list(path)
        tables = [read_own(Path(file), said, min_rating is not None, lenient) for file in files]
        alike({t.source: t.columns for t in tables})
        left_out = sum((Counter(t.left_out) for t in tables), Counter[str]())
        frame = pl.concat([t.frame for t in tables]) if len(tables) > 1 else tables[0].frame
        if len(tables) > 1:
            frame = frame.with_columns(row=pl.Series(np.arange(frame.height)))
        own = own_titles(frame)
        made = cls._finished(
            frame.drop("title", strict=False),
            left_out,
            source=", ".join(t.source for t in tables),
            min_rating=min_rating,
            min_user_rows=min_user_rows,
            duplicates=duplicates,
            titles=own if titles is None else titles,
        )
        return replace(made, read_as=tables[0].words)

    @classmethod
    def from_parquet(cls, path: str | Path, **columns: Any) -> Interactions:
        """From a Parquet file; arguments as in `from_frame`."""
        try:
            frame = pl.read_parquet(path)
        except FileNotFoundError:
            raise DataError("no such file", source=path) from None
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"cannot be read as Parquet ({error})", source=path) from None
        if columns.get("time") is None:
            columns["time"] = by_name("time", frame.columns)
        columns = {k: v for k, v in columns.items() if v is not None and v != "no"}
        try:
            return cls.from_frame(frame, **columns)
        except DataError as error:
            raise DataError(error.reason, source=path, line=error.line, column=error.column) from None

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> Interactions:
        """From a file of either kind, or all that a pattern names (`logs/*.csv`); options as in `from_csv`.

        Parquet knows its columns' names and kinds, so options about text are for the others alone.
        """
        files = matching(path)
        if files[0].suffix != ".parquet":
            return cls.from_csv(files if len(files) > 1 else files[0], **options)
        text_only = [k for k in TEXT_ONLY if options.get(k) is not None]
        if text_only or len(files) > 1:
            wrong = f"takes no {', '.join(text_only)}" if text_only else "is read one file at a time"
            raise DataError(f"Parquet {wrong}", source=path)
        return cls.from_parquet(files[0], **{k: v for k, v in options.items() if k not in TEXT_ONLY})

    @classmethod
    def _finished(
        cls,
        frame: pl.DataFrame,
        left_out: Mapping[str, int],
        *,
        source: object,
        min_rating: float | None,
        min_user_rows: int,
        duplicates: str,
        titles: Any,
    ) -> Interactions:
        """Clean rows filtered, repeats merged, ids numbered."""
        left_out = dict(left_out)
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
            info=None if titles is None else titled(titles, items),
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

    def _rating_span(self) -> str:
        """From where to where ratings go, and what a usual threshold would keep."""
        assert self.rating is not None
        low, high = float(self.rating.min()), float(self.rating.max())
        bar = float(np.ceil(low + 0.7 * (high - low)))
        kept = float((self.rating >= bar).mean())
        words = f"{low:g} to {high:g}; every row counts as a positive"
        return words if low == high else f"{words}, min_rating={bar:g} would keep {kept:.0%}"

    def glance(self) -> Glance:
        """Counts, and whether there are times, ratings and titles."""
        users, items = len(self.users), len(self.items)
        per_user = np.bincount(self.user, minlength=users)
        parts = {"times": self.time, "ratings": self.rating, "titles": self.info}
        has = [name for name, part in parts.items() if part is not None]
        facts = [
            ("users", f"{users:,}"),
            ("items", f"{items:,}"),
            ("events per user", f"{np.median(per_user):g} (median), {per_user.min()} to {per_user.max()}"),
            ("density", f"{len(self) / max(users * items, 1):.2%}"),
            ("with", ", ".join(has) or "neither times, ratings nor titles"),
        ]
        left = [("left out", ", ".join(f"{n:,} x {why}" for why, n in self.left_out.items()))] if self.left_out else []
        return Glance(f"Interactions: {len(self):,} events", facts + left)

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
            **({"ratings": self._rating_span()} if self.rating is not None else {}),
            **({"read as": self.read_as.removeprefix("read as: ")} if self.read_as is not None else {}),
            "digest": self.digest()[:16],
        }


def _at(part: Any, index: Any) -> Any:
    return None if part is None else part[index]
