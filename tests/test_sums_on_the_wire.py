"""Secure sums between a server and nodes: the same numbers, nobody's own, drop-outs at every point, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import (
    agreement_of,
    catalogue,
    coordinator_of,
    finished,
    histories,
    learnt,
    make_fleet,
    member_of,
    roster_of,
)  # fmt: skip

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import read_lines
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy.agreement import stamp_of
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.open_sum import FILE, OpenSum
from fedmosaic.deploy.protocol import OpeningMessage, RevealMessage, TaskMessage, UpdateMessage, kind_of
from fedmosaic.methods.closed_form import fit
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.budget import Budget
from fedmosaic.testing import Clock, LocalTransport

Answer = Callable[[bytes], bytes]


def secure(method: str = "fedmf", items: int = 30, **more: Any) -> Any:
    return agreement_of(method, items, **({"secure": True, "deadline": 5.0} | more))


def fleet_of(place: Path, agreement: Any, users: int = 5) -> tuple[Path, dict[str, Node], TrainingSet]:
    data = histories(users)
    server, nodes = make_fleet(place, agreement, data, [[u] for u in range(users)])
    return server, nodes, data


class Lossy(LocalTransport):
    """Some nodes fall silent at some kind of message: `task` before they answer it, `reveal` before they open."""

    def __init__(self, nodes: dict[str, Any], silent: dict[str, str]) -> None:
        super().__init__(nodes)
        self.silent, self.gone = silent, set[str]()

    def nodes(self) -> list[str]:
        return [name for name in self.members if name not in self.gone]

    def send(self, node: str, content: bytes, seconds: float) -> str:
        if self.silent.get(node) == kind_of(content):
            self.gone.add(node)
            self.count += 1
            return str(self.count)
        return super().send(node, content, seconds)


@pytest.mark.parametrize(
    ("silent", "counted"),
    [
        ({}, 12),
        (dict.fromkeys(["n0", "n4", "n7", "n9"], "task"), 8),  # a third never sends
        (dict.fromkeys(["n0", "n4", "n7", "n9"], "reveal"), 12),  # a third sends, and is gone before the sum is opened
        ({"n0": "task", "n5": "reveal"}, 11),
    ],
)
def test_the_sum_is_that_of_whoever_arrived(silent: dict[str, str], counted: int, tmp_path: Path) -> None:
    agreement = secure(settings={"rounds": 1})
    server, nodes, data = fleet_of(tmp_path / "masked", agreement, 12)
    clock = Clock()
    one = coordinator_of(server, nodes, Lossy(nodes, silent), clock=clock, sleep=clock.sleep)
    line = one.round()
    assert (line["clients"], line["nodes"], line["abandoned"]) == (counted, counted, 0)
    here = [k for k in range(12) if silent.get(f"n{k}") != "task"]
    plain = agreement_of("fedmf", 30, settings={"rounds": 1})
    other, others = make_fleet(tmp_path / "plain", plain, data, [[u] for u in here])
    expected = coordinator_of(other, others, LocalTransport(others))
    expected.round()
    assert one.state.params["item"].tobytes() == expected.state.params["item"].tobytes()
    assert not (server / FILE).exists()


def test_below_the_threshold_nothing_is_opened_and_the_round_is_begun_again(tmp_path: Path) -> None:
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 1}), 5)
    clock = Clock()

    class Returning(Lossy):
        def nodes(self) -> list[str]:
            if clock() > 40:
                self.gone, self.silent = set(), {}
            return super().nodes()

    transport = Returning(nodes, {f"n{k}": "task" for k in range(3)})
    line = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep).round()
    assert line["clients"] == 5
    assert line["abandoned"] >= 1
    assert clock() > 40
    first = next(i for i, (_, content) in enumerate(transport.sent) if kind_of(content) == "opening")
    assert len(transport.sent[:first]) >= 2 + 5  # two answered the first attempt, and nobody opened it


def test_a_learnt_round_whose_sum_stays_closed_is_given_up_and_costs_nothing(tmp_path: Path) -> None:
    """Nodes that opened it would not take part in another sum of that round."""
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 2}), 5)
    clock = Clock()
    transport = Lossy(nodes, {f"n{k}": "reveal" for k in range(4)})
    one = coordinator_of(server, nodes, transport, clock=clock, sleep=clock.sleep)
    before = one.state.params["item"].copy()
    line = one.round()
    assert (line["clients"], one.version) == (0, 1)
    assert (one.state.params["item"] == before).all()
    transport.gone, transport.silent = set(), {}
    assert one.round()["clients"] == 5
    reasons = [json.loads(text)["detail"] for text in (server / "refused.jsonl").read_text().splitlines()]
    assert any("1 of 5 nodes have opened the sum, which is not enough" in reason for reason in reasons)


class CrashError(Exception):
    pass


@pytest.mark.parametrize("method", ["fedmf", "ease"])
@pytest.mark.parametrize("moment", ["task", "reveal", "opening"])
def test_a_server_that_died_goes_on_with_the_sum_it_has(method: str, moment: str, tmp_path: Path) -> None:
    ends = []
    for broken in (False, True):
        place = tmp_path / str(broken)
        server, nodes, _ = fleet_of(place, secure(method), 5)

        class Dying(LocalTransport):
            def send(self, node: str, content: bytes, seconds: float) -> str:
                if node == "n3" and kind_of(content) == moment:
                    raise CrashError
                name = super().send(node, content, seconds)
                if node == "n3" and moment == "opening" and kind_of(content) == "reveal":
                    raise CrashError  # all but one have opened
                return name

        if broken:
            with pytest.raises(CrashError):
                coordinator_of(server, nodes, Dying(nodes)).run()
            assert (server / FILE).exists() == (moment != "task")
            nodes = {name: Node(place / name) for name in nodes}  # devices were restarted too
        coordinator_of(server, nodes, LocalTransport(nodes)).run()
        ends.append(finished(server))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", ["popularity", "itemknn", "ease", "mosaic", "ials", "fcf"])
def test_closed_forms_by_devices_and_silos_equal_the_simulator(method: str, tmp_path: Path) -> None:
    data = histories(9)
    settings = {"features": 8} if method in ("ials", "fcf") else {}
    settings = {k: v for k, v in settings.items() if k in entry(method).settings.model_fields}
    agreement = secure(method, settings=settings)
    server, nodes = make_fleet(tmp_path, agreement, data, [[0], [1], [2, 3, 4, 5], [6, 7, 8]])
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    one.run()
    one.share()
    form: Any = agreement.build()
    expected = fit(form, Histories(data.histories, data.n_items), seed=agreement.seed)
    for name, value in expected.items():
        np.testing.assert_allclose(one.state[name], value, rtol=1e-6, atol=1e-7, err_msg=f"{method}: {name}")
    found = nodes["n0"].recommender().recommend("u0", k=5)
    scores = form.scores(one.state, Histories(data.histories.take(np.array([0])), data.n_items))[0].copy()
    scores[data.histories[0]] = -np.inf
    best = np.argsort(-scores, kind="stable")[:5]
    np.testing.assert_allclose(sorted(found["score"], reverse=True), scores[best], rtol=1e-5, atol=1e-6)


def first_task(nodes: dict[str, Node], transport: LocalTransport, name: str = "n0") -> TaskMessage:
    return TaskMessage.decode(next(content for node, content in transport.received if node == name))


def answer_of(node: Node, message: Any) -> UpdateMessage:
    return UpdateMessage.decode(node.answer(message.encode()))


def asked_once(tmp_path: Path, method: str = "fedmf") -> tuple[Node, TaskMessage, dict[str, Node]]:
    """A node that was asked nothing yet, and a good first question for it."""
    server, nodes, _ = fleet_of(tmp_path / "fleet", secure(method, cohort=4), 5)
    silent = Lossy(nodes, {f"n{k}": "task" for k in range(5)})

    class Recording(Lossy):
        def send(self, node: str, content: bytes, seconds: float) -> str:
            self.received.append((node, content))
            return super().send(node, content, seconds)

    silent = Recording(nodes, {f"n{k}": "task" for k in range(5)})
    clock = Clock()

    class EnoughError(Exception):
        pass

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock() > 1:
            raise EnoughError

    with pytest.raises(EnoughError):
        coordinator_of(server, nodes, silent, clock=clock, sleep=sleep).round()
    return nodes["n0"], first_task(nodes, silent), nodes


def cut(task: TaskMessage, parties: list[int], me: int = 0) -> TaskMessage:
    """The same question, to fewer."""
    near = {int(p): key for p, key in zip(sorted(set(task.parties.tolist()) - {me}), task.publics, strict=True)}
    return replace(task, parties=np.array(parties), publics=np.array([near[p] for p in parties if p != me]))


def test_a_node_refuses_a_server_that_asks_for_less_than_was_agreed(tmp_path: Path) -> None:
    node, good, _ = asked_once(tmp_path)
    nobody = np.zeros(0, np.int64)
    no_keys = np.zeros((0, 32), np.uint8)
    bad: dict[str, Any] = {
        "unmasked: ": replace(good, parties=nobody, publics=no_keys),
        "cohort: a sum of 1 nodes": replace(good, parties=np.array([0]), publics=no_keys),
        "cohort: a sum of 3 nodes": cut(good, [0, 1, 2]),
        "cohort: this node is not among": replace(good, parties=np.array([1, 2, 3, 4])),
        "key: it does not bring": replace(good, publics=good.publics[:2]),
        "federation: ": replace(good, federation="another"),
        "clients: ": replace(good, clients=np.array([1])),
        "resync": replace(good, stamp="another"),
    }
    for words, task in bad.items():
        answer = answer_of(node, task)
        assert answer.status == ("resync" if words == "resync" else "failed"), words
        assert words == "resync" or answer.detail.startswith(words), answer.detail
        assert not answer.tensors
    assert answer_of(node, good).status == "done"
    log = [json.loads(text) for text in (node.place / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log] == ["refused"] * (len(bad) - 1) + ["sent"]


def test_a_node_keeps_the_keys_it_saw_first(tmp_path: Path) -> None:
    node, good, _ = asked_once(tmp_path)
    assert answer_of(node, good).status == "done"
    other = good.publics.copy()
    other[1] ^= 1
    answer = answer_of(Node(node.place), replace(good, round=2, attempt="b", publics=other))
    assert answer.detail.startswith("key: the key of party 2 is not the one that was pinned here")


def test_a_node_answers_one_question_in_an_attempt_and_one_table_in_a_round(tmp_path: Path) -> None:
    node, good, _ = asked_once(tmp_path)
    first = node.answer(good.encode())
    assert node.answer(good.encode()) == first  # a replay shows nothing new: not another letter, not another mask
    assert Node(node.place).answer(good.encode()) == first
    assert answer_of(node, cut(good, [0, 1, 2, 3])).detail.startswith("round: asked for two things in one attempt")
    moved = {"item": good.tensors["item"] + 1}
    from fedmosaic.deploy.agreement import stamp_of

    other = replace(good, tensors=moved, stamp=stamp_of(moved), attempt="b")
    assert answer_of(node, other).detail.startswith("round: this node has answered round 1 already, for other")
    again = UpdateMessage.decode(node.answer(replace(good, attempt="b").encode()))
    assert again.status == "done"
    assert (again.tensors["masked"] != UpdateMessage.decode(first).tensors["masked"]).mean() > 0.99


def opened_by(node: Node, arrived: list[int], senders: dict[int, UpdateMessage], attempt: str) -> bytes:
    near = [i for i in arrived if i != node.party]
    rows = [senders[i].tensors["letters"][[j for j in range(5) if j != i].index(node.party)] for i in near]
    letters = np.array(rows).reshape(len(near), -1).astype(np.uint8)
    federation = node.agreement.digest()
    return node.answer(RevealMessage(federation, 1, attempt, np.array(arrived), np.array(near), letters).encode())


@pytest.mark.parametrize("method", ["fedmf", "popularity"])
def test_a_sum_is_opened_for_one_set_of_arrivals(method: str, tmp_path: Path) -> None:
    """Two sets that differ by one node would tell that node's numbers."""
    node, good, nodes = asked_once(tmp_path, method)
    senders = {}
    for k, other in enumerate(nodes.values()):
        keys = [asked.sum for i, asked in enumerate(map(member_of, nodes.values())) if i != k]
        publics = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        senders[k] = answer_of(other, replace(good, clients=np.array([k]), publics=publics))
    few = UpdateMessage.decode(opened_by(node, [0, 1, 2], senders, good.attempt))
    assert few.detail.startswith("cohort: 3 parties arrived")
    strange = UpdateMessage.decode(opened_by(node, [0, 1, 2, 3, 4], {**senders, 1: senders[2]}, good.attempt))
    assert strange.detail.startswith("cohort: a letter of party 1 was not sealed by it")
    unasked = UpdateMessage.decode(opened_by(node, [0, 1, 2, 3], senders, "another"))
    assert unasked.detail.startswith("round: this node takes part in another sum")
    first = opened_by(node, [0, 1, 2, 3], senders, good.attempt)
    assert kind_of(first) == "opening"
    assert sorted(OpeningMessage.decode(first).opening().lost) == [4]
    assert opened_by(Node(node.place), [0, 1, 2, 3], senders, good.attempt) == first
    both = UpdateMessage.decode(opened_by(node, [0, 1, 2, 3, 4], senders, good.attempt))
    assert both.detail.startswith("opened: this node has opened this sum for others")
    later = answer_of(node, replace(good, attempt="b"))
    assert later.detail.startswith("opened: this node has opened a sum of round 1")
    another_round = answer_of(node, replace(good, round=2, attempt="c"))
    if method == "popularity":  # what follows from a history alone is told once
        assert another_round.status == "failed"
    else:
        assert another_round.status == "done"


