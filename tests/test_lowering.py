"""An engine that never guesses: every algorithm is run as `loop` runs it, or refused with a reason in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fedmosaic import extend as fm
from fedmosaic.algorithm.objective import ChunkedBCE
from fedmosaic.algorithm.reduction import REDUCTIONS
from fedmosaic.core.errors import FedmosaicError, ScoreError, SettingsError, UnknownNameError
from fedmosaic.core.ragged import Ragged
from fedmosaic.engines.choice import ENGINES, explain
from fedmosaic.engines.fused.lower import Fields, Unfit, lower
from fedmosaic.methods.registry import entry
from fedmosaic.testing import check_engines, toy_training_set

torch = pytest.importorskip("torch")

TOY = toy_training_set(11, 13)
FUSED = ENGINES["fused"]


@dataclass(frozen=True)
class Sideways(fm.LinearScorer):
    """A linear scorer whose score is its own."""

    def score(self, view: fm.View, items: Any) -> Any:
        """The plain score, less a third of the row's first number."""
        return super().score(view, items) - view.rows("item", items)[..., 0] / 3


@dataclass(frozen=True)
class Deeper(fm.NCF):
    """The MLP with a score of its own."""

    def score(self, view: fm.View, items: Any) -> Any:
        """Twice the plain score."""
        return 2 * super().score(view, items)


@dataclass(frozen=True)
class Gentle(fm.SGD):
    """SGD that takes half steps."""

    def step(self, value: Any, gradient: Any, memory: Any, rate: Any) -> None:
        """Half a step."""
        super().step(value, gradient, memory, rate / 2)


@dataclass(frozen=True)
class Doubled(fm.Upload):
    """An upload of one's own."""


@dataclass(frozen=True)
class Restart:
    """Sets the users' biases as the round goes."""

    name: ClassVar[str] = "bias"
    when: ClassVar[Any] = "batch"
    rows: ClassVar[Any] = "positives"

    def __call__(self, model: fm.Model, view: fm.View, ctx: fm.Context) -> Any:
        """One half."""
        return torch.full_like(view.params["bias"], 0.5)


@dataclass(frozen=True)
class Median:
    """Coordinate-wise median of the clients' changes."""

    each: ClassVar[bool] = True
    counts_senders: ClassVar[bool] = False

    def __call__(self, spec: fm.Spec, changes: Any, total: fm.UploadSum) -> Any:
        """The middle one."""
        return np.median(changes, axis=0)


def fedmf(**changes: Any) -> fm.Algorithm:
    host: fm.Algorithm = entry("fedmf").build({"dim": 3, "batch_size": 8, "item_rate": 0.5}).algorithm
    return replace(host, **changes)


# ---- the two cases that were computed wrongly in silence


def test_a_subclass_with_its_own_score_is_not_taken_for_its_parent() -> None:
    algorithm = fedmf(model=Sideways(3))
    assert "Sideways" in FUSED.refuses(algorithm, "user")
    check_engines(fm.Federation(algorithm, 2), TOY)


def test_what_is_computed_as_the_round_goes_is_not_left_out() -> None:
    algorithm = fedmf(prepare=Restart())
    assert "computed" in FUSED.refuses(algorithm, "user")
    check_engines(fm.Federation(algorithm, 2), TOY)


# ---- algorithms at random

