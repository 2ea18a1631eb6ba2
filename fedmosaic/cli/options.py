"""Options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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


def note_licence(dataset: str, data_dir: Path | None) -> None:
    """Fetch a named set if needed, and print its licence the one time it is brought."""
    from fedmosaic.data.sources import Source, find

    source = find(dataset)
    if isinstance(source, Source):
        found = source.find(data_dir)
        if found.fetched:
            print(f"fetched {dataset} from {found.fetched}\nlicence: {source.licence}", file=sys.stderr)