def test_a_closed_form_is_not_asked_for_more_rounds_than_it_has(tmp_path: Path) -> None:
    node, good, _ = asked_once(tmp_path, "popularity")
    for round in (0, 2, 7):
        assert answer_of(node, replace(good, round=round)).detail.startswith("round: popularity has 1 rounds")


def test_all_messages_of_a_round_have_one_length_and_hold_masked_numbers_only(tmp_path: Path) -> None:
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 4}), 8)
    transport = LocalTransport(nodes)
    coordinator_of(server, nodes, transport).run()
    updates = [UpdateMessage.decode(c) for _, c in transport.sent if kind_of(c) == "update"]
    assert len({len(c) for _, c in transport.sent if kind_of(c) == "update"}) == 1
    assert len({len(c) for _, c in transport.sent if kind_of(c) == "opening"}) == 1
    for update in updates:
        assert set(update.tensors) == {"masked", "letters"}
        assert (update.clients, update.shrink, update.detail) == (0, {}, "")
    words = np.concatenate([u.tensors["masked"] for u in updates])
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(64 * words.size)  # every bit is a coin


def test_an_opened_sum_of_numbers_that_no_training_reaches_does_not_count(tmp_path: Path) -> None:
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 1}), 5)

    class Liar:
        def answer(self, content: bytes) -> bytes:
            answer = nodes["n0"].answer(content)
            if kind_of(answer) != "update":
                return answer
            told = UpdateMessage.decode(answer)
            masked = told.tensors["masked"] + np.uint64(1 << 62)
            return replace(told, tensors={**told.tensors, "masked": masked}).encode()

    clock = Clock()
    one = coordinator_of(server, nodes, LocalTransport({**nodes, "n0": Liar()}), clock=clock, sleep=clock.sleep)
    before = one.state.params["item"].copy()
    assert one.round()["clients"] == 0
    assert (one.state.params["item"] == before).all()
    assert "none of healthy uploads" in (server / "refused.jsonl").read_text()


