"""Methods with work on the server or a third party, and the tools that look into trained models."""

from __future__ import annotations

import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmosaic import FederatedRecommender
from fedmosaic.algorithm.local import Adam, Context
from fedmosaic.algorithm.upload import Parcel
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.batches import make_examples
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.spectrum import effective_rank, information_abundance
from fedmosaic.methods import registry
from fedmosaic.methods.gpfedrec import GPFedRec, neighbours_mean
from fedmosaic.methods.metamf import generate
from fedmosaic.privacy.noise import PseudoItems
from fedmosaic.testing import check_chunks, check_engines, check_privacy, digest, same_parity_share, toy_training_set

torch = pytest.importorskip("torch")

SMALL: dict[str, dict[str, Any]] = {
    "metamf": {"dim": 4, "narrow": 2, "hidden": 8, "memory": 6, "group": 4, "rounds": 3},
    "fedpergnn": {"dim": 4, "rounds": 3, "period": 1, "neighbours": 2, "pseudo": 3},
    "gpfedrec": {"dim": 4, "rounds": 3, "batch_size": 16, "item_factor": 0.05, "network_rate": 0.1, "user_rate": 0.1},
}


def trained(name: str, data: TrainingSet, **changes: Any) -> tuple[Any, Any, Any]:
    method = registry.entry(name).build(SMALL[name] | changes)
    each = np.arange(data.n_items, dtype=np.int32)
    everything = Ragged(np.tile(each, data.n_users), np.arange(data.n_users + 1) * data.n_items)
    state, answers = method.start(data, 1), None
    for number in range(1, method.rounds + 1):
        state, record, answers = method.advance(data, state, number, 1, everything)
        assert np.isfinite(record.loss)
        assert record.bytes_up > 0
    return method, state, answers


@pytest.mark.parametrize("name", SMALL)
def test_answers_are_the_scores_and_the_seed_decides(name: str) -> None:
    data = toy_training_set()
    method, state, answers = trained(name, data)
    scores = method.scorer(data, state).scores(np.arange(data.n_users))
    np.testing.assert_allclose(scores.ravel(), answers, atol=1e-4)
    assert digest(method.pack(state)) == digest(method.pack(trained(name, data)[1]))
    assert method.vectors(state).shape[0] == data.n_items


@pytest.mark.parametrize("name", SMALL)
def test_partial_participation(name: str) -> None:
    _, _, answers = trained(name, toy_training_set(), participation=0.4)
    assert np.isfinite(answers).all()


@pytest.mark.parametrize("name", SMALL)
def test_round_trip(name: str, tmp_path: Path) -> None:
    from fedmosaic.data.sources import load

    model = FederatedRecommender(name, **SMALL[name]).fit(load("synthetic", users=40, items=50, per_user=8))
    model.save(tmp_path / "m")
    assert FederatedRecommender.load(tmp_path / "m").recommend(k=5).equals(model.recommend(k=5))


LEARN: dict[str, dict[str, Any]] = {
    "metamf": {
        "dim": 8,
        "narrow": 4,
        "hidden": 32,
        "memory": 16,
        "group": 4,
        "rounds": 30,
        "server_rate": 0.01,
        "decay": 0.003,
    },
    "fedpergnn": {"dim": 8, "rounds": 80, "neighbours": 2, "pseudo": 2, "noise": 0.001},
    "gpfedrec": {"dim": 8, "rounds": 80, "network_rate": 0.3, "user_rate": 1.0, "item_factor": 0.5, "batch_size": 64},
}


@pytest.mark.parametrize("name", LEARN)
def test_learning_law(name: str) -> None:
    assert same_parity_share(registry.entry(name).build(LEARN[name])) >= 0.9


def test_the_device_part_of_fedpergnn_keeps_the_laws() -> None:
    """Between expansions it is a federation like any other; here with neighbours that mean something."""
    method = registry.entry("fedpergnn").build(SMALL["fedpergnn"])
    for check in (check_engines, check_chunks, check_privacy):
        check(method.federation)
    plain = registry.entry("fedpergnn").build(SMALL["fedpergnn"] | {"neighbours": 0, "noise": 0.0, "pseudo": 0})
    check_engines(plain.federation)


