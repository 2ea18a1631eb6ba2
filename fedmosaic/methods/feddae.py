"""FedDAE (Li et al., AAAI 2025): two variational encoders, one everybody's and one's own, and a gate between them.

    z = w1 z_local + w2 z_global,   w = softmax(gate(r))          z_local, z_global: draws of N(mu, var) of an encoder
    loss = - sum over own items of log softmax(decoder(z)) + beta KL(N(w1 mu1 + w2 mu2, w1² var1 + w2² var2) | N(0, 1))

Global encoder and decoder are the server's; local encoder and gate never leave the device. The loss needs no drawn
negatives: every item that is not among a device's training items is one, so the pool is strict whatever it is called.

From the paper: the model, the loss, who holds what. As released: a device sends gradients of the global parts, the
server moves by Adam on their mean; a device's own parts move by an Adam that begins anew each round. The released code
never loads the private parts: it assigns them into a temporary dictionary, so every round and every evaluation uses a
gate as it began and a local encoder that the server has averaged like the global one. Nor is there a KL term after its
first round (beta is multiplied by tanh(0)). Here private parts are loaded, and beta stays.

Ours: one hidden layer per network instead of three of 256 to 768 numbers, narrower ones on the device; all three
networks read the same unit-length history, with dropout; device and server move at rates of their own.

A local encoder has items x narrow numbers, but a history of n items reads n rows of it, and no other row ever moves, so
a device holds 2 n narrow + 2 narrow dim + 4 narrow + 2 dim + 2 numbers, its gate included. On ML-1M a simulation of all
devices holds 32 million numbers in rows (126 MB) and 7 million in layers. What a device sends is not zero in the
encoder's rows of its own items and nowhere else, which tells its history, unless it goes into a secure sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.algorithm.local import Adam
from fedmosaic.algorithm.parameters import Axis, Init, Spec
from fedmosaic.core import keys
from fedmosaic.core.errors import ForeignError
from fedmosaic.core.extras import lazy_torch, require_torch
from fedmosaic.core.ragged import I64, Ragged, slots
from fedmosaic.core.threads import VARIABLE, thread_count
from fedmosaic.data.batches import cohort_of
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.state import Array, checked
from fedmosaic.methods.base import Entry, MethodSettings, refuse_silos
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_torch("feddae")

Arrays = Mapping[str, Array]
CLIENTS = 512  # at work together, if their scores fit
SCORES = 4_000_000  # of a group of clients
DROPOUT = 0.5  # share of a history that a step leaves out, as released
ROWS = ("local.rows", "gate.rows")  # private parts with a row per event; others have one per user


class DualEncoderSettings(MethodSettings):
    """Settings of FedDAE."""

    rounds: int = Field(default=100, ge=1, description="rounds of training")
    participation: float = Field(default=1.0, gt=0, le=1, description="share of clients drawn in a round")
    dim: int = Field(default=32, ge=1, description="width of the latent vector")
    hidden: int = Field(default=128, ge=1, description="width of the global networks' hidden layers")
    narrow: int = Field(default=16, ge=1, description="width of the hidden layers of the local encoder and the gate")
    local_epochs: int = Field(default=2, ge=1, description="steps on the device per round")
    user_rate: float = Field(default=1e-3, gt=0, description="rate of the device's Adam on its own parts")
    server_rate: float = Field(default=0.03, gt=0, description="rate of the server's Adam on the global parts")
    beta: float = Field(default=0.2, ge=0, description="weight of the KL term")


@dataclass(frozen=True, eq=False)
class DualState:
    """The global parts, the memory of the server's Adam, and every device's own parts."""

    n_items: int
    server: Arrays
    memory: Mapping[str, tuple[Array, ...]]
    private: Arrays  # a row per user; of ROWS a row per event, in the order of the unique histories


@dataclass(frozen=True, eq=False)
class Inputs:
    """Histories of some clients: item, client (place among these) and weight of every event."""

    items: Tensor
    owner: Tensor
    weight: Tensor
    clients: int

    def pooled(self, rows: Tensor) -> Tensor:
        """Per client the weighted sum of its events' rows, [clients, width]."""
        return rows.new_zeros(self.clients, rows.shape[1]).index_add(0, self.owner, rows * self.weight[:, None])


