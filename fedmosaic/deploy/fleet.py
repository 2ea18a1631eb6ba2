"""The folders of a deployment: one for the server, one for every node, each ready to be carried where it belongs.

    server/    federation.toml, items.parquet, roster.json, link.toml, ca.crt, ca.key, server.crt, server.key
    NAME/      federation.toml, items.parquet, numbers.safetensors, link.toml, ca.crt, node.key

`ca.key`, `server.key` and each `node.key` are secrets of the place they lie in. Nodes carry no history until their
owner brings it, on the node.
"""

from __future__ import annotations

import fcntl
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

from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.keys import CA, make_authority, make_certificate, make_node_key
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.pact import Pact, read_catalogue, write_catalogue
from fedmosaic.errors import FedmosaicError, RunError, SettingsError
from fedmosaic.ragged import I64
from fedmosaic.runtime.distributed import LOOPBACK
from fedmosaic.runtime.protocol import Transport
from fedmosaic.store import read_json, write_atomic, write_json

PAUSE = 0.2  # seconds between two looks for answers: each is a request
LINK, ROSTER, OUTCOME = "link.toml", "roster.json", "outcome.json"


@dataclass(frozen=True)
class Link:
    """Where the server is reached, and whether with TLS, node keys and gate."""

    address: str  # host:port that nodes dial
    secure: bool = True

    def __post_init__(self) -> None:
        if not self.port.isdigit() or not 0 < int(self.port) < 65536 or not self.host:
            raise SettingsError(f"an address is host:port, got {self.address!r}")
        if not self.secure and self.host not in LOOPBACK:
            raise SettingsError(
                f"{self.host} can be reached from other machines: without TLS, node keys and gate anybody could start "
                "code on every node. Leave --insecure away, or use 127.0.0.1"
            )

    @property
    def host(self) -> str:
        """Without the port."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> str:
        """As text."""
        return self.address.rpartition(":")[2]

    def write(self, folder: Path) -> None:
        """As link.toml."""
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


def init(place: Path, pact: Pact, catalogue: pl.DataFrame, nodes: Mapping[str, int], link: Link) -> Path:
    """Write all folders of a new deployment: the server's, and one for each node with so many users."""
    server = place / "server"
    if server.exists():
        raise RunError(f"{place} holds a deployment already; choose another folder or remove it")
    pact.build()  # a method that cannot be deployed is refused before anything is written
    server.mkdir(parents=True, mode=0o700)
    pact.write(server)
    write_catalogue(server, catalogue)
    link.write(server)
    make_authority(server)
    make_certificate(server, sorted({link.host, "127.0.0.1", "localhost"}))
    write_json(server / ROSTER, {})
    for name, users in nodes.items():
        admit(place, name, users)
    return server


def admit(place: Path, name: str, users: int = 1) -> Path:
    """A folder for one more node: its key, its numbers, and the agreement."""
    server = ServerFolder(place / "server")
    roster, folder = server.entries(), place / name
    if name in roster or folder.exists():
        raise RunError(f"{folder} exists already; choose another name")
    if not name.replace("-", "").replace("_", "").isalnum() or users < 1:
        raise SettingsError(f"a node needs a name of letters, digits, - and _, and users; got {name!r}, {users}")
    first = max((int(e["first"]) + int(e["users"]) for e in roster.values()), default=0)
    Node.create(folder, server.pact, pl.read_parquet(server.place / "items.parquet"), np.arange(first, first + users))
    shutil.copy(server.place / CA, folder / CA)
    server.link.write(folder)
    roster[name] = {"first": first, "users": users, "key": make_node_key(folder), "flower": None}
    write_json(server.place / ROSTER, roster)
    return folder


class ServerFolder:
    """The server's folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.pact = Pact.read(place)
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
    def locked(self, patience: float = 30.0) -> Iterator[None]:
        """One coordinator at a time."""
        with (self.place / ".lock").open("w") as stream:
            until = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise RunError(f"another server is at work in {self.place}") from None
                    time.sleep(0.2)
            yield

    def hold(self, transport: Transport, token: str, serve: float) -> None:
        """All rounds that are left; then the outcome for everybody, and for newcomers as long as it is served."""
        try:
            with self.locked():
                items, _ = read_catalogue(self.place)
                one = Coordinator(self.place, self.roster(), transport, n_items=len(items), pause=PAUSE)
                write_json(self.place / OUTCOME, {"token": token, "status": "running"})
                one.run()
                until = time.monotonic() + serve
                one.share()
                while time.monotonic() < until:
                    time.sleep(1.0)
                    one.share()
            write_json(self.place / OUTCOME, {"token": token, "status": "done"})
        except FedmosaicError as error:
            write_json(self.place / OUTCOME, {"token": token, "status": "failed", "error": str(error)})
            raise


def hold_rounds(dial: Callable[[Mapping[int, str]], Transport], config: Mapping[str, Any]) -> None:
    """What a server's run does: the rounds of the folder its settings name."""
    folder = ServerFolder(Path(str(config["folder"])))
    folder.hold(dial(folder.flower_ids()), str(config["token"]), float(config["serve"]))
