"""The folders of a deployment: one for the server, one for every node, each ready to be carried where it belongs.

    server/    federation.toml, items.parquet, roster.json, link.toml, ca.crt, ca.key, server.crt, server.key
    NAME/      federation.toml, items.parquet, clients.safetensors, link.toml, ca.crt, node.key

`ca.key`, `server.key` and each `node.key` are secrets of the place they lie in. Nodes carry no history until their
owner brings it, on the node.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import tomli_w

from fedmosaic.core.errors import FedmosaicError, RunError, SettingsError
from fedmosaic.core.files import locked, read_json, write_atomic, write_json
from fedmosaic.core.ragged import I64
from fedmosaic.deploy.agreement import Agreement, read_catalogue, write_catalogue
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.keys import CA, CERTIFICATE, KEY, make_authority, make_certificate, make_node_key
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.protocol import Transport

PAUSE = 0.2  # seconds between two looks for answers: each is a request
LINK, ROSTER, OUTCOME, HALF = "link.toml", "roster.json", "outcome.json", ".registering"


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
        except (tomllib.TOMLDecodeError, TypeError) as error:
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
    make_certificate(server, sorted({link.host, "127.0.0.1", "localhost"}))
    write_json(server / ROSTER, {})
    for name, users in nodes.items():
        admit(place, name, users)
    return server


def admit(place: Path, name: str, users: int = 1) -> Path:
    """A folder for one more node: its key, the ids of its clients, and the agreement."""
    server = ServerFolder(place / "server")
    roster, folder = server.entries(), place / name
    _check_name(name, users)
    if name in roster or folder.exists():
        raise RunError(f"{folder} exists already; choose another name")
    first = max((int(e["first"]) + int(e["users"]) for e in roster.values()), default=0)
    Node.create(
        folder, server.agreement, pl.read_parquet(server.place / "items.parquet"), np.arange(first, first + users)
    )
    shutil.copy(server.place / CA, folder / CA)
    server.link.write(folder)
    roster[name] = {"first": first, "users": users, "key": make_node_key(folder), "flower": None}
    write_json(server.place / ROSTER, roster)
    return folder


def _check_name(name: str, users: int) -> None:
    if not name.replace("-", "").replace("_", "").isalnum() or name == "server" or users < 1:
        raise SettingsError(
            f"a node needs a name of letters, digits, - and _ (not `server`), and users; got {name!r} with {users}"
        )


class ServerFolder:
    """The folder of a deployment's server, and who is admitted there."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.agreement = Agreement.read(place)
        self.link = Link.read(place)

    def entries(self) -> dict[str, dict[str, Any]]:
        """The admitted nodes."""
        found: dict[str, dict[str, Any]] = read_json(self.place / ROSTER)
        return found

    def roster(self) -> dict[str, I64]:
        """Numbers of the clients of each node."""
        return {n: np.arange(e["first"], e["first"] + e["users"]) for n, e in self.entries().items()}

    def flower_ids(self) -> dict[int, str]:
        """Names of nodes by the ids Flower gave their keys."""
        return {int(e["flower"]): name for name, e in self.entries().items() if e["flower"] is not None}

    def remember(self, ids: Mapping[str, int]) -> None:
        """Note the ids of registered nodes."""
        entries = self.entries()
        for name, number in ids.items():
            entries[name]["flower"] = str(number)
        write_json(self.place / ROSTER, entries)

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Leaves a mark if it does not come to its end: Flower then knows keys whose ids were not noted."""
        mark = self.place / HALF
        mark.touch()
        yield
        mark.unlink()

    def forget_half_registered(self) -> None:
        """Begin with an empty database of Flower's if a server died while registering; ours is in other files."""
        if (self.place / HALF).exists():
            for name in ("flower.db", "flower.db-shm", "flower.db-wal"):
                (self.place / name).unlink(missing_ok=True)
            write_json(self.place / ROSTER, {n: {**e, "flower": None} for n, e in self.entries().items()})
            (self.place / HALF).unlink()

    def check_locks(self) -> None:
        """Refuse to serve without what keeps strangers out."""
        missing = [name for name in (CA, CERTIFICATE, KEY) if not (self.place / name).is_file()]
        if missing:
            raise RunError(f"{self.place} lacks {', '.join(missing)}: a server without TLS, keys and gate is refused")

    def hold(self, transport: Transport, token: str, serve: float) -> None:
        """All rounds that are left; then the outcome for everybody, and for newcomers as long as it is served."""
        try:
            with locked(self.place, "server", patience=30.0):
                items, _ = read_catalogue(self.place, self.agreement)
                one = Coordinator(self.place, self.roster(), transport, n_items=len(items), pause=PAUSE)
                write_json(self.place / OUTCOME, {"token": token, "status": "running"})
                one.run()
                now = time.monotonic()
                owed, until = now + 2 * self.agreement.deadline, now + serve
                while (one.lacking() and time.monotonic() < owed) or time.monotonic() < until:
                    one.share()
                    time.sleep(1.0)
                write_json(self.place / OUTCOME, {"token": token, "status": "done"})
        except Exception as error:
            text = str(error) if isinstance(error, FedmosaicError) else f"{type(error).__name__}: {error}"
            write_json(self.place / OUTCOME, {"token": token, "status": "failed", "error": text})
            raise


def hold_rounds(dial: Callable[[Mapping[int, str]], Transport], config: Mapping[str, Any]) -> None:
    """What a server's run does: the rounds of the folder its settings name."""
    folder = ServerFolder(Path(str(config["folder"])))
    folder.hold(dial(folder.flower_ids()), str(config["token"]), float(config["serve"]))
