"""Lowering: a compiled program is made from an algorithm by taking in every field of it, by exact type.

Whatever is not taken in means the general engine, with the reason in words. So a subclass with a `score` of its own, a
wrapper nobody thought of, or a field that is added to a class tomorrow cannot be computed wrongly in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import SGD, Adam, Move, Pass, Phase, plain_gradient
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF
from fedmosaic.algorithm.objective import bce
from fedmosaic.algorithm.parameters import Role
from fedmosaic.algorithm.upload import Encoder, Upload
from fedmosaic.algorithm.wrappers.additive import AdditiveModel, AdditiveObjective
from fedmosaic.algorithm.wrappers.mixing import Decorrelated, MixedModel, NTKWeight
from fedmosaic.core.errors import RequestError
from fedmosaic.core.extras import require_torch
from fedmosaic.engines.engine import Engine, Holding, Refusal
from fedmosaic.engines.fused.linear import LinearProgram
from fedmosaic.engines.fused.net import LONGEST_BATCH, NetProgram, network
from fedmosaic.engines.fused.pair import NORMS, PairProgram
from fedmosaic.engines.fused.pool import PoolProgram
from fedmosaic.privacy.adaptive_clip import AdaptiveClip
from fedmosaic.privacy.noise import Clip, ClipRows

SCORE_SIDE = ("user", "bias")


class Unfit(Exception):  # noqa: N818  (what it is, rather than an error)
    """Why an algorithm cannot be lowered."""


class Fields:
    """The fields of a value of exactly one type, to be taken one by one; `close` refuses what is left."""

    def __init__(self, value: Any, kind: type[Any], what: str) -> None:
        if type(value) is not kind:
            raise Unfit(f"{what} is {_name(value)}, not {kind.__name__}")
        self.what, self.left = what, {f.name: getattr(value, f.name) for f in fields(kind)}

    def take(self, *names: str) -> Any:
        """Values of some fields, which count as understood."""
        values = [self.left.pop(name) for name in names]
        return values[0] if len(names) == 1 else values

    def need(self, name: str, wanted: Any, words: str) -> None:
        """Take a field that must have one value (functions: be that function)."""
        value = self.take(name)
        if value is not wanted and (callable(wanted) or type(value) is not type(wanted) or value != wanted):
            raise Unfit(words)

    def close(self) -> None:
        """Refuse fields that nobody has taken."""
        if self.left:
            raise Unfit(f"{self.what} has {', '.join(self.left)}, which the compiled engine does not know")


def lower(algorithm: Algorithm, holding: Holding) -> Engine | Refusal:
    """A compiled program, or the reason why there is none."""
    try:
        return _lowered(algorithm, holding)
    except (Unfit, RequestError) as error:
        return Refusal(str(error))


def _lowered(algorithm: Algorithm, holding: Holding) -> Engine:
    kind = type(algorithm.model)
    if holding == "everybody":
        return _pool(algorithm)
    if holding == "silo":
        raise Unfit("clients hold several users")
    if kind is LinearScorer and algorithm.roles["item"] is not Role.PRIVATE:
        return _linear(algorithm)
    if kind in (LinearScorer, AdditiveModel, MixedModel):
        return _pair(algorithm)
    if kind is NCF:
        return _net(algorithm)
    raise Unfit(f"its model is {_name(algorithm.model)}; compiled are LinearScorer, one or two tables on it, and NCF")


def _common(algorithm: Algorithm) -> Fields:
    """What all programs ask of an algorithm; model, roles, local work, objective, upload and prepare are left."""
    taken = Fields(algorithm, Algorithm, "the algorithm")
    taken.take("specs", "negatives")  # specs follow from the model; negatives are drawn by number
    taken.need("gradient", plain_gradient, f"its gradients are {_name(algorithm.gradient)}, not plain")
    taken.need("history", False, "its model reads the client's positives")
    taken.need("whole", False, "local work moves rows without examples")
    taken.take("server", "serve")  # the server's step is taken outside; work on request has an engine of its own
    if algorithm.server.weights != "equal":
        raise Unfit("clients weigh by their size")
    if algorithm.server.reduction.each:
        raise Unfit("its server must see every upload by itself")
    return taken


def _scorer(model: Any) -> None:
    inner = Fields(model, LinearScorer, "its scorer")
    inner.take("dim", "bias", "item_init", "user_init")  # sizes and beginnings come from the specs
    inner.close()


def _linear(algorithm: Algorithm) -> LinearProgram:
    taken = _common(algorithm)
    _scorer(taken.take("model"))
    taken.need("objective", bce, f"its objective is {_name(algorithm.objective)!r}, not plain cross-entropy")
    taken.need("prepare", None, "something is computed as the round goes")
    roles = taken.take("roles")
    _need_roles(roles, ("item",), (Role.SHARED, Role.PERSONALISED))
    _need_roles(roles, _there(algorithm, SCORE_SIDE), (Role.PRIVATE, Role.REBUILT))
    _alike({roles[n] for n in _there(algorithm, SCORE_SIDE)}, "user and bias have different roles")
    for one in taken.take("local"):
        for move in _moves(_pass(one), (("item",), _there(algorithm, SCORE_SIDE))):
            _plain(move)
    upload = taken.take("upload")
    _plain_upload(replace(upload, stack=_without_bounds(upload.stack)))
    taken.close()
    return LinearProgram(algorithm)


def _pair(algorithm: Algorithm) -> PairProgram:
    taken = _common(algorithm)
    model, objective, prepare = taken.take("model", "objective", "prepare")
    if algorithm.serve:
        raise Unfit("devices work when they are asked")
    roles, score = taken.take("roles"), _there(algorithm, SCORE_SIDE)
    _need_roles(roles, score, (Role.PRIVATE,))
    sides: list[tuple[str, ...]] = [("item",), score]
    if type(model) is AdditiveModel:
        _additive(model, objective, prepare)
        _need_roles(roles, ("item",), (Role.SHARED,))
        _need_roles(roles, ("item.own",), (Role.PRIVATE,))
        sides.append(("item.own",))
    elif type(model) is MixedModel:
        _mixed(model, objective, prepare)
        _need_roles(roles, ("item",), (Role.PERSONALISED, Role.KEPT))
        _need_roles(roles, _there(algorithm, ("item.mix",)), (Role.PRIVATE,))
    else:
        _scorer(model)
        if objective is not bce or prepare is not None:
            raise Unfit(f"its objective is {_name(objective)}, or something is computed as the round goes")
    local = taken.take("local")
    if len(local) != 1:
        raise Unfit(f"it has {len(local)} passes, not one")
    decays: dict[str, float] = {}
    for move in _moves(_pass(local[0], uneven=True), sides):
        rule = Fields(move.rule, SGD, "an optimiser")
        decay, _, _ = rule.take("decay", "everywhere", "persistent")
        rule.close()
        for name in move.names:
            _alike({decay, decays.setdefault(name, decay)}, f"phases decay {name} differently")
    _alike({decays.get(n) for n in score}, "user and bias decay differently")
    if type(model) is MixedModel and any(decays.values()):
        raise Unfit("a mixed table decays")
    _pair_upload(algorithm, taken.take("upload"))
    taken.close()
    return PairProgram(algorithm)


def _additive(model: Any, objective: Any, prepare: Any) -> None:
    outer = Fields(model, AdditiveModel, "its model")
    outer.need("tables", ("item",), "the shared table is not 'item' alone")
    _scorer(outer.take("host"))
    outer.take("init")
    outer.close()
    if objective is not bce:
        terms = Fields(objective, AdditiveObjective, "its objective")
        terms.need("host", bce, "its objective has other terms beside cross-entropy")
        terms.need("tables", ("item",), "its terms are of other tables")
        terms.take("apart", "sparse")
        norm = terms.take("norm")
        if norm not in NORMS:
            raise Unfit(f"its norm is {norm}; compiled are {', '.join(NORMS)}")
        terms.close()
    if prepare is not None:
        raise Unfit("something is computed as the round goes")


def _mixed(model: Any, objective: Any, prepare: Any) -> None:
    outer = Fields(model, MixedModel, "its model")
    outer.need("tables", ("item",), "the mixed table is not 'item' alone")
    _scorer(outer.take("host"))
    weight = outer.take("weight")
    outer.close()
    if objective is not bce:
        terms = Fields(objective, Decorrelated, "its objective")
        terms.need("host", bce, "its objective has other terms beside cross-entropy")
        terms.need("tables", ("item",), "its terms are of other tables")
        terms.take("beta", "gamma", "form")
        terms.close()
    if weight is not None:
        if prepare is not None:
            raise Unfit("its weight is fixed, and something is computed as the round goes")
        return
    trace = Fields(prepare, NTKWeight, "what sets the mixing weight")
    trace.need("tables", ("item",), "its weight is of other tables")
    trace.need("name", "item.mix", "its weight has another name")
    trace.need("exact", False, "its weight needs derivatives of the whole head")
    if trace.take("rows") == "all":
        raise Unfit("its weight needs the whole catalogue")
    trace.take("centred", "when", "smooth", "clip")
    trace.close()


def _net(algorithm: Algorithm) -> NetProgram:
    require_torch("answering with a network")  # its newest answers are the general engine's
    taken = _common(algorithm)
    model = Fields(taken.take("model"), NCF, "its model")
    model.take("dim", "tower", "init")
    model.close()
    taken.need("objective", bce, f"its objective is {_name(algorithm.objective)!r}, not plain cross-entropy")
    taken.need("prepare", None, "something is computed as the round goes")
    roles, layers = taken.take("roles"), network(algorithm)
    _need_roles(roles, ("item",), (Role.SHARED, Role.PERSONALISED))
    _need_roles(roles, layers, (Role.SHARED if roles["item"] is Role.SHARED else Role.PRIVATE,))
    _need_roles(roles, ("user",), (Role.PRIVATE,))
    for one in taken.take("local"):
        if one.batch_size > LONGEST_BATCH:
            raise Unfit(f"batches of {one.batch_size} are too long for a core's cache ({LONGEST_BATCH})")
        for move in _moves(_pass(one), (("item",), ("user",), layers)):
            _plain(move)
    _plain_upload(taken.take("upload"))
    taken.close()
    return NetProgram(algorithm)


def _pool(algorithm: Algorithm) -> PoolProgram:
    require_torch("central training")
    taken = _common(algorithm)
    model = taken.take("model")
    if type(model) is NCF:
        Fields(model, NCF, "its model").take("dim", "tower", "init")
    else:
        _scorer(model)
    taken.need("objective", bce, f"its objective is {_name(algorithm.objective)!r}, not plain cross-entropy")
    taken.need("prepare", None, "something is computed as the round goes")
    _need_roles(taken.take("roles"), tuple(algorithm.specs), (Role.PRIVATE,))
    local = taken.take("local")
    moves = _moves(_pass(local[0]), (tuple(algorithm.specs),)) if len(local) == 1 and local[0].part == "all" else []
    if len(moves) != 1:
        raise Unfit("not everything moves at once by one Adam")
    rule = Fields(moves[0].rule, Adam, "its optimiser")
    rule.take("beta1", "beta2", "eps", "decay", "persistent")
    rule.close()
    taken.take("upload")  # nothing is sent
    taken.close()
    return PoolProgram(algorithm)


def _pass(one: Any, *, uneven: bool = False) -> Sequence[Phase]:
    """The phases of a pass; rates that fall inside a round and clients that stop early only where they are known."""
    taken = Fields(one, Pass, "a pass")
    taken.take("epochs", "batch_size")
    phases, part = taken.take("phases", "part")
    step_decay, tolerance = taken.take("step_decay", "tolerance")
    if not uneven and (step_decay != 1 or tolerance):
        raise Unfit("rates change inside a round, or clients stop early")
    if uneven and part != "all":
        raise Unfit("a pass takes a part of the examples")
    taken.close()
    found: Sequence[Phase] = phases
    return found


def _moves(phases: Iterable[Any], sides: Sequence[tuple[str, ...]]) -> list[Move]:
    """All moves; every side moves whole, by one move, once in a phase."""
    found = []
    for phase in phases:
        taken = Fields(phase, Phase, "a phase")
        moves = taken.take("moves")
        taken.close()
        names = [n for move in moves for n in move.names]
        if len(names) != len(set(names)):
            raise Unfit("a phase moves a parameter twice")
        for move in moves:
            inner = Fields(move, Move, "a move")
            inner.take("names", "rate", "rule")
            inner.close()
            parted = [side for side in sides if 0 < len(set(side) & set(move.names)) < len(side)]
            if parted:
                raise Unfit(f"{', '.join(parted[0])} do not move as one")
            strange = set(move.names) - {n for side in sides for n in side}
            if strange:
                raise Unfit(f"a phase moves {', '.join(sorted(strange))}")
            found.append(move)
    return found


def _plain(move: Move) -> None:
    rule = Fields(move.rule, SGD, "an optimiser")
    rule.take("everywhere", "persistent")
    rule.need("decay", 0.0, "weights decay")
    rule.close()


def _plain_upload(upload: Any) -> None:
    taken = Fields(upload, Upload, "its upload")
    kind, support, stack, _ = taken.take("kind", "support", "stack", "noise")  # noise is added to the sum, outside
    if kind == "gradient":
        raise Unfit("it uploads gradients")
    if stack:
        raise Unfit(f"its uploads are encoded by {', '.join(_name(e) for e in stack)}")
    if support == "nonzero":
        raise Unfit("numbers that are not zero are counted")
    taken.close()


def _without_bounds(stack: Sequence[Encoder]) -> tuple[Encoder, ...]:
    """Encoders but for a bound on rows and one on uploads, in that order."""
    left = list(stack)
    for kinds in ({ClipRows: ("bound",)}, {Clip: ("bound",), AdaptiveClip: ("start", "quantile", "rate")}):
        for kind, names in kinds.items():
            if left and type(left[0]) is kind:
                taken = Fields(left.pop(0), kind, "a bound")
                taken.take(*names)
                taken.close()
                break
    return tuple(left)


def _pair_upload(algorithm: Algorithm, upload: Any) -> None:
    """Encoded uploads are known as whole tables of an additive model: the encoders themselves are run outside."""
    taken = Fields(upload, Upload, "its upload")
    kind, support, stack, _ = taken.take("kind", "support", "stack", "noise")
    if kind == "gradient":
        raise Unfit("it uploads gradients")
    if upload.steering:
        raise Unfit(f"its uploads carry {', '.join(upload.steering)} of their own")
    if stack and not (type(algorithm.model) is AdditiveModel and algorithm.dense):
        raise Unfit("its uploads are encoded, though not as whole tables")
    if support == "nonzero" and not stack:
        raise Unfit("numbers that are not zero are counted")
    taken.close()


def _need_roles(roles: Any, names: Iterable[str], wanted: tuple[Role, ...]) -> None:
    for name in names:
        if roles[name] not in wanted:
            raise Unfit(f"{name} is {roles[name].value}, not {' or '.join(r.value for r in wanted)}")


def _there(algorithm: Algorithm, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(n for n in names if n in algorithm.specs)


def _alike(values: set[Any], words: str) -> None:
    if len(values) > 1:
        raise Unfit(words)


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
