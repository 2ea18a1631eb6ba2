"""Files say what they belong to: a state of another run, model, node, method or width is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from conftest import random_interactions

from fedmosaic import FederatedRecommender
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.files import load_tensors, save_tensors
from fedmosaic.deploy.agreement import Agreement, catalogue_digest
from fedmosaic.deploy.coordinator import Coordinator
from fedmosaic.deploy.history import take_history
from fedmosaic.deploy.node import Node
from fedmosaic.deploy.roster import Member
from fedmosaic.engines.state import FederationState
from fedmosaic.methods.registry import entry
from fedmosaic.runs import run
from fedmosaic.runs.run_folder import RunFolder
from fedmosaic.runs.settings import Settings
from fedmosaic.testing import Clock, LocalTransport, toy_training_set

SMALL = {"users": 30, "items": 40, "per_user": 6, "rounds": 1, "dim": 4}


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    for name, dim in (("one", 4), ("two", 5)):
        run.start(Settings.make("fedmf", "synthetic", SMALL | {"dim": dim}), tmp_path / name)
    best = Path("checkpoint") / "best.safetensors"
    shutil.copy(tmp_path / "two" / best, tmp_path / "one" / best)
    with pytest.raises(ForeignError, match=r"best\.safetensors belongs to another run \(method fedmf"):
        RunFolder.open(tmp_path / "one").recommender()


def test_a_run_does_not_go_on_from_a_foreign_checkpoint(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        run.start(Settings.make("fedmf", "synthetic", SMALL | {"seed": seed}), tmp_path / name)
    shutil.copytree(tmp_path / "two" / "checkpoint", tmp_path / "one" / "checkpoint", dirs_exist_ok=True)
    (tmp_path / "one" / "summary.json").unlink()
    with pytest.raises(ForeignError, match="belongs to another run"):
        run.resume(tmp_path / "one")


def test_a_saved_model_with_the_state_of_another_is_refused(tmp_path: Path) -> None:
    for name, dim in (("one", 4), ("two", 5)):
        FederatedRecommender("fedmf", rounds=1, dim=dim).fit(random_interactions()).save(tmp_path / name)
    shutil.copy(tmp_path / "two" / "state.safetensors", tmp_path / "one" / "state.safetensors")
    with pytest.raises(ForeignError, match="belongs to another model"):
        FederatedRecommender.load(tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedrap", r"\(23, 4\); this method's is \(23, 5\)"),
        ("metamf", "another method"),
        ("ease", "has weights"),
    ],
)
def test_a_state_of_another_method_or_width_is_refused(name: str, words: str) -> None:
    data, method = toy_training_set(), entry("fedmf").build({"dim": 4})
    arrays = method.pack(method.start(data, 0))
    other = entry(name).build({} if name == "ease" else {"dim": 5})
    with pytest.raises(ForeignError, match=words):
        other.unpack(arrays, "the file")
    again = FederationState.unpack(method.algorithm, arrays, "the file").pack()
    assert {k: v.tolist() for k, v in again.items()} == {k: v.tolist() for k, v in arrays.items()}


@pytest.fixture
def catalogue() -> pl.DataFrame:
    return pl.DataFrame({"item": [f"i{n}" for n in range(12)]})


def make_node(place: Path, catalogue: pl.DataFrame, client: int, dim: int = 4) -> Node:
    items = catalogue_digest(catalogue)
    agreement = Agreement(method="fedmf", method_settings={"dim": dim, "rounds": 1}, items=items, secure=False)
    Node.create(place, agreement, catalogue, np.array([client]), place.name)
    take_history(place, pl.DataFrame({"item": ["i1", "i2", "i5"]}), user=None)
    return Node(place)


def test_a_device_does_not_take_over_the_state_of_another(tmp_path: Path, catalogue: pl.DataFrame) -> None:
    nodes = {f"d{n}": make_node(tmp_path / f"d{n}", catalogue, n) for n in range(2)}
    nodes["d0"].agreement.write(tmp_path)
    clock = Clock()
    roster = {name: Member(n) for n, name in enumerate(nodes)}
    Coordinator(tmp_path, lambda: roster, LocalTransport(nodes), n_items=12, clock=clock, sleep=clock.sleep).run()
    Node(tmp_path / "d0").recommender()
    shutil.copy(tmp_path / "d1" / "state.safetensors", tmp_path / "d0" / "state.safetensors")
    with pytest.raises(ForeignError, match="belongs to another node"):
        Node(tmp_path / "d0")
    wide = make_node(tmp_path / "wide", catalogue, 0, dim=6)
    wide.agreement.write(tmp_path)
    with pytest.raises(ForeignError, match="belongs to another federation"):
        Coordinator(tmp_path, lambda: roster, LocalTransport({}), n_items=12)


def test_a_server_file_of_another_width_is_refused_even_with_the_right_name(
    tmp_path: Path, catalogue: pl.DataFrame
) -> None:
    node = make_node(tmp_path / "d0", catalogue, 0)
    node.agreement.write(tmp_path)
    clock = Clock()
    transport = LocalTransport({"d0": node})
    Coordinator(tmp_path, lambda: {"d0": Member(0)}, transport, n_items=12, clock=clock, sleep=clock.sleep).run()
    arrays, meta = load_tensors(tmp_path / "server.safetensors")
    save_tensors(tmp_path / "server.safetensors", arrays | {"server/item": arrays["server/item"][:, :3]}, meta)
    with pytest.raises(ForeignError, match=r"'server/item' of shape \(12, 3\); this method's is \(12, 4\)"):
        Coordinator(tmp_path, lambda: {"d0": Member(0)}, transport, n_items=12)
