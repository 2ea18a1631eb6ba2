"""FedRAP: additive personalisation. An item is what all share plus what is one's own.

    item_j = common_j + own_j
    loss   = cross-entropy - apart · mean (own - common)² + sparse · norm(common)      weights ramp up over rounds

Paper: Li, Long & Zhou, Federated recommendation with additive personalization, ICLR 2024. The `authors` preset is their
log on ML-100K; `retuned` was chosen on validation under the strict pool there. The ablations of the paper's section 5:
fedrap-c (shared table alone), -d (own table alone), -no and -l2 (other norms), -fixed, -sin, -square, -frac (ramps).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper, compose
from fedmosaic.algorithm.local import SGD, Decay, Move, Pass, PerItem, Phase, Schedule
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.parameters import Init, Role
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.wrappers.additive import Norm, Ramp, additive
from fedmosaic.methods.base import Entry, FederatedSettings, federation, fixing, roles_of
from fedmosaic.privacy.noise import NoiseSettings, clipped, noisy, sparse_values
from fedmosaic.privacy.per_example import per_example

PAPER = "Li, Long & Zhou, Federated recommendation with additive personalization, ICLR 2024"
RETUNED = {  # on ML-100K, strict pool, by validation
    "batch_size": 256,
    "local_epochs": 1,
    "user_rate": 0.1,
    "item_factor": 8.0,
    "own_rate": 1.0,
    "own_init": 0.0,
    "decay": 0.0,
    "apart": 0.01,
    "sparse": 0.01,
    "step_decay": 1.0,
    "round_decay": 1.0,
    "tolerance": 0.0,
}


class TableSettings(FederatedSettings):
    """Local work as in FedRAP, on one item table.

    The `authors` preset is their log on ML-100K; `retuned` was chosen on validation under the strict pool there.
    """

    RENAMED: ClassVar = {"score_rate": "user_rate", "table_rate": "item_rate", "table_factor": "item_factor"}

    preset: Literal["authors", "retuned"] = Field(default="authors", description="whose values, where none is given")
    batch_size: int = Field(default=2048, ge=1, description="examples per step")
    local_epochs: int = Field(default=10, ge=1, description="epochs on the device per round, at most")
    user_rate: float = Field(default=0.5, gt=0, description="rate of the score function")
    item_rate: float = Field(default=200.0, gt=0, description="rate of the item tables")
    item_factor: float | None = Field(default=None, gt=0, description="item rate = items · factor, instead")
    decay: float = Field(default=1e-4, ge=0, description="weight decay of everything, rows without examples included")
    step_decay: float = Field(default=0.95, gt=0, le=1, description="factor on the rates after each batch")
    round_decay: float = Field(default=0.97, gt=0, le=1, description="factor on the rates after each round")
    tolerance: float = Field(default=1e-4, ge=0, description="a client stops when its loss changes by less")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if given.get("preset") != "retuned":
            return given
        values = {k: v for k, v in RETUNED.items() if k in cls.model_fields}
        if "item_rate" in given:
            values.pop("item_factor")
        return {**values, **given}


class SharedTableSettings(NoiseSettings, TableSettings):
    """Settings of FedRAP's shared table, and of what is sent of it."""

    RENAMED: ClassVar = {**TableSettings.RENAMED, "noise": "noise_multiplier"}

    upload: Literal["weights", "gradient"] = Field(default="weights", description="what is sent of the shared table")
    threshold: float = Field(default=0.0, ge=0, description="soft threshold that makes the shared table truly sparse")
    clip: float = Field(default=0.0, ge=0, description="bound of the upload's norm; 0 = none")
    noise_multiplier: float = Field(default=0.0, ge=0, description="Gaussian noise, in multiples of clip")
    noise_on: Literal["upload", "shared", "all"] = Field(
        default="upload",
        description="upload: the table's change is clipped and noised, once a round; shared: every example's gradient "
        "of the shared table, in every step, as the authors' code has it; all: of everything that moves",
    )

    @model_validator(mode="after")
    def _bounded(self) -> SharedTableSettings:
        if self.noise_multiplier and not self.clip:
            raise ValueError("noise is a multiple of clip: give clip too, for example clip=0.1")
        return self


