"""What a deployment adds up: the nodes' half and the server's, of methods that learn in rounds and of closed forms.

    parameters(state)      what nodes receive
    contribute(...)        on a node: what its clients send, as a sum
    vector, applied        that sum as whole numbers under masks; and what the server makes of the sum of all

A masked sum also tells how many clients it is of, and nothing else of a node: neither loss nor how long it took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import Axis
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.secret import DeviceSecret, Stream, new_secret
from fedmosaic.data.histories import Histories
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.deploy.agreement import Agreement
from fedmosaic.deploy.protocol import TaskMessage, brought_up
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.secure import flat, unflat
from fedmosaic.engines.state import Array, FederationState, ServerState
from fedmosaic.engines.uploads import add_noise, apply
from fedmosaic.methods.closed_form import ClosedForm, Statistics, as_statistics, as_whole_numbers, total
from fedmosaic.privacy.budget import Budget

MANY = 1000  # nodes whose sums must fit into 64 bits together


class Work(Protocol):
    """The two halves."""

    @property
    def rounds(self) -> int:
        """How many rounds there are, at most."""
        ...

    def start(self, n_items: int, seed: int) -> Any:
        """The server's state before round 1."""
        ...

    def parameters(self, state: Any) -> dict[str, Array]:
        """What nodes receive."""
        ...

    def done(self, state: Any) -> bool:
        """Whether no round is needed any more."""
        ...

    def pack(self, state: Any) -> dict[str, Array]:
        """The server's state, for a file."""
        ...

    def unpack(self, arrays: Mapping[str, Array], n_items: int, what: str) -> Any:
        """Read `pack` back."""
        ...

    def nothing(self, state: Any, n_items: int) -> UploadSum | Statistics:
        """What nobody sends, for its names and shapes."""
        ...

    def size(self, state: Any, n_items: int) -> int:
        """How many numbers a node puts under its masks."""
        ...

    def applied(self, state: Any, vector: I64, ctx: Context, expected: int) -> tuple[Any, int]:
        """The server's state after a masked sum, and of how many clients it was. expected: if all were here."""
        ...

    def begin(self, data: TrainingSet, seed: int) -> Any:
        """What a node holds before it has met its server: what it received (nothing), and what its clients keep."""
        ...

    def received(self, held: Any) -> dict[str, Array]:
        """The server's parameters as a node received them last."""
        ...

    def with_received(self, held: Any, parameters: Mapping[str, Array]) -> Any:
        """The same with others."""
        ...

    def brought_up(self, n_items: int, held: Any, task: TaskMessage) -> dict[str, Array]:
        """The server's parameters by a task: what was held, with what it brings; shapes are checked."""
        ...

    def contribute(self, data: TrainingSet, held: Any, ctx: Context, cohort: I64) -> tuple[Any, UploadSum | Statistics]:
        """On a node: what it holds afterwards, and what its clients send, without an epsilon's noise."""
        ...

    def noised(self, vector: I64, data: TrainingSet, held: Any, ctx: Context, parties: int) -> I64:
        """That as whole numbers, with this node's share of an epsilon's noise, so many taking part."""
        ...

    def pack_held(self, held: Any) -> dict[str, Array]:
        """What a node holds, for its file."""
        ...

    def unpack_held(self, arrays: Mapping[str, Array], what: str, secret: DeviceSecret | None) -> Any:
        """Read `pack_held` back."""
        ...

    def vector(self, sent: UploadSum | Statistics, clients: int) -> I64:
        """What a node sends, as whole numbers."""
        ...

    def memory(self, n_items: int) -> int:
        """Bytes that a node needs for its largest message, about."""
        ...


