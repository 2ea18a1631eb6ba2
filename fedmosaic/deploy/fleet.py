"""The folders of a deployment: one for the server, one for every node, each ready to be carried where it belongs.

    server/    federation.toml, items.parquet, roster.json, link.toml, ca.crt, ca.key, server.crt, server.key
    NAME/      federation.toml, items.parquet, clients.safetensors, link.toml, ca.crt

`ca.key` and `server.key` are secrets of the server. Nodes get neither keys nor histories here: they make the ones
themselves, at their first start (`admission.py`), and their owners bring the others, on the node.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import tomli_w

from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import write_atomic, write_json
from fedmosaic.deploy.admission import Request
from fedmosaic.deploy.agreement import CATALOGUE, Agreement, write_catalogue
from fedmosaic.deploy.keys import CA, CERTIFICATE, KEY, make_authority, make_certificate
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.roster import ROSTER, read_entries, read_roster

LINK = "link.toml"


@dataclass(frozen=True)
class Link:
    """Where nodes reach the server; always through the gate, with TLS and a key of their own."""

    address: str  # host:port that nodes dial

    def __post_init__(self) -> None:
        if not self.port.isdigit() or not 0 < int(self.port) < 65536 or not self.host:
            raise SettingsError(f"an address is host:port, got {self.address!r}")

    @property
    def host(self) -> str:
        """The address without the port."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> str:
        """The port, as text."""
        return self.address.rpartition(":")[2]

    def write(self, folder: Path) -> None:
        """Write it as link.toml into a folder."""
        write_atomic(folder / LINK, tomli_w.dumps(vars(self)))

    @classmethod
    def read(cls, folder: Path) -> Link:
        """The link a folder holds."""
        try:
            return cls(**tomllib.loads((folder / LINK).read_text()))
        except FileNotFoundError:
            raise RunError(f"{folder} is no folder of a deployment: it holds no {LINK}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
            raise SettingsError(f"{folder / LINK} cannot be read: {error}") from None


def init(place: Path, agreement: Agreement, catalogue: pl.DataFrame, nodes: Mapping[str, int], link: Link) -> Path:
    """Write all folders of a new deployment: the server's, and one for each node with so many users."""
    server = place / "server"
    if server.exists():
        raise RunError(f"{place} holds a deployment already; choose another folder or remove it")
    for name, users in nodes.items():
        _check_name(name, users)
    agreement.build()  # a method that cannot be deployed is refused before anything is written
    server.mkdir(parents=True, mode=0o700)
    agreement.write(server)
    write_catalogue(server, catalogue)
    link.write(server)
    make_authority(server)
    renew_certificate(server)
    write_json(server / ROSTER, {})
    invite(place, nodes)
    return server


def renew_certificate(server: Path) -> None:
    """A new certificate of the server, by the same authority: nodes go on trusting it."""
    make_certificate(server, sorted({Link.read(server).host, "127.0.0.1", "localhost"}))


def invite(place: Path, nodes: Mapping[str, int]) -> None:
    """A folder for each new node, with so many users: its clients' ids, the agreement, where to knock; no keys."""
    server = ServerFolder(place / "server")
    entries = server.entries()
    for name, users in nodes.items():
        _check_name(name, users)
        if name in entries or (place / name).exists():
            raise RunError(f"{place / name} exists already; choose another name")
    catalogue = pl.read_parquet(server.place / CATALOGUE)
    first = max((int(e["first"]) + int(e["users"]) for e in entries.values()), default=0)
    for name, users in nodes.items():
        Node.create(place / name, server.agreement, catalogue, np.arange(first, first + users), name)
        shutil.copy(server.place / CA, place / name / CA)
        server.link.write(place / name)
        entries[name] = {"first": first, "users": users, "generation": 0, "key": "", "sum": "", "out": False}
        first += users
    write_json(server.place / ROSTER, entries)


def admit(place: Path, requests: Sequence[Request]) -> None:
    """Let nodes in by the requests they made, all or none; a server that runs does so at once.

    Keys are never exchanged silently: other keys need the next generation.
    """
    server = ServerFolder(place / "server")
    entries = server.entries()
    owners = {e["key"]: name for name, e in entries.items() if e["key"]}
    for request in requests:
        _check_request(request, entries, server.agreement)
        if owners.setdefault(request.key, request.node) != request.node:
            raise SettingsError(f"the key of {request.node!r} is that of another node: every node makes its own")
        shown = {"generation": request.generation, "key": request.key, "sum": request.sum, "out": False}
        entries[request.node] |= shown
    write_json(server.place / ROSTER, entries)


def _check_request(request: Request, entries: Mapping[str, Mapping[str, Any]], agreement: Agreement) -> None:
    name, entry = request.node, entries.get(request.node)
    if entry is None:
        known = ", ".join(entries) or "none"
        raise SettingsError(f"no node {name!r} was invited here; invited are: {known} (`fedmosaic deploy invite`)")
    if request.federation != agreement.digest():
        raise SettingsError(f"the request of {name!r} belongs to another federation")
    same = (entry["key"], entry["sum"]) == (request.key, request.sum)
    if entry["key"] and not same and request.generation <= int(entry["generation"]):
        raise SettingsError(
            f"{name!r} was admitted with other keys; if its owner renewed them (`fedmosaic deploy renew`), the request "
            f"shows generation {int(entry['generation']) + 1} or later, and this one shows {request.generation}"
        )


def revoke(place: Path, name: str) -> None:
    """Put a node out; a server that runs does so at once. Neither its name nor its clients' numbers go to others."""
    server = ServerFolder(place / "server")
    entries, admitted = server.entries(), read_roster(server.place)
    if name not in admitted:
        raise SettingsError(f"no node {name!r} is admitted; admitted are: {', '.join(admitted) or 'none'}")
    entries[name]["out"] = True
    write_json(server.place / ROSTER, entries)


def _check_name(name: str, users: int) -> None:
    if not name.replace("-", "").replace("_", "").isalnum() or name == "server" or users < 1:
        raise SettingsError(
            f"a node needs a name of letters, digits, - and _ (not `server`), and users; got {name!r} with {users}"
        )


class ServerFolder:
    """The folder of a deployment's server."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.agreement = Agreement.read(place)
        self.link = Link.read(place)

    def entries(self) -> dict[str, dict[str, Any]]:
        """The invited nodes."""
        return read_entries(self.place)

    def check_locks(self) -> None:
        """Refuse to serve without what keeps strangers out."""
        missing = [name for name in (CA, CERTIFICATE, KEY) if not (self.place / name).is_file()]
        if missing:
            raise RunError(f"{self.place} lacks {', '.join(missing)}: a server without TLS and keys is refused")
