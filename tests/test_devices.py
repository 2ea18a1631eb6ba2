"""Devices: the same algorithms over messages; what leaves a device, what counts, and what survives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import (
    NEEDS_TORCH,
    SMALL,
    OneHot,
    agreement_of,
    catalogue,
    coordinator_of,
    finished,
    held,
    histories,
    learnt,
    make_fleet,
    make_node,
)

from fedmosaic.core.errors import DataError, RunError, SettingsError
from fedmosaic.core.files import load_tensors
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy.agreement import Agreement, groups_of, stamp_of
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.protocol import Reply, TaskMessage, UpdateMessage
from fedmosaic.deploy.roster import Member
from fedmosaic.engines.state import FederationState, Rows, ServerState
from fedmosaic.methods.registry import entry
from fedmosaic.testing import Chaos, Clock, LocalTransport


def close(found: Any, wanted: Any, what: str, tolerance: float = 2e-4) -> None:
    gap = np.abs(found - wanted) / (1 + np.abs(wanted))
    assert gap.max(initial=0) <= tolerance, f"{what} differs by {gap.max():.2e}"


def close_servers(found: ServerState, wanted: ServerState, method: str) -> None:
    assert set(found.pack()) == set(wanted.pack())
    for name, value in wanted.pack().items():
        close(found.pack()[name], value, f"{method}: {name}")


def simulated(method: str, data: TrainingSet, **settings: Any) -> tuple[FederationState, Any]:
    seed = 1
    federation = replace(entry(method).build({"dim": 4, **SMALL[method], **settings}), engine="simulate")
    state = federation.start(data, seed)
    for number in range(1, 4):
        state, _, _ = federation.advance(data, state, number, seed)
    return state, federation.scorer(data, state).scores(np.arange(data.n_users))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("method", list(SMALL))
def test_devices_equal_the_simulation(method: str, secure: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    data = histories()
    agreement = agreement_of(method, data.n_items, secure=secure)
    server, nodes = make_fleet(tmp_path, agreement, data, [[u] for u in range(8)])
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    one.run()
    one.share()
    expected, scores = simulated(method, data)
    close_servers(one.state, expected.server, method)
    for user, node in enumerate(nodes.values()):
        for name, stored in expected.devices.params.items():
            mine, what = node.state.devices.params[name], f"{method}: {name} of {user}"
            if isinstance(stored, Rows):
                assert isinstance(mine, Rows)
                own = stored.keys // data.n_items == user
                assert mine.keys.tolist() == (stored.keys[own] % data.n_items).tolist(), what
                close(mine.values, stored.values[own], what)
            else:
                assert not isinstance(mine, Rows)
                close(mine[0], stored[user], what)
        found = node.recommender().recommend(f"u{user}", k=5, exclude_seen=False)
        best = np.argsort(-scores[user], kind="stable")[:5]
        close(np.array(found["score"]), scores[user][best], f"{method}: answers of {user}", 2e-3)


@pytest.mark.parametrize("method", list(SMALL))
def test_silos_and_devices_add_up(method: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    data, some = histories(), {"participation": 0.7}
    agreement = agreement_of(method, data.n_items, settings=some)
    server, nodes = make_fleet(tmp_path, agreement, data, [[0], [1], [2, 3, 4], [5, 6, 7]])
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    one.run()
    expected, _ = simulated(method, data, **some)
    close_servers(one.state, expected.server, method)
    lines = [json.loads(line) for line in (server / "rounds.jsonl").read_text().splitlines()]
    assert [(line["round"], line["clients"], line["refused"]) for line in lines] == [(1, 6, 0), (2, 6, 0), (3, 6, 0)]
    assert load_tensors(server / "server.safetensors")[1]["round"] == 3


class CrashError(Exception):
    pass


@pytest.mark.parametrize("method", ["pfedrec", "fedrap"])
@pytest.mark.parametrize("moment", ["before sending", "after working"])
def test_a_server_that_died_ends_in_the_same_bytes(method: str, moment: str, tmp_path: Path) -> None:
    data, agreement = histories(), agreement_of(method, 30, settings={"rounds": 4})

    class Dying(LocalTransport):
        def send(self, node: str, content: bytes, seconds: float) -> str:
            if self.count == 18 and moment == "before sending":
                raise CrashError
            name = super().send(node, content, seconds)
            if self.count == 22 and moment == "after working":  # most devices have done their round 3
                raise CrashError
            return name

    ends = []
    for broken in (False, True):
        place = tmp_path / str(broken)
        server, nodes = make_fleet(place, agreement, data, [[u] for u in range(8)])
        if broken:
            with pytest.raises(CrashError):
                coordinator_of(server, nodes, Dying(nodes)).run()
            nodes = {name: Node(place / name) for name in nodes}  # devices were restarted too
        coordinator_of(server, nodes, LocalTransport(nodes)).run()
        devices = {f"{n}/{k}": v for n, node in nodes.items() for k, v in held(node).items()}
        ends.append(finished(server) | devices)
    assert ends[0] == ends[1]


def test_chaos_counts_everybody_at_most_once(tmp_path: Path) -> None:
    size, clock = 20, Clock()
    agreement = agreement_of("fedmf", size, settings={"rounds": 200}, least=5, deadline=10.0)
    server = tmp_path / "server"
    server.mkdir()
    agreement.write(server)
    nodes = {f"n{k}": OneHot(agreement, k, (size, 4)) for k in range(size)}
    chaos = Chaos(nodes, clock, seed=7, late=15.0)
    roster = {name: Member(k) for k, name in enumerate(nodes)}
    one = Coordinator(server, lambda: roster, chaos, n_items=size, clock=clock, sleep=clock.sleep)
    for number in range(1, 201):
        before = one.state.params["item"]
        line = one.round()
        counted = (one.state.params["item"].astype(float) - before) * line["clients"]
        assert np.abs(counted - np.round(counted)).max() < 0.01
        assert set(np.round(counted).ravel()) <= {0, 1}, f"round {number}: somebody counts twice"
        assert np.round(counted)[:, 0].sum() == line["clients"] == line["nodes"]
        assert line["clients"] >= 5
        assert line["abandoned"] == 0
    reasons = {json.loads(line)["reason"] for line in (server / "refused.jsonl").read_text().splitlines()}
    assert {"late", "duplicate", "round", "damaged", "finite", "shape"} <= reasons
    assert all(chaos.fates[fate] > 50 for fate in ("drop", "late", "again", "bad")), chaos.fates


def test_chaos_costs_little_quality(tmp_path: Path) -> None:
    """Devices that learn, with and without faults: the missing item of a checkerboard is found as often."""
    rows = [[i for i in range(16) if i % 2 == u % 2 and i != u] for u in range(16)]
    ragged = Ragged.from_rows(rows)
    data = TrainingSet(ragged, ragged.unique(), 16)
    settings = {"rounds": 20, "dim": 8, "item_rate": 40.0, "user_rate": 1.0}
    shares = []
    for broken in (False, True):
        agreement = agreement_of("fedmf", 16, settings=settings, least=4, deadline=10.0)
        server, nodes = make_fleet(tmp_path / str(broken), agreement, data, [[u] for u in range(16)])
        clock = Clock()
        transport = Chaos(nodes, clock, seed=3, late=15.0) if broken else LocalTransport(nodes)
        one = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep)
        one.run()
        transport = LocalTransport(nodes)
        one.desk.transport = transport
        one.share()
        firsts = [node.recommender().recommend(f"u{u}", k=1)["item"][0] for u, node in enumerate(nodes.values())]
        shares.append(np.mean([item == f"i{u}" for u, item in enumerate(firsts)]))
    assert shares[0] == 1
    assert shares[1] == 1


@pytest.mark.parametrize("method", list(SMALL))
def test_nothing_private_is_sent(method: str, tmp_path: Path) -> None:
    if method in NEEDS_TORCH:
        pytest.importorskip("torch")
    data = histories()
    server, nodes = make_fleet(
        tmp_path, agreement_of(method, 30, settings={"rounds": 5}), data, [[u] for u in range(8)]
    )
    transport = LocalTransport(nodes)
    one = coordinator_of(server, nodes, transport)
    allowed = set(learnt(one.work).algorithm.sent)
    headers: set[str] = set()
    for _ in range(5):
        one.round()
        for user, node in enumerate(nodes.values()):
            sent = b"".join(content for name, content in transport.sent if name == f"n{user}")
            for key, value in node.state.pack().items():
                if key.startswith(("private/", "memory/", "before/")) and value.any():
                    rows = value if value.ndim > 1 else value[None]
                    long = [row for row in rows if row.any() and row.size > 1]  # one number may occur anywhere
                    assert all(row.tobytes() not in sent for row in long), (method, key)
            assert data.histories[user].tobytes() not in sent
            assert data.histories[user].astype(np.int64).tobytes() not in sent
            assert not any(f'"i{i}"'.encode() in sent for i in data.histories[user])
    for _, content in transport.sent:
        update = UpdateMessage.decode(content)
        assert set(update.tensors) <= allowed
        headers |= {k for k, v in vars(update).items() if v}
    expected = {"federation", "round", "attempt", "status", "version", "clients", "tensors"}
    assert headers - {"shrink"} == expected


def test_noise_follows_from_a_secret_of_the_device(tmp_path: Path) -> None:
    data = histories(2)
    sums: list[Any] = []
    for own in (False, True, True):
        agreement = agreement_of("pfedrec", 30, own_draws=own, settings={"noise": 0.1})
        server, nodes = make_fleet(tmp_path / str(len(sums)), agreement, data, [[0], [1]])
        one = coordinator_of(server, nodes, LocalTransport(nodes))
        assert "loss" not in one.round()  # the loss would say what the noise hides
        sums.append(one.state.params["item"])
    assert len({s.tobytes() for s in sums}) == 3


@pytest.mark.parametrize("own", [False, True])
def test_a_device_answers_with_the_copy_it_tuned(own: bool, tmp_path: Path) -> None:
    """Received + sent = tuned; the copy is replayed, so it must be replayed with the draws it was trained with."""
    data = histories(2)
    agreement = agreement_of("pfedrec", 30, own_draws=own)
    server, nodes = make_fleet(tmp_path, agreement, data, [[0], [1]])
    first = learnt(nodes["n0"].work).federation.start(data, agreement.seed).server.params["item"]
    coordinator_of(server, nodes, LocalTransport(nodes)).round()
    node = nodes["n0"]
    tuned = first + node.answered["item"]
    user, bias = (node.state.devices.dense(name)[0] for name in ("user", "bias"))
    found = node.recommender().score(["u0"], [f"i{n}" for n in range(30)])["score"].to_numpy()
    np.testing.assert_allclose(found, tuned @ user + bias, atol=1e-5)


def test_nodes_that_owe_an_answer_are_not_asked_again(tmp_path: Path) -> None:
    data, clock = histories(3), Clock()
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30, deadline=10.0), data, [[0], [1], [2]])

    class Silent(LocalTransport):
        def send(self, node: str, content: bytes, seconds: float) -> str:
            name = super().send(node, content, seconds)
            if node == "n0":
                self.ready.pop()
            return name

    transport = Silent(nodes)
    one = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep)
    lines = [one.round() for _ in range(3)]
    assert [line["clients"] for line in lines] == [2, 2, 2]
    assert lines[0]["seconds"] >= 10 > lines[1]["seconds"]
    assert [name for name, _ in transport.received].count("n0") == 1
    clock.now += 100
    one.round()
    assert [name for name, _ in transport.received].count("n0") == 2


def test_a_round_asks_some_more_and_closes_when_enough_have_come(tmp_path: Path) -> None:
    data, clock = histories(8), Clock()
    agreement = agreement_of("fedmf", 30, spare=1.5, settings={"participation": 0.5})
    server, nodes = make_fleet(tmp_path, agreement, data, [[u] for u in range(8)])

    class OneByOne(LocalTransport):
        def receive(self) -> list[Reply]:
            found, self.ready = self.ready[:1], self.ready[1:]
            return found

    transport = OneByOne(nodes)
    line = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep).round()
    assert (line["clients"], transport.count) == (4, 6)


def test_too_few_clients_is_no_round(tmp_path: Path) -> None:
    data, clock = histories(3), Clock()
    server, nodes = make_fleet(tmp_path, agreement_of("fedmf", 30, least=3, deadline=5.0), data, [[0], [1], [2]])

    class Shy(LocalTransport):
        def nodes(self) -> list[str]:
            return list(self.members) if clock() > 60 else ["n0", "n1"]

    one = coordinator_of(server, nodes, Shy(nodes), clock=clock, sleep=clock.sleep)
    line = one.round()
    assert line["clients"] == 3
    assert line["abandoned"] > 0
    assert clock() > 60


def test_a_newcomer_adapts_without_training_anew(tmp_path: Path) -> None:
    rows = [[i for i in range(16) if i % 2 == u % 2 and i != u] for u in range(16)]
    ragged = Ragged.from_rows(rows)
    data = TrainingSet(ragged, ragged.unique(), 16)
    settings = {"rounds": 20, "dim": 8, "item_rate": 40.0, "user_rate": 1.0, "local_epochs": 3}
    agreement = agreement_of("fedmf", 16, settings=settings)
    server, nodes = make_fleet(tmp_path, agreement, data, [[u] for u in range(14)])
    coordinator_of(server, nodes, LocalTransport(nodes)).run()
    before = finished(server)
    new = {f"n{u}": make_node(tmp_path / f"n{u}", agreement, data, [u]) for u in (14, 15)}
    transport = LocalTransport(nodes | new)
    one = coordinator_of(server, nodes | new, transport)
    assert one.share() == 16
    assert one.share() == 0  # everybody has it
    for user in (14, 15):
        found = new[f"n{user}"].recommender().recommend(f"u{user}", k=1)
        assert found["item"].to_list() == [f"i{user}"]
    assert not any(UpdateMessage.decode(content).tensors for _, content in transport.sent)
    assert finished(server) == before


def test_a_history_is_mapped_on_the_device(tmp_path: Path) -> None:
    agreement = agreement_of("fedmf", 30)
    Node.create(tmp_path / "d", agreement, catalogue(30), np.array([0]), "d")
    with pytest.raises(RunError, match="holds no history yet"):
        Node(tmp_path / "d")
    with pytest.raises(DataError, match=r"1 of 2 items are not in the catalogue, e\.g\. i99"):
        take_history(tmp_path / "d", {"item": ["i3", "i99"]}, user=None)
    with pytest.raises(DataError, match="has no column 'item'; it has film"):
        take_history(tmp_path / "d", {"film": ["i3"]}, user=None)
    with pytest.raises(DataError, match="holds 2 users; this node was invited with 1"):
        take_history(tmp_path / "d", {"user": ["a", "b"], "item": ["i3", "i4"]})
    take_history(tmp_path / "d", {"item": ["i3", "i4", "i3"]}, user=None)
    with pytest.raises(RunError, match="has not met its server yet"):
        Node(tmp_path / "d").recommender()
    assert Node(tmp_path / "d").data.histories[0].tolist() == [4, 3]  # in the order in which they were held last
    assert (tmp_path / "d").stat().st_mode & 0o077 == 0


def test_what_a_device_keeps_is_its_owners_alone(tmp_path: Path) -> None:
    data = histories(2)
    server, nodes = make_fleet(tmp_path, agreement_of("pfedrec", 30), data, [[0], [1]])
    coordinator_of(server, nodes, LocalTransport(nodes)).run()
    for file in ("state.safetensors", "history.parquet"):
        assert (tmp_path / "n0" / file).stat().st_mode & 0o077 == 0


def test_only_methods_whose_uploads_add_up_can_be_deployed() -> None:
    for method in ("mf", "metamf", "gpfedrec"):
        with pytest.raises(SettingsError, match="cannot be deployed"):
            Agreement(method=method, items="").build()
    with pytest.raises(SettingsError, match="under a secure sum only; leave secure=false"):
        Agreement(method="ease", items="", secure=False).build()


def test_a_round_that_cannot_be_held_as_drawn_draws_again(tmp_path: Path) -> None:
    data, clock = histories(8), Clock()
    agreement = agreement_of("fedmf", 30, settings={"participation": 0.25})
    server, nodes = make_fleet(tmp_path, agreement, data, [[u] for u in range(8)])

    class Half(LocalTransport):
        def nodes(self) -> list[str]:
            return list(self.members)[:2]

    one = coordinator_of(server, nodes, Half(nodes), clock=clock, sleep=clock.sleep)
    assert all(one.round()["clients"] in (1, 2) for _ in range(6))
    assert clock() > 0
    agreement.model_copy(update={"least": 6}).write(server)  # more than the quarter that is wanted
    assert coordinator_of(server, nodes, LocalTransport(nodes)).round()["clients"] == 6


def test_users_of_a_silo_keep_their_numbers(tmp_path: Path) -> None:
    Node.create(tmp_path / "s", agreement_of("fedmf", 30), catalogue(30), np.array([4, 7]), "s")
    take_history(tmp_path / "s", {"user": ["a", "b"], "item": ["i1", "i2"]})
    take_history(tmp_path / "s", {"user": ["b", "a", "b"], "item": ["i3", "i1", "i4"]})
    node = Node(tmp_path / "s")
    assert node.users.ids.to_list() == ["a", "b"]
    assert [node.data.histories[u].tolist() for u in range(2)] == [[1], [3, 4]]
    with pytest.raises(DataError, match="users that were not here before: c"):
        take_history(tmp_path / "s", {"user": ["a", "c"], "item": ["i1", "i2"]})


def test_another_catalogue_is_refused(tmp_path: Path) -> None:
    Node.create(tmp_path / "d", agreement_of("fedmf", 30), catalogue(30).reverse(), np.array([0]), "d")
    with pytest.raises(RunError, match="is not the catalogue that was agreed on"):
        take_history(tmp_path / "d", {"item": ["i3"]}, user=None)


def test_a_silo_answers_for_whole_groups_of_its_clients(tmp_path: Path) -> None:
    """Sums over other sets would tell single clients; a device is alone, and has other protections."""
    data = histories(9)
    agreement = agreement_of("fedmf", 30, fewest=3)
    _, nodes = make_fleet(tmp_path, agreement, data, [[0], [1, 2, 3, 4, 5, 6, 7, 8]])
    silo = nodes["n1"]
    params = learnt(silo.work).federation.start(data, agreement.seed).server.params
    assert silo.data.client_ids is not None
    assert [g.tolist() for g in groups_of(silo.data.client_ids, 3)] == [[1, 2, 3], [4, 5, 6, 7, 8]]

    def ask(clients: list[int]) -> UpdateMessage:
        asked = np.array(clients)
        task = TaskMessage(agreement.digest(), 1, "a", agreement.seed, 1, stamp_of(params), asked, params)
        return UpdateMessage.decode(silo.answer(task.encode()))

    for clients in ([1], [1, 2], [1, 2, 4], [4, 5, 6]):
        assert "whole groups" in ask(clients).detail
    assert ask([1, 2, 3]).status == "done"
    small = agreement_of("fedmf", 30, fewest=5)
    _, others = make_fleet(tmp_path / "small", small, data, [[0, 1, 2], [3]])
    node = others["n0"]
    task = TaskMessage(small.digest(), 1, "a", small.seed, 1, stamp_of(params), np.array([0, 1, 2]), params)
    assert "a silo answers for 5 at least" in UpdateMessage.decode(node.answer(task.encode())).detail


def test_a_server_draws_silos_clients_in_groups(tmp_path: Path) -> None:
    agreement = agreement_of("fedmf", 30, fewest=3, settings={"participation": 0.4})
    server, nodes = make_fleet(tmp_path, agreement, histories(12), [[0], [1], list(range(2, 12))])
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    for line in (one.round() for _ in range(3)):
        assert line["refused"] == 0
        assert line["clients"] > 0


def test_deployments_bound_what_a_node_can_do(tmp_path: Path) -> None:
    """By default: a node that sends ten thousand in every number moves the table no further than others do."""
    moved = {}
    for bounds in (False, True):
        agreement = agreement_of("fedmf", 30, bounds=bounds)
        place = tmp_path / str(bounds)
        server, nodes = make_fleet(place, agreement, histories(6), [[u] for u in range(6)])

        class Liar(LocalTransport):
            def send(self, node: str, content: bytes, seconds: float) -> str:
                name = super().send(node, content, seconds)
                if node == "n0":
                    reply = self.ready.pop()
                    assert reply.content is not None
                    told = UpdateMessage.decode(reply.content)
                    tensors = {n: np.full_like(v, 1e4) for n, v in told.tensors.items()}
                    self.ready.append(replace(reply, content=replace(told, tensors=tensors).encode()))
                return name

        one = coordinator_of(server, nodes, Liar(nodes))
        before = one.state.params["item"].copy()
        one.round()
        moved[bounds] = float(np.abs(one.state.params["item"] - before).max())
    assert moved[False] > 1000
    assert moved[True] < 5
    assert Agreement(method="fedmf", items="x").bounds


def test_an_epsilon_is_not_promised_where_nobody_draws_its_noise() -> None:
    with pytest.raises(SettingsError, match="a share of the noise protects nobody alone; give secure=true"):
        agreement_of("fedmf", 30, settings={"epsilon": 4.0}).build()
    for more in ({"participation": 0.5}, {"trust": "server"}):
        with pytest.raises(SettingsError, match="in which all take part"):
            agreement_of("fedmf", 30, secure=True, settings={"epsilon": 4.0, "upload_clip": 1.0, **more}).build()
