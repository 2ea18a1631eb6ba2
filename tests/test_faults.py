"""Power cuts, full disks and damaged files of a deployment: what happened is said, nothing is lost, all goes on."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleets import agreement_of, coordinator_of, finished, held, histories, make_fleet

from fedmosaic.core.errors import FedmosaicError, RunError
from fedmosaic.deploy import attend as attending
from fedmosaic.deploy.attend import attend
from fedmosaic.deploy.gate import Gate, opened
from fedmosaic.deploy.keys import NODE_KEY, SUM_KEY
from fedmosaic.deploy.mailbox import Mailbox
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.protocol import UpdateMessage, kind_of
from fedmosaic.deploy.roster import ROSTER, LiveRoster
from fedmosaic.testing import Clock, LocalTransport, free_port


class PowerCutError(BaseException):
    """Nothing catches it: the process is gone."""


class Fragile(LocalTransport):
    """One node dies in some phase of one message, once; it comes back and is handed the message again."""

    def __init__(self, nodes: dict[str, Any], kind: str, phase: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__(nodes)
        self.kind, self.phase, self.patch, self.cuts = kind, phase, patch, 0

    def send(self, node: str, content: bytes, seconds: float) -> str:
        if node == "n1" and kind_of(content) == self.kind and not self.cuts and self.count > 6:
            self.cuts += 1
            with self.patch.context() as patch:
                one: Node = self.members[node]
                if self.phase == "at work":
                    patch.setattr(one.work.__class__, "contribute", cut)
                    patch.setattr(one.sums, "opened", cut)
                elif self.phase == "before it is on disk":
                    patch.setattr(Path, "replace", cut)
                else:
                    patch.setattr(one, "_tell", cut)
                with pytest.raises(PowerCutError):
                    one.answer(content)
            self.members[node] = Node(one.place)
        return super().send(node, content, seconds)


def cut(*_: Any, **__: Any) -> Any:
    raise PowerCutError


@pytest.mark.parametrize("kind", ["task", "reveal"])
@pytest.mark.parametrize("phase", ["at work", "before it is on disk", "before it is sent"])
def test_a_node_that_dies_in_any_phase_of_a_sum_comes_back_to_the_same_bytes(
    kind: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, agreement, ends = histories(5), agreement_of("pfedrec", 30, secure=True), []
    for broken in (False, True):
        place = tmp_path / str(broken)
        server, nodes = make_fleet(place, agreement, data, [[u] for u in range(5)])
        transport = Fragile(nodes, kind if broken else "nothing", phase, monkeypatch)
        one = coordinator_of(server, nodes, transport)
        one.run()
        one.share()
        assert transport.cuts == broken
        states = {
            n: {k: v for k, v in held(node).items() if "letters" not in k} for n, node in transport.members.items()
        }
        ends.append((finished(server), states))
    assert ends[0] == ends[1]


def full(path: Path) -> Callable[..., Any]:
    """`tempfile.mkstemp` on a machine whose disk is full for everything in a folder."""
    made = tempfile.mkstemp

    def mkstemp(prefix: str, dir: Path) -> tuple[int, str]:
        if Path(dir).is_relative_to(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return made(prefix=prefix, dir=dir)

    return mkstemp


def test_a_full_disk_on_a_node_costs_its_answer_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = agreement_of("fedmf", 30, secure=True, deadline=5.0)
    server, nodes = make_fleet(tmp_path, agreement, histories(6), [[u] for u in range(6)])
    clock = Clock()
    one = coordinator_of(server, nodes, LocalTransport(nodes), clock=clock, sleep=clock.sleep)
    one.round()
    before = (tmp_path / "n0" / "state.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full(tmp_path / "n0"))
        line = one.round()
    assert (line["clients"], line["refused"]) == (5, 1)
    assert "state.safetensors cannot be written: No space left on device" in (server / "refused.jsonl").read_text()
    assert (tmp_path / "n0" / "state.safetensors").read_bytes() == before
    assert one.round()["clients"] == 6


@pytest.mark.parametrize("method", ["fedmf", "ease"])
def test_a_full_disk_on_the_server_ends_it_and_it_goes_on_later(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for broken in (False, True):
        server, nodes = make_fleet(
            tmp_path / str(broken), agreement_of(method, 30, secure=True), histories(5), [[u] for u in range(5)]
        )
        if broken:
            with monkeypatch.context() as patch:
                patch.setattr(tempfile, "mkstemp", full(server))
                with pytest.raises(RunError, match="cannot be written: No space left on device"):
                    coordinator_of(server, nodes, LocalTransport(nodes)).run()
        coordinator_of(server, nodes, LocalTransport(nodes)).run()
        ends.append(finished(server))
    assert ends[0] == ends[1]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda b: b[: len(b) // 2],
    "not text": lambda b: b"\xff\xfe\x00" + b[: len(b) // 2] + b"\xff\xfeAAAA" + b[len(b) // 2 :],
    "empty": lambda b: b"",
}


def named(file: str) -> str:
    """An agreement that was cut short may still be one: then the state beside it belongs to another federation."""
    return file.replace(".", r"\.") + ("|belongs to another" if file == "federation.toml" else "")


@pytest.mark.parametrize("how", list(DAMAGE))
@pytest.mark.parametrize(
    "name",
    [
        "federation.toml", "items.parquet", "history.parquet", "users.json", "clients.safetensors", "state.safetensors",
        "pinned.json", "request.json", NODE_KEY, SUM_KEY, "link.toml", "ca.crt",
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_node_is_named(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = agreement_of("fedmf", 30, secure=True)
    server, nodes = make_fleet(tmp_path, agreement, histories(4), [[u] for u in range(4)])
    coordinator_of(server, nodes, LocalTransport(nodes)).round()
    place = nodes["n0"].place
    from fedmosaic.deploy.fleet import Link
    from fedmosaic.deploy.keys import make_authority

    Link(f"127.0.0.1:{free_port()}").write(place)
    make_authority(place)
    file = place / name
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    monkeypatch.setattr(attending, "answer_tasks", lambda *_: pytest.fail("it was not noticed"))
    with pytest.raises(FedmosaicError, match=named(name)):
        attend(place)


@pytest.mark.parametrize("how", list(DAMAGE))
@pytest.mark.parametrize("name", ["server.safetensors", "sum.safetensors", ROSTER, "federation.toml"])
def test_a_damaged_file_of_the_server_is_named(name: str, how: str, tmp_path: Path) -> None:
    from fedmosaic.core.files import write_json
    from fedmosaic.deploy.admission import asked

    agreement = agreement_of("fedmf", 30, secure=True)
    server, nodes = make_fleet(tmp_path, agreement, histories(4), [[u] for u in range(4)])
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    one.round()
    shutil.copy(server / "server.safetensors", server / "sum.safetensors")
    entries = {
        name: {"first": k, "users": 1, "generation": 0, "key": r.key, "sum": r.sum, "out": False}
        for k, (name, r) in enumerate((n, asked(node.place)) for n, node in nodes.items())
    }
    write_json(server / ROSTER, entries)
    (server / name).write_bytes(DAMAGE[how]((server / name).read_bytes()))

    def started() -> None:
        LiveRoster(server)()
        coordinator_of(server, nodes, LocalTransport(nodes)).round()

    with pytest.raises(FedmosaicError, match=named(name)):
        started()


def test_a_damaged_certificate_of_the_server_is_named(tmp_path: Path) -> None:
    from fedmosaic.deploy.keys import make_authority, make_certificate

    make_authority(tmp_path)
    make_certificate(tmp_path, ["127.0.0.1"])
    (tmp_path / "server.crt").write_bytes(b"\xff")
    (tmp_path / ROSTER).write_text("{}")
    roster = LiveRoster(tmp_path)
    gate = Gate(Mailbox(roster), roster)
    with (
        pytest.raises(RunError, match=r"server\.crt or server\.key is damaged"),
        opened(gate, tmp_path, "127.0.0.1", 1),
    ):
        pass


def test_another_nodes_state_is_refused_by_name(tmp_path: Path) -> None:
    agreement = agreement_of("fedmf", 30, secure=True)
    server, nodes = make_fleet(tmp_path, agreement, histories(4), [[u] for u in range(4)])
    coordinator_of(server, nodes, LocalTransport(nodes)).round()
    shutil.copy(tmp_path / "n1" / "state.safetensors", tmp_path / "n0" / "state.safetensors")
    with pytest.raises(FedmosaicError, match=r"state\.safetensors belongs to another node or federation"):
        Node(tmp_path / "n0")


def test_a_message_that_is_no_message_is_answered(tmp_path: Path) -> None:
    _, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30, secure=True), histories(3), [[0], [1], [2]])
    for content in (b"", b"\xff" * 100, b"import os", os.urandom(10_000), (1 << 60).to_bytes(8, "little") + b"{}"):
        told = UpdateMessage.decode(nodes["n0"].answer(content))
        assert (told.status, told.detail.partition(":")[0]) == ("failed", "damaged")
