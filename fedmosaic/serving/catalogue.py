"""The catalogue: vocabularies, titles and histories; what turns tensors back into answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import load_tensors, save_tensors
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.vocab import Vocab


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Who and what a model knows: users and items by position, titles where known, and what it was trained on."""

    users: Vocab
    items: Vocab
    info: pl.DataFrame | None  # a row per item; titles
    training: TrainingSet
    retired: I64 | None = None  # items that no list shows any more

    @property
    def retired_mask(self) -> npt.NDArray[np.bool_]:
        """Per item, whether it is retired."""
        gone = np.zeros(len(self.items), dtype=bool)
        if self.retired is not None:
            gone[self.retired] = True
        return gone

    def save(self, place: Path) -> None:
        """Write users.parquet, items.parquet and histories.safetensors into a folder."""
        place.mkdir(parents=True, exist_ok=True)
        self.users.ids.alias("user").to_frame().write_parquet(place / "users.parquet")
        ids = self.items.ids.alias("item")
        table = ids.to_frame() if self.info is None else self.info.with_columns(ids)
        if self.retired is not None:
            table = table.with_columns(retired=pl.Series(self.retired_mask))
        table.write_parquet(place / "items.parquet")
        parts = {"histories": self.training.histories, "excluded": self.training.excluded}
        if self.training.silos is not None:
            parts["silos"] = self.training.silos
        arrays = {f"{n}.{k}": getattr(r, k) for n, r in parts.items() for k in ("values", "offsets")}
        if self.training.times is not None:
            arrays["times"] = self.training.times
        save_tensors(place / "histories.safetensors", arrays)

    @classmethod
    def load(cls, place: Path) -> Catalogue:
        """Read `save` back."""
        try:
            users, items = pl.read_parquet(place / "users.parquet"), pl.read_parquet(place / "items.parquet")
        except (FileNotFoundError, pl.exceptions.PolarsError) as error:
            raise RunError(f"{place} holds no readable catalogue: {error}") from None
        tensors, _ = load_tensors(place / "histories.safetensors")
        times = tensors.pop("times", None)
        names = {name.split(".")[0] for name in tensors}
        stored = {n: Ragged(tensors[f"{n}.values"], tensors[f"{n}.offsets"]) for n in names}
        training = TrainingSet(stored["histories"], stored["excluded"], items.height, stored.get("silos"), times=times)
        retired = np.flatnonzero(items["retired"].to_numpy()) if "retired" in items.columns else None
        items = items.drop("retired", strict=False)
        info = items if "title" in items.columns else None
        return cls(Vocab(users["user"], "user"), Vocab(items["item"], "item"), info, training, retired)
