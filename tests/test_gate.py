"""The gate under attack: silent lines, large bodies, long heads, strange keys, other clocks; nobody is locked out."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.files import write_json
from fedmosaic.deploy import flower
from fedmosaic.deploy import gate as gates
from fedmosaic.deploy.flower import AwayError, FleetLine, NotLetInError, Packet, digest
from fedmosaic.deploy.gate import Gate, opened
from fedmosaic.deploy.keys import CA, NODE_KEY, make_authority, make_certificate, make_node_keys, public_keys
from fedmosaic.deploy.mailbox import GRACE, THERE, Mailbox
from fedmosaic.deploy.protocol import Reply
from fedmosaic.deploy.roster import ROSTER, LiveRoster
from fedmosaic.testing import Clock, free_port

PATIENCE = 60.0


class Door:
    """A gate that is open, with two nodes that are let in."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        make_authority(place)
        make_certificate(place, ["127.0.0.1"])
        for name in ("a", "b", "stranger"):
            (place / name).mkdir()
            make_node_keys(place / name)
        self.admit("a", "b")
        roster = LiveRoster(place)
        self.box = Mailbox(roster)
        self.gate = Gate(self.box, roster)

    def admit(self, *names: str) -> None:
        entries = {
            name: {"first": k, "users": 1, "generation": 0, "out": False, **public_keys(self.place / name)}
            for k, name in enumerate(names)
        }
        write_json(self.place / ROSTER, entries)

    def line(self, name: str = "a") -> FleetLine:
        return FleetLine(f"127.0.0.1:{self.port}", self.place / CA, self.place / name / NODE_KEY)

    def raw(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.place / CA))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture(autouse=True)
