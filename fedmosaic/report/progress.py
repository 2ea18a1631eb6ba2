"""Progress of a study: one bar for all of it and one per running cell; elsewhere a line as each cell ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fedmosaic.report.console import console
from fedmosaic.runs.study import StudyProgress, Tell


@contextmanager
def study_progress(quiet: bool) -> Iterator[Tell | None]:
    """What `run_study` tells, made visible on stderr."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bars() as tell:
            yield tell
    else:
        yield _Lines()


class _Lines:
    """One line per cell that ended."""

    def __init__(self) -> None:
        self.begun, self.finished, self.failed = False, 0, 0

    def __call__(self, progress: StudyProgress) -> None:
        if not self.begun and progress.skipped:
            self._say(f"{progress.skipped} of {progress.total} runs are already done")
        for cell, reason in progress.failed[self.failed :]:
            self._say(f"failed: {cell.title}: {reason}")
        for number, cell in enumerate(progress.finished[self.finished :], self.finished + 1):
            self._say(f"{progress.skipped + self.failed + number}/{progress.total} {cell.title}")
        self.begun, self.finished, self.failed = True, len(progress.finished), len(progress.failed)

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Tell]:
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console(stderr=True)) as bars:
        overall = bars.add_task("runs", total=None)
        shown: dict[str, TaskID] = {}
        told = 0

        def tell(progress: StudyProgress) -> None:
            nonlocal told
            bars.update(overall, completed=progress.ended, total=progress.total)
            current = {cell.title: cell for cell in progress.running}
            for title in [t for t in shown if t not in current]:
                bars.remove_task(shown.pop(title))
            for title, cell in current.items():
                if title not in shown:
                    shown[title] = bars.add_task("  " + title, total=cell.rounds)
                bars.update(shown[title], completed=cell.done)
            for cell, reason in progress.failed[told:]:
                told += 1
                bars.console.print(f"failed: {cell.title}: {reason}", markup=False)

        yield tell
