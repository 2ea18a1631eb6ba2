"""What a recommender learns from: interactions in any shape, and further ones behind those it knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.serving.catalogue import Catalogue


def as_interactions(data: Any, columns: Mapping[str, Any]) -> Interactions:
    """Interactions of whatever holds them: themselves, the path of a file, or a table."""
    if isinstance(data, Interactions):
        refuse(columns, "interactions")
        return data
    if isinstance(data, str | Path):
        return Interactions.from_file(data, **columns)
    return Interactions.from_frame(data, **columns)


def joined(catalogue: Catalogue, more: Interactions) -> Interactions:
    """What was trained on and further events, as one; titles of either."""
    held = catalogue.training.held
    if (held.times is None) != (more.time is None):
        raise SettingsError(
            "times are known of the old events or of the new ones, not of both; give time= to both, or none"
        )
    old = {"user": catalogue.users.take(held.items.rows), "item": catalogue.items.take(held.items.values)}
    new = {"user": more.users.take(more.user), "item": more.items.take(more.item)}
    if held.times is not None and more.time is not None:
        old["time"], new["time"] = pl.Series(held.times), pl.Series(more.time.astype(np.int64))
    alike = [column for column in ("user", "item") if old[column].dtype != new[column].dtype]
    for column in alike:  # 7 and "7" are one id
        old[column], new[column] = old[column].cast(pl.String), new[column].cast(pl.String)
    infos = [
        i.with_columns(pl.col("item").cast(old["item"].dtype)) for i in (more.info, catalogue.info) if i is not None
    ]
    titles = pl.concat(infos).drop_nulls("title") if infos else None
    frame = pl.concat([pl.DataFrame(old), pl.DataFrame(new)])
    return Interactions.from_frame(frame, time="time" if "time" in old else None, titles=titles)


def everything(known: Interactions) -> TrainingSet:
    """All events as what is trained on, nothing held out."""
    histories = Ragged.group(known.user, known.item, len(known.users))
    return TrainingSet(histories, histories.unique(), len(known.items), times=known.time)


def refuse(columns: Mapping[str, Any], what: str) -> None:
    """Columns are said of tables and files alone."""
    if columns:
        raise SettingsError(f"{', '.join(columns)}: columns are of a table or file; {what} has its own")