class AdditiveSettings(SharedTableSettings):
    """Settings of FedRAP: an own table beside the shared one.

    The `authors` preset is their log on ML-100K; `retuned` was chosen on validation under the strict pool there.
    """

    own_rate: float | None = Field(default=None, ge=0, description="rate of the own table; none = as the shared one")
    own_init: float = Field(default=1.0, ge=0, description="deviation of the own table's first rows")
    apart: float = Field(default=0.1, ge=0, description="weight of the distance between own and shared rows")
    sparse: float = Field(default=0.1, ge=0, description="weight of the norm of the shared table")
    ramp: Literal["tanh", "fixed", "sin", "square", "frac", "as-released"] = Field(
        default="tanh", description="how both weights change over rounds; as-released = not at all, as the code did"
    )
    norm: Norm = Field(default="l1", description="norm of the shared table")


def own_table(s: TableSettings) -> Algorithm:
    """FedRAP's local work on the plain linear scorer; nothing is sent (`fedrap-d`)."""
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0), user_init=start)
    rule = SGD(s.decay, everywhere=True)
    user = Move(("user", "bias"), Decay(s.user_rate, s.round_decay), rule)
    step = Phase((user, Move(("item",), _item_rate(s), rule)))
    local = Pass((step,), s.local_epochs, s.batch_size, s.step_decay, s.tolerance)
    return Algorithm(model, dict.fromkeys(("item", "user", "bias"), Role.PRIVATE), (local,), negatives=s.negatives)


def _item_rate(s: TableSettings) -> Schedule:
    if s.item_factor is not None:
        return PerItem(s.item_factor, s.round_decay)
    return Decay(s.item_rate, s.round_decay)


def shared_table(s: SharedTableSettings) -> Algorithm:
    """The same with the table shared (`fedrap-c`): the host that FedRAP gives an own table to."""
    alike = own_table(s)
    host = replace(alike, roles=roles_of(alike.model), upload=Upload("value"))
    if s.upload == "gradient":  # the table stands still on the device, so the server decays it
        host = replace(host, upload=Upload("gradient"), server=Server(rule=SGD(s.decay), rate=_item_rate(s)))
    guards: list[Wrapper] = []
    if s.clip and s.noise_on == "upload":
        guards = [clipped(s.clip), noisy("gaussian", s.noise_multiplier * s.clip, s.noise_draws)]
    return compose(host, sparse_values(s.threshold), *guards)


def _examples(s: SharedTableSettings, host: Algorithm) -> Algorithm:
    """Clipping and noise in every step, where they are asked for."""
    if not s.clip or s.noise_on == "upload":
        return host
    return per_example(s.clip, s.noise_multiplier, ("item",) if s.noise_on == "shared" else ())(host)


def fedrap(s: AdditiveSettings) -> Algorithm:
    """An own table beside the shared one, pushed apart, the shared one kept small."""
    shape = "fixed" if s.ramp == "as-released" else s.ramp
    own_rate = None if s.own_rate is None else Decay(s.own_rate, s.round_decay)
    start = Init("normal", s.own_init)
    terms = additive(Ramp(s.apart, shape), Ramp(s.sparse, shape), norm=s.norm, own_rate=own_rate, init=start)
    return terms(shared_table(s))


ABLATIONS = (
    ("no", "no norm on the shared table", {"norm": "none"}),
    ("l2", "squares instead of absolute values", {"norm": "l2"}),
    ("fixed", "constant weights", {"ramp": "fixed"}),
    ("sin", "weights that swing", {"ramp": "sin"}),
    ("square", "weights on for five rounds, off for five", {"ramp": "square"}),
    ("frac", "weights that fall as 1 / round", {"ramp": "frac"}),
)
METHODS = (
    Entry(
        "fedrap",
        "Additive personalisation: an own item table beside a sparse shared one",
        PAPER,
        AdditiveSettings,
        lambda s: federation(s, _examples(s, fedrap(s))),
        expect={"ml-100k ties=file": (23.7, 11.5)},
    ),
    Entry(
        "fedrap-c",
        "FedRAP's ablation: the shared table alone",
        PAPER,
        SharedTableSettings,
        lambda s: federation(s, _examples(s, shared_table(s))),
        expect={"ml-100k ties=file rounds=60": (47.4, 26.9)},
    ),
    Entry(
        "fedrap-d",
        "FedRAP's ablation: the own table alone, nothing shared",
        PAPER,
        TableSettings,
        lambda s: federation(s, own_table(s)),
        expect={"ml-100k ties=file rounds=60": (10.4, 4.4)},
    ),
    *(
        Entry(
            f"fedrap-{name}",
            f"FedRAP's ablation: {words}",
            PAPER,
            fixing(AdditiveSettings, **values),
            lambda s: federation(s, _examples(s, fedrap(s))),
        )
        for name, words, values in ABLATIONS
    ),
)
