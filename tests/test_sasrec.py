"""SASRec: its loss against the definition, order and causality, answers for everybody, same bytes however it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command

from fedmosaic import Interactions, leave_one_out
from fedmosaic.core.errors import ForeignError, SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.core.threads import VARIABLE
from fedmosaic.data.histories import Histories
from fedmosaic.data.negatives import training_set
from fedmosaic.data.split import Split
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.evaluation.evaluate import evaluate
from fedmosaic.methods.registry import entry
from fedmosaic.methods.sasrec import NextScorer, SASRec, SASRecState, in_some_order
from fedmosaic.testing import digest, toy_training_set

torch = pytest.importorskip("torch")

SMALL: dict[str, Any] = {"dim": 8, "blocks": 2, "heads": 2, "length": 6, "batch_size": 64}
WALK: dict[str, Any] = {"dim": 16, "blocks": 1, "length": 12, "dropout": 0.1, "batch_size": 32, "rate": 0.01}


def trained(data: TrainingSet, rounds: int, **given: Any) -> tuple[SASRec, SASRecState]:
    method = entry("sasrec").build({**given, "rounds": rounds})
    method.check_installed()
    state = method.start(data, 1)
    for number in range(1, rounds + 1):
        state, record, _ = method.advance(data, state, number, 1)
        assert record.loss is not None
        assert np.isfinite(record.loss)
    return method, state


def answers(method: SASRec, state: SASRecState, rows: list[list[int]]) -> Any:
    """Scores of some histories that nobody trained on."""
    held = Histories(Ragged.from_rows(rows), state.params["item"].shape[0] - 1)
    return NextScorer(method.settings, held, state).scores(np.arange(len(rows)))


@pytest.fixture(scope="module")
def shop() -> Split:
    """Everybody walks a circle of 40 items, from anywhere, in steps of one or two."""
    rng = np.random.default_rng(0)
    walks = (rng.integers(40, size=(150, 1)) + np.cumsum(rng.integers(1, 3, (150, 12)), axis=1)) % 40
    rows = {"user": np.repeat(np.arange(150), 12), "item": walks.ravel(), "when": np.tile(np.arange(12), 150)}
    return leave_one_out(Interactions.from_frame(rows, time="when"))


@pytest.mark.parametrize("negatives", [0, 10])
def test_it_learns_a_circle_and_which_way_it_is_walked(shop: Split, negatives: int) -> None:
    data = training_set(shop, "strict")
    method, state = trained(data, 16, negatives=negatives, **WALK)
    fed = data.followed_by(shop.held("validation"))
    found = [evaluate(method.scorer(d, state), shop, "test").full.mean("hr", 2) for d in (fed, data)]
    assert found[0] > 0.8
    assert found[1] < found[0] - 0.2, "the validation item is fed where it is asked for"
    ids = shop.interactions.items
    there, back, nobody = answers(method, state, [ids.positions(w).tolist() for w in ([3, 4, 5], [5, 4, 3], [])])
    assert set(ids.take(np.argsort(-there)[:2]).to_list()) == {6, 7}
    assert not np.allclose(there, back, atol=0.1)
    assert np.isfinite(nobody).all()
    assert np.ptp(nobody) > 0


def test_a_run_asks_with_all_that_came_before(shop: Split, tmp_path: Path) -> None:
    rows = shop.interactions
    lines = [f"{u},{i},{t}" for u, i, t in zip(rows.user, rows.item, rows.time, strict=True)]  # type: ignore[arg-type]
    (tmp_path / "shop.csv").write_text("user,item,when\n" + "\n".join(lines) + "\n")
    given = ("time=when", "input=all-before", "select=full:ndcg@10", "rounds=2", "dim=8", "length=5")
    told = run_command("run", "sasrec", str(tmp_path / "shop.csv"), *given, "--out", str(tmp_path / "run"), "-q")
    assert told.code == 0
    assert "input all-before" in told.out


@pytest.mark.parametrize("negatives", [0, 5])
def test_the_same_bytes_for_any_threads_and_after_a_file(negatives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy_training_set(users=90)  # several groups in a step
    times = np.concatenate(
        [np.sort(np.random.default_rng(u).integers(0, 5, row.size)) for u, row in enumerate(data.histories)]
    )
    data = TrainingSet(data.histories, data.excluded, data.n_items, times=times)
    given = SMALL | {"negatives": negatives}
    method, whole = trained(data, 4, **given)
    monkeypatch.setenv(VARIABLE, "3")
    method, half = trained(data, 2, **given)
    packed = method.pack(half)
    state = method.unpack({n: v.copy() for n, v in packed.items()}, "a file")
    for number in (3, 4):
        state = method.advance(data, state, number, 1)[0]
    assert digest(method.pack(state)) == digest(method.pack(whole))
    assert digest(method.pack(half)) == digest(packed), "a state that goes in stays as it was"
    assert digest(packed) != digest(method.pack(trained(data, 2, **given | {"reorder": False})[1]))
    assert method.vectors(state).shape == (data.n_items, 8)


def test_foreign_states_and_uneven_heads_are_refused() -> None:
    method, state = trained(toy_training_set(), 1, **SMALL)
    with pytest.raises(ForeignError, match="a file holds no network"):
        method.unpack({"strange": np.zeros(3)}, "a file")
    with pytest.raises(ForeignError, match="place"):
        entry("sasrec").build(SMALL | {"length": 9}).unpack(method.pack(state), "a file")
    with pytest.raises(SettingsError, match="3 does not divide 8"):
        entry("sasrec").build({"dim": 8, "heads": 3})


def test_no_event_sees_a_later_one_and_only_the_last_are_read() -> None:
    from fedmosaic.methods.sasrec_network import Network, Walks

    method, state = trained(toy_training_set(), 1, **SMALL)
    network = Network.of(state.params, 2, 2)

    def read(*rows: list[int]) -> Any:
        with torch.no_grad():
            return network.read(Walks.of(Ragged.from_rows(rows))).numpy()

    first, other = read([1, 2, 3, 4], [5]), read([1, 2, 9, 8], [5])
    np.testing.assert_array_equal(first[:2], other[:2])
    assert (np.abs(first[2:4] - other[2:4]).max(axis=1) > 1e-3).all()
    np.testing.assert_allclose(read([5])[0], first[4], atol=1e-6)  # what is padded is not seen
    long = list(range(10))
    np.testing.assert_array_equal(answers(method, state, [long]), answers(method, state, [long[-6:]]))
    assert not np.allclose(answers(method, state, [long]), answers(method, state, [long[-5:]]), atol=1e-4)


@pytest.mark.parametrize("count", [11, 4])
def test_loss_and_slopes_are_those_of_the_definition(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedmosaic.methods.sasrec_network import cross_entropy

    monkeypatch.setattr("fedmosaic.methods.sasrec_network.SCORES", 33)  # in pieces of three events and more
    draws = torch.Generator().manual_seed(0)
    table = torch.randn(12, 3, generator=draws).requires_grad_()
    found = torch.randn(10, 3, generator=draws).requires_grad_()
    targets, drawn = torch.arange(10) % 7, torch.randperm(11, generator=draws)[:count]
    weights = torch.zeros(10, 11)
    weights[:, drawn] = 11 / count
    weights[torch.arange(10), targets] = 1
    scores = found @ table[:-1].T
    expected = ((weights * scores.exp()).sum(1).log() - scores[torch.arange(10), targets]).sum()
    slopes = torch.autograd.grad(expected, [found, table])
    wanted = table.detach()[targets]
    loss, of_found, of_wanted, of_drawn = cross_entropy(found.detach(), wanted, targets, table.detach(), drawn)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(of_found, slopes[0])
    of_table = torch.zeros(12, 3).index_add_(0, drawn, of_drawn).index_add_(0, targets, of_wanted)
    torch.testing.assert_close(of_table, slopes[1])


def test_only_events_of_one_time_change_places() -> None:
    items, times = Ragged.from_rows([[1, 2, 3], [4, 5]]), np.array([1, 1, 2, 7, 7])
    seen = {
        tuple(in_some_order(Histories(items, 9, times), np.random.default_rng(s)).values.tolist()) for s in range(30)
    }
    assert seen == {(1, 2, 3, 4, 5), (2, 1, 3, 4, 5), (1, 2, 3, 5, 4), (2, 1, 3, 5, 4)}
    assert in_some_order(Histories(items, 9), np.random.default_rng(0)) is items