def another_default_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's and others' imports may set one, whose transports are of other types."""
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: pytest.fail("the gate has a loop of its own"))


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    one = Door(tmp_path)
    with opened(one.gate, tmp_path, "127.0.0.1", one.port):
        yield one


def until(found: Callable[[], Any]) -> Any:
    """What comes within a while."""
    end = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return value


def talked(door: Door, line: FleetLine, content: bytes = b"a task") -> bytes:
    """One message to a node and its answer, over the line."""
    name = door.box.send("a", content, PATIENCE)
    found = line.receive()
    assert found == (name, content)
    line.send(name, b"an answer to " + content)
    replies: list[Reply] = until(door.box.receive)
    assert replies[0].message == name
    assert replies[0].content is not None
    return replies[0].content


def test_messages_go_there_and_back_in_parts(door: Door) -> None:
    with door.line() as line:
        line.join()
        assert talked(door, line) == b"an answer to a task"
        large = bytes(range(256)) * (3 * flower.PART // 256) + b"end"
        assert talked(door, line, large) == b"an answer to " + large
        assert door.box.nodes() == ["a"]
    until(lambda: door.box.nodes() == [])  # it said that it goes


def test_an_answer_that_was_cut_goes_on_with_the_part_it_had_come_to(door: Door) -> None:
    content = bytes(3 * flower.PART) + b"end"
    packet = Packet.of("x", content)
    assert len(set(packet.order)) == 2  # parts that are alike are sent once
    with door.line() as line:
        line.join()
        name = door.box.send("a", b"a task", PATIENCE)
        assert door.box.answer("a", name, packet.order) == list(dict.fromkeys(packet.order))
        assert door.box.take("a", packet.order[0], packet.parts[packet.order[0]])
        assert line.receive() is not None  # the node has died, and is asked again
        line.send(name, content)
        assert until(door.box.receive)[0].content == content
        sent = door.gate.calls["push-object"]
    assert sent == 1


def test_who_is_not_admitted_is_told_so_and_who_is_put_out_is_out(door: Door) -> None:
    with door.line("stranger") as line, pytest.raises(NotLetInError, match="this node's key is not admitted here"):
        line.join()
    with door.line("b") as line:
        line.join()
        door.admit("a")
        with pytest.raises(NotLetInError, match="is not admitted here"):
            line.join()
        door.admit("a", "b")
        line.join()


def test_a_clock_that_is_an_hour_off_keeps_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for hours in (-1, 1):

        class Skewed(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + timedelta(hours=hours)  # noqa: B023

        with door.line() as line, monkeypatch.context() as patch:
            patch.setattr(flower, "datetime", Skewed)
            line.join()
            assert talked(door, line) == b"an answer to a task"


def test_seventy_lines_that_say_nothing_keep_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "SILENCE", 1.0)
    with ExitStack() as stack:
        held = []
        for _ in range(70):
            with suppress(OSError):
                held.append(stack.enter_context(door.raw()))
        assert len(door.gate.lines.keys) <= gates.STRANGERS
        with pytest.raises(AwayError), door.line() as line:  # this address has too many: its nodes try again
            line.join()
        until(lambda: not door.gate.lines.strangers)  # all were cut
        with door.line() as line:
            line.join()
            assert talked(door, line) == b"an answer to a task"
    assert door.gate.lines.refused["silent"] >= 1
    assert door.gate.lines.refused["too many lines"] >= 70 - gates.STRANGERS


def head(door: Door, path: str, length: int, name: str | None = None, extra: str = "") -> bytes:
    """The head of a request, signed by a node or by nobody."""
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", extra]
    if name is not None:
        key = serialization.load_ssh_private_key((door.place / name / NODE_KEY).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        pem, now = key.public_key().public_bytes(serialization.Encoding.PEM, form), datetime.now(UTC).isoformat()
        signature = key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
        lines += [
            f"{flower.KEY_HEADER}: {b64encode(pem).decode()}", f"{flower.TIME_HEADER}: {now}",
            f"{flower.SIGNED_HEADER}: {b64encode(signature).decode()}",
        ]  # fmt: skip
    return ("\r\n".join(line for line in lines if line) + "\r\n\r\n").encode()


def answer(line: ssl.SSLSocket, content: bytes, body: int = 0) -> tuple[bytes, int]:
    """The first line of the answer to a request, and how many bytes of its body were taken before."""
    sent = 0
    with suppress(OSError):
        line.sendall(content)
        while sent < body:
            line.sendall(bytes(1 << 16))
            sent += 1 << 16
    try:
        return line.recv(64).split(b"\r\n")[0], sent
    except OSError:
        return b"cut", sent


@pytest.mark.parametrize(("name", "status"), [(None, b"401"), ("stranger", b"401"), ("a", b"413")])
def test_large_bodies_are_not_taken(door: Door, name: str | None, status: bytes) -> None:
    for _ in range(3):
        with door.raw() as line:
            size = 200 << 20
            found, sent = answer(line, head(door, "/v1/fleet/push-object", size, name), size)
            assert status in found or found in (b"", b"cut")
            assert sent < 32 << 20  # what lies in buffers on the way; the rest was never read
    with door.line() as line_of_a:
        line_of_a.join()
        assert talked(door, line_of_a) == b"an answer to a task"


def test_a_head_of_32_megabytes_is_cut(door: Door) -> None:
    with door.raw() as line:
        content = head(door, "/v1/fleet/pull-messages", 0, None, "x-long: " + "a" * (32 << 20))
        found, _ = answer(line, content)
        assert b"400" in found or b"431" in found or found in (b"", b"cut")
    with door.line() as other:
        other.join()


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/fleet/get-fab", "POST", b"403"),
        ("/v1/fleet/push-messages", "GET", b"403"),
        ("/v1/fleet/../control/start-run", "POST", b"403"),
        ("/v1/fleet/pull%2Dmessages", "POST", b"403"),
        ("/", "POST", b"403"),
    ],
)
def test_nothing_but_the_calls_of_nodes_goes_through(door: Door, path: str, method: str, status: bytes) -> None:
    with door.raw() as line:
        found, _ = answer(line, head(door, path, 0, "a").replace(b"POST", method.encode(), 1))
        assert status in found


def test_a_body_that_is_no_request_is_refused(door: Door) -> None:
    with door.raw() as line:
        found, _ = answer(line, head(door, "/v1/fleet/push-messages", 65_536, "a"), 65_536)
        assert b"400" in found


def test_a_signature_over_another_time_is_refused(door: Door) -> None:
    with door.raw() as line:
        good = head(door, "/v1/fleet/activate-node", 0, "a").decode()
        old = next(text for text in good.splitlines() if text.startswith(flower.TIME_HEADER))
        later = f"{flower.TIME_HEADER}: {(datetime.now(UTC) + timedelta(seconds=2)).isoformat()}"
        found, _ = answer(line, good.replace(old, later).encode())
        assert b"401" in found


def test_a_node_whose_line_was_cut_is_known_to_be_gone() -> None:
    clock = Clock()
    box = Mailbox(lambda: {"a"}, clock)
    box.came("a")
    clock.sleep(THERE - 1)
    assert box.nodes() == ["a"]
    box.came("a")
    box.cut("a")
    clock.sleep(GRACE / 2)
    assert box.nodes() == ["a"]  # it may call again at once
    clock.sleep(GRACE)
    assert box.nodes() == []
    box.came("a", held=1)
    clock.sleep(10 * THERE)
    assert box.nodes() == ["a"]  # its call is held


def test_messages_that_nobody_answered_in_time_are_forgotten() -> None:
    clock = Clock()
    box = Mailbox(lambda: {"a"}, clock)
    name = box.send("a", b"a task", 10.0)
    assert box.answer("a", "another", (digest(b"x"),)) is None
    with pytest.raises(ValueError, match="named by their digests"):
        box.answer("a", name, ("../etc/passwd",))
    assert box.answer("a", name, (digest(b"x"),)) == [digest(b"x")]
    assert not box.take("a", digest(b"x"), b"y")  # not what its name says
    assert not box.take("b", digest(b"x"), b"x")  # nobody asked b
    clock.sleep(11.0)
    assert box.receive() == []
    assert not box.take("a", digest(b"x"), b"x")


def test_another_flower_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "version", lambda name: "2.0.1")
    with pytest.raises(SettingsError, match=r"Flower 2\.0\.1 is installed; this version of fedmosaic knows"):
        flower.check_version()


def test_whose_a_line_is_does_not_follow_from_what_is_said_in_it(door: Door) -> None:
    """A header that a proxy would write lets nobody speak on a line of somebody else's."""
    with door.line() as line:
        line.join()
        where = next(at for at, key in door.gate.lines.keys.items() if key is not None)
        with door.raw() as stranger:
            told = head(door, "/v1/fleet/deactivate-node", 0, "a", f"x-forwarded-for: {where[0]}:{where[1]}")
            lines = told.decode().split("\r\n")
            forged = [f"{flower.SIGNED_HEADER}: AAAA" if one.startswith(flower.SIGNED_HEADER) else one for one in lines]
            found, _ = answer(stranger, "\r\n".join(forged).encode())
            assert b"401" in found
        assert door.box.nodes() == ["a"]


def test_a_node_holds_few_lines(door: Door) -> None:
    with ExitStack() as stack:
        found = []
        for _ in range(gates.OF_A_NODE + 3):
            raw = stack.enter_context(door.raw())
            found.append(answer(raw, head(door, "/v1/fleet/send-node-heartbeat", 0, "a"))[0])
        assert sum(b"200" in one for one in found) == gates.OF_A_NODE
        assert sum(b"429" in one for one in found) == 3


def test_an_answer_that_names_one_part_again_and_again_is_refused(door: Door) -> None:
    name = door.box.send("a", b"a task", PATIENCE)
    with pytest.raises(ValueError, match="again and again"):
        door.box.answer("a", name, ("a" * 64,) * 400)
