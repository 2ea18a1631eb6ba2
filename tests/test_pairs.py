"""Every wrapper on every host: the engines agree, or the wrapper refuses by name. And what the papers say beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedmosaic import extend as fm
from fedmosaic.algorithm.objective import bpr
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.batches import make_examples
from fedmosaic.methods.registry import entry
from fedmosaic.privacy.per_example import per_example
from fedmosaic.testing import check_engines, run_rounds, toy_training_set

torch = pytest.importorskip("torch")
DATA = toy_training_set()
HOSTS: dict[str, dict[str, Any]] = {
    "fedmf": {"item_rate": 2.0},
    "pfedrec": {"item_rate": 2.0},
    "pfedrec deep": {"item_rate": 2.0, "layers": "4,3"},
    "fedncf": {"item_factor": 0.1, "user_rate": 1.0},
    "fedneumf": {"participation": 1.0},
    "fedrecon": {"item_factor": 0.1, "rebuild_epochs": 2},
    "fedrap": {"item_rate": 2.0, "local_epochs": 2},
    "fedrap-c": {"item_rate": 2.0, "local_epochs": 2},
    "local-only": {"item_rate": 2.0},
}
# wrapper, and the same with nothing to do
WRAPPERS: dict[str, tuple[fm.Wrapper, fm.Wrapper | None]] = {
    "dual": (fm.dual(), None),
    "additive": (fm.additive(0.1, 0.1, own_rate=0.5), None),
    "mixing": (fm.mixing(), fm.mixing(1.0, beta=0.0)),
    "mixing kept": (fm.mixing(keep=True), None),
    "sharpness": (fm.sharpness_aware(0.1, 0.1), fm.sharpness_aware()),
}
# who refuses whom, and in which words; everything else runs
REFUSED = {
    ("dual", "fedneumf"): "persistent optimiser",
    ("dual", "fedrap"): "dual would send item tables",
    ("dual", "local-only"): "dual would send item tables",
    ("additive", "pfedrec"): "cannot be replayed",
    ("additive", "pfedrec deep"): "cannot be replayed",
    ("additive", "fedrecon"): "rebuilds its answers",
    ("additive", "fedrap"): "additive: this host has tables of its own",
    ("additive", "local-only"): "additive wraps item tables that are sent",
    ("mixing", "fedneumf"): "mixing needs item rows that move on the device",
    ("mixing", "fedrap"): "cannot be replayed",
    ("mixing", "local-only"): "mixing wraps item tables that are sent",
    ("mixing kept", "fedneumf"): "mixing needs item rows that move on the device",
    ("mixing kept", "fedrecon"): "rebuilds its answers",
    ("mixing kept", "local-only"): "mixing wraps item tables that are sent",
}


def host_of(name: str) -> fm.Federation:
    made: fm.Federation = entry(name.split()[0]).build({"dim": 4, "negatives": 2, **HOSTS[name]})
    return made


def outcome(federation: fm.Federation, engine: str) -> tuple[Any, Any]:
    state, seen = run_rounds(replace(federation, engine=engine), DATA, 2)
    return state.server.params, seen[-1][1]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_and_a_host_agree_on_all_engines_or_refuse_by_name(wrapper: str, host: str) -> None:
    wrap, idle = WRAPPERS[wrapper]
    plain = host_of(host)
    if (wrapper, host) in REFUSED:
        with pytest.raises(SettingsError, match=REFUSED[wrapper, host]):
            wrap(plain.algorithm)
        return
    check_engines(replace(plain, algorithm=wrap(plain.algorithm)), DATA)
    if idle is not None:
        assert idle(plain.algorithm) == plain.algorithm


def test_two_tables_are_wrapped_as_one_is() -> None:
    """NeuMF has two item tables: own rows that begin at zero and do not move leave its scores as they are."""
    host = host_of("fedneumf").algorithm
    still = fm.additive(own_rate=0.0, init=fm.Init("zero"))(host)
    assert {"item.gmf.own", "item.mlp.own"} <= set(still.specs)
    plain, same = (outcome(fm.Federation(a, 2), "simulate") for a in (host, still))
    np.testing.assert_allclose(plain[1], same[1], rtol=1e-6)


def test_own_rows_are_added_to_mixed_ones() -> None:
    """mixing(additive(host)): item = weight · common + (1 - weight) · received + own."""
    host = fm.additive()(host_of("fedrap-c").algorithm)
    mixed = fm.mixing(0.25, keep=True, beta=0.0)(host)
    draw = torch.Generator().manual_seed(0)
    rows_of = {n: 5 if s.axis is fm.Axis.ITEM else 1 for n, s in host.specs.items()}
    params = {n: torch.randn(rows_of[n], *s.shape, generator=draw) for n, s in host.specs.items()}
    received = {"item": torch.randn(5, 4, generator=draw)}
    items = torch.arange(5)[None]
    batch = Batch(items, torch.zeros(1, 1, dtype=torch.long), items, items)
    found = mixed.model.score(View(params, batch, received), items)
    rows = 0.25 * params["item"] + 0.75 * received["item"] + params["item.own"]
    torch.testing.assert_close(found[0], rows @ params["user"][0] + params["bias"][0])


# --- section 5.2 of PFedRec: special cases ------------------------------------------------------------------------


def test_pfedrec_with_a_one_layer_score_function_is_pfedrec_on_fedmf() -> None:
    """A private layer w, b on the item's row is FedMF's user vector and bias: the same numbers, round after round."""
    linear = fm.linear(fm.LinearSettings(dim=4, negatives=2, item_rate=2.0))
    zero = fm.Init("zero")
    vector = replace(linear, model=fm.LinearScorer(4, item_init=linear.specs["item"].init, user_init=zero))
    network = fm.ScoreFunction(4, (), init=linear.specs["item"].init)
    user, item = linear.local[0].phases[0].moves
    layers = tuple(s.name for s in network.specs() if s.name != "item")
    step = fm.Phase((fm.Move(layers, user.rate), item))
    shared = dict.fromkeys(("item", *layers), fm.Role.SHARED)
    layer = replace(linear, model=network, roles=shared, local=(replace(linear.local[0], phases=(step,)),))

    class FromZero(fm.ScoreFunction):
        def specs(self) -> tuple[fm.Spec, ...]:
            return tuple(replace(s, init=zero) if s.name in layers else s for s in super().specs())

    def alone(host: fm.Algorithm) -> fm.Algorithm:
        """FedMF itself: everything but the items is the device's, items and score side move together."""
        return replace(host, roles={n: fm.Role.SHARED if n == "item" else fm.Role.PRIVATE for n in host.roles})

    layer = replace(layer, model=FromZero(4, (), init=linear.specs["item"].init))
    for make in (fm.dual(), alone):
        one, other = (outcome(fm.Federation(make(a), 2), "simulate") for a in (vector, layer))
        np.testing.assert_allclose(one[0]["item"], other[0]["item"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-5)


def test_fedncf_is_a_score_function_with_a_first_layer_that_is_partly_ones_own() -> None:
    """[u ; e] W + b = e W_e + (u W_u + b): a shared network whose first bias is the user's."""
    ncf, deep = fm.NCF(3, (5, 2)), fm.ScoreFunction(3, (5, 2))
    draw = torch.Generator().manual_seed(0)
    params = {s.name: torch.randn(6 if s.axis is fm.Axis.ITEM else 1, *s.shape, generator=draw) for s in ncf.specs()}
    private = params["user"] @ params["mlp.0.weight"][0, :3] + params["mlp.0.bias"]
    partial = {n: v for n, v in params.items() if n != "user"}
    partial |= {"mlp.0.weight": params["mlp.0.weight"][:, 3:], "mlp.0.bias": private}
    assert set(partial) == {s.name for s in deep.specs()}
    items = torch.arange(6)[None]
    batch = Batch(items, torch.zeros(1, 1, dtype=torch.long), items, items)
    torch.testing.assert_close(ncf.score(View(params, batch), items), deep.score(View(partial, batch), items))


# --- equation 1 and pair-wise losses ------------------------------------------------------------------------------


def test_clients_that_weigh_by_their_size_move_the_server_by_the_weighted_mean() -> None:
    plain = host_of("fedmf")
    state = plain.start(DATA, 0)
    before = state.server.params["item"]
    moved, sizes = [], []
    for user in range(DATA.n_users):
        ctx = fm.Context(1, 0, DATA.n_items, 13)
        _, done = replace(plain, engine="loop").contribute(DATA, state, ctx, np.array([user]))
        moved.append(done.total.totals["item"] / 2.0**32)
        sizes.append(done.total.examples)
    weighted = sum(s * m for s, m in zip(sizes, moved, strict=True)) / sum(sizes)
    for engine in ("auto", "loop", "simulate"):
        found = entry("fedmf").build({"dim": 4, "negatives": 2, "item_rate": 2.0, "weights": "size", "engine": engine})
        after = found.advance(DATA, state, 1, 0)[0].server.params["item"]
        np.testing.assert_allclose(after - before, weighted, rtol=1e-4, atol=1e-5)
    with pytest.raises(SettingsError, match="undo every bound"):
        entry("fedmf").build({"weights": "size", "noise": 0.1})
    with pytest.raises(SettingsError, match="plain mean"):
        entry("fedmf").build({"weights": "size", "preset": "scale-free"})


def test_bpr_is_the_mean_over_pairs_of_a_batch() -> None:
    class Given:
        def specs(self) -> tuple[fm.Spec, ...]:
            return ()

        def score(self, view: View, items: Any) -> Any:
            return view.params["score"]

    score = torch.tensor([[2.0, -1.0, 0.5, 9.0], [1.0, 2.0, 3.0, 4.0]])
    labels = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    batch = Batch(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long), labels, weight)
    found = bpr(Given(), View({"score": score}, batch), batch, fm.Context(1, 0, 1, 2))
    pairs = torch.tensor([2.0 + 1.0, 0.5 + 1.0])
    torch.testing.assert_close(found, torch.stack([torch.nn.functional.softplus(-pairs).mean(), torch.tensor(0.0)]))


