"""Verbs that answer people: recommend, similar, explain, export, serve."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmosaic.cli.options import Imports, Json
from fedmosaic.core.errors import SettingsError
from fedmosaic.report.console import list_row, print_table

if TYPE_CHECKING:
    from fedmosaic.serving.recommender import FederatedRecommender

app = typer.Typer()
Trained = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a saved model.")]
K = Annotated[int, typer.Option("-k", min=1, help="Length of the list.")]


@app.command()
def recommend(
    place: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder or a saved model.")] = None,
    user: Annotated[list[str] | None, typer.Option(help="User id; may be repeated.")] = None,
    device: Annotated[Path | None, typer.Option(help="Folder of a device or silo: answers without a server.")] = None,
    k: K = 10,
    history: Annotated[
        list[str] | None, typer.Option(help="Item ids, earliest first, of somebody who was never trained on; repeated.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="An item that is left out; may be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="An item to choose from; may be repeated.")] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """The best unseen items of a user, by the user's own id, with titles where they are known."""
    if device is not None:
        from fedmosaic.deploy.node import Node

        node = Node(device)
        model = node.recommender()
        print(f"note: {node.provenance()}", file=sys.stderr)
    elif place is not None:
        model = trained(place)
    else:
        raise SettingsError("say which RUN, or --device FOLDER")
    alone = device is not None and len(model.users_) == 1
    users = user or ([str(model.users_.ids[0])] if alone and not history else [])
    if not users and not history:
        some = ", ".join(str(one) for one in model.users_.ids.head(3))
        raise SettingsError(f"say which --user, for example one of {some}; or --history ITEM")
    with told_warnings():
        lists = model.recommend(users or None, k, history=history, exclude=exclude, only=only)
    if as_json:
        print(json.dumps(lists.to_dicts()))
        return
    for one in users or ["guest"]:
        rows = lists.filter(lists["user"].cast(str) == one)
        print_table(f"user {one}", ["rank", "item", "title", "score"], [list_row(r) for r in rows.to_dicts()])


@app.command()
def similar(
    place: Trained,
    items: Annotated[list[str], typer.Argument(metavar="ITEM...", help="Item ids.")],
    k: K = 10,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Items that are alike in the model's own terms."""
    found = trained(place).similar_items(items, k)
    if as_json:
        print(json.dumps(found.to_dicts()))
        return
    for one in items:
        rows = found.filter(found["to"].cast(str) == one)
        print_table(f"like {one}", ["rank", "item", "title", "score"], [list_row(r) for r in rows.to_dicts()])


@app.command()
def explain(
    place: Trained,
    item: Annotated[str, typer.Argument(help="The item that was, or might be, recommended.")],
    user: Annotated[str | None, typer.Option(help="User id.")] = None,
    history: Annotated[list[str] | None, typer.Option(help="Item ids instead, earliest first; repeated.")] = None,
    k: K = 10,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Which items of a history speak for an item, and how much; for methods that score by them."""
    found = trained(place).explain(user, item, history=history)
    if as_json:
        print(json.dumps(found.to_dicts()))
        return
    rows = [[str(r["item"]), str(r.get("title") or ""), f"{r['share']:.4f}"] for r in found.head(k).to_dicts()]
    print_table(f"what speaks for {item}", ["item", "title", "share"], rows)


@app.command()
def export(
    place: Trained,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the bundle.")],
    page: Annotated[bool, typer.Option("--page/--no-page", help="With a page that answers in a browser.")] = True,
    as_json: Json = False,
) -> None:
    """A small folder that answers from a history without this library: arrays, a page of NumPy, a page of HTML."""
    from fedmosaic.runs.foresight import size
    from fedmosaic.serving.bundle import LARGE_PAGE
    from fedmosaic.serving.bundle import export as write

    written = write(trained(place), out, page=page)
    sizes = {file.name: file.stat().st_size for file in sorted(written.iterdir())}
    if as_json:
        print(json.dumps({"bundle": str(written), "bytes": sizes}))
        return
    for name, count in sizes.items():
        print(f"{written / name}: {size(count)}")
    if sizes.get("index.html", 0) > LARGE_PAGE:
        print("note: the page is large; a model with rank=64 (mosaic) makes a small one", file=sys.stderr)


@app.command()
def serve(
    place: Trained,
    host: Annotated[str, typer.Option(help="Address to answer at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to answer at.")] = 8000,
    beyond: Annotated[
        bool, typer.Option("--trusted-network", help="Allow an address beyond this machine (there is no TLS here).")
    ] = False,
    imports: Imports = None,
) -> None:
    """Answer over HTTP: /recommend, /recommend/batch, /similar, /health, /metrics, /openapi.json; keeps no history."""
    from fedmosaic.core.extras import require_extra

    require_extra("serving", "starlette", "Starlette", "serve")
    require_extra("serving", "uvicorn", "Uvicorn", "serve")
    if host not in ("127.0.0.1", "localhost", "::1") and not beyond:
        raise SettingsError(
            f"{host} is not this machine, and anybody there could ask; give --trusted-network, behind what has TLS"
        )
    for name in (
        "OPENBLAS",
        "OMP",
        "MKL",
    ):  # threads within a request would wait for others
        os.environ.setdefault(f"{name}_NUM_THREADS", "1")
    import uvicorn

    from fedmosaic.serving.http import app as answering

    model = trained(place)
    print(f"answering at http://{host}:{port} (Ctrl-C ends); try /health, /openapi.json", file=sys.stderr)
    uvicorn.run(answering(model), host=host, port=port, log_level="warning", access_log=False)


def trained(place: Path) -> FederatedRecommender:
    """A saved model, or that of a run; one that is not finished is said to be so."""
    from fedmosaic.core.errors import RunError
    from fedmosaic.runs.run_folder import RunFolder
    from fedmosaic.serving.recommender import FederatedRecommender

    if (place / "model.json").is_file():
        return FederatedRecommender.load(place)
    folder = RunFolder.open(place)
    if not folder.finished and not any((place / "checkpoint").glob("*.safetensors")):
        raise RunError(f"{place} is not finished and holds no state yet; fedmosaic resume {place} goes on")
    model = folder.recommender()
    if not folder.finished:
        print(
            f"note: {place} is not finished; this is its best state so far, of round {model.round_} of at most "
            f"{model.method_.rounds} (fedmosaic resume {place} goes on)",
            file=sys.stderr,
        )
    return model


@contextmanager
def told_warnings() -> Iterator[None]:
    """What the library warns of, as notes on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
