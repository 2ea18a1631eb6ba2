"""The compiled program of two item tables on the linear scorer: FedRAP's sum of tables and mixing's weighted one.

    score = w · (a · own + b · common) + b_u        FedRAP: a = b = 1, both tables move
                                                    mixing: a = weight, b = 1 - weight, only the local one moves
                                                    local-only: a = b = 1, the common table is 0 and stands still

Rates that fall from batch to batch, early stopping, weight decay of all rows, the terms of both objectives and the
weight from the kernels' traces happen inside the compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import SGD, Context, value_of
from fedmosaic.algorithm.parameters import Axis, Role, first_table
from fedmosaic.algorithm.upload import Parcel
from fedmosaic.algorithm.wrappers.additive import AdditiveModel, AdditiveObjective
from fedmosaic.algorithm.wrappers.mixing import Decorrelated, MixedModel, NTKWeight
from fedmosaic.core import buffers
from fedmosaic.core.fixed_point import fixed
from fedmosaic.core.ragged import I64, Ragged, offsets_of
from fedmosaic.core.threads import deal, thread_count
from fedmosaic.engines.fused import linear, skeleton
from fedmosaic.engines.fused.skeleton import SCORES_PER_CALL, Room, groups_of
from fedmosaic.engines.state import Array, DeviceStore, Kept, Piece, Place, Rows, store
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.engines.uploads import summed
from fedmosaic.privacy.noise import Clip

NORMS = {"none": 0, "l1": 1, "l2": 2}
MOMENTS = {"batch": 0, "epoch": 1, "round": 2}
ENCODED_AT_ONCE = 32  # clients whose whole tables are there at the same time


class Plan(NamedTuple):
    """What the loop needs to know about the algorithm, as numbers."""

    rates: Any  # [phases, 3]: user, own, common
    decays: Any  # [3]
    apart: Any
    sparse: Any
    norm: int  # 0 none, 1 absolute values, 2 squares
    beta: Any
    gamma: Any
    form: int  # of the decorrelation: 0 none, 1 local-global, 2 self
    mixed: bool  # rows are weight · own + (1 - weight) · common, rather than own + common
    weight: float  # fixed, or -1: from the traces
    low: float
    high: float
    moment: int  # from which the weight is computed: 0 every batch, 1 every epoch, 2 once
    centred: bool
    smooth: bool
    positives: bool  # traces over the positives, rather than over all examples
    size: int  # of a batch
    step_decay: Any
    tolerance: float
    has_bias: bool


class OwnRows(NamedTuple):
    """The cohort's own rows: where they lie in the device store, and room for the new ones."""

    restart: bool  # own rows begin as the server's, and are not stored
    keys: Any
    rows: Any
    scale: Any
    begin: Any
    end: Any
    first: Any  # what rows never stored begin as
    out_at: Any
    out_items: Any
    out_rows: Any
    out_count: Any
    sent: Any  # likewise the common table's rows, where uploads are encoded client by client


class Tables(NamedTuple):
    """What users answer with: common rows, own ones, and how much of each."""

    common: Any
    first: Any
    user: Any
    bias: Any
    clients: Any
    keys: Any
    rows: Any
    begin: Any
    end: Any
    scale: Any
    weights: Any  # [users, 2]: of own and of common rows


class PairRoom(NamedTuple):
    """What two tables need beside a worker's `Room`, whose `rows` hold the client's own."""

    common: Any
    base: Any  # the sent table's rows before training
    read: Any  # rows as they are scored
    stamp: Any  # last batch in which a row was listed
    places: Any
    distinct: Any  # rows of a batch
    times: Any
    coef: Any
    left: Any  # standardised columns of the two views, their spreads, and the gradient
    right: Any
    push: Any
    spread: Any
    other: Any
    rates: Any

    @classmethod
    def of(cls, room: Room, form: int) -> PairRoom:
        """For one worker; `form` of the decorrelation, if any."""
        rows, dim = room.rows.shape
        wide = rows if form else 1
        common, base, read = (buffers.aligned((rows, dim), np.float32) for _ in range(3))
        places, distinct, times = (np.empty(rows, np.int32) for _ in range(3))
        left, right, push = (buffers.aligned((wide, dim), np.float32) for _ in range(3))
        stamp, coef = np.full(rows, -1, np.int64), np.empty(rows, np.float32)
        spread, other, rates = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(3, np.float32)
        return cls(common, base, read, stamp, places, distinct, times, coef, left, right, push, spread, other, rates)


