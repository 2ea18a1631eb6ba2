"""A real deployment on loopback: TLS, node keys, the gate; what is refused; and nothing left behind."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import Done, run_command
from fleets import agreement_of, catalogue, histories
from flwr.serverapp import ServerApp

from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import is_locked, load_tensors, locked
from fedmosaic.deploy import fleet, flower
from fedmosaic.deploy import serve as serving
from fedmosaic.deploy.fleet import Link, ServerFolder
from fedmosaic.deploy.keys import make_authority, make_node_key
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.processes import Processes, check_port, descendants, end_leftovers, free_port, program
from fedmosaic.deploy.serve import attend, serve

PATIENCE = 300.0  # seconds; a loaded machine is slow, not wrong


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedmosaic", *map(str, words)]


class Programs:
    """Commands in the background, all ended at the end."""

    def __init__(self, place: Path) -> None:
        self.place, self.running = place, dict[str, subprocess.Popen[bytes]]()

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with (self.place / f"{name}.out").open("wb") as stream:
            self.running[name] = subprocess.Popen(command(*words), stdout=stream, stderr=subprocess.STDOUT)
        return self.running[name]

    def said(self, name: str) -> str:
        return (self.place / f"{name}.out").read_text()

    def wait_for(self, name: str, text: str) -> None:
        until = time.monotonic() + PATIENCE
        while text not in self.said(name):
            assert time.monotonic() < until, f"{name} did not say {text!r}: {self.said(name)}"
            assert self.running[name].poll() is None, self.said(name)
            time.sleep(0.2)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    started = Programs(tmp_path)
    yield started
    pids = descendants([p.pid for p in started.running.values()])
    for process in started.running.values():
        process.send_signal(signal.SIGTERM)
    for process in started.running.values():
        process.wait(PATIENCE)
    until = time.monotonic() + PATIENCE
    while left := set(pids.items()) & set(descendants(list(pids)).items()):
        assert time.monotonic() < until, f"processes are left: {left}"
        time.sleep(0.2)


def request(address: str, authority: Path, path: str) -> int:
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(f"https://{address}{path}", context=context, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def prepared(place: Path, nodes: dict[str, int], **more: Any) -> tuple[Path, str]:
    """Folders of a deployment whose nodes hold their histories already."""
    data, address = histories(sum(nodes.values())), f"127.0.0.1:{free_port()}"
    fleet.init(place, agreement_of("fedmf", data.n_items, **more), catalogue(data.n_items), nodes, Link(address))
    for name in nodes:
        clients = load_tensors(place / name / "clients.safetensors")[0]["client_ids"]
        pairs = [(f"u{u}", f"i{i}") for u in clients for i in data.histories[u]]
        Node.take_history(place / name, pl.DataFrame(pairs, schema=["user", "item"], orient="row"))
    return place, address


@pytest.mark.slow
def test_two_devices_train_over_tls_through_the_gate(tmp_path: Path, programs: Programs) -> None:
    place, address = prepared(
        tmp_path / "fleet", {"device-0": 1, "device-1": 1}, settings={"rounds": 2}, least=2, deadline=90.0
    )
    authority = place / "server" / "ca.crt"
    programs.start("server", "deploy", "server", place / "server", "--serve", "600")
    for name in ("device-0", "device-1"):
        programs.start(name, "deploy", "device", place / name)
    programs.wait_for("server", "round 2: 2 clients of 2 nodes")
    strangers(tmp_path, place, programs)
    for path in ("/health", "/docs", "/v1/control/list-runs", "/v1/fleet/../control/x", "/v1/fleet/%2e%2e/control/x"):
        assert request(address, authority, path) == 403, path
    assert request(address, authority, "/v1/fleet/nothing") == 404  # what nodes need goes through
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        request(address, _other_authority(tmp_path), "/v1/fleet/nothing")
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as line:  # no TLS
        line.sendall(b"GET /v1/fleet/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not line.recv(100).startswith(b"HTTP/1.1 2")
    doors = listening([p.pid for p in programs.running.values()])
    assert int(port) in doors.values()
    assert len(doors) >= 3  # gate, server, nodes
    assert set(doors) <= {f"0100007F:{number:04X}" for number in doors.values()}, doors  # all of them on 127.0.0.1
    programs.wait_for("stranger", "not admitted there")
    programs.wait_for("deceived", "not signed by this federation's authority")
    until = time.monotonic() + PATIENCE
    while Node(place / "device-0").meta["version"] != 2:
        assert time.monotonic() < until, "the outcome did not reach the device"
        time.sleep(0.5)
    done = subprocess.run(
        command("recommend", "--device", place / "device-0", "-k", "3", "--json"), capture_output=True, check=True
    )
    assert len(json.loads(done.stdout)) == 3
    assert (place / "device-0" / "state.safetensors").stat().st_mode & 0o077 == 0


def listening(parents: list[int]) -> dict[str, int]:
    """Addresses (as the kernel writes them) that some processes and their descendants listen on, and the ports."""
    inodes = set()
    for pid in descendants(parents):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(str(link.readlink()))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found[words[1]] = int(words[1].split(":")[1], 16)
    return found


def strangers(tmp_path: Path, place: Path, programs: Programs) -> None:
    """A node whose key nobody admitted, and one that trusts another authority."""
    for name in ("stranger", "deceived"):
        shutil.copytree(place / "device-0", tmp_path / name, ignore=shutil.ignore_patterns("processes.json", "logs"))
    make_node_key(tmp_path / "stranger")
    shutil.copy(_other_authority(tmp_path), tmp_path / "deceived" / "ca.crt")
    for name in ("stranger", "deceived"):
        programs.start(name, "deploy", "device", tmp_path / name)


def _other_authority(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    if not folder.exists():
        folder.mkdir()
        make_authority(folder)
    return folder / "ca.crt"


def test_the_apps_that_flower_is_given_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower imports them in a process of its own, far from here."""
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1})
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(serving, "_flwr", lambda _, *words: called.append(words))
    with Processes(tmp_path) as processes:
        serving._submit(ServerFolder(place / "server"), processes, "a token", 5.0)
    app = place / "server" / "app"
    found = {name: runpy.run_path(str(app / f"{name}.py"))["app"] for name in ("server_app", "client_app")}
    assert found["client_app"] is flower.client_app
    assert isinstance(found["server_app"], ServerApp)
    assert called[0][:2] == ("run", str(app))
    components = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "server_app:app", "clientapp": "client_app:app"}


