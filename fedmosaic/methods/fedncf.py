"""FedNCF: federated neural collaborative filtering, in two published forms.

    z_0 = [u ; e],  z_l = ReLU(z_{l-1} W_l + b_l),  score = z_L · h + b

fedncf        as PFedRec compares with it: item table and network averaged with equal weights. The paper does not print
              this baseline's rates; these were chosen on validation (ML-100K, legacy).
fedncf-dual   with dual personalisation (PFedRec, table 3): every device has a network of its own
fedncf-rows   Perifanis & Efraimidis, 2022: each item row averaged over the clients that trained it, Adam on the device
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, PerItem, Phase
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.parameters import Init
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.methods.base import Entry, FederatedSettings, federation, network_of, one_pass, roles_of
from fedmosaic.methods.pfedrec import PAPER as PFEDREC


class NetworkSettings(FederatedSettings):
    """Settings of methods with a network."""

    RENAMED: ClassVar = {"rate": "network_rate"}

    network_rate: float = Field(default=1.0, gt=0, description="rate of the network")
    user_rate: float = Field(default=30.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=24.0, gt=0, description="item rate = items · factor")

    @classmethod
    def modern(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The old `rate` multiplied the item rate too."""
        result = super().modern(given)
        if "rate" in given:
            factor = given.get("item_factor", cls.model_fields["item_factor"].default)
            result["item_factor"] = float(given["rate"]) * float(factor)
        return result


class DualNetworkSettings(NetworkSettings):
    """Settings of dual personalisation on FedNCF: every device has a network of its own."""

    # Validation is mostly best between rounds 20 and 50; later rounds overfit, and may diverge.
    rounds: int = Field(default=60, ge=1, description="rounds of training")
    user_rate: float = Field(default=3.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=2.0, gt=0, description="item rate = items · factor")


class RowNetworkSettings(FederatedSettings):
    """Settings of Perifanis' FedNCF."""

    participation: float = Field(default=0.1, gt=0, le=1, description="share of clients drawn in a round")
    local_epochs: int = Field(default=2, ge=1, description="epochs on the device per round")
    rate: float = Field(default=1e-3, gt=0, description="rate of the device's Adam")


def fedncf(s: NetworkSettings) -> Algorithm:
    """Item table and network averaged with equal weights."""
    model = NCF(s.dim, init=Init("normal", 0.3))
    items = Move(("item",), PerItem(s.item_factor))
    step = Phase((Move(network_of(model), s.network_rate), Move(("user",), s.user_rate), items))
    return Algorithm(model, roles_of(model), (one_pass(s, step),), upload=Upload("value"), negatives=s.negatives)


def fedncf_rows(s: RowNetworkSettings) -> Algorithm:
    """Each item row averaged over the clients that trained it, Adam on the device."""
    model = NCF(s.dim)
    step = Phase((Move(tuple(n.name for n in model.specs()), s.rate, Adam()),))
    return Algorithm(model, roles_of(model), (one_pass(s, step),), server=Server("row-mean"), negatives=s.negatives)


METHODS = (
    Entry(
        "fedncf",
        "Federated neural collaborative filtering, table and network averaged",
        "Perifanis & Efraimidis, 2022; in the form PFedRec compares with",
        NetworkSettings,
        lambda s: federation(s, fedncf(s)),
        expect={"ml-100k ties=file": (59.7, 33.9)},
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
        expect={"ml-100k ties=file": (54.5, 32.4)},
    ),
)