@dataclass(frozen=True, eq=False)
class LearntWork:
    """A federated algorithm. budget: an epsilon, whose noise nodes draw in shares."""

    federation: Federation

    @property
    def algorithm(self) -> Algorithm:
        """What runs on nodes."""
        return self.federation.algorithm

    @property
    def budget(self) -> Budget | None:
        """The epsilon, where there is one."""
        return self.federation.budget

    @property
    def rounds(self) -> int:
        """As many as the method has."""
        return self.federation.rounds

    def start(self, n_items: int, seed: int) -> ServerState:
        """First parameters."""
        return ServerState.first(self.algorithm, n_items, seed)

    def parameters(self, state: ServerState) -> dict[str, Array]:
        """The shared ones."""
        return dict(state.params)

    def done(self, state: ServerState) -> bool:
        """Never before its last round."""
        return False

    def pack(self, state: ServerState) -> dict[str, Array]:
        """Parameters and the memory of step rules."""
        return state.pack()

    def unpack(self, arrays: Mapping[str, Array], n_items: int, what: str) -> ServerState:
        """Shapes are checked."""
        return ServerState.unpack(self.algorithm, arrays, n_items, what)

    def size(self, state: ServerState | None, n_items: int) -> int:
        """Numbers of a dense upload, shares of decay, and three counts."""
        return self.vector(self.nothing(state, n_items), 0).size

    def applied(self, state: ServerState, vector: I64, ctx: Context, expected: int) -> tuple[ServerState, int]:
        """Taken apart again, and the server's step. Under an epsilon a mean divides by what everybody knows."""
        clients = int(vector[-1])
        summed = unflat(self.algorithm, self.nothing(state, ctx.n_items), vector[:-1], clients)
        if self.budget is not None:
            summed = replace(summed, clients=expected)
        return apply(self.algorithm, state, summed, ctx), clients

    def begin(self, data: TrainingSet, seed: int) -> FederationState:
        """First private parameters."""
        return replace(self.federation.start(data, seed), server=ServerState({}, {}))

    def received(self, held: FederationState) -> dict[str, Array]:
        """As the state has them."""
        return dict(held.server.params)

    def with_received(self, held: FederationState, parameters: Mapping[str, Array]) -> FederationState:
        """No memory of step rules: that is the server's."""
        return replace(held, server=ServerState(dict(parameters), {}))

    def brought_up(self, n_items: int, held: FederationState, task: TaskMessage) -> dict[str, Array]:
        """Whole tables, or the rows that moved."""
        return brought_up(self.algorithm, n_items, held.server.params, task)

    def contribute(
        self, data: TrainingSet, held: FederationState, ctx: Context, cohort: I64
    ) -> tuple[FederationState, UploadSum]:
        """Local work; refused where an epsilon is used up."""
        if self.budget is not None:
            self.budget.check(ctx.round)
        after, outcome = replace(self.federation, budget=None).contribute(data, held, ctx, cohort)
        return after, outcome.total

    def noised(self, vector: I64, data: TrainingSet, held: FederationState, ctx: Context, parties: int) -> I64:
        """A node draws as one client, however many it has: what is accounted for is the noise of a sum of nodes."""
        if self.budget is None:
            return vector
        upload, share = (
            replace(self.algorithm.upload, noise=self.budget.at(held.server.params).noise(parties)),
            self.nothing(None, ctx.n_items),
        )
        add_noise(replace(self.algorithm, upload=upload), share, data.ids_of(np.zeros(1, np.int64)), ctx)
        return vector + self.vector(share, 0)

    def pack_held(self, held: FederationState) -> dict[str, Array]:
        """Private parameters, parameters received, and what a replay needs."""
        return held.pack()

    def unpack_held(self, arrays: Mapping[str, Array], what: str, secret: DeviceSecret | None) -> FederationState:
        """Without the memory of step rules."""
        return replace(FederationState.unpack(self.algorithm, arrays, what, memory=False), secret=secret)

    def vector(self, sent: UploadSum | Statistics, clients: int) -> I64:
        """All that adds up but the loss and the number of examples."""
        assert isinstance(sent, UploadSum)
        return np.append(flat(self.algorithm, replace(sent, examples=0, loss=0.0)), clients)

    def memory(self, n_items: int) -> int:
        """Numbers of 64 bits: as they are, masked, packed, and in parts."""
        return 4 * 8 * self.size(None, n_items)

    def nothing(self, state: ServerState | None, n_items: int) -> UploadSum:
        """An empty sum, for its shapes."""
        specs, upload = self.algorithm.specs, self.algorithm.upload
        lead = {n: (n_items,) if specs[n].axis is Axis.ITEM else () for n in self.algorithm.sent}
        totals = {n: np.zeros((*lead[n], *upload.shape(specs[n])), np.int64) for n in self.algorithm.sent}
        return UploadSum(totals, np.zeros(n_items, np.int64), 0, 0, 0.0, dict.fromkeys(self.algorithm.spread, 0))


