"""FedMF: federated matrix factorisation. Private user vectors, a shared item table, both moved by one gradient.

    score(u, j) = w_u · e_j + b_u        binary cross-entropy, SGD on the device, the mean of the tables on the server

Paper: Chai et al., Secure federated matrix factorization, 2020; here in the form that PFedRec compares with, learning
rates of 13,456 (0.1 · 80 · the 1,682 items of ML-100K) included (`preset=paper`). `preset=scale-free` is for new work:
rates that mean the same for any number of clients and items, rows averaged over the clients that trained them, a server
optimiser.
"""

from __future__ import annotations

from math import sqrt
from typing import ClassVar, Literal

from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, PerItem, Phase
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.parameters import Init
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.methods.base import Entry, FederatedSettings, federation, one_pass, roles_of
from fedmosaic.privacy.noise import NoiseSettings, noisy


class LinearSettings(NoiseSettings, FederatedSettings):
    """Settings of methods on the linear scorer."""

    RENAMED: ClassVar = {"score_rate": "user_rate"}

    preset: Literal["paper", "scale-free"] = Field(
        default="paper",
        description="paper: as PFedRec's code; scale-free: other rates, beginning, upload and server, for new work",
    )
    user_rate: float | None = Field(default=None, gt=0, description="rate of the user side; none = the preset's")
    item_rate: float | None = Field(default=None, gt=0, description="rate of the item side; none = the preset's")
    noise: float = Field(
        default=0.0,
        ge=0,
        description="scale of Laplace noise on every number sent (PFedRec's privacy; no guarantee follows)",
    )


def linear(s: LinearSettings) -> Algorithm:
    """The algorithm: user side and item rows moved by one gradient."""
    paper = s.preset == "paper"
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0 if paper else 0.1), user_init=start)
    user_rate = s.user_rate or (0.1 if paper else 1.0)
    # PFedRec's released code: rate · items · 80, which undoes the 1/clients of the mean and the 1/batch of the loss
    item_rate = s.item_rate or (PerItem(0.1 * 80) if paper else 1.0)
    step = Phase((Move(("user", "bias"), user_rate), Move(("item",), item_rate)))
    server = Server() if paper else Server("row-mean", Adam(), 0.03)
    upload = Upload("value" if paper else "delta")
    host = Algorithm(model, roles_of(model), (one_pass(s, step),), upload=upload, server=server, negatives=s.negatives)
    return noisy("laplace", s.noise, s.noise_draws)(host)


METHODS = (
    Entry(
        "fedmf",
        "Federated matrix factorisation: private user vectors, shared item table",
        "Chai et al., Secure federated matrix factorization, 2020; as PFedRec compares with it",
        LinearSettings,
        lambda s: federation(s, linear(s)),
        expect={"ml-100k ties=file": (62.7, 36.7)},
    ),
)
