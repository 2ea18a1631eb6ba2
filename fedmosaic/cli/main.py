"""The command: thin verbs over the library. Results go to stdout, progress and notes to stderr.

Exit codes: 0 done, 1 the work failed, 2 the request was wrong.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmosaic.cli import deploy, evidence
from fedmosaic.cli.options import DataDir, Imports, Json, Quiet, note_licence
from fedmosaic.core.errors import FedmosaicError, RequestError, SettingsError
from fedmosaic.report.console import console, list_row, plain, print_table, progress_bar, show_summary

app = typer.Typer(
    help="Federated recommendation: histories stay on devices, every user gets their own list.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Data sets: list, fetch, describe.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(evidence.app)
app.add_typer(deploy.app, name="deploy")


def main() -> None:
    """Entry point: library errors become one line and an exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is ended too
        signal.signal(number, lambda *_: sys.exit(143))
    warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
    try:
        app()
    except FedmosaicError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, RequestError) else 1)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != 130:  # which is what Typer makes of Ctrl-C, in silence
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has gone, as in `fedmosaic ... | head`
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"fedmosaic {version('fedmosaic')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options before the verb."""


@app.command()
def run(
    method: Annotated[str | None, typer.Argument(help="A method of `fedmosaic list methods`.")] = None,
    dataset: Annotated[str | None, typer.Argument(help="A data set of `fedmosaic list data`, or a file.")] = None,
    pairs: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.", metavar="KEY=VALUE...")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    seed: Annotated[int | None, typer.Option(help="One integer; everything random follows from it.")] = None,
    pool: Annotated[str | None, typer.Option(help="Negative pool: strict, legacy or isolated.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, fused, simulate or loop.")] = None,
    config: Annotated[Path | None, typer.Option(help="A settings file or preset; the line wins over it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/..., named by the settings).")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the clients.")] = 1,
    rank: Annotated[int, typer.Option(help="Which of them this is, with --rendezvous.")] = 0,
    rendezvous: Annotated[str | None, typer.Option(help="Where ranks meet: tcp://host:port (else: all here).")] = None,
    trusted: Annotated[bool, typer.Option("--trusted-network", help="Allow an address beyond this machine.")] = False,
    track: Annotated[str | None, typer.Option(help="Send every round to tensorboard or wandb (offline).")] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a method on a data set, select on validation, report the test."""
    if method is not None and "=" not in method:
        from fedmosaic.methods.registry import check_name

        check_name(method)  # before anything heavy is imported
    from fedmosaic.core import buffers
    from fedmosaic.runs import run as runs
    from fedmosaic.runs.multiprocess import run_together
    from fedmosaic.runs.settings import Settings, parse_pairs, read_config
    from fedmosaic.runs.trackers import Live, name_of

    words = [w for w in (method, dataset) if w is not None]
    plain = [w for w in words if "=" not in w]
    given = parse_pairs([w for w in words if "=" in w] + list(pairs or []))
    for key, value in {"rounds": rounds, "seed": seed, "pool": pool, "engine": engine}.items():
        if value is not None:
            if key in given:
                raise SettingsError(f"{key} is given both as an option and as key=value")
            given[key] = value
    if config is not None:
        base = read_config(config)
        merged = base.model_dump(exclude={"method", "dataset"}) | given
        settings = Settings.make((plain or [base.method])[0], (plain[1:] or [base.dataset])[0], merged)
    elif len(plain) == 2:
        settings = Settings.make(plain[0], plain[1], given)
    else:
        raise SettingsError("say which METHOD and DATASET to run, for example: fedmosaic run ease ml-100k")
    place = out or runs.default_place(settings)
    note_licence(settings.dataset, data_dir)
    buffers.keep_freed()
    live = Live(track, Path("tracked"), name_of(place, settings), settings)
    with progress_bar(f"{settings.method} on {settings.dataset}", quiet) as bar, live:

        def progress(round: int, rounds: int, line: dict[str, Any]) -> None:
            if bar is not None:
                bar(round, rounds, line)
            live.record(line)

        if workers > 1 or rendezvous is not None:
            shared = run_together(
                settings, place, workers, rank=rank, rendezvous=rendezvous, trusted=trusted, data_dir=data_dir,
                on_round=progress,
            )  # fmt: skip
            if shared is None:
                return  # a rank that worked along has nothing to report
            summary = shared
        else:
            summary = runs.start(settings, place, data_dir=data_dir, on_round=progress)
        live.summary = summary
    show_summary(summary, as_json)


@app.command()
def resume(
    place: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue an interrupted run; it ends in the same bytes as if it had never stopped."""
    from fedmosaic.core import buffers
    from fedmosaic.runs import run as runs

    buffers.keep_freed()
    with progress_bar(f"resume {place}", quiet) as progress:
        summary = runs.resume(place, data_dir=data_dir, on_round=progress)
    show_summary(summary, as_json)


@app.command()
def show(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    as_json: Json = False,
) -> None:
    """Print the results of finished runs again."""
    from fedmosaic.runs.run_folder import RunFolder

    summaries = [RunFolder.open(p).summary() for p in places]
    if as_json:
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries))
        return
    for summary in summaries:
        show_summary(summary, False)


