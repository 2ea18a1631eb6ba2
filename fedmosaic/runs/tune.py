"""Search for settings on validation, with the same budget for every method.

A study lives in a file: it can be stopped, continued, and shared by several processes. Trials that lag behind the
median of the others are cut short. What is found is written as a settings file that `fedmosaic run --config` reads,
with the command that found it at its head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import log
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import RunError, ScoreError, SettingsError, UnknownNameError
from fedmosaic.core.files import write_atomic
from fedmosaic.core.machine import environment
from fedmosaic.data.split import Split
from fedmosaic.methods import registry
from fedmosaic.methods.base import MethodSettings, renamed
from fedmosaic.runs.run import Setup
from fedmosaic.runs.settings import Settings
from fedmosaic.training.loop import train

Choice = tuple[float, float] | list[Any]  # a logarithmic range, or values to choose from
EDGE = 0.05  # of a range, on its logarithmic scale
# Not searched unless asked: they change the problem, its privacy or its cost rather than the fit.
FIXED = {"participation", "step_decay", "round_decay", "tolerance", "gradient_clip"}
FIXED |= {"noise", "noise_draws", "noise_multiplier", "publish_noise", "clip", "clip_values", "threshold", "nu"}
FIXED |= {"epsilon", "delta", "upload_clip", "row_clip", "clip_quantile", "clip_start", "groups"}
RANGES: dict[str, tuple[float, float]] = {  # where the default is no number to start from
    "user_rate": (0.01, 3.0),
    "item_rate": (100.0, 100_000.0),
    "own_rate": (0.1, 300.0),
    "own_init": (0.001, 1.0),
    "shrink": (1.0, 1000.0),
    "dropout": (0.05, 0.5),
}
AROUND = 30.0  # other numbers: default / 30 to default · 30
Tell = Callable[[int, int, float], None]  # trials ended, trials in all, best value so far


@dataclass(frozen=True)
class Search:
    """What is searched, where, and with how much effort."""

    settings: Settings
    trials: int
    space: Mapping[str, Choice]

    def name(self, digest: str) -> str:
        """One study per settings, data and space: only equal searches continue each other."""
        space = {k: list(v) for k, v in self.space.items()}
        return json.dumps([self.settings.model_dump(), space, digest], sort_keys=True, default=str)


@dataclass(frozen=True)
class Best:
    """The best settings, their validation value, and how many trials were run and cut short."""

    settings: Settings
    value: float
    trials: int
    pruned: int


def at_edges(space: Mapping[str, Choice], found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Settings that were best at an end of their range, and the range: better ones may lie outside.

    >>> at_edges({"rate": (0.1, 10.0), "dim": [8, 16]}, {"rate": 9.7, "dim": 16})
    {'rate': (0.1, 10.0)}
    """
    ranges = {name: choice for name, choice in space.items() if isinstance(choice, tuple) and name in found}
    places = {n: log(found[n] / low) / log(high / low) for n, (low, high) in ranges.items() if 0 < low < high}
    return {name: ranges[name] for name, place in places.items() if not EDGE < place < 1 - EDGE}


def default_space(method: str) -> dict[str, Choice]:
    """Learning rates and weights of a method, each on a logarithmic range around its default.

    >>> default_space("ease")
    {'lam': (16.666666666666668, 15000.0)}
    """
    space: dict[str, Choice] = {}
    for name, field in registry.entry(method).settings.model_fields.items():
        if field.annotation not in (float, float | None) or name in FIXED:
            continue
        if name in RANGES:
            space[name] = RANGES[name]
        elif field.default:
            space[name] = (field.default / AROUND, field.default * AROUND)
    return space


def parse_space(texts: list[str], method: str | None = None) -> dict[str, Choice]:
    """`rate=0.01:3` is a logarithmic range, `dim=16,32,64` a choice; old names of a method's settings are mapped.

    >>> parse_space(["rate=0.01:3", "dim=16,32"])
    {'rate': (0.01, 3.0), 'dim': ['16', '32']}
    """
    space: dict[str, Choice] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        try:
            low, high = (float(part) for part in rest.split(":")) if ":" in rest else (0.0, 0.0)
        except ValueError:
            raise SettingsError(f"expected key=low:high or key=a,b,c, got {text!r}") from None
        space[name] = (low, high) if ":" in rest else [v for v in rest.split(",") if v]
        if not space[name] or (":" in rest and not 0 < low < high):
            raise SettingsError(f"a range needs 0 < low < high, a choice needs values: {text!r}")
    if method is not None and issubclass(model := registry.entry(method).settings, MethodSettings):
        return renamed(model, space, f"method {method}")
    return space


