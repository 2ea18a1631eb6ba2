"""Secret randomness: nobody draws a device's noise again, not from its upload and not by asking twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import agreement_of, coordinator_of, histories, make_fleet
from scipy import stats

from fedmosaic.algorithm.local import Context
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.secret import DeviceSecret, new_secret
from fedmosaic.deploy.agreement import stamp_of
from fedmosaic.deploy.protocol import TaskMessage, UpdateMessage
from fedmosaic.privacy.noise import AddedNoise
from fedmosaic.testing import LocalTransport

NUMBERS = 4096
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def unmixed(words: Any) -> Any:
    """The states of SplitMix64 that gave some words: its finaliser is a bijection."""
    for by, factor in ((31, _M2), (27, _M1), (30, None)):
        found = words.copy()
        for _ in range(64 // by):
            found = words ^ (found >> np.uint64(by))
        words = found if factor is None else found * np.uint64(pow(factor, -1, 1 << 64))
    return words


def halves(draw: float, scale: float) -> Any:
    """32-bit words that a Laplace draw may have come from: 31 bits of its size, one of its sign."""
    size = round(float(np.exp(-abs(draw) / scale)) * 2.0**31) - 1
    spread = int(size * 1e-6) + 4  # the fast generator works in float32
    near = np.arange(max(size - spread, 0), min(size + spread + 1, 1 << 31), dtype=np.uint64)
    return near * np.uint64(2) + np.uint64(draw > 0)


def drawn_from(words: Any, scale: float) -> Any:
    """The two Laplace draws of 64-bit words."""
    pair = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=-1)
    size = -np.log(((pair >> np.uint64(1)).astype(np.float64) + 1) / 2.0**31)
    return scale * size * ((pair & np.uint64(1)).astype(np.float64) * 2 - 1)


def steps(at: int) -> Any:
    """How far the counter is from its key."""
    return np.array([(at + 1) * int(keys.GOLDEN) % (1 << 64)], np.uint64)


def recovered(noise: Any, scale: float) -> bool:
    """The attack: every key that two neighbouring numbers leave possible, tried on two others."""
    pairs = noise.reshape(-1, 2)
    at, check = (int(n) for n in np.argsort(-np.abs(pairs).min(axis=1))[:2])  # of rare draws few words are possible
    high, low = halves(pairs[at, 0], scale), halves(pairs[at, 1], scale)
    words = (high[:, None] << np.uint64(32) | low).ravel()
    found = unmixed(words) - steps(at)
    guesses = drawn_from(keys.mix(found + steps(check)), scale)
    return bool(np.isclose(guesses, pairs[check], atol=1e-4 * scale).all(axis=1).any())


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
    node, params = nodes["n0"], nodes["n0"].federation.start(data, agreement.seed).server.params
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
