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

from fedmosaic.cli import answers, deploy, evidence, questions
from fedmosaic.cli.options import OWN_FILES, DataDir, Imports, Json, Quiet, interruptible, note_licence, told_reading
from fedmosaic.core.errors import FedmosaicError, RequestError, SettingsError
from fedmosaic.report.console import print_table, progress_bar, show_summary

app = typer.Typer(
    help="Federated recommendation: histories stay on devices, every user gets their own list.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(questions.app)
app.add_typer(answers.app)
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


@app.command(epilog=OWN_FILES)
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
    from fedmosaic.runs.settings import parse_pairs
    from fedmosaic.runs.trackers import Live, name_of

    words = [w for w in (method, dataset) if w is not None]
    plain = [w for w in words if "=" not in w]
    given = parse_pairs([w for w in words if "=" in w] + list(pairs or []))
    for key, value in {"rounds": rounds, "seed": seed, "pool": pool, "engine": engine}.items():
        if value is not None:
            if key in given:
                raise SettingsError(f"{key} is given both as an option and as key=value")
            given[key] = value
    settings = _settings_of(plain, given, config)
    note_licence(settings.dataset, data_dir)
    settings = told_reading(settings)
    place = out or runs.default_place(settings)
    buffers.keep_freed()
    live = Live(track, Path("tracked"), name_of(place, settings), settings)
    title = f"{settings.method} on {settings.dataset}"
    with interruptible(place), progress_bar(title, quiet) as bar, live:

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
    if not as_json:
        print(f"next: fedmosaic recommend {place} --user ID", file=sys.stderr)


def _settings_of(words: list[str], given: dict[str, Any], config: Path | None) -> Any:
    """Of a method and a data set, or of a file over which both and what is given win."""
    from fedmosaic.runs.settings import Settings, read_config

    if config is not None:
        base = read_config(config)
        merged = base.model_dump(exclude={"method", "dataset"}) | given
        return Settings.make((words or [base.method])[0], (words[1:] or [base.dataset])[0], merged)
    if len(words) != 2:
        raise SettingsError("say which METHOD and DATASET to run, for example: fedmosaic run ease ml-100k")
    return Settings.make(words[0], words[1], given)


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
    with interruptible(place), progress_bar(f"resume {place}", quiet) as progress:
        summary = runs.resume(place, data_dir=data_dir, on_round=progress)
    show_summary(summary, as_json)


@app.command()
def show(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder that holds some.")],
    as_json: Json = False,
) -> None:
    """Print the results of finished runs again; of a folder of runs, a table of all of them."""
    from fedmosaic.runs.run_folder import RunFolder, folders_in

    if len(places) == 1 and not (places[0] / "config.toml").is_file() and (found := folders_in(places[0])):
        questions.show_runs(found, as_json)
        return
    summaries = [RunFolder.open(p).summary() for p in places]
    if as_json:
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries))
        return
    for summary in summaries:
        show_summary(summary, False)


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
