"""FedPerGNN (Nature Communications 2022): attention on the user's own graph, hidden among pseudo items and noise.

    item     h_j = e_j + sum_k a_jk n_k          n_k: vectors of other users who hold j, from the matching service
    user     û   = p_u + sum_j b_uj h_j          over the user's own items
    score    û · e_j                             attention: softmax of LeakyReLU(q · [left ; right])

A device sends its gradient, every number clipped to ±delta, hidden among pseudo items that get random numbers like the
real ones, with Laplace noise on all. Now and then devices send item ids, encrypted with a key that only devices know,
and a noisy copy of their vector to a third party, which answers with the vectors of others who sent the same
ciphertext. It never sees an id, but it does see how often ciphertexts meet.

Written from the paper's description for ranking (dot product, cross-entropy); the released code scores ratings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.local import Adam, Move, Pass, Phase
from fedmosaic.algorithm.objective import ChunkedBCE
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Upload
from fedmosaic.algorithm.view import View
from fedmosaic.core import keys
from fedmosaic.core.extras import lazy_torch, require_torch
from fedmosaic.core.ragged import Ragged
from fedmosaic.data.batches import round_half_up
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.scorer import DeviceScorer
from fedmosaic.engines.state import Array, DeviceStore, FederationState, ServerState
from fedmosaic.methods.base import FULL_BATCH, Entry, FederatedSettings, federation, refuse_silos
from fedmosaic.privacy.noise import ClipValues, NoiseSettings, PseudoItems, noisy
from fedmosaic.training.method import RoundRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_torch("fedpergnn")


class GNNSettings(NoiseSettings, FederatedSettings):
    """Settings of FedPerGNN."""

    RENAMED: ClassVar = {"rate": "server_rate", "clip": "clip_values"}
    NO_EPSILON: ClassVar[str] = "a matching service is sent vectors and items of users, which noise on sums leaves open"

    rounds: int = Field(default=60, ge=1, description="rounds of training")
    batch_size: int = Field(default=FULL_BATCH, ge=1, description="examples per step; default: all")
    user_rate: float = Field(default=0.1, gt=0, description="rate of the device's Adam on its own vector")
    server_rate: float = Field(default=0.03, gt=0, description="rate of the server's Adam")
    clip_values: float = Field(default=0.1, gt=0, description="bound of every number of the gradient")
    noise: float = Field(
        default=0.02, ge=0, description="scale of the Laplace noise; epsilon = 2 clip_values / scale a step"
    )
    pseudo: int = Field(default=100, ge=0, description="pseudo items per client and round")
    neighbours: int = Field(default=4, ge=0, description="other users per item, from the matching service")
    period: int = Field(default=10, ge=1, description="rounds between expansions of the graph")
    publish_noise: float = Field(default=0.01, ge=0, description="Laplace noise on vectors sent to the service")


@dataclass(frozen=True)
class GraphScorer:
    """Attention from neighbours to items, and from items to their user."""

    dim: int
    neighbours: int
    init: Init = Init("normal", 0.1)

    def specs(self) -> tuple[Spec, ...]:
        """Item rows, user vectors, two attention heads; neighbours' vectors and the one that was published."""
        graph = (
            Spec("near", Axis.ITEM, (self.neighbours, self.dim), Init("zero")),
            Spec("sent", Axis.USER, (self.dim,), Init("zero")),
        )
        return (
            Spec("item", Axis.ITEM, (self.dim,), self.init),
            Spec("user", Axis.USER, (self.dim,), self.init),
            *(
                Spec(f"{name}.{part}", Axis.WHOLE, shape, Init("zero" if part == "bias" else "normal", 0.1))
                for name in (("inner", "outer") if self.neighbours else ("outer",))
                for part, shape in (("weight", (2 * self.dim, 1)), ("bias", (1,)))
            ),
            *(graph if self.neighbours else ()),
        )

    def score(self, view: View, items: Tensor) -> Tensor:
        """û · e_j, one score per example."""
        return (view.rows("item", items) * self._user(view)).sum(-1)

    def _user(self, view: View) -> Tensor:
        """û, [clients, 1, width]: the user's vector plus attention over its items."""
        history = view.history
        assert history is not None
        mine = replace(view, batch=history)
        user = mine.vector("user")[:, :1]
        held = self._items(mine, history.items, history.weight)
        if held.shape[1] == 0:
            return user
        weight = attention(view.linear("outer", user, held).squeeze(-1), history.weight)
        return user + torch.bmm(weight.unsqueeze(1), held)

    def _items(self, view: View, items: Tensor, real: Tensor) -> Tensor:
        """h_j of a user's own items: the row plus attention over the neighbours who hold it, oneself left out."""
        rows = view.rows("item", items)
        if not self.neighbours:
            return rows
        near = view.rows("near", items)  # [clients, length, neighbours, width]
        clients, length, count, width = near.shape
        flat = near.reshape(clients, length * count, width)
        sent = view.vector("sent")[:, :1].unsqueeze(2)
        other = (near != 0).any(-1) & (near != sent).any(-1)
        left = rows.unsqueeze(2).expand_as(near).reshape(flat.shape)
        weight = attention(view.linear("inner", left, flat).reshape(clients, length, count), other.float())
        return rows + (weight.unsqueeze(-1) * near).sum(2)


