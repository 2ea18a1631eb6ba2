"""Options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedmosaic.runs.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets (or set FEDMOSAIC_DATA).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Imports = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        callback=lambda files: _import(files),
        help="A Python file with methods, data, metrics ... of your own.",
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Runs at a time (default: one per processor).")]


def _import(files: list[Path] | None) -> list[Path] | None:
    """Import the user's own code before the command looks names up."""
    from fedmosaic.core import plugins

    for file in files or []:
        plugins.add(file)
    return files


OWN_FILES = """Own files: separator, header, encoding, compression and columns are recognised and told; what is wrong is
said as key=value: user= item= time= rating= title= (a column's name, or its number from 1; no for none), separator=tab
header=false encoding=latin-1 decimal=, titles=FILE min_rating=4 min_user_rows=5 lenient=true. A pattern in quotes
('logs/*.csv') reads several. `fedmosaic data describe FILE` shows what is seen; docs/data.md has all of it."""


def told_reading(settings: Settings) -> Settings:
    """Settings with what is recognised of a file of one's own, which is told on stderr."""
    resolved, words = settings.resolved()
    if words is not None:
        print(f"{settings.dataset} {words}", file=sys.stderr)
    return resolved


@contextmanager
def interruptible(place: Path) -> Iterator[None]:
    """Ctrl-C, or a signal to end, says where the run is and how it goes on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code not in (130, 143):
            raise
        begun = (place / "config.toml").is_file() and not (place / "summary.json").is_file()
        after = f"; {place} holds what is done: fedmosaic resume {place}" if begun else "; nothing was begun"
        print(f"interrupted{after}", file=sys.stderr, flush=True)
        raise typer.Exit(1 if isinstance(end, KeyboardInterrupt) else 143) from None


def note_licence(dataset: str, data_dir: Path | None) -> None:
    """Fetch a named set if needed, and print its licence the one time it is brought."""
    from fedmosaic.data.sources import Source, find

    source = find(dataset)
    if isinstance(source, Source):
        found = source.find(data_dir)
        if found.fetched:
            print(f"fetched {dataset} from {found.fetched}\nlicence: {source.licence}", file=sys.stderr)
