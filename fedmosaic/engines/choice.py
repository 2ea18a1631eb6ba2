"""Which engines there are, and which one runs an algorithm: decided once, with the reason in words.

    loop        one client after the other; the reference
    simulate    many clients at once in blocks; any algorithm
    fused       compiled; algorithms it can lower, by exact type

`auto` takes the first of AUTOMATIC that runs the algorithm. Others may be added (`fedmosaic.extend.register_engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.core.errors import RequestError, SettingsError, one_of, warn_renamed
from fedmosaic.core.extras import require_torch
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.engine import Engine, Holding, Refusal

AUTOMATIC = ("fused", "simulate")
Factory = Callable[[Algorithm, Holding], Engine | Refusal]


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine: why it does not run an algorithm (nothing: it does), told without loading it, and its maker."""

    refuses: Callable[[Algorithm, Holding], str]
    make: Callable[[Algorithm, Holding], Engine]


def _loop(algorithm: Algorithm, holding: Holding) -> Engine:
    from fedmosaic.engines.loop import Loop

    return Loop(algorithm)


def _simulate(algorithm: Algorithm, holding: Holding) -> Engine:
    from fedmosaic.engines.simulate import Simulate

    return Simulate(algorithm)


def _fused(algorithm: Algorithm, holding: Holding) -> Engine | Refusal:
    from fedmosaic.engines.fused.lower import lower

    return lower(algorithm, holding)


def _without_torch(algorithm: Algorithm, holding: Holding) -> str:
    try:
        require_torch("the general engine")
    except RequestError as error:
        return str(error)
    return ""


def _of_factory(factory: Factory) -> EngineKind:
    """A kind that is asked by being made."""

    def refuses(algorithm: Algorithm, holding: Holding) -> str:
        made = factory(algorithm, holding)
        return made.reason if isinstance(made, Refusal) else ""

    def make(algorithm: Algorithm, holding: Holding) -> Engine:
        made = factory(algorithm, holding)
        assert not isinstance(made, Refusal), made.reason
        return made

    return EngineKind(refuses, make)


ENGINES: dict[str, EngineKind] = {
    "loop": EngineKind(_without_torch, _loop),
    "simulate": EngineKind(_without_torch, _simulate),
    "fused": _of_factory(_fused),
}
OLD_NAMES = {"kernel": "fused"}


def register_engine(name: str, factory: Factory) -> None:
    """Add an engine of one's own: `factory(algorithm, holding)` makes it, or says why it does not run that."""
    if name in ENGINES or name == "auto":
        raise SettingsError(f"there is an engine {name!r} already; choose another name")
    ENGINES[name] = _of_factory(factory)


def check_engine(name: str) -> str:
    """The name of an engine, or `auto`; old names are accepted with a warning."""
    if name in OLD_NAMES:
        warn_renamed(f"engine={name}", f"engine={OLD_NAMES[name]}")
        return OLD_NAMES[name]
    one_of("engine", name, ("auto", *ENGINES))
    return name


def holding_of(data: TrainingSet) -> Holding:
    """Whose data a client of this data holds."""
    if data.silos is None:
        return "user"
    return "everybody" if data.n_clients == 1 else "silo"


def choose(algorithm: Algorithm, holding: Holding, wanted: str = "auto") -> Engine:
    """The engine of that name, or the first that runs the algorithm; refused with the reason in words."""
    if wanted != "auto":
        one_of("engine", wanted, ("auto", *ENGINES))
        if reason := ENGINES[wanted].refuses(algorithm, holding):
            raise SettingsError(f"engine={wanted} does not run this algorithm: {reason}. Use engine=auto")
        return ENGINES[wanted].make(algorithm, holding)
    reasons = {name: ENGINES[name].refuses(algorithm, holding) for name in AUTOMATIC}
    for name, reason in reasons.items():
        if not reason:
            return ENGINES[name].make(algorithm, holding)
    raise SettingsError("no engine runs this algorithm here. " + "; ".join(f"{n}: {r}" for n, r in reasons.items()))


def explain(algorithm: Algorithm, holding: Holding = "user") -> dict[str, str]:
    """For every engine `runs it`, or why not."""
    return {name: kind.refuses(algorithm, holding) or "runs it" for name, kind in ENGINES.items()}
