"""Titles of items: from a column of the data, or from a table or file of their own, whatever its columns are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from fedmosaic.core.errors import DataError
from fedmosaic.data.clean import as_polars
from fedmosaic.data.own_files import read_text
from fedmosaic.data.recognise import by_name, recognise, role_of
from fedmosaic.data.text import read_table
from fedmosaic.data.vocab import Vocab

LEAST_MATCH = 0.01  # share of the items that a column of ids must know


def titled(titles: Any, items: Vocab) -> pl.DataFrame:
    """Titles in the order of the vocabulary, null where unknown. titles: a table, or the path of a file."""
    source = titles if isinstance(titles, str | Path) else "titles"
    table = _read(Path(titles)) if isinstance(titles, str | Path) else as_polars(titles)
    ids, title = _columns(table, items, source)
    genres = pl.col("genres") if "genres" in table.columns else pl.lit(None)
    known = table.select(
        pl.col(ids).cast(pl.String).alias("item"),
        pl.col(title).cast(pl.String).alias("title"),
        genres.cast(pl.String).alias("genres"),
    ).unique("item", keep="first")
    wanted = pl.DataFrame({"item": items.ids})
    spelled = wanted.with_columns(pl.col("item").cast(pl.String))
    found = spelled.join(known, on="item", how="left", maintain_order="left")
    return wanted.with_columns(found["title"], found["genres"])


def own_titles(frame: pl.DataFrame) -> pl.DataFrame | None:
    """Titles that stand beside the interactions, each item's first; None where there are none."""
    if "title" not in frame.columns:
        return None
    return frame.select("item", "title").drop_nulls().unique("item", keep="first", maintain_order=True)


def _read(path: Path) -> pl.DataFrame:
    """A file of titles as text; what its columns are for is found by `_columns`."""
    text, encoding = read_text(path)
    seen = recognise(text, path, {"user": 1, "item": 1, "encoding": encoding})  # it has no users
    return read_table(path, seen.fmt, text=text).frame


def _columns(table: pl.DataFrame, items: Vocab, source: object) -> tuple[str, str]:
    """The column of ids (the one that knows most of the items) and that of titles (so called, or the longest texts)."""
    if {"item", "title"} <= set(table.columns):
        return "item", "title"
    wanted = pl.Series("id", items.ids.cast(pl.String))
    matches = {
        name: table[name].cast(pl.String, strict=False).unique().is_in(wanted.implode()).sum()
        for name in table.columns
        if table[name].dtype in (pl.String, pl.Categorical) or table[name].dtype.is_integer()
    }
    named = [n for n in table.columns if role_of(n) == "item"]
    best = max(matches, key=lambda n: (matches[n], n in named), default=None)
    if best is None or matches[best] < LEAST_MATCH * len(items):
        raise DataError(
            f"no column holds the ids of the items; the columns are {', '.join(map(repr, table.columns))}, "
            f"and the items are like {', '.join(repr(i) for i in items.ids.head(3).to_list())}",
            source=source,
        )
    rest = [n for n in table.columns if n != best]
    title = by_name("title", rest) or next((n for n in rest if n.lower() in ("name", "label", "text")), None)
    texts = [n for n in rest if table[n].dtype == pl.String]
    if title is None and texts:  # ids may be names themselves, and then every item is its own title
        title = max(texts, key=lambda n: _wordiness(table[n]))
    if title is None:
        raise DataError(
            f"no column holds titles beside the ids {best!r}; the columns are {', '.join(map(repr, table.columns))}",
            source=source,
        )
    return best, title


def _wordiness(column: pl.Series) -> float:
    """How much a column looks like titles: different texts with letters in them, none an address."""
    texts = column.drop_nulls().head(1000)
    if texts.is_empty() or texts.str.contains("://").any():
        return 0.0
    return texts.n_unique() / texts.len() * int(texts.str.contains(r"\p{L}").sum()) / texts.len()
