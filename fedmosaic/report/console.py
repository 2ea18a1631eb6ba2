"""Tables and progress on a terminal; plain text elsewhere. Results to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Any]:
    """A bar on a terminal, a line per tenth of the work elsewhere."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _plain_progress
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console(stderr=True)) as bar:
            task = bar.add_task(title, total=None, note="")

            def update(number: int, total: int, line: dict[str, Any]) -> None:
                bar.update(task, completed=number, total=total, note=_note(line))

            yield update


def _plain_progress(number: int, total: int, line: dict[str, Any]) -> None:
    if number % max(1, total // 10) == 0 or number == total:
        print(f"{line.get('unit', 'round')} {number}/{total} {_note(line)}", file=sys.stderr, flush=True)


def _note(line: dict[str, Any]) -> str:
    if "note" in line:
        return str(line["note"])
    parts = [f"loss {line['loss']:.4f}"] if line.get("loss") is not None else []
    if "validation" in line:
        found = line["validation"]
        protocol = "full" if "full" in found else "sampled"
        metric = next((m for m in found[protocol] if m not in ("hr@10", "ndcg@10")), "hr@10")  # one that was asked for
        parts.append(f"validation {protocol} {metric.upper()} {100 * found[protocol][metric]:.2f}")
    return " ".join(parts)


def show_summary(summary: dict[str, Any], as_json: bool) -> None:
    """The result as a table with its references, or as one JSON object."""
    if as_json:
        print(json.dumps(summary))
        return
    rows = {**summary["reference"], summary["method"]: summary["test"]}
    print_results(f"{summary['method']} on {summary['dataset']}, test", list(rows.items()), summary["candidates"])
    out = console()
    cost, low, high = summary["cost"], summary["interval"]["full"]["low"], summary["interval"]["full"]["high"]
    out.print(f"protocol: {summary['protocol']}", markup=False)
    out.print(
        f"round {summary['best_round']} of {summary['rounds']}; full HR@10 95 % interval "
        f"{100 * low:.2f} to {100 * high:.2f} over {summary['counts']['evaluated']:,} users"
    )
    out.print(
        f"cost: {cost['seconds']:.2f} s, {cost['cpu_seconds']:.2f} CPU s, peak {cost['peak_mb']:.0f} MB; "
        f"per client and round {cost['bytes_up']:,} bytes up, {cost['bytes_down']:,} down"
    )
    if below := below_popularity(summary):
        out.print(below, markup=False)
    if "privacy" in summary:
        out.print(f"privacy: {summary['privacy']}", markup=False)
    out.print(f"run folder: {summary['run']}", markup=False)


def below_popularity(summary: dict[str, Any]) -> str | None:
    """What to say of a run whose lists are worse than one list for everybody, in the ranking of everything.

    >>> rows = {"test": {"full": {"hr@10": 0.042}}, "reference": {"popularity": {"full": {"hr@10": 0.048}}}}
    >>> print(below_popularity({"method": "fedmf", **rows}))
    below popularity: full HR@10 4.20 against 4.80; its lists are worse than the most popular items for everybody ...
    """
    own, popular = (r["full"]["hr@10"] for r in (summary["test"], summary["reference"]["popularity"]))
    if summary["method"] == "popularity" or own >= popular:
        return None
    return (
        f"below popularity: full HR@10 {100 * own:.2f} against {100 * popular:.2f}; its lists are worse than the most "
        f"popular items for everybody (fedmosaic recommend-method DATA says what suits the data)"
    )


def print_results(title: str, rows: list[tuple[str, dict[str, Any]]], candidates: int = 99) -> None:
    """Rows of (name, {"full": ..., "sampled": ...}) in percent."""
    cells = [
        [name, *(f"{100 * result[p][m]:.2f}" for p in ("full", "sampled") for m in ("hr@10", "ndcg@10"))]
        for name, result in rows
    ]
    print_table(
        title, ["method", "full HR@10", "full NDCG@10", f"1+{candidates} HR@10", f"1+{candidates} NDCG@10"], cells
    )


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """One table on stdout."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for at, name in enumerate(header):
        side: Any = "right" if "@" in name or name in {"rank", "score"} else "left"
        table.add_column(Text(name), justify=side, overflow="fold", no_wrap=at == 0)
    for row in rows:
        table.add_row(*map(Text, row))  # ids and titles are text, whatever they look like
    console().print(table)


def console(stderr: bool = False) -> Any:
    """A rich console; wide when the output is not a terminal, so that nothing is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 200)


def list_row(row: dict[str, Any]) -> list[str]:
    """A recommendation as table cells."""
    return [str(row["rank"]), str(row["item"]), str(row.get("title") or ""), f"{row['score']:.4f}"]


def plain(value: Any) -> str:
    """A count or flag as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}" if value == float(f"{value:g}") else f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:,}" for k, v in value.items()) or "none"
    return str(value)