def test_a_server_without_locks_is_refused(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1})
    (place / "server" / "server.crt").unlink()
    with pytest.raises(RunError, match=r"lacks server\.crt: a server without TLS, keys and gate is refused"):
        serve(place / "server")
    with pytest.raises(SettingsError, match="host:port"):
        Link("example.org")
    assert (Link("example.org:443").host, Link("[::1]:443").host) == ("example.org", "::1")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        port = door.getsockname()[1]
        with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            check_port("127.0.0.1", port)


def test_a_free_port_is_none_that_an_outgoing_connection_may_take() -> None:
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(ephemeral.read_text().split()[0]) if ephemeral.is_file() else 49_152
    for _ in range(20):
        port = free_port()
        assert 1023 < port < first
        check_port("127.0.0.1", port)


def test_folders_are_written_once_and_hold_their_own_secrets(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1, "shop": 3})
    with pytest.raises(RunError, match="holds a deployment already"):
        prepared(place, {})
    with pytest.raises(RunError, match="exists already"):
        fleet.admit(place, "shop")
    for name, users in (("../x", 1), ("server", 1), ("shop2", 0)):
        with pytest.raises(SettingsError, match="a node needs a name"):
            fleet.admit(place, name, users)
        with pytest.raises(SettingsError, match="a node needs a name"):
            prepared(tmp_path / "half", {"fine": 1, name: users})
        assert not (tmp_path / "half").exists()
    fleet.admit(place, "late", 2)
    roster = ServerFolder(place / "server").roster()
    assert {n: v.tolist() for n, v in roster.items()} == {"device-0": [0], "shop": [1, 2, 3], "late": [4, 5]}
    for name in ("device-0", "shop", "late"):
        assert not (place / name / "ca.key").exists()
        assert (place / name / "node.key").stat().st_mode & 0o077 == 0
    assert (place / "server" / "ca.key").stat().st_mode & 0o077 == 0
    assert len({(place / n / "node.key").read_bytes() for n in roster}) == 3


