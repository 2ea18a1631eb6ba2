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
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fedmosaic.closed_form.base import fit
from fedmosaic.closed_form.popularity import Popularity
from fedmosaic.config import Settings
from fedmosaic.data.negatives import Candidates, draw_candidates
from fedmosaic.data.split import Split
from fedmosaic.errors import RunError
from fedmosaic.evaluate import Evaluation, evaluate, make_probe, rank_probe
from fedmosaic.metrics import Ranks, bootstrap
from fedmosaic.ragged import Ragged
from fedmosaic.recommender import FederatedRecommender, load_catalogue, save_catalogue, training_set
from fedmosaic.store import load_tensors, read_json, save_tensors, write_atomic, write_json
from fedmosaic.training import Method, State, Step, TrainingSet, train

Progress = Callable[[int, int, dict[str, Any]], None]  # (round, rounds, the line of metrics.jsonl)


@dataclass(frozen=True)
class Meter:
    """Wall and processor time of a process so far."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Meter:
        """Read the clocks."""
        times = os.times()
        return cls(time.perf_counter(), times.user + times.system)

    def since(self, start: Meter) -> tuple[float, float]:
        """Seconds between two readings."""
        return self.wall - start.wall, self.cpu - start.cpu


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    round: int = 0
    best_round: int = 0
    best_value: float = -1.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class RunFolder:
    """Paths and atomic reads and writes of one run."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place)

    @classmethod
    def open(cls, place: str | Path) -> RunFolder:
        """An existing run."""
        folder = cls(place)
        if not (folder.place / "config.toml").is_file():
            raise RunError(
                f"{place} is not a run folder (it has no config.toml); `fedmosaic run ... --out DIR` makes one"
            )
        return folder

    @classmethod
    def create(cls, place: Path, settings: Settings, data_dir: str | Path | None) -> RunFolder:
        """A new run; an old one in the same place must have the same settings, and is started over."""
        folder = cls(place)
        if place.exists() and not place.is_dir():
            raise RunError(f"{place} exists and is not a folder; choose another --out")
        if place.is_dir() and any(place.iterdir()):
            if not (place / "config.toml").is_file():
                raise RunError(f"{place} exists and is not a run folder; choose another --out")
            if folder.settings() != settings:
                raise RunError(f"{place} holds a run with other settings; choose another --out or remove it")
            for old in (
                "summary.json",
                "metrics.jsonl",
                "checkpoint/latest.safetensors",
                "checkpoint/previous.safetensors",
            ):
                (place / old).unlink(missing_ok=True)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create {place}: {error.strerror}") from None
        write_json(place / "env.json", environment() | {"data_dir": None if data_dir is None else str(data_dir)})
        write_atomic(place / "config.toml", settings.to_toml())
        return folder

    def settings(self) -> Settings:
        """The settings this run was started with."""
        path = self.place / "config.toml"
        return Settings.from_toml(path.read_text(), path)

    @property
    def finished(self) -> bool:
        """Whether the summary has been written."""
        return (self.place / "summary.json").is_file()

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        if not self.finished:
            raise RunError(f"{self.place} is not finished; `fedmosaic resume {self.place}` continues it")
        result: dict[str, Any] = read_json(self.place / "summary.json")
        return result

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        path = self.place / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def save_state(self, name: str, state: State, position: Position) -> None:
        """Write a state; the latest one is kept twice, so that a damaged file costs a round and not the run."""
        path = self.place / "checkpoint" / f"{name}.safetensors"
        if name == "latest" and path.is_file():
            path.replace(path.with_name("previous.safetensors"))
        save_tensors(path, state, vars(position))

    def load_state(self, *names: str) -> tuple[State, Position]:
        """The first of the named states that is whole."""
        reasons = []
        for name in names:
            try:
                state, position = load_tensors(self.place / "checkpoint" / f"{name}.safetensors")
                return state, Position(**position)
            except RunError as error:
                reasons.append(str(error))
        raise RunError("no usable checkpoint: " + "; ".join(reasons))

    def recommender(self) -> FederatedRecommender:
        """The selected model of this run, ready to answer."""
        settings = self.settings()
        state, _ = self.load_state("best", "latest", "previous")
        model = FederatedRecommender(
            settings.method, seed=settings.seed, pool=settings.pool, **settings.method_settings
        )
        model.split_ = None
        return model.restore(*load_catalogue(self.place / "catalogue"), state)


def default_place(settings: Settings, parent: str | Path = "runs") -> Path:
    """Content-addressed: equal settings share a folder."""
    dataset = Path(settings.dataset).name.split(".")[0]
    return Path(parent) / f"{settings.method}-{dataset}-{settings.pool}-s{settings.seed}-{settings.key()}"


