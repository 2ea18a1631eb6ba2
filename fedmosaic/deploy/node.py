"""A node: a device with one user, or a silo with many. Answers tasks; everything private stays in its own folder.

    federation.toml      what everybody agreed on
    items.parquet        the catalogue: ids and titles
    history.parquet ...  its users' interactions (`history.py`)
    node.key, sum.key    made here (`keys.py`); request.json: their public halves, for who lets the node in
    state.safetensors    what its users hold, the server's parameters as received last, the last answer, and its pledge
    log.jsonl            what it took part in, for its owner

The state is one file that is replaced at once, readable by its owner alone. A node that is asked again for a round it
has worked for already (the answer was lost, or the server began again) sends the same answer and does no work twice;
under a secure sum the same numbers, under masks of the new attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.upload import UploadSum
from fedmosaic.core.errors import FedmosaicError, ForeignError, RunError
from fedmosaic.core.files import append_line, load_tensors, read_lines, save_tensors
from fedmosaic.core.ragged import I64
from fedmosaic.core.secret import DeviceSecret, new_secret
from fedmosaic.deploy.admission import generation_of
from fedmosaic.deploy.agreement import Agreement, groups_of, read_catalogue, stamp_of, write_catalogue
from fedmosaic.deploy.history import CLIENTS, read_history
from fedmosaic.deploy.plain import put_sum
from fedmosaic.deploy.pledge import NodeSums, Pledge
from fedmosaic.deploy.protocol import WHOLE, Refused, RevealMessage, TaskMessage, UpdateMessage, kind_of
from fedmosaic.deploy.roster import party_of
from fedmosaic.deploy.work import LearntWork, SummedWork, Work, work_of
from fedmosaic.engines.state import Array, received_digest
from fedmosaic.privacy.budget import BudgetSpentError
from fedmosaic.privacy.secure_sum import Party
from fedmosaic.serving.catalogue import Catalogue
from fedmosaic.serving.recommender import FederatedRecommender

STATE, LOG = "state.safetensors", "log.jsonl"
Say = Callable[[str], None]
Kept = tuple[Any, dict[str, Array], dict[str, Any]]  # what its users hold, the last answer, and how far it has come


class Node:
    """What runs on a device or in a silo. say: where its owner is told what happens."""

    def __init__(self, place: str | Path, say: Say = lambda _: None) -> None:
        self.place, self.say, self.told = Path(place), say, dict[str, Any]()
        self.agreement = Agreement.read(self.place)
        self.work: Work = work_of(self.agreement)
        if isinstance(self.work, LearntWork):
            self.work.federation.check_installed()  # better here, to its owner, than in every answer
        self.items, self.info = read_catalogue(self.place, self.agreement)
        self.users, self.data = read_history(self.place, len(self.items))
        self.state, self.answered, self.meta = self._own_state()
        self.pledge = Pledge.read(self.meta.get("pledge"))
        self.ended = False  # whether the server has said that all rounds are over
        if self.agreement.secure:
            self.sums = NodeSums(self.place, self.agreement, self.party, isinstance(self.work, SummedWork))

    @classmethod
    def create(cls, place: Path, agreement: Agreement, catalogue: pl.DataFrame, client_ids: I64, name: str) -> None:
        """A node's folder without keys and history yet; `client_ids` are those its users have in the federation."""
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
        agreement.write(place)
        write_catalogue(place, catalogue)
        save_tensors(place / CLIENTS, {"client_ids": client_ids.astype(np.int64)}, {"node": name})

    @property
    def party(self) -> int:
        """Its number among the parties of sums: of its first client, and of its keys."""
        assert self.data.client_ids is not None
        return party_of(int(self.data.client_ids.min()), generation_of(self.place))

    def _own_state(self) -> Kept:
        """What its users hold and the server sent last, the last answer, and how far it has come."""
        file = self.place / STATE
        if file.is_file():
            arrays, meta = load_tensors(file)
            if {k: meta.get(k) for k in self._binding()} != self._binding():
                raise ForeignError(f"{file} belongs to another node or federation; put this node's own file back")
            own = {n: v for n, v in arrays.items() if not n.startswith("answer/")}
            state = self.work.unpack_held(own, str(file), self._secret(bytes.fromhex(meta["secret"])))
            return state, {n[7:]: v for n, v in arrays.items() if n.startswith("answer/")}, meta
        secret = new_secret() if self.agreement.own_draws else b""
        meta = {"round": 0, "version": WHOLE, "secret": secret.hex(), "answer": None, **self._binding()}
        state = self.work.begin(self.data, self.agreement.seed)
        if isinstance(self.work, LearntWork):
            state = replace(state, secret=self._secret(secret))
        return state, {}, meta

    def _secret(self, value: bytes) -> DeviceSecret | None:
        return DeviceSecret(value, self.agreement.digest()) if value else None

    def _binding(self) -> dict[str, Any]:
        """What a state belongs to: this federation, and these clients of it."""
        assert self.data.client_ids is not None
        return {"federation": self.agreement.digest(), "clients": self.data.client_ids.tolist()}

    def warm_up(self) -> None:
        """Work as in a round, on first parameters and without keeping anything: what is to be compiled then is."""
        first = self.work.start(len(self.items), self.agreement.seed)
        held = self.work.with_received(self.state, self.work.parameters(first))
        ctx = Context(1, self.agreement.seed, self.data.n_items, self.data.n_clients)
        able = np.flatnonzero(self.data.histories.lengths > 0)
        if able.size and self.work.rounds:
            self.work.contribute(self.data, held, ctx, able)

    def answer(self, content: bytes) -> bytes:
        """Do what a message asks; whatever is wrong with it is answered, not raised."""
        try:
            if kind_of(content) == "reveal":
                return self._open(RevealMessage.decode(content))
            task = TaskMessage.decode(content)
        except Refused as error:
            self._tell({"event": "refused", "why": str(error)})
            return UpdateMessage("", 0, "", "failed", self.meta["version"], detail=str(error)).encode()
        try:
            return self._answer(task)
        except Exception as error:  # a node that raises would be mute from then on
            why = reason_of(error)
            self._tell({"event": "refused", "round": task.round, "why": why[:500]})
            return self._plain(task, "failed", why[:500]).encode()

    def _plain(self, task: TaskMessage | RevealMessage, status: Any, detail: str = "") -> UpdateMessage:
        return UpdateMessage(task.federation, task.round, task.attempt, status, self.meta["version"], detail=detail)

    def _answer(self, task: TaskMessage) -> bytes:
        if task.federation != self.agreement.digest():
            raise Refused("federation", "this node belongs to another federation")
        if any(name.endswith(".rows") for name in task.tensors) != (task.base != WHOLE):
            raise Refused("protocol", "rows need a base, and a base rows")
        if task.upload and self.agreement.secure != bool(task.parties.size):
            raise Refused(
                "unmasked", "it was agreed that uploads are " + ("masked" if self.agreement.secure else "plain")
            )
        if task.base != WHOLE and task.base != self.meta["version"]:
            return self._plain(task, "resync").encode()
        server = self.work.brought_up(len(self.items), self.state, task)
        if stamp_of(server) != task.stamp:
            return self._plain(task, "resync").encode()
        done = self.meta["answer"]
        asked = [task.round, task.stamp, task.clients.tolist(), task.upload]
        if task.upload:
            self._check_round(task, None if done is None else done["asked"])
        begun = self._joined(task) if task.parties.size else None
        kept = self.state, self.answered, self.meta
        if done is None or done["asked"] != asked:
            kept = self._worked(task, server, asked)
        sent, known, pledge = kept[1], {k: v for k, v in kept[2]["answer"].items() if k != "asked"}, self.pledge
        if begun is not None:
            sent, pledge = self._masked(begun, kept, self._context(task, server)), begun[0]
            kept = kept[0], kept[1] | {"letters": sent["letters"]}, kept[2]
        self._keep(kept, pledge)
        content = replace(self._plain(task, "done"), tensors=sent, **known).encode()
        self._tell_of(task, len(content))
        return content

    def _joined(self, task: TaskMessage) -> tuple[Pledge, Party]:
        """Part in a secure sum; the owner is told of keys that were not there before."""
        pinned = len(self.sums.pinned)
        begun = self.sums.joined(task, self.pledge)
        if 0 < pinned < len(self.sums.pinned):
            self._tell({"event": "pinned", "round": task.round, "nodes": len(self.sums.pinned) - pinned})
        return begun

    def _masked(self, begun: tuple[Pledge, Party], kept: Kept, ctx: Context) -> dict[str, Array]:
        """What leaves in the first exchange; asked again in the same attempt, the same bytes.

        Letters are sealed once: others under the same keys would show what they differ by.
        """
        (pledge, party), (held, answered, _) = begun, kept
        noised = self.work.noised(answered["vector"], self.data, held, ctx, len(pledge.parties))
        sent = self.sums.masked(party, noised)
        again = (pledge.round, pledge.attempt) == (self.pledge.round, self.pledge.attempt)
        return sent | {"letters": answered["letters"]} if again else sent

    def _check_round(self, task: TaskMessage, asked: list[Any] | None) -> None:
        """Two answers tell more than one: none for other parameters in a round, and none beyond the last of a form."""
        if asked is not None and asked[3] and asked[0] == task.round and asked[1] != task.stamp:
            raise Refused("round", f"this node has answered round {task.round} already, for other parameters")
        if isinstance(self.work, SummedWork) and not 1 <= task.round <= self.work.rounds:
            raise Refused(
                "round", f"{self.agreement.method} has {self.work.rounds} rounds; asked for round {task.round}"
            )

    def _context(self, task: TaskMessage, server: dict[str, Array]) -> Context:
        """What draws are keyed by; of a device's own, its secret and the table."""
        work = self.work
        table = received_digest(work.federation.algorithm, server) if isinstance(work, LearntWork) else task.stamp
        secret = getattr(self.state, "secret", None)
        return Context(task.round, task.seed, self.data.n_items, self.data.n_clients, secret, table)

    def _worked(self, task: TaskMessage, server: dict[str, Array], asked: list[Any]) -> Kept:
        """What a task asks for, done."""
        after, sent, known = self.work.with_received(self.state, server), dict[str, Array](), dict[str, Any]()
        works = task.upload or self.meta["round"] == 0  # else it has worked with the others, and takes the outcome
        if works and (task.upload or isinstance(self.work, LearntWork)):
            after, sent, known = self._contributed(task, server, after)
        worked = {
            "round": task.round if works else self.meta["round"], "version": task.version,
            "answer": {"asked": asked, **known},
        }  # fmt: skip
        return after, sent, self.meta | worked

    def _contributed(self, task: TaskMessage, server: dict[str, Array], held: Any) -> Kept:
        """What the node holds after its local work, and the tensors and words of its upload."""
        work, ctx, able = self.work, self._context(task, server), self._able(task)
        try:
            after, total = work.contribute(self.data, held, ctx, able)
        except BudgetSpentError as error:
            raise Refused("budget", str(error)) from None
        if not task.upload:
            return after, {}, {}
        if task.parties.size:
            return after, {"vector": work.vector(total, able.size)}, {}
        assert isinstance(work, LearntWork)
        assert isinstance(total, UploadSum)
        known = {"clients": total.clients, "shrink": dict(total.shrink)}
        return after, put_sum(work.federation.algorithm, total, ctx), known

    def _open(self, asked: RevealMessage) -> bytes:
        """The second exchange of a secure sum; what was opened is on disk before it leaves."""
        try:
            if asked.federation != self.agreement.digest() or not self.agreement.secure:
                raise Refused("federation", "this node belongs to another federation, or sums nothing securely")
            pledge, opening = self.sums.opened(asked, self.pledge)
            self._keep((self.state, self.answered, self.meta), pledge)
            content = opening.encode()
            self._tell({"event": "opened", "round": asked.round, "nodes": asked.arrived.size, "bytes": len(content)})
            return content
        except Exception as error:
            why = reason_of(error)
            self._tell({"event": "refused", "round": asked.round, "why": why[:500]})
            return self._plain(asked, "failed", why[:500]).encode()

    def _keep(self, kept: Kept, pledge: Pledge) -> None:
        """The new state on disk, before anything leaves."""
        state, answered, meta = kept[0], kept[1], kept[2] | {"pledge": pledge.packed()}
        arrays = self.work.pack_held(state) | {f"answer/{n}": v for n, v in answered.items()}
        save_tensors(self.place / STATE, arrays, meta)
        self.state, self.answered, self.meta, self.pledge = state, answered, meta, pledge

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

    def _tell_of(self, task: TaskMessage, sent: int) -> None:
        """For the owner: what left this node, and how."""
        if not task.upload:
            self.ended = task.ends
            self._tell({"event": "outcome", "round": task.version, "ends": task.ends})
            return
        line = {"event": "sent", "round": task.round, "masked": bool(task.parties.size), "nodes": task.parties.size}
        line["bytes"] = sent
        if isinstance(self.work, LearntWork) and self.work.budget is not None:
            line["epsilon"] = round(self.work.federation.spent_after(task.round), 4)
        self._tell(line)

    def _tell(self, line: dict[str, Any]) -> None:
        if line["event"] == "refused" and line == self.told:
            return  # a server that asks for it again and again fills no disk
        self.told = line
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **line}
        with suppress(RunError):  # a full disk is told in the answer
            append_line(self.place / LOG, line)
        self.say(in_words(line))

    def provenance(self) -> str:
        """On whose model answers rest, and of when."""
        taken = [line["time"] for line in read_lines(self.place / LOG) if line["event"] == "outcome"]
        when = f", taken {taken[-1]}" if taken else ", before its outcome"
        return (
            f"answers rest on the model of round {self.meta['version']}{when}, of federation {self.agreement.digest()} "
            f"({self.agreement.method}), and on the history in {self.place}"
        )

    def recommender(self) -> FederatedRecommender:
        """Answers for this node's users, without a server."""
        if self.meta["version"] == WHOLE:
            raise RunError(f"{self.place} has not met its server yet: nothing to recommend with")
        model = FederatedRecommender(self.agreement.method, seed=self.agreement.seed, **self.agreement.method_settings)
        model.split_ = None
        return model.restore(Catalogue(self.users, self.items, self.info, self.data), self.state)


