"""Slow twins of FedRAP and FedRecGEL, the way research code is usually written; see slow_twin.py."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from slow_twin import SlowTwin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmosaic.data.negatives import Candidates
from fedmosaic.data.split import Split


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


class TwoTables(nn.Module):
    """FedRAP's client model: a shared and an own item table, and an affine score of their sum."""

    def __init__(self, n_items: int, dim: int = 32) -> None:
        super().__init__()
        self.item = nn.Embedding(n_items, dim)
        self.own = nn.Embedding(n_items, dim)
        self.score = nn.Linear(dim, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.score(self.item(items) + self.own(items)))


class SlowFedRAP(SlowTwin):
    """FedRAP with the authors' settings for ML-100K: 10 local epochs, batches of 2048."""

    def __init__(self, split: Split, candidates: Candidates, seed: int = 0) -> None:
        super().__init__(split, candidates, seed=seed)
        self.model, self.tower = TwoTables(split.n_items), True
        self.private = ("own", "score")
        self.rates = (0.5, 200.0)

    def round(self) -> tuple[float, float]:
        found = super().round()
        self.rates = (0.97 * self.rates[0], 0.97 * self.rates[1])
        return found

    def _train_client(self, user: int, data: tuple[list[int], list[float]]) -> dict[str, torch.Tensor]:
        model: Any = self._client_model(user)
        items, labels = data
        triples = TensorDataset(torch.full((len(items),), user), torch.LongTensor(items), torch.FloatTensor(labels))
        loader = DataLoader(triples, batch_size=2048, shuffle=True)
        network, tables = self.rates
        step = torch.optim.SGD(
            [
                {"params": model.score.parameters(), "lr": network},
                {"params": model.item.parameters(), "lr": tables},
                {"params": model.own.parameters(), "lr": tables},
            ],
            weight_decay=1e-4,
        )
        entropy, distance = nn.BCELoss(), nn.MSELoss()
        total, count, last = 0.0, 0, None
        model.train()
        for _ in range(10):
            for _, batch_items, batch_labels in loader:
                step.zero_grad()
                common, own = model.item(batch_items), model.own(batch_items)
                loss = entropy(torch.sigmoid(model.score(common + own)).view(-1), batch_labels)
                loss = loss - 0.1 * distance(own, common) + 0.1 * common.abs().mean()
                _backward(loss)
                step.step()
                for group in step.param_groups:
                    group["lr"] *= 0.95
                total, count = total + loss.item() * len(batch_items), count + len(batch_items)
            if last is not None and abs(total / count - last) / abs(last) < 1e-4:
                break
            last = total / count
        self.client_params[user] = copy.deepcopy(model.state_dict())
        return {k: v for k, v in copy.deepcopy(model.state_dict()).items() if k.split(".")[0] not in self.private}


