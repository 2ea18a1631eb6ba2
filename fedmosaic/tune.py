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
from pathlib import Path
from typing import Any

from fedmosaic import zoo
from fedmosaic.config import Settings
from fedmosaic.data.negatives import draw_candidates
from fedmosaic.data.split import Split
from fedmosaic.errors import FedmosaicError, RunError, ScoreError, SettingsError
from fedmosaic.evaluate import evaluate, make_probe, rank_probe
from fedmosaic.folder import environment
from fedmosaic.recommender import training_set
from fedmosaic.store import write_atomic
from fedmosaic.training import train

Choice = tuple[float, float] | list[Any]  # a logarithmic range, or values to choose from
# Not searched unless asked: they change the problem, its privacy or its cost rather than the fit.
FIXED = {"participation", "step_decay", "round_decay", "tolerance", "average"}
FIXED |= {"noise", "publish_noise", "clip", "clip_low", "clip_high", "threshold", "nu"}
RANGES: dict[str, tuple[float, float]] = {  # where the default is no number to start from
    "score_rate": (0.01, 3.0),
    "item_rate": (100.0, 100_000.0),
    "own_rate": (0.1, 300.0),
    "own_init": (0.001, 1.0),
    "shrink": (1.0, 1000.0),
}
AROUND = 30.0  # other numbers: default / 30 to default · 30
Tell = Callable[[int, int, float], None]  # trials ended, trials in all, best value so far


@dataclass(frozen=True)
class Search:
    """What is searched, where, and with how much effort."""

    settings: Settings
    trials: int
    space: Mapping[str, Choice]

    @property
    def name(self) -> str:
        """One study per method, data, pool, rounds and space: only equal searches continue each other."""
        s = self.settings
        space = {k: list(v) for k, v in self.space.items()}
        return json.dumps([s.model_dump(), space], sort_keys=True, default=str)


@dataclass(frozen=True)
class Found:
    """The best settings, their validation value, and how many trials were run and cut short."""

    settings: Settings
    value: float
    trials: int
    pruned: int


def default_space(method: str) -> dict[str, Choice]:
    """Learning rates and weights of a method, each on a logarithmic range around its default.

    >>> default_space("ease")
    {'lam': (16.666666666666668, 15000.0)}
    """
    space: dict[str, Choice] = {}
    for name, field in zoo.entry(method).settings.model_fields.items():
        if field.annotation not in (float, float | None) or name in FIXED:
            continue
        if name in RANGES:
            space[name] = RANGES[name]
        elif field.default:
            space[name] = (field.default / AROUND, field.default * AROUND)
    return space


def parse_space(texts: list[str]) -> dict[str, Choice]:
    """`rate=0.01:3` is a logarithmic range, `dim=16,32,64` a choice.

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
    return space


def tune(search: Search, file: Path, data_dir: str | Path | None = None, tell: Tell | None = None) -> Found:
    """Run the trials that are still missing; equal searches on one file continue each other."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise SettingsError("tuning needs Optuna: pip install 'fedmosaic[tune]'") from None
    if not search.space:
        raise SettingsError(f"{search.settings.method} has nothing to tune; name a --space")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file.parent.mkdir(parents=True, exist_ok=True)
    split = search.settings.split_data(search.settings.load_data(data_dir))
    if not split.validation.values.size:
        raise SettingsError("tuning needs validation items; this split holds out none")
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(file))),
        sampler=optuna.samplers.TPESampler(),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5),
        study_name=search.name,
        direction="maximize",
        load_if_exists=True,
    )
    ended = [t for t in study.trials if t.state.is_finished()]
    # a continued search must not draw again what it drew when it began
    study.sampler = optuna.samplers.TPESampler(seed=search.settings.seed + len(ended))
    if not study.trials and _defaults(search):  # the defaults are a trial like any other
        study.enqueue_trial(_defaults(search))
    for number in range(len(ended), search.trials):
        study.optimize(lambda trial: _try(search, split, trial), n_trials=1)
        if tell is not None:
            tell(number + 1, search.trials, _best(study))
    if _best(study) < 0:
        raise RunError("no trial came to a result; every setting in the space made training diverge")
    pruned = sum(t.state == optuna.trial.TrialState.PRUNED for t in study.trials)
    given = {**search.settings.method_settings, **study.best_params}
    return Found(_with(search.settings, given), study.best_value, len(study.trials), pruned)


def _defaults(search: Search) -> dict[str, Any]:
    found = zoo.entry(search.settings.method).settings(**search.settings.method_settings).model_dump()
    return {k: v for k, v in found.items() if isinstance(v, float) and _inside(v, search.space.get(k))}


def _inside(value: float, choice: Choice | None) -> bool:
    return isinstance(choice, tuple) and choice[0] <= value <= choice[1]


def _best(study: Any) -> float:
    values = [t.value for t in study.trials if t.value is not None]
    return max(values, default=-1.0)


def _with(settings: Settings, given: Mapping[str, Any]) -> Settings:
    base = settings.model_dump(exclude={"method", "dataset", "method_settings"})
    return Settings.make(settings.method, settings.dataset, {**base, **given})


def _try(search: Search, split: Split, trial: Any) -> float:
    """The best validation value of a training with the trial's settings; cut short where it lags."""
    import optuna

    given = dict(search.settings.method_settings)
    for name, choice in search.space.items():
        if isinstance(choice, list):
            given[name] = trial.suggest_categorical(name, choice)
        else:
            given[name] = trial.suggest_float(name, *choice, log=True)
    settings = _with(search.settings, given)
    try:
        return _train(settings, split, trial)
    except (ScoreError, FloatingPointError):  # it diverged: as bad as can be
        return 0.0
    except FedmosaicError as error:
        raise optuna.TrialPruned(str(error)) from None


def _train(settings: Settings, split: Split, trial: Any) -> float:
    import optuna

    method = settings.build()
    candidates = draw_candidates(split, settings.candidates, seed=settings.candidate_seed)
    data = training_set(split, settings.pool, candidates)
    probe, (protocol, metric) = make_probe(split, "validation", candidates), settings.select.split(":")
    name, cut = metric.split("@")
    best = 0.0
    for step in train(method, data, settings.seed, probe=probe):
        if step.answers is not None and protocol == "sampled":
            value = rank_probe(step.answers, probe, split.validation).mean(name, int(cut))
        else:
            found = evaluate(method.scorer(data, step.state), split, "validation", candidates, top_k=0)
            ranks = found.full if protocol == "full" else found.sampled
            assert ranks is not None
            value = ranks.mean(name, int(cut))
        best = max(best, value)
        trial.report(best, step.round)
        if trial.should_prune():
            raise optuna.TrialPruned
    return best


def write_preset(found: Found, place: Path, command: str) -> None:
    """A settings file with the command that found it at its head."""
    versions = environment()["packages"]
    head = (
        f"# found by: {command}\n"
        f"# {found.trials} trials, {found.pruned} cut short; validation {found.settings.select} {found.value:.4f}\n"
        f"# on {datetime.now(UTC):%Y-%m-%d} with fedmosaic {versions['fedmosaic']}, torch {versions['torch']}\n"
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, head + found.settings.to_toml())
