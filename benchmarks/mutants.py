"""Mutated messages on both sides of a deployment: is anything answered by an error that nobody thought of?

    python benchmarks/mutants.py [--count 1000000] [--seed 0]

Good messages of all four kinds, and requests of Flower's, are changed at random: bits flipped, ends cut or added, parts
overwritten, pieces of others put in; half of them get a digest that fits, so that what is behind the digest is reached,
with headers of other values and types, and tensors of other types and shapes. Nodes answer tasks and reveals; the
server reads and counts updates and openings. What is no refusal with a reason is printed, and counted as untyped.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.core.files import pack, unpack
from fedmosaic.deploy import flower
from fedmosaic.deploy.admission import asked
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.desk import read_answer
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.open_sum import Arrivals
from fedmosaic.deploy.plain import Rules
from fedmosaic.deploy.protocol import OpeningMessage, Refused, UpdateMessage, kind_of
from fedmosaic.deploy.roster import Member
from fedmosaic.deploy.work import LearntWork, work_of
from fedmosaic.testing import LocalTransport

ITEMS = 30
NUMBERS: list[Any] = [-1, 0, 1, 2**31, 2**61, 10**30, 1.5, float("nan")]
VALUES: list[Any] = [*NUMBERS, None, True, "", "x" * 50, [], [1], {"a": 1}, {"item": 3}]
DTYPES = ["<i8", "<i4", "<f4", "<f8", "|u1", "<u8", "|b1"]


def fleet(place: Path, secure: bool) -> tuple[Agreement, list[Node], LocalTransport]:
    """Four nodes after one round, and all that was sent."""
    catalogue = pl.DataFrame({"item": [f"i{n}" for n in range(ITEMS)]})
    agreement = Agreement(
        method="fedmf", method_settings={"dim": 4, "rounds": 1}, items=catalogue_digest(catalogue), secure=secure
    )
    nodes, roster = dict[str, Node](), dict[str, Member]()
    rng = np.random.default_rng(1)
    for number in range(4):
        home = place / str(number)
        Node.create(home, agreement, catalogue, np.array([number]), str(number))
        request = asked(home)
        take_history(home, {"item": [f"i{n}" for n in rng.choice(ITEMS, 6, replace=False)]}, user=None)
        nodes[str(number)] = Node(home)
        roster[str(number)] = Member(number, 1, 0, request.key, bytes.fromhex(request.sum))
    agreement.write(place)
    transport = LocalTransport(dict(nodes))
    Coordinator(place, lambda: roster, transport, n_items=ITEMS, pause=0.001).round()
    return agreement, list(nodes.values()), transport


def raw(whole: bytes, others: list[bytes], rng: np.random.Generator) -> bytes:
    """Bytes changed somewhere."""
    content, kind = bytearray(whole), int(rng.integers(5))
    at = int(rng.integers(len(content)))
    if kind == 0:
        content[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        content = content[:at]
    elif kind == 2:
        content += rng.bytes(int(rng.integers(1, 50)))
    elif kind == 3:
        content[at : at + 8] = rng.bytes(8)
    else:
        other = others[int(rng.integers(len(others)))]
        start = int(rng.integers(len(other)))
        content[at:] = other[start : start + len(content) - at]
    return bytes(content)


def fitting(whole: bytes, rng: np.random.Generator) -> bytes:
    """Another header or other tensors, with a digest that fits."""
    tensors, head = unpack(whole, "a message")
    names = list(tensors)
    for _ in range(int(rng.integers(1, 3))):
        kind = int(rng.integers(6))
        if kind < 2:
            head[list(head)[int(rng.integers(len(head)))]] = VALUES[int(rng.integers(len(VALUES)))]
        elif kind == 2 and head:
            head.pop(list(head)[int(rng.integers(len(head)))])
        elif kind == 3:
            tensors[str(rng.integers(9))] = rng.integers(0, 9, 3)
        elif names:
            name = names[int(rng.integers(len(names)))]
            value = tensors.get(name, np.zeros(1))
            if kind == 4:
                tensors[name] = value.reshape(-1)[: int(rng.integers(value.size + 1))]
            else:
                with np.errstate(all="ignore"):
                    tensors[name] = value.astype(DTYPES[int(rng.integers(len(DTYPES)))])
        if not head:
            break
    return pack({n: np.ascontiguousarray(v) for n, v in tensors.items()}, head)


def server_side(agreement: Agreement, place: Path) -> Callable[[bytes], str]:
    """Reads what a node sent, and counts it; the reason of a refusal."""
    work = work_of(agreement)
    assert isinstance(work, LearntWork)
    rules, server = Rules(work.algorithm, ITEMS, 50.0), work.parameters(work.start(ITEMS, 0))
    terms = agreement.terms(1, "a", "t", (0, 1, 2, 3)) if agreement.secure else None
    size = work.size(None, ITEMS)

    def take(content: bytes) -> str:
        try:
            answer = read_answer(content)
            if isinstance(answer, OpeningMessage):
                answer.opening()
            elif terms is not None:
                Arrivals(terms, size, place).take(0, answer)
            else:
                rules.open_sum(answer, server)
        except Refused as error:
            return error.reason
        return "taken"

    return take


def node_side(node: Node) -> Callable[[bytes], str]:
    def take(content: bytes) -> str:
        answer = node.answer(content)
        if kind_of(answer) == "opening":
            return "taken"
        told = UpdateMessage.decode(answer)
        if told.status == "failed":
            reason, sign, _ = told.detail.partition(":")
            assert sign, told.detail
            assert reason.islower(), told.detail  # the name of an exception begins otherwise
            return reason
        return told.status

    return take


def at_the_gate(content: bytes) -> str:
    """A request of Flower's that pushes a message."""
    try:
        flower.answered(flower.decoded("/v1/fleet/push-messages", content))
    except ValueError:
        return "no request"
    return "taken"


