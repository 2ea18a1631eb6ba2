"""Slow twins: PFedRec and FedNCF the way research code is usually written, to measure against.

A deep copy of the model and a data loader per client, an autograd graph per batch, dense item tables per client, Python
lists of negatives, ranking in pandas. Written for this benchmark, after the published description.
"""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmosaic.data.negatives import Candidates
from fedmosaic.data.split import Part, Split


class ScoreNet(nn.Module):
    """PFedRec's client model: an item table and an affine score function."""

    def __init__(self, n_items: int, dim: int = 32) -> None:
        super().__init__()
        self.item = nn.Embedding(n_items, dim)
        self.score = nn.Linear(dim, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.score(self.item(items)))


class TowerNet(nn.Module):
    """FedNCF's client model: a user vector, an item table and an MLP."""

    def __init__(self, n_items: int, dim: int = 32) -> None:
        super().__init__()
        self.user = nn.Embedding(1, dim)
        self.item = nn.Embedding(n_items, dim)
        widths = (2 * dim, 32, 16, 8)
        self.tower = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.score = nn.Linear(8, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.user(torch.zeros_like(items)), self.item(items)], dim=-1)
        for layer in self.tower:
            x = torch.relu(layer(x))
        return torch.sigmoid(self.score(x))


class SlowTwin:
    """Rounds of sampling, training, averaging and evaluation, client by client."""

    def __init__(self, split: Split, candidates: Candidates, *, tower: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.split, self.candidates, self.tower = split, candidates, tower
        self.model: nn.Module = TowerNet(split.n_items) if tower else ScoreNet(split.n_items)
        self.private: tuple[str, ...] = ("user",) if tower else ("score",)
        everything = set(range(split.n_items))
        self.train = pd.DataFrame({"user": split.train.rows, "item": split.train.values})
        self.pool = pd.DataFrame(
            {
                "user": range(split.n_users),
                "pool": [
                    everything - {*t.tolist(), *v.tolist(), *e.tolist()}
                    for t, v, e in zip(split.train, split.validation, split.test, strict=True)
                ],
            }
        )
        self.client_params: dict[int, Any] = {}

    def round(self) -> tuple[float, float]:
        """One full round; HR@10 on test and validation, as the original loop computes both."""
        data = self._sample()
        uploads = {}
        for user in range(self.split.n_users):
            uploads[user] = self._train_client(user, data[user])
        self._aggregate(uploads)
        return self._evaluate("test"), self._evaluate("validation")

    def _sample(self) -> list[tuple[list[int], list[float]]]:
        """Fresh negatives for every positive, row by row, each drawn from the user's set of unseen items."""
        table = pd.merge(self.train, self.pool, on="user")
        table["negatives"] = table["pool"].apply(lambda pool: random.sample(list(pool), 4))
        data = []
        for _, rows in table.groupby("user"):
            items: list[int] = []
            labels: list[float] = []
            for row in rows.itertuples():
                items.append(int(row.item))
                labels.append(1.0)
                for negative in row.negatives:
                    items.append(int(negative))
                    labels.append(0.0)
            data.append((items, labels))
        return data

    def _client_model(self, user: int) -> nn.Module:
        """The server's model with everything the client stored, then the shared parts as the server has them."""
        model = copy.deepcopy(self.model)
        params = copy.deepcopy(self.model.state_dict())
        for key, value in self.client_params.get(user, {}).items():
            params[key] = copy.deepcopy(value.data)
        for key, value in self.model.state_dict().items():
            if key.split(".")[0] not in self.private:
                params[key] = copy.deepcopy(value.data)
        model.load_state_dict(params)
        return model

    def _train_client(self, user: int, data: tuple[list[int], list[float]]) -> dict[str, torch.Tensor]:
        model = self._client_model(user)
        items, labels = data
        # <user, item, rating> triples, as the usual wrapper has them
        triples = TensorDataset(torch.full((len(items),), user), torch.LongTensor(items), torch.FloatTensor(labels))
        loader = DataLoader(triples, batch_size=256, shuffle=True)
        table = [p for n, p in model.named_parameters() if n.startswith("item")]
        rest = [p for n, p in model.named_parameters() if not n.startswith("item")]
        rate = 0.1
        score_step = torch.optim.SGD(rest, lr=rate)
        item_step = torch.optim.SGD(table, lr=rate * self.split.n_items * 80)
        loss_of = nn.BCELoss()
        model.train()
        for _, batch_items, batch_labels in loader:
            groups = ([score_step, item_step],) if self.tower else ([score_step], [item_step])
            for steps in groups:
                for step in (score_step, item_step):
                    step.zero_grad()
                loss_of(model(batch_items).view(-1), batch_labels).backward()
                for step in steps:
                    step.step()
        self.client_params[user] = copy.deepcopy(model.state_dict())
        upload = copy.deepcopy(self.client_params[user])
        return {k: v for k, v in upload.items() if k.split(".")[0] not in self.private}

    def _aggregate(self, uploads: dict[int, dict[str, torch.Tensor]]) -> None:
        state = self.model.state_dict()
        for number, params in enumerate(uploads.values()):
            for key, value in params.items():
                state[key].data = copy.deepcopy(value.data) if number == 0 else state[key].data + value.data
        for key in next(iter(uploads.values())):
            state[key].data = state[key].data / len(uploads)
        self.model.load_state_dict(state)

    def _evaluate(self, part: Part) -> float:
        held, lists = self.split.held_out(part), self.candidates.of(part)
        loss_of, first, rest = nn.BCELoss(), torch.zeros(0, 1), torch.zeros(0, 1)
        labels = torch.tensor([1.0] + [0.0] * 99)
        for user in range(self.split.n_users):
            if self.tower:
                model = self._client_model(user)
            else:  # PFedRec answers with the table the client tuned
                model = copy.deepcopy(self.model)
                model.load_state_dict(copy.deepcopy(self.client_params[user]))
            model.eval()
            with torch.no_grad():
                one = model(torch.LongTensor(held[user].tolist()))
                others = model(torch.LongTensor(lists[user].tolist()))
                first, rest = torch.cat((first, one)), torch.cat((rest, others))
                loss_of(torch.cat((one, others)).view(-1), labels).item()
        users = list(range(self.split.n_users))
        true = pd.DataFrame({"user": users, "held": held.values.tolist()})
        full = pd.DataFrame(
            {
                "user": users + [u for u in users for _ in range(99)],
                "item": held.values.tolist() + lists.values.tolist(),
                "score": first.view(-1).tolist() + rest.view(-1).tolist(),
            }
        )
        full = pd.merge(full, true, on=["user"], how="left")
        full["rank"] = full.groupby("user")["score"].rank(method="first", ascending=False)
        top = full[full["rank"] <= 10]
        return float(len(top[top["held"] == top["item"]]) / len(users))
