"""Central references: one client that holds everybody, trained with an Adam that remembers.

mf      Koren et al., 2009; with sampled cross-entropy as in He et al., WWW 2017
ncf     the MLP of He et al., Neural collaborative filtering, WWW 2017
neumf   product and tower of the same paper

Papers that print no settings for these leave their library's: vectors that begin at N(0, 1) and batches of 256
(`init=1 batch_size=256`), which fits the tables of PFedRec better than our defaults; ours are better models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, Phase
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF, NeuMF
from fedmosaic.algorithm.parameters import Init, Role
from fedmosaic.algorithm.view import Model
from fedmosaic.engines.federation import Federation
from fedmosaic.methods.base import Entry, FederatedSettings, federation, one_pass


class CentralSettings(FederatedSettings):
    """Settings of central references: one client that holds everybody."""

    NO_EPSILON: ClassVar[str] = "one place holds all histories, and what it trains on them is not bounded by user"

    rounds: int = Field(default=30, ge=1, description="epochs")
    batch_size: int = Field(default=1024, ge=1, description="examples per step")
    rate: float = Field(default=1e-3, gt=0, description="rate of Adam")
    decay: float = Field(default=0.0, ge=0, description="weight decay")
    init: float = Field(default=0.01, gt=0, description="deviation of the first vectors; 1 = PyTorch's default")


def _start(s: CentralSettings) -> Init:
    return Init("normal", s.init)


def central(model: Model, s: CentralSettings) -> Federation:
    """One client that holds everybody, with an optimiser that remembers."""
    step = Phase((Move(tuple(n.name for n in model.specs()), s.rate, Adam(decay=s.decay, persistent=True)),))
    roles = dict.fromkeys((n.name for n in model.specs()), Role.PRIVATE)
    algorithm = Algorithm(model, roles, (one_pass(s, step),), negatives=s.negatives)
    return replace(federation(s, algorithm), pooled=True)


METHODS = (
    Entry(
        "mf",
        "Central matrix factorisation",
        "Koren et al., 2009; with sampled cross-entropy as in He et al., WWW 2017",
        CentralSettings,
        lambda s: central(LinearScorer(s.dim, item_init=_start(s), user_init=_start(s)), s),
        expect={"ml-100k ties=file": (65.1, 38.5)},
    ),
    Entry(
        "ncf",
        "Central neural collaborative filtering (MLP)",
        "He et al., Neural collaborative filtering, WWW 2017",
        CentralSettings,
        lambda s: central(NCF(s.dim, init=_start(s)), s),
        expect={"ml-100k ties=file": (61.6, 35.2)},
    ),
    Entry(
        "neumf",
        "Central NeuMF: product and tower",
        "He et al., Neural collaborative filtering, WWW 2017",
        CentralSettings,
        lambda s: central(NeuMF(max(1, s.dim // 4), init=_start(s)), s),
    ),
)
