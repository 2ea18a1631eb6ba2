"""What methods are made with: settings that mean the same everywhere, and helpers of their compositions.

One word, one thing: `user_rate` moves the user's own score side, `item_rate` item rows (or `item_factor`, times the
number of items), `network_rate` layers, `server_rate` the server's optimiser, `rate` everything at once. `noise` is
the scale of what is added to every number sent; `clip` bounds the joint norm of what a client sends; `decay` is weight
decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper, compose, reduced_by
from fedmosaic.algorithm.local import Pass, Phase
from fedmosaic.algorithm.objective import bpr, innermost
from fedmosaic.algorithm.parameters import Axis, Role
from fedmosaic.algorithm.server import Weights
from fedmosaic.algorithm.view import Model
from fedmosaic.core.errors import SettingsError, UnknownNameError, warn_renamed
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.choice import check_engine
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import SecureTeam, check_adds_up
from fedmosaic.privacy.adaptive_clip import AdaptiveClip
from fedmosaic.privacy.budget import Budget, Trust, bounded, bounded_by
from fedmosaic.privacy.noise import rows_clipped
from fedmosaic.training.method import Method

S = TypeVar("S", bound=BaseModel)
FULL_BATCH = 1 << 30
WITH_EPSILON = (  # that a refusal names; variants of them have one, too
    "popularity", "itemknn", "ease", "mosaic", "fedmf", "pfedrec", "fedncf", "fedrecon", "fedrap", "fedrecgel", "colr",
)  # fmt: skip


class MethodSettings(BaseModel):
    """Settings of a method: refused when unknown; old names are accepted for one version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    RENAMED: ClassVar[Mapping[str, str]] = {}  # old name -> new name
    DROPPED: ClassVar[Mapping[str, Any]] = {}  # settings that have gone, and the value they always had
    NO_EPSILON: ClassVar[str] = "nothing bounds what one user changes"  # why there is none; empty: there is one

    @classmethod
    def modern(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Given settings under their new names."""
        kept = {k: v for k, v in given.items() if k not in cls.DROPPED or v != cls.DROPPED[k]}
        return {cls.RENAMED.get(k, k) if k not in cls.model_fields else k: v for k, v in kept.items()}


class CohortSettings(MethodSettings):
    """Settings of everything that learns in rounds, some clients at a time."""

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

    NO_EPSILON: ClassVar[str] = ""

    engine: str = Field(default="auto", description="auto, fused, simulate or loop; changes speed, not numbers")
    loss: Literal["pointwise", "pairwise"] = Field(
        default="pointwise",
        description="the method's own loss per example, or BPR: every positive against every negative",
    )
    weights: Weights = Field(
        default="equal", description="of clients in the server's mean; size = by the examples they trained on"
    )

    reduce: str | None = Field(
        default=None,
        description="how uploads become one change, if not as the method has it: bounded, trimmed-mean or median "
        "against clients that lie, which see every upload; mean, sum, row-mean",
    )

    secure: bool = Field(
        default=False,
        description="clients mask what they send, and the server learns the sum alone: the same numbers, in more time",
    )
    secure_bits: Literal[32, 64] = Field(
        default=64, description="of a masked number; 32 halves what is sent and rounds it, and needs upload_clip"
    )

    groups: int | None = Field(
        default=None,
        ge=1,
        description="with secure=true and reduce=bounded, trimmed-mean or median: clients are summed in so many "
        "groups, the same in all rounds, and the server sees every group's sum",
    )

    epsilon: float | None = Field(
        default=None, gt=0, description="privacy of a user's whole history over all rounds; none: no bound, no noise"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="chance that epsilon leaves open")
    upload_clip: float | Literal["adaptive"] | None = Field(
        default=None,
        description="largest norm of what a client sends; adaptive: a private quantile of all norms; none: no bound, "
        "and 1 with an epsilon",
    )
    clip_quantile: float | None = Field(
        default=None, gt=0, lt=1, description="of upload_clip=adaptive: share of clients within it; none: a half"
    )
    clip_start: float | None = Field(
        default=None, gt=0, description="of upload_clip=adaptive: the bound of the first round; none: 1"
    )
    row_clip: float | None = Field(
        default=None, gt=0, description="largest norm of an item's row in what a client sends; none: no bound"
    )
    trust: Trust = Field(
        default="server", description="with an epsilon: who adds the noise; devices in shares, under secure=true"
    )

    @model_validator(mode="after")
    def _shares_are_masked(self) -> FederatedSettings:
        if self.epsilon is not None and self.trust == "devices" and not self.secure:
            raise ValueError("trust=devices: a share of the noise protects nobody alone; give secure=true, too")
        if self.secure and self.secure_bits == 32 and not isinstance(self.upload_clip, float):
            raise ValueError(
                "secure_bits=32: without a bound on what is sent that is known before, a sum might not fit; give "
                "upload_clip a number"
            )
        if self.groups is not None and (not self.secure or self.participation < 1):
            raise ValueError(
                "groups= are of a secure sum in which all clients take part in every round, or sums over others of a "
                "group would tell its clients apart; give secure=true and participation=1"
            )
        if self.upload_clip != "adaptive" and (self.clip_quantile or self.clip_start):
            raise ValueError("clip_quantile and clip_start are of a bound that follows; give upload_clip=adaptive")
        return self

    @field_validator("upload_clip", mode="before")
    @classmethod
    def _number_or_adaptive(cls, value: Any) -> Any:
        if value in (None, "adaptive"):
            return value
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = 0.0
        if not 0 < found < inf:
            raise ValueError("a number above 0, or adaptive")
        return found

    @property
    def bound(self) -> float | AdaptiveClip | None:
        """On what a client sends."""
        if self.upload_clip == "adaptive":
            return AdaptiveClip(self.clip_start or 1.0, self.clip_quantile or 0.5)
        return self.upload_clip

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        return check_engine(value)


@dataclass(frozen=True)
class Entry:
    """A method by name.

    name: what users type. title: one line. paper: where it is from. settings: its settings, a pydantic model.
    make: settings -> method; by default the settings are the method (closed forms). expect: data set and settings, as
    on the command line, -> HR@10 and NDCG@10 of the test in percent (strict pool, 1 + 99; a mean over several seeds).
    """

    name: str
    title: str
    paper: str
    settings: type[BaseModel]
    make: Callable[[Any], Any] = lambda settings: settings
    expect: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def build(self, settings: Mapping[str, Any] | None = None) -> Any:
        """The method with some settings changed; unknown ones are refused by name."""
        made = self.make(validated(self.settings, dict(settings or {}), f"method {self.name}"))
        if not hasattr(made, "advance"):
            kind = type(made).__name__
            raise SettingsError(
                f"make of method {self.name} gave a {kind}, not a method; federation(s, algorithm) makes one"
            )
        method: Method[Any] = made
        return method


def validated(model: type[S], values: Mapping[str, Any], owner: str) -> S:
    """Build a settings model; errors name the setting, its value, and what is allowed."""
    if issubclass(model, MethodSettings):
        values = renamed(model, values, owner)
    for key in values:
        if key not in model.model_fields:
            raise UnknownNameError(f"setting of {owner}", key, model.model_fields)
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where, words = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"setting {where} of {owner}: {words} (got {first['input']!r})") from None


def renamed(model: type[MethodSettings], values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Settings under their new names, with a warning for each old one; an epsilon that nothing keeps is refused."""
    if model.NO_EPSILON and values.get("epsilon") is not None:
        known = ", ".join(WITH_EPSILON)
        raise SettingsError(f"{owner} has no epsilon: {model.NO_EPSILON}. Methods with one: {known}")
    for old, new in model.RENAMED.items():
        if old in values and old not in model.model_fields:
            if new in values:
                raise SettingsError(f"{new} of {owner} is given twice, once by its old name {old}")
            warn_renamed(f"setting {old!r} of {owner}", repr(new))
    return model.modern(values)


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
    """An algorithm, wrapped, with its rounds, participation and engine.

    s: the settings. algorithm: the host. wrappers: applied from left to right.
    """
    whole = compose(algorithm, *wrappers)
    if s.loss == "pairwise":
        whole = replace(whole, objective=innermost(whole.objective, bpr))
    if s.weights == "size":  # a server that says so itself stays as it is
        whole = replace(whole, server=replace(whole.server, weights="size"))
    if s.reduce is not None:
        whole = reduced_by(s.reduce)(whole)
    if s.row_clip is not None:
        whole = rows_clipped(s.row_clip)(whole)
    budget = None
    if s.epsilon is not None:
        budget = Budget(s.epsilon, s.delta, s.bound or 1.0, s.rounds, s.participation, s.trust)
        whole = bounded(budget)(whole)
    elif s.bound is not None:
        whole = bounded_by(s.bound)(whole)
    team = None
    if s.secure:
        team = SecureTeam(s.secure_bits, s.upload_clip if isinstance(s.upload_clip, float) else None, s.groups)
        check_adds_up(whole, s.groups)
    return Federation(whole, s.rounds, s.participation, engine=s.engine, team=team, budget=budget)


def one_pass(s: RoundSettings, *phases: Phase) -> Pass:
    """One pass over the client's examples, every batch through all phases."""
    return Pass(phases, s.local_epochs, s.batch_size)


def fixing(settings: type[S], **values: Any) -> type[S]:
    """Settings in which some values stand still: an ablation is its host with one thing decided."""
    fields: dict[str, Any] = {k: (Literal[v], Field(v, description="fixed")) for k, v in values.items()}
    return create_model(settings.__name__, __base__=settings, __doc__=settings.__doc__, **fields)
