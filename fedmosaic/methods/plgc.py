"""PLGC-style mixing: a local item table weighed with the frozen global one, decorrelated, on four hosts.

    item_j = weight · local_j + (1 - weight) · global_j        weight per client, from traces of the tangent kernel

Paper: after Shen et al., arXiv 2508.19591, 2025. Built from its abstract, not from its equations, which were not
available: algorithm/wrappers/mixing.py says what is the paper's and what is ours. Numbers must not be called PLGC's.

`plgc` is mixing on the host where it does best under the strict pool, `host=` says otherwise; `fedmf-plgc` and the
others take their host's settings too. On FedRAP the mixed table is the common one, own rows are added to it, and the
local table lives on from round to round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from fedmosaic.algorithm.algorithm import Wrapper
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.algorithm.wrappers.mixing import Form, NTKWeight, mixing
from fedmosaic.methods.base import Entry, FederatedSettings, federation
from fedmosaic.methods.fedmf import LinearSettings, linear
from fedmosaic.methods.fedncf import NetworkSettings, fedncf
from fedmosaic.methods.fedrap import AdditiveSettings, fedrap

PAPER = "after Shen et al., arXiv 2508.19591, 2025; built from the abstract, see algorithm/wrappers/mixing.py"


class MixSettings(BaseModel):
    """Settings of mixing; the wrapper has more switches."""

    DROPPED: ClassVar[Mapping[str, Any]] = {
        "trace_rows": "positives", "centred": False, "when": "batch", "smooth": False, "clip_low": 0.0,
        "clip_high": 1.0, "exact": False,
    }  # fmt: skip

    mix: float | None = Field(default=None, ge=0, le=1, description="fixed local share; none = from the NTK traces")
    local: Literal["restart", "keep"] = Field(default="restart", description="the local table, from round to round")
    decorrelation: float = Field(default=0.1, ge=0, description="weight of the decorrelation term")
    gamma: float = Field(default=0.01, ge=0, description="weight of its off-diagonal part")
    form: Form = Field(default="local-global", description="which two views are decorrelated")


class PlgcSettings(MixSettings, FederatedSettings):
    """Mixing on one of the hosts, with the host's own rates."""

    host: Literal["fedmf", "pfedrec", "fedncf", "fedrap"] = Field(default="fedmf", description="what is wrapped")


class MixedLinearSettings(MixSettings, LinearSettings):
    """Mixing on the linear scorer."""

    RENAMED: ClassVar = {**LinearSettings.RENAMED, "weight": "decorrelation"}


class MixedNetworkSettings(MixSettings, NetworkSettings):
    """Mixing on FedNCF."""

    RENAMED: ClassVar = {**NetworkSettings.RENAMED, "weight": "decorrelation"}


class MixedAdditiveSettings(MixSettings, AdditiveSettings):
    """Mixing on FedRAP."""

    RENAMED: ClassVar = {**AdditiveSettings.RENAMED, "weight": "decorrelation"}

    local: Literal["keep"] = Field(default="keep", description="the local table, from round to round")
    # the decorrelation is no sum over examples, so that clipping them one by one would bound nothing
    noise_on: Literal["upload"] = Field(default="upload", description="fixed")


def mixed(s: MixSettings) -> Wrapper:
    """The wrapper these settings describe."""
    weight = NTKWeight() if s.mix is None else s.mix
    return mixing(weight, keep=s.local == "keep", beta=s.decorrelation, gamma=s.gamma, form=s.form)


def on_host(s: PlgcSettings) -> Any:
    """The method of that name on the host, with what was given here."""
    given = {name: getattr(s, name) for name in s.model_fields_set - {"host"}}
    (entry,) = (e for e in METHODS if e.name == f"{s.host}-plgc")
    return entry.build(given)


METHODS = (
    Entry(
        "plgc",
        "Mixing of local and frozen global rows, decorrelated, on the host where it does best",
        PAPER,
        PlgcSettings,
        on_host,
    ),
    Entry(
        "fedmf-plgc",
        "Mixing of local and frozen global rows, decorrelated, on FedMF",
        PAPER,
        MixedLinearSettings,
        lambda s: federation(s, linear(s), mixed(s)),
        expect={"ml-100k ties=file rounds=60": (55.5, 32.2)},
    ),
    Entry(
        "pfedrec-plgc",
        "Mixing of local and frozen global rows, decorrelated, on PFedRec",
        PAPER,
        MixedLinearSettings,
        lambda s: federation(s, linear(s), dual(), mixed(s)),
        expect={"ml-100k ties=file rounds=60": (55.2, 32.0)},
    ),
    Entry(
        "fedncf-plgc",
        "Mixing of local and frozen global rows, decorrelated, on FedNCF",
        PAPER,
        MixedNetworkSettings,
        lambda s: federation(s, fedncf(s), mixed(s)),
    ),
    Entry(
        "fedrap-plgc",
        "Mixing of local and frozen global rows, decorrelated, on FedRAP",
        PAPER,
        MixedAdditiveSettings,
        lambda s: federation(s, fedrap(s), mixed(s)),
    ),
)