@dataclass(frozen=True)
class FedDAE:
    """Rounds of private steps on the devices and one step of the server."""

    settings: DualEncoderSettings

    @property
    def rounds(self) -> int:
        """As many as set."""
        return self.settings.rounds

    def check_installed(self) -> None:
        """Refuse it where PyTorch is not installed."""
        require_torch("feddae")

    def start(self, data: TrainingSet, seed: int) -> DualState:
        """One draw of everything; all devices begin with the same private parts."""
        refuse_silos(data, "feddae")
        server = {n: _first(n, shape, seed) for n, shape in self._global(data.n_items).items()}
        events = data.histories.unique()
        private = {}
        for name, shape in self._private(data.n_items).items():
            first = _first(name, shape, seed)
            private[name] = first[events.values] if name in ROWS else np.repeat(first[None], data.n_users, axis=0)
        return DualState(data.n_items, server, {n: Adam().memory(v) for n, v in server.items()}, private)

    def _global(self, n_items: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what everybody shares; nothing else is ever sent."""
        s = self.settings
        return {
            "encoder.rows": (n_items, s.hidden),
            "encoder.bias": (s.hidden,),
            "encoder.out": (s.hidden, 2 * s.dim),
            "encoder.out.bias": (2 * s.dim,),
            "decoder.in": (s.dim, s.hidden),
            "decoder.in.bias": (s.hidden,),
            "decoder.rows": (n_items, s.hidden),
            "decoder.bias": (n_items,),
        }

    def _private(self, n_items: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a device's own parts."""
        s, result = self.settings, dict[str, tuple[int, ...]]()
        for name, width in (("local", 2 * s.dim), ("gate", 2)):
            result |= {f"{name}.rows": (n_items, s.narrow), f"{name}.bias": (s.narrow,)}
            result |= {f"{name}.out": (s.narrow, width), f"{name}.out.bias": (width,)}
        return result

    def advance(
        self, data: TrainingSet, state: DualState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[DualState, RoundRecord, Array | None]:
        """The cohort's own steps, the mean of what it sends, one step of the server."""
        refuse_silos(data, "feddae")
        if os.environ.get(VARIABLE):
            torch.set_num_threads(thread_count())
        cohort = cohort_of(data, self.settings.participation, seed=seed, round=round)
        events, private = data.histories.unique(), {n: v.copy() for n, v in state.private.items()}
        total = {n: np.zeros(v.shape) for n, v in state.server.items()}
        loss = 0.0
        for clients in _groups(cohort, data.n_items):
            own = {n: v[slots(events, clients) if n in ROWS else clients] for n, v in private.items()}
            key = keys.derive(seed=seed, purpose=keys.Purpose.NOISE, round=round, client=data.ids_of(clients))
            sent, found = self.contribute(state.server, own, events.take(clients), key)
            for name, value in own.items():
                private[name][slots(events, clients) if name in ROWS else clients] = value
            for name, gradient in sent.items():
                total[name] += gradient
            loss += found
        server, memory = _moved(state, {n: v / cohort.size for n, v in total.items()}, self.settings.server_rate)
        after = replace(state, server=server, memory=memory, private=private)
        up, down = self.traffic(data.n_items)
        record = RoundRecord(cohort.size, up, down, loss / cohort.size)
        return after, record, None if query is None else self._answers(data, after, query)

    def contribute(
        self, server: Arrays, own: dict[str, Array], events: Ragged, key: keys.U64
    ) -> tuple[dict[str, Array], float]:
        """A group's work: its own parts move, in place; the sum of its gradients of the global parts is sent.

        server: as received. own: the clients' own parts. events: their histories. key: one per client, for its draws.
        """
        s, sent, loss = self.settings, {n: np.zeros_like(v) for n, v in server.items()}, 0.0
        memory = {n: Adam().memory(v) for n, v in own.items()}
        for step in range(s.local_epochs):
            inputs = _inputs(events, keys.fold(key, keys.words(2 * step)))
            noise = _normal(keys.fold(key, keys.words(2 * step + 1)), 2 * s.dim)
            leaves = {n: torch.from_numpy(v).requires_grad_() for n, v in {**server, **own}.items()}
            logits, mu, var = forward(leaves, inputs, noise)
            likely = torch.log_softmax(logits, 1)[inputs.owner, inputs.items].sum()
            kl = (mu.square() + var - var.log() - 1).sum() / 2
            value = s.beta * kl - likely
            slopes = torch.autograd.grad(value, list(leaves.values()))
            for name, slope in zip(leaves, slopes, strict=True):
                if name in own:
                    Adam().step(own[name], slope.contiguous().numpy(), memory[name], s.user_rate)
                else:
                    sent[name] += slope.numpy() / s.local_epochs
            loss += float(value.detach()) / s.local_epochs
        return sent, loss

    def _logits(self, data: TrainingSet, state: DualState, users: I64) -> Iterator[tuple[I64, Array]]:
        """Scores of the whole catalogue, some users at a time: the mean of z, nothing dropped."""
        events = data.histories.unique()
        if events.values.size != state.private["local.rows"].shape[0]:
            raise ForeignError("these histories are not those that the local encoders were trained on")
        for part in _groups(users, data.n_items):
            own = {n: v[slots(events, part) if n in ROWS else part] for n, v in state.private.items()}
            with torch.no_grad():
                params = {n: torch.from_numpy(v) for n, v in {**state.server, **own}.items()}
                yield part, forward(params, _inputs(events.take(part)))[0].numpy()

    def _answers(self, data: TrainingSet, state: DualState, query: Ragged) -> Array:
        found = []
        for users, scores in self._logits(data, state, np.arange(data.n_users)):
            asked = query.take(users)
            found.append(scores[asked.rows, asked.values])
        return np.concatenate(found)

    def scorer(self, data: TrainingSet, state: DualState) -> DualScorer:
        """Answers with the server's newest parts and each device's own."""
        return DualScorer(self, data, state)

    def vectors(self, state: DualState) -> npt.NDArray[np.floating]:
        """The decoder's rows."""
        table: npt.NDArray[np.floating] = state.server["decoder.rows"]
        return table

    def traffic(self, n_items: int) -> tuple[int, int]:
        """The global parts come down, their gradient goes up."""
        size = 4 * sum(int(np.prod(shape)) for shape in self._global(n_items).values())
        return size, size

    def pack(self, state: DualState) -> dict[str, Array]:
        """As named arrays, for a file."""
        arrays = {"n_items": np.array([state.n_items])} | {f"server/{n}": v for n, v in state.server.items()}
        arrays |= {f"rule/{n}.{i}": m for n, parts in state.memory.items() for i, m in enumerate(parts)}
        return arrays | {f"private/{n}": v for n, v in state.private.items()}

    def unpack(self, arrays: Arrays, what: str) -> DualState:
        """Read `pack` back."""
        if "n_items" not in arrays or "private/local.bias" not in arrays or "private/local.rows" not in arrays:
            raise ForeignError(f"{what} holds no local encoders; it belongs to another method")
        n_items, users = int(arrays["n_items"][0]), arrays["private/local.bias"].shape[0]
        events = arrays["private/local.rows"].shape[0]
        server = {n: checked(arrays, f"server/{n}", shape, what) for n, shape in self._global(n_items).items()}
        memory = {
            n: tuple(checked(arrays, f"rule/{n}.{i}", m.shape, what) for i, m in enumerate(Adam().memory(v)))
            for n, v in server.items()
        }
        private = {
            n: checked(arrays, f"private/{n}", (events, shape[1]) if n in ROWS else (users, *shape), what)
            for n, shape in self._private(n_items).items()
        }
        return DualState(n_items, server, memory, private)


@dataclass(frozen=True, eq=False)
class DualScorer:
    """Scores of every device's own mix of two encoders."""

    method: FedDAE
    data: TrainingSet
    state: DualState

    def scores(self, users: I64) -> npt.NDArray[np.floating]:
        """Scores of the whole catalogue."""
        return np.concatenate([scores for _, scores in self.method._logits(self.data, self.state, users)])


def forward(params: Mapping[str, Tensor], inputs: Inputs, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the catalogue, and mean and variance of z, one row per client; without noise z is its mean."""
    p = params
    gate = torch.relu(inputs.pooled(p["gate.rows"]) + p["gate.bias"])
    share = torch.softmax(torch.bmm(gate.unsqueeze(1), p["gate.out"]).squeeze(1) + p["gate.out.bias"], 1)
    local = torch.tanh(inputs.pooled(p["local.rows"]) + p["local.bias"])
    shared = torch.tanh(inputs.pooled(p["encoder.rows"][inputs.items]) + p["encoder.bias"])
    told = (
        torch.bmm(local.unsqueeze(1), p["local.out"]).squeeze(1) + p["local.out.bias"],
        shared @ p["encoder.out"] + p["encoder.out.bias"],
    )
    draws = (None, None) if noise is None else noise.chunk(2, 1)
    mu = var = z = torch.zeros(())
    for weight, said, draw in zip(share.chunk(2, 1), told, draws, strict=True):
        middle, spread = said.chunk(2, 1)
        mu, var = mu + weight * middle, var + weight.square() * spread.exp()
        z = z + weight * (middle if draw is None else middle + draw * (spread / 2).exp())
    inner = torch.tanh(z @ p["decoder.in"] + p["decoder.in.bias"])
    return inner @ p["decoder.rows"].T + p["decoder.bias"], mu, var


def _first(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """A part as it begins: biases zero, rows of items of deviation 0.1, layers by Glorot & Bengio 2010."""
    scale = 0.1 if name.endswith("rows") else sqrt(2 / sum(shape))
    init = Init("zero") if name.endswith("bias") else Init("normal", scale)
    return Spec(f"feddae.{name}", Axis.WHOLE, shape, init).table(seed, 0)


def _inputs(events: Ragged, key: keys.U64 | None = None) -> Inputs:
    """Histories of unit length; with a key per client, a share of the events is dropped and the others grow by it."""
    weight = 1 / np.sqrt(np.maximum(events.lengths, 1))[events.rows]
    if key is not None:
        kept = keys.uniform(keys.fold(key[events.rows], keys.words(events.values))) >= DROPOUT
        weight = weight * kept / (1 - DROPOUT)
    items, owner = (torch.from_numpy(part.astype(np.int64)) for part in (events.values, events.rows))
    return Inputs(items, owner, torch.from_numpy(weight.astype(np.float32)), len(events))


def _normal(key: keys.U64, count: int) -> Tensor:
    """`count` standard normal draws of each key (Box & Muller 1958)."""
    draws = keys.uniform(keys.draws_of(key, 2 * count)).reshape(key.size, 2, count)
    return torch.from_numpy((np.sqrt(-2 * np.log1p(-draws[:, 0])) * np.cos(2 * np.pi * draws[:, 1])).astype(np.float32))


def _groups(clients: I64, n_items: int) -> Iterator[I64]:
    """Clients that are at work together."""
    size = max(1, min(CLIENTS, SCORES // n_items))
    return (clients[at : at + size] for at in range(0, clients.size, size))


def _moved(state: DualState, gradients: Arrays, rate: float) -> tuple[dict[str, Array], dict[str, tuple[Array, ...]]]:
    """The global parts and the memory of their Adam after one step."""
    server = {n: v.copy() for n, v in state.server.items()}
    memory = {n: tuple(part.copy() for part in parts) for n, parts in state.memory.items()}
    for name, value in server.items():
        Adam().step(value, gradients[name].astype(np.float32), memory[name], rate)
    return server, memory


METHODS = (
    Entry(
        "feddae",
        "Dual variational autoencoders: a global and a local encoder, mixed by a gate",
        "Li et al., Personalized federated collaborative filtering: a variational autoencoder approach, AAAI 2025",
        DualEncoderSettings,
        FedDAE,
        expect={"ml-100k ties=file": (65.4, 38.4)},
    ),
)