def test_neighbours_matter_and_oneself_is_not_among_them() -> None:
    data = toy_training_set()
    method = registry.entry("fedpergnn").build(SMALL["fedpergnn"] | {"noise": 0.0, "pseudo": 0, "publish_noise": 0.0})
    state = method.start(data, 1)
    users = np.arange(data.n_users)
    before = method.scorer(data, state).scores(users)
    state = method._expanded(data, state, 2, 1)
    after = method.scorer(data, state).scores(users)
    assert not np.allclose(before, after, atol=1e-4)
    lonely = TrainingSet(Ragged.from_rows([[0, 1], [2, 3]]), Ragged.from_rows([[0, 1], [2, 3]]), 5)  # nothing in common
    state = method.start(lonely, 1)
    first = method.scorer(lonely, state).scores(np.arange(2))
    state = method._expanded(lonely, state, 2, 1)
    np.testing.assert_allclose(method.scorer(lonely, state).scores(np.arange(2)), first, atol=1e-6)


def test_pseudo_items_are_rows_that_were_not_trained() -> None:
    change = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    change[3] = 0  # the second client has no gradient, so nothing to imitate
    own, items = {"item": np.array([0, 0, 0, 1])}, {"item": np.array([7, 2, 5, 1], np.int32)}
    parcel = Parcel({"item": change}, {"item": change}, own, items, np.array([3, 8]), Context(1, 0, 10, 2))
    found = PseudoItems(3).encode(parcel)
    assert np.array_equal(found.changes["item"][:4], change)
    assert found.owners["item"].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert set(found.items["item"][4:]) < set(range(10)) - {7, 2, 5}
    assert len(set(found.items["item"][4:])) == 3
    assert (found.changes["item"][4:] != 0).all()
    other = PseudoItems(3).encode(replace(parcel, client_ids=np.array([4, 8])))
    assert not np.array_equal(found.changes["item"], other.changes["item"])
    few = PseudoItems(9).encode(parcel)
    assert sorted([*few.items["item"][:3], *few.items["item"][4:]]) == list(range(10))  # no more than there are


def test_gpfedrec_links_the_similar_and_pulls_towards_them() -> None:
    near, far = np.ones((1, 2, 2), np.float32), -np.ones((1, 2, 2), np.float32)
    mixed = neighbours_mean(np.concatenate([near, 1.2 * near, far]), 1.0)
    np.testing.assert_allclose(mixed[0], 1.1 * near[0], rtol=1e-6)
    np.testing.assert_allclose(mixed[2], far[0], rtol=1e-6)
    data = toy_training_set()
    gaps = []
    for pull in (0.0, 50.0):
        method = registry.entry("gpfedrec").build(SMALL["gpfedrec"] | {"pull": pull, "rounds": 2})
        assert isinstance(method, GPFedRec)
        state = method.start(data, 1)
        for number in (1, 2):
            before = state.anchor
            state, _, _ = method.advance(data, state, number, 1)
        gaps.append(float(np.abs(state.tuned - before).mean()))
    assert gaps[1] < gaps[0]


def test_metamf_gradients_are_those_of_the_whole_chain() -> None:
    """Sending the gradient of generated tensors and going on at the server is one back-propagation."""
    data = toy_training_set()
    method = registry.entry("metamf").build(SMALL["metamf"] | {"group": 100, "gradient_clip": 1e9, "decay": 0.0})
    state = method.start(data, 1)
    leaves = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in state.params.items()}
    clients = np.flatnonzero(data.histories.lengths > 0)
    made = generate(leaves, torch.from_numpy(clients), method.settings)
    examples = make_examples(data, clients, negatives=method.settings.negatives, seed=1, round=1)
    loss = torch.zeros(())
    for place, (begin, end) in enumerate(pairwise(examples.offsets.tolist())):
        table = made["factors"][place] @ made["rise"][place]
        rows = table[torch.from_numpy(examples.items[begin:end].astype(np.int64))]
        hidden = torch.relu(rows @ made["hidden.weight"][place] + made["hidden.bias"][place])
        scores = (hidden @ made["out.weight"][place] + made["out.bias"][place]).squeeze(-1)
        labels = torch.from_numpy(examples.labels[begin:end])
        loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(scores, labels) / clients.size
    whole = torch.autograd.grad(loss, list(leaves.values()))
    after, _, _ = method.advance(data, state, 1, 1)
    for name, gradient in zip(leaves, whole, strict=True):
        moved = torch.from_numpy(after.memory[name][0]) / (1 - Adam().beta1)  # the first step of Adam's first moment
        torch.testing.assert_close(moved.view_as(gradient), gradient, atol=1e-6, rtol=1e-4)


