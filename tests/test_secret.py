"""Secret randomness: nobody draws a device's noise again, not from its upload and not by asking twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import agreement_of, coordinator_of, histories, learnt, make_fleet
from scipy import stats

from fedmosaic.algorithm.local import Context
from fedmosaic.audit.attacks import recovered
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.secret import DeviceSecret, new_secret
from fedmosaic.deploy.agreement import stamp_of
from fedmosaic.deploy.protocol import TaskMessage, UpdateMessage
from fedmosaic.privacy.noise import AddedNoise
from fedmosaic.testing import LocalTransport

NUMBERS = 4096


def noise_of(ctx: Context, client: int, scale: float = 0.5) -> Any:
    """A client's noise on numbers that are all zero, as it leaves the device."""
    total = np.zeros(NUMBERS, np.int64)
    AddedNoise("laplace", scale).add(total, "item", np.array([client]), ctx)
    return total / SCALE


def test_one_upload_gives_the_fast_generator_away_and_not_a_device() -> None:
    """100 clients each: the key of a simulation's noise is found from two numbers; of a device's, never."""
    fast = [recovered(noise_of(Context(1, 7, NUMBERS, 100), client), 0.5) for client in range(100)]
    assert sum(fast) == 100, "the attack must work where it can, or it shows nothing"
    devices = [Context(1, 7, NUMBERS, 1, DeviceSecret(new_secret(), "shop"), "table") for _ in range(100)]
    assert not any(recovered(noise_of(ctx, client), 0.5) for client, ctx in enumerate(devices))


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_a_devices_noise_has_the_law_that_was_asked_for(kind: Any) -> None:
    stream = DeviceSecret(bytes(range(32)), "shop").stream("noise", 1)
    drawn = stream.laplace(2.0, 50_000) if kind == "laplace" else stream.gaussian(2.0, 50_000)
    assert stats.kstest(drawn, kind if kind == "laplace" else "norm", args=(0, 2.0)).pvalue > 0.001
    assert np.unique(drawn).size == drawn.size


def test_two_tables_of_a_round_share_no_noise_and_neither_do_rounds_clients_or_federations() -> None:
    mine = DeviceSecret(bytes(range(32)), "shop")
    contexts = [
        Context(1, 0, 9, 1, mine, "table"),
        Context(1, 0, 9, 1, mine, "another"),
        Context(2, 0, 9, 1, mine, "table"),
        Context(1, 0, 9, 1, DeviceSecret(mine.value, "other shop"), "table"),
        Context(1, 0, 9, 1, DeviceSecret(bytes(32), "shop"), "table"),
    ]
    found = [noise_of(ctx, 0) for ctx in contexts] + [noise_of(contexts[0], 1)]
    assert np.array_equal(found[0], noise_of(contexts[0], 0)), "a lost answer is sent again, the same"
    for i in range(len(found)):
        for j in range(i):
            assert not np.intersect1d(found[i], found[j]).size


def test_a_node_answers_one_table_in_a_round(tmp_path: Path) -> None:
    """Two answers about two tables of a server's choice would tell more than one; the same question has one answer."""
    data = histories(1)
    agreement = agreement_of("pfedrec", 30, own_draws=True, settings={"noise": 0.1})
    _, nodes = make_fleet(tmp_path, agreement, data, [[0]])
    node, params = nodes["n0"], learnt(nodes["n0"].work).federation.start(data, agreement.seed).server.params
    clients = node.data.client_ids
    assert clients is not None

    def ask(shift: float, round: int) -> UpdateMessage:
        table = {name: (value + np.float32(shift)).astype(np.float32) for name, value in params.items()}
        task = TaskMessage(agreement.digest(), round, "a", agreement.seed, round, stamp_of(table), clients, table)
        return UpdateMessage.decode(node.answer(task.encode()))

    first, other, again, later = ask(0.0, 1), ask(0.001, 1), ask(0.0, 1), ask(0.001, 2)
    assert [update.status for update in (first, other, again, later)] == ["done", "failed", "done", "done"]
    assert "answered round 1 already" in other.detail
    assert not other.tensors
    assert np.array_equal(first.tensors["item"], again.tensors["item"])


def test_secrets_are_whole_and_never_shown(tmp_path: Path) -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()
    with pytest.raises(SettingsError, match="32 bytes"):
        DeviceSecret(b"short", "shop")
    secret = DeviceSecret(b"S" * 32, "shop")
    assert "SSSS" not in repr(secret)
    agreement = agreement_of("pfedrec", 30, own_draws=True)
    server, nodes = make_fleet(tmp_path, agreement, histories(2), [[0], [1]])
    transport = LocalTransport(nodes)
    coordinator_of(server, nodes, transport).round()
    for name, node in nodes.items():
        assert node.state.secret is not None
        sent = b"".join(content for who, content in transport.sent if who == name)
        assert node.state.secret.value not in sent
        assert node.state.secret.value.hex().encode() not in sent
    values = {node.state.secret.value for node in nodes.values() if node.state.secret is not None}
    assert len(values) == 2
