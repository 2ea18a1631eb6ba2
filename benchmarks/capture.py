"""Everything that leaves devices in some rounds, captured where it enters the connection, and attacked.

    python benchmarks/capture.py [--methods fedmf ease ...] [--devices 60] [--rounds 5] [--data-dir DIR] [--json]

Users of MovieLens-100K are devices, each with a folder, keys and a TLS connection of its own, against a server on
loopback; all settings are the defaults of a deployment. What a device hands to TLS is kept: every call, header and
body. Of it are said:

    kinds       what answers hold besides names and numbers of the protocol; "plain" if it is not masked
    sizes       how many lengths answers to one question have; r: how a device's bytes go with its history's length
    looks       bits of a byte of the masked numbers that a compressor needs, of 8
    F1, AUC     `direction` and `norm` of `fedmosaic audit` on the masked numbers, beside guessing what is popular
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from base64 import b64encode
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import numpy.typing as npt
import polars as pl
from many_devices import prepared, rounds_held, server_of

from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.audit.attacks import Guess, direction, norm
from fedmosaic.audit.inference import by_item, item_rows
from fedmosaic.core import keys
from fedmosaic.data.sources import load
from fedmosaic.deploy.admission import asked
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.flower import CALLS, KEY_HEADER, public_pem
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.protocol import OpeningMessage, TaskMessage, UpdateMessage, kind_of
from fedmosaic.deploy.work import LearntWork
from fedmosaic.engines.secure import unflat
from fedmosaic.methods.closed_form import as_statistics
from fedmosaic.methods.registry import entry
from fedmosaic.report.console import print_table

METHODS = ("fedmf", "pfedrec", "fedrap", "fedrecgel", "popularity", "ease", "mosaic")
F64 = npt.NDArray[np.float64]


@dataclass
class Captured:
    """Bytes of one device: of all calls, and the parts and order of its answers."""

    sizes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, bytes] = field(default_factory=dict)
    orders: list[tuple[str, ...]] = field(default_factory=list)

    def see(self, request: httpx.Request) -> None:
        """Keep what a request carries."""
        path, body = request.url.path, request.read()
        head = sum(len(name) + len(value) for name, value in request.headers.raw)
        call = CALLS[path].FromString(body)
        self.sizes[path.rsplit("/", 1)[1]].append(head + len(body))
        if path.endswith("push-messages"):
            self.orders.append(tuple(child.object_id for child in call.message_object_trees[0].children))
        if path.endswith("push-object"):
            self.parts[call.object_id] = call.object_content

    def answers(self) -> list[bytes]:
        """Its answers, as they were put together again by the server."""
        return [b"".join(self.parts[name] for name in order) for order in self.orders]


def tapped() -> dict[str, Captured]:
    """From now on everything that HTTP clients of this process send is kept, by the key that signs it."""
    seen, send = defaultdict[str, Captured](Captured), httpx.Client.send

    def sending(client: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        seen[request.headers[KEY_HEADER]].see(request)
        return send(client, request, **more)

    patch.object(httpx.Client, "send", sending).start()
    return seen


def listening() -> dict[str, list[bytes]]:
    """From now on everything that nodes of this process are told is kept, by their names."""
    told, answer = defaultdict[str, list[bytes]](list), Node.answer

    def answering(node: Node, content: bytes) -> bytes:
        told[node.place.name].append(content)
        return answer(node, content)

    patch.object(Node, "answer", answering).start()
    return told


def fleet_of(place: Path, method: str, devices: int, rounds: int, data_dir: Path | None) -> list[Node]:
    """Users of MovieLens-100K, drawn, with all of their films."""
    data = load("ml-100k", data_dir)
    drawn = keys.generator(seed=0, purpose=keys.Purpose.COHORT).permutation(len(data.users))[:devices]
    catalogue = pl.DataFrame({"item": [str(i) for i in data.items.ids]})
    chosen = {"rounds": rounds} if getattr(entry(method).settings(), "rounds", 1) > 1 else {}
    agreement = Agreement(method=method, method_settings=chosen, items=catalogue_digest(catalogue), deadline=300.0)
    histories = []
    for user in drawn:
        mine = np.flatnonzero(data.user == user)
        own = data.items.take(data.item[mine])
        histories.append({"item": [str(i) for i in own]} | ({} if data.time is None else {"time": data.time[mine]}))
    return prepared(place, agreement, histories, catalogue)


def rows_of(node: Node, task: bytes, vector: npt.NDArray[Any]) -> F64:
    """Masked numbers as a server would read them: a row per item."""
    work, n_items, numbers = node.work, node.data.n_items, vector.view(np.int64)[:-1]
    if isinstance(work, LearntWork):
        return item_rows(work.federation, unflat(work.algorithm, work.nothing(None, n_items), numbers, 1))
    state = work.brought_up(n_items, {}, TaskMessage.decode(task))
    like = work.nothing(state, n_items)
    assert not isinstance(like, UploadSum)
    return by_item(as_statistics(like, numbers), n_items)


def looked_at(nodes: list[Node], seen: dict[str, Captured], told: dict[str, list[bytes]]) -> dict[str, Any]:
    """What the bytes of all devices tell."""
    kinds, sizes, bits = set[str](), defaultdict[tuple[str, int, str], set[int]](set), list[float]()
    guesses, truths = defaultdict[str, list[F64]](list), list[npt.NDArray[Any]]()
    totals, lengths = list[int](), list[int]()
    by_key = {key: heard for key, heard in seen.items() if heard.orders}
    for node in nodes:
        heard = by_key[b64encode(public_pem(asked(node.place).key)).decode()]
        totals.append(sum(map(sum, heard.sizes.values())))
        lengths.append(int(node.data.histories.lengths.sum()))
        for task, answer in zip(told[node.place.name], heard.answers(), strict=True):
            if kind_of(answer) == "opening":
                kinds |= {"shares of seeds"}
                opening = OpeningMessage.decode(answer)
                sizes["opening", opening.round, opening.attempt].add(len(answer))
                continue
            update = UpdateMessage.decode(answer)
            if not update.tensors:
                continue
            kinds |= {"masked numbers", "sealed letters"} if set(update.tensors) == {"masked", "letters"} else {"plain"}
            sizes["update", update.round, update.attempt].add(len(answer))
            raw = update.tensors["masked"].tobytes()[: 1 << 20]
            bits.append(8 * len(zlib.compress(raw, 9)) / len(raw))
            table = rows_of(node, task, update.tensors["masked"])
            guesses["direction"].append(direction(table))
            guesses["norm"].append(norm(table))
            truths.append(np.unique(node.data.histories[0]))
    counts = np.bincount(
        np.concatenate([np.unique(n.data.histories[0]) for n in nodes]), minlength=nodes[0].data.n_items
    )
    found = {name: Guess.of(scores, truths) for name, scores in guesses.items()}
    before = Guess.of([counts.astype(np.float64)] * len(truths), truths)
    return {
        "method": nodes[0].agreement.method, "devices": len(nodes), "messages": len(truths), "kinds": sorted(kinds),
        "sizes of a round": max(map(len, sizes.values())), "bits of a byte": float(np.mean(bits)),
        "bytes against history": float(np.corrcoef(totals, lengths)[0, 1]),
        "popular": vars(before), **{name: vars(one) for name, one in found.items()},
    }  # fmt: skip


def main() -> None:
    asked_for = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked_for.add_argument("--methods", nargs="+", default=METHODS)
    asked_for.add_argument("--devices", type=int, default=60)
    asked_for.add_argument("--rounds", type=int, default=5)
    asked_for.add_argument("--data-dir", type=Path, default=None)
    asked_for.add_argument("--json", action="store_true")
    options = asked_for.parse_args()
    results = []
    seen, told = tapped(), listening()
    for method in options.methods:
        with tempfile.TemporaryDirectory(prefix="fedmosaic-capture-") as folder:
            nodes = fleet_of(Path(folder), method, options.devices, options.rounds, options.data_dir)
            nodes[0].warm_up()
            told.clear()
            with server_of(Path(folder)) as server:
                for line in rounds_held(Path(folder), nodes, server, min(nodes[0].work.rounds, options.rounds)):
                    print(method, line, file=sys.stderr, flush=True)
            results.append(looked_at(nodes, seen, told))
            print(results[-1], file=sys.stderr, flush=True)
            seen.clear()
    if options.json:
        print(json.dumps(results))
        return
    shown = ["direction", "norm", "popular"]
    print_table(
        f"{options.devices} devices, {options.rounds} rounds: F1 / AUC of guesses",
        ["method", "answers hold", "sizes", "r with history", "bits of 8", *shown],
        [
            [
                one["method"], ", ".join(one["kinds"]), str(one["sizes of a round"]),
                f"{one['bytes against history']:+.2f}", f"{one['bits of a byte']:.3f}",
                *(f"{one[name]['f1']:.3f} / {one[name]['auc']:.3f}" for name in shown),
            ]
            for one in results
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
