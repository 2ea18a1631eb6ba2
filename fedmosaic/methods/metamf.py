"""MetaMF (SIGIR 2020): the server generates every user's model; devices send the gradient of what was generated.

    c_u = p_u · M                                            p_u: user embedding, M: shared memory, both the server's
    item table of u = A(c_u) · B(c_u)                        m × 8 times 8 × d ("rise-dimensional")
    score = W2(c_u)' ReLU(W1(c_u)' e_j + b1(c_u)) + b2(c_u)

A, B, W1, W2 are two-layer networks. A device gets its generated tensors, takes one gradient and sends it; the server
carries it on by the chain rule into the networks, M and p_u. The server knows a vector per person.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from fedmosaic.algorithm import Algorithm
from fedmosaic.data.batches import cohort_of
from fedmosaic.hosts import FULL_BATCH, CohortSettings, refuse_silos
from fedmosaic.local import Adam, Context, Move, Pass, Phase
from fedmosaic.models.view import View
from fedmosaic.ragged import I64, Ragged
from fedmosaic.runtime.block import Block, Task, turns
from fedmosaic.runtime.devices import Array
from fedmosaic.runtime.round import advance, begin
from fedmosaic.training import RoundRecord, State, TrainingSet
from fedmosaic.tree import Axis, Init, Role, Spec
from fedmosaic.upload import Upload


class MetaSettings(CohortSettings):
    """Settings of MetaMF; a round passes over all clients drawn."""

    group: int = Field(default=32, ge=1, description="clients per step of the server")
    narrow: int = Field(default=8, ge=1, description="width of the generated factors, and of the hidden layer")
    hidden: int = Field(default=128, ge=1, description="width of the generators")
    memory: int = Field(default=128, ge=1, description="width of the shared memory")
    rate: float = Field(default=3e-3, gt=0, description="rate of the server's Adam")
    decay: float = Field(default=2e-4, ge=0, description="weight decay of the server's parameters")
    average: float = Field(
        default=0.9, ge=0, lt=1, description="answers come from a running mean of the server's parameters; 0 = newest"
    )
    clip: float = Field(default=5.0, gt=0, description="largest norm of a step's gradient")


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

    def start(self, data: TrainingSet, seed: int) -> State:
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
        state: dict[str, Array] = {"seed": np.array([seed]), "n_items": np.array([data.n_items])}
        for name, shape in shapes.items():
            scale = sqrt(2 / sum(shape)) if len(shape) == 2 and name != "user" else 1 / sqrt(s.dim)
            init = Init("zero") if name.endswith("bias") else Init("normal", scale)
            value = Spec(f"metamf.{name}", Axis.WHOLE, shape, init).table(seed, 0)
            state[f"server/{name}"] = value
            state[f"mean/{name}"] = value.copy()
            state |= {f"rule/{name}.{i}": m.numpy() for i, m in enumerate(Adam().memory(torch.from_numpy(value)))}
        return state

    def advance(
        self, data: TrainingSet, state: State, round: int, seed: int, probe: Ragged | None = None
    ) -> tuple[State, RoundRecord, npt.NDArray[np.floating] | None]:
        """All clients drawn, in groups; after each the server steps."""
        refuse_silos(data, "metamf")
        cohort = cohort_of(data, self.settings.participation, seed=seed, round=round)
        ctx = Context(round, seed, data.n_items, data.n_clients)
        order = np.random.Generator(np.random.Philox(key=[seed, round])).permutation(cohort)
        new = {k: torch.from_numpy(v.copy()) for k, v in state.items() if k.startswith(("server/", "rule/"))}
        loss = 0.0
        for at in range(0, order.size, self.settings.group):
            loss += self._step(data, new, np.sort(order[at : at + self.settings.group]), ctx)
        after = {**state, **{k: v.numpy() for k, v in new.items()}}
        share = min(self.settings.average, 1 - 1 / round)  # of the past; the first rounds count alike
        for name in (k[7:] for k in new if k.startswith("server/")):
            after[f"mean/{name}"] = share * state[f"mean/{name}"] + (1 - share) * after[f"server/{name}"]
        numbers = data.n_items * self.settings.dim + (self.settings.dim + 2) * self.settings.narrow + 1
        record = RoundRecord(cohort.size, 4 * numbers, 4 * numbers, loss / cohort.size)
        answers = None
        if probe is not None:
            asked = self._asked(data, after, probe)
            answers = np.concatenate([scores[part.rows, part.values] for scores, part in asked])
        return after, record, answers

    def _asked(self, data: TrainingSet, state: State, probe: Ragged) -> Iterator[tuple[Array, Ragged]]:
        """Per block of users: scores of everything, and which are asked."""
        for users, scores in self._tables(data, state, np.arange(data.n_users)):
            yield scores, probe.take(users)

    def _step(self, data: TrainingSet, new: dict[str, Tensor], clients: I64, ctx: Context) -> float:
        """Generate, let the devices answer with gradients, carry those into the server's parameters, move."""
        clients = clients[np.argsort(-data.histories.lengths[clients], kind="stable")]
        leaves = {k[7:]: v.requires_grad_() for k, v in new.items() if k.startswith("server/")}
        made = generate(leaves, torch.from_numpy(clients), self.settings, data.n_items)
        block = self._devices(data, clients, made, ctx)
        owner = torch.from_numpy(block.place.touched.rows.astype(np.int64))
        rows = made["item"][owner, torch.from_numpy(block.place.touched.values.astype(np.int64))]
        outputs = [rows] + [made[n] for n in made if n != "item"]
        sent = [block.gradients["item"]] + [block.gradients[n] for n in made if n != "item"]
        slopes = torch.autograd.grad(outputs, list(leaves.values()), [g / clients.size for g in sent])
        norm = torch.sqrt(sum((g.square().sum() for g in slopes), torch.zeros(())))
        factor = (self.settings.clip / norm.clamp(min=1e-12)).clamp(max=1)
        rule = Adam(decay=self.settings.decay)
        with torch.no_grad():
            for (name, value), slope in zip(leaves.items(), slopes, strict=True):
                value.requires_grad_(False)
                memory = tuple(new[f"rule/{name}.{i}"] for i in range(3))
                rule.step(value, slope * factor, memory, self.settings.rate)
        return float((block.loss / np.maximum(block.seen, 1)).sum())

    def _devices(self, data: TrainingSet, clients: I64, made: dict[str, Tensor], ctx: Context) -> Block:
        """The clients' work: what the server generated goes in, gradients come out."""
        algorithm = self.algorithm
        zeros = {n: s.table(0, data.n_items) for n, s in algorithm.specs.items()}
        task = Task(data, zeros, {}, ctx, clients)
        block = begin(algorithm, task, clients)
        touched = torch.from_numpy(block.place.touched.values.astype(np.int64))
        for name, value in made.items():
            own = value[block.owners[Axis.ITEM], touched] if name == "item" else value
            block.params[name] = own.detach().clone()
        for turn in turns(block, algorithm.local[0], 0, ctx):
            block = advance(algorithm, block, turn, algorithm.local[0].phases, ctx)
        return block

    def _tables(self, data: TrainingSet, state: State, users: I64) -> Iterator[tuple[I64, Array]]:
        server = _answering(state)
        step = max(1, (1 << 24) // (data.n_items * self.settings.dim))
        with torch.no_grad():
            for at in range(0, users.size, step):
                part = users[at : at + step]
                made = generate(server, torch.from_numpy(part), self.settings, data.n_items)
                bias = made["hidden.bias"].unsqueeze(1)
                hidden = torch.relu(torch.baddbmm(bias, made["item"], made["hidden.weight"]))
                scores = torch.baddbmm(made["out.bias"].unsqueeze(1), hidden, made["out.weight"]).squeeze(-1)
                yield part, scores.numpy()

    def scorer(self, data: TrainingSet, state: State) -> GeneratedScores:
        """Answers of the models the server generates."""
        return GeneratedScores(self, data, state)

    def vectors(self, state: State) -> npt.NDArray[np.floating]:
        """The item table generated for the mean user."""
        server = _answering(state)
        server["user"] = server["user"].mean(0, keepdim=True)
        made = generate(server, torch.zeros(1, dtype=torch.long), self.settings, int(state["n_items"][0]))
        return np.asarray(made["item"][0].numpy())


def _answering(state: State) -> dict[str, Tensor]:
    """The parameters that answer: the running mean."""
    return {k[5:]: torch.from_numpy(v) for k, v in state.items() if k.startswith("mean/")}


def generate(server: dict[str, Tensor], users: Tensor, s: MetaSettings, n_items: int) -> dict[str, Tensor]:
    """The tensors of some users' models, one leading row per user."""
    code = server["user"][users] @ server["memory"]

    def network(name: str) -> Tensor:
        inner = torch.relu(code @ server[f"{name}.0.weight"] + server[f"{name}.0.bias"])
        return inner @ server[f"{name}.1.weight"] + server[f"{name}.1.bias"]

    hidden, out = network("hidden"), network("out")
    cut = s.dim * s.narrow
    return {
        "item": network("rows").reshape(-1, n_items, s.narrow) @ network("rise").reshape(-1, s.narrow, s.dim),
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
    state: State

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
        return np.concatenate([scores for _, scores in self.method._tables(self.data, self.state, users)])
