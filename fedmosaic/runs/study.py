"""A study: many runs side by side, each in the folder its settings name.

Finished runs are skipped, interrupted ones continue, a run that fails does not stop the others. Every run has a process
of its own, so that its memory is its own and one that is killed takes nothing with it.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedmosaic.core import buffers, plugins
from fedmosaic.core.errors import FedmosaicError, RunError
from fedmosaic.core.files import locked
from fedmosaic.core.threads import use_threads
from fedmosaic.runs import run as runs
from fedmosaic.runs.ledger import Ledger, Record
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings

POLL_SECONDS = 0.5
MANY = 10  # runs for which PyTorch is imported once, where it is installed, in case some need it
DATA_SETTINGS = (  # that decide which interactions a run sees
    "dataset", "user", "item", "rating", "time", "separator", "header", "encoding", "min_rating", "min_user_rows",
    "lenient", "decimal", "users", "items", "per_user",
)  # fmt: skip
Where = str | Path | None


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    settings: Settings
    place: Path

    @property
    def rounds(self) -> int:
        """How many rounds it takes."""
        return self.settings.build().rounds

    @property
    def done(self) -> int:
        """How many rounds it has recorded."""
        path = self.place / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    @property
    def title(self) -> str:
        """Method, data, pool and seed, and what else was set."""
        s = self.settings
        extra = " ".join(f"{k}={v}" for k, v in s.method_settings.items() if k != "rounds")
        return f"{s.method} {s.dataset} {s.pool} seed {s.seed} {extra}".strip()

    def record(self) -> Record | None:
        """What its folder has to say, if the run is finished and the folder whole; a damaged one says nothing."""
        folder = RunFolder(self.place)
        if not folder.finished:
            return None
        try:
            if not folder.same_code:  # the user's own method has been edited since
                return None
            runs.load_ranks(self.place)
            return Record.of(folder)
        except (FedmosaicError, KeyError, TypeError):
            return None


@dataclass
class StudyProgress:
    """How far a study has come; a cell that failed stands with what it said last."""

    total: int
    skipped: int = 0
    finished: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)
    running: list[Cell] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Cells that will not run any more."""
        return self.skipped + len(self.finished) + len(self.failed)


Tell = Callable[[StudyProgress], None]


def cells(settings: Sequence[Settings], parent: str | Path) -> list[Cell]:
    """One cell per distinct settings, in order."""
    distinct = {s.key(): s for s in settings}
    return [Cell(s, runs.default_place(s, parent)) for s in distinct.values()]


