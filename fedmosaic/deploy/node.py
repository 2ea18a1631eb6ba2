"""A node: a device with one user, or a silo with many. Answers tasks; everything private stays in its own folder.

    federation.toml      what everybody agreed on
    items.parquet        the catalogue: ids and titles
    users.json           its users, in the order of their ids in the federation
    history.parquet      their interactions, mapped to the catalogue here and nowhere else
    state.safetensors    what its users hold, the server's parameters as received last, and the last answer

The state is one file that is replaced at once, readable by its owner alone. A node that is asked again for a round it
has worked for already (the answer was lost, or the server began again) sends the same answer and does no work twice.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.algorithm.local import Context
from fedmosaic.core.errors import DataError, ForeignError, RunError
from fedmosaic.core.files import load_tensors, read_json, save_tensors, write_atomic
from fedmosaic.core.ragged import I64, Ragged
from fedmosaic.core.secret import DeviceSecret, new_secret
from fedmosaic.data.clean import as_polars
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.data.vocab import Id, Vocab
from fedmosaic.deploy.agreement import Agreement, groups_of, read_catalogue, stamp_of, write_catalogue
from fedmosaic.deploy.protocol import WHOLE, Refused, TaskMessage, UpdateMessage, brought_up, put_sum
from fedmosaic.engines.state import Array, FederationState, ServerState, received_digest
from fedmosaic.serving.catalogue import Catalogue
from fedmosaic.serving.recommender import FederatedRecommender

STATE, HISTORY, USERS, CLIENTS = "state.safetensors", "history.parquet", "users.json", "clients.safetensors"


class Node:
    """What runs on a device or in a silo."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place)
        self.agreement = Agreement.read(self.place)
        self.federation = self.agreement.build()
        self.federation.check_installed()  # better here, to its owner, than in every answer
        self.items, self.info = read_catalogue(self.place, self.agreement)
        self.users, self.data = self._own_data()
        self.state, self.answered, self.meta = self._own_state()

    @classmethod
    def create(cls, place: Path, agreement: Agreement, catalogue: pl.DataFrame, client_ids: I64) -> None:
        """A node's folder without a history yet; `client_ids` are those its users have in the federation."""
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
        agreement.write(place)
        write_catalogue(place, catalogue)
        save_tensors(place / CLIENTS, {"client_ids": client_ids.astype(np.int64)})

    @staticmethod
    def take_history(place: Path, history: Any, user: str | None = "user", item: str = "item") -> None:
        """Map a history (columns user and item; item alone on a device) to the catalogue, and keep it here."""
        items, _ = read_catalogue(place, Agreement.read(place))
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
        """Users in the order of their ids: as they came first; later histories must be of the same ones."""
        admitted = load_tensors(place / CLIENTS)[0]["client_ids"].size
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
        tensors, _ = load_tensors(self.place / CLIENTS)
        return users, TrainingSet(histories, histories.unique(), len(self.items), client_ids=tensors["client_ids"])

    def _own_state(self) -> tuple[FederationState, dict[str, Array], dict[str, Any]]:
        """What its users hold and the server sent last, the last answer, and how far it has come."""
        file = self.place / STATE
        if file.is_file():
            arrays, meta = load_tensors(file)
            if {k: meta.get(k) for k in self._binding()} != self._binding():
                raise ForeignError(f"{file} belongs to another node or federation; put this node's own file back")
            state = FederationState.unpack(self.federation.algorithm, arrays, str(file), memory=False)
            state = replace(state, secret=self._secret(bytes.fromhex(meta["secret"])))
            return state, {n[7:]: v for n, v in arrays.items() if n.startswith("answer/")}, meta
        fresh = self.federation.start(self.data, self.agreement.seed)
        secret = new_secret() if self.agreement.own_draws else b""
        meta = {"round": 0, "version": WHOLE, "secret": secret.hex(), "answer": None, **self._binding()}
        return replace(fresh, server=ServerState({}, {}), secret=self._secret(secret)), {}, meta

    def _secret(self, value: bytes) -> DeviceSecret | None:
        return DeviceSecret(value, self.agreement.digest()) if value else None

    def _binding(self) -> dict[str, Any]:
        """What a state belongs to: this federation, and these clients of it."""
        assert self.data.client_ids is not None
        return {"federation": self.agreement.digest(), "clients": self.data.client_ids.tolist()}

    def answer(self, content: bytes) -> bytes:
        """Do what a task asks; whatever is wrong with it is answered, not raised."""
        try:
            task = TaskMessage.decode(content)
        except Refused as error:
            return UpdateMessage("", 0, "", "failed", self.meta["version"], detail=str(error)).encode()
        try:
            return self._answer(task).encode()
        except Exception as error:  # a node that raises would be mute from then on
            return self._plain(task, "failed", f"{type(error).__name__}: {error}"[:500]).encode()

    def _plain(self, task: TaskMessage, status: Any, detail: str = "") -> UpdateMessage:
        return UpdateMessage(task.federation, task.round, task.attempt, status, self.meta["version"], detail=detail)

    def _answer(self, task: TaskMessage) -> UpdateMessage:
        if task.federation != self.agreement.digest():
            raise Refused("federation", "this node belongs to another federation")
        if any(name.endswith(".rows") for name in task.tensors) != (task.base != WHOLE):
            raise Refused("protocol", "rows need a base, and a base rows")
        if task.base != WHOLE and task.base != self.meta["version"]:
            return self._plain(task, "resync")
        server = brought_up(self.federation.algorithm, len(self.items), self.state.server.params, task)
        if stamp_of(server) != task.stamp:
            return self._plain(task, "resync")
        done = self.meta["answer"]
        asked = [task.round, task.stamp, task.clients.tolist(), task.upload]
        if done is not None and task.upload and self._another_table(task, done["asked"]):
            raise Refused("round", f"this node has answered round {task.round} already, for other parameters")
        if done is None or done["asked"] != asked:
            done = self._work(task, server, asked)
        known = {k: v for k, v in done.items() if k != "asked"}
        return replace(self._plain(task, "done"), tensors=self.answered, **known)

    @staticmethod
    def _another_table(task: TaskMessage, asked: list[Any]) -> bool:
        """Whether it was asked in the same round before, for other parameters: two answers tell more than one."""
        round, stamp, _, upload = asked
        return bool(upload and round == task.round and stamp != task.stamp)

    def _work(self, task: TaskMessage, server: dict[str, Array], asked: list[Any]) -> dict[str, Any]:
        """What a task asks for, and the new state on disk."""
        algorithm = self.federation.algorithm
        after, sent = replace(self.state, server=ServerState(server, {})), dict[str, Array]()
        known: dict[str, Any] = {}
        works = task.upload or self.meta["round"] == 0  # else it has worked with the others, and takes the outcome
        if works:
            table = received_digest(algorithm, server)
            ctx = Context(task.round, task.seed, self.data.n_items, self.data.n_clients, self.state.secret, table)
            after, outcome = self.federation.contribute(self.data, after, ctx, self._able(task))
            if task.upload:
                total = outcome.total
                sent = put_sum(algorithm, total, ctx)
                known = {"clients": total.clients, "shrink": dict(total.shrink)}
        worked = {
            "round": task.round if works else self.meta["round"],
            "version": task.version,
            "answer": {"asked": asked, **known},
        }
        arrays = after.pack() | {f"answer/{n}": v for n, v in sent.items()}
        save_tensors(self.place / STATE, arrays, self.meta | worked)  # before the answer leaves
        self.state, self.answered, self.meta = after, sent, self.meta | worked
        return {"asked": asked, **known}

    def _able(self, task: TaskMessage) -> I64:
        """Places of the clients that were asked and have something to train on.

        A silo answers for whole groups of its clients only: from sums over other sets single clients would follow.
        """
        assert self.data.client_ids is not None
        cohort = np.flatnonzero(np.isin(self.data.client_ids, task.clients))
        if cohort.size != task.clients.size:
            raise Refused("clients", "asked for clients that this node does not hold")
        fewest = self.agreement.fewest
        for group in groups_of(self.data.client_ids, fewest):
            if 0 < np.isin(group, task.clients).sum() < group.size:
                raise Refused("clients", "asked for a part of a group; a silo answers for whole groups of its clients")
        able = cohort[self.data.histories.lengths[cohort] > 0]
        if not able.size:
            raise Refused("clients", "nobody here has a history")
        if able.size < fewest and self.data.n_clients > 1:
            raise Refused("clients", f"asked for {able.size} clients; a silo answers for {fewest} at least")
        return able

    def recommender(self) -> FederatedRecommender:
        """Answers for this node's users, without a server."""
        if self.meta["version"] == WHOLE:
            raise RunError(f"{self.place} has not met its server yet: nothing to recommend with")
        model = FederatedRecommender(self.agreement.method, seed=self.agreement.seed, **self.agreement.method_settings)
        model.split_ = None
        return model.restore(Catalogue(self.users, self.items, self.info, self.data), self.state)