class NeuMF(nn.Module):
    """FedRecGEL's model for one user."""

    def __init__(self, n_items: int, factor: int = 32) -> None:
        super().__init__()
        wide = 4 * factor
        self.user_gmf, self.user_mlp = nn.Embedding(1, factor), nn.Embedding(1, wide)
        self.item_gmf, self.item_mlp = nn.Embedding(n_items, factor), nn.Embedding(n_items, wide)
        widths = (2 * wide, wide, wide // 2, wide // 4)
        self.tower = nn.ModuleList(nn.Linear(widths[i], widths[i + 1]) for i in range(3))
        self.out = nn.Linear(2 * factor, 1)
        for table in (self.user_gmf, self.user_mlp, self.item_gmf, self.item_mlp):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        nobody = torch.zeros_like(items)
        x = torch.cat([self.user_mlp(nobody), self.item_mlp(items)], dim=-1)
        for layer in self.tower:
            x = torch.relu(layer(x))
        scores: torch.Tensor = self.out(torch.cat([self.user_gmf(nobody) * self.item_gmf(items), x], dim=-1))
        return scores.view(-1)


class SlowGEL:
    """FedRecGEL: sharpness-aware steps, three passes per client, gradients to a server Adam."""

    def __init__(self, split: Split, candidates: Candidates, radius: float = 0.02, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.split, self.candidates, self.radius = split, candidates, radius
        self.model = NeuMF(split.n_items)
        self.step = torch.optim.Adam([p for n, p in self.model.named_parameters() if "user" not in n], lr=1e-3)
        self.users: dict[int, dict[str, torch.Tensor]] = {}
        self.steps: dict[int, Any] = {}

    def round(self) -> float:
        """One round of a tenth of the clients; HR@10 of everybody on the test."""
        chosen = random.sample(range(self.split.n_users), int(0.1 * self.split.n_users))
        uploads = [self._train_client(user) for user in chosen]
        self.step.zero_grad()
        for name, parameter in self.model.named_parameters():
            if "user" not in name:
                parameter.grad = torch.stack([u[name] for u in uploads]).mean(0)
        self.step.step()
        return self._evaluate()

    def _client_model(self, user: int) -> NeuMF:
        model = copy.deepcopy(self.model)
        if user not in self.users:
            for table in (model.user_gmf, model.user_mlp):
                nn.init.normal_(table.weight, std=0.01)
            self.users[user] = {n: p.data.clone() for n, p in model.named_parameters() if "user" in n}
        for name, parameter in model.named_parameters():
            if "user" in name:
                parameter.data.copy_(self.users[user][name])
        return model

    def _loss(self, model: NeuMF, chunks: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        entropy = nn.BCEWithLogitsLoss()
        total = torch.zeros(())
        for items, labels in chunks:
            total = total + entropy(model(items), labels)
        return total

    def _train_client(self, user: int) -> dict[str, torch.Tensor]:
        model = self._client_model(user)
        seen = set(self.split.train[user].tolist())
        pool = [i for i in range(self.split.n_items) if i not in seen]
        items: list[int] = []
        labels: list[float] = []
        for item in random.sample(sorted(seen), len(seen)):
            items += [item, *random.sample(pool, 4)]
            labels += [1.0, 0.0, 0.0, 0.0, 0.0]
        chunks = list(DataLoader(TensorDataset(torch.LongTensor(items), torch.FloatTensor(labels)), batch_size=128))
        named = dict(model.named_parameters())
        groups = [[n for n in named if "user" not in n], [n for n in named if "user" in n]]
        model.zero_grad()
        _backward(self._loss(model, chunks))
        first = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        found: dict[str, torch.Tensor] = {}
        for names in groups:
            kept = {n: named[n].data.clone() for n in names}
            norm = torch.norm(torch.stack([first[n].norm() for n in names]))
            for n in names:
                named[n].data.add_(self.radius * first[n] / (norm + 1e-12))
            model.zero_grad()
            _backward(self._loss(model, chunks))
            found |= {n: named[n].grad.clone() for n in names}  # type: ignore[union-attr]
            for n in names:
                named[n].data.copy_(kept[n])
        own = [named[n] for n in groups[1]]
        step = torch.optim.Adam(own, lr=0.1)
        if user in self.steps:
            step.load_state_dict(self.steps[user])
        for n in groups[1]:
            named[n].grad = found[n]
        step.step()
        self.steps[user] = copy.deepcopy(step.state_dict())
        self.users[user] = {n: named[n].data.clone() for n in groups[1]}
        return {n: found[n] for n in groups[0]}

    def _evaluate(self) -> float:
        hits = 0
        for user in range(self.split.n_users):
            if not len(self.split.test[user]):
                continue
            model = self._client_model(user)
            model.eval()
            asked = [*self.candidates.of("test")[user].tolist(), int(self.split.test[user][0])]
            with torch.no_grad():
                scores = model(torch.LongTensor(asked))
            _, best = torch.topk(scores, 10)
            hits += len(asked) - 1 in best.tolist()
        return hits / self.split.n_users