def reason_of(error: Exception) -> str:
    """Why there is no answer, for both sides. What nobody thought of is named by its type."""
    if isinstance(error, Refused):
        return str(error)
    return f"failed: {error}" if isinstance(error, FedmosaicError) else f"{type(error).__name__}: {error}"


def in_words(line: dict[str, Any]) -> str:
    """A line of a node's log, as its owner reads it.

    >>> in_words({"event": "sent", "round": 3, "masked": True, "nodes": 20, "bytes": 53824})
    'round 3: sent 54 kB, masked, in a sum of 20 nodes'
    """
    if line["event"] == "sent":
        how = f"masked, in a sum of {line['nodes']} nodes" if line["masked"] else "plain: the server sees it"
        spent = f"; epsilon {line['epsilon']:g} spent" if "epsilon" in line else ""
        return f"round {line['round']}: sent {line['bytes'] / 1000:,.0f} kB, {how}{spent}"
    if line["event"] == "pinned":
        return f"round {line['round']}: takes the keys of {line['nodes']} further nodes to be what the server says"
    if line["event"] == "opened":
        return f"round {line['round']}: opened the sum of {line['nodes']} nodes"
    if line["event"] == "outcome":
        more = "; all rounds are over" if line["ends"] else ""
        return f"took the model of round {line['round']}{more}"
    return f"refused: {line['why']}"
