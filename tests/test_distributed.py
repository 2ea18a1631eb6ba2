"""Engine law across processes: 2 and 4 ranks end in the bytes of one process."""

from __future__ import annotations

import json
import multiprocessing as mp
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.files import read_json, write_json
from fedmosaic.core.ragged import Ragged
from fedmosaic.core.threads import use_threads
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.methods.registry import entry
from fedmosaic.runs.multiprocess import run_together
from fedmosaic.runs.run import start
from fedmosaic.runs.settings import Settings
from fedmosaic.testing import digest, final_bytes, run_rounds

pytest.importorskip("torch")

SMALL: dict[str, dict[str, Any]] = {
    "fedmf": {"item_rate": 2.0},
    "pfedrec": {"item_rate": 2.0, "participation": 0.7},
    "fedncf": {"item_factor": 0.01, "user_rate": 0.5, "network_rate": 0.1},
    "fedrap": {"item_rate": 2.0, "decay": 0.01, "local_epochs": 2, "participation": 0.8},
    "fedrecgel": {"participation": 0.9},
    "local-only": {"item_rate": 2.0},
}


def crowd(users: int = 300, items: int = 30) -> TrainingSet:
    """More clients than one group holds, so that every rank has work."""
    rng = np.random.default_rng(0)
    histories = Ragged.from_rows([sorted(rng.choice(items, int(n), False).tolist()) for n in rng.integers(1, 9, users)])
    return TrainingSet(histories, histories.unique(), items)


def outcome(method: str, team: Any = None) -> dict[str, Any]:
    federation = replace(entry(method).build({"dim": 4, **SMALL[method]}), team=team)
    state, seen = run_rounds(federation, crowd())
    server = state.server.pack()
    return {
        "server": digest(server),
        "devices": digest({name: value for name, value in state.pack().items() if name not in server}),
        "answers": digest({str(number): answers for number, (_, answers) in enumerate(seen)}),
        "losses": [record.loss for record, _ in seen],
    }


@cache
def in_one_process() -> dict[str, dict[str, Any]]:
    return {method: outcome(method) for method in SMALL}


def rank(place: str, number: int, size: int) -> None:
    from fedmosaic.engines.distributed import joined

    use_threads(1)
    with joined(number, size, f"file://{place}/meet") as team:
        found = {method: outcome(method, team) for method in SMALL}
    write_json(Path(place) / f"{number}.json", found)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_end_in_the_bytes_of_one_process(size: int, tmp_path: Path) -> None:
    expected = in_one_process()  # first: what it compiles, ranks find in the cache
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [f"fedmosaic.{name}" for name in ("engines.distributed", "engines.simulate", "testing")]
    )
    processes = [context.Process(target=rank, args=(str(tmp_path), n, size), daemon=True) for n in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    for number in range(size):
        found = read_json(tmp_path / f"{number}.json")
        for method, values in expected.items():
            for what in ("server", "devices", "answers"):
                assert found[method][what] == values[what], (method, number, what)
            assert found[method]["losses"] == pytest.approx(values["losses"])


def test_a_run_shared_by_two_processes_ends_in_the_same_bytes(tmp_path: Path) -> None:
    given = {"users": 300, "items": 40, "per_user": 6, "dim": 4, "rounds": 3, "item_rate": 2.0}
    settings = Settings.make("pfedrec", "synthetic", given)
    start(settings, tmp_path / "alone")
    shared, config = tmp_path / "shared", str(tmp_path / "alone" / "config.toml")
    done = run_command("run", "--config", config, "--workers", "2", "--out", str(shared), "--json", "-q")
    use_threads(1)  # sharing has set what each of two processes may use
    assert done.code == 0, done.err
    assert json.loads(done.out)["rounds"] == 3
    assert final_bytes(shared) == final_bytes(tmp_path / "alone")


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    toy = {"users": 30, "items": 40, "per_user": 6}
    for method, number, words in (
        ("metamf", 0, "runs in one process"),
        ("mf", 0, "runs in one process"),
        ("fedmf", 2, "rank 2 is not one of 2"),
        ("fedmf", 1, "needs the --rendezvous"),
    ):
        with pytest.raises(SettingsError, match=words):
            run_together(Settings.make(method, "synthetic", toy), tmp_path / "run", 2, rank=number)


def test_addresses_beyond_this_machine_need_trust() -> None:
    from fedmosaic.engines.distributed import joined

    for wrong, words in (("tcp://10.0.0.7:4000", "trusted-network"), ("http://x", "rendezvous")):
        with pytest.raises(SettingsError, match=words), joined(0, 2, wrong):
            pass
