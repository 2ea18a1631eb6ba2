"""Settings and host algorithms: what the catalogue composes its methods from.

Settings named `paper` are those of the papers, learning rates of 13,456 included. `scale-free` is for new work: rates
that mean the same for any number of clients and items, rows averaged over the clients that trained them, a server
optimiser.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper, compose
from fedmosaic.algorithm.local import SGD, Adam, Decay, Move, Pass, PerItem, Phase, Schedule
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF, NeuMF
from fedmosaic.algorithm.objective import ChunkedBCE
from fedmosaic.algorithm.parameters import Axis, Init, Role
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.view import Model
from fedmosaic.algorithm.wrappers.additive import Norm, Ramp, additive
from fedmosaic.algorithm.wrappers.mixing import Form, mixing
from fedmosaic.core.errors import SettingsError
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Engine, Federation
from fedmosaic.privacy.noise import NoiseSettings, clipped, noisy, sparse_values

S = TypeVar("S", bound=BaseModel)
FULL_BATCH = 1 << 30


class CohortSettings(BaseModel):
    """Settings of everything that learns in rounds, some clients at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(default=100, ge=1, description="rounds of training")
    participation: float = Field(default=1.0, gt=0, le=1, description="share of clients drawn in a round")
    dim: int = Field(default=32, ge=1, description="width of the vectors")
    negatives: int = Field(default=4, ge=0, description="fresh negatives per positive and round")


class RoundSettings(CohortSettings):
    """The same with local work in batches and epochs."""

    batch_size: int = Field(default=256, ge=1, description="examples per step")
    local_epochs: int = Field(default=1, ge=1, description="epochs on the device per round")


class FederatedSettings(RoundSettings):
    """Settings of every federated method."""

    engine: Engine = Field(default="auto", description="auto, loop, simulate or kernel; changes speed, not numbers")


class LinearSettings(NoiseSettings, FederatedSettings):
    """Settings of methods on the linear scorer."""

    preset: Literal["paper", "scale-free"] = Field(default="paper", description="whose learning rates")
    score_rate: float | None = Field(default=None, gt=0, description="rate of the user side; none = the preset's")
    item_rate: float | None = Field(default=None, gt=0, description="rate of the item side; none = the preset's")
    noise: float = Field(
        default=0.0, ge=0, description="Laplace noise on every number sent (PFedRec's privacy; no guarantee follows)"
    )


class LowRankSettings(LinearSettings):
    """Settings of CoLR."""

    rank: int = Field(default=8, ge=1, description="width of what is sent per item")


class NetworkSettings(FederatedSettings):
    """Settings of methods with a network."""

    rate: float = Field(default=1.0, gt=0, description="rate of the network")
    user_rate: float = Field(default=30.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=24.0, gt=0, description="item rate = rate · items · factor (PFedRec's rule)")


class DualNetworkSettings(NetworkSettings):
    """Settings of dual personalisation on FedNCF: every device has a network of its own."""

    # Validation is mostly best between rounds 20 and 50; later rounds overfit, and may diverge.
    rounds: int = Field(default=60, ge=1, description="rounds of training")
    user_rate: float = Field(default=3.0, gt=0, description="rate of user vectors")
    item_factor: float = Field(default=2.0, gt=0, description="item rate = rate · items · factor (PFedRec's rule)")


class RowNetworkSettings(FederatedSettings):
    """Settings of Perifanis' FedNCF."""

    participation: float = Field(default=0.1, gt=0, le=1, description="share of clients drawn in a round")
    local_epochs: int = Field(default=2, ge=1, description="epochs on the device per round")
    rate: float = Field(default=1e-3, gt=0, description="rate of the device's Adam")


class CentralSettings(FederatedSettings):
    """Settings of central references: one client that holds everybody."""

    rounds: int = Field(default=30, ge=1, description="epochs")
    batch_size: int = Field(default=1024, ge=1, description="examples per step")
    rate: float = Field(default=1e-3, gt=0, description="rate of Adam")
    decay: float = Field(default=0.0, ge=0, description="weight decay")