def main() -> None:
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("--count", type=int, default=1_000_000)
    wanted.add_argument("--seed", type=int, default=0)
    options = wanted.parse_args()
    rng, counts, untyped = np.random.default_rng(options.seed), dict[str, Counter[str]](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        sides: list[tuple[str, list[bytes], Callable[[bytes], str]]] = []
        for secure in (False, True):
            place = Path(folder) / str(secure)
            (place / "spool").mkdir(parents=True)
            agreement, nodes, transport = fleet(place, secure)
            sent = [content for _, content in transport.sent]
            told = [content for name, content in transport.received if name == "0"]
            way = "masked" if secure else "plain"
            sides.append((f"server, {way}", sent, server_side(agreement, place / "spool")))
            sides.append((f"node, {way}", told, node_side(nodes[0])))
        packet = flower.Packet.of("answer", b"x" * 100)
        request = flower.pushed(packet, "m", 1)
        sides.append(("gate", [request], at_the_gate))
        begun, first = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(options.count):
            name, good, take = sides[number % len(sides)]
            whole = good[int(rng.integers(len(good)))]
            content = raw(whole, good, rng) if name == "gate" or rng.integers(2) else fitting(whole, rng)
            try:
                counts.setdefault(name, Counter())[take(content)] += 1
            except Exception as error:
                untyped[f"{name}: {type(error).__name__}: {error}"[:160]] += 1
            if number % 100_000 == 99_999:
                print(
                    f"{number + 1:,} of {options.count:,}, {sum(untyped.values())} untyped", file=sys.stderr, flush=True
                )
        seconds, last = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, reasons in counts.items():
        print(f"{name}: {dict(reasons.most_common())}")
    print(f"{options.count:,} mutants in {seconds:.0f} s; {first / 1024:.0f} MB before, {last / 1024:.0f} MB at most")
    print(f"untyped: {sum(untyped.values())} {dict(untyped.most_common(10))}")
    raise SystemExit(bool(untyped))


if __name__ == "__main__":
    main()
