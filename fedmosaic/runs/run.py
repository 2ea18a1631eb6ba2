"""A run: data, split, rounds, selection on validation, one look at the test, and a folder that holds it all.

    config.toml      the settings; `fedmosaic run --config` on it repeats the run
    env.json         versions and machine
    catalogue/       ids, titles, histories
    checkpoint/      latest, previous and best state; each file whole or absent
    metrics.jsonl    one line per round
    ranks.safetensors, summary.json    written last: a folder with a summary is finished

A killed run resumes to the same bytes: randomness is keyed, so rounds after a checkpoint do not depend on the past
process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.errors import ForeignError, RunError, SettingsError
from fedmosaic.core.files import load_tensors, read_json, save_tensors, write_json
from fedmosaic.core.machine import Meter, peak_megabytes
from fedmosaic.data.negatives import Candidates, draw_candidates, training_set
from fedmosaic.data.split import Part, Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.engine import Team
from fedmosaic.engines.federation import Federation
from fedmosaic.evaluation.evaluate import Evaluation, evaluate
from fedmosaic.evaluation.metrics import Ranks, bootstrap
from fedmosaic.evaluation.spectrum import table_summary
from fedmosaic.methods.closed_form import fit
from fedmosaic.methods.popularity import Popularity
from fedmosaic.runs.foresight import worries
from fedmosaic.runs.run_folder import Position, RunFolder
from fedmosaic.runs.settings import Settings
from fedmosaic.serving.catalogue import Catalogue
from fedmosaic.training.loop import LOOK, Begun, OnRound, Validation, train
from fedmosaic.training.method import Method, Promises

CHECKPOINT_SECONDS = 2.0
CHECKPOINT_SHARE = 0.1  # of a run's time that storing states may take
WIDEST = 1024  # tables of wider rows (item-item models) have no spectrum worth its price


@dataclass(frozen=True, eq=False)
class Setup:
    """What a run trains on and is judged by."""

    split: Split
    candidates: Candidates
    data: TrainingSet
    validation: Validation

    @classmethod
    def of(cls, settings: Settings, split: Split) -> Setup:
        """Candidates, training set and judge of a split, as the settings have them."""
        candidates = draw_candidates(split, settings.candidates, seed=settings.candidate_seed)
        data = training_set(split, settings.pool, candidates)
        scores = LOOK if settings.select == "auto" else None
        judge = Validation(split, candidates, settings.selection, settings.evaluate_every, scores)
        return cls(split, candidates, data, judge)


def default_place(settings: Settings, parent: str | Path = "runs") -> Path:
    """Content-addressed: equal settings share a folder."""
    dataset = Path(settings.dataset).name.split(".")[0]
    return Path(parent) / f"{settings.method}-{dataset}-{settings.pool}-s{settings.seed}-{settings.key()}"


def start(
    settings: Settings,
    place: str | Path,
    *,
    data_dir: str | Path | None = None,
    on_round: OnRound | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    team: Team | None = None,
) -> dict[str, Any]:
    """Run from the beginning and return the summary; an interruption costs at most `checkpoint_seconds` of work."""
    method = settings.build()  # a wrong setting is refused before anything is written
    method.check_installed()
    check_input(settings, method)
    if team is not None:
        assert isinstance(method, Federation)
        method = replace(method, team=team)
    data = settings.load_data(data_dir)
    split = settings.split_data(data)
    for worry in worries(settings.method, method, np.bincount(data.item, minlength=len(data.items)), len(data.users)):
        warnings.warn(worry, stacklevel=2)
    folder = RunFolder.create(Path(place), settings, data_dir, data.digest())
    return _execute(folder, settings, method, split, on_round, checkpoint_seconds)


def check_input(settings: Settings, method: Method[Any]) -> None:
    """Refuse a longer history for methods that answer from what they learnt of a user in training."""
    if settings.input != "train" and not getattr(method, "from_history", False):
        raise SettingsError(
            f"input={settings.input} is for methods that answer from a history they are given (closed forms); "
            f"{settings.method} answers from what it learnt in training"
        )


def resume(
    place: str | Path,
    *,
    data_dir: str | Path | None = None,
    on_round: OnRound | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> dict[str, Any]:
    """Continue a run that was interrupted; a finished one is returned as it is."""
    folder = RunFolder.open(place)
    if folder.finished:
        return folder.summary()
    settings = folder.settings()
    data = settings.load_data(data_dir or read_json(folder.place / "env.json").get("data_dir"))
    if folder.data != data.digest():
        raise RunError(f"{place} was begun on other data (the digests differ); start a new run")
    split = settings.split_data(data)
    return _execute(folder, settings, settings.build(), split, on_round, checkpoint_seconds)


def _execute(
    folder: RunFolder,
    settings: Settings,
    method: Method[Any],
    split: Split,
    on_round: OnRound | None,
    checkpoint_seconds: float,
) -> dict[str, Any]:
    setup, known = Setup.of(settings, split), split.interactions
    Catalogue(known.users, known.items, known.info, setup.data).save(folder.place / "catalogue")
    promise = method.promise if isinstance(method, Promises) else None
    if promise is not None:
        folder.promise(promise)  # before anything is released
    for position, line in _rounds(folder, settings, method, setup, checkpoint_seconds):
        if on_round is not None:
            on_round(position.round, method.rounds, line)
    best, at = folder.load_state(method, "best")
    parts: list[Part] = ["validation", "test"] if setup.validation.exists else ["test"]
    inputs = dict.fromkeys(parts, setup.data)
    if settings.input == "all-before":
        inputs["test"] = setup.data.followed_by(split.held("validation"))
    evaluations = {part: evaluate(method.scorer(inputs[part], best), split, part, setup.candidates) for part in parts}
    _save_ranks(folder, evaluations["test"])
    _, last = folder.load_state(method, "latest", "previous")
    summary = _summary(folder, settings, setup, evaluations, (at, last)) | _table(method, best)
    if promise is not None:
        assert isinstance(method, Promises)
        folder.promise(promise, released=last.round, spent=method.spent_after(last.round))
        summary["privacy"] = promise
    write_json(folder.place / "summary.json", summary)
    return summary


def _rounds(
    folder: RunFolder, settings: Settings, method: Method[Any], setup: Setup, checkpoint_seconds: float
) -> Iterator[tuple[Position, dict[str, Any]]]:
    """Train from the last whole checkpoint on; record every round, store the state now and then."""
    begun, position = None, Position()
    try:
        state, position = folder.load_state(method, "latest", "previous")
        folder.load_state(method, "best")  # without it the selection would be lost
        begun = Begun(state, position.round, position.rose, position.best_value)
    except ForeignError:
        raise
    except RunError:  # there is none yet, or it is damaged
        position = Position()
    best: tuple[Any, Position] | None = None  # not yet stored
    stored = clock = Meter.now()
    pause = 0.0
    with folder.open_metrics(position.round) as metrics:
        for seen in train(method, setup.data, settings.seed, setup.validation, begun, settings.patience):
            wall, cpu = Meter.now().since(clock)
            clock = Meter.now()
            position, line = position.after(seen, wall, cpu), seen.line | {"seconds": round(wall, 4)}
            metrics.write(json.dumps(line) + "\n")
            if seen.best:
                best = (seen.step.state, position)
            if seen.last or clock.wall - stored.wall >= max(checkpoint_seconds, pause):
                metrics.flush()
                if best is not None:
                    folder.save_state("best", method.pack(best[0]), best[1])
                folder.save_state("latest", method.pack(seen.step.state), position)
                best, stored = None, Meter.now()
                pause = (stored.wall - clock.wall) / CHECKPOINT_SHARE  # large states are stored less often
            yield position, line


def _summary(
    folder: RunFolder,
    settings: Settings,
    setup: Setup,
    evaluations: dict[Part, Evaluation],
    positions: tuple[Position, Position],
) -> dict[str, Any]:
    """What a finished run has to say; `positions` are those of the selected round and of the last."""
    (at, last), split, candidates, test = positions, setup.split, setup.candidates, evaluations["test"]
    assert test.sampled is not None
    return {
        "method": settings.method,
        "dataset": settings.dataset,
        "pool": settings.pool,
        "seed": settings.seed,
        "rounds": last.round,
        "best_round": at.round,
        "protocol": settings.protocol(split.rule, candidates.short, setup.validation.users),
        "candidates": settings.candidates,
        **{str(part): _judged(found, settings.selection) for part, found in evaluations.items()},
        "interval": {
            name: vars(bootstrap(ranks.per_user("hr", 10)))
            for name, ranks in (("sampled", test.sampled), ("full", test.full))
        },
        "reference": _references(split, candidates, test),
        "counts": {"users": split.n_users, "items": split.n_items, "evaluated": int(test.full.users.size)}
        | dict(split.counts)
        | ({"users with fewer candidates than wanted": candidates.short} if candidates.short else {}),
        "cost": {
            "seconds": round(last.seconds, 3),
            "cpu_seconds": round(last.cpu_seconds, 3),
            "peak_mb": round(peak_megabytes(), 1),
            "bytes_up": last.bytes_up // max(last.round, 1),
            "bytes_down": last.bytes_down // max(last.round, 1),
        },
        "run": str(folder.place),
    }


def _judged(found: Evaluation, select: str) -> dict[str, Any]:
    """All metrics at the usual cuts, and the one that chose the round at its own."""
    summary, (protocol, metric) = found.summary(), select.split(":")
    ranks, (name, cut) = found.full if protocol == "full" else found.sampled, metric.split("@")
    assert ranks is not None
    summary[protocol].setdefault(metric, ranks.mean(name, int(cut)))
    return summary


def _table(method: Method[Any], state: Any) -> dict[str, Any]:
    """What the common item table is like, where there is one of vectors."""
    try:
        vectors = method.vectors(state)
    except SettingsError:
        return {}
    return {"table": table_summary(vectors)} if vectors.shape[1] <= WIDEST else {}


def _references(split: Split, candidates: Candidates, test: Evaluation) -> dict[str, Any]:
    """Rows that stand beside every number: chance and popularity."""
    assert test.sampled is not None
    form = Popularity()
    data = TrainingSet(split.train, split.train, split.n_items)
    state = fit(form, data.held)
    popular = evaluate(form.scorer(data, state), split, "test", candidates)
    assert popular.sampled is not None
    return {
        "chance": {"sampled": test.sampled.chance().table(), "full": test.full.chance().table()},
        "popularity": {"sampled": popular.sampled.table(), "full": popular.full.table()},
    }


def _save_ranks(folder: RunFolder, test: Evaluation) -> None:
    """Per-user results, for intervals and paired tests later."""
    parts = {"full": test.full, "sampled": test.sampled}
    names = ("user", "item", "above", "tied", "candidates")
    save_tensors(
        folder.place / "ranks.safetensors",
        {f"{p}.{n}": getattr(ranks, n) for p, ranks in parts.items() if ranks is not None for n in names},
    )


def load_ranks(place: str | Path, protocol: str = "full") -> Ranks:
    """Per-user test results of a finished run."""
    tensors, _ = load_tensors(Path(place) / "ranks.safetensors")
    return Ranks(*(tensors[f"{protocol}.{n}"] for n in ("user", "item", "above", "tied", "candidates")))
