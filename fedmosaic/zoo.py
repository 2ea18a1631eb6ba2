"""The catalogue: every method by name, a short composition each, with its paper and the numbers to expect.

Settings named `paper` are those of the papers, learning rates of 13,456 included. `scale-free` is for new work: rates
that mean the same for any number of clients and items, rows averaged over the clients that trained them, a server
optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmosaic.algorithm import Algorithm, compose
from fedmosaic.closed_form.ease import EASE
from fedmosaic.closed_form.fcf import FCF
from fedmosaic.closed_form.ials import IALS
from fedmosaic.closed_form.itemknn import ItemKNN
from fedmosaic.closed_form.popularity import Popularity
from fedmosaic.errors import SettingsError, UnknownNameError
from fedmosaic.local import Adam, Move, Pass, PerItem, Phase
from fedmosaic.models.mf import LinearScorer
from fedmosaic.models.ncf import NCF, NeuMF
from fedmosaic.models.view import Model
from fedmosaic.personalise.dual import dual
from fedmosaic.runtime.federation import Engine, Federation
from fedmosaic.server import Server
from fedmosaic.training import Method
from fedmosaic.tree import Axis, Init, Role
from fedmosaic.upload import Upload

M = TypeVar("M", bound=BaseModel)


class FederatedSettings(BaseModel):
    """Settings of every federated method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(default=100, ge=1, description="rounds of training")
    participation: float = Field(default=1.0, gt=0, le=1, description="share of clients drawn in a round")
    dim: int = Field(default=32, ge=1, description="width of the vectors")
    negatives: int = Field(default=4, ge=0, description="fresh negatives per positive and round")
    batch_size: int = Field(default=256, ge=1, description="examples per step")
    local_epochs: int = Field(default=1, ge=1, description="epochs on the device per round")
    engine: Engine = Field(default="auto", description="auto, loop, simulate or kernel; changes speed, not numbers")


class LinearSettings(FederatedSettings):
    """Settings of methods on the linear scorer."""

    preset: Literal["paper", "scale-free"] = Field(default="paper", description="whose learning rates")
    score_rate: float | None = Field(default=None, gt=0, description="rate of the user side; none = the preset's")
    item_rate: float | None = Field(default=None, gt=0, description="rate of the item side; none = the preset's")


class NetworkSettings(FederatedSettings):
    """Settings of methods with a network."""

    rate: float = Field(default=1.0, gt=0, description="rate of the network")
    user_rate: float = Field(default=30.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=24.0, gt=0, description="item rate = rate · items · factor (PFedRec's rule)")


class RowNetworkSettings(FederatedSettings):
    """Settings of Perifanis' FedNCF."""

    participation: float = Field(default=0.1, gt=0, le=1, description="share of clients drawn in a round")
    local_epochs: int = Field(default=2, ge=1, description="epochs on the device per round")
    rate: float = Field(default=1e-3, gt=0, description="rate of the device's Adam")


class CentralSettings(FederatedSettings):
    """Settings of central references: one client that holds everybody."""

    rounds: int = Field(default=30, ge=1, description="epochs")
    batch_size: int = Field(default=1024, ge=1, description="examples per step")
    rate: float = Field(default=1e-3, gt=0, description="rate of Adam")
    decay: float = Field(default=0.0, ge=0, description="weight decay")


def linear(s: LinearSettings) -> Algorithm:
    """FedMF: private user vectors, a shared item table, both moved by one gradient."""
    paper = s.preset == "paper"
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0 if paper else 0.1), user_init=start)
    score_rate = s.score_rate or (0.1 if paper else 1.0)
    # PFedRec's released code: rate · items · 80, which undoes the 1/clients of the mean and the 1/batch of the loss
    item_rate = s.item_rate or (PerItem(0.1 * 80) if paper else 1.0)
    step = Phase((Move(("user", "bias"), score_rate), Move(("item",), item_rate)))
    server = Server() if paper else Server("row-mean", Adam(), 0.03)
    upload = Upload("value" if paper else "delta")
    local = (_pass(s, step),)
    return Algorithm(model, roles_of(model), local, upload=upload, server=server, negatives=s.negatives)


def fedncf(s: NetworkSettings) -> Algorithm:
    """FedNCF in PFedRec's form: item table and network averaged with equal weights.

    The paper does not print this baseline's rates; these were chosen on validation (ML-100K, legacy).
    """
    model = NCF(s.dim, init=Init("normal", 0.3))
    network = tuple(n.name for n in model.specs() if n.axis is Axis.WHOLE)
    items = Move(("item",), PerItem(s.rate * s.item_factor))
    step = Phase((Move(network, s.rate), Move(("user",), s.user_rate), items))
    return Algorithm(model, roles_of(model), (_pass(s, step),), upload=Upload("value"), negatives=s.negatives)


def fedncf_rows(s: RowNetworkSettings) -> Algorithm:
    """FedNCF in Perifanis' form: each item row averaged over the clients that trained it, Adam on the device."""
    model = NCF(s.dim)
    step = Phase((Move(tuple(n.name for n in model.specs()), s.rate, Adam()),))
    return Algorithm(model, roles_of(model), (_pass(s, step),), server=Server("row-mean"), negatives=s.negatives)


