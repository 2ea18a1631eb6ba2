"""Verbs for evidence: compare, tune, reproduce, report."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedmosaic.cli.options import DataDir, Imports, Json, Quiet, Workers, note_licence, told_reading
from fedmosaic.core.errors import FedmosaicError, RunError, SettingsError, UnknownNameError

app = typer.Typer()
WRITTEN = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".txt": "text", ".json": "json"}
POOLS = {"strict": ["strict"], "legacy": ["legacy"], "isolated": ["isolated"], "both": ["legacy", "strict"]}


@app.command()
def compare(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="M, M:key=value,... or M@FILE (or preset).")
    ],
    data: Annotated[str, typer.Option("--data", help="A data set or a file.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, ...")] = 3,
    pool: Annotated[str, typer.Option(help="strict, legacy, isolated, or both (legacy and strict).")] = "strict",
    baseline: Annotated[str, typer.Option(help="Row the others are tested against.")] = "popularity",
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value for all that know the key.")] = None,
    form: Annotated[str, typer.Option("--format", help="text, markdown, csv or latex.")] = "text",
    without: Annotated[
        list[str] | None, typer.Option(help="A reference to leave out: local-only or popularity; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the table there: .md, .csv, .tex, .txt or .json.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs"),
    workers: Workers = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Methods side by side: seeds, intervals, paired tests, costs; what is done already is not run again."""
    from fedmosaic.core.files import write_atomic
    from fedmosaic.report.progress import study_progress
    from fedmosaic.report.tables import FORMATS, comparison_table
    from fedmosaic.runs.comparison import compare as gather
    from fedmosaic.runs.comparison import contenders, plan
    from fedmosaic.runs.settings import parse_pairs
    from fedmosaic.runs.study import run_study

    if form not in FORMATS:
        raise UnknownNameError("table format", form, FORMATS)
    if out is not None and out.suffix not in WRITTEN:
        raise UnknownNameError("ending of a table's file", out.suffix, WRITTEN)
    if pool not in POOLS:
        raise UnknownNameError("pool", pool, POOLS)
    common = parse_pairs(settings or [])
    if baseline in (without or []):
        raise SettingsError(f"{baseline} is what the others are tested against; name another --baseline")
    planned = plan(contenders(methods, without or []), data, POOLS[pool], range(seeds), common, baseline)
    note_licence(data, data_dir)
    shared = told_reading(planned[0][1])
    if shared.is_file:
        planned = [(one, settings.resolved()[0]) for one, settings in planned]
    shared.split_data(shared.load_data(data_dir))  # data that is unknown or unfit is refused once, not by every run
    with study_progress(quiet) as tell:
        progress = run_study([s for _, s in planned], runs, workers=workers, data_dir=data_dir, tell=tell)
    failures = [f"{cell.title} failed: {reason}" for cell, reason in progress.failed]
    if len(failures) == progress.total:
        raise RunError("; ".join(failures))
    found = gather(planned, runs, baseline)
    told = json.dumps({**vars(found), "rows": [r.plain() for r in found.rows]})
    if out is not None:
        written = told if out.suffix == ".json" else comparison_table(found).render(WRITTEN[out.suffix])
        write_atomic(out, written.rstrip("\n") + "\n")
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        print(told)
    elif form == "text":
        comparison_table(found).show()
    else:
        print(comparison_table(found).render(form))
    if failures:
        raise RunError("; ".join(failures))


