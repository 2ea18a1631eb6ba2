"""Central references: one client that holds everybody, trained with an Adam that remembers.

mf      Koren et al., 2009; with sampled cross-entropy as in He et al., WWW 2017
ncf     the MLP of He et al., Neural collaborative filtering, WWW 2017
neumf   product and tower of the same paper
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, Phase
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF, NeuMF
from fedmosaic.algorithm.parameters import Role
from fedmosaic.algorithm.view import Model
from fedmosaic.engines.federation import Federation
from fedmosaic.methods.base import Entry, FederatedSettings, federation, one_pass


class CentralSettings(FederatedSettings):
    """Settings of central references: one client that holds everybody."""

    rounds: int = Field(default=30, ge=1, description="epochs")
    batch_size: int = Field(default=1024, ge=1, description="examples per step")
    rate: float = Field(default=1e-3, gt=0, description="rate of Adam")
    decay: float = Field(default=0.0, ge=0, description="weight decay")


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
        lambda s: central(LinearScorer(s.dim), s),
        expect={"ml-100k ties=file": (65.1, 38.5)},
    ),
    Entry(
        "ncf",
        "Central neural collaborative filtering (MLP)",
        "He et al., Neural collaborative filtering, WWW 2017",
        CentralSettings,
        lambda s: central(NCF(s.dim), s),
        expect={"ml-100k ties=file": (61.6, 35.2)},
    ),
    Entry(
        "neumf",
        "Central NeuMF: product and tower",
        "He et al., Neural collaborative filtering, WWW 2017",
        CentralSettings,
        lambda s: central(NeuMF(max(1, s.dim // 4)), s),
    ),
)