def run_study(
    settings: Sequence[Settings],
    parent: str | Path = "runs",
    *,
    workers: int | None = None,
    data_dir: Where = None,
    largest: int | None = None,
    keep: Collection[str] = (),
    ledger: Ledger | None = None,
    tell: Tell | None = None,
) -> StudyProgress:
    """Run what is not finished yet on this data, `workers` at a time.

    Trained states of over `largest` bytes are dropped, but for the settings whose key is in `keep`. What stands in the
    ledger is not run, unless its state is to be kept and is not there; what is finished is added to it.
    """
    Path(parent).mkdir(parents=True, exist_ok=True)
    every = cells(settings, parent)
    with locked(Path(parent), "study"):
        ledger = ledger or Ledger()
        look = _Look(data_dir, keep, ledger)
        found = [(cell, cell.record()) for cell in every]
        waiting = [cell for cell, record in found if not look.done(cell, record)]
        ledger.add(*(record for cell, record in found if record is not None and cell not in waiting))
        progress = StudyProgress(len(every), skipped=len(every) - len(waiting))
        count = max(1, min(workers or os.cpu_count() or 1, max(len(waiting), 1)))
        threads = max(1, (os.cpu_count() or 1) // count)
        preload = ["fedmosaic.runs.preload", *(["torch"] if len(waiting) >= MANY else [])]
        active: list[tuple[Cell, BaseProcess, Connection]] = []
        try:
            while waiting or active:
                while waiting and len(active) < count:
                    cell = waiting.pop(0)
                    limit = None if cell.settings.key() in keep else largest
                    active.append((cell, *_launch(cell, data_dir, threads, limit, preload)))
                _report(progress, [cell for cell, _, _ in active], tell)
                wait([process.sentinel for _, process, _ in active], POLL_SECONDS)
                for entry in [e for e in active if not e[1].is_alive()]:
                    active.remove(entry)
                    _collect(progress, *entry)
                    if (record := entry[0].record()) is not None:
                        ledger.add(record)
        finally:
            for _, process, _ in active:
                process.terminate()
                process.join()
        _report(progress, [], tell)
    return progress


@dataclass(frozen=True, eq=False)
class _Look:
    """Tells which cells are done already; digests of data sets are taken once."""

    data_dir: Where
    keep: Collection[str]
    ledger: Ledger
    digests: dict[str, str] = field(default_factory=dict)

    def done(self, cell: Cell, record: Record | None) -> bool:
        """Whether a cell is finished, by its folder's record or the ledger's, on the data its settings name today."""
        if cell.settings.key() in self.keep:
            record = record if RunFolder(cell.place).trained else None
        else:
            record = record or self.ledger.records.get(cell.settings.key())
        return record is not None and self._digest(cell) in ("", record.data)

    def _digest(self, cell: Cell) -> str:
        source = json.dumps(cell.settings.model_dump(include=set(DATA_SETTINGS)), sort_keys=True)
        if source not in self.digests:
            try:
                self.digests[source] = cell.settings.load_data(self.data_dir).digest()
            except FedmosaicError:  # what was done stays done where its data cannot be had any more
                self.digests[source] = ""
        return self.digests[source]


def _report(progress: StudyProgress, running: list[Cell], tell: Tell | None) -> None:
    progress.running = running
    if tell is not None:
        tell(progress)


def _launch(
    cell: Cell, data_dir: Where, threads: int, largest: int | None, preload: list[str]
) -> tuple[BaseProcess, Connection]:
    # A fork server imports the library once; every cell is then a fresh process that costs next to nothing to start.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(preload)
    ours, theirs = context.Pipe()
    order = _Order(cell.settings.to_toml(), str(cell.place), data_dir, threads, largest, plugins.named())
    process = context.Process(target=_work, args=(order, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _collect(progress: StudyProgress, cell: Cell, process: BaseProcess, channel: Connection) -> None:
    process.join()
    said = ""
    with suppress(EOFError):  # it was killed before it could speak
        said = channel.recv() if channel.poll() else ""
    channel.close()
    if process.exitcode == 0:
        progress.finished.append(cell)
    else:
        progress.failed.append((cell, said or f"its process ended with code {process.exitcode} (out of memory?)"))


@dataclass(frozen=True)
class _Order:
    """What a process of its own is told: a run, where, with how much, and which code of the user's own it needs."""

    toml: str
    place: str
    data_dir: Where
    threads: int
    largest: int | None
    imports: list[str]


def _work(order: _Order, channel: Connection) -> None:
    """In a process of its own: one run, from its beginning or from where it was cut."""
    _end_with_parent(channel)
    use_threads(order.threads)
    buffers.keep_freed()
    try:
        plugins.only(order.imports)
        folder = RunFolder(order.place)
        settings = Settings.from_toml(order.toml)
        if _begun(folder, settings.load_data(order.data_dir).digest()):
            runs.resume(order.place, data_dir=order.data_dir)
        else:
            runs.start(settings, order.place, data_dir=order.data_dir)
        folder.trim(order.largest)
    except FedmosaicError as error:
        channel.send(str(error))
        sys.exit(1)
    except Exception:
        channel.send(traceback.format_exc(limit=-4))
        sys.exit(1)


def _begun(folder: RunFolder, data: str) -> bool:
    """Whether there is a run on this data to go on with; one that looks finished is here because it is damaged."""
    try:
        return folder.started and not folder.finished and folder.data == data and folder.same_code
    except RunError:  # it does not say on which data
        return False


def _end_with_parent(channel: Connection) -> None:
    """End this worker when its study ends: nobody writes to this pipe, so a read returns when it is closed."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            channel.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
