"""Messages between server and nodes: what is refused, what hostile bytes can do, and what support changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import NEEDS_TORCH, agreement_of, coordinator_of, finished, held, histories, make_fleet, rules_of
from safetensors.numpy import save

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.files import digest_of, read_lines, unpack
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.protocol import Refused, TaskMessage, UpdateMessage
from fedmosaic.testing import Clock, LocalTransport


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("protocol", {"clients": "one"}),
        ("protocol", {"clients": True}),
        ("protocol", {"detail": 3}),
        ("protocol", {"status": "well"}),
        ("tensors", {"shrink": {"item": 10**400}}),
        ("federation", {"federation": "another"}),
        ("duplicate", {"attempt": "guessed"}),
        ("round", {"attempt": "guessed", "round": 77}),
        ("clients", {"clients": 2}),
        ("clients", {"clients": 0}),
        ("failed", {"status": "failed"}),
        ("tensors", {"shrink": {"item": -1}}),
        ("tensors", {"tensors": {}}),
        ("tensors", {"tensors": {"item": np.zeros((30, 4), np.float32), "user": np.zeros(4, np.float32)}}),
        ("tensors", {"tensors": {"item": np.zeros((1, 4), np.float32), "item.rows": np.zeros(1, np.int32)}}),
        ("dtype", {"tensors": {"item": np.zeros((30, 4))}}),
        ("shape", {"tensors": {"item": np.zeros((29, 4), np.float32)}}),
        ("finite", {"tensors": {"item": np.full((30, 4), np.inf, np.float32)}}),
        ("norm", {"tensors": {"item": np.full((30, 4), 100, np.float32)}}),
    ],
)
def test_bad_uploads_are_refused_and_the_round_goes_on(reason: str, change: dict[str, Any], tmp_path: Path) -> None:
    data = histories(3)
    agreement = agreement_of("fedmf", 30, largest_norm=50.0, deadline=5.0)
    server, nodes = make_fleet(tmp_path, agreement, data, [[u] for u in range(3)])

    class Bad:
        def answer(self, content: bytes) -> bytes:
            return replace(UpdateMessage.decode(nodes["n0"].answer(content)), **change).encode()

    clock = Clock()
    transport = LocalTransport({**nodes, "n0": Bad()})
    line = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep).round()
    assert (line["clients"], line["refused"]) == (2, 1)
    refused = [json.loads(text) for text in (server / "refused.jsonl").read_text().splitlines()]
    assert [(r["node"], r["reason"]) for r in refused] == [("n0", reason)]


@pytest.mark.parametrize(
    ("reason", "rows"),
    [
        ("ids", [3, 2]),
        ("ids", [2, 2]),
        ("ids", [-1, 4]),
        ("ids", [4, 30]),
        ("ids", [0, 2147483647, -2147483648, -1, 5]),  # differences wrap around
        ("quota", [1, 2, 3]),
        ("dtype", [1.5, 2.0]),
    ],
)
def test_rows_are_checked(reason: str, rows: list[float]) -> None:
    agreement = agreement_of("fedmf", 30, support="touched")
    rules = rules_of(agreement, row_quota=2)
    at = np.array(rows) if reason == "dtype" else np.array(rows, dtype=np.int32)
    tensors = {"item": np.ones((len(rows), 4), np.float32), "item.rows": at}
    with pytest.raises(Refused) as caught:
        rules.open_sum(UpdateMessage(agreement.digest(), 1, "", "done", 0, clients=1, tensors=tensors), {})
    assert caught.value.reason == reason


def test_no_mutant_of_a_message_gets_through(tmp_path: Path) -> None:
    data = histories(2)
    server, nodes = make_fleet(tmp_path, agreement_of("pfedrec", 30), data, [[0], [1]])
    transport = LocalTransport(nodes)
    coordinator_of(server, nodes, transport).round()
    rng = np.random.default_rng(0)
    for whole, decode in ((transport.sent[0][1], UpdateMessage.decode), (transport.received[0][1], TaskMessage.decode)):
        for _ in range(1500):
            content = bytearray(whole)
            kind = rng.integers(4)
            at = int(rng.integers(len(content)))
            if kind == 0:
                content[at] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                content = content[:at]
            elif kind == 2:
                content += rng.bytes(int(rng.integers(1, 50)))
            else:
                content[at : at + 8] = rng.bytes(8)
            if bytes(content) != whole:
                with pytest.raises(Refused):
                    decode(bytes(content))
        for length in (0, 1, 7, 8, 9, 100):
            with pytest.raises(Refused):
                decode(rng.bytes(length))


@pytest.mark.parametrize("support", ["padded", "touched"])
@pytest.mark.parametrize("method", ["fedmf", "fedrap", "fedncf"])
def test_support_decides_bytes_not_results(support: Any, method: str, tmp_path: Path) -> None:
    if method in NEEDS_TORCH:
        pytest.importorskip("torch")
    data = histories(4, 400)
    ends, sizes = [], []
    for name in ("dense", support):
        agreement = agreement_of(method, 400, support=name)
        server, nodes = make_fleet(tmp_path / name, agreement, data, [[u] for u in range(4)])
        one = coordinator_of(server, nodes, LocalTransport(nodes))
        lines = [one.round() for _ in range(3)]
        ends.append(finished(server))
        sizes.append(lines[-1]["bytes_up"])
        if method == "fedmf":  # few rows move: later rounds send only those
            assert lines[1]["bytes_down"] < lines[0]["bytes_down"]
    assert ends[0] == ends[1]
    assert sizes[1] < sizes[0]
    if support == "padded":
        assert {u.size for u in (n.answered["item.rows"] for n in nodes.values())} == {64}


def test_rows_in_clear_are_refused_beside_noise() -> None:
    with pytest.raises(SettingsError, match="support=touched shows which rows a client trained"):
        agreement_of("pfedrec", 30, support="touched", settings={"noise": 0.1}).build()


def test_a_node_that_lost_its_state_asks_for_everything(tmp_path: Path) -> None:
    data = histories(4, 400)
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 400), data, [[u] for u in range(4)])
    transport = LocalTransport(nodes)
    one = coordinator_of(server, nodes, transport)
    one.round()
    one.round()
    (tmp_path / "n0" / "state.safetensors").unlink()
    transport.members["n0"] = Node(tmp_path / "n0")
    line = one.round()
    assert (line["clients"], line["refused"]) == (4, 0)
    asked = [TaskMessage.decode(content) for name, content in transport.received if name == "n0"]
    assert [task.base for task in asked] == [-1, 0, 1, -1]


def repacked(content: bytes, header: Any, text: str | None = None) -> bytes:
    """A message with another header and a digest that fits it."""
    tensors, _ = unpack(content, "test")
    described = json.dumps(header) if text is None else text
    whole = json.dumps({"meta": described, "sha256": digest_of(tensors, described)})
    return bytes(save(tensors, metadata={"fedmosaic": whole}))


def test_hostile_headers_are_refused_whatever_their_digest_says(tmp_path: Path) -> None:
    data = histories(2)
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30), data, [[0], [1]])
    transport = LocalTransport(nodes)
    coordinator_of(server, nodes, transport).round()
    sent = transport.sent[0][1]
    _, good = unpack(sent, "test")
    assert UpdateMessage.decode(repacked(sent, good)).clients == 1
    for name in good:
        odd: list[Any] = [None, [], {"a": 1}, "x", 1.5, True, 10**30, -1, float("nan")]
        for value in odd:
            hostile = repacked(sent, {**good, name: value})
            try:
                update = UpdateMessage.decode(hostile)
                rules_of(agreement_of("fedmf", 30)).open_sum(update, {})
            except Refused:
                pass
    headers: list[Any] = [[], [1], "x", 3, None, {}]
    for header in headers:
        with pytest.raises(Refused):
            UpdateMessage.decode(repacked(sent, header))
    for text in ("", "[" * 100_000, "9" * 5000, "{"):
        with pytest.raises(Refused):
            UpdateMessage.decode(repacked(sent, None, text))


def test_sums_at_the_edge_of_64_bits_are_refused() -> None:
    agreement = agreement_of("fedmf", 30)
    rules = rules_of(agreement)
    for value in (-(2**63), 2**63 - 1, 2**55):
        table = np.zeros((30, 4), np.int64)
        table[3, 2] = value
        update = UpdateMessage(agreement.digest(), 1, "", "done", 0, clients=100_000, tensors={"item": table})
        with pytest.raises(Refused) as caught:
            rules.open_sum(update, {})
        assert caught.value.reason == "finite"


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {}},
        {"tensors": {"item": np.zeros((30, 7), np.float32)}},
        {"tensors": {"item": np.zeros((5, 4), np.float32)}},
        {"tensors": {"item": np.zeros((30, 4))}},
        {"tensors": {"item": np.zeros((1, 4), np.float32), "item.rows": np.array([99], np.int32)}, "base": 0},
        {"tensors": {"item": np.zeros((1, 4), np.float32), "item.rows": np.array([1], np.int32)}},
        {"base": 7},
        {"clients": np.array([5])},
        {"clients": np.zeros(0, np.int64)},
        {"federation": "another"},
        {"stamp": "no"},
    ],
)
def test_a_bad_task_is_answered_and_changes_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    data = histories(2)
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30), data, [[0], [1]])
    transport = LocalTransport(nodes)
    one = coordinator_of(server, nodes, transport)
    one.round()
    before = held(nodes["n0"])
    good = TaskMessage.decode(transport.received[0][1])
    update = UpdateMessage.decode(nodes["n0"].answer(replace(good, round=9, **change).encode()))
    assert update.status in ("failed", "resync")
    assert held(nodes["n0"]) == before
    assert one.round()["clients"] == 2
    assert UpdateMessage.decode(nodes["n0"].answer(b"nonsense")).status == "failed"


def test_a_refusal_that_comes_again_and_again_is_told_once(tmp_path: Path) -> None:
    """A server that asks for the same wrong thing every second fills no disk."""
    data = histories(2)
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30), data, [[0], [1]])
    transport = LocalTransport(nodes)
    coordinator_of(server, nodes, transport).round()
    wrong = replace(TaskMessage.decode(transport.received[0][1]), federation="another").encode()
    log = nodes["n0"].place / "log.jsonl"
    for _ in range(50):
        nodes["n0"].answer(wrong)
    assert sum(line["event"] == "refused" for line in read_lines(log)) == 1
    nodes["n0"].answer(b"nonsense")  # another reason is another line
    nodes["n0"].answer(wrong)
    assert sum(line["event"] == "refused" for line in read_lines(log)) == 3


def test_a_node_that_always_asks_for_everything_is_refused(tmp_path: Path) -> None:
    data, clock = histories(2), Clock()
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30), data, [[0], [1]])

    class Greedy:
        def answer(self, content: bytes) -> bytes:
            task = TaskMessage.decode(content)
            return UpdateMessage(task.federation, task.round, task.attempt, "resync", -1).encode()

    transport = LocalTransport({**nodes, "n0": Greedy()})
    line = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep).round()
    assert (line["clients"], line["refused"], transport.count) == (1, 1, 2)
