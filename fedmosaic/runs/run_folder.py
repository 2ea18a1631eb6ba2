"""The run folder: paths, atomic reads and writes, how far a run has come, and on which machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fedmosaic.core import plugins
from fedmosaic.core.errors import ForeignError, RunError
from fedmosaic.core.files import (
    Tensors,
    digest_of,
    load_tensors,
    read_json,
    read_lines,
    save_tensors,
    write_atomic,
    write_json,
)
from fedmosaic.core.looks import Glance, Shown
from fedmosaic.core.machine import environment
from fedmosaic.methods.registry import entry
from fedmosaic.runs.settings import Settings
from fedmosaic.serving.catalogue import Catalogue
from fedmosaic.serving.recommender import FederatedRecommender
from fedmosaic.training.loop import Seen
from fedmosaic.training.method import Method


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    round: int = 0
    rose: int = 0  # the round in which the best value last rose
    best_value: float = -1.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def after(self, seen: Seen[Any], seconds: float, cpu_seconds: float) -> Position:
        """The position after one more round."""
        step = seen.step
        return Position(
            round=step.round,
            rose=seen.rose,
            best_value=seen.value,
            seconds=self.seconds + seconds,
            cpu_seconds=self.cpu_seconds + cpu_seconds,
            bytes_up=self.bytes_up + step.record.bytes_up,
            bytes_down=self.bytes_down + step.record.bytes_down,
        )


class RunFolder(Shown):
    """Paths and atomic reads and writes of one run."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place)

    def glance(self) -> Glance:
        """What was run, how far it came, and what came out."""
        settings = self.settings()
        facts = [("method", settings.method), ("data", settings.dataset), ("pool", settings.pool)]
        if not self.finished:
            return Glance(f"Run {self.place}: not finished", [*facts, ("next", f"fedmosaic resume {self.place}")])
        found = self.summary()
        facts.append(("round", f"{found['best_round']} of {found['rounds']}"))
        rows = [
            (name, *(f"{100 * table[p][m]:.2f}" for p in ("full", "sampled") for m in ("hr@10", "ndcg@10")))
            for name, table in [*found["reference"].items(), (settings.method, found["test"])]
        ]
        drawn = f"1+{found['candidates']}"
        head = ("test, percent", "full HR@10", "full NDCG@10", f"{drawn} HR@10", f"{drawn} NDCG@10")
        return Glance(f"Run {self.place}", facts, head, rows)

    @classmethod
    def open(cls, place: str | Path) -> RunFolder:
        """The folder of an existing run; refused if it is none."""
        folder = cls(place)
        if not (folder.place / "config.toml").is_file():
            raise RunError(
                f"{place} is not a run folder (it has no config.toml); `fedmosaic run ... --out DIR` makes one"
            )
        return folder

    @classmethod
    def create(cls, place: Path, settings: Settings, data_dir: str | Path | None, data: str) -> RunFolder:
        """A new run; an old one in the same place must have the same settings, and is started over."""
        folder = cls(place)
        if place.exists() and not place.is_dir():
            raise RunError(f"{place} exists and is not a folder; choose another --out")
        strangers = [p.name for p in place.iterdir() if not p.name.startswith(".")] if place.is_dir() else []
        if strangers not in ([], ["env.json"]):  # empty, or killed before the settings were written
            if not (place / "config.toml").is_file():
                raise RunError(f"{place} exists and is not a run folder; choose another --out")
            if folder.settings().key() != settings.key():
                raise RunError(f"{place} holds a run with other settings; choose another --out or remove it")
            states = (f"checkpoint/{name}.safetensors" for name in ("latest", "previous", "best"))
            for old in ("summary.json", "metrics.jsonl", "ranks.safetensors", *states):
                (place / old).unlink(missing_ok=True)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create {place}: {error.strerror}") from None
        where = None if data_dir is None else str(Path(data_dir).resolve())
        code = plugins.code_digest(entry(settings.method).settings)
        write_json(place / "env.json", environment() | {"data_dir": where, "data": data, "code": code})
        write_atomic(place / "config.toml", settings.to_toml())
        return folder

    def settings(self) -> Settings:
        """The settings this run was started with."""
        path = self.place / "config.toml"
        if not path.is_file():
            raise RunError(f"{path} is missing")
        return Settings.from_toml(path.read_text(), path)

    @property
    def finished(self) -> bool:
        """Whether the summary has been written."""
        return (self.place / "summary.json").is_file()

    @property
    def trained(self) -> bool:
        """Whether the run is finished and its selected state is still there."""
        return self.finished and (self.place / "checkpoint" / "best.safetensors").is_file()

    @property
    def started(self) -> bool:
        """Whether there are settings to continue with."""
        return (self.place / "config.toml").is_file()

    @property
    def data(self) -> str | None:
        """Digest of the interactions this run was begun on."""
        found: str | None = read_json(self.place / "env.json").get("data")
        return found

    @property
    def same_code(self) -> bool:
        """Whether the method's own code is what it was; that of the library is known by its version."""
        before = read_json(self.place / "env.json").get("code", "")
        return bool(before == plugins.code_digest(entry(self.settings().method).settings))

    def trim(self, largest: int | None = None) -> None:
        """Drop states a finished run does not need: those for resuming, and one over `largest` bytes."""
        checkpoint = self.place / "checkpoint"
        for name in ("latest", "previous"):
            (checkpoint / f"{name}.safetensors").unlink(missing_ok=True)
        best = checkpoint / "best.safetensors"
        if largest is not None and best.is_file() and best.stat().st_size > largest:
            best.unlink()

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        if not self.finished:
            raise RunError(f"{self.place} is not finished; `fedmosaic resume {self.place}` continues it")
        result: dict[str, Any] = read_json(self.place / "summary.json")
        return result

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per round."""
        return read_lines(self.place / "metrics.jsonl")

    def open_metrics(self, done: int) -> TextIO:
        """Continue metrics.jsonl after a round, dropping lines of rounds that will be run again."""
        path = self.place / "metrics.jsonl"
        kept = [line for line in self.metrics() if line["round"] <= done]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        return path.open("a")

    def _binding(self) -> dict[str, str]:
        """What a checkpoint belongs to: these settings, on this data."""
        config = (self.place / "config.toml").read_text()
        method = self.settings().method
        bound = {"method": method, "config": digest_of({}, config)[:16], "data": self.data or ""}
        return bound | {"code": plugins.code_digest(entry(method).settings)}

    def promise(self, words: str, *, released: int | None = None, spent: float | None = None) -> None:
        """Keep what was promised, and what was spent of it; until a run ends, all of it counts as spent.

        A run that goes on after an interruption repeats rounds with the same noise: that releases nothing new.
        """
        write_json(self.place / "privacy.json", {"promise": words, "rounds released": released, "epsilon spent": spent})

    def save_state(self, name: str, arrays: Tensors, position: Position) -> None:
        """Write a state; the latest one is kept twice, so that a damaged file costs a round and not the run."""
        path = self.place / "checkpoint" / f"{name}.safetensors"
        if name == "latest" and path.is_file():
            path.replace(path.with_name("previous.safetensors"))
        save_tensors(path, arrays, {**self._binding(), "position": vars(position)})

    def load_state(self, method: Method[Any], *names: str) -> tuple[Any, Position]:
        """The first of the named states that is whole; one of another run is refused by name."""
        reasons = []
        for name in names:
            path = self.place / "checkpoint" / f"{name}.safetensors"
            try:
                arrays, meta = load_tensors(path)
            except RunError as error:
                reasons.append(str(error))
                continue
            position = meta.pop("position", None)
            if position is None or meta != self._binding():
                named = meta.get("method", "unknown")
                raise ForeignError(
                    f"{path} belongs to another run (method {named}; its settings, data or code differ); "
                    "put the right file back, or start the run again"
                )
            return method.unpack(arrays, str(path)), Position(**position)
        raise RunError("no usable checkpoint: " + "; ".join(reasons))

    def recommender(self) -> FederatedRecommender:
        """The selected model of this run, ready to answer."""
        settings = self.settings()
        model = FederatedRecommender(
            settings.method, seed=settings.seed, pool=settings.pool, **settings.method_settings
        )
        model.split_ = None
        state, position = self.load_state(model.method_, "best", "latest", "previous")
        return model.restore(Catalogue.load(self.place / "catalogue"), state, position.round)


def folders_in(parent: str | Path) -> list[RunFolder]:
    """The run folders that a folder holds, by name."""
    return [RunFolder(config.parent) for config in sorted(Path(parent).glob("*/config.toml"))]