@app.command()
def recommend(
    place: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder or a saved model.")] = None,
    user: Annotated[list[str] | None, typer.Option(help="User id; may be repeated.")] = None,
    device: Annotated[Path | None, typer.Option(help="Folder of a device or silo: answers without a server.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Length of the list.")] = 10,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """The best unseen items of a user, by the user's own id, with titles where they are known."""
    from fedmosaic.runs.run_folder import RunFolder
    from fedmosaic.serving.recommender import FederatedRecommender

    if device is not None:
        from fedmosaic.deploy.node import Node

        model = Node(device).recommender()
    elif place is not None:
        saved = (place / "model.json").is_file()
        model = FederatedRecommender.load(place) if saved else RunFolder.open(place).recommender()
    else:
        raise SettingsError("say which RUN, or --device FOLDER")
    alone = device is not None and len(model.users_) == 1
    user = user or ([str(model.users_.ids[0])] if alone else [])
    if not user:
        raise SettingsError("say which --user")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lists = model.recommend(user, k)
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    if as_json:
        print(json.dumps(lists.to_dicts()))
        return
    for one in user:
        rows = lists.filter(lists["user"].cast(str) == one)
        print_table(f"user {one}", ["rank", "item", "title", "score"], [list_row(r) for r in rows.to_dicts()])


@app.command()
def landscape(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; compare those of one shape.")],
    radius: Annotated[float, typer.Option(help="How far the shared parameters are moved.")] = 1.0,
    points: Annotated[int, typer.Option(min=2, help="Grid points along each of the two directions.")] = 11,
    recipe: Annotated[str, typer.Option(help="zero-mean, filter, or paper (FedRecGEL's released way).")] = "zero-mean",
    seed: Annotated[int, typer.Option(help="Of examples and directions, the same for all runs.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the surfaces there, as JSON.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How the training loss rises around trained models: two-dimensional surfaces and scalar sharpness."""
    from fedmosaic.core.errors import UnknownNameError
    from fedmosaic.core.extras import require_torch

    require_torch("a loss landscape")
    from fedmosaic.reproduce.landscape import RECIPES, look
    from fedmosaic.runs.run_folder import RunFolder

    if recipe not in RECIPES:
        raise UnknownNameError("recipe", recipe, RECIPES)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for place in places:
        model = RunFolder.open(place).recommender()
        with progress_bar(f"landscape of {place.name}", quiet) as progress:
            seen = look(model.method_, model.training_, model.state_, radius, points, recipe, seed, progress)
        found.append({"run": str(place), **seen})
    if out is not None:
        out.write_text(json.dumps(found))
    if as_json:
        print(json.dumps(found))
        return
    keys = ["loss", "mean_rise", "worst_rise", "uphill_rise", "lowest", "highest"]
    head = ["run", *(key.replace("_", " ") for key in keys)]
    rows = [[one["run"], *(f"{one[k]:.6f}" for k in keys)] for one in found]
    print_table(f"training loss within {radius:g} of the shared parameters ({recipe} directions)", head, rows)


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="methods, data, metrics, engines, cards or presets")] = "methods",
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """What there is: methods, data sets, metrics, engines, cards, presets."""
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
    for dataset, (hr, ndcg) in found["expect"].items():
        out.print(f"expect on {dataset} (strict pool, 1 + 99, seed 0): HR@10 {hr}, NDCG@10 {ndcg}")


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
    list_("data", None, as_json)


@data_app.command("fetch")
def data_fetch(names: Annotated[list[str], typer.Argument(help="Data sets.")], data_dir: DataDir = None) -> None:
    """Bring data sets into the cache (or find them in the data folder)."""
    from fedmosaic.core.errors import SettingsError
    from fedmosaic.data.sources import Source, source

    for name in names:
        one = source(name)
        if not isinstance(one, Source):
            raise SettingsError(f"{name} is made, not fetched; there is nothing to bring")
        found = one.find(data_dir)
        print(f"{name}: {found.fetched or 'already here'} -> {found.folder}")
        if found.fetched:
            print(f"  licence: {one.licence}", file=sys.stderr)


@data_app.command("describe")
def data_describe(
    name: Annotated[str, typer.Argument(help="A data set or a file.")],
    pairs: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.", metavar="KEY=VALUE...")] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Counts, as papers print them."""
    from fedmosaic.runs.settings import Settings, parse_pairs

    note_licence(name, data_dir)
    counts = Settings.make("popularity", name, parse_pairs(pairs or [])).load_data(data_dir).describe()
    if as_json:
        print(json.dumps({"dataset": name, **counts}))
        return
    print_table(name, ["what", "count"], [[k, plain(v)] for k, v in counts.items()])


def _catalogue(kind: str) -> list[dict[str, Any]]:
    from fedmosaic.core.errors import UnknownNameError

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
        from fedmosaic.engines.engine import ENGINES

        return [{"engine": name} for name in ("auto", *ENGINES)]
    if kind == "cards":
        from fedmosaic.reproduce.shelf import CARDS

        return [{"card": c.name, "what": c.title, "paper": c.paper} for c in CARDS.values()]
    if kind == "presets":
        from fedmosaic.runs.settings import presets

        return [{"preset": n, "found by": t.splitlines()[0].removeprefix("# found by: ")} for n, t in presets().items()]
    raise UnknownNameError("catalogue", kind, ["methods", "data", "metrics", "engines", "cards", "presets"])
