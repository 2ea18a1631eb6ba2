"""Verbs for devices: deploy init, invite, admit, revoke, renew, server, device, silo, status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import time as unix_time
from typing import Annotated, Any

import typer

from fedmosaic.cli.options import Imports, Json, Quiet
from fedmosaic.core.errors import DataError, SettingsError

YEAR = 365.0 * 86_400  # seconds

app = typer.Typer(help="Real devices: prepare folders, run a server, be a device or a silo.", no_args_is_help=True)


@app.callback()
def needs() -> None:
    """Refuse early and clearly where the extra is not installed."""
    if find_spec("flwr") is None or find_spec("cryptography") is None:
        raise SettingsError("deployment needs Flower: pip install 'fedmosaic[flower]'")


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder `deploy init` wrote for it.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where the folders are written.")],
    method: Annotated[str, typer.Option(help="A method of `fedmosaic list methods`.")],
    items: Annotated[Path, typer.Option(help="The catalogue: CSV or Parquet with columns item and (maybe) title.")],
    devices: Annotated[int, typer.Option(min=0, help="Devices of one user each.")] = 0,
    silos: Annotated[list[str] | None, typer.Option(help="NAME=USERS: a node with many users; repeat.")] = None,
    address: Annotated[str, typer.Option(help="host:port that nodes dial.")] = "127.0.0.1:9443",
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value of method or agreement.")] = None,
    imports: Imports = None,
) -> None:
    """Write ready folders: the server's with its certificates, and one for each node, which makes its own keys."""
    from fedmosaic.deploy import fleet
    from fedmosaic.deploy.agreement import Agreement, catalogue_digest
    from fedmosaic.methods.base import validated
    from fedmosaic.methods.registry import entry
    from fedmosaic.runs.settings import parse_pairs

    given = parse_pairs(settings or [])
    own = {
        k: v
        for k, v in given.items()
        if k in Agreement.model_fields and k not in ("method", "method_settings", "items")
    }
    if "span" in entry(method).settings.model_fields:  # no place holds all times: what is recent is agreed on
        given = {"now": float(int(unix_time())), "span": YEAR, **given}
    chosen = validated(entry(method).settings, {k: v for k, v in given.items() if k not in own}, f"method {method}")
    kept = {k: v for k, v in chosen.model_dump().items() if k in given and v is not None}
    catalogue = _table(items)
    if "item" not in catalogue.columns:
        raise DataError(f"needs a column item; has {', '.join(catalogue.columns)}", source=items)
    if catalogue["item"].is_duplicated().any():
        raise DataError("holds items twice", source=items)
    agreed = {**own, "method": method, "method_settings": kept, "items": catalogue_digest(catalogue)}
    nodes = {f"device-{n}": 1 for n in range(devices)} | dict(_silo(word) for word in silos or [])
    agreement = validated(Agreement, agreed, "the agreement")
    place = fleet.init(folder, agreement, catalogue, nodes, fleet.Link(address))
    print(f"{place}: start with `fedmosaic deploy server {place}`")
    for name, users in nodes.items():
        _tell_owner(folder, name, users)


def _tell_owner(folder: Path, name: str, users: int) -> None:
    kind = f"device {folder / name} --history FILE" if users == 1 else f"silo {folder / name} --data FILE"
    print(f"{folder / name}: carry it to its owner; there: `fedmosaic deploy {kind}`, which makes its keys")
    print(f"{' ' * len(str(folder / name))}  then here: `fedmosaic deploy admit {folder} request.json`")


Fleet = Annotated[Path, typer.Argument(metavar="FLEET", help="The folder of `deploy init`.")]


@app.command()
def invite(
    folder: Fleet,
    name: Annotated[str, typer.Argument(help="Name of the new node.")],
    users: Annotated[int, typer.Option(min=1, help="Users it holds.")] = 1,
) -> None:
    """A folder for one more node, to be carried to its owner."""
    from fedmosaic.deploy import fleet

    fleet.invite(folder, {name: users})
    _tell_owner(folder, name, users)


@app.command()
def admit(
    folder: Fleet,
    requests: Annotated[list[Path], typer.Argument(metavar="REQUEST...", help="request.json of nodes.")],
) -> None:
    """Let nodes in whose owners brought their requests; a server that runs does so at once."""
    from fedmosaic.deploy import fleet
    from fedmosaic.deploy.admission import Request

    brought = [Request.read(path) for path in requests]
    fleet.admit(folder, brought)
    for request in brought:
        print(f"{request.node} is admitted (keys of generation {request.generation})")


@app.command()
def revoke(folder: Fleet, name: Annotated[str, typer.Argument(help="Name of the node.")]) -> None:
    """Put a node out; a server that runs does so at once. `admit` lets it in again."""
    from fedmosaic.deploy import fleet

    fleet.revoke(folder, name)
    print(f"{name} is out")


