"""A comparison: methods side by side on one data set, over seeds and pools, with what a reader needs to believe it.

Chance, popularity and local-only are always there. Intervals come from resampling users (of each user's mean over
seeds); the paired test asks whether the same users fare differently under two methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fedmosaic.core.errors import RunError, SettingsError, UnknownNameError, one_of
from fedmosaic.evaluation.metrics import F64, Interval, Paired, Ranks, bootstrap, holm, paired_test
from fedmosaic.methods import registry
from fedmosaic.methods.base import MethodSettings, renamed
from fedmosaic.runs.run import load_ranks
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings, parse_pairs, read_config
from fedmosaic.runs.study import cells

ALWAYS = ("popularity", "local-only:rounds=30")
COLUMNS = (("full", "hr"), ("full", "ndcg"), ("sampled", "hr"), ("sampled", "ndcg"))
CUT = 10


@dataclass(frozen=True)
class Contender:
    """A method with some of its settings changed, as on the command line.

    `pfedrec`, `pfedrec:noise=0.1,dim=16`, or `pfedrec@FILE` with the settings of a file or preset.
    """

    name: str
    method: str
    given: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Read one.

        >>> Contender.parse("pfedrec:noise=0.1,dim=16").given
        {'noise': '0.1', 'dim': 16}
        """
        head, _, rest = text.partition(":")
        method, _, file = head.partition("@")
        model = registry.entry(method).settings
        given = parse_pairs([w for w in rest.split(",") if w])
        if issubclass(model, MethodSettings):
            given = renamed(model, given, f"method {method}")
        for key in given:
            if key not in (known := model.model_fields):
                raise UnknownNameError(f"setting of method {method}", key, known, "what all rows share goes to --set")
        if file:
            base = read_config(file)
            if base.method != method:
                raise SettingsError(f"{file} holds settings of {base.method}, not of {method}")
            given = {**base.method_settings, **given}
        return cls(text, method, given)


def contenders(texts: Sequence[str], without: Sequence[str] = ()) -> list[Contender]:
    """Those asked for, each once, and the references that stand in every table, but for those one can do without."""
    for name in without:
        one_of("reference", name, [Contender.parse(text).method for text in ALWAYS])
    found = [Contender.parse(text) for text in dict.fromkeys(texts)]
    names = {c.method for c in found} | set(without)
    return [*(c for c in map(Contender.parse, ALWAYS) if c.method not in names), *found]


def plan(
    who: Sequence[Contender],
    dataset: str,
    pools: Sequence[str],
    seeds: Sequence[int],
    common: Mapping[str, Any],
    baseline: str | None = None,
) -> list[tuple[Contender, Settings]]:
    """Every run of a comparison; a common setting goes to the run, or to the methods that have it."""
    names = [c.name for c in who]
    if baseline is not None and baseline not in names:
        raise SettingsError(f"the baseline {baseline!r} is not among the rows: {', '.join(names)}")
    for key in common:
        if key in ("pool", "seed", "dataset", "method"):
            raise SettingsError(f"{key} differs between the runs of a comparison; it is an option or an argument")
        if key not in Settings.model_fields and not any(_has(c.method, key) for c in who):
            raise SettingsError(f"no method here has a setting {key!r}; see `fedmosaic describe METHOD`")
    found = []
    for pool in pools:
        for one in who:
            shared = {k: v for k, v in common.items() if k in Settings.model_fields or _has(one.method, k)}
            for seed in seeds:
                given = {**shared, **one.given, "pool": pool, "seed": seed}
                found.append((one, Settings.make(one.method, dataset, given)))
    return found


def _has(method: str, key: str) -> bool:
    """Whether a method has a setting to change, by its old name too; rounds that are bounded are not for choosing."""
    model = registry.entry(method).settings
    fields = model.model_fields
    if key not in fields:
        return issubclass(model, MethodSettings) and key in model.RENAMED
    return not (key == "rounds" and any(getattr(m, "le", None) is not None for m in fields[key].metadata))


