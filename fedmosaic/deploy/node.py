"""A node: a device with one user, or a silo with many. Answers tasks; everything private stays in its own folder.

    federation.toml      what everybody agreed on
    items.parquet        the catalogue: ids and titles
    users.json           its users, in the order of their numbers
    history.parquet      their interactions, mapped to the catalogue here and nowhere else
    state.safetensors    what its users hold, the server's parameters as received last, and the last answer

The state is one file that is replaced at once, readable by its owner alone. A node that is asked again for a round it
has worked for already (the answer was lost, or the server began again) sends the same answer and does no work twice.
"""

from __future__ import annotations

import io
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.algorithm.local import Context
from fedmosaic.core.errors import DataError, RunError
from fedmosaic.core.files import load_tensors, read_json, save_tensors, write_atomic
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.data.clean import as_polars
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.vocab import Id, Vocab
from fedmosaic.deploy.agreement import Pact, read_catalogue, stamp_of, write_catalogue
from fedmosaic.deploy.protocol import WHOLE, Refused, Task, Update, brought_up, put_sum
from fedmosaic.engines.devices import Array
from fedmosaic.serving.recommender import FederatedRecommender

STATE, HISTORY, USERS = "state.safetensors", "history.parquet", "users.json"


class Node:
    """What runs on a device or in a silo."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place)
        self.pact = Pact.read(self.place)
        self.federation = self.pact.build()
        self.items, self.info = read_catalogue(self.place, self.pact)
        self.users, self.data = self._own_data()
        self.state, self.meta = self._own_state()

    @classmethod
    def create(cls, place: Path, pact: Pact, catalogue: pl.DataFrame, numbers: I64) -> None:
        """A node's folder without a history yet; `numbers` are those its clients have in the federation."""
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
        pact.write(place)
        write_catalogue(place, catalogue)
        save_tensors(place / "numbers.safetensors", {"numbers": numbers.astype(np.int64)})

    @staticmethod
    def take_history(place: Path, history: Any, user: str | None = "user", item: str = "item") -> None:
        """Map a history (columns user and item; item alone on a device) to the catalogue, and keep it here."""
        items, _ = read_catalogue(place, Pact.read(place))
        frame = as_polars(history)
        if item not in frame.columns:
            raise DataError(f"has no column {item!r}; it has {', '.join(frame.columns)}", source="history")
        who = frame[user].cast(pl.String) if user in frame.columns else pl.Series(["me"] * frame.height)
        what: list[Id] = frame[item].to_list()
        at = items.positions(what)
        strange = [str(what[i]) for i in np.flatnonzero(at < 0)[:5]]
        if strange:
            raise DataError(
                f"{int((at < 0).sum())} of {frame.height} items are not in the catalogue, e.g. {', '.join(strange)}",
                source="history", column=item,
            )  # fmt: skip
        known = pl.DataFrame({"user": who, "item": at.astype(np.int32)}).unique(maintain_order=True)
        users = Node._same_users(place, known["user"].unique(maintain_order=True))
        write_atomic(place / USERS, json.dumps(users))
        stream = io.BytesIO()
        known.write_parquet(stream)
        write_atomic(place / HISTORY, stream.getvalue())

    @staticmethod
    def _same_users(place: Path, found: pl.Series) -> list[str]:
        """Users in the order of their numbers: as they came first; later histories must be of the same ones."""
        admitted = load_tensors(place / "numbers.safetensors")[0]["numbers"].size
        if (place / USERS).is_file():
            before: list[str] = read_json(place / USERS)
            strangers = sorted(set(found) - set(before))
            if strangers:
                raise DataError(f"holds users that were not here before: {', '.join(strangers[:5])}", source="history")
            return before
        if found.len() != admitted:
            raise DataError(f"holds {found.len()} users; this node was admitted with {admitted}", source="history")
        return [str(u) for u in found]

    def _own_data(self) -> tuple[Vocab, TrainingSet]:
        file = self.place / HISTORY
        if not file.is_file():
            raise RunError(f"{self.place} holds no history yet; `fedmosaic deploy device --history FILE` brings it")
        known = pl.read_parquet(file)
        users = Vocab(pl.Series("user", read_json(self.place / USERS)), "user")
        histories = Ragged.group(users.positions(known["user"].to_list()), known["item"].to_numpy(), len(users))
        tensors, _ = load_tensors(self.place / "numbers.safetensors")
        return users, TrainingSet(histories, histories.unique(), len(self.items), numbers=tensors["numbers"])

    def _own_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        if (self.place / STATE).is_file():
            return load_tensors(self.place / STATE)
        fresh = self.federation.start(self.data, self.pact.seed)
        own = {k: v for k, v in fresh.items() if not k.startswith(("server/", "rule/"))}
        secret = secrets.randbits(62) | 1 if self.pact.own_draws else 0
        return own, {"round": 0, "version": WHOLE, "secret": secret, "answer": None}

    def answer(self, content: bytes) -> bytes:
        """Do what a task asks; whatever is wrong with it is answered, not raised."""
        try:
            task = Task.decode(content)
        except Refused as error:
            return Update("", 0, "", "failed", self.meta["version"], detail=str(error)).encode()
        try:
            return self._answer(task).encode()
        except Exception as error:  # a node that raises would be mute from then on
            return self._plain(task, "failed", f"{type(error).__name__}: {error}"[:500]).encode()

    def _plain(self, task: Task, status: Any, detail: str = "") -> Update:
        return Update(task.federation, task.round, task.attempt, status, self.meta["version"], detail=detail)

    def _answer(self, task: Task) -> Update:
        if task.federation != self.pact.digest():
            raise Refused("federation", "this node belongs to another federation")
        if any(name.endswith(".rows") for name in task.tensors) != (task.base != WHOLE):
            raise Refused("protocol", "rows need a base, and a base rows")
        if task.base != WHOLE and task.base != self.meta["version"]:
            return self._plain(task, "resync")
        server = brought_up(self.federation.algorithm, len(self.items), self._received(), task)
        if stamp_of(server) != task.stamp:
            return self._plain(task, "resync")
        done = self.meta["answer"]
        asked = [task.round, task.stamp, task.clients.tolist(), task.upload]
        if done is None or done["asked"] != asked:
            done = self._work(task, server, asked)
        sent = {k.removeprefix("answer/"): v for k, v in self.state.items() if k.startswith("answer/")}
        known = {k: v for k, v in done.items() if k != "asked"}
        return replace(self._plain(task, "done"), tensors=sent, **known)

    def _received(self) -> dict[str, Array]:
        return {k.removeprefix("server/"): v for k, v in self.state.items() if k.startswith("server/")}

    def _work(self, task: Task, server: dict[str, Array], asked: list[Any]) -> dict[str, Any]:
        """What a task asks for, and the new state on disk."""
        begun, algorithm = time.perf_counter(), self.federation.algorithm
        noisy = algorithm.upload.noise is not None
        after = {k: v for k, v in self.state.items() if not k.startswith(("server/", "answer/"))}
        after |= {f"server/{n}": v for n, v in server.items()}
        known: dict[str, Any] = {}
        works = task.upload or self.meta["round"] == 0  # else it has worked with the others, and takes the outcome
        if works:
            ctx = Context(task.round, task.seed, self.data.n_items, self.data.n_clients, self.meta["secret"])
            after, outcome = self.federation.contribute(self.data, after, ctx, self._able(task))
            if task.upload:
                total = outcome.total
                sent = put_sum(algorithm, total, ctx.own_seed)
                after |= {f"answer/{n}": v for n, v in sent.items()}
                known = {"clients": total.clients, "loss": None if noisy else total.loss, "shrink": dict(total.shrink)}
        # how long work takes tells how much there was, as the loss does
        known["seconds"] = 0.0 if noisy else round(time.perf_counter() - begun, 4)
        worked = {
            "round": task.round if works else self.meta["round"],
            "version": task.version,
            "answer": {"asked": asked, **known},
        }
        save_tensors(self.place / STATE, after, self.meta | worked)  # before the answer leaves
        self.state, self.meta = after, self.meta | worked
        return {"asked": asked, **known}

    def _able(self, task: Task) -> I64:
        """Places of the clients that were asked and have something to train on."""
        assert self.data.numbers is not None
        cohort = np.flatnonzero(np.isin(self.data.numbers, task.clients))
        if cohort.size != task.clients.size:
            raise Refused("clients", "asked for clients that this node does not hold")
        able = cohort[self.data.histories.lengths[cohort] > 0]
        if not able.size:
            raise Refused("clients", "nobody here has a history")
        return able

    def recommender(self) -> FederatedRecommender:
        """Answers for this node's users, without a server."""
        if self.meta["version"] == WHOLE:
            raise RunError(f"{self.place} has not met its server yet: nothing to recommend with")
        model = FederatedRecommender(self.pact.method, seed=self.pact.seed, **self.pact.method_settings)
        model.split_ = None
        return model.restore(self.users, self.items, self.info, self.data, self.state)