@app.command()
def audit(
    method: Annotated[str, typer.Argument(help="A method (`fedmosaic list methods`).")],
    data: Annotated[str, typer.Argument(metavar="DATASET", help="A data set or a file.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as of run.")] = None,
    rounds: Annotated[str, typer.Option(help="Rounds whose single uploads are looked at.")] = "1,10,30",
    poison: Annotated[bool, typer.Option("--poisoning/--no-poisoning", help="Clients that lie, too.")] = True,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page (HTML) there, too.")] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack a method: what a curious server reads off single uploads, what malicious clients do to lists."""
    from fedmosaic.audit.audit import audited
    from fedmosaic.report.audit_page import write_audit_page
    from fedmosaic.report.tables import audit_tables
    from fedmosaic.runs.settings import Settings, parse_pairs

    numbers = [int(word) for word in rounds.split(",") if word.strip().isdigit() and int(word) > 0]
    if len(numbers) != len(rounds.split(",")):
        raise SettingsError(f"--rounds are numbers from 1 on, with commas between them; got {rounds!r}")
    chosen = Settings.make(method, data, parse_pairs(settings or []))
    note_licence(data, data_dir)
    built, split = chosen.build(), chosen.split_data(chosen.load_data(data_dir))
    built.check_installed()
    tell = (lambda words: None) if quiet else lambda words: print(words, file=sys.stderr, flush=True)
    found = audited(built, split, rounds=numbers, poison=poison, seed=chosen.seed, say=tell)
    if out is not None:
        words = " ".join(["fedmosaic audit", method, data, *(settings or []), f"--rounds {rounds}"])
        print(f"wrote {write_audit_page(f'{method} on {data}', words, found, out)}", file=sys.stderr)
    if as_json:
        print(json.dumps(found.plain()))
        return
    for table in audit_tables(f"{method} on {data}", found):
        table.show()


@app.command()
def reproduce(
    card: Annotated[str, typer.Argument(help="A card (`fedmosaic list cards`), or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small data sets, few rounds, one seed: minutes.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of a row at most; slow rows have fewer.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write Markdown there, figures beside it.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs"),
    ledger: Annotated[
        Path | None,
        typer.Option(help="File of records: what stands there is not run again, what is finished is added."),
    ] = None,
    gather: Annotated[bool, typer.Option("--gather", help="Run nothing: write down what is finished.")] = False,
    workers: Workers = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Published tables and figures, run again: the paper's numbers, ours under its pool and under the strict one."""
    from fedmosaic.report.progress import study_progress
    from fedmosaic.reproduce import results_page as book
    from fedmosaic.reproduce.card import Results, card_table, find
    from fedmosaic.reproduce.shelf import CARDS
    from fedmosaic.runs.ledger import Ledger

    cards = find(card, CARDS)
    results = Results(runs, 1 if quick else seeds, quick, data_dir, Ledger.read(ledger))
    failed = []
    if not gather:
        for name in dict.fromkeys(name for one in cards for name in one.data(quick)):
            try:
                note_licence(name, data_dir)
            except FedmosaicError as error:  # its runs will fail and be named; the others go on
                print(f"note: {error}", file=sys.stderr)
        with study_progress(quiet) as tell:
            failed = book.run_cards(cards, results, workers=workers, tell=tell).failed
    if out is not None:
        words = ["fedmosaic reproduce", card, *(["--quick"] if quick else [f"--seeds {seeds}"])]
        words += [*(["--gather"] if gather else []), *([] if ledger is None else [f"--ledger {ledger}"]), f"-o {out}"]
        book.write_book(cards, results, out, " ".join(words))
    if as_json:
        print(json.dumps(book.as_json(cards, results)))
    else:
        for one in cards:
            card_table(one, results).show()
            print(one.text)
        if out is not None:
            print(f"written: {out}", file=sys.stderr)
    if failed:
        raise RunError("; ".join(f"{cell.title} failed: {reason}" for cell, reason in failed))


@app.command()
def report(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    users: Annotated[int, typer.Option(min=1, help="How many users can be looked at.")] = 40,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """One self-contained page: summary, tables, curves, figures, costs, and lists of single users with titles."""
    from fedmosaic.report.page import write_page

    tell = None if quiet else lambda text: print(text, file=sys.stderr)
    place = write_page(places, out, users=users, tell=tell)
    print(f"{place} ({place.stat().st_size / 1e6:.1f} MB)")


@app.command()
def tune(
    method: Annotated[str, typer.Argument(help="A method.")],
    dataset: Annotated[str, typer.Argument(help="A data set or a file.")],
    pairs: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.", metavar="KEY=VALUE...")] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many settings are tried; the budget of every method.")] = 20,
    space: Annotated[list[str] | None, typer.Option(help="key=low:high or key=a,b,c; may be repeated.")] = None,
    file: Annotated[Path, typer.Option(help="Where trials are kept; equal searches continue.")] = Path("runs/tune.log"),
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Settings file (default: tuned/...toml).")] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for a method's settings on validation; the file it writes is for `fedmosaic run --config`."""
    from fedmosaic.report.console import progress_bar
    from fedmosaic.runs.settings import Settings, parse_pairs
    from fedmosaic.runs.tune import Search, at_edges, default_space, parse_space, write_preset
    from fedmosaic.runs.tune import tune as search_for

    given = parse_pairs(pairs or [])
    settings = Settings.make(method, dataset, given)
    chosen = parse_space(space, method) if space else default_space(method)
    if twice := [key for key in chosen if space and key in given]:
        raise SettingsError(f"{twice[0]} is given a value and a --space; choose one")
    search = Search(settings, trials, {k: v for k, v in chosen.items() if k not in given})
    note_licence(dataset, data_dir)
    with progress_bar(f"tune {method} on {dataset}", quiet) as progress:
        tell = None
        if progress is not None:

            def tell(done: int, total: int, best: float) -> None:
                progress(done, total, {"unit": "trial", "note": f"best validation {settings.selection} {best:.4f}"})

        found = search_for(search, file, data_dir, tell)
    name = f"{method}-{Path(dataset).name.split('.')[0]}-{settings.pool}"
    place = out or Path("tuned") / f"{name}.toml"
    words = ["fedmosaic", "tune", method, dataset, *(pairs or []), "--trials", str(trials)]
    write_preset(found, place, shlex.join([*words, *(w for s in space or [] for w in ("--space", s))]))
    if as_json:
        result = {"settings": found.settings.method_settings, "value": found.value, "trials": found.trials}
        print(json.dumps({**result, "pruned": found.pruned, "file": str(place)}))
        return
    print(
        f"best validation {settings.selection} of {found.trials} trials ({found.pruned} cut short): {found.value:.4f}"
    )
    best = found.settings.method_settings
    print("  ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in best.items()))
    for key, (low, high) in at_edges(search.space, best).items():
        print(f"note: {key}={best[key]:.6g} lies at an end of what was searched, {low:.6g} to {high:.6g}; give --space")
    print(f"run it: fedmosaic run --config {place}")


@app.command("ledger")
def modernise_ledger(
    file: Annotated[Path, typer.Argument(metavar="LEDGER", help="A file of records (docs/ledger.jsonl).")],
    write: Annotated[bool, typer.Option("--write", help="Write the file; else only say what would change.")] = False,
    as_json: Json = False,
) -> None:
    """Map the records of a ledger to the settings' names of today, and say which changed."""
    from fedmosaic.runs.ledger import modernise

    changed = modernise(file, write=write)
    if as_json:
        print(json.dumps(changed))
        return
    for row in changed["records"]:
        print(f"{row['method']} {row['dataset']}: {row['change']}")
    verb = "changed" if write else "would change"
    print(f"{changed['renamed']} of {changed['total']} records {verb} names, {changed['rekeyed']} a key")


@app.command()
def track(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    to: Annotated[str, typer.Option(help="tensorboard or wandb (offline).")] = "tensorboard",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the tracker's files.")] = Path("tracked"),
) -> None:
    """Export runs' records to TensorBoard or Weights & Biases."""
    from fedmosaic.runs.trackers import export

    for place in places:
        print(f"{place}: {export(place, to, out)} rounds -> {out}")