def test_an_opening_with_other_shares_than_were_asked_for_is_refused(tmp_path: Path) -> None:
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 1}), 6)

    class Odd:
        def answer(self, content: bytes) -> bytes:
            answer = nodes["n0"].answer(content)
            if kind_of(answer) != "opening":
                return answer
            told = OpeningMessage.decode(answer)
            return replace(told, own_of=told.own_of[::-1].copy()).encode()

    clock = Clock()
    one = coordinator_of(server, nodes, LocalTransport({**nodes, "n0": Odd()}), clock=clock, sleep=clock.sleep)
    line = one.round()
    assert (line["clients"], line["refused"]) == (6, 1)


def test_a_closed_form_whose_sum_was_spoilt_says_so(tmp_path: Path) -> None:
    server, nodes, _ = fleet_of(tmp_path, secure("popularity"), 5)

    class Liar:
        def answer(self, content: bytes) -> bytes:
            answer = nodes["n0"].answer(content)
            if kind_of(answer) != "update":
                return answer
            told = UpdateMessage.decode(answer)
            masked = told.tensors["masked"].copy()
            masked[-1] += np.uint64(100)
            return replace(told, tensors={**told.tensors, "masked": masked}).encode()

    one = coordinator_of(server, nodes, LocalTransport({**nodes, "n0": Liar()}))
    with pytest.raises(RunError, match="begin a new deployment"):
        one.run()


