"""Verbs for devices: deploy init, admit, server, device, silo, gate, status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmosaic.cli.options import Imports, Json, Quiet
from fedmosaic.core.errors import DataError, SettingsError

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
    """Write ready folders: the server's with its certificates, and one for each node with its key."""
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
        kind = f"device {folder / name} --history FILE" if users == 1 else f"silo {folder / name} --data FILE"
        print(f"{folder / name}: carry it to its owner; there: `fedmosaic deploy {kind}`")


@app.command()
def admit(
    folder: Annotated[Path, typer.Argument(help="The folder of `deploy init`.")],
    name: Annotated[str, typer.Argument(help="Name of the new node.")],
    users: Annotated[int, typer.Option(min=1, help="Users it holds.")] = 1,
) -> None:
    """A folder for one more node; the server lets it in when it starts next."""
    from fedmosaic.deploy import fleet

    print(fleet.admit(folder, name, users))


@app.command()
def server(
    place: Folder,
    seconds: Annotated[float, typer.Option("--serve", min=0, help="Seconds to serve newcomers after training.")] = 0.0,
    listen: Annotated[str | None, typer.Option(help="host:port of the gate here (default: the agreed one).")] = None,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Hold the rounds that are left, behind the gate; a server that was killed goes on where it was."""
    from fedmosaic.deploy.serve import serve
    from fedmosaic.deploy.status import costs
    from fedmosaic.report.console import print_table

    lines: list[dict[str, Any]] = []

    def tell(line: dict[str, Any]) -> None:
        lines.append(line)
        if not quiet:
            refused = f", {line['refused']} refused" if line["refused"] else ""
            who = f"round {line['round']}: {line['clients']} clients of {line['nodes']} nodes"
            print(f"{who}, {line['seconds']:.1f} s{refused}", file=sys.stderr, flush=True)

    serve(place, seconds=seconds, listen=listen, tell=tell, say=_sayer(quiet))
    if as_json:
        print(json.dumps(lines))
    elif lines:
        print_table("rounds", ["what", "value"], [[k, f"{v:,.2f}"] for k, v in costs(lines).items()])


@app.command()
def device(
    place: Folder,
    history: Annotated[Path | None, typer.Option(help="CSV or Parquet with a column item; kept here.")] = None,
    item: Annotated[str, typer.Option(help="Name of the item column.")] = "item",
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Be one user's device: train with the others when asked. Interactions stay in the folder."""
    _attend(place, history, None, item, quiet)


@app.command()
def silo(
    place: Folder,
    data: Annotated[Path | None, typer.Option(help="CSV or Parquet with columns user and item; kept here.")] = None,
    user: Annotated[str, typer.Option(help="Name of the user column.")] = "user",
    item: Annotated[str, typer.Option(help="Name of the item column.")] = "item",
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Be a silo: many users on one node, who send one sum."""
    _attend(place, data, user, item, quiet)


@app.command()
def gate(
    place: Folder,
    server: Annotated[str, typer.Option(help="host:port of the server on this side.")],
    listen: Annotated[str | None, typer.Option(help="host:port for nodes (default: as agreed).")] = None,
) -> None:
    """The door for nodes: TLS, and only what nodes need goes through."""
    from fedmosaic.deploy.fleet import Link
    from fedmosaic.deploy.gate import run_gate
    from fedmosaic.deploy.processes import check_port

    link = Link(listen) if listen else Link.read(place)
    check_port(link.host, int(link.port))
    run_gate(place, link.host, int(link.port), f"https://{server}")


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


def _attend(place: Path, table: Path | None, user: str | None, item: str, quiet: bool) -> None:
    from fedmosaic.deploy.node import Node
    from fedmosaic.deploy.serve import attend

    if table is not None:
        Node.take_history(place, _table(table), user=user, item=item)
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