@dataclass(frozen=True)
class PairProgram:
    """Made by `lower`, which has checked that the algorithm is nothing else."""

    algorithm: Algorithm
    name: ClassVar[str] = "fused"
    scores_at_once: ClassVar[int] = SCORES_PER_CALL

    @property
    def own(self) -> str:
        """The table of a client's own."""
        return "item.own" if isinstance(self.algorithm.model, AdditiveModel) else "item"

    @property
    def lonely(self) -> bool:
        """Whether nothing is common: one private table."""
        return self.algorithm.roles["item"] is Role.PRIVATE

    @property
    def mixed(self) -> bool:
        """Whether the two tables are weighed."""
        return isinstance(self.algorithm.model, MixedModel)

    def parts(self, task: Task) -> list[I64]:
        """Groups that are added up as floats."""
        return groups_of(task)

    def run(self, task: Task, parts: Sequence[I64] | None = None, workers: int | None = None) -> Outcome:
        """The cohort in one compiled call per worker."""
        from fedmosaic.engines.fused.pair_loop import train

        algorithm, clients, count = self.algorithm, task.cohort.size, workers or thread_count()
        item = self._common(task)
        user, bias = skeleton.user_side(algorithm, task)
        plan, own_rows = self._plan(task.ctx), self._own_rows(task)
        cohort, longest = skeleton.people_of(algorithm, task), skeleton.longest_of(algorithm, task)
        mix, shrunk = self._mix(task, task.cohort), np.ones((clients, 2), np.float32)
        sums = skeleton.sums_of(task, item, count)
        table = (item, user, bias, mix, shrunk)

        def work(worker: int, workers: int) -> bool:
            room = skeleton.room_of(algorithm, task, item.shape[1], longest)
            pair = PairRoom.of(room, plan.form)
            return bool(train(worker, workers, cohort, plan, table, own_rows, room, pair, sums[worker]))

        skeleton.run_workers(work, count)
        shrink = {"item": sum(fixed(float(s) - 1) for s in shrunk[:, 1])} if "item" in algorithm.spread else {}
        upload = skeleton.collected(sums, shrink)
        if self.lonely:
            upload = replace(upload, totals={}, shrink={})
        if algorithm.upload.stack:
            totals, numbers = self._encoded(task, item, own_rows, shrunk[:, 1])
            upload = replace(upload, totals=totals, numbers=numbers)
        score = {"user": user, "bias": bias[:, None]}
        own = {n: v for n, v in score.items() if n in algorithm.specs}
        own |= {"item.mix": mix} if "item.mix" in algorithm.specs else {}
        devices = self._kept(replace(task, devices=skeleton.with_values(task, own)), own_rows, shrunk)
        answers = None if task.query_items is None else sums[0].answers
        if answers is not None and not self.mixed:
            answers = self.answer(replace(task, devices=devices), task.cohort, task.query_items)
        return Outcome(upload, devices, answers)

    def answer(self, task: Task, users: I64, query: Ragged | None = None) -> Array:
        """With the server's newest table and the devices' own rows: flat like the query, or [users, items]."""
        from fedmosaic.engines.fused.pair_pieces import own_pairs, own_scores

        if self.mixed and self.algorithm.roles["item"] is Role.PERSONALISED:
            return linear.answer(self.algorithm, task, users, query)  # a local table begins as the common one
        tables, workers = self._tables(task, users), thread_count()
        cuts = np.linspace(0, users.size, workers + 1).astype(np.int64)
        if query is None:
            whole = np.empty((users.size, task.data.n_items), np.float32)
            deal(lambda w: own_scores(tables, cuts[w], cuts[w + 1], whole), workers)
            return whole
        flat = np.empty(query.values.size, np.float32)
        deal(lambda w: own_pairs(tables, query.values, query.offsets, cuts[w], cuts[w + 1], flat), workers)
        return flat

    def _common(self, task: Task) -> Array:
        if self.lonely:
            return np.zeros((task.data.n_items, *self.algorithm.specs["item"].shape), np.float32)
        return np.ascontiguousarray(task.server["item"], dtype=np.float32)

    def _mix(self, task: Task, users: I64) -> Array:
        if "item.mix" in self.algorithm.specs:
            return task.devices.dense("item.mix")[users]
        return np.zeros((users.size, 2), np.float32)

    def _tables(self, task: Task, users: I64) -> Tables:
        task = replace(task, cohort=users)
        user, bias = skeleton.user_side(self.algorithm, task)
        own, weights = self._own_rows(task, room=False), np.ones((users.size, 2), np.float32)
        if isinstance(self.algorithm.model, MixedModel):
            fixed_weight = self.algorithm.model.weight
            weights[:, 0] = self._mix(task, users)[:, 0] if fixed_weight is None else fixed_weight
            weights[:, 1] = 1 - weights[:, 0]
        common = self._common(task)
        return Tables(
            common, own.first, user, bias, users, own.keys, own.rows, own.begin, own.end, own.scale, weights
        )  # fmt: skip

    def _plan(self, ctx: Context) -> Plan:
        """The algorithm as numbers."""
        algorithm = self.algorithm
        model, objective, one = algorithm.model, algorithm.objective, algorithm.local[0]
        sides = ("user", self.own, "item" if isinstance(model, AdditiveModel) else "")
        decays = {n: m.rule.decay for m in algorithm.moves for n in m.names if isinstance(m.rule, SGD)}
        apart = sparse = beta = gamma = 0.0
        norm = form = 0
        if isinstance(objective, AdditiveObjective):
            apart, sparse, norm = value_of(objective.apart, ctx), value_of(objective.sparse, ctx), NORMS[objective.norm]
        if isinstance(objective, Decorrelated):
            beta, gamma, form = objective.beta, objective.gamma, 1 + (objective.form == "self")
        weight = model.weight if isinstance(model, MixedModel) else None
        ntk = algorithm.prepare if isinstance(algorithm.prepare, NTKWeight) else NTKWeight()
        return Plan(
            rates=skeleton.passes_of(algorithm, ctx, sides).rates,
            decays=np.array([decays.get(side, 0.0) for side in sides], np.float32),
            apart=np.float32(apart),
            sparse=np.float32(sparse if norm else 0.0),
            norm=norm,
            beta=np.float32(beta),
            gamma=np.float32(gamma),
            form=form,
            mixed=self.mixed,
            weight=-1.0 if weight is None else float(weight),
            low=float(ntk.clip[0]),
            high=float(ntk.clip[1]),
            moment=MOMENTS[ntk.when],
            centred=ntk.centred,
            smooth=ntk.smooth,
            positives=ntk.rows == "positives",
            size=one.batch_size,
            step_decay=np.float32(one.step_decay),
            tolerance=float(one.tolerance),
            has_bias="bias" in algorithm.specs,
        )

    def _own_rows(self, task: Task, *, room: bool = True) -> OwnRows:
        """Where the cohort's own rows lie, and room for the new ones."""
        data, cohort, spec = task.data, task.cohort, self.algorithm.specs[self.own]
        dim, restart = spec.shape[0], self.algorithm.roles[self.own] is Role.PERSONALISED
        held = task.devices.rows(self.own) if not restart else None
        held = held or Rows(np.zeros(0, np.int64), np.zeros((0, dim), np.float32))
        scale = np.ones((data.n_clients, 2), np.float32) if held.scale is None else held.scale
        drawn = np.where(data.excluded.lengths[cohort] < data.n_items, self.algorithm.negatives, 0)
        most = np.minimum(data.histories.lengths[cohort] * (1 + drawn), data.n_items) * (room and not restart)
        out_at = offsets_of(most)
        begins = task.server[self.own] if self.own in task.server else first_table(spec, task.ctx.seed, data.n_items)
        return OwnRows(
            restart=restart,
            keys=held.keys,
            rows=held.values,
            scale=scale[cohort],
            begin=np.searchsorted(held.keys, cohort * data.n_items),
            end=np.searchsorted(held.keys, (cohort + 1) * data.n_items),
            first=np.array(begins),
            out_at=out_at,
            out_items=buffers.empty((out_at[-1],), np.int32),
            out_rows=buffers.empty((out_at[-1], dim), np.float32),
            out_count=np.zeros(cohort.size, np.int64),
            sent=np.empty((out_at[-1] if self.algorithm.upload.stack else 0, dim), np.float32),
        )

    def _kept(self, task: Task, own: OwnRows, shrunk: Array) -> DeviceStore:
        """The device store with the cohort's own rows, and what decay left of all others.

        Rows are not copied twice: they lie in the program's room, and `at` says where.
        """
        if own.restart:
            return task.devices
        starts = np.repeat(own.out_at[:-1] - offsets_of(own.out_count)[:-1], own.out_count)
        at = starts + np.arange(starts.size)
        touched = Ragged(own.out_items[at], offsets_of(own.out_count))
        place = Place(task.cohort, task.data.members(task.cohort), touched, task.data.n_items)
        spreads = any(move.spreads for move in self.algorithm.moves if self.own in move.names)
        piece = Piece(Axis.ITEM, place, own.out_rows, shrunk[:, 0] if spreads else None, at)
        return store(task.devices, [Kept({self.own: piece})], task.data)

    def _encoded(self, task: Task, item: Array, own: OwnRows, left: Array) -> tuple[dict[str, Array], int]:
        """The sum of encoded uploads, some clients at a time: rows they trained, and what decay did to the others."""
        upload = self.algorithm.upload
        clip = upload.stack[0]
        if type(clip) is Clip and len(upload.stack) == 1 and upload.support == "dense":
            return {"item": _clipped(clip.bound, item, own, left)}, 0
        n_items, numbers = task.data.n_items, 0
        total = np.zeros((n_items, *upload.shape(self.algorithm.specs["item"])), np.int64)
        for start in range(0, task.cohort.size, ENCODED_AT_ONCE):
            places = range(start, min(start + ENCODED_AT_ONCE, task.cohort.size))
            changes = (left[places.start : places.stop, None, None] - 1) * item
            for change, c in zip(changes, places, strict=True):
                rows = slice(own.out_at[c], own.out_at[c] + own.out_count[c])
                change[own.out_items[rows]] = own.sent[rows] - item[own.out_items[rows]]
            count = len(places)
            parcel = Parcel(
                changes={"item": changes.reshape(-1, item.shape[1])},
                before={"item": np.tile(item, (count, 1))},
                owners={"item": np.repeat(np.arange(count), n_items)},
                items={"item": np.tile(np.arange(n_items, dtype=np.int32), count)},
                client_ids=task.data.ids_of(task.cohort[places.start : places.stop]),
                ctx=task.ctx,
            )
            more, found = summed(self.algorithm, parcel, {})
            total += more["item"]
            numbers += found
        return {"item": total}, numbers


def _clipped(bound: float, item: Array, own: OwnRows, left: Array) -> Array:
    """The sum of clipped uploads, without anybody's whole table."""
    from fedmosaic.engines.fused.pair_pieces import NUMBERS, clip_factors, clipped_decay, clipped_rows

    sent, workers = (own.sent, own.out_items, own.out_at, own.out_count), thread_count()
    factors, totals = np.empty(left.size, np.float32), np.zeros((workers, *item.shape), np.int64)

    def shares(size: int, work: Callable[[int, int, int], None]) -> None:
        cuts = np.linspace(0, size, workers + 1).astype(int)
        deal(lambda w: work(w, cuts[w], cuts[w + 1]), workers)

    shares(left.size, lambda _, begin, end: clip_factors(item, sent, left, bound, begin, end, factors))
    flat = totals[0].reshape(-1)
    shares(-(-item.size // NUMBERS), lambda _, begin, end: clipped_decay(item, left, factors, begin, end, flat))
    shares(workers, lambda w, *_: clipped_rows(item, sent, left, factors, w, workers, totals[w]))
    return np.asarray(totals.sum(axis=0))