@dataclass(frozen=True, eq=False)
class Row:
    """A method under a pool: over seeds the mean and deviation, over users the interval, and the test."""

    name: str
    pool: str
    seeds: tuple[int, ...]
    mean: dict[str, float]
    deviation: dict[str, float | None]  # none: one seed has no spread
    interval: dict[str, Interval]
    paired: dict[str, Paired]  # against the baseline; empty for the baseline itself and for chance
    holm: dict[str, float]  # the tests' p, adjusted for the other rows of the pool
    cost: dict[str, float]
    runs: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **{k: getattr(self, k) for k in ("name", "pool", "seeds", "mean", "deviation", "holm", "cost", "runs")},
            "interval": {k: vars(v) for k, v in self.interval.items()},
            "paired": {k: vars(v) for k, v in self.paired.items()},
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rows of one data set, and the baseline they are tested against."""

    dataset: str
    baseline: str
    protocol: str
    candidates: int  # beside the held-out item, in the sampled ranking
    rows: tuple[Row, ...]
    missing: tuple[str, ...] = ()


def key_of(protocol: str, metric: str) -> str:
    """The name of a column: `full:hr@10`."""
    return f"{protocol}:{metric}@{CUT}"


def compare(planned: Sequence[tuple[Contender, Settings]], parent: str | Path, baseline: str) -> Comparison:
    """Gather the finished runs of a plan; what is missing is named, not hidden."""
    groups: dict[tuple[str, str], list[Path]] = {}
    missing = []
    for one, settings in planned:
        (cell,) = cells([settings], parent)
        if cell.record() is not None:
            groups.setdefault((settings.pool, one.name), []).append(cell.place)
        else:
            missing.append(cell.title)
    if not groups:
        raise RunError("none of the runs is finished, so there is nothing to compare")
    digests = {RunFolder(p).data for places in groups.values() for p in places}
    if len(digests) > 1:
        raise RunError("these runs were made on different data; run the comparison again")
    rows: list[Row] = []
    for pool, members in groupby(groups.items(), key=lambda g: g[0][0]):
        found = {name: _Users.of(places) for (_, name), places in members}
        first = next(iter(found.values()))
        rows.append(_row("chance", pool, first.chance(), None))
        tested = [_row(name, pool, u, None if name == baseline else found.get(baseline)) for name, u in found.items()]
        rows += _adjusted(tested)
    summary, settings = RunFolder(groups[next(iter(groups))][0]).summary(), planned[0][1]
    protocol = _without_pool(summary["protocol"])
    return Comparison(settings.dataset, baseline, protocol, settings.candidates, tuple(rows), tuple(missing))


@dataclass(frozen=True, eq=False)
class _Users:
    """Per-user values of a method's runs: {column: [seeds, users]}, and the summaries they came with."""

    ranks: dict[str, list[Ranks]]
    summaries: list[dict[str, Any]]
    places: list[Path]

    @classmethod
    def of(cls, places: list[Path]) -> _Users:
        ranks = {protocol: [load_ranks(p, protocol) for p in places] for protocol in ("full", "sampled")}
        return cls(ranks, [RunFolder(p).summary() for p in places], places)

    def chance(self) -> _Users:
        return _Users({p: [r[0].chance()] for p, r in self.ranks.items()}, [], [])

    def values(self, protocol: str, metric: str) -> F64:
        return np.stack([r.per_user(metric, CUT) for r in self.ranks[protocol]])


def _row(name: str, pool: str, users: _Users, baseline: _Users | None) -> Row:
    mean, deviation, interval, paired = {}, {}, {}, {}
    for protocol, metric in COLUMNS:
        key, values = key_of(protocol, metric), users.values(protocol, metric)
        mean[key] = float(values.mean())
        deviation[key] = float(values.mean(1).std(ddof=1)) if len(values) > 1 else None
        interval[key] = bootstrap(values.mean(0), samples=1000)
        if baseline is not None:
            paired[key] = paired_test(values.mean(0), baseline.values(protocol, metric).mean(0), samples=2000)
    costs = [s["cost"] for s in users.summaries]
    return Row(
        name,
        pool,
        tuple(s["seed"] for s in users.summaries),
        mean,
        deviation,
        interval,
        paired,
        {},
        {k: _cost(k, [c[k] for c in costs]) for k in costs[0]} if costs else {},
        tuple(str(p) for p in users.places),
    )


def _cost(kind: str, values: list[float]) -> float:
    """Bytes are the runs' mean; time and memory the least: a first run of its kind compiles, and machines are busy."""
    return float(np.mean(values)) if kind.startswith("bytes") else float(min(values))


def _adjusted(rows: list[Row]) -> list[Row]:
    """Several rows are tested, so one of them may differ by luck."""
    found: list[dict[str, float]] = [{} for _ in rows]
    for key in (key_of(protocol, metric) for protocol, metric in COLUMNS):
        at = [i for i, row in enumerate(rows) if key in row.paired]
        for i, p in zip(at, holm([rows[i].paired[key].p for i in at]), strict=True):
            found[i][key] = p
    return [replace(row, holm=adjusted) for row, adjusted in zip(rows, found, strict=True)]


def _without_pool(protocol: str) -> str:
    """The protocol line without what differs between rows."""
    return "; ".join(part for part in protocol.split("; ") if not part.startswith(("pool ", "seed ")))
