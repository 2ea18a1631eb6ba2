"""PFedRec: dual personalisation. A private score function, and item rows that every device tunes for itself.

For every batch first the score function takes a step with the items held still, then the items with the score function
held still. The tables are averaged on the server; a device answers with the rows it tuned (algorithm/wrappers/dual.py).

Paper: Zhang et al., Dual personalization on federated recommendation, IJCAI 2023. Settings: those of FedMF, and
`layers`: the paper's general form, a score function of several layers on the item's row, without a user vector; its
experiments have one layer, which is FedMF's vector and bias.

    score(u, j) = f_u(e_j)        layers=() is w_u · e_j + b_u
Under the strict pool it is below FedMF, under the paper's pool above it: docs/leak.md says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field, field_validator

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Move, Phase
from fedmosaic.algorithm.models.ncf import ScoreFunction
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.methods.base import Entry, federation, network_of, one_pass, roles_of
from fedmosaic.methods.fedmf import LinearSettings, linear

PAPER = "Zhang et al., Dual personalization on federated recommendation, IJCAI 2023"


class DualSettings(LinearSettings):
    """Settings of PFedRec."""

    layers: tuple[int, ...] = Field(default=(), description="widths of the score function's layers, as in 16,8")

    @field_validator("layers", mode="before")
    @classmethod
    def _widths(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value


def host(s: DualSettings) -> Algorithm:
    """What `dual` wraps: FedMF, or its local work on a score function of several layers."""
    plain = linear(s)
    if not s.layers:
        return plain
    model = ScoreFunction(s.dim, s.layers, init=plain.specs["item"].init)
    (user, item) = plain.local[0].phases[0].moves
    step = Phase((Move(network_of(model), user.rate), item))
    return replace(plain, model=model, roles=roles_of(model), local=(one_pass(s, step),))


METHODS = (
    Entry(
        "pfedrec",
        "Dual personalisation: private score function, locally tuned item rows",
        PAPER,
        DualSettings,
        lambda s: federation(s, host(s), dual()),
        expect={"ml-100k ties=file": (56.4, 33.6)},
    ),
)