@dataclass(frozen=True, eq=False)
class SummedWork:
    """A closed form: its statistics, which follow from a history alone."""

    form: ClosedForm
    seed: int

    @property
    def rounds(self) -> int:
        """At most so many; `done` says when it is enough."""
        return self.form.rounds

    def start(self, n_items: int, seed: int) -> Statistics:
        """Nothing is known."""
        return dict(self.form.init(n_items, seed))

    def parameters(self, state: Statistics) -> dict[str, Array]:
        """All of it: nodes answer with it, and the next statistics are about it."""
        return dict(state)

    def done(self, state: Statistics) -> bool:
        """As the form says."""
        return self.form.done(state)

    def pack(self, state: Statistics) -> dict[str, Array]:
        """Named arrays already."""
        return dict(state)

    def unpack(self, arrays: Mapping[str, Array], n_items: int, what: str) -> Statistics:
        """Names are checked."""
        return dict(self.form.unpack(arrays, what))

    def size(self, state: Statistics, n_items: int) -> int:
        """Numbers of a client's statistics, and how many clients they are of."""
        return sum(value.size for value in self.nothing(state, n_items).values()) + 1

    def applied(self, state: Statistics, vector: I64, ctx: Context, expected: int) -> tuple[Statistics, int]:
        """Taken apart again, noised where an epsilon asks for it, and solved."""
        like = self.nothing(state, ctx.n_items)
        if vector.size != self.size(state, ctx.n_items):
            raise ForeignError(f"a sum of {vector.size} numbers; this round's has {self.size(state, ctx.n_items)}")
        summed = as_statistics(like, vector[:-1])
        released = self.form.released(summed, ctx.round, Stream(new_secret()))
        return dict(self.form.apply(state, released)), int(vector[-1])

    def begin(self, data: TrainingSet, seed: int) -> Statistics:
        """Nothing is kept but the history."""
        return {}

    def received(self, held: Statistics) -> dict[str, Array]:
        """That is all there is."""
        return dict(held)

    def with_received(self, held: Statistics, parameters: Mapping[str, Array]) -> Statistics:
        """Others."""
        return dict(parameters)

    def brought_up(self, n_items: int, held: Statistics, task: TaskMessage) -> dict[str, Array]:
        """A closed form's state comes whole."""
        return dict(self.form.unpack(dict(task.tensors), "a task"))

    def contribute(
        self, data: TrainingSet, held: Statistics, ctx: Context, cohort: I64
    ) -> tuple[Statistics, Statistics]:
        """The statistics of some clients."""
        return held, total(self.form, held, data.held.take(cohort))

    def noised(self, vector: I64, data: TrainingSet, held: Statistics, ctx: Context, parties: int) -> I64:
        """Nothing is added here: the noise of a closed form's sum is the server's."""
        return vector

    def pack_held(self, held: Statistics) -> dict[str, Array]:
        """Named arrays already."""
        return dict(held)

    def unpack_held(self, arrays: Mapping[str, Array], what: str, secret: DeviceSecret | None) -> Statistics:
        """Names are checked."""
        return dict(self.form.unpack(arrays, what)) if arrays else {}

    def vector(self, sent: UploadSum | Statistics, clients: int) -> I64:
        """In fixed point; refused where sums of many would not fit."""
        assert not isinstance(sent, UploadSum)
        return np.append(as_whole_numbers(sent, MANY), clients)

    def memory(self, n_items: int) -> int:
        """As known before the first round."""
        return 4 * self.form.traffic(n_items)[0]

    def nothing(self, state: Statistics, n_items: int) -> Statistics:
        """Statistics of nobody, for their shapes."""
        return self.form.statistics(state, Histories(Ragged.from_rows([]), n_items, np.zeros(0, np.int64)))


def work_of(agreement: Agreement) -> Work:
    """What a federation adds up."""
    method = agreement.build()
    return LearntWork(method) if isinstance(method, Federation) else SummedWork(method, agreement.seed)
