"""Flower carries the messages: a ServerApp around the coordinator, a ClientApp around a node. Nothing else imports it.

Only its grid is used, to push and pull; rounds, deadlines, checks and state are ours, because Flower's own do not
resume, cannot add sparse updates and keep what a client holds in memory. The ClientApp runs in a process of its own for
every message, so it only passes the bytes on to the node's process (`relay.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedmosaic.deploy.relay import relay

if TYPE_CHECKING:
    from fedmosaic.deploy.protocol import Reply

UNREADABLE = (ValueError, TypeError, KeyError, RuntimeError, AttributeError)  # what Flower raises over a bad message

client_app = ClientApp()


def _record(content: bytes) -> Any:
    return RecordDict({"fedmosaic": ConfigRecord({"bytes": content})})


def _bytes(message: Message) -> bytes:
    """What a message carries; the other side may have put anything there."""
    record = message.content.config_records.get("fedmosaic")
    content = None if record is None else record.get("bytes")
    if not isinstance(content, bytes):
        raise ValueError("it carries no bytes of ours")
    return content


@client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
def answer(message: Message, context: Context) -> Message:
    """Hand a task to the node's process, and its answer back."""
    return Message(_record(relay(str(context.node_config["socket"]), _bytes(message))), reply_to=message)


class FlowerTransport:
    """Nodes over a Flower grid; `names` tells admitted nodes by their Flower ids."""

    def __init__(self, grid: Grid, names: Mapping[int, str]) -> None:
        self.grid, self.names = grid, dict(names)
        self.ids = {name: number for number, name in self.names.items()}
        self.waiting: set[str] = set()
        self.lost: list[str] = []

    def nodes(self) -> list[str]:
        """Admitted nodes that are connected."""
        return [self.names[n] for n in self.grid.get_node_ids() if n in self.names]

    def send(self, node: str, content: bytes, seconds: float) -> str:
        """Push a task; Flower drops it when its time is over."""
        message = Message(_record(content), self.ids[node], "train", ttl=seconds)
        pushed = list(self.grid.push_messages([message]))
        if not pushed or not pushed[0]:
            self.lost.append(f"lost-{len(self.lost)}-{node}")
            return self.lost[-1]
        self.waiting.add(pushed[0])
        return pushed[0]

    def receive(self) -> list[Reply]:
        """Pull what has come in; an error of Flower's is an answer too."""
        from fedmosaic.deploy.protocol import Reply

        found = [Reply(name, None, "it could not be sent") for name in self.lost]
        self.lost = []
        for name, message in self._pulled():
            self.waiting.discard(name)
            found.append(Reply(name, None, message) if isinstance(message, str) else _reply(name, message))
        return found

    def _pulled(self) -> list[tuple[str, Message | str]]:
        """All that has come; where a message cannot be read, one after the other, so that it takes no other with it."""
        if not self.waiting:
            return []
        try:
            return [(m.metadata.reply_to_message_id, m) for m in self.grid.pull_messages(list(self.waiting))]
        except UNREADABLE:
            pass
        found: list[tuple[str, Message | str]] = []
        for name in self.waiting:
            try:
                found += [(name, m) for m in self.grid.pull_messages([name])]
            except UNREADABLE as error:
                found.append((name, f"it cannot be read: {error}"))
        return found


def _reply(name: str, message: Message) -> Reply:
    from fedmosaic.deploy.protocol import Reply

    if message.has_error():
        return Reply(name, None, f"Flower error {message.error.code}: {message.error.reason}")
    try:
        return Reply(name, _bytes(message))
    except ValueError as error:
        return Reply(name, None, str(error))


def server_app(hold: Callable[[Dial, Mapping[str, Any]], None]) -> ServerApp:
    """An app whose run is `hold`, given a way to reach nodes and the run's settings."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        hold(lambda names: FlowerTransport(grid, names), dict(context.run_config))

    return app


Dial = Callable[[Mapping[int, str]], FlowerTransport]  # names of nodes by Flower's ids -> transport