def test_a_server_that_died_while_registering_begins_anew(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1, "device-1": 1})
    folder = ServerFolder(place / "server")
    (folder.place / "flower.db").touch()
    folder.remember({"device-0": 7})
    with pytest.raises(KeyError), folder.registering():
        folder.remember({"nobody": 9})
    folder.forget_half_registered()
    assert folder.flower_ids() == {}
    assert not (folder.place / "flower.db").exists()
    with folder.registering():
        folder.remember({"device-0": 7, "device-1": 8})
    folder.forget_half_registered()
    assert folder.flower_ids() == {7: "device-0", 8: "device-1"}


def test_one_node_at_a_time_in_a_folder(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1})
    with locked(place / "device-0", "node"), pytest.raises(RunError, match="another node is at work in"):
        attend(place / "device-0")
    with locked(place / "server", "server"):
        assert is_locked(place / "server")
    assert not is_locked(place / "server")


def test_a_process_that_only_has_the_number_of_an_old_one_is_spared(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "processes.json").write_text(json.dumps({str(os.getpid()): "another-0"}))
    assert end_leftovers(tmp_path) == 0
    assert child.poll() is None
    child.kill()
    child.wait()


def test_programs_that_a_killed_parent_left_are_ended(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from fedmosaic.deploy.processes import Processes\n"
        f"p = Processes(Path({str(tmp_path)!r}))\n"
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)'\n"
        "p.start('sleeper', [sys.executable, '-c', code])\n"
        "while '1' not in p.said('sleeper'): time.sleep(0.05)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    noted = json.loads((tmp_path / "processes.json").read_text())
    assert all(descendants([int(pid)]) for pid in noted)
    assert end_leftovers(tmp_path) == len(noted) >= 1
    until = time.monotonic() + PATIENCE
    while any(_alive(int(pid)) for pid in noted):
        assert time.monotonic() < until, "a program that was ended is still there"
        time.sleep(0.05)
    assert end_leftovers(tmp_path) == 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_programs_end_with_their_owner(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("sleeper", [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
        pid = processes.children["sleeper"].pid
        assert processes.ended("sleeper") is None
    assert not _alive(pid)
    assert not (tmp_path / "processes.json").exists()
    with pytest.raises(RunError, match="no-such-program is not installed"):
        program("no-such-program")


def test_the_command_prepares_folders(tmp_path: Path) -> None:
    def call(*words: object) -> Done:
        return run_command(*map(str, words))

    catalogue(5).write_csv(tmp_path / "items.csv")
    words = ("deploy", "init", tmp_path / "f", "--method", "pfedrec", "--items", tmp_path / "items.csv")
    more = ("--devices", 1, "--silos", "shop=3", "--set", "dim=4", "--set", "least=2")
    assert call(*words, *more).code == 0
    agreement = ServerFolder(tmp_path / "f" / "server").agreement
    assert (agreement.method, agreement.method_settings, agreement.least) == ("pfedrec", {"dim": 4}, 2)
    assert json.loads(call("deploy", "status", tmp_path / "f" / "server", "--json").out)["clients"] == 4
    assert "not yet" in call("deploy", "status", tmp_path / "f" / "device-0").out
    assert "holds no history yet" in call("deploy", "device", tmp_path / "f" / "device-0").err
    assert "has not met" in _with_history(tmp_path, call).err
    bad = call(*words[:2], tmp_path / "g", *words[3:], "--set", "dimm=4")
    assert bad.code == 2
    assert "dimm" in bad.err
    assert "NAME=USERS" in call(*words[:2], tmp_path / "g", *words[3:], "--silos", "shop").err
    assert not (tmp_path / "g").exists()
    assert call("deploy", "admit", tmp_path / "f", "late").code == 0
    assert (tmp_path / "f" / "late" / "node.key").is_file()


def _with_history(tmp_path: Path, call: Callable[..., Done]) -> Done:
    Node.take_history(tmp_path / "f" / "device-0", {"item": ["i1", "i3"]}, user=None)
    return call("recommend", "--device", tmp_path / "f" / "device-0")