def test_a_sum_on_disk_is_read_back_whole(tmp_path: Path) -> None:
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 1}), 5)

    class Stop(LocalTransport):
        def send(self, node: str, content: bytes, seconds: float) -> str:
            if kind_of(content) == "reveal":
                raise CrashError
            return super().send(node, content, seconds)

    one = coordinator_of(server, nodes, Stop(nodes))
    with pytest.raises(CrashError):
        one.round()
    found = OpenSum.read(server, one.agreement)
    assert found is not None
    assert found.here == (0, 1, 2, 3, 4)
    assert found.masked.dtype == np.uint64


def test_renewed_keys_are_another_party(tmp_path: Path) -> None:
    """Others have pinned the keys of the old one."""
    from fedmosaic.deploy.admission import renewed

    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 2}), 4)
    coordinator_of(server, nodes, LocalTransport(nodes)).round()
    renewed(nodes["n1"].place)
    nodes["n1"] = Node(nodes["n1"].place)
    assert nodes["n1"].party == 1 + 2**32
    roster = roster_of(nodes)
    one = Coordinator(server, lambda: roster, LocalTransport(nodes), n_items=30)
    assert one.round()["clients"] == 4
    assert catalogue(30).height == 30


@pytest.mark.parametrize("clip", [{"upload_clip": 2.0}, {"upload_clip": "adaptive", "clip_start": 2.0}], ids=str)
def test_an_epsilon_is_paid_for_by_the_devices(clip: dict[str, Any], tmp_path: Path) -> None:
    """The sum that is opened has the noise that was promised, and owners are told what it cost."""
    agreement = secure(settings={"rounds": 2, "epsilon": 8.0, "item_rate": 1e-9, **clip})  # what is learnt is nothing
    server, nodes, _ = fleet_of(tmp_path, agreement, 8)
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    before = one.state.params["item"].astype(np.float64)
    assert one.round()["clients"] == 8
    moved = (one.state.params["item"] - before) * 8  # a mean over those who were asked
    budget = learnt(one.work).budget
    assert budget is not None
    wanted = budget.multiplier * 2.0 * np.sqrt(8 / Budget.least(8))
    assert 0.7 < moved.std() / wanted < 1.4
    one.round()
    told = [line["epsilon"] for line in read_lines(nodes["n0"].place / "log.jsonl") if line["event"] == "sent"]
    assert 0 < told[0] < told[1] <= 8.0