@pytest.mark.parametrize("host", [h for h in HOSTS if h != "fedneumf"])
def test_every_host_takes_a_pair_wise_loss(host: str) -> None:
    made = entry(host.split()[0]).build({"dim": 4, "negatives": 2, **HOSTS[host], "loss": "pairwise"})
    found, expected = (outcome(made, engine) for engine in ("auto", "loop"))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-5)
    assert not np.allclose(found[1], outcome(host_of(host), "auto")[1])


# --- gradients example by example ---------------------------------------------------------------------------------


def dp(clip: float, multiplier: float, names: tuple[str, ...] = (), host: str = "fedrap-c") -> fm.Federation:
    plain = host_of(host)
    return replace(plain, algorithm=per_example(clip, multiplier, names)(plain.algorithm))


def test_clipping_that_clips_nothing_is_the_host() -> None:
    for host in ("fedmf", "fedrap-c", "fedrap"):
        one, other = outcome(dp(1e9, 0.0, host=host), "simulate"), outcome(host_of(host), "simulate")
        np.testing.assert_allclose(one[0]["item"], other[0]["item"], rtol=1e-4, atol=1e-6)


def test_every_example_is_clipped_by_itself() -> None:
    """One step by hand: score = w·e + b, so an example's gradient of its row is (s - y) w."""
    clip = 0.01
    made = dp(clip, 0.0, ("item",), "fedmf")
    step = replace(made.algorithm.local[0], batch_size=1 << 20)
    item = step.phases[0].moves[1]
    alone = replace(step, phases=(fm.Phase((replace(item, rate=1.0),)),))
    made = replace(made, algorithm=replace(made.algorithm, local=(alone,)), engine="loop")
    state = made.start(DATA, 0)
    start = state.server.params["item"]
    _, done = made.contribute(DATA, state, fm.Context(1, 0, DATA.n_items, 13), np.array([0]))
    change = done.total.totals["item"] / 2.0**32
    examples = make_examples(DATA, np.array([0]), negatives=2, seed=0, round=1)
    vector, bias = (made.algorithm.specs[n].rows(0, np.array([0]))[0] for n in ("user", "bias"))
    error = 1 / (1 + np.exp(-(start[examples.items] @ vector + bias[0]))) - examples.labels
    own = error[:, None] * vector
    clipped = own * np.minimum(1, clip / np.linalg.norm(own, axis=1))[:, None]
    expected = np.zeros_like(change)
    np.add.at(expected, examples.items, -clipped / examples.items.size)
    np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-6)
    assert (np.linalg.norm(own, axis=1) > clip).mean() > 0.5, "little was clipped: the test shows nothing"