RETUNED = {  # FedRAP on ML-100K, strict pool, by validation
    "batch_size": 256,
    "local_epochs": 1,
    "score_rate": 0.1,
    "table_factor": 8.0,
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

    preset: Literal["authors", "retuned"] = Field(default="authors", description="whose values, where none is given")
    batch_size: int = Field(default=2048, ge=1, description="examples per step")
    local_epochs: int = Field(default=10, ge=1, description="epochs on the device per round, at most")
    score_rate: float = Field(default=0.5, gt=0, description="rate of the score function")
    table_rate: float = Field(default=200.0, gt=0, description="rate of the item tables")
    table_factor: float | None = Field(default=None, gt=0, description="table rate = items · factor, instead")
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
        if "table_rate" in given:
            values.pop("table_factor")
        return {**values, **given}


class SharedTableSettings(NoiseSettings, TableSettings):
    """Settings of FedRAP's shared table, and of what is sent of it."""

    upload: Literal["weights", "gradient"] = Field(default="weights", description="what is sent of the shared table")
    threshold: float = Field(default=0.0, ge=0, description="soft threshold that makes the shared table truly sparse")
    clip: float = Field(default=0.0, ge=0, description="bound of the upload's norm; 0 = none")
    noise: float = Field(default=0.0, ge=0, description="Gaussian noise on the upload, as a multiple of the bound")

    @model_validator(mode="after")
    def _bounded(self) -> SharedTableSettings:
        if self.noise and not self.clip:
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


class MixSettings(BaseModel):
    """Settings of PLGC-style mixing; see fedmosaic/personalise/mixing.py for what is the paper's and what is ours."""

    mix: float | None = Field(default=None, ge=0, le=1, description="fixed local share; none = from the NTK traces")
    local: Literal["restart", "keep"] = Field(default="restart", description="the local table, from round to round")
    weight: float = Field(default=0.1, ge=0, description="weight of the decorrelation term")
    gamma: float = Field(default=0.01, ge=0, description="weight of its off-diagonal part")
    form: Form = Field(default="local-global", description="which two views are decorrelated")
    trace_rows: Literal["positives", "examples", "all"] = Field(default="positives", description="rows of the traces")
    centred: bool = Field(default=False, description="centre the rows first")
    when: Literal["round", "epoch", "batch"] = Field(default="batch", description="how often the share is computed")
    smooth: bool = Field(default=False, description="mean of the share over rounds (when=round)")
    clip_low: float = Field(default=0.0, ge=0, le=1, description="smallest share")
    clip_high: float = Field(default=1.0, ge=0, le=1, description="largest share")
    exact: bool = Field(default=False, description="traces of the whole head's kernel")

    @model_validator(mode="after")
    def _ordered(self) -> MixSettings:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low {self.clip_low} is above clip_high {self.clip_high}")
        return self


class MixedLinearSettings(MixSettings, LinearSettings):
    """Mixing on the linear scorer."""


class MixedNetworkSettings(MixSettings, NetworkSettings):
    """Mixing on FedNCF."""


class SharpnessSettings(FederatedSettings):
    """Settings of FedRecGEL and its host; the whole of a client's examples in one step."""

    participation: float = Field(default=0.1, gt=0, le=1, description="share of clients drawn in a round")
    batch_size: int = Field(default=FULL_BATCH, ge=1, description="examples per step; default: all")
    private_rate: float = Field(default=0.1, gt=0, description="rate of the device's Adam on user vectors")
    shared_rate: float = Field(default=1e-3, gt=0, description="rate of the server's Adam")
    chunk: int = Field(default=128, ge=1, description="the loss is a sum of means over this many examples")


class GelSettings(SharpnessSettings):
    """Radii of FedRecGEL; 0 switches a side off."""

    rho_shared: float = Field(default=0.02, ge=0, description="radius of the shared group")
    rho_private: float = Field(default=0.02, ge=0, description="radius of the private group")
    joint: bool = Field(default=False, description="both groups moved uphill for both gradients")


class ReconSettings(FederatedSettings):
    """Settings of FedRecon."""

    score_rate: float = Field(default=0.3, gt=0, description="rate of the rebuilt user side")
    item_factor: float = Field(default=8.0, gt=0, description="item rate = items · factor")
    rebuild_epochs: int = Field(default=10, ge=1, description="epochs that rebuild the user side")


def linear(s: LinearSettings) -> Algorithm:
    """FedMF: private user vectors, a shared item table, both moved by one gradient."""
    paper = s.preset == "paper"
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0 if paper else 0.1), user_init=start)
    score_rate = s.score_rate or (0.1 if paper else 1.0)
    # PFedRec's released code: rate · items · 80, which undoes the 1/clients of the mean and the 1/batch of the loss
    item_rate = s.item_rate or (PerItem(0.1 * 80) if paper else 1.0)
    step = Phase((Move(("user", "bias"), score_rate), Move(("item",), item_rate)))
    server = Server() if paper else Server("row-mean", Adam(), 0.03)
    upload = Upload("value" if paper else "delta")
    host = Algorithm(model, roles_of(model), (_pass(s, step),), upload=upload, server=server, negatives=s.negatives)
    return noisy("laplace", s.noise, s.noise_draws)(host)


