"""Code of others: files that the user names, and entry points of installed packages.

A file is imported once per process. Its path is also put into the environment, so that processes started from this one
(studies, deployments) know the same methods. It is the user's own code and runs with the user's rights.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
import zlib
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TypeVar

from fedmosaic.core.errors import SettingsError

T = TypeVar("T")
VARIABLE = "FEDMOSAIC_IMPORT"
_imported: set[str] = set()
_digests: dict[str, str] = {}  # of imported modules, as they were when they were read


def add(file: str | Path) -> None:
    """Name a file of code; it is imported here, and in processes that are started from here."""
    path = str(Path(file).resolve())
    if path not in named():
        os.environ[VARIABLE] = os.pathsep.join([*named(), path])
    load()


def named() -> list[str]:
    """The files that were named, for processes that must know them too."""
    return [p for p in os.environ.get(VARIABLE, "").split(os.pathsep) if p]


def only(files: list[str]) -> None:
    """Name exactly these files: a process that is older than the user's wish may have others in its environment."""
    os.environ[VARIABLE] = os.pathsep.join(files)
    load()


def load() -> None:
    """Import the files that were named and have not been imported yet."""
    for path in named():
        if path not in _imported:
            _imported.add(path)
            _run(Path(path))


def _run(path: Path) -> None:
    if not path.is_file():
        raise SettingsError(f"--import {path}: there is no such file")
    name = f"fedmosaic_import_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"--import {path}: not a Python file")
    module = module_from_spec(spec)
    _digests[name] = _digest(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise SettingsError(f"--import {path}{where}: {type(error).__name__}: {error}") from error


def points(group: str) -> dict[str, EntryPoint]:
    """Entry points of installed packages in a group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def loaded(point: EntryPoint, kind: type[T]) -> T:
    """What an entry point names; refused unless it is of the right kind."""
    value = point.load()
    if not isinstance(value, kind):
        raise SettingsError(f"the entry point {point.value} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def code_digest(value: object) -> str:
    """Digest of the file that defines something, if it is not of this package: other code gives other results."""
    name = str(getattr(value, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in _digests:
        _digests[name] = "" if file is None or name.split(".")[0] == "fedmosaic" else _digest(Path(file))
    return _digests[name]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
