"""The catalogue: every method by name, with its paper, its settings and the numbers to expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedmosaic.closed_form.base import ClosedForm
from fedmosaic.closed_form.ease import EASE
from fedmosaic.closed_form.ials import IALS
from fedmosaic.closed_form.itemknn import ItemKNN
from fedmosaic.closed_form.popularity import Popularity
from fedmosaic.errors import SettingsError, UnknownNameError
from fedmosaic.training import Method

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Entry:
    """A method of the catalogue; `expect` maps a data set to its HR@10 and NDCG@10 (strict, 1 + 99) in percent."""

    name: str
    title: str
    paper: str
    settings: type[ClosedForm]
    expect: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def build(self, settings: Mapping[str, Any] | None = None) -> Method:
        """The method with some settings changed; unknown ones are refused by name."""
        return validated(self.settings, dict(settings or {}), f"method {self.name}")


def entry(name: str) -> Entry:
    """The catalogue entry of a method.

    >>> entry("ease").build({"lam": 200}).lam
    200.0
    """
    if name not in ZOO:
        raise UnknownNameError("method", name, ZOO)
    return ZOO[name]


def validated(model: type[M], values: Mapping[str, Any], owner: str) -> M:
    """Build a settings model; errors name the setting, its value, and what is allowed."""
    for key in values:
        if key not in model.model_fields:
            raise UnknownNameError(f"setting of {owner}", key, model.model_fields)
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"setting {where} of {owner}: {first['msg']} (got {first['input']!r})") from None


ZOO: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry(
            "popularity",
            "Most popular items, the same list for everybody",
            "folklore; the row every table needs",
            Popularity,
            {"ml-100k": (42.2, 22.9), "amazon-video": (59.9, 39.2)},
        ),
        Entry(
            "itemknn",
            "Item neighbourhoods by cosine",
            "Sarwar et al., Item-based collaborative filtering, WWW 2001",
            ItemKNN,
            {"ml-100k": (49.6, 29.1), "amazon-video": (55.2, 36.4)},
        ),
        Entry(
            "ease",
            "Linear item-item model in closed form",
            "Steck, Embarrassingly shallow autoencoders, WWW 2019",
            EASE,
            {"ml-100k": (66.3, 38.5)},
        ),
        Entry(
            "ials",
            "Implicit alternating least squares",
            "Hu et al., ICDM 2008; Rendle et al., RecSys 2022",
            IALS,
            {"ml-100k": (66.7, 37.9), "amazon-video": (57.2, 42.4)},
        ),
    )
}
