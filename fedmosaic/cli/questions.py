"""Verbs that ask: list, describe, doctor, data. None of them loads what training needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmosaic.cli.options import OWN_FILES, DataDir, Imports, Json, note_licence
from fedmosaic.core.errors import SettingsError, UnknownNameError
from fedmosaic.report.console import console, plain, print_table

if TYPE_CHECKING:
    from fedmosaic.runs.run_folder import RunFolder

app = typer.Typer()
data_app = typer.Typer(help="Data sets: list, fetch, describe.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="methods, data, metrics, engines, cards, presets or runs")] = "methods",
    folder: Annotated[Path, typer.Argument(help="Of runs: where they lie.")] = Path("runs"),
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """What there is: methods, data sets, metrics, engines, cards, presets; runs of a folder."""
    if kind == "runs":
        from fedmosaic.runs.run_folder import folders_in

        show_runs(folders_in(folder), as_json)
        return
    rows = _catalogue(kind)
    if as_json:
        print(json.dumps(rows))
        return
    print_table(kind, list(rows[0]), [[str(v) for v in row.values()] for row in rows])


@app.command()
def describe(
    method: Annotated[str, typer.Argument(help="A method.")], imports: Imports = None, as_json: Json = False
) -> None:
    """A method: its paper, its settings, what leaves the device, which engines run it, and the numbers to expect."""
    from fedmosaic.cli.described import described_method

    found = described_method(method)
    if as_json:
        print(json.dumps(found))
        return
    out = console()
    out.print(f"[bold]{method}[/]: {found['title']}\n{found['paper']}\n")
    out.print(found["about"], markup=False)
    rows = [[plain(v) for v in s.values()] for s in found["settings"]]
    print_table("settings", ["setting", "default", "meaning"], rows)
    if found["central"]:
        out.print("central: one client holds the data of everybody; nothing is federated")
    if found["parameters"]:
        print_table(
            "parameters", list(found["parameters"][0]), [[plain(v) for v in p.values()] for p in found["parameters"]]
        )
    if found["engines"]:
        print_table("engines", ["engine", "runs it?"], [[name, words] for name, words in found["engines"].items()])
    size = found["bytes"]
    out.print(
        f"per client and round, {size['items']:,} items: sends {size['up']:,} bytes (dense), receives {size['down']:,}"
    )
    seen = found["privacy"]
    print_table("who sees what of a user (docs/privacy.md)", list(seen[0]), [list(row.values()) for row in seen])
    for dataset, (hr, ndcg) in found["expect"].items():
        command = f"fedmosaic run {method} {dataset} select=sampled:hr@10"
        out.print(f"expect of `{command}` (strict pool, 1 + 99): HR@10 {hr}, NDCG@10 {ndcg}")


@app.command("recommend-method", epilog=OWN_FILES)
def recommend_method(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A data set or a file.")],
    pairs: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.", metavar="KEY=VALUE...")] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Which method suits some data, what it costs, what privacy it can have, and the command: five lines."""
    from fedmosaic.runs.foresight import advice
    from fedmosaic.runs.settings import Settings, parse_pairs

    note_licence(data, data_dir)
    settings = Settings.make("popularity", data, parse_pairs(pairs or []))
    settings, words = settings.resolved()
    if words is not None:
        print(f"{data} {words}", file=sys.stderr)
    found = advice(settings.load_data(data_dir), data, " ".join(pairs or []))
    print(json.dumps(found.plain(data)) if as_json else "\n".join(found.lines))


@app.command()
def doctor(as_json: Json = False) -> None:
    """What a bug report needs: versions, machine, cache, data folder."""
    import os

    from fedmosaic.core.machine import environment
    from fedmosaic.data.cache import cache_folder

    cache = cache_folder()
    report = environment() | {
        "cache": str(cache),
        "cached": sorted(p.name for p in cache.iterdir()) if cache.is_dir() else [],
        "FEDMOSAIC_DATA": os.environ.get("FEDMOSAIC_DATA", "not set"),
    }
    if as_json:
        print(json.dumps(report))
        return
    rows = [
        [k, ", ".join(f"{n} {v}" for n, v in value.items()) if isinstance(value, dict) else str(value)]
        for k, value in report.items()
    ]
    print_table("doctor", ["what", "value"], rows)


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """Data sets that can be named."""
    list_("data", as_json=as_json)


