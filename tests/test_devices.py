"""Devices: the same algorithms over messages; what leaves a device, what counts, and what survives."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import SMALL, LocalGrid, LocalTransport, coordinator_of, histories, make_fleet, pact_of

from fedmosaic.runtime.flower import FlowerTransport
from fedmosaic.runtime.relay import listening
from fedmosaic.store import load_tensors
from fedmosaic.zoo import entry


def close(found: Any, wanted: Any, what: str, tolerance: float = 2e-4) -> None:
    gap = np.abs(found - wanted) / (1 + np.abs(wanted))
    assert gap.max(initial=0) <= tolerance, f"{what} differs by {gap.max():.2e}"


def simulated(method: str, data: Any, rounds: int = 3, seed: int = 1, **settings: Any) -> Any:
    federation = replace(entry(method).build({"dim": 4, **SMALL[method], **settings}), engine="simulate")
    state = federation.start(data, seed)
    for number in range(1, rounds + 1):
        state, _, _ = federation.advance(data, state, number, seed)
    return state, federation.scorer(data, state).scores(np.arange(data.n_users))


@pytest.mark.parametrize("method", list(SMALL))
def test_devices_over_flower_equal_the_simulation(method: str, tmp_path: Path) -> None:
    data = histories()
    server, nodes = make_fleet(tmp_path, pact_of(method, data.n_items), data, [[u] for u in range(8)])
    with ExitStack() as stack:
        names = dict(enumerate(nodes, start=10))
        sockets = {n: stack.enter_context(listening(nodes[name].answer)) for n, name in names.items()}
        one = coordinator_of(server, nodes, FlowerTransport(LocalGrid(sockets), names), pause=0.001)
        one.run()
        one.share()
    expected, scores = simulated(method, data)
    for name in (n for n in expected if n.startswith(("server/", "rule/"))):
        close(one.state[name], expected[name], f"{method}: {name}")
    for user, node in enumerate(nodes.values()):
        for name in (n for n in expected if n.startswith("private/") and "." not in n):
            close(node.state[name][0], expected[name][user], f"{method}: {name} of {user}")
        found = node.recommender().recommend(f"u{user}", k=5, exclude_seen=False)
        best = np.argsort(-scores[user], kind="stable")[:5]
        close(np.array(found["score"]), scores[user][best], f"{method}: answers of {user}", 2e-3)


@pytest.mark.parametrize("method", list(SMALL))
def test_silos_and_devices_add_up(method: str, tmp_path: Path) -> None:
    data, some = histories(), {"participation": 0.7}
    pact = pact_of(method, data.n_items, settings=some)
    server, nodes = make_fleet(tmp_path, pact, data, [[0], [1], [2, 3, 4], [5, 6, 7]])
    one = coordinator_of(server, nodes, LocalTransport(nodes))
    one.run()
    expected, _ = simulated(method, data, **some)
    for name in (n for n in expected if n.startswith("server/")):
        close(one.state[name], expected[name], f"{method}: {name}")
    lines = [json.loads(line) for line in (server / "rounds.jsonl").read_text().splitlines()]
    assert [(line["round"], line["clients"], line["refused"]) for line in lines] == [(1, 6, 0), (2, 6, 0), (3, 6, 0)]
    assert load_tensors(server / "server.safetensors")[1]["round"] == 3