def start(
    settings: Settings,
    place: str | Path,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run from the beginning and return the summary."""
    method = settings.build()  # a wrong setting is refused before anything is written
    split = settings.split_data(settings.load_data(data_dir))
    folder = RunFolder.create(Path(place), settings, data_dir)
    return _execute(folder, settings, method, split, progress)


def resume(
    place: str | Path, *, data_dir: str | Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Continue a run that was interrupted; a finished one is returned as it is."""
    folder = RunFolder.open(place)
    if folder.finished:
        return folder.summary()
    settings = folder.settings()
    stored = read_json(folder.place / "env.json").get("data_dir")
    split = settings.split_data(settings.load_data(data_dir or stored))
    return _execute(folder, settings, settings.build(), split, progress)


def _execute(
    folder: RunFolder, settings: Settings, method: Method, split: Split, progress: Progress | None
) -> dict[str, Any]:
    candidates = draw_candidates(split, settings.candidates, seed=settings.candidate_seed)
    data = training_set(split, settings.pool, candidates)
    known = split.interactions
    save_catalogue(folder.place / "catalogue", known.users, known.items, known.info, data)
    for position, line in _rounds(folder, settings, method, split, data, candidates):
        if progress is not None:
            progress(position.round, method.rounds, line)
    best, at = folder.load_state("best")
    evaluations = {
        part: evaluate(method.scorer(data, best), split, part, candidates) for part in ("validation", "test")
    }
    _save_ranks(folder, evaluations["test"])
    summary = _summary(folder, settings, split, candidates, evaluations, at)
    write_json(folder.place / "summary.json", summary)
    return summary


def _rounds(
    folder: RunFolder,
    settings: Settings,
    method: Method,
    split: Split,
    data: TrainingSet,
    candidates: Candidates,
) -> Iterator[tuple[Position, dict[str, Any]]]:
    """Train from the last whole checkpoint on; evaluate, record, store after each round."""
    try:
        state, position = folder.load_state("latest", "previous")
    except RunError:
        state, position = None, Position()
    lines = [line for line in folder.metrics() if line["round"] <= position.round]
    clock = Meter.now()
    probe = make_probe(split, "validation", candidates)
    protocol, metric = settings.select.split(":")
    for step in train(method, data, settings.seed, state=state, done=position.round, probe=probe):
        line: dict[str, Any] = {"round": step.round, **vars(step.record)}
        chosen = position.best_value
        if step.round % settings.evaluate_every == 0 or step.round == method.rounds:
            line["validation"] = _validation(method, data, step, split, candidates, probe, full=protocol == "full")
            chosen = line["validation"][protocol][metric]
        wall, cpu = Meter.now().since(clock)
        clock = Meter.now()
        better = "validation" in line and chosen >= position.best_value  # a later round wins a tie
        position = Position(
            round=step.round,
            best_round=step.round if better else position.best_round,
            best_value=chosen if better else position.best_value,
            seconds=position.seconds + wall,
            cpu_seconds=position.cpu_seconds + cpu,
            bytes_up=position.bytes_up + step.record.bytes_up,
            bytes_down=position.bytes_down + step.record.bytes_down,
        )
        line["seconds"] = round(wall, 4)
        lines.append(line)
        write_atomic(folder.place / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in lines))
        if better:
            folder.save_state("best", step.state, position)
        folder.save_state("latest", step.state, position)
        yield position, line


def _validation(
    method: Method, data: TrainingSet, step: Step, split: Split, candidates: Candidates, probe: Ragged, *, full: bool
) -> dict[str, dict[str, float]]:
    """1 + n metrics from the round's own answers where it gave them; the full ranking where it is asked for."""
    ranks: dict[str, Ranks] = {}
    if step.answers is not None:
        ranks["sampled"] = rank_probe(step.answers, probe, split.validation)
    if full or step.answers is None:
        found = evaluate(method.scorer(data, step.state), split, "validation", candidates, top_k=0)
        assert found.sampled is not None
        ranks |= {"sampled": found.sampled, "full": found.full}
    return {name: {"hr@10": r.mean("hr", 10), "ndcg@10": r.mean("ndcg", 10)} for name, r in ranks.items()}


def _summary(
    folder: RunFolder,
    settings: Settings,
    split: Split,
    candidates: Candidates,
    evaluations: dict[str, Evaluation],
    at: Position,
) -> dict[str, Any]:
    _, last = folder.load_state("latest", "previous")
    test = evaluations["test"]
    assert test.sampled is not None
    return {
        "method": settings.method,
        "dataset": settings.dataset,
        "pool": settings.pool,
        "seed": settings.seed,
        "rounds": last.round,
        "best_round": at.round,
        "protocol": settings.protocol(),
        "validation": evaluations["validation"].summary(),
        "test": test.summary(),
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


def _references(split: Split, candidates: Candidates, test: Evaluation) -> dict[str, Any]:
    """Rows that stand beside every number: chance and popularity."""
    assert test.sampled is not None
    form = Popularity()
    data = TrainingSet(split.train, split.train, split.n_items)
    state = fit(form, split.train.to_csr(split.n_items))
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


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


def environment() -> dict[str, Any]:
    """Versions and machine, as a bug report needs them."""
    names = ("fedmosaic", "numpy", "scipy", "numba", "polars", "pydantic", "safetensors", "torch", "flwr")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "byte_order": sys.byteorder,
        "packages": versions,
    }
