"""A node's history: mapped to the agreed catalogue on the node, and nowhere else.

clients.safetensors  the numbers that its users have in the federation
users.json           its users, in the order of those numbers
history.parquet      their interactions: user, item (by its place in the catalogue), time where it is known
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.errors import DataError, RunError
from fedmosaic.core.files import load_tensors, read_json, write_atomic
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.clean import as_polars, merge_duplicates
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.values import check_times
from fedmosaic.data.vocab import Id, Vocab
from fedmosaic.deploy.agreement import Agreement, read_catalogue

HISTORY, USERS, CLIENTS = "history.parquet", "users.json", "clients.safetensors"


def take_history(
    place: Path, history: Any, user: str | None = "user", item: str = "item", time: str | None = "time"
) -> None:
    """Keep a history in a node's folder; strange items, users and times are refused by name.

    history: a table with columns for users and items (items alone on a device), and times where there are any.
    """
    items, _ = read_catalogue(place, Agreement.read(place))
    frame = as_polars(history)
    if item not in frame.columns:
        raise DataError(f"has no column {item!r}; it has {', '.join(frame.columns)}", source="history")
    who = frame[user].cast(pl.String) if user in frame.columns else pl.Series(["me"] * frame.height, dtype=pl.String)
    what: list[Id] = frame[item].to_list()
    at = items.positions(what)
    strange = [str(what[i]) for i in np.flatnonzero(at < 0)[:5]]
    if strange:
        raise DataError(
            f"{int((at < 0).sum())} of {frame.height} items are not in the catalogue, e.g. {', '.join(strange)}",
            source="history", column=item,
        )  # fmt: skip
    known = pl.DataFrame({"user": who, "item": at.astype(np.int32), "row": np.arange(frame.height)})
    if time in frame.columns:
        known = known.with_columns(_times(frame[time]).alias("time"))
    users = _same_users(place, known["user"].unique(maintain_order=True))
    kept = merge_duplicates(known).sort("time" if "time" in known.columns else "row", maintain_order=True).drop("row")
    write_atomic(place / USERS, json.dumps(users))
    stream = io.BytesIO()
    kept.write_parquet(stream)
    write_atomic(place / HISTORY, stream.getvalue())


def _times(column: pl.Series) -> pl.Series:
    values, problems = check_times(column)
    for _, reason, bad in problems:
        if bad.any():
            row = int(bad.arg_max() or 0)
            raise DataError(f"{column[row]!r} {reason}", source="history", line=row + 1, column=column.name)
    return values


def _same_users(place: Path, found: pl.Series) -> list[str]:
    """Users in the order of their ids: as they came first; later histories must be of the same ones."""
    admitted = load_tensors(place / CLIENTS)[0]["client_ids"].size
    if (place / USERS).is_file():
        before: list[str] = read_json(place / USERS)
        strangers = sorted(set(found) - set(before))
        if strangers:
            raise DataError(f"holds users that were not here before: {', '.join(strangers[:5])}", source="history")
        return before
    if found.len() != admitted:
        raise DataError(f"holds {found.len()} users; this node was invited with {admitted}", source="history")
    return [str(u) for u in found]


def read_history(place: Path, n_items: int) -> tuple[Vocab, TrainingSet]:
    """The users of a node's folder, and what they hold."""
    file = place / HISTORY
    if not file.is_file():
        raise RunError(f"{place} holds no history yet; `fedmosaic deploy device --history FILE` brings it")
    try:
        known = pl.read_parquet(io.BytesIO(file.read_bytes()))
        who, what = known["user"].to_list(), known["item"].to_numpy()
        times = known["time"].to_numpy() if "time" in known.columns else None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise RunError(f"{file} is damaged: {error}; `--history FILE` brings the history again") from None
    users = Vocab(pl.Series("user", read_json(place / USERS)), "user")
    rows = users.positions(who)
    histories = Ragged.group(rows, what, len(users))
    tensors, _ = load_tensors(place / CLIENTS)
    return users, TrainingSet(
        histories, histories.unique(), n_items, client_ids=tensors["client_ids"],
        times=None if times is None else times[np.argsort(rows, kind="stable")],
    )  # fmt: skip