RATES: st.SearchStrategy[Any] = st.sampled_from([0.3, 0.05, 0.0, -0.01, fm.Decay(0.3, 0.9), fm.PerItem(0.02)])
PLAIN = fm.SGD()
RULES: st.SearchStrategy[Any] = st.sampled_from(
    [PLAIN, PLAIN, PLAIN, PLAIN, fm.SGD(0.01), fm.SGD(0.01, everywhere=True), Gentle(), fm.Adam()]
)
MODELS: st.SearchStrategy[Any] = st.sampled_from(
    [
        fm.LinearScorer(3),
        fm.LinearScorer(3),
        fm.LinearScorer(2, bias=False),
        Sideways(3),
        fm.NCF(2, (4, 3)),
        Deeper(2),
        fm.NeuMF(2),
    ]
)
OBJECTIVES: st.SearchStrategy[Any] = st.sampled_from([fm.bce, fm.bce, fm.bce, ChunkedBCE(4)])
UPLOADS = st.sampled_from(
    [fm.Upload(), fm.Upload("value"), fm.Upload("gradient"), fm.Upload(support="touched"), Doubled()]
)
SERVERS = st.sampled_from(
    [
        fm.Server(),
        fm.Server(),
        fm.Server("row-mean"),
        fm.Server("sum", rate=0.1),
        fm.Server("mean", fm.Adam(), 0.05),
        fm.Server(Median()),
    ]
)
WRAPPERS = st.sampled_from(
    [
        fm.dual(),
        fm.additive(0.1, 0.1),
        fm.additive(0.1, norm="nuclear"),
        fm.mixing(),
        fm.mixing(0.4, beta=0.0),
        fm.mixing(keep=True, beta=0.2, form="self"),
        fm.mixing(fm.NTKWeight(when="round", smooth=True)),
        fm.mixing(fm.NTKWeight(exact=True)),
        fm.low_rank(2),
        fm.clipped(0.5),
        fm.noisy("laplace", 0.01),
        fm.sharpness_aware(0.05, 0.02),
    ]
)


@st.composite
def passes(draw: st.DrawFn, names: list[str], rules: dict[str, fm.StepRule]) -> fm.Pass:
    """A pass of one or two phases that move random groups of names."""
    phases = []
    for _ in range(draw(st.integers(1, 2))):
        group = draw(st.integers(1, 3))
        moves = []
        for part in range(group):
            own = tuple(n for i, n in enumerate(sorted(names)) if i % group == part)
            moves += [fm.Move(own, draw(RATES), rules[own[0]])] if own else []
        phases.append(fm.Phase(tuple(moves)))
    return fm.Pass(
        tuple(phases),
        epochs=draw(st.integers(1, 2)),
        batch_size=draw(st.sampled_from([4, 9, 1000])),
        step_decay=draw(st.sampled_from([1.0, 1.0, 0.8])),
        tolerance=draw(st.sampled_from([0.0, 0.0, 0.05])),
        part=draw(st.sampled_from(["all", "all", "all", "support"])),
    )


@st.composite
def algorithms(draw: st.DrawFn) -> fm.Algorithm:
    """Roles, objective, phases, rates, rules, uploads, servers, subclasses and wrappers at random; many are refused."""
    model = draw(MODELS)
    own = st.sampled_from([fm.Role.SHARED, fm.Role.SHARED, fm.Role.PRIVATE])
    table = st.sampled_from([fm.Role.SHARED, fm.Role.SHARED, fm.Role.PERSONALISED, fm.Role.PRIVATE])
    kinds = {fm.Axis.USER: st.just(fm.Role.PRIVATE), fm.Axis.ITEM: table, fm.Axis.WHOLE: own}
    layers = draw(own)
    roles = {s.name: layers if s.axis is fm.Axis.WHOLE else draw(kinds[s.axis]) for s in model.specs()}
    names, rule = [s.name for s in model.specs()], draw(RULES)
    rules = {name: draw(RULES) if draw(st.integers(0, 9)) == 0 else rule for name in names}
    local = tuple(draw(passes(names, rules)) for _ in range(draw(st.sampled_from([1, 1, 1, 2]))))
    host = fm.Algorithm(
        model, roles, local, draw(OBJECTIVES), draw(UPLOADS), draw(SERVERS), negatives=draw(st.integers(0, 3))
    )
    return fm.compose(host, *draw(st.lists(WRAPPERS, max_size=2)))