def fedncf(s: NetworkSettings) -> Algorithm:
    """FedNCF in PFedRec's form: item table and network averaged with equal weights.

    The paper does not print this baseline's rates; these were chosen on validation (ML-100K, legacy).
    """
    model = NCF(s.dim, init=Init("normal", 0.3))
    items = Move(("item",), PerItem(s.rate * s.item_factor))
    step = Phase((Move(network_of(model), s.rate), Move(("user",), s.user_rate), items))
    return Algorithm(model, roles_of(model), (_pass(s, step),), upload=Upload("value"), negatives=s.negatives)


def fedncf_rows(s: RowNetworkSettings) -> Algorithm:
    """FedNCF in Perifanis' form: each item row averaged over the clients that trained it, Adam on the device."""
    model = NCF(s.dim)
    step = Phase((Move(tuple(n.name for n in model.specs()), s.rate, Adam()),))
    return Algorithm(model, roles_of(model), (_pass(s, step),), server=Server("row-mean"), negatives=s.negatives)


def fedneumf(s: SharpnessSettings) -> Algorithm:
    """FedRecGEL's host: NeuMF, one full-batch step, gradients uploaded, an Adam on the server and one per device."""
    model = NeuMF(s.dim, depth=3, xavier=True)
    private = tuple(n.name for n in model.specs() if n.axis is Axis.USER)
    shared = tuple(n.name for n in model.specs() if n.axis is not Axis.USER)
    step = Phase((Move(private, s.private_rate, Adam(persistent=True)), Move(shared, s.shared_rate)))
    return Algorithm(
        model,
        roles_of(model),
        (_pass(s, step),),
        objective=ChunkedBCE(s.chunk),
        upload=Upload("gradient"),
        server=Server("mean", Adam(), s.shared_rate),
        negatives=s.negatives,
    )


def own_table(s: TableSettings) -> Algorithm:
    """FedRAP's local work on the plain linear scorer; nothing is sent (`fedrap-d`)."""
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0), user_init=start)
    rule = SGD(s.decay, everywhere=True)
    step = Phase(
        (Move(("user", "bias"), Decay(s.score_rate, s.round_decay), rule), Move(("item",), _table_rate(s), rule))
    )
    local = Pass((step,), s.local_epochs, s.batch_size, s.step_decay, s.tolerance)
    return Algorithm(model, dict.fromkeys(("item", "user", "bias"), Role.PRIVATE), (local,), negatives=s.negatives)


def _table_rate(s: TableSettings) -> Schedule:
    if s.table_factor is not None:
        return PerItem(s.table_factor, s.round_decay)
    return Decay(s.table_rate, s.round_decay)


def shared_table(s: SharedTableSettings) -> Algorithm:
    """The same with the table shared (`fedrap-c`): the host that FedRAP gives an own table to."""
    alike = own_table(s)
    host = replace(alike, roles=roles_of(alike.model), upload=Upload("value"))
    if s.upload == "gradient":  # the table stands still on the device, so the server decays it
        host = replace(host, upload=Upload("gradient"), server=Server(rule=SGD(s.decay), rate=_table_rate(s)))
    guards: list[Wrapper] = [clipped(s.clip)] if s.clip else []
    return compose(host, sparse_values(s.threshold), *guards, noisy("gaussian", s.noise * s.clip, s.noise_draws))


