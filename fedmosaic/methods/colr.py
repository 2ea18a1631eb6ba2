"""CoLR: low-rank item updates on FedMF. What a client sends of an item row has width r instead of d.

Paper: Nguyen et al., Towards efficient communication and secure federated recommendation, WWW 2024
(algorithm/wrappers/low_rank.py). Settings: those of FedMF, and the rank.
"""

from __future__ import annotations

from pydantic import Field

from fedmosaic.algorithm.wrappers.low_rank import low_rank
from fedmosaic.methods.base import Entry, federation
from fedmosaic.methods.fedmf import LinearSettings, linear


class LowRankSettings(LinearSettings):
    """Settings of CoLR."""

    rank: int = Field(default=8, ge=1, description="width of what is sent per item")


METHODS = (
    Entry(
        "colr",
        "Low-rank item updates on FedMF: uploads of width r",
        "Nguyen et al., Towards efficient communication and secure federated recommendation, WWW 2024",
        LowRankSettings,
        lambda s: federation(s, linear(s), low_rank(s.rank)),
    ),
)
