"""How a node asks to be let in: keys made where it runs, and a request with their public halves for the operator.

    request.json    {"node": NAME, "federation": ..., "generation": 0, "key": ..., "sum": ..., "signature": ...}

Private halves never leave the node's folder. The signature, by the node's key over everything else, shows that who asks
holds it. `renewed` makes new keys: the node is then another party of secure sums, whose number has the next generation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import load_tensors, read_json, write_json
from fedmosaic.deploy.agreement import Agreement
from fedmosaic.deploy.history import CLIENTS
from fedmosaic.deploy.keys import NODE_KEY, SUM_KEY, is_signed, make_node_keys, public_keys, signed
from fedmosaic.privacy.secure_sum import Pair

REQUEST = "request.json"


@dataclass(frozen=True)
class Request:
    """What a node shows of itself to be let in."""

    node: str
    federation: str
    generation: int
    key: str
    sum: str
    signature: str = ""

    @property
    def text(self) -> bytes:
        """What is signed."""
        shown = {k: v for k, v in asdict(self).items() if k != "signature"}
        return json.dumps(shown, sort_keys=True).encode()

    @staticmethod
    def read(path: Path) -> Request:
        """A request that somebody brought; refused unless its own key has signed it."""
        file = path / REQUEST if path.is_dir() else path
        found: Any = read_json(file)
        kinds = {"node": str, "federation": str, "generation": int, "key": str, "sum": str, "signature": str}
        if not isinstance(found, dict) or {k: type(v) for k, v in found.items()} != kinds:
            raise SettingsError(f"{file} is no request of a node: it has not {', '.join(kinds)}, and nothing else")
        request = Request(**found)
        if not is_signed(request.key, request.signature, request.text):
            raise SettingsError(f"{file} was altered: it is not signed by the key it shows")
        if len(request.sum) != 64 or set(request.sum) - set("0123456789abcdef") or request.generation < 0:
            raise SettingsError(f"{file} shows no key for secure sums")
        try:
            Pair.new().shared(bytes.fromhex(request.sum))
        except ValueError:
            raise SettingsError(f"{file} shows a key for secure sums that agrees on nothing") from None
        return request


def asked(place: Path) -> Request:
    """A node's request, made with its keys at its first start.

    A file that is there already stays as it is: who let the node in knows it.
    """
    if (place / REQUEST).is_file():
        return Request.read(place)
    return _written(place, 0)


def renewed(place: Path) -> Request:
    """New keys; the node is out until its new request is admitted. The old ones are gone."""
    generation = asked(place).generation + 1
    for name in (NODE_KEY, SUM_KEY):
        (place / name).unlink(missing_ok=True)
    return _written(place, generation)


def generation_of(place: Path) -> int:
    """How often a node's keys were renewed."""
    return Request.read(place).generation if (place / REQUEST).is_file() else 0


def _written(place: Path, generation: int) -> Request:
    name = load_tensors(place / CLIENTS)[1].get("node")
    if not isinstance(name, str):
        raise RunError(f"{place / CLIENTS} does not say which node this is; `fedmosaic deploy invite` makes its folder")
    make_node_keys(place)
    unsigned = Request(name, Agreement.read(place).digest(), generation, **public_keys(place))
    request = replace(unsigned, signature=signed(place, unsigned.text))
    write_json(place / REQUEST, asdict(request))
    return request