@data_app.command("fetch")
def data_fetch(names: Annotated[list[str], typer.Argument(help="Data sets.")], data_dir: DataDir = None) -> None:
    """Bring data sets into the cache (or find them in the data folder)."""
    from fedmosaic.data.sources import Source, source

    for name in names:
        one = source(name)
        if not isinstance(one, Source):
            raise SettingsError(f"{name} is made, not fetched; there is nothing to bring")
        found = one.find(data_dir)
        print(f"{name}: {found.fetched or 'already here'} -> {found.folder}")
        if found.fetched:
            print(f"  licence: {one.licence}", file=sys.stderr)


@data_app.command("describe", epilog=OWN_FILES)
def data_describe(
    name: Annotated[str, typer.Argument(help="A data set or a file.")],
    pairs: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.", metavar="KEY=VALUE...")] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Counts, as papers print them; of a file, how it is read."""
    from fedmosaic.runs.settings import Settings, parse_pairs

    note_licence(name, data_dir)
    settings = Settings.make("popularity", name, parse_pairs(pairs or []))
    counts = settings.with_ratings().load_data(data_dir).describe()
    if as_json:
        print(json.dumps({"dataset": name, **counts}))
        return
    print_table(name, ["what", "count"], [[k, plain(v)] for k, v in counts.items()])


def show_runs(folders: list[RunFolder], as_json: bool) -> None:
    """A table of runs: what, on what, how far, how good, what it cost."""
    rows = [_run_row(folder) for folder in folders]
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("no runs; `fedmosaic run METHOD DATA` makes one", file=sys.stderr)
        return
    head = ["run", "method", "data", "pool", "seed", "round", "full HR@10", "full NDCG@10", "seconds"]
    cells = [["" if row[name] is None else str(row[name]) for name in head] for row in rows]
    print_table(f"{len(rows)} runs", head, cells)


def _run_row(folder: RunFolder) -> dict[str, Any]:
    settings = folder.settings()
    row: dict[str, Any] = {
        "run": str(folder.place), "method": settings.method, "data": settings.dataset, "pool": settings.pool,
        "seed": settings.seed, "finished": folder.finished,
    }  # fmt: skip
    if not folder.finished:
        lines = folder.metrics()
        done = f"cut at {lines[-1]['round']}" if lines else "not begun"
        return row | {"round": done, "full HR@10": None, "full NDCG@10": None, "seconds": None}
    summary = folder.summary()
    full = summary["test"]["full"]
    return row | {
        "round": f"{summary['best_round']} of {summary['rounds']}",
        "full HR@10": round(100 * full["hr@10"], 2),
        "full NDCG@10": round(100 * full["ndcg@10"], 2),
        "seconds": round(summary["cost"]["seconds"], 1),
    }


def _catalogue(kind: str) -> list[dict[str, Any]]:
    if kind == "methods":
        from fedmosaic.methods.registry import entries

        return [{"method": e.name, "what": e.title, "paper": e.paper} for e in entries()]
    if kind == "data":
        from fedmosaic.data.sources import sources

        return [
            {"data set": s.name, "what": s.title, "counts": " / ".join(f"{c:,}" for c in s.counts or ())}
            for s in sources()
        ]
    if kind == "metrics":
        from fedmosaic.evaluation.metrics import CUTS, METRICS

        return [{"metric": name, "what": m.title, "cuts": ", ".join(map(str, CUTS))} for name, m in METRICS.items()]
    if kind == "engines":
        from fedmosaic.engines.choice import ENGINES

        return [{"engine": name} for name in ("auto", *ENGINES)]
    if kind == "cards":
        from fedmosaic.reproduce.shelf import CARDS

        return [{"card": c.name, "what": c.title, "paper": c.paper} for c in CARDS.values()]
    if kind == "presets":
        from fedmosaic.runs.settings import presets

        return [{"preset": n, "found by": t.splitlines()[0].removeprefix("# found by: ")} for n, t in presets().items()]
    raise UnknownNameError("catalogue", kind, ["methods", "data", "metrics", "engines", "cards", "presets", "runs"])
