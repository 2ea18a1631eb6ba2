"""MetaMF (SIGIR 2020): the server generates every user's model; devices send the gradient of what was generated.

    c_u = p_u · M                                            p_u: user embedding, M: shared memory, both the server's
    item table of u = A(c_u) · B(c_u)                        m × 8 times 8 × d ("rise-dimensional")
    score = W2(c_u)' ReLU(W1(c_u)' e_j + b1(c_u)) + b2(c_u)

A, B, W1, W2 are two-layer networks. A device gets its generated tensors, takes one gradient and sends it; the server
carries it on by the chain rule into the networks, M and p_u. The server knows a vector per person.

Of A a step generates for each device the rows that it trains and no others; the server's Adam moves everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Context, Move, Pass, Phase
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.view import View
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.extras import lazy_torch, require_torch
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.batches import cohort_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.state import Array, DeviceStore, checked
from fedmosaic.engines.task import Task
from fedmosaic.methods.base import FULL_BATCH, CohortSettings, Entry, refuse_silos
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmosaic.engines.block import Block
    from fedmosaic.methods.per_item_layer import Pairs
else:
    torch = lazy_torch("metamf")

USERS = 512  # whose answers are made together
AVERAGE = 0.9  # answers come from a running mean of the server's parameters: how much of it is the past


class MetaSettings(CohortSettings):
    """Settings of MetaMF; a round passes over all clients drawn."""

    RENAMED: ClassVar = {"rate": "server_rate", "clip": "gradient_clip"}
    DROPPED: ClassVar = {"average": 0.9}

    group: int = Field(default=32, ge=1, description="clients per step of the server")
    narrow: int = Field(default=8, ge=1, description="width of the generated factors, and of the hidden layer")
    hidden: int = Field(default=128, ge=1, description="width of the generators")
    memory: int = Field(default=128, ge=1, description="width of the shared memory")
    server_rate: float = Field(default=3e-3, gt=0, description="rate of the server's Adam")
    decay: float = Field(default=2e-4, ge=0, description="weight decay of the server's parameters")
    gradient_clip: float = Field(default=5.0, gt=0, description="largest norm of a step's gradient")


@dataclass(frozen=True, eq=False)
class MetaState:
    """The server's networks, their running mean, and its optimiser's memory."""

    seed: int
    n_items: int
    params: Mapping[str, Array]
    mean: Mapping[str, Array]
    memory: Mapping[str, tuple[Array, ...]]


@dataclass(frozen=True)
class GeneratedScorer:
    """The small model a device receives."""

    dim: int
    narrow: int

    def specs(self) -> tuple[Spec, ...]:
        """Item rows and two layers."""
        return (
            Spec("item", Axis.ITEM, (self.dim,), Init("zero")),
            Spec("hidden.weight", Axis.WHOLE, (self.dim, self.narrow), Init("zero")),
            Spec("hidden.bias", Axis.WHOLE, (self.narrow,), Init("zero")),
            Spec("out.weight", Axis.WHOLE, (self.narrow, 1), Init("zero")),
            Spec("out.bias", Axis.WHOLE, (1,), Init("zero")),
        )

    def score(self, view: View, items: Tensor) -> Tensor:
        """W2' ReLU(W1' e + b1) + b2."""
        return view.linear("out", torch.relu(view.linear("hidden", view.rows("item", items)))).squeeze(-1)


@dataclass(frozen=True)
class MetaMF:
    """Groups of clients, one server step each."""

    settings: MetaSettings

    @property
    def rounds(self) -> int:
        """As many as set."""
        return self.settings.rounds

    @property
    def algorithm(self) -> Algorithm:
        """The devices' part: one gradient of everything that was generated."""
        model = GeneratedScorer(self.settings.dim, self.settings.narrow)
        names = tuple(s.name for s in model.specs())
        step = Pass((Phase((Move(names, 0.0),)),), batch_size=FULL_BATCH)
        roles = dict.fromkeys(names, Role.SHARED)
        return Algorithm(model, roles, (step,), upload=Upload("gradient"), negatives=self.settings.negatives)

    def check_installed(self) -> None:
        """Refuse it where PyTorch is not installed."""
        require_torch("metamf")

    def start(self, data: TrainingSet, seed: int) -> MetaState:
        """The server's networks; devices hold nothing."""
        s = self.settings
        outputs = {
            "rows": data.n_items * s.narrow,
            "rise": s.narrow * s.dim,
            "hidden": s.dim * s.narrow + s.narrow,
            "out": s.narrow + 1,
        }
        shapes: dict[str, tuple[int, ...]] = {"user": (data.n_users, s.dim), "memory": (s.dim, s.memory)}
        for name, width in outputs.items():
            shapes |= {f"{name}.0.weight": (s.memory, s.hidden), f"{name}.0.bias": (s.hidden,)}
            shapes |= {f"{name}.1.weight": (s.hidden, width), f"{name}.1.bias": (width,)}
        params = {}
        for name, shape in shapes.items():
            scale = sqrt(2 / sum(shape)) if len(shape) == 2 and name != "user" else 1 / sqrt(s.dim)
            init = Init("zero") if name.endswith("bias") else Init("normal", scale)
            value = Spec(f"metamf.{name}", Axis.WHOLE, shape, init).table(seed, 0)
            if name.endswith("weight"):  # of a layer: an output's numbers lie side by side
                value = np.ascontiguousarray(value.T)
            params[name] = value
        memory = {n: Adam().memory(v) for n, v in params.items()}
        return MetaState(seed, data.n_items, params, {n: v.copy() for n, v in params.items()}, memory)

    def advance(
        self, data: TrainingSet, state: MetaState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[MetaState, RoundRecord, npt.NDArray[np.floating] | None]:
        """All clients drawn, in groups; after each the server steps."""
        refuse_silos(data, "metamf")
        cohort = cohort_of(data, self.settings.participation, seed=seed, round=round)
        ctx = Context(round, seed, data.n_items, data.n_clients)
        order = np.random.Generator(np.random.Philox(key=[seed, round])).permutation(cohort)
        params = {n: v.copy() for n, v in state.params.items()}
        memory = {n: tuple(m.copy() for m in parts) for n, parts in state.memory.items()}
        loss = 0.0
        for at in range(0, order.size, self.settings.group):
            loss += self._step(data, params, memory, np.sort(order[at : at + self.settings.group]), ctx)
        share = min(AVERAGE, 1 - 1 / round)  # of the past; the first rounds count alike
        mean = {n: share * state.mean[n] + (1 - share) * v for n, v in params.items()}
        after = MetaState(state.seed, state.n_items, params, mean, memory)
        up, down = self.traffic(data.n_items)
        record = RoundRecord(cohort.size, up, down, loss / cohort.size)
        return after, record, None if query is None else self._answers(data, after, query)

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Bytes of the generated model, and of its gradient."""
        s = self.settings
        size = 4 * (n_items * s.dim + (s.dim + 2) * s.narrow + 1)
        return size, size

    def pack(self, state: MetaState) -> dict[str, Array]:
        """As named arrays, for a file."""
        arrays = {"seed": np.array([state.seed]), "n_items": np.array([state.n_items])}
        arrays |= {f"server/{n}": v for n, v in state.params.items()} | {f"mean/{n}": v for n, v in state.mean.items()}
        return arrays | {f"rule/{n}.{i}": m for n, parts in state.memory.items() for i, m in enumerate(parts)}

    def unpack(self, arrays: Mapping[str, Array], what: str) -> MetaState:
        """Read `pack` back."""
        params = {n.removeprefix("server/"): v for n, v in arrays.items() if n.startswith("server/")}
        if "user" not in params or params["user"].shape[1] != self.settings.dim:
            raise ForeignError(f"{what} holds no user table of width {self.settings.dim}; it belongs to another method")
        mean = {n: checked(arrays, f"mean/{n}", v.shape, what) for n, v in params.items()}
        memory = {n: tuple(arrays[f"rule/{n}.{i}"] for i in range(3)) for n in params}
        return MetaState(int(arrays["seed"][0]), int(arrays["n_items"][0]), params, mean, memory)

    def _answers(self, data: TrainingSet, state: MetaState, query: Ragged) -> Array:
        """Scores of what each user is asked for."""
        from fedmosaic.methods.per_item_layer import Pairs

        server, found = _answering(state), []
        with torch.no_grad():
            for users in np.array_split(np.arange(data.n_users), data.n_users // USERS + 1):
                items = query.take(users)
                made = generate(server, torch.from_numpy(users), self.settings, Pairs.of(items, data.n_items))
                whose = torch.from_numpy(items.rows.astype(np.int64))
                inner = torch.bmm(made["rise"], made["hidden.weight"])[whose]
                hidden = torch.baddbmm(made["hidden.bias"][whose, None], made["factors"].unsqueeze(1), inner).relu_()
                scores = torch.baddbmm(made["out.bias"][whose, None], hidden, made["out.weight"][whose])
                found.append(scores.flatten().numpy())
        return np.concatenate(found)

    def _step(
        self,
        data: TrainingSet,
        params: dict[str, Array],
        memory: dict[str, tuple[Array, ...]],
        clients: I64,
        ctx: Context,
    ) -> float:
        """Generate, let the devices answer with gradients, carry those into the server's parameters, move."""
        from fedmosaic.engines.round import begin
        from fedmosaic.engines.simulate import chunks
        from fedmosaic.methods.per_item_layer import Pairs

        nothing = {n: s.table(0, data.n_items) for n, s in self.algorithm.specs.items()}
        task = Task(data, nothing, DeviceStore(), ctx, clients)
        blocks = [begin(self.algorithm, task, clients[part]) for part in chunks(self.algorithm, task)]
        touched = Ragged.join([block.place.touched for block in blocks])
        users = torch.from_numpy(np.concatenate([block.place.clients for block in blocks]))
        leaves = {n: torch.from_numpy(v).requires_grad_() for n, v in params.items()}
        made = generate(leaves, users, self.settings, Pairs.of(touched, data.n_items))
        factors = torch.split(made.pop("factors"), touched.lengths.tolist())
        made["item"] = torch.cat([own @ rise for own, rise in zip(factors, made.pop("rise"), strict=True)])
        sent = self._gradients(blocks, {n: v.detach() for n, v in made.items()}, ctx)
        slopes = torch.autograd.grad(list(made.values()), list(leaves.values()), [sent[n] / clients.size for n in made])
        self._move(params, memory, dict(zip(leaves, slopes, strict=True)))
        return float(sum((block.loss / np.maximum(block.seen, 1)).sum() for block in blocks))

    def _move(self, params: dict[str, Array], memory: dict[str, tuple[Array, ...]], slopes: dict[str, Tensor]) -> None:
        """One step of the server's Adam on everything."""
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in slopes.values()]))
        bound = self.settings.gradient_clip
        for name, slope in slopes.items():
            scaled = slope if norm <= bound else slope.mul_(bound / norm)
            rule = Adam(decay=self.settings.decay)
            rule.step(params[name], scaled.contiguous().numpy(), memory[name], self.settings.server_rate)

    def _gradients(self, blocks: list[Block], made: dict[str, Tensor], ctx: Context) -> dict[str, Tensor]:
        """The devices' work: what the server generated goes in, block by block, and gradients come out."""
        from fedmosaic.engines.block import turns
        from fedmosaic.engines.round import train_batch

        work, client, row = self.algorithm.local[0], 0, 0
        for block in blocks:
            clients, rows = block.place.clients.size, block.place.touched.values.size
            for name, value in made.items():
                block.params[name] = value[row : row + rows] if name == "item" else value[client : client + clients]
            for turn in turns(block, work, 0, ctx):
                train_batch(self.algorithm, block, turn, work.phases, ctx)
            client, row = client + clients, row + rows
        return {name: torch.cat([block.gradients[name] for block in blocks]) for name in made}

    def _tables(self, data: TrainingSet, state: MetaState, users: I64) -> Iterator[tuple[I64, Array]]:
        """Scores of all items, some users at a time: W1'(A B)' = (B W1)' A', and B W1 is small."""
        server = _answering(state)
        step = max(1, (1 << 22) // (data.n_items * self.settings.narrow))
        with torch.no_grad():
            for at in range(0, users.size, step):
                part = users[at : at + step]
                made = generate(server, torch.from_numpy(part), self.settings)
                inner = torch.bmm(made["rise"], made["hidden.weight"])
                hidden = torch.baddbmm(made["hidden.bias"].unsqueeze(1), made["factors"], inner).relu_()
                scores = torch.baddbmm(made["out.bias"].unsqueeze(1), hidden, made["out.weight"]).squeeze(-1)
                yield part, scores.numpy()

    def scorer(self, data: TrainingSet, state: MetaState) -> GeneratedScores:
        """Answers of the models the server generates."""
        return GeneratedScores(self, data, state)

    def vectors(self, state: MetaState) -> npt.NDArray[np.floating]:
        """The item table generated for the mean user."""
        server = _answering(state)
        server["user"] = server["user"].mean(0, keepdim=True)
        made = generate(server, torch.zeros(1, dtype=torch.long), self.settings)
        return np.asarray((made["factors"][0] @ made["rise"][0]).numpy())


def _answering(state: MetaState) -> dict[str, Tensor]:
    """The parameters that answer: the running mean."""
    return {n: torch.from_numpy(v) for n, v in state.mean.items()}


def generate(
    server: dict[str, Tensor], users: Tensor, s: MetaSettings, asked: Pairs | None = None
) -> dict[str, Tensor]:
    """The tensors of some users' models, one leading row per user; item rows as two factors, `factors` and `rise`.

    Where only some items are asked for, `factors` has a row for each of those pairs instead.
    """
    linear = torch.nn.functional.linear
    code = server["user"][users] @ server["memory"]

    def inner(name: str) -> Tensor:
        return torch.relu(linear(code, server[f"{name}.0.weight"], server[f"{name}.0.bias"]))

    def network(name: str) -> Tensor:
        return linear(inner(name), server[f"{name}.1.weight"], server[f"{name}.1.bias"])

    if asked is None:
        factors = network("rows").reshape(users.shape[0], -1, s.narrow)
    else:
        weight = server["rows.1.weight"].view(-1, s.narrow, s.hidden)
        factors = asked.rows(inner("rows"), weight, server["rows.1.bias"].view(-1, s.narrow))
    hidden, out = network("hidden"), network("out")
    cut = s.dim * s.narrow
    return {
        "factors": factors,
        "rise": network("rise").reshape(-1, s.narrow, s.dim),
        "hidden.weight": hidden[:, :cut].reshape(-1, s.dim, s.narrow),
        "hidden.bias": hidden[:, cut:],
        "out.weight": out[:, : s.narrow].reshape(-1, s.narrow, 1),
        "out.bias": out[:, s.narrow :],
    }


@dataclass(frozen=True, eq=False)
class GeneratedScores:
    """Scores of generated models."""

    method: MetaMF
    data: TrainingSet
    state: MetaState

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
        return np.concatenate([scores for _, scores in self.method._tables(self.data, self.state, users)])

    def item_rows(self, user: int) -> npt.NDArray[np.floating]:
        """The item table that is generated for a user."""
        with torch.no_grad():
            made = generate(_answering(self.state), torch.tensor([user]), self.method.settings)
            return np.asarray((made["factors"][0] @ made["rise"][0]).numpy())


METHODS = (
    Entry(
        "metamf",
        "Models generated on the server, one per user; devices send gradients of them",
        "Lin et al., Meta matrix factorization for federated rating predictions, SIGIR 2020",
        MetaSettings,
        MetaMF,
        expect={"ml-100k ties=file": (61.1, 35.2)},
    ),
)