@app.command()
def renew(place: Folder) -> None:
    """New keys of a node, or a new certificate of the server by the same authority."""
    from fedmosaic.core.files import locked
    from fedmosaic.deploy import admission, fleet
    from fedmosaic.deploy.roster import ROSTER

    with locked(place, "program"):
        if (place / ROSTER).is_file():
            fleet.renew_certificate(place)
            print("a new certificate; nodes need nothing new")
            return
        request = admission.renewed(place)
    print(f"keys of generation {request.generation}; bring {place / admission.REQUEST} to the operator")


@app.command()
def keys(place: Folder) -> None:
    """Make a node's keys and its request before its first start."""
    from fedmosaic.deploy import admission

    print(f"{admission.asked(place).node}: bring {place / admission.REQUEST} to the operator")


@app.command()
def server(
    place: Folder,
    seconds: Annotated[float, typer.Option("--serve", min=0, help="Seconds to serve newcomers after training.")] = 0.0,
    listen: Annotated[str | None, typer.Option(help="host:port of the gate here (default: the agreed one).")] = None,
    watch: Annotated[bool, typer.Option(help="A live table of rounds and nodes.")] = False,
    metrics: Annotated[int | None, typer.Option(metavar="PORT", help="Figures for Prometheus, on loopback.")] = None,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Hold the rounds that are left, behind the gate; a server that was killed goes on where it was."""
    from fedmosaic.deploy.serve import Serving, serve
    from fedmosaic.deploy.status import costs
    from fedmosaic.report.console import print_table

    lines: list[dict[str, Any]] = []

    def tell(line: dict[str, Any]) -> None:
        lines.append(line)
        if not quiet and not watch:
            refused = f", {line['refused']} refused" if line["refused"] else ""
            who = f"round {line['round']}: {line['clients']} clients of {line['nodes']} nodes"
            print(f"{who}, {line['seconds']:.1f} s{refused}", file=sys.stderr, flush=True)

    serve(place, Serving(seconds, listen, metrics, watch), tell=tell, say=_sayer(quiet))
    if as_json:
        print(json.dumps(lines))
    elif lines:
        print_table("rounds", ["what", "value"], [[k, f"{v:,.2f}"] for k, v in costs(lines).items()])


@app.command()
def device(
    place: Folder,
    history: Annotated[Path | None, typer.Option(help="CSV or Parquet with a column item; kept here.")] = None,
    item: Annotated[str, typer.Option(help="Name of the item column.")] = "item",
    time: Annotated[str, typer.Option(help="Name of the time column, where there is one.")] = "time",
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Be one user's device: train with the others when asked. Interactions stay in the folder."""
    _attend(place, history, (None, item, time), quiet)


@app.command()
def silo(
    place: Folder,
    data: Annotated[Path | None, typer.Option(help="CSV or Parquet with columns user and item; kept here.")] = None,
    user: Annotated[str, typer.Option(help="Name of the user column.")] = "user",
    item: Annotated[str, typer.Option(help="Name of the item column.")] = "item",
    time: Annotated[str, typer.Option(help="Name of the time column, where there is one.")] = "time",
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Be a silo: many users on one node, who send one sum."""
    _attend(place, data, (user, item, time), quiet)


@app.command()
def status(place: Folder, as_json: Json = False) -> None:
    """How far a server has come, and what it refused; or what a node holds."""
    from fedmosaic.deploy.status import status_of
    from fedmosaic.report.console import plain, print_table

    found = status_of(place)
    if as_json:
        print(json.dumps(found))
        return
    print_table(str(place), ["what", "value"], [[k, plain(v)] for k, v in found.items()])


def _attend(place: Path, table: Path | None, columns: tuple[str | None, str, str], quiet: bool) -> None:
    from fedmosaic.deploy.attend import attend
    from fedmosaic.deploy.history import take_history

    if table is not None:
        take_history(place, _table(table), *columns)
    attend(place, say=_sayer(quiet))


def _sayer(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else print(text, file=sys.stderr, flush=True)


def _silo(word: str) -> tuple[str, int]:
    name, sign, users = word.partition("=")
    if not sign or not users.isdigit():
        raise SettingsError(f"a silo is NAME=USERS, got {word!r}")
    return name, int(users)


def _table(path: Path) -> Any:
    import polars as pl

    from fedmosaic.data.text import TextFormat, read_table

    if path.suffix == ".parquet":
        try:
            return pl.read_parquet(path)
        except (FileNotFoundError, pl.exceptions.PolarsError) as error:
            raise DataError(str(error), source=path) from None
    return read_table(path, TextFormat.of(path)).frame
