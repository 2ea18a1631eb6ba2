"""TensorBoard and Weights & Biases, fed from the records every run writes anyway (`metrics.jsonl`, `summary.json`).

Nothing in training knows of them: `fedmosaic track RUN...` exports finished or running runs as often as one likes, and
`fedmosaic run --track KIND` sends each round's record as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.core.extras import require_torch
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings


class Tracker(Protocol):
    """What receives the records of runs."""

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """The numbers of one round."""
        ...

    def close(self, summary: Mapping[str, float]) -> None:
        """The numbers of the whole run; nothing follows."""
        ...


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a nested record with their paths.

    >>> dict(flat({"loss": 0.5, "validation": {"full": {"hr@10": 0.1}}, "note": "x"}))
    {'loss': 0.5, 'validation/full/hr@10': 0.1}
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


class TensorBoard:
    """Event files in a folder of the run's name."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        require_torch("writing for TensorBoard")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SettingsError("TensorBoard is not installed: pip install 'fedmosaic[trackers]'") from None
        for old in (folder / name).glob("events.out.tfevents.*"):  # exported again: in place of what was there
            old.unlink()
        self.writer: Any = SummaryWriter(str(folder / name))
        self.writer.add_text("settings", "\n".join(f"    {k} = {v}" for k, v in settings.items()))

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """One point per curve."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)

    def close(self, summary: Mapping[str, float]) -> None:
        """The end's numbers as curves of one point."""
        for name, value in summary.items():
            self.writer.add_scalar(f"summary/{name}", value, 0)
        self.writer.close()


class WandB:
    """An offline run; `wandb sync` sends it if and when its owner wants."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise SettingsError("Weights & Biases is not installed: pip install 'fedmosaic[trackers]'") from None
        folder.mkdir(parents=True, exist_ok=True)
        self.run: Any = wandb.init(
            project="fedmosaic",
            name=name,
            dir=str(folder),
            mode="offline",
            config=dict(settings),
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Send the record of one round."""
        self.run.log(dict(values), step=round)

    def close(self, summary: Mapping[str, float]) -> None:
        """Send the summary, and end."""
        self.run.summary.update(dict(summary))
        self.run.finish()


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB}


def tracker(kind: str, folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """A tracker by name."""
    if kind not in KINDS:
        raise UnknownNameError("tracker", kind, KINDS)
    found: Tracker = KINDS[kind](folder, name, settings)
    return found


def name_of(place: Path, settings: Settings) -> str:
    """A run's name among others: its folder and its settings' key, since folders of the same name lie elsewhere."""
    name = place.resolve().name
    return name if name.endswith(settings.key()) else f"{name}-{settings.key()}"


def record_of(line: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers, its own number left out."""
    return {name: value for name, value in flat(line) if name != "round"}


def ending_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """A run's numbers that are worth a place beside its curves."""
    return dict(flat({k: summary[k] for k in ("test", "cost", "table") if k in summary}))


class Live:
    """A tracker that follows a run: opened by its first record, closed with the run's summary or without."""

    def __init__(self, kind: str | None, folder: Path, name: str, settings: Settings) -> None:
        if kind is not None and kind not in KINDS:
            raise UnknownNameError("tracker", kind, KINDS)
        self.make = None if kind is None else partial(tracker, kind, folder, name, settings.model_dump())
        self.target: Tracker | None = None
        self.summary: Mapping[str, Any] = {}

    def __enter__(self) -> Live:
        return self

    def record(self, line: Mapping[str, Any]) -> None:
        """A round's record, as the run writes it."""
        if self.make is not None:
            self.target = self.target or self.make()
            self.target.record(int(line["round"]), record_of(line))

    def __exit__(self, *_: object) -> None:
        if self.target is not None:
            self.target.close(ending_of(self.summary))


def export(place: str | Path, kind: str, folder: Path) -> int:
    """Send a run's records, and its summary if it has one; returns the number of rounds."""
    run = RunFolder.open(place)
    target = tracker(kind, folder, name_of(run.place, run.settings()), run.settings().model_dump())
    lines = run.metrics()
    for line in lines:
        target.record(int(line["round"]), record_of(line))
    target.close(ending_of(run.summary()) if run.finished else {})
    return len(lines)