def alone(host: Algorithm) -> Algorithm:
    """Nothing leaves the device: every parameter private."""
    return replace(host, roles=dict.fromkeys(host.specs, Role.PRIVATE))


def central(model: Model, s: CentralSettings) -> Federation:
    """One client that holds everybody, with an optimiser that remembers."""
    step = Phase((Move(tuple(n.name for n in model.specs()), s.rate, Adam(decay=s.decay, persistent=True)),))
    roles = dict.fromkeys((n.name for n in model.specs()), Role.PRIVATE)
    algorithm = Algorithm(model, roles, (_pass(s, step),), negatives=s.negatives)
    return replace(_federation(s, algorithm), pooled=True)


def roles_of(model: Model) -> dict[str, Role]:
    """The common division: user parameters private, everything else shared."""
    return {n.name: Role.PRIVATE if n.axis is Axis.USER else Role.SHARED for n in model.specs()}


def _pass(s: FederatedSettings, *phases: Phase) -> Pass:
    return Pass(phases, s.local_epochs, s.batch_size)


def _federation(s: FederatedSettings, algorithm: Algorithm) -> Federation:
    return Federation(algorithm, s.rounds, s.participation, engine=s.engine)


@dataclass(frozen=True)
class Entry:
    """A method of the catalogue; `expect` maps a data set to its HR@10 and NDCG@10 (strict, 1 + 99) in percent."""

    name: str
    title: str
    paper: str
    settings: type[BaseModel]
    make: Callable[[Any], Method] = lambda settings: settings
    expect: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def build(self, settings: Mapping[str, Any] | None = None) -> Any:
        """The method with some settings changed; unknown ones are refused by name."""
        return self.make(validated(self.settings, dict(settings or {}), f"method {self.name}"))


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
            expect={"ml-100k": (42.2, 22.9), "amazon-video": (59.9, 39.2)},
        ),
        Entry(
            "itemknn",
            "Item neighbourhoods by cosine",
            "Sarwar et al., Item-based collaborative filtering, WWW 2001",
            ItemKNN,
            expect={"ml-100k": (49.6, 29.1), "amazon-video": (55.2, 36.4)},
        ),
        Entry(
            "ease",
            "Linear item-item model in closed form",
            "Steck, Embarrassingly shallow autoencoders, WWW 2019",
            EASE,
            expect={"ml-100k": (66.3, 38.5)},
        ),
        Entry(
            "ials",
            "Implicit alternating least squares",
            "Hu et al., ICDM 2008; Rendle et al., RecSys 2022",
            IALS,
            expect={"ml-100k": (66.7, 37.9), "amazon-video": (57.2, 42.4)},
        ),
        Entry(
            "fcf",
            "Federated collaborative filtering: users solved on devices, item gradients summed",
            "Ammad-ud-din et al., arXiv 1901.09888, 2019",
            FCF,
        ),
        Entry(
            "fedmf",
            "Federated matrix factorisation: private user vectors, shared item table",
            "Chai et al., Secure federated matrix factorization, 2020; as PFedRec compares with it",
            LinearSettings,
            lambda s: _federation(s, linear(s)),
        ),
        Entry(
            "pfedrec",
            "Dual personalisation: private score function, locally tuned item rows",
            "Zhang et al., Dual personalization on federated recommendation, IJCAI 2023",
            LinearSettings,
            lambda s: _federation(s, compose(linear(s), dual())),
        ),
        Entry(
            "local-only",
            "No federation: every device trains its own table (the leak's litmus test)",
            "the row every table needs",
            LinearSettings,
            lambda s: _federation(s, alone(compose(linear(s), dual()))),
        ),
        Entry(
            "fedncf",
            "Federated neural collaborative filtering, table and network averaged",
            "Perifanis & Efraimidis, 2022; in the form PFedRec compares with",
            NetworkSettings,
            lambda s: _federation(s, fedncf(s)),
        ),
        Entry(
            "fedncf-rows",
            "Federated neural collaborative filtering, rows averaged over the clients that trained them",
            "Perifanis & Efraimidis, Federated neural collaborative filtering, 2022",
            RowNetworkSettings,
            lambda s: _federation(s, fedncf_rows(s)),
        ),
        Entry(
            "fedncf-dual",
            "Dual personalisation on FedNCF",
            "Zhang et al., IJCAI 2023, table 3",
            NetworkSettings,
            lambda s: _federation(s, compose(fedncf(s), dual())),
        ),
        Entry(
            "mf",
            "Central matrix factorisation",
            "Koren et al., 2009; with sampled cross-entropy as in He et al., WWW 2017",
            CentralSettings,
            lambda s: central(LinearScorer(s.dim), s),
        ),
        Entry(
            "ncf",
            "Central neural collaborative filtering (MLP)",
            "He et al., Neural collaborative filtering, WWW 2017",
            CentralSettings,
            lambda s: central(NCF(s.dim), s),
        ),
        Entry(
            "neumf",
            "Central NeuMF: product and tower",
            "He et al., Neural collaborative filtering, WWW 2017",
            CentralSettings,
            lambda s: central(NeuMF(max(1, s.dim // 4)), s),
        ),
    )
}