def attention(logits: Tensor, present: Tensor) -> Tensor:
    """Softmax of LeakyReLU(logits) over those present, along the last axis; zeros where nobody is.

    Spelt out, because the backward pass of `torch.softmax` does not always give equal bits for equal inputs.
    """
    bent = torch.nn.functional.leaky_relu(logits, 0.2).masked_fill(present == 0, -1e9)
    share = torch.exp(bent - bent.detach().amax(-1, keepdim=True)) * present
    return share / share.sum(-1, keepdim=True).clamp(min=1e-30)


@dataclass(frozen=True)
class FedPerGNN:
    """A federation whose graph is expanded now and then by a matching service."""

    settings: GNNSettings

    @property
    def rounds(self) -> int:
        """As many as set."""
        return self.settings.rounds

    @property
    def algorithm(self) -> Algorithm:
        """What devices do: one gradient, clipped, hidden and noisy."""
        s = self.settings
        model = GraphScorer(s.dim, s.neighbours)
        layers = tuple(p.name for p in model.specs() if p.axis is Axis.WHOLE)
        step = Phase((Move(("user",), s.user_rate, Adam(persistent=True)), Move(("item", *layers), s.server_rate)))
        roles = dict.fromkeys(("item", *layers), Role.SHARED)
        roles |= {"user": Role.PRIVATE} | ({"sent": Role.PRIVATE, "near": Role.FROZEN} if s.neighbours else {})
        stack = (*((PseudoItems(s.pseudo),) if s.pseudo else ()), ClipValues(s.clip_values))
        host = Algorithm(
            model,
            roles,
            (Pass((step,), s.local_epochs, s.batch_size),),
            objective=ChunkedBCE(1),  # summed, not averaged, so that the bound of the clipping means something
            upload=Upload("gradient", stack=stack),
            server=Server("mean", Adam(), s.server_rate),
            negatives=s.negatives,
            history=True,
        )
        return noisy("laplace", s.noise, s.noise_draws)(host)

    @cached_property
    def federation(self) -> Federation:
        """The rounds between expansions."""
        return federation(self.settings, self.algorithm)

    def check_installed(self) -> None:
        """Refuse it where PyTorch is not installed."""
        require_torch("fedpergnn")

    def start(self, data: TrainingSet, seed: int) -> FederationState:
        """Nobody has neighbours yet."""
        return self.federation.start(data, seed)

    def advance(
        self, data: TrainingSet, state: FederationState, round: int, seed: int, query: Ragged | None = None
    ) -> tuple[FederationState, RoundRecord, npt.NDArray[np.floating] | None]:
        """Expand the graph when it is time, then a round like any other."""
        refuse_silos(data, "fedpergnn")
        s = self.settings
        grows = bool(s.neighbours) and round > 1 and (round - 1) % s.period == 0
        if grows:
            state = self._expanded(data, state, round, seed)
        after, record, answers = self.federation.advance(data, state, round, seed, query)
        # Neighbours come from the service, not from the server: for a device's own items, when the graph grows.
        held = data.histories.unique().lengths.mean()
        down = record.bytes_down - 4 * data.n_items * s.neighbours * s.dim
        down += round_half_up(grows * held * s.neighbours * 4 * s.dim)
        up = record.bytes_up + round_half_up(grows * (8 * held + 4 * s.dim))  # ciphertexts and a vector
        return after, replace(record, bytes_up=up, bytes_down=down), answers

    def _expanded(self, data: TrainingSet, state: FederationState, round: int, seed: int) -> FederationState:
        """Devices publish, the service matches, devices look up what belongs to their own items."""
        draws = keys.draws_of(
            keys.derive(seed=seed, purpose=keys.Purpose.NOISE, round=-round, client=np.arange(data.n_users)),
            self.settings.dim,
        )
        centred = keys.uniform(draws) - 0.5
        noise = -np.sign(centred) * np.log1p(-2 * np.abs(centred)) * self.settings.publish_noise
        sent = (state.devices.dense("user") + noise).astype(np.float32)
        secret = keys.derive(seed=seed, purpose=keys.Purpose.NEIGHBOURS)
        tokens = keys.fold(secret, keys.words(np.arange(data.n_items)))  # what devices make of their item ids
        held = data.histories.unique()
        answer = match(tokens[held.values], sent[held.rows], self.settings.neighbours, seed=seed, round=round)
        near = np.zeros((data.n_items, self.settings.neighbours, self.settings.dim), dtype=np.float32)
        for item, token in enumerate(tokens.tolist()):
            if token in answer:
                near[item, : answer[token].shape[0]] = answer[token]
        server = ServerState({**state.server.params, "near": near}, state.server.memory)
        devices = DeviceStore({**state.devices.params, "sent": sent}, state.devices.memory)
        return replace(state, server=server, devices=devices)

    def scorer(self, data: TrainingSet, state: FederationState) -> DeviceScorer:
        """As in any federation."""
        return self.federation.scorer(data, state)

    def pack(self, state: FederationState) -> dict[str, Array]:
        """As named arrays, for a file."""
        return state.pack()

    def unpack(self, arrays: Mapping[str, Array], what: str) -> FederationState:
        """Read `pack` back."""
        return self.federation.unpack(arrays, what)

    def traffic(self, n_items: int) -> tuple[int, int]:
        """Bytes between expansions of the graph."""
        up, down = self.federation.traffic(n_items)
        return up, down - 4 * n_items * self.settings.neighbours * self.settings.dim

    def vectors(self, state: FederationState) -> npt.NDArray[np.floating]:
        """The shared item rows."""
        table: npt.NDArray[np.floating] = state.server.params["item"]
        return table


def match(tokens: keys.U64, vectors: Array, count: int, *, seed: int, round: int) -> dict[int, Array]:
    """The service: for every ciphertext up to `count` of the vectors that came with it, by a keyed draw.

    >>> found = match(np.array([7, 9, 7], dtype=np.uint64), np.eye(3, dtype=np.float32), 2, seed=0, round=1)
    >>> sorted((token, rows.shape[0]) for token, rows in found.items())
    [(7, 2), (9, 1)]
    """
    ticket = keys.draws(keys.derive(seed=seed, purpose=keys.Purpose.NEIGHBOURS, round=round), tokens.size)
    order = np.lexsort((ticket, tokens))
    found, starts = np.unique(tokens[order], return_index=True)
    ends = np.append(starts[1:], tokens.size)
    return {
        int(token): vectors[order[begin : min(begin + count, end)]]
        for token, begin, end in zip(found, starts, ends, strict=True)
    }


METHODS = (
    Entry(
        "fedpergnn",
        "Graph attention on the user's own graph, expanded by a matching service",
        "Wu et al., A federated graph neural network framework, Nature Communications 2022",
        GNNSettings,
        FedPerGNN,
        expect={"ml-100k ties=file rounds=20": (51.7, 27.9)},
    ),
)
