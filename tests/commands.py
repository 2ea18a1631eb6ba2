"""The command line, in process: the same words, the same exit codes, without the price of a process."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from fedmosaic.cli import main as command


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


def run_command(*words: str) -> Done:
    """Run `fedmosaic WORDS...` here; signals and warnings of this process stay as they are."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["fedmosaic", *words]),
        mock.patch("signal.signal"),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("default")
        try:
            command.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return Done(code, out.getvalue(), err.getvalue())


def descendants(parents: list[int]) -> dict[int, str]:
    """Processes below some, and those themselves, with the time each began (pids are used again, times are not)."""
    children: dict[int, list[int]] = {}
    began: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(entry.name))
                began[int(entry.name)] = words[19]
    found: dict[int, str] = {}
    left = list(parents)
    while left:
        pid = left.pop()
        if pid in began and pid not in found:
            found[pid] = began[pid]
            left += children.get(pid, [])
    return found