def _local(change: Any) -> fm.Wrapper:
    """Change every pass."""
    return lambda a: replace(a, local=tuple(change(one) for one in a.local))


def _moves(change: Any) -> fm.Wrapper:
    """Change every move of every phase."""

    def moved(one: fm.Pass) -> fm.Pass:
        return replace(
            one, phases=tuple(fm.Phase(tuple(m for old in p.moves for m in change(old))) for p in one.phases)
        )

    return _local(moved)


def _parted(move: fm.Move) -> list[fm.Move]:
    """Every parameter by a move of its own, at a rate of its own."""
    return [replace(move, names=(n,), rate=0.2 / (i + 1)) for i, n in enumerate(move.names)]


FAMILIES = {
    "fedmf": {"dim": 3, "item_rate": 0.5},
    "pfedrec": {"dim": 3, "item_rate": 0.5},
    "fedrecon": {"dim": 3, "item_factor": 0.05, "rebuild_epochs": 2},
    "fedrap": {"dim": 3, "item_rate": 0.5, "local_epochs": 2},
    "fedrap-c": {"dim": 3, "item_rate": 0.5, "local_epochs": 2},
    "local-only": {"dim": 3, "item_rate": 0.5},
    "fedmf-plgc": {"dim": 3, "item_rate": 0.5},
    "pfedrec-plgc": {"dim": 3, "item_rate": 0.5, "mix": 0.4},
    "fedncf": {"dim": 2, "network_rate": 0.1, "user_rate": 0.2, "item_factor": 0.02},
    "fedncf-dual": {"dim": 2, "network_rate": 0.1, "user_rate": 0.2, "item_factor": 0.02},
}
CHANGES: list[fm.Wrapper] = [
    _local(lambda one: replace(one, epochs=2)),
    _local(lambda one: replace(one, batch_size=5)),
    _local(lambda one: replace(one, step_decay=0.8)),
    _local(lambda one: replace(one, tolerance=0.05)),
    _local(lambda one: replace(one, part="query")),
    _local(lambda one: replace(one, phases=(*one.phases, *one.phases))),
    _local(lambda one: replace(one, phases=one.phases[::-1])),
    lambda a: replace(a, local=(*a.local, *a.local)),
    _moves(_parted),
    _moves(lambda move: [move, move]),
    _moves(lambda move: [replace(move, rate=-0.01)]),
    _moves(lambda move: [replace(move, rate=fm.Decay(0.2, 0.5))] if "item" in move.names else [move]),
    _moves(lambda move: [replace(move, rate=0.0)] if "user" in move.names else [move]),
    _moves(lambda move: [replace(move, rule=fm.SGD(0.02))]),
    _moves(lambda move: [replace(move, rule=fm.SGD(0.02, everywhere=True))]),
    _moves(lambda move: [replace(move, rule=Gentle())]),
    lambda a: replace(a, negatives=1),
    lambda a: replace(a, objective=ChunkedBCE(4)),
    lambda a: replace(a, upload=replace(a.upload, kind="delta")),
    lambda a: replace(a, upload=Doubled("delta")),
    lambda a: replace(a, upload=fm.Upload("gradient")),
    lambda a: replace(a, server=fm.Server("sum", rate=0.05), upload=fm.Upload("delta")),
    lambda a: replace(a, server=fm.Server(Median()), upload=fm.Upload("delta")),
    fm.clipped(0.3),
    fm.noisy("gaussian", 0.01),
    fm.dual(),
    fm.additive(0.1, 0.1, norm="l2"),
    fm.mixing(keep=True, beta=0.2, form="self"),
    fm.mixing(fm.NTKWeight(when="epoch", centred=True)),
]