def fedrap(s: AdditiveSettings) -> Algorithm:
    """FedRAP: an own table beside the shared one, pushed apart, the shared one kept small."""
    shape = "fixed" if s.ramp == "as-released" else s.ramp
    own_rate = None if s.own_rate is None else Decay(s.own_rate, s.round_decay)
    start = Init("normal", s.own_init)
    terms = additive(Ramp(s.apart, shape), Ramp(s.sparse, shape), norm=s.norm, own_rate=own_rate, init=start)
    return terms(shared_table(s))


def mixed(s: MixSettings) -> Wrapper:
    """The wrapper that mixing settings describe."""
    return mixing(
        s.mix,
        keep=s.local == "keep",
        beta=s.weight,
        gamma=s.gamma,
        form=s.form,
        rows=s.trace_rows,
        centred=s.centred,
        when=s.when,
        smooth=s.smooth,
        clip=(s.clip_low, s.clip_high),
        exact=s.exact,
    )


def fedrecon(s: ReconSettings) -> Algorithm:
    """FedRecon: nothing stays on a device; users are rebuilt from half the examples, items learn from the rest."""
    start = Init("uniform", 1 / sqrt(s.dim), same=True)
    model = LinearScorer(s.dim, item_init=Init("normal", 1.0), user_init=start)
    rebuild = Pass((Phase((Move(("user", "bias"), s.score_rate),)),), s.rebuild_epochs, s.batch_size, part="support")
    learn = Pass((Phase((Move(("item",), PerItem(s.item_factor)),)),), s.local_epochs, s.batch_size, part="query")
    roles = {"item": Role.SHARED, "user": Role.REBUILT, "bias": Role.REBUILT}
    serve = (replace(rebuild, part="all"),)
    return Algorithm(model, roles, (rebuild, learn), upload=Upload("value"), negatives=s.negatives, serve=serve)


def alone(host: Algorithm) -> Algorithm:
    """Nothing leaves the device: every parameter private."""
    return replace(host, roles=dict.fromkeys(host.specs, Role.PRIVATE))


def central(model: Model, s: CentralSettings) -> Federation:
    """One client that holds everybody, with an optimiser that remembers."""
    step = Phase((Move(tuple(n.name for n in model.specs()), s.rate, Adam(decay=s.decay, persistent=True)),))
    roles = dict.fromkeys((n.name for n in model.specs()), Role.PRIVATE)
    algorithm = Algorithm(model, roles, (_pass(s, step),), negatives=s.negatives)
    return replace(federation(s, algorithm), pooled=True)


def roles_of(model: Model) -> dict[str, Role]:
    """The common division: user parameters private, everything else shared."""
    return {n.name: Role.PRIVATE if n.axis is Axis.USER else Role.SHARED for n in model.specs()}


def network_of(model: Model) -> tuple[str, ...]:
    """Layers: parameters that are neither an item's nor a user's."""
    return tuple(n.name for n in model.specs() if n.axis is Axis.WHOLE)


def refuse_silos(data: TrainingSet, method: str) -> None:
    """Some methods know one user per device and no other way."""
    if data.silos is not None:
        raise SettingsError(f"{method} runs with one user per client; this data has clients that hold several")


def federation(s: FederatedSettings, algorithm: Algorithm, *wrappers: Wrapper) -> Federation:
    """An algorithm, wrapped, with its rounds, participation and engine."""
    return Federation(compose(algorithm, *wrappers), s.rounds, s.participation, engine=s.engine)


def fixing(settings: type[S], **values: Any) -> type[S]:
    """Settings in which some values stand still: an ablation is its host with one thing decided."""
    fields: dict[str, Any] = {k: (Literal[v], Field(v, description="fixed")) for k, v in values.items()}
    return create_model(settings.__name__, __base__=settings, __doc__=settings.__doc__, **fields)


def _pass(s: FederatedSettings, *phases: Phase) -> Pass:
    return Pass(phases, s.local_epochs, s.batch_size)
