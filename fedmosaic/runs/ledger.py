"""The ledger: what finished runs found, a line of JSON a run, in one file small enough to publish beside a table.

A run folder holds trained states and per-user ranks, megabytes. Its record holds settings, versions, the digest of the
data, metrics at 10, costs and the learning curve, a few kilobytes. A study that is given a ledger does not repeat what
stands in it and adds what it finishes, so tables can be written again on a machine that has none of the folders.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import RenamedWarning, RunError
from fedmosaic.core.files import read_json, write_atomic
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import RECORDS_BEGAN, Settings

CUT = "@10"
PARTS = ("validation", "test", "chance")
COPIED = ("rounds", "best_round", "protocol", "cost", "table")
PACKAGES = ("fedmosaic", "numpy", "numba", "torch")
CURVE = ("seconds", "bytes_up", "loss")
DIGITS = 6


@dataclass(frozen=True)
class Record:
    """One finished run."""

    name: str  # of its folder
    key: str  # content address of its settings
    settings: dict[str, Any]
    made: dict[str, Any]  # date, Python, packages
    data: str  # digest of the interactions
    summary: dict[str, Any]
    curve: dict[str, list[float | None]]  # a column per quantity, an entry per round

    @classmethod
    def of(cls, folder: RunFolder) -> Record:
        """What a finished run folder has to say."""
        settings, found, env = folder.settings(), folder.summary(), read_json(folder.place / "env.json")
        written = (folder.place / "summary.json").stat().st_mtime
        made = {"date": f"{datetime.fromtimestamp(written, UTC):%Y-%m-%d}", "python": env["python"]}
        summary = {name: found[name] for name in COPIED if name in found}
        judged = found | found["reference"]
        for part in PARTS:
            tables = {k: v for k, v in judged.get(part, {}).items() if k in ("sampled", "full")}
            summary[part] = {k: {m: _short(x) for m, x in v.items() if m.endswith(CUT)} for k, v in tables.items()}
        return cls(
            folder.place.name,
            settings.key(),
            settings.recorded(),
            made | {name: env["packages"][name] for name in PACKAGES},
            folder.data or "",
            summary,
            _columns(folder.metrics()),
        )

    @property
    def versions(self) -> str:
        """Python and packages it was made with, in words."""
        packages = [f"{name} {self.made[name]}" for name in PACKAGES if name in self.made]
        return ", ".join([f"Python {self.made['python']}", *packages])


class Ledger:
    """Records by the key of their settings; without a file it holds nothing and keeps nothing."""

    def __init__(self, path: Path | None = None, records: Mapping[str, Record] | None = None) -> None:
        self.path = path
        self.records = dict(records or {})

    @classmethod
    def read(cls, path: Path | None) -> Ledger:
        """A ledger's file; one that is not there yet is empty."""
        if path is None or not path.is_file():
            return cls(path)
        records = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = Record(**json.loads(line))
            except (json.JSONDecodeError, TypeError) as error:
                raise RunError(f"{path}, line {number}: not a record of a run: {error}") from None
            records[record.key] = record
        return cls(path, records)

    def add(self, *records: Record) -> None:
        """Take records in and write the file; a run that was made again replaces what it said before."""
        new = {r.key: r for r in records if self.records.get(r.key) != r}
        if self.path is None or not new:
            self.records |= new
            return
        self.records |= Ledger.read(self.path).records | new  # another study may have written meanwhile
        lines = sorted(json.dumps(asdict(r), separators=(",", ":")) for r in self.records.values())
        write_atomic(self.path, "".join(line + "\n" for line in lines))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _columns(lines: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Lines of metrics.jsonl as columns; validation is the drawn HR@10, none in a round that was not evaluated."""
    columns: dict[str, list[float | None]] = {
        name: [_short(line[name]) if line.get(name) is not None else None for line in lines] for name in CURVE
    }
    tables = [line.get("validation", {}).get("sampled", {}) for line in lines]
    columns["validation"] = [_short(t[f"hr{CUT}"]) if t else None for t in tables]
    return columns


def modernise(path: Path, *, write: bool = False) -> dict[str, Any]:
    """Map every record to the settings' names of today; results stay as they are.

    Says how many records there are, how many changed names, how many a key (defaults and names decide it), and what.
    """
    ledger = Ledger.read(path)
    found, changes, rekeyed = {}, [], 0
    for old in ledger.records.values():
        values = RECORDS_BEGAN | {k: v for k, v in old.settings.items() if k not in ("method", "dataset")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RenamedWarning)
            settings = Settings.make(old.settings["method"], old.settings["dataset"], values)
        new = replace(old, key=settings.key(), settings=settings.recorded())
        before, after = old.settings.get("method_settings", {}), new.settings.get("method_settings", {})
        if before != after:
            moved = [f"{k}={before[k]}" for k in before if before.get(k) != after.get(k)]
            became = [f"{k}={after[k]}" for k in after if before.get(k) != after.get(k)]
            change = f"{', '.join(moved)} -> {', '.join(became) or 'nothing'}"
            changes.append({"method": settings.method, "dataset": settings.dataset, "change": change})
        rekeyed += new.key != old.key
        if new.key in found:
            raise RunError(f"{path}: two records become one, {new.key} ({settings.method} on {settings.dataset})")
        found[new.key] = new
    if write:
        write_atomic(path, "".join(sorted(json.dumps(asdict(r), separators=(",", ":")) + "\n" for r in found.values())))
    return {"total": len(found), "renamed": len(changes), "rekeyed": rekeyed, "records": changes}
