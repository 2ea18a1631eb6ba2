"""FedRecon: nothing stays on a device; users are rebuilt from half the examples, items learn from the rest.

Paper: Singhal et al., Federated reconstruction, NeurIPS 2021; in the form PFedRec compares with. `fedrecon-dual` tunes
its items too when it is asked (PFedRec, table 3).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import ClassVar

from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Move, Pass, PerItem, Phase
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.parameters import Init, Role
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.methods.base import Entry, FederatedSettings, federation
from fedmosaic.methods.pfedrec import PAPER as PFEDREC


class ReconSettings(FederatedSettings):
    """Settings of FedRecon."""

    RENAMED: ClassVar = {"score_rate": "user_rate"}

    user_rate: float = Field(default=0.3, gt=0, description="rate of the rebuilt user side")
    item_factor: float = Field(default=8.0, gt=0, description="item rate = items · factor")
    rebuild_epochs: int = Field(default=10, ge=1, description="epochs that rebuild the user side")


def fedrecon(s: ReconSettings) -> Algorithm:
    """Two passes: rebuild the user side on the support half, then learn items on the query half."""
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0), user_init=start)
    rebuild = Pass((Phase((Move(("user", "bias"), s.user_rate),)),), s.rebuild_epochs, s.batch_size, part="support")
    learn = Pass((Phase((Move(("item",), PerItem(s.item_factor)),)),), s.local_epochs, s.batch_size, part="query")
    roles = {"item": Role.SHARED, "user": Role.REBUILT, "bias": Role.REBUILT}
    serve = (replace(rebuild, part="all"),)
    return Algorithm(model, roles, (rebuild, learn), upload=Upload("value"), negatives=s.negatives, serve=serve)


METHODS = (
    Entry(
        "fedrecon",
        "Federated reconstruction: no state on devices, user vectors rebuilt when needed",
        "Singhal et al., Federated reconstruction, NeurIPS 2021; in the form PFedRec compares with",
        ReconSettings,
        lambda s: federation(s, fedrecon(s)),
        expect={"ml-100k ties=file": (63.0, 36.3)},
    ),
    Entry(
        "fedrecon-dual",
        "Dual personalisation on FedRecon",
        PFEDREC + ", table 3",
        ReconSettings,
        lambda s: federation(s, fedrecon(s), dual()),
        expect={"ml-100k ties=file": (56.2, 33.0)},
    ),
)