@pytest.mark.parametrize("names", [("item",), ()])
def test_noise_in_steps_is_the_same_on_both_engines_and_has_its_law(names: tuple[str, ...]) -> None:
    made = dp(0.1, 1.0, names, "fedmf")
    found, expected = (outcome(made, engine) for engine in ("simulate", "loop"))
    np.testing.assert_allclose(found[0]["item"], expected[0]["item"], rtol=1e-4, atol=1e-5)
    # rows that no client trains move by the noise alone: rate · multiplier · clip / n in every step
    data = toy_training_set(users=13, items=23)
    excluded = Ragged.from_rows([list(range(23))] * 13)  # no negatives
    few = replace(data, histories=Ragged.from_rows([[0, 1]] * 13), excluded=excluded)
    made = replace(dp(0.1, 1.0, names, "fedmf"), engine="simulate")
    state = made.start(few, 0)
    spread = []
    for seed in range(20):
        _, done = made.contribute(few, state, fm.Context(1, seed, 23, 13), np.arange(13))
        spread.append((done.total.totals["item"] / 2.0**32)[2:])
    n = done.total.examples / 13
    expected_spread = 2.0 * 0.1 / n * np.sqrt(13)
    assert abs(np.std(spread) / expected_spread - 1) < 0.05


def test_layers_and_gradient_uploads_are_refused() -> None:
    with pytest.raises(SettingsError, match="are layers"):
        outcome(dp(0.1, 1.0, host="fedncf"), "simulate")
    with pytest.raises(SettingsError, match="plain uploads"):
        dp(0.1, 1.0, host="fedneumf")
    with pytest.raises(SettingsError, match="plain uploads"):
        fm.clipped(1.0)(dp(0.1, 1.0).algorithm)
    with pytest.raises(SettingsError, match="uphill point"):
        fm.sharpness_aware(0.1)(dp(0.1, 1.0).algorithm)
    for given in ({"loss": "pairwise"}, {"norm": "nuclear"}):
        made = entry("fedrap").build({"dim": 4, "clip": 0.1, "noise_on": "shared", **given})
        with pytest.raises(SettingsError, match="no mean over examples"):
            outcome(made, "simulate")
    with pytest.raises(SettingsError, match="'spare' does not move"):
        dp(0.1, 1.0, ("spare",))


def test_fedraps_three_readings_of_its_noise_differ() -> None:
    given = {"dim": 4, "negatives": 2, "item_rate": 2.0, "clip": 0.1, "noise_multiplier": 1.0}
    found: list[Any] = []
    for on in ("upload", "shared", "all"):
        found.append(outcome(entry("fedrap").build({**given, "noise_on": on}), "auto")[0]["item"])
    assert not any(np.allclose(a, b) for a, b in ((found[0], found[1]), (found[1], found[2])))
