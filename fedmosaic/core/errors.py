"""Typed errors: each names the thing, lists what exists where that helps, and says what to do."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable


class FedmosaicError(Exception):
    """Base of every error this library raises on purpose."""


class RequestError(FedmosaicError):
    """The request was wrong: an unknown name, a bad setting (exit code 2 on the command line)."""


class SettingsError(RequestError):
    """A setting is unknown or its value does not fit."""


class UnknownNameError(RequestError, LookupError):
    """A name that is not in a catalogue; the message lists the nearest and what exists.

    >>> raise UnknownNameError("data set", "ml100k", ["ml-100k", "ml-1m"])
    Traceback (most recent call last):
    fedmosaic.core.errors.UnknownNameError: unknown data set 'ml100k'; did you mean 'ml-100k'? known: ml-100k, ml-1m
    """

    def __init__(self, kind: str, name: object, known: Iterable[object], hint: str = "") -> None:
        names = [str(n) for n in known]
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]!r}?" if near else ";"
        shown = ", ".join(names[:40]) + (f", ... ({len(names)} in all)" if len(names) > 40 else "")
        super().__init__(f"unknown {kind} {str(name)!r}{guess} known: {shown}" + (f". {hint}" if hint else ""))
        self.kind, self.name, self.known = kind, name, names

    def __str__(self) -> str:  # KeyError-style quoting of LookupError is unreadable
        return str(self.args[0])


def one_of(kind: str, value: object, known: Iterable[object]) -> None:
    """Refuse a value that is not among those known.

    >>> one_of("kind of upload", "median", ("value", "delta"))
    Traceback (most recent call last):
    fedmosaic.core.errors.UnknownNameError: unknown kind of upload 'median'; known: value, delta
    """
    names = list(known)
    if value not in names:
        raise UnknownNameError(kind, value, names)


class DataError(FedmosaicError):
    """Input data cannot be used; says file, line, column and reason.

    >>> raise DataError("is not a number: 'five'", source="shop.csv", line=7, column="stars")
    Traceback (most recent call last):
    fedmosaic.core.errors.DataError: shop.csv, line 7, column 'stars': is not a number: 'five'
    """

    def __init__(self, reason: str, *, source: object = "data", line: int | None = None, column: object = None) -> None:
        where = [str(source)]
        if line is not None:
            where.append(f"line {line}")
        if column is not None:
            where.append(f"column {column!r}")
        super().__init__(f"{', '.join(where)}: {reason}")
        self.source, self.line, self.column, self.reason = str(source), line, column, reason


class FetchError(FedmosaicError):
    """A named data set could not be obtained; lists every way that was tried and why it failed."""


class DigestError(FetchError):
    """A file's content is not what it should be; names both digests."""


class RunError(FedmosaicError):
    """A run folder is missing, incomplete, or belongs to something else."""


class ForeignError(RunError):
    """A file holds what belongs to another run, node, method or width."""


class ScoreError(FedmosaicError):
    """A recommender produced scores that cannot be ranked (NaN or infinite)."""


class RenamedWarning(FutureWarning):
    """An old name was used; it is accepted for one version."""


def warn_renamed(old: str, new: str) -> None:
    """Say that a name has changed."""
    warnings.warn(f"{old} is now {new}; the old name is accepted for one version", RenamedWarning, stacklevel=3)
