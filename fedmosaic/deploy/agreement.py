"""What server and nodes agree on beforehand: method, settings, seed, catalogue, and how rounds are held."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from fedmosaic.algorithm.upload import SMALLEST_PAD
from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import digest_of, write_atomic
from fedmosaic.core.ragged import I64
from fedmosaic.data.vocab import Vocab
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import check_adds_up
from fedmosaic.engines.state import Array
from fedmosaic.methods import registry
from fedmosaic.methods.base import validated
from fedmosaic.methods.closed_form import ClosedForm
from fedmosaic.privacy.budget import Budget
from fedmosaic.privacy.secure_sum import LEAST, NEIGHBOURS, SumTerms, check_installed

FILE = "federation.toml"
CATALOGUE = "items.parquet"


class Agreement(BaseModel):
    """The agreement; the digest covers what must be the same everywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    method_settings: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    items: str = Field(description="digest of the catalogue")
    support: Literal["dense", "padded", "touched"] = Field(default="dense", description="which rows are sent")
    own_draws: bool = Field(default=True, description="draws of a device are keyed by a secret of its own")
    spare: float = Field(default=1.0, ge=1, description="so many times more clients are asked than are wanted")
    least: int = Field(default=1, ge=1, description="a round with fewer clients does not count")
    deadline: float = Field(default=120.0, gt=0, description="seconds until a round closes")
    largest_norm: float | None = Field(default=None, gt=0, description="of what a client sends")
    row_quota: int | None = Field(default=None, gt=0, description="item rows a client may send")

    secure: bool = Field(default=True, description="uploads are masked, and the server learns their sum alone")
    cohort: int = Field(default=LEAST, ge=LEAST, description="nodes of a secure sum at least; none takes part in less")
    neighbours: int = Field(default=NEIGHBOURS, ge=2, multiple_of=2, description="of a node in a secure sum of many")
    fewest: int = Field(default=5, ge=1, description="clients that a silo answers for at least, in fixed groups")
    bounds: bool = Field(
        default=True, description="plain uploads are cut to norms that most keep, where the reduction can see them"
    )

    def digest(self) -> str:
        """Name of the federation."""
        named = {"method", "method_settings", "seed", "items", "support", "secure", "cohort", "neighbours"}
        shared = self.model_dump(include=named)
        for loose in ("rounds", "participation"):  # may change on the way
            shared["method_settings"].pop(loose, None)
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]

    def build(self) -> Federation | ClosedForm:
        """The method, ready for local work and for the server's step; refused where its uploads do not add up."""
        if self.method_settings.get("groups") is not None:
            raise SettingsError("groups= is of simulations; a deployment opens one sum in a round: leave groups= out")
        method = registry.entry(self.method).build(self._settings())
        if isinstance(method, ClosedForm):
            return self._summed(method)
        if not isinstance(method, Federation) or method.pooled:
            raise SettingsError(
                f"{self.method} cannot be deployed: what its devices send is not a sum alone; federated algorithms and "
                "closed forms (popularity, itemknn, ease, ials, fcf, mosaic) can"
            )
        if method.algorithm.server.weights != "equal":
            raise SettingsError("weights=size cannot be deployed: a device would say itself how much it counts")
        if self.support == "padded" and self.row_quota is not None and self.row_quota < SMALLEST_PAD:
            raise SettingsError(f"padded uploads have {SMALLEST_PAD} rows at least; row_quota={self.row_quota} is less")
        upload = replace(method.algorithm.upload, support=self.support)
        method = replace(method, algorithm=replace(method.algorithm, upload=upload), team=None)
        if self.secure:
            check_installed()
            check_adds_up(method.algorithm)
        self._check_budget(method)
        return method

    def _settings(self) -> dict[str, Any]:
        """The method's. Where it has an epsilon in rounds, its devices draw the noise, unless told otherwise."""
        fields = registry.entry(self.method).settings.model_fields
        if self.method_settings.get("epsilon") is None or "trust" not in fields:
            return self.method_settings
        return {"trust": "devices", "secure": self.secure, **self.method_settings}

    def _summed(self, form: ClosedForm) -> ClosedForm:
        if not self.secure or form.bounded:
            raise SettingsError(
                f"{self.method}: statistics of one client are its history, so they leave a device under a secure sum "
                "only; leave secure=false and bounded=true out"
            )
        check_installed()
        return form.without_validation()

    def _check_budget(self, method: Federation) -> None:
        if method.budget is None:
            return
        if not self.own_draws:
            raise SettingsError("epsilon= needs noise that nobody else can draw; leave own_draws=false out")
        if not self.secure or method.budget.trust != "devices" or method.participation < 1:
            raise SettingsError(
                "epsilon= is deployed with noise by the devices (trust=devices) under a secure sum in which all take "
                "part (participation=1); leave secure=false, trust=server and participation out"
            )

    def terms(self, round: int, attempt: str, table: str, parties: tuple[int, ...]) -> SumTerms:
        """Of a secure sum: server and nodes make them from the agreement, and from what a task says.

        An epsilon whose noise devices draw needs two thirds of the parties.
        """
        least = self.cohort
        if self.method_settings.get("epsilon") is not None:
            least = max(least, Budget.least(len(parties)))
        return SumTerms(self.digest(), round, table, parties, min(least, len(parties)), 64, self.neighbours, attempt)

    def write(self, folder: Path) -> None:
        """Write it as federation.toml into a folder."""
        write_atomic(folder / FILE, tomli_w.dumps(self.model_dump(exclude_none=True)))

    @classmethod
    def read(cls, folder: Path) -> Agreement:
        """The agreement a folder holds."""
        try:
            return validated(cls, tomllib.loads((folder / FILE).read_text()), str(folder / FILE))
        except FileNotFoundError:
            raise RunError(f"{folder} is not a folder of a deployment: it holds no {FILE}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{folder / FILE} is not TOML: {error}") from None


def groups_of(client_ids: I64, fewest: int) -> list[I64]:
    """Clients of a node in groups that stay the same: as they come, `fewest` each; what is left joins the last.

    >>> [group.tolist() for group in groups_of(np.array([4, 5, 6, 7, 9]), 2)]
    [[4, 5], [6, 7, 9]]
    """
    ordered = np.sort(client_ids)
    cuts = fewest * np.arange(1, max(ordered.size // fewest, 1))
    return np.split(ordered, cuts)


def write_catalogue(folder: Path, catalogue: pl.DataFrame) -> None:
    """Item ids (and titles) in the order everybody numbers them."""
    catalogue.write_parquet(folder / CATALOGUE)


def read_catalogue(folder: Path, agreement: Agreement) -> tuple[Vocab, pl.DataFrame | None]:
    """The agreed items, and their titles where known."""
    try:
        table = pl.read_parquet(folder / CATALOGUE)
    except (FileNotFoundError, pl.exceptions.PolarsError) as error:
        raise RunError(f"{folder / CATALOGUE} is missing or damaged: {error}") from None
    if catalogue_digest(table) != agreement.items:
        raise RunError(f"{folder / CATALOGUE} is not the catalogue that was agreed on (items or their order differ)")
    return Vocab(table["item"], "item"), table if "title" in table.columns else None


def catalogue_digest(catalogue: pl.DataFrame) -> str:
    """Digest of the ids in their order."""
    text = "\n".join(str(i) for i in catalogue["item"].to_list())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamp_of(tensors: Mapping[str, Array]) -> str:
    """Digest of parameters: two nodes with the same stamp hold the same numbers."""
    return digest_of(tensors)[:16]