@st.composite
def neighbours(draw: st.DrawFn) -> fm.Algorithm:
    """A method that is compiled, with up to three things changed."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    host: fm.Algorithm = entry(name).build({"batch_size": 9, **FAMILIES[name]}).algorithm
    return fm.compose(host, *draw(st.lists(st.sampled_from(CHANGES), max_size=3)))


AT_RANDOM = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def agrees(algorithm: fm.Algorithm) -> None:
    """Every engine runs it as loop does, or says why it does not; what diverges anywhere shows nothing."""
    said = explain(algorithm)
    assert all(words for words in said.values())
    assert said["loop"] == said["simulate"] == "runs it"
    try:
        check_engines(fm.Federation(algorithm, 2), TOY)
    except ScoreError:
        reject()


@settings(max_examples=50, **AT_RANDOM)  # type: ignore[arg-type]
@given(st.data())
def test_algorithms_at_random_agree_with_loop_or_are_refused(data: st.DataObject) -> None:
    try:
        algorithm = data.draw(algorithms())
    except SettingsError:  # refused when it is made
        reject()
    agrees(algorithm)


@settings(max_examples=120, **AT_RANDOM)  # type: ignore[arg-type]
@given(st.data())
def test_neighbours_of_compiled_methods_agree_with_loop_or_are_refused(data: st.DataObject) -> None:
    try:
        algorithm = data.draw(neighbours())
    except SettingsError:
        reject()
    agrees(algorithm)


def test_algorithms_at_random_reach_every_program() -> None:
    """The property above means something: methods of every family are lowered, each to its own program."""
    built = {
        name: entry(name).build({"dim": 4}) for name in ("pfedrec", "fedrap", "fedmf-plgc", "local-only", "fedncf")
    }
    programs = {name: type(lower(method.algorithm, "user")).__name__ for name, method in built.items()}
    assert programs == {
        "pfedrec": "LinearProgram", "fedrap": "PairProgram", "fedmf-plgc": "PairProgram", "local-only": "PairProgram",
        "fedncf": "NetProgram",
    }  # fmt: skip
    assert type(lower(entry("mf").build().algorithm, "everybody")).__name__ == "PoolProgram"


def test_fields_that_nobody_takes_are_refused() -> None:
    @dataclass(frozen=True)
    class Setting:
        known: int = 1
        added_tomorrow: int = 0

    fields = Fields(Setting(), Setting, "a setting")
    fields.take("known")
    with pytest.raises(Unfit, match="a setting has added_tomorrow"):
        fields.close()


# ---- refusals, each naming the thing


def test_an_engine_that_cannot_run_it_says_why() -> None:
    federation = replace(entry("fedrecgel").build(), engine="fused")
    state = federation.start(TOY, 0)
    with pytest.raises(SettingsError, match="engine=fused does not run this algorithm: its model is NeuMF"):
        federation.advance(TOY, state, 1, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fm.Server("krum"), "unknown reduction 'krum'"),
        (lambda: fm.Upload("weights"), "unknown kind of upload 'weights'"),  # type: ignore[arg-type]
        (lambda: fm.Upload(support="some"), "unknown support of uploads 'some'"),  # type: ignore[arg-type]
        (lambda: fm.Init("random"), "unknown beginning 'random'"),  # type: ignore[arg-type]
        (lambda: fm.Pass((), part="half"), "unknown part of the examples 'half'"),  # type: ignore[arg-type]
        (lambda: fm.noisy("cauchy", 1.0)(fedmf()), "unknown noise 'cauchy'"),  # type: ignore[arg-type]
        (lambda: fm.additive(norm="l3")(fedmf()), "unknown norm 'l3'"),  # type: ignore[arg-type]
        (lambda: fm.mixing(form="both")(fedmf()), "unknown form of decorrelation 'both'"),  # type: ignore[arg-type]
    ],
)
def test_words_are_checked_when_a_value_is_made(make: Any, words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        make()


@pytest.mark.parametrize("wrapper", [fm.mixing(tables=("item",)), fm.additive(0.1, tables=("item",))])
def test_wrappers_refuse_hosts_without_their_table(wrapper: fm.Wrapper) -> None:
    with pytest.raises(SettingsError, match=r"item table 'item'.*item\.gmf, item\.mlp"):
        wrapper(entry("fedneumf").build().algorithm)


def test_a_phase_that_moves_what_the_loss_does_not_use_is_named() -> None:
    @dataclass(frozen=True)
    class Spare(fm.LinearScorer):
        def specs(self) -> tuple[fm.Spec, ...]:
            return (*super().specs(), fm.Spec("spare", fm.Axis.USER, (2,)))

    roles = {"item": fm.Role.SHARED, "user": fm.Role.PRIVATE, "bias": fm.Role.PRIVATE, "spare": fm.Role.PRIVATE}
    step = fm.Phase((fm.Move(("user", "spare"), 0.1),))
    federation = fm.Federation(fm.Algorithm(Spare(3), roles, (fm.Pass((step,)),)))
    with pytest.raises(SettingsError, match="moves spare, which the loss does not use"):
        federation.advance(TOY, federation.start(TOY, 0), 1, 0)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (lambda *given: fm.bce(*given).mean(), r"this one gave shape \[\]"),
        (lambda *given: fm.bce(*given)[:, None], r"this one gave shape \[\d+, 1\]"),
        (lambda *given: 0.5, "this one gave float"),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "simulate"])
def test_an_objective_gives_one_loss_per_client(objective: Any, words: str, engine: str) -> None:
    federation = fm.Federation(fedmf(objective=objective), engine=engine)
    with pytest.raises(SettingsError, match=words):
        federation.advance(TOY, federation.start(TOY, 0), 1, 0)


def test_slips_of_hand_are_named() -> None:
    with pytest.raises(SettingsError, match=r"names of a move are a tuple, \('user',\); got 'user'"):
        fm.Move("user", 0.1)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="was it called, as in"):
        fm.compose(fedmf(), fm.dual)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"a role is one of .*; user has 'private'"):
        fedmf(roles={"item": fm.Role.SHARED, "user": "private", "bias": fm.Role.PRIVATE})


def test_tuned_copies_answer_the_query_that_is_asked() -> None:
    """Users who are not drawn answer as at their last round, to this query and not to the one before."""
    federation = replace(entry("pfedrec").build({"dim": 3, "item_rate": 0.5}), participation=0.4)
    rows = np.arange(TOY.n_users + 1) * 3
    first, second = (Ragged(np.tile(np.array(items, np.int32), TOY.n_users), rows) for items in ([0, 1, 2], [7, 8, 9]))
    state = federation.start(TOY, 0)
    for number in (1, 2, 3):
        state, _, _ = federation.advance(TOY, state, number, 0, first)
    state, _, answers = federation.advance(TOY, state, 4, 0, second)
    scores = federation.scorer(TOY, state).scores(np.arange(TOY.n_users))[:, [7, 8, 9]]
    assert answers is not None
    assert np.allclose(answers.reshape(-1, 3), scores, atol=1e-5)


# ---- a reduction of one's own


@pytest.fixture
def median() -> Iterator[str]:
    fm.register_reduction("own-median", Median())
    yield "own-median"
    del REDUCTIONS["own-median"]


def test_a_median_can_exist_and_bounds_one_client(median: str) -> None:
    algorithm = fedmf(server=fm.Server(median), upload=fm.Upload("delta"))
    assert "every upload by itself" in FUSED.refuses(algorithm, "user")
    check_engines(fm.Federation(algorithm, 2), TOY)
    with pytest.raises(SettingsError, match="there is a reduction 'own-median' already"):
        fm.register_reduction("own-median", Median())


def test_names_of_engines_are_checked() -> None:
    with pytest.raises(FedmosaicError, match="unknown engine 'gpu'"):
        entry("fedmf").build({"engine": "gpu"})
    with pytest.warns(FutureWarning, match="engine=kernel is now engine=fused"):
        assert entry("fedmf").build({"engine": "kernel"}).engine == "fused"
