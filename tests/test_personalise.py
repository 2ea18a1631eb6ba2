"""Wrappers: what they compute, that their neutral settings are their hosts, and that every engine agrees on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedmosaic.algorithm.algorithm import Algorithm, compose
from fedmosaic.algorithm.local import SGD, Adam, Context, Move, Pass, Phase, plain_gradient
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.objective import ChunkedBCE
from fedmosaic.algorithm.parameters import Init, Role
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.view import Batch, View
from fedmosaic.algorithm.wrappers.additive import AdditiveModel, Norm, Ramp, additive
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.algorithm.wrappers.low_rank import low_rank
from fedmosaic.algorithm.wrappers.mixing import MixedModel, NTKWeight, decorrelation, distinct, mixing
from fedmosaic.algorithm.wrappers.sharpness import UphillGradient, climb, sharpness_aware
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import Ragged
from fedmosaic.engines.choice import ENGINES
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.state import FederationState, pack_devices
from fedmosaic.methods import registry
from fedmosaic.methods.base import roles_of
from fedmosaic.methods.fedmf import LinearSettings, linear
from fedmosaic.methods.fedncf import NetworkSettings, fedncf
from fedmosaic.methods.fedrap import ABLATIONS, AdditiveSettings, shared_table
from fedmosaic.methods.fedrecgel import SharpnessSettings, fedneumf
from fedmosaic.privacy.noise import clipped, noisy
from fedmosaic.testing import check_chunks, check_engines, check_privacy, digest, run_rounds, toy_training_set

torch = pytest.importorskip("torch")

RAP: dict[str, Any] = {"dim": 4, "item_rate": 2.0, "decay": 0.01, "local_epochs": 3, "batch_size": 32}
MIX: dict[str, Any] = {"dim": 4, "batch_size": 16, "item_rate": 2.0}
NET: dict[str, Any] = {"dim": 4, "batch_size": 16, "item_factor": 0.025, "network_rate": 0.5, "user_rate": 0.5}


def mixed_host(name: str, **changes: Any) -> Algorithm:
    """What the methods of that name wrap."""
    if name == "fedncf":
        return fedncf(NetworkSettings(**NET, **changes))
    host = linear(LinearSettings(**MIX, **changes))
    return host if name == "fedmf" else compose(host, dual())


def state_of(algorithm: Algorithm, **more: Any) -> FederationState:
    return run_rounds(Federation(algorithm, engine="simulate"), toy_training_set(), **more)[0]


def table_of(algorithm: Algorithm) -> Any:
    return state_of(algorithm).server.params["item"]


# --- engine law over the switches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"tolerance": 0.2},
        {"norm": "none"},
        {"norm": "nuclear"},
        {"norm": "infinity"},
        {"ramp": "as-released", "apart": 0.5, "sparse": 0.5},
        {"ramp": "frac", "norm": "l2", "sparse": 2.0},
        {"upload": "gradient"},
        {"threshold": 0.05},
        {"clip": 0.1, "noise_multiplier": 1.0},
        {"clip": 0.1, "decay": 0.0},
        {"clip": 50.0, "participation": 0.5},
        {"own_rate": 0.0},
        {"decay": 0.0},
        {"own_rate": 1.0, "step_decay": 0.5, "participation": 0.5},
    ],
    ids=str,
)
def test_engine_law_of_fedrap(changes: dict[str, Any]) -> None:
    federation = registry.entry("fedrap").build(RAP | changes)
    check_engines(federation)
    check_chunks(federation)
    check_privacy(federation)


@pytest.mark.parametrize("host", ["fedmf", "pfedrec", "fedncf"])
@pytest.mark.parametrize(
    ("switches", "changes", "participation"),
    [
        ({"keep": True}, {}, 1.0),
        ({"keep": True, "beta": 0.0}, {}, 0.5),
        ({"weight": 0.3}, {}, 1.0),
        ({"weight": NTKWeight(rows="examples", centred=True)}, {}, 1.0),
        ({"weight": NTKWeight(rows="all")}, {}, 1.0),
        ({"weight": NTKWeight(when="epoch")}, {"local_epochs": 2}, 1.0),
        ({"weight": NTKWeight(when="round", smooth=True), "keep": True}, {}, 1.0),
        ({"weight": NTKWeight(clip=(0.45, 0.55))}, {}, 1.0),
        ({"weight": NTKWeight(exact=True)}, {}, 1.0),
        ({"form": "self", "gamma": 1.0}, {}, 1.0),
    ],
    ids=str,
)
def test_engine_law_of_mixing(
    host: str, switches: dict[str, Any], changes: dict[str, Any], participation: float
) -> None:
    federation = Federation(mixing(**switches)(mixed_host(host, **changes)), participation=participation)
    check_engines(federation)
    check_privacy(federation)


@pytest.mark.parametrize("host", ["fedmf", "pfedrec", "fedncf"])
def test_settings_of_mixing_reach_the_wrapper(host: str) -> None:
    given = NET if host == "fedncf" else MIX
    chosen = {"mix": 0.3, "local": "keep", "decorrelation": 0.7, "gamma": 0.2, "form": "self"}
    made = registry.entry(f"{host}-plgc").build(given | chosen).algorithm
    assert made == mixing(0.3, keep=True, beta=0.7, gamma=0.2, form="self")(mixed_host(host))
    assert registry.entry(f"{host}-plgc").build(given).algorithm == mixing()(mixed_host(host))


def test_the_fused_engine_covers_the_linear_family() -> None:
    refuses = ENGINES["fused"].refuses
    for name in ("fedrap", "fedrap-no", "fedrap-l2", "fedmf-plgc", "pfedrec-plgc", "fedrecon", "fedrecon-dual", "colr"):
        reason = refuses(registry.entry(name).build().algorithm, "user")
        assert bool(reason) == (name == "colr"), (name, reason)
    for encoded in ({"threshold": 0.01}, {"clip": 0.1, "noise_multiplier": 1.0}):
        assert not refuses(registry.entry("fedrap").build(encoded).algorithm, "user"), encoded


@pytest.mark.parametrize("changes", [{"joint": True}, {"rho_shared": 0.0}, {"rho_private": 0.0}, {"dim": 8}], ids=str)
def test_engine_law_of_sharpness(changes: dict[str, Any]) -> None:
    federation = registry.entry("fedrecgel").build({"dim": 4, "participation": 0.5} | changes)
    check_engines(federation)
    check_chunks(federation)


@pytest.mark.parametrize(
    "wrapper",
    [
        noisy("laplace", 0.1),
        noisy("laplace", 0.1, "summed"),
        noisy("gaussian", 0.1),
        noisy("gaussian", 0.1, "summed"),
        clipped(0.05),
        low_rank(2),
        low_rank(4),
    ],
)
def test_engine_law_of_encoders_and_noise(wrapper: Any) -> None:
    host = linear(LinearSettings(**MIX))
    check_engines(Federation(wrapper(host)))
    check_engines(Federation(wrapper(compose(host, dual()))))


# --- identity laws ------------------------------------------------------------------------------------------------


def test_own_table_frozen_at_zero_is_the_shared_table_alone() -> None:
    host = shared_table(AdditiveSettings(**RAP))
    wrapped = additive(own_rate=0.0, init=Init("zero"))(host)
    one, two = state_of(host), state_of(wrapped)
    assert np.array_equal(one.server.params["item"], two.server.params["item"])
    for name in ("user", "bias"):
        assert np.array_equal(one.devices.dense(name), two.devices.dense(name)), name


def test_mixing_with_weight_one_is_its_host_bit_for_bit() -> None:
    """`mixing` returns the host itself; its machinery, forced, gives the same bits too."""
    host = linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0))
    for one in (host, compose(host, dual())):
        assert mixing(1.0, beta=0.0)(one) is one
        forced = replace(one, model=MixedModel(one.model, ("item",), 1.0))
        found, wanted = state_of(forced), state_of(one)
        assert digest(found.server.pack()) == digest(wanted.server.pack())
        assert digest(pack_devices(found.devices)) == digest(pack_devices(wanted.devices))


def test_sharpness_with_radius_zero_is_its_host_bit_for_bit() -> None:
    host = fedneumf(SharpnessSettings(dim=4))
    assert sharpness_aware(0.0, 0.0)(host) is host
    sent = host.sent
    groups = ((sent, 0.0), (tuple(n for n in host.specs if n not in sent), 0.0))
    forced = replace(host, gradient=UphillGradient(host.gradient, groups, joint=False))
    assert digest(state_of(forced).pack()) == digest(state_of(host).pack())
    settings = {"dim": 4, "participation": 0.5, "rho_shared": 0.0, "rho_private": 0.0}
    gel = registry.entry("fedrecgel").build(settings)
    plain = registry.entry("fedneumf").build({"dim": 4, "participation": 0.5})
    data = toy_training_set()
    assert digest(run_rounds(gel, data)[0].pack()) == digest(run_rounds(plain, data)[0].pack())


def test_full_rank_is_its_host() -> None:
    host = linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0))
    np.testing.assert_allclose(table_of(low_rank(4)(host)), table_of(host), atol=1e-5)


def test_no_noise_and_a_wide_bound_are_the_host() -> None:
    host = linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0))
    assert noisy("laplace", 0.0)(host) is host
    np.testing.assert_allclose(table_of(clipped(1e6)(host)), table_of(host), atol=1e-6)


# --- FedRAP -------------------------------------------------------------------------------------------------------


def test_ramps_are_those_of_the_paper_and_reach_the_loss() -> None:
    def at(a: int) -> Context:
        return Context(a + 2, 0, 1, 1)  # weights are computed when a round is over, for the next

    assert Ramp(0.5)(at(-1)) == 0.5, "the first round has the weights as given"
    assert Ramp(0.5)(at(0)) == 0
    assert abs(Ramp(0.5)(at(10)) - 0.5 * 0.76159) < 1e-5
    assert [Ramp(1.0, "square")(at(a)) for a in (0, 4, 5, 9, 10)] == [1, 1, 0, 0, 1]
    assert Ramp(1.0, "frac")(at(3)) == 0.25
    assert Ramp(1.0, "sin")(at(0)) == 0.5
    data = toy_training_set()
    losses = {
        ramp: run_rounds(registry.entry("fedrap").build(RAP | {"ramp": ramp}), data)[1]
        for ramp in ("tanh", "as-released")
    }
    first, second = ([losses[r][number][0].loss for r in losses] for number in (0, 1))
    assert first[0] == first[1]
    assert second[0] > second[1] + 0.01  # the second round has no terms under the ramp


@pytest.mark.parametrize(("name", "fixed"), [(name, fixed) for name, _, fixed in ABLATIONS])
def test_an_ablation_is_fedrap_with_one_thing_decided(name: str, fixed: dict[str, Any]) -> None:
    ablation = registry.entry(f"fedrap-{name}")
    assert ablation.build(RAP) == registry.entry("fedrap").build(RAP | fixed)
    if name == "fixed":
        assert ablation.build(RAP) == registry.entry("fedrap").build(RAP | {"ramp": "as-released"})
    (setting,) = fixed
    with pytest.raises(SettingsError, match=setting):
        ablation.build({setting: "l1" if setting == "norm" else "tanh"})


NORMS: dict[Norm, Any] = {
    "l1": lambda rows: rows.abs().mean(),
    "l2": lambda rows: rows.square().mean(),
    "nuclear": lambda rows: torch.linalg.svdvals(rows).sum() / rows.numel(),
    "infinity": lambda rows: rows.abs().max(),
    "none": lambda rows: 0.0,
}


@pytest.mark.parametrize("norm", NORMS)
def test_additive_objective_is_the_formula(norm: Norm) -> None:
    model = AdditiveModel(LinearScorer(3), ("item",), Init("normal", 1.0))
    rng = torch.Generator().manual_seed(0)
    params = {n: torch.randn(5, 3, generator=rng) for n in ("item", "item.own")}
    params |= {"user": torch.randn(1, 3, generator=rng), "bias": torch.zeros(1, 1)}
    items = torch.tensor([[0, 2, 2, 4]])
    batch = Batch(items, torch.tensor([[0]]), torch.tensor([[1.0, 0, 1, 0]]), torch.tensor([[1.0, 1, 1, 0]]))
    own, common = params["item.own"][items[0, :3]], params["item"][items[0, :3]]
    scores = ((own + common) * params["user"][0]).sum(1)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.labels[0, :3])
    for ramp, shares in {"fixed": (1.0, 1.0), "frac": (1.0, 0.25), "sin": (0.5, 0.6477601)}.items():
        terms = additive(Ramp(0.3, ramp), Ramp(0.7, ramp), norm=norm)  # type: ignore[arg-type]
        wrapped = terms(Algorithm(LinearScorer(3), roles_of(LinearScorer(3)), ()))
        for number, share in zip((2, 5), shares, strict=True):
            found = wrapped.objective(model, View(params, batch), batch, Context(number, 0, 5, 1))
            apart, sparse = 0.3 * (own - common).square().mean(), 0.7 * NORMS[norm](common)
            torch.testing.assert_close(found[0], entropy - share * apart + share * sparse)


def test_untouched_own_rows_shrink_by_one_number_per_client() -> None:
    """A dense optimiser with weight decay, computed from touched rows and one scalar."""
    data = replace(toy_training_set(), histories=Ragged.from_rows([[1, 2]]), excluded=Ragged.from_rows([[1, 2]]))
    settings = RAP | {"negatives": 1, "tolerance": 0.0, "round_decay": 1.0, "batch_size": 2, "local_epochs": 2}
    federation = registry.entry("fedrap").build(settings)
    for engine in ("loop", "simulate", "fused"):
        state, _ = run_rounds(replace(federation, engine=engine), data, rounds=1)
        steps = 4  # two epochs of two batches
        wanted = np.prod([1 - 2.0 * 0.95**t * 0.01 for t in range(steps)])
        own = state.devices.rows("item.own")
        assert own is not None
        assert own.scale is not None
        np.testing.assert_allclose(own.scale, np.full((1, 2), wanted), rtol=1e-5)
        start = federation.start(data, 1).server.params["item"]
        others = np.setdiff1d(np.arange(data.n_items), own.keys)
        np.testing.assert_allclose(state.server.params["item"][others], start[others] * wanted, rtol=1e-4)


def test_a_threshold_makes_the_shared_table_sparse_and_saves_bytes() -> None:
    data = toy_training_set()
    dense, thin = (
        run_rounds(registry.entry("fedrap").build(RAP | {"threshold": t}), data, rounds=8) for t in (0.0, 0.1)
    )
    zeros = [float((state.server.params["item"] == 0).mean()) for state, _ in (thin, dense)]
    assert zeros[0] > 0.2 > zeros[1]
    assert thin[1][-1][0].bytes_up < thin[1][0][0].bytes_up
    assert thin[1][-1][0].bytes_down < dense[1][-1][0].bytes_down


def test_single_tables_share_all_or_nothing() -> None:
    d = registry.entry("fedrap-d").build().algorithm
    assert d.sent == ()
    c = registry.entry("fedrap-c").build().algorithm
    assert c.roles == {"item": Role.SHARED, "user": Role.PRIVATE, "bias": Role.PRIVATE}


# --- mixing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_weight_is_the_share_of_the_traces(exact: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    given = torch.randn(6, 3, generator=rng)
    batch = Batch(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 0]]), torch.ones(1, 3), torch.ones(1, 3))
    model = MixedModel(LinearScorer(3, bias=False), ("item",), None)
    weigh = NTKWeight(("item",), model.mix, exact=exact)
    for c, wanted in ((1.0, 0.5), (2.0, 0.8), (0.5, 0.2)):
        params = {"item": c * given, "user": torch.ones(1, 3), model.mix: torch.zeros(1, 2)}
        found = weigh(model, View(params, batch, {"item": given}, batch), Context(1, 0, 6, 1))
        torch.testing.assert_close(found[0, 0], torch.tensor(wanted))


def test_decorrelation_is_invariant_and_its_gradient_is_right() -> None:
    rng = torch.Generator().manual_seed(2)
    one, other = torch.randn(1, 20, 4, generator=rng), torch.randn(1, 20, 4, generator=rng)
    mask = torch.ones(1, 20)
    base = decorrelation(one, other, mask, 0.5)
    torch.testing.assert_close(
        decorrelation(one * torch.tensor([1.0, 2, 3, 4]) + 7, other, mask, 0.5), base, rtol=1e-3, atol=1e-4
    )
    wide = one.double().requires_grad_()
    torch.autograd.gradcheck(lambda z: decorrelation(z, other.double(), mask.double(), 0.5), (wide,), atol=1e-4)
    few = torch.zeros(1, 20)
    few[0, :2] = 1
    assert decorrelation(one, other, few, 0.5).item() == 0


def test_distinct_marks_each_item_once() -> None:
    batch = Batch(
        torch.tensor([[3, 1, 3, 1, 9]]), torch.zeros(1, 1), torch.zeros(1, 5), torch.tensor([[1.0, 1, 1, 1, 0]])
    )
    assert distinct(batch).tolist() == [[1, 1, 0, 0, 0]]


def test_the_global_table_gets_no_gradient_and_no_more_is_sent() -> None:
    host = linear(LinearSettings(dim=4, batch_size=16, item_rate=2.0))
    wrapped = mixing()(host)
    assert wrapped.traffic(100, 50.0) == host.traffic(100, 50.0)
    rng = torch.Generator().manual_seed(3)
    given = torch.randn(5, 4, generator=rng)
    batch = Batch(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0]]), torch.tensor([[1.0, 0, 1, 0]]), torch.ones(1, 4))
    model = wrapped.model
    params = {"item": torch.randn(5, 4), "user": torch.ones(1, 4), "bias": torch.zeros(1, 1)}
    local = params["item"].requires_grad_()
    mix = torch.tensor([[0.25, 1.0]])
    view = View({**params, "item": local, "item.mix": mix}, batch, {"item": given}, batch)
    score = model.score(view, batch.items).sum()
    (slope,) = torch.autograd.grad(score, [local])
    torch.testing.assert_close(slope[:4], torch.full((4, 4), 0.25))  # weight · w


# --- sharpness ----------------------------------------------------------------------------------------------------


def test_uphill_steps_have_exactly_the_radius_and_leave_parameters_alone() -> None:
    rng = torch.Generator().manual_seed(4)
    gradients = {"a": torch.randn(6, 3, generator=rng), "b": torch.randn(2, 5, generator=rng)}
    owners = {"a": torch.tensor([0, 0, 0, 1, 1, 1]), "b": torch.tensor([0, 1])}
    steps = climb(gradients, owners, 0.3, 2)
    for client in (0, 1):
        squares = sum(float(steps[n][owners[n] == client].square().sum()) for n in steps)
        assert abs(squares**0.5 - 0.3) < 1e-6
    still = climb({"a": torch.zeros(6, 3)}, owners, 0.3, 2)
    assert not still["a"].any()


def test_gradients_are_those_at_the_uphill_points() -> None:
    """L = a² b for one client: by hand."""
    at = {"a": torch.tensor([[2.0]]), "b": torch.tensor([[3.0]])}
    owners = dict.fromkeys(at, torch.tensor([0]))

    class Product:
        """L, around a point of its own."""

        def __init__(self, point: Any) -> None:
            self.point = point

        def __call__(self, values: Any) -> Any:
            both = {**self.point, **values}
            return (both["a"].square() * both["b"]).reshape(1)

        def at(self, point: Any) -> Any:
            return Product({**self.point, **point})

    losses: Any = Product(at)
    ctx = Context(1, 0, 1, 1)
    apart = UphillGradient(plain_gradient, ((("a",), 0.5), (("b",), 0.1)), joint=False)
    value, slopes = apart(losses, at, owners, ctx)
    assert float(value) == 12
    torch.testing.assert_close(slopes["a"], torch.tensor([[2 * 2.5 * 3.0]]))
    torch.testing.assert_close(slopes["b"], torch.tensor([[4.0]]))
    together = replace(apart, joint=True)(losses, at, owners, ctx)[1]
    torch.testing.assert_close(together["a"], torch.tensor([[2 * 2.5 * 3.1]]))
    torch.testing.assert_close(together["b"], torch.tensor([[2.5**2]]))
    assert at["a"].item() == 2.0
    with pytest.raises(SettingsError, match="uphill already"):
        sharpness_aware(0.1)(sharpness_aware(0.1)(linear(LinearSettings(dim=4))))


def test_chunked_loss_is_a_sum_of_means() -> None:
    model = LinearScorer(2, bias=False)
    params = {"item": torch.zeros(5, 2), "user": torch.zeros(1, 2)}
    batch = Batch(torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[0]]), torch.zeros(1, 5), torch.ones(1, 5))
    found = ChunkedBCE(2)(model, View(params, batch), batch, Context(1, 0, 5, 1))
    torch.testing.assert_close(found, torch.tensor([3 * float(np.log(2))]))


# --- rebuilt parameters -------------------------------------------------------------------------------------------


def test_fedrecon_keeps_nothing_on_devices_and_answers_strangers() -> None:
    federation = registry.entry("fedrecon").build(
        {"dim": 4, "batch_size": 16, "item_factor": 0.1, "participation": 0.3}
    )
    data = toy_training_set()
    state, _ = run_rounds(federation, data)
    assert not state.devices.params
    assert not state.devices.memory
    stranger = int(np.flatnonzero((state.last == 0) & (data.histories.lengths > 0))[0])
    scores = federation.scorer(data, state).scores(np.array([stranger]))
    assert np.isfinite(scores).all()
    plain = state.server.params["item"] @ federation.algorithm.specs["user"].rows(1, np.array([stranger]))[0]
    assert not np.allclose(scores[0], plain, atol=1e-3)  # rebuilt from the history, not the first vector


def test_support_and_query_divide_the_examples() -> None:
    from fedmosaic.data.batches import make_examples

    data = toy_training_set()
    examples = make_examples(data, np.arange(13), negatives=4, seed=0, round=1)
    support, query = (examples.part(p)[0] for p in ("support", "query"))
    lone = np.flatnonzero(data.histories.lengths == 1)
    both = np.intersect1d(support, query)
    assert set(np.unique(examples.users[both])) <= set(lone.tolist())
    assert np.array_equal(np.union1d(support, query), np.arange(examples.items.size))


# --- what cannot be said ------------------------------------------------------------------------------------------


def test_more_wrong_declarations_are_refused() -> None:
    model = LinearScorer(4)
    roles = roles_of(model)
    step = Phase((Move(("user", "bias"), 0.1), Move(("item",), 0.1)))
    with pytest.raises(SettingsError, match="say in `serve` by which passes"):
        Algorithm(model, roles | {"user": Role.REBUILT}, (Pass((step,)),))
    host = registry.entry("fedncf").build().algorithm
    with pytest.raises(SettingsError, match="only item tables can be kept"):
        replace(host, roles={**host.roles, "out.0.bias": Role.KEPT})
    adam = Phase((Move(("user", "bias", "item"), 0.1, Adam()),))
    with pytest.raises(SettingsError, match="need plain SGD"):
        Algorithm(model, roles, (Pass((adam,), tolerance=0.1),))
    with pytest.raises(SettingsError, match="when=round"):
        NTKWeight(smooth=True)
    with pytest.raises(SettingsError, match="at least that wide"):
        low_rank(9)(Algorithm(model, roles, (Pass((step,)),)))
    with pytest.raises(SettingsError, match="noise already"):
        compose(Algorithm(model, roles, (Pass((step,)),)), noisy("laplace", 1.0), noisy("laplace", 1.0))
    decayed = Phase((Move(("user", "bias", "item"), 0.1, SGD(0.1, everywhere=True)),))
    assert Algorithm(model, roles, (Pass((decayed,)),), server=Server()).dense is False
