"""FedRecGEL: sharpness-aware item embeddings on federated NeuMF.

    gradients are taken at the worst point nearby, rho_shared and rho_private away (algorithm/wrappers/sharpness.py)

Paper: Sharpness-aware minimization for generalized embedding learning, arXiv 2603.11503, WWW 2026. The host `fedneumf`
is NeuMF with one full-batch step, uploaded gradients, an Adam on the server and one per device; its loss is a sum of
means over 128 examples, as in the released code.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, Phase
from fedmosaic.algorithm.models.ncf import NeuMF
from fedmosaic.algorithm.objective import ChunkedBCE
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.wrappers.sharpness import sharpness_aware
from fedmosaic.methods.base import FULL_BATCH, Entry, FederatedSettings, federation, one_pass, roles_of

PAPER = "Sharpness-aware minimization for generalized embedding learning, arXiv 2603.11503, WWW 2026"
CHUNK = 128  # examples of one mean


class SharpnessSettings(FederatedSettings):
    """Settings of FedRecGEL and its host; the whole of a client's examples in one step."""

    RENAMED: ClassVar = {"private_rate": "user_rate", "shared_rate": "server_rate"}
    DROPPED: ClassVar = {"chunk": CHUNK}

    participation: float = Field(default=0.1, gt=0, le=1, description="share of clients drawn in a round")
    batch_size: int = Field(default=FULL_BATCH, ge=1, description="examples per step; default: all")
    user_rate: float = Field(default=0.1, gt=0, description="rate of the device's Adam on user vectors")
    server_rate: float = Field(default=1e-3, gt=0, description="rate of the server's Adam")


class GelSettings(SharpnessSettings):
    """Radii of FedRecGEL; 0 switches a side off."""

    rho_shared: float = Field(default=0.02, ge=0, description="radius of the shared group")
    rho_private: float = Field(default=0.02, ge=0, description="radius of the private group")
    joint: bool = Field(default=False, description="both groups moved uphill for both gradients")


def fedneumf(s: SharpnessSettings) -> Algorithm:
    """The host: NeuMF, one full-batch step, gradients uploaded, an Adam on the server and one per device."""
    model = NeuMF(s.dim, depth=3, xavier=True)
    private = tuple(n.name for n in model.specs() if n.axis is Axis.USER)
    shared = tuple(n.name for n in model.specs() if n.axis is not Axis.USER)
    step = Phase((Move(private, s.user_rate, Adam(persistent=True)), Move(shared, s.server_rate)))
    return Algorithm(
        model,
        roles_of(model),
        (one_pass(s, step),),
        objective=ChunkedBCE(CHUNK),
        upload=Upload("gradient"),
        server=Server("mean", Adam(), s.server_rate),
        negatives=s.negatives,
    )


METHODS = (
    Entry(
        "fedneumf",
        "Federated NeuMF with uploaded gradients and server Adam: FedRecGEL's host",
        PAPER,
        SharpnessSettings,
        lambda s: federation(s, fedneumf(s)),
    ),
    Entry(
        "fedrecgel",
        "Sharpness-aware item embeddings on federated NeuMF",
        PAPER,
        GelSettings,
        lambda s: federation(s, fedneumf(s), sharpness_aware(s.rho_shared, s.rho_private, joint=s.joint)),
    ),
)
