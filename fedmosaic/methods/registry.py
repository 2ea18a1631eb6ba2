"""The catalogue: every method by name, a short composition each, with its paper and the numbers to expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF, NeuMF
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.algorithm.wrappers.low_rank import low_rank
from fedmosaic.algorithm.wrappers.sharpness import sharpness_aware
from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.methods.ease import EASE
from fedmosaic.methods.fcf import FCF
from fedmosaic.methods.fedpergnn import FedPerGNN, GNNSettings
from fedmosaic.methods.gpfedrec import GPFedRec, GraphSettings
from fedmosaic.methods.hosts import (
    AdditiveSettings,
    CentralSettings,
    DualNetworkSettings,
    GelSettings,
    LinearSettings,
    LowRankSettings,
    MixedLinearSettings,
    MixedNetworkSettings,
    NetworkSettings,
    ReconSettings,
    RowNetworkSettings,
    SharedTableSettings,
    SharpnessSettings,
    TableSettings,
    alone,
    central,
    federation,
    fedncf,
    fedncf_rows,
    fedneumf,
    fedrap,
    fedrecon,
    fixing,
    linear,
    mixed,
    own_table,
    shared_table,
)
from fedmosaic.methods.ials import IALS
from fedmosaic.methods.itemknn import ItemKNN
from fedmosaic.methods.metamf import MetaMF, MetaSettings
from fedmosaic.methods.popularity import Popularity
from fedmosaic.training.method import Method

M = TypeVar("M", bound=BaseModel)

PFEDREC = "Zhang et al., Dual personalization on federated recommendation, IJCAI 2023"
FEDRAP = "Li, Long & Zhou, Federated recommendation with additive personalization, ICLR 2024"
PLGC = "after Shen et al., arXiv 2508.19591, 2025; built from the abstract, see personalise/mixing.py"
GEL = "Sharpness-aware minimization for generalized embedding learning, arXiv 2603.11503, WWW 2026"


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


def register(new: Entry) -> None:
    """Add a method of one's own, so that recommenders, runs and comparisons of this process know it by name."""
    if new.name in ZOO:
        raise SettingsError(f"there is a method {new.name!r} already; choose another name")
    ZOO[new.name] = new


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
            lambda s: federation(s, linear(s)),
        ),
        Entry(
            "pfedrec",
            "Dual personalisation: private score function, locally tuned item rows",
            PFEDREC,
            LinearSettings,
            lambda s: federation(s, linear(s), dual()),
        ),
        Entry(
            "local-only",
            "No federation: every device trains its own table (the leak's litmus test)",
            "the row every table needs",
            LinearSettings,
            lambda s: federation(s, linear(s), dual(), alone),
        ),
        Entry(
            "fedncf",
            "Federated neural collaborative filtering, table and network averaged",
            "Perifanis & Efraimidis, 2022; in the form PFedRec compares with",
            NetworkSettings,
            lambda s: federation(s, fedncf(s)),
        ),
        Entry(
            "fedncf-rows",
            "Federated neural collaborative filtering, rows averaged over the clients that trained them",
            "Perifanis & Efraimidis, Federated neural collaborative filtering, 2022",
            RowNetworkSettings,
            lambda s: federation(s, fedncf_rows(s)),
        ),
        Entry(
            "fedncf-dual",
            "Dual personalisation on FedNCF",
            PFEDREC + ", table 3",
            DualNetworkSettings,
            lambda s: federation(s, fedncf(s), dual()),
        ),
        Entry(
            "fedrecon",
            "Federated reconstruction: no state on devices, user vectors rebuilt when needed",
            "Singhal et al., Federated reconstruction, NeurIPS 2021; in the form PFedRec compares with",
            ReconSettings,
            lambda s: federation(s, fedrecon(s)),
        ),
        Entry(
            "fedrecon-dual",
            "Dual personalisation on FedRecon",
            PFEDREC + ", table 3",
            ReconSettings,
            lambda s: federation(s, fedrecon(s), dual()),
        ),
        Entry(
            "fedrap",
            "Additive personalisation: an own item table beside a sparse shared one",
            FEDRAP,
            AdditiveSettings,
            lambda s: federation(s, fedrap(s)),
        ),
        Entry(
            "fedrap-c",
            "FedRAP's ablation: the shared table alone",
            FEDRAP,
            SharedTableSettings,
            lambda s: federation(s, shared_table(s)),
        ),
        Entry(
            "fedrap-d",
            "FedRAP's ablation: the own table alone, nothing shared",
            FEDRAP,
            TableSettings,
            lambda s: federation(s, own_table(s)),
        ),
        *(
            Entry(
                f"fedrap-{name}",
                f"FedRAP's ablation: {words}",
                FEDRAP,
                fixing(AdditiveSettings, **values),
                lambda s: federation(s, fedrap(s)),
            )
            for name, words, values in (
                ("no", "no norm on the shared table", {"norm": "none"}),
                ("l2", "squares instead of absolute values", {"norm": "l2"}),
                ("fixed", "constant weights", {"ramp": "fixed"}),
                ("sin", "weights that swing", {"ramp": "sin"}),
                ("square", "weights on for five rounds, off for five", {"ramp": "square"}),
                ("frac", "weights that fall as 1 / round", {"ramp": "frac"}),
            )
        ),
        Entry(
            "fedneumf",
            "Federated NeuMF with uploaded gradients and server Adam: FedRecGEL's host",
            GEL,
            SharpnessSettings,
            lambda s: federation(s, fedneumf(s)),
        ),
        Entry(
            "fedrecgel",
            "Sharpness-aware item embeddings on federated NeuMF",
            GEL,
            GelSettings,
            lambda s: federation(s, fedneumf(s), sharpness_aware(s.rho_shared, s.rho_private, joint=s.joint)),
        ),
        Entry(
            "fedmf-plgc",
            "Mixing of local and frozen global rows, decorrelated, on FedMF",
            PLGC,
            MixedLinearSettings,
            lambda s: federation(s, linear(s), mixed(s)),
        ),
        Entry(
            "pfedrec-plgc",
            "Mixing of local and frozen global rows, decorrelated, on PFedRec",
            PLGC,
            MixedLinearSettings,
            lambda s: federation(s, linear(s), dual(), mixed(s)),
        ),
        Entry(
            "fedncf-plgc",
            "Mixing of local and frozen global rows, decorrelated, on FedNCF",
            PLGC,
            MixedNetworkSettings,
            lambda s: federation(s, fedncf(s), mixed(s)),
        ),
        Entry(
            "colr",
            "Low-rank item updates on FedMF: uploads of width r",
            "Nguyen et al., Towards efficient communication and secure federated recommendation, WWW 2024",
            LowRankSettings,
            lambda s: federation(s, linear(s), low_rank(s.rank)),
        ),
        Entry(
            "metamf",
            "Models generated on the server, one per user; devices send gradients of them",
            "Lin et al., Meta matrix factorization for federated rating predictions, SIGIR 2020",
            MetaSettings,
            MetaMF,
        ),
        Entry(
            "fedpergnn",
            "Graph attention on the user's own graph, expanded by a matching service",
            "Wu et al., A federated graph neural network framework, Nature Communications 2022",
            GNNSettings,
            FedPerGNN,
        ),
        Entry(
            "gpfedrec",
            "A graph of similar users on the server gives every user a table as an anchor",
            "Zhang et al., GPFedRec: graph-guided personalization, KDD 2024 (with similarity, not distance)",
            GraphSettings,
            GPFedRec,
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