def test_a_node_does_not_go_back_to_an_attempt_that_is_over(tmp_path: Path) -> None:
    """Its masks stand under numbers that were sent; under others they would show what the two differ by."""
    server, nodes, _ = fleet_of(tmp_path, secure(settings={"rounds": 3}))
    transport = LocalTransport(nodes)
    one = coordinator_of(server, nodes, transport)
    one.round()
    tasks = [TaskMessage.decode(c) for n, c in transport.received if n == "n0" and kind_of(c) == "task"]
    one.round()
    tasks = [TaskMessage.decode(c) for n, c in transport.received if n == "n0" and kind_of(c) == "task"]
    third = replace(tasks[1], round=3, attempt="a")
    node = nodes["n0"]
    assert UpdateMessage.decode(node.answer(third.encode())).status == "done"
    assert UpdateMessage.decode(node.answer(replace(third, attempt="b").encode())).status == "done"
    for again in (replace(third, attempt="a"), tasks[0], replace(tasks[0], attempt="c")):
        refused = UpdateMessage.decode(node.answer(again.encode()))
        assert refused.status in ("failed", "resync")
        assert not refused.tensors
    assert "that attempt is over" in UpdateMessage.decode(node.answer(replace(third, attempt="a").encode())).detail
    assert UpdateMessage.decode(Node(node.place).answer(replace(third, attempt="a").encode())).status == "failed"


@pytest.mark.parametrize("moved", [25.0, -25.0, np.nan])
def test_no_server_moves_a_bound_to_where_noise_is_none(moved: float, tmp_path: Path) -> None:
    agreement = secure(settings={"rounds": 2, "epsilon": 1.0, "upload_clip": "adaptive"})
    server, nodes, _ = fleet_of(tmp_path, agreement, 6)

    def sleep(seconds: float) -> None:
        if seconds >= 1:  # before another attempt
            pytest.fail("nobody answers")

    one = coordinator_of(server, nodes, LocalTransport(nodes), sleep=sleep)
    one.state.params["upload_clip"][:] = moved
    one.stamp = stamp_of(one.parameters())
    with pytest.raises(pytest.fail.Exception, match="nobody answers"):
        one.round()
    told = [line["why"] for line in read_lines(nodes["n0"].place / "log.jsonl")]
    assert "no training reaches a bound" in told[-1]
