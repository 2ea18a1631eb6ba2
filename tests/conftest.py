"""Shared fixtures. Real data lies beside the repository or where FEDMOSAIC_DATA says; without it, tests skip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fedmosaic.core.threads import use_threads
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.split import Split, leave_one_out

use_threads(1)  # the tests run in parallel processes already; PyTorch is asked only where it is in use
# What cannot even be imported without an extra is left out, and said at the head of the run.
NEED_FLOWER = [
    "fleets.py", "test_binding.py", "test_deploy.py", "test_devices.py", "test_faults.py", "test_gate.py",
    "test_messages.py", "test_secret.py", "test_sums_on_the_wire.py",
]  # fmt: skip
collect_ignore = [] if find_spec("flwr") else NEED_FLOWER
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_report_header() -> list[str]:
    return [f"without Flower, left out: {', '.join(collect_ignore)}"] if collect_ignore else []


@pytest.fixture(scope="session")
def real_data() -> Path:
    place = Path(os.environ.get("FEDMOSAIC_DATA", BESIDE))
    if not place.is_dir():
        pytest.skip("needs the real data sets: set FEDMOSAIC_DATA to their folder")
    return place


@pytest.fixture(autouse=True, scope="session")
def unhurried_disk() -> Iterator[None]:
    """Files are written as always, but nobody waits for the disk: no test pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("FEDMOSAIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDMOSAIC_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def ml100k(real_data: Path) -> Split:
    from fedmosaic.data.sources import load

    return leave_one_out(load("ml-100k", real_data, download=False))


def random_interactions(users: int = 30, items: int = 40, seed: int = 0, low: int = 4, high: int = 12) -> Interactions:
    """Distinct pairs with times; every user has between `low` and `high` events."""
    rng = np.random.default_rng(seed)
    rows = [
        (u, int(i), int(rng.integers(0, 50)))
        for u in range(users)
        for i in rng.choice(items, rng.integers(low, high + 1), replace=False)
    ]
    user, item, time = zip(*rows, strict=True)
    return Interactions.from_frame({"user": user, "item": item, "time": time}, time="time")


@pytest.fixture
def small() -> Split:
    return leave_one_out(random_interactions())
