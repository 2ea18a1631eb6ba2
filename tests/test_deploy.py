"""A real deployment on loopback: TLS, node keys, secure sums, the gate; what is refused; and nothing left behind."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import Done, descendants, run_command
from fleets import agreement_of, catalogue, histories

from fedmosaic.core.errors import RunError, SettingsError
from fedmosaic.core.files import is_locked, load_tensors, locked, read_lines
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy import fleet
from fedmosaic.deploy.admission import Request, asked, renewed
from fedmosaic.deploy.attend import attend
from fedmosaic.deploy.fleet import Link, ServerFolder
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.keys import make_authority
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.roster import LiveRoster, read_roster
from fedmosaic.deploy.serve import Serving, check_port, serve
from fedmosaic.testing import free_port

SINCE, DAY = 900_000_000, 86_400
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
    pids = [p.pid for p in started.running.values()]
    assert set(descendants(pids)) <= set(pids), "a program has started others"
    for process in started.running.values():
        process.send_signal(signal.SIGTERM)
    for process in started.running.values():
        process.wait(PATIENCE)


def request(address: str, authority: Path, path: str, method: str = "POST") -> int:
    context = ssl.create_default_context(cafile=str(authority))
    asked = urllib.request.Request(f"https://{address}{path}", data=b"" if method == "POST" else None, method=method)
    try:
        with urllib.request.urlopen(asked, context=context, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def times_of(data: TrainingSet, user: int) -> list[int]:
    """When a user met what it holds: day by day, in seconds as clocks have them."""
    return [SINCE + DAY * k + int(user) for k in range(len(data.histories[user]))]


def prepared(place: Path, nodes: dict[str, int], method: str = "fedmf", **more: Any) -> tuple[Path, str]:
    """Folders of a deployment whose nodes are let in, and hold their histories already."""
    data, address = histories(sum(nodes.values())), f"127.0.0.1:{free_port()}"
    agreement = agreement_of(method, data.n_items, **({"secure": True, "cohort": max(3, len(nodes))} | more))
    fleet.init(place, agreement, catalogue(data.n_items), nodes, Link(address))
    for name in nodes:
        clients = load_tensors(place / name / "clients.safetensors")[0]["client_ids"]
        met = [(u, i, t) for u in clients for i, t in zip(data.histories[u], times_of(data, u), strict=True)]
        rows = [(f"u{u}", f"i{i}", t) for u, i, t in met]
        take_history(place / name, pl.DataFrame(rows, schema=["user", "item", "time"], orient="row"))
    fleet.admit(place, [asked(place / name) for name in nodes])
    return place, address


def test_devices_and_silos_train_over_tls_through_the_gate(tmp_path: Path, programs: Programs) -> None:
    nodes = {"device-0": 1, "device-1": 1, "shop-a": 3, "shop-b": 3}
    place, address = prepared(tmp_path / "fleet", nodes, settings={"rounds": 3}, deadline=90.0)
    authority = place / "server" / "ca.crt"
    programs.start("server", "deploy", "server", place / "server", "--serve", "600")
    for name in nodes:
        programs.start(name, "deploy", "device" if nodes[name] == 1 else "silo", place / name)
    strangers(tmp_path, place, programs)
    programs.wait_for("server", "round 3: 8 clients of 4 nodes")
    for path in ("/health", "/docs", "/v1/control/list-runs", "/v1/fleet/../control/x", "/v1/fleet/%2e%2e/control/x"):
        assert request(address, authority, path) == 403, path
    assert request(address, authority, "/v1/fleet/get-fab") == 403  # code is neither given nor taken
    assert request(address, authority, "/v1/fleet/pull-messages") == 401
    assert request(address, authority, "/v1/fleet/pull-messages", "GET") == 403
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        request(address, _other_authority(tmp_path), "/v1/fleet/nothing")
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as line:  # no TLS
        line.sendall(b"GET /v1/fleet/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionError):
            assert not line.recv(100).startswith(b"HTTP/1.1 2")
    doors = listening([programs.running["server"].pid])
    assert list(doors.values()) == [int(port)]
    assert not listening([programs.running["stranger"].pid])  # a node listens on nothing
    programs.wait_for("stranger", "not let in: this node's key is not admitted here")
    programs.wait_for("deceived", "not let in: its certificate is not signed by this federation's authority")
    told = 0
    for name in nodes:
        assert programs.running[name].wait(PATIENCE) == 0, programs.said(name)
        assert "kB, masked, in a sum of 4 nodes" in programs.said(name)
        assert "all rounds are over" in programs.said(name)
        log = read_lines(place / name / "log.jsonl")
        assert [line["event"] for line in log] == ["sent", "opened"] * 3 + ["outcome"]
        told += sum(line.get("bytes", 0) for line in log)
    counted = sum(line["bytes_up"] for line in read_lines(place / "server" / "rounds.jsonl"))
    assert told == counted  # owners are told of every byte that the server counted
    done = subprocess.run(
        command("recommend", "--device", place / "device-0", "-k", "3", "--json"), capture_output=True, check=True
    )
    assert len(json.loads(done.stdout)) == 3
    assert b"answers rest on the model of round 3, taken " in done.stderr
    assert (place / "device-0" / "state.safetensors").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("method", ["ease", "mosaic"])
def test_closed_forms_over_tls_end_in_the_answers_of_the_simulator(
    method: str, tmp_path: Path, programs: Programs
) -> None:
    import numpy as np

    from fedmosaic.data.histories import Histories
    from fedmosaic.methods.closed_form import fit

    nodes = {"device-0": 1, "device-1": 1, "shop-a": 3, "shop-b": 3}
    agreed = {"now": SINCE + 10.0 * DAY, "span": 10.0 * DAY} if method == "mosaic" else {}
    place, _ = prepared(tmp_path / "fleet", nodes, method, deadline=90.0, settings=agreed)
    programs.start("server", "deploy", "server", place / "server")
    for name in nodes:
        programs.start(name, "deploy", "device" if nodes[name] == 1 else "silo", place / name)
    for name in ("server", *nodes):
        assert programs.running[name].wait(PATIENCE) == 0, programs.said(name)
    data, agreement = histories(8), ServerFolder(place / "server").agreement
    form: Any = agreement.build()
    held = Histories(data.histories, data.n_items, np.concatenate([times_of(data, u) for u in range(8)]))
    state = fit(form, held, seed=agreement.seed)
    scores = form.scores(state, held)
    assert method != "mosaic" or 0 < state["recent"].min(initial=1, where=state["events"] > 0) < 1
    for name, first in (("device-0", 0), ("device-1", 1), ("shop-a", 2), ("shop-b", 5)):
        for user in range(first, first + nodes[name]):
            unseen = np.setdiff1d(np.arange(data.n_items), data.histories[user])
            found = Node(place / name).recommender().score([f"u{user}"], [f"i{i}" for i in unseen])["score"]
            np.testing.assert_allclose(found.to_numpy(), scores[user][unseen], rtol=1e-5, atol=1e-6)


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
        shutil.copytree(place / "device-0", tmp_path / name, ignore=shutil.ignore_patterns("log.jsonl", "state*"))
    renewed(tmp_path / "stranger")
    shutil.copy(_other_authority(tmp_path), tmp_path / "deceived" / "ca.crt")
    for name in ("stranger", "deceived"):
        programs.start(name, "deploy", "device", tmp_path / name)


def _other_authority(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    if not folder.exists():
        folder.mkdir()
        make_authority(folder)
    return folder / "ca.crt"


def test_a_server_without_locks_is_refused(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1})
    (place / "server" / "server.crt").unlink()
    with pytest.raises(RunError, match=r"lacks server\.crt: a server without TLS and keys is refused"):
        serve(place / "server", Serving())
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


def test_folders_are_written_once_and_nodes_make_their_own_secrets(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1, "shop": 3})
    with pytest.raises(RunError, match="holds a deployment already"):
        prepared(place, {})
    with pytest.raises(RunError, match="exists already"):
        fleet.invite(place, {"shop": 1})
    for name, users in (("../x", 1), ("server", 1), ("shop2", 0)):
        with pytest.raises(SettingsError, match="a node needs a name"):
            fleet.invite(place, {name: users})
        with pytest.raises(SettingsError, match="a node needs a name"):
            prepared(tmp_path / "half", {"fine": 1, name: users})
        assert not (tmp_path / "half").exists()
    fleet.invite(place, {"late": 2})
    assert not (place / "late" / "node.key").exists()
    assert "late" not in read_roster(place / "server")
    fleet.admit(place, [asked(place / "late")])
    roster = read_roster(place / "server")
    clients = {n: m.clients.tolist() for n, m in roster.items()}
    assert clients == {"device-0": [0], "shop": [1, 2, 3], "late": [4, 5]}
    for name in roster:
        assert not (place / name / "ca.key").exists()
        for key in ("node.key", "sum.key"):
            assert (place / name / key).stat().st_mode & 0o077 == 0
            assert len({(place / n / key).read_bytes() for n in roster}) == 3
    assert (place / "server" / "ca.key").stat().st_mode & 0o077 == 0
    held = b"".join(path.read_bytes() for path in (place / "server").glob("*") if path.is_file())
    assert not any((place / n / k).read_bytes().strip() in held for n in roster for k in ("node.key", "sum.key"))


def test_who_is_let_in_and_put_out(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"phone": 1, "tablet": 1})
    live = LiveRoster(place / "server")
    first = asked(place / "phone")
    assert set(live()) == {"phone", "tablet"}
    fleet.admit(place, [first])  # again: nothing changes
    fleet.revoke(place, "phone")
    assert set(live()) == {"tablet"}  # at once, for a server that runs
    with pytest.raises(SettingsError, match="no node 'phone' is admitted; admitted are: tablet"):
        fleet.revoke(place, "phone")
    fleet.admit(place, [first])
    assert live()["phone"].party == 0
    second = renewed(place / "phone")
    assert (second.generation, second.key != first.key, second.sum != first.sum) == (1, True, True)
    fleet.admit(place, [second])
    assert live()["phone"].party == 2**32
    with pytest.raises(SettingsError, match=r"was admitted with other keys; .* shows generation 2 or later"):
        fleet.admit(place, [first])


def test_a_request_is_refused_unless_its_own_key_signed_it(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"phone": 1, "tablet": 1})
    good = json.loads((place / "phone" / "request.json").read_text())
    other = json.loads((place / "tablet" / "request.json").read_text())
    file = tmp_path / "brought.json"
    for name in ("node", "generation", "sum", "key"):
        file.write_text(json.dumps({**good, name: 5 if name == "generation" else other[name]}))
        with pytest.raises(SettingsError, match="was altered: it is not signed by the key it shows"):
            Request.read(file)
    odd: list[Any] = [[], {}, {**good, "more": 1}, {**good, "generation": True}]
    for bad in odd:
        file.write_text(json.dumps(bad))
        with pytest.raises(SettingsError, match="is no request of a node"):
            Request.read(file)
    elsewhere, _ = prepared(tmp_path / "other", {"phone": 1}, settings={"dim": 5})
    with pytest.raises(SettingsError, match="belongs to another federation"):
        fleet.admit(elsewhere, [Request.read(place / "phone")])
    third, _ = prepared(tmp_path / "third", {"laptop": 1})
    with pytest.raises(SettingsError, match="no node 'phone' was invited here; invited are: laptop"):
        fleet.admit(third, [Request.read(place / "phone")])


def test_one_node_at_a_time_in_a_folder(tmp_path: Path) -> None:
    place, _ = prepared(tmp_path / "fleet", {"device-0": 1})
    with locked(place / "device-0", "node"), pytest.raises(RunError, match="another node is at work in"):
        attend(place / "device-0")
    with locked(place / "server", "server"):
        assert is_locked(place / "server")
    assert not is_locked(place / "server")


def test_the_command_prepares_folders(tmp_path: Path) -> None:
    def call(*words: object) -> Done:
        return run_command(*map(str, words))

    catalogue(5).write_csv(tmp_path / "items.csv")
    words = ("deploy", "init", tmp_path / "f", "--method", "pfedrec", "--items", tmp_path / "items.csv")
    more = ("--devices", 1, "--silos", "shop=3", "--set", "dim=4", "--set", "least=2")
    assert call(*words, *more).code == 0
    agreement = ServerFolder(tmp_path / "f" / "server").agreement
    assert (agreement.method, agreement.method_settings, agreement.least) == ("pfedrec", {"dim": 4}, 2)
    told = json.loads(call("deploy", "status", tmp_path / "f" / "server", "--json").out)
    assert (told["nodes invited"], told["nodes"], told["uploads"]) == (2, 0, "masked")
    request = tmp_path / "f" / "device-0" / "request.json"
    assert f"bring {request} to the operator" in call("deploy", "keys", tmp_path / "f" / "device-0").out
    assert "device-0 is admitted" in call("deploy", "admit", tmp_path / "f", request).out
    assert json.loads(call("deploy", "status", tmp_path / "f" / "server", "--json").out)["clients"] == 1
    assert "keys of generation 1" in call("deploy", "renew", tmp_path / "f" / "device-0").out
    assert "device-0 is out" in call("deploy", "revoke", tmp_path / "f", "device-0").out
    assert "nodes need nothing new" in call("deploy", "renew", tmp_path / "f" / "server").out
    assert "not yet" in call("deploy", "status", tmp_path / "f" / "device-0").out
    assert "holds no history yet" in call("deploy", "device", tmp_path / "f" / "device-0").err
    assert "has not met" in _with_history(tmp_path, call).err
    bad = call(*words[:2], tmp_path / "g", *words[3:], "--set", "dimm=4")
    assert bad.code == 2
    assert "dimm" in bad.err
    assert "NAME=USERS" in call(*words[:2], tmp_path / "g", *words[3:], "--silos", "shop").err
    assert not (tmp_path / "g").exists()
    assert "carry it to its owner" in call("deploy", "invite", tmp_path / "f", "late").out
    assert not (tmp_path / "f" / "late" / "node.key").exists()


def _with_history(tmp_path: Path, call: Callable[..., Done]) -> Done:
    take_history(tmp_path / "f" / "device-0", {"item": ["i1", "i3"]}, user=None)
    return call("recommend", "--device", tmp_path / "f" / "device-0")