# --- looking into models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedmf", "pfedrec", "fedrap", "fedrecon-dual", "fedmf-plgc", "local-only"])
def test_item_rows_are_what_a_device_scores_with(name: str) -> None:
    from fedmosaic.engines.item_rows import item_rows

    given: dict[str, Any] = {"dim": 4, "batch_size": 16}
    fields = registry.entry(name).settings.model_fields
    given |= {"item_rate": 2.0} if "item_rate" in fields else {"item_factor": 0.1}
    federation = registry.entry(name).build(given)
    data = toy_training_set()
    state = federation.start(data, 1)
    for number in (1, 2):
        state, _, _ = federation.advance(data, state, number, 1)
    scorer = federation.scorer(data, state)
    scores = scorer.scores(np.array([0, 1]))
    gaps = []
    for user in (0, 1):
        rows = item_rows(scorer, user)["item"]
        if name == "fedrecon-dual":  # its vectors are rebuilt; scores must still be affine in the rows
            fit = np.linalg.lstsq(np.c_[rows, np.ones(len(rows))], scores[user], rcond=None)[0]
            gaps.append(np.abs(np.c_[rows, np.ones(len(rows))] @ fit - scores[user]).max())
        else:
            vector, bias = state.devices.dense("user")[user], state.devices.dense("bias")[user]
            gaps.append(np.abs(rows @ vector + bias - scores[user]).max())
    assert max(gaps) < 1e-4


def test_landscape_is_exact_and_comparable() -> None:
    from fedmosaic.reproduce.landscape import Landscape, look

    data = toy_training_set()
    flat, sharp = (
        registry.entry("fedrecgel").build({"dim": 4, "participation": 1.0, "rho_shared": r}) for r in (0.5, 0.0)
    )
    lands = []
    for federation in (flat, sharp):
        state = federation.start(data, 1)
        for number in range(1, 6):
            state, _, _ = federation.advance(data, state, number, 1)
        lands.append(Landscape(federation, data, state))
    one, two = (land.direction(0) for land in lands)
    assert all(torch.equal(one[n], two[n]) for n in one)  # the same for both
    length = sum(float(v.square().sum()) for v in one.values())
    assert abs(length - 1) < 1e-5
    land = lands[0]
    assert land.loss() == land.loss(dict.fromkeys(land.shared, torch.zeros(())))  # no noise of its own
    surface = land.surface(radius=0.5, points=3)
    assert surface.losses.shape == (3, 3)
    assert abs(surface.losses[1, 1] - land.loss()) < 1e-9
    scaled = land.direction(0, "filter")
    for name, value in scaled.items():
        if value.ndim == 2:
            torch.testing.assert_close(value.norm(dim=1), land.shared[name].norm(dim=1), rtol=1e-4, atol=1e-6)
    found = land.sharpness(radius=0.5, directions=3)
    assert found.uphill_rise >= found.worst_rise - 1e-6
    paper = [land.noisy_loss(land.direction(0, "paper"), seed) for seed in (1, 2)]
    assert np.isfinite(paper).all()
    ways = [land.direction(number, "paper") for number in (0, 1)]
    cosine = sum(float((ways[0][n] * ways[1][n]).sum()) for n in ways[0])
    assert 0.3 < cosine < 0.7  # entries of mean 1 are half aligned: why the recipe misleads
    for radius in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(SettingsError, match="radius"):
            look(flat, data, flat.start(data, 1), radius, 3, "zero-mean", 0)


def test_spectrum_of_collapsed_and_full_tables() -> None:
    rng = np.random.default_rng(0)
    full, flat = rng.standard_normal((200, 8)), rng.standard_normal((200, 1)) @ rng.standard_normal((1, 8))
    assert information_abundance(full) > 5 > 1.01 > information_abundance(flat)
    assert effective_rank(full) > 7
    assert effective_rank(flat) < 1.01
    assert information_abundance(np.zeros((3, 2))) == effective_rank(np.zeros((3, 2))) == 0


def test_the_example_of_ones_own_algorithm_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[1] / "examples" / "own_algorithm.py"
    monkeypatch.setattr("sys.argv", ["own_algorithm.py", "--dataset", "synthetic", "--rounds", "2"])
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        registry._registered.pop("near", None)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("fedmf", "near", "full HR@10"))