def tune(search: Search, file: Path, data_dir: str | Path | None = None, tell: Tell | None = None) -> Best:
    """Run the trials that are still missing; equal searches on one file continue, or share, each other's.

    The first trial is the settings as they were given. Only trials that ended (or were cut short by the pruner) count:
    an interrupted one is made again.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise SettingsError("tuning needs Optuna: pip install 'fedmosaic[tune]'") from None
    if not search.space:
        raise SettingsError(f"{search.settings.method} has nothing to tune; name a --space")
    known = registry.entry(search.settings.method).settings.model_fields
    for name in search.space:  # what judges a method (pool, seed, candidates) is not searched
        if name not in known:
            raise UnknownNameError(f"setting of method {search.settings.method} to search", name, known)
    for end in (0, -1):  # both ends of every range must be settings
        ends = {name: _cast(search, name, choice[end]) for name, choice in search.space.items()}
        _with(search.settings, {**search.settings.method_settings, **ends})
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = search.settings.load_data(data_dir)
    split = search.settings.split_data(data)
    if not split.validation.values.size:
        raise SettingsError("tuning needs validation items; this split holds out none")
    try:
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(file))),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5),
            study_name=search.name(data.digest()),
            direction="maximize",
            load_if_exists=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{file} cannot hold trials ({error}); name another --file") from None
    while len(ended := _ended(study)) < search.trials:
        # a continued search must not draw again what it drew when it began
        study.sampler = optuna.samplers.TPESampler(seed=search.settings.seed + len(study.trials))
        study.optimize(lambda trial: _try(search, split, trial), n_trials=1)
        if tell is not None:
            ended = _ended(study)
            tell(len(ended), search.trials, max((t.value for t in ended if t.state.name == "COMPLETE"), default=0.0))
    ended = ended[: search.trials]  # an earlier search may have gone further; the budget is the budget
    whole = [t for t in ended if t.state.name == "COMPLETE"]
    if not whole:
        raise RunError("every setting that was tried made training diverge; name a --space of smaller rates")
    best = max(whole, key=lambda t: t.value)
    given = {**search.settings.method_settings, **({} if best.user_attrs.get("given") else best.params)}
    return Best(_with(search.settings, given), best.value, len(ended), len(ended) - len(whole))


def _ended(study: Any) -> list[Any]:
    """Trials that came to a result or were cut short, in order."""
    from optuna.trial import TrialState

    return list(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def _cast(search: Search, name: str, value: Any) -> Any:
    """Whole numbers for settings that are whole numbers."""
    whole = registry.entry(search.settings.method).settings.model_fields
    return round(value) if name in whole and whole[name].annotation is int and isinstance(value, float) else value


def _with(settings: Settings, given: Mapping[str, Any]) -> Settings:
    base = settings.model_dump(exclude={"method", "dataset", "method_settings"})
    return Settings.make(settings.method, settings.dataset, {**base, **given})


def _try(search: Search, split: Split, trial: Any) -> float:
    """The best validation value of a training with the trial's settings; cut short where it lags or diverges."""
    import optuna

    given = dict(search.settings.method_settings)
    if not any(t.user_attrs.get("given") for t in _ended(trial.study)):
        trial.set_user_attr("given", True)
    else:
        for name, choice in search.space.items():
            if isinstance(choice, list):
                given[name] = trial.suggest_categorical(name, choice)
            elif isinstance(_cast(search, name, choice[0]), int):
                given[name] = trial.suggest_int(name, round(choice[0]), round(choice[1]), log=True)
            else:
                given[name] = trial.suggest_float(name, *choice, log=True)
    try:
        return _train(_with(search.settings, given), split, trial)
    except (ScoreError, FloatingPointError):
        trial.set_user_attr("diverged", True)
        raise optuna.TrialPruned from None


def _train(settings: Settings, split: Split, trial: Any) -> float:
    import optuna

    method, setup, best = settings.build(), Setup.of(settings, split), 0.0
    for seen in train(method, setup.data, settings.seed, setup.validation, patience=settings.patience):
        if seen.validation is None:
            continue
        best = seen.value
        trial.report(best, seen.step.round)
        if trial.should_prune():
            raise optuna.TrialPruned
    return best


def write_preset(found: Best, place: Path, command: str) -> None:
    """A settings file with the command that found it at its head."""
    versions = environment()["packages"]
    head = (
        f"# found by: {command}\n"
        f"# {found.trials} trials, {found.pruned} cut short; validation {found.settings.selection} {found.value:.4f}\n"
        f"# on {datetime.now(UTC):%Y-%m-%d} with fedmosaic {versions['fedmosaic']}, torch {versions['torch']}\n"
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, head + found.settings.to_toml())
