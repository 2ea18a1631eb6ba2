"""The gate: the only door to the server. TLS, nodes by their keys, the calls of `flower.CALLS`, and nothing else.

A request is let in by its headers, before a byte of its body is read: a key that the roster has, and a signature over
the time. Bodies are at most a part and a little. Lines that have shown no key are few per address and are cut after
some seconds, so they keep nobody out; a node that asks for messages is kept waiting until one is there, so it costs
nothing while nothing happens, and is known to be gone when its line is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from fedmosaic.core.errors import RunError
from fedmosaic.deploy import flower
from fedmosaic.deploy.keys import CERTIFICATE, KEY
from fedmosaic.deploy.mailbox import Mailbox
from fedmosaic.deploy.roster import LiveRoster

LARGEST = flower.PART + (1 << 16)  # bytes of a body
HEADERS = 16_384  # bytes of a request's head
HOLD = 20.0  # seconds that a node is kept waiting for a message
SILENCE = 10.0  # seconds that a line may stay without showing a key, or a handshake or a body take
STRANGERS = 32  # lines per address that have not shown a key
OF_A_NODE = 8  # lines that show one key: a node needs two, and some that were cut may not be known to be gone
TOLERANCE = 300.0  # seconds between the clock of a node and this one

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Where = tuple[str, int]  # address and port of the other end


class RefusalError(Exception):
    """A request that is not answered as asked: status and words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass
class Lines:
    """Lines that are open, by the other end, and the key each of them has shown."""

    keys: dict[Where, bytes | None] = field(default_factory=dict)
    strangers: Counter[str] = field(default_factory=Counter)  # per address
    left: Callable[[bytes], None] = lambda key: None  # called when the last line of a key is gone
    refused: Counter[str] = field(default_factory=Counter)  # per reason

    def opened(self, where: Where) -> bool:
        """A line is there; whether it may stay."""
        if self.strangers[where[0]] >= STRANGERS:
            self.refused["too many lines"] += 1
            return False
        self.keys[where] = None
        self.strangers[where[0]] += 1
        return True

    def known(self, where: Where, key: bytes) -> bool:
        """A line has shown a key; whether its owner may hold one more."""
        if list(self.keys.values()).count(key) >= OF_A_NODE:
            self.refused["too many lines"] += 1
            return False
        if where in self.keys and self.keys[where] is None:
            self.strangers[where[0]] -= 1
            self.keys[where] = key
        return True

    def closed(self, where: Where) -> None:
        """A line is gone."""
        if where not in self.keys:
            return
        key = self.keys.pop(where)
        if key is not None:
            if key not in self.keys.values():
                self.left(key)
            return
        self.strangers[where[0]] -= 1
        if not self.strangers[where[0]]:
            del self.strangers[where[0]]


class Guarded(asyncio.Protocol):
    """HTTP on one line, which is cut when it shows no key in time."""

    def __init__(self, inner: H11Protocol, lines: Lines, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self.lines, self.loop = inner, lines, loop
        self.where: Where = ("", 0)
        self.admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the line; too many strangers from one address are cut at once."""
        self.where = tuple(transport.get_extra_info("peername")[:2])
        self.admitted = self.lines.opened(self.where)
        if not self.admitted:
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            return
        self.loop.call_later(SILENCE, self._cut_stranger, transport)
        self.inner.connection_made(transport)  # type: ignore[arg-type, unused-ignore]

    def _cut_stranger(self, transport: asyncio.BaseTransport) -> None:
        if self.lines.keys.get(self.where, b"") is None:
            self.lines.refused["silent"] += 1
            assert isinstance(transport, asyncio.Transport)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The line is gone."""
        if self.admitted:
            self.lines.closed(self.where)
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As HTTP reads it."""
        if self.admitted:
            self.inner.data_received(data)

    def eof_received(self) -> None:
        """As HTTP takes it."""
        if self.admitted:
            self.inner.eof_received()

    def pause_writing(self) -> None:
        """As HTTP takes it."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """As HTTP takes it."""
        self.inner.resume_writing()


class Gate:
    """An ASGI application: nodes' calls, answered from a mailbox.

    roster: whose a public key (PEM) is; asked for every request, so that who is removed is out at once.
    """

    def __init__(self, mailbox: Mailbox, roster: LiveRoster, lines: Lines | None = None) -> None:
        self.mailbox, self.roster, self.lines = mailbox, roster, lines or Lines()
        self.calls: Counter[str] = Counter()
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        mailbox.wake, self.lines.left = self.wake, self._left

    def wake(self, node: str) -> None:
        """A message is there for a node; called from any thread."""
        if self._loop is not None and (event := self._waiting.get(node)) is not None:
            self._loop.call_soon_threadsafe(event.set)

    def _left(self, key: bytes) -> None:
        if (node := self.roster.name_of(key)) is not None:
            self.mailbox.cut(node)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        self._loop = asyncio.get_running_loop()
        try:
            content = await self._answer(scope, receive)
            await _reply(send, 200, flower.MEDIA, content)
        except RefusalError as error:
            self.lines.refused[str(error.status)] += 1
            await _reply(send, error.status, "text/plain", str(error).encode())
        except ConnectionError:
            pass

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        path = scope["raw_path"].decode("ascii", "replace")
        if path not in flower.CALLS or scope["method"] != "POST":
            raise RefusalError(403, "this gate lets nodes through and nothing else")
        node, number = self._who(scope)
        body = await _body(receive)
        try:
            request = flower.decoded(path, body)
            self.calls[path.rpartition("/")[2]] += 1
            self.mailbox.came(node)
            return await self._done(path.rpartition("/")[2], request, node, number, receive)
        except ValueError as error:
            raise RefusalError(400, str(error)) from None

    def _who(self, scope: Scope) -> tuple[str, int]:
        """The node that asks, by the key it shows; a signature is looked at once a line."""
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        where: Where = tuple(scope["client"] or ("", 0))
        try:
            key = b64decode(headers[flower.KEY_HEADER], validate=True)
            signature = b64decode(headers[flower.SIGNED_HEADER], validate=True)
            text = headers[flower.TIME_HEADER]
            age = abs((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds())
        except (KeyError, ValueError, TypeError):
            raise RefusalError(401, "no key, or no signature, of a node") from None
        node = self.roster.name_of(key)
        member = None if node is None else self.roster().get(node)
        if node is None or member is None:
            raise RefusalError(401, "this node's key is not admitted here (`fedmosaic deploy admit` lets it in)")
        if self.lines.keys.get(where) != key:
            if age > TOLERANCE:
                raise RefusalError(408, "the clocks differ")
            if not flower.signed_by(key, signature, text):
                raise RefusalError(401, "the signature is not that of the key")
            if not self.lines.known(where, key):
                raise RefusalError(429, f"this node holds {OF_A_NODE} lines already")
        return node, member.party + 1

    async def _done(self, call: str, request: Any, node: str, number: int, receive: Receive) -> bytes:
        box = self.mailbox
        if call == "activate-node":
            return flower.said("ActivateNodeResponse", node_id=number)
        if call == "deactivate-node":
            box.went(node)
            return flower.said("DeactivateNodeResponse")
        if call == "send-node-heartbeat":
            return flower.said("SendNodeHeartbeatResponse", success=True)
        if call == "pull-messages":
            await self._wait(node, receive)
            return flower.announced(box.next(node), number, box.seconds(node))
        if call == "pull-object":
            part = box.part(node, request.object_id)
            there = part is not None
            return flower.said(
                "PullObjectResponse", object_found=there, object_available=there, object_content=part or b""
            )
        if call == "confirm-message-received":
            return flower.said("ConfirmMessageReceivedResponse")
        if call == "push-messages":
            wanted = box.answer(node, *flower.answered(request))
            return flower.said("PushMessagesResponse", objects_to_push=wanted or [], session_id="1")
        return flower.said("PushObjectResponse", stored=box.take(node, request.object_id, request.object_content))

    async def _wait(self, node: str, receive: Receive) -> None:
        """Until a message is there for a node, its line is cut, or it has waited long enough."""
        event = self._waiting[node] = asyncio.Event()
        if self.mailbox.next(node) is not None:
            return
        self.mailbox.came(node, held=1)
        gone, come = asyncio.ensure_future(receive()), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({gone, come}, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
            cut = gone.done() and gone.result()["type"] == "http.disconnect"
        finally:
            gone.cancel()
            come.cancel()
            self.mailbox.came(node, held=-1)
        if cut:
            raise ConnectionError


async def _body(receive: Receive) -> bytes:
    parts, size, more = [], 0, True
    while more:
        try:
            event = await asyncio.wait_for(receive(), SILENCE)
        except TimeoutError:
            raise RefusalError(408, "the body does not come") from None
        if event["type"] == "http.disconnect":
            raise ConnectionError
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST:
            raise RefusalError(413, f"a body has {LARGEST} bytes at most")
        more = event.get("more_body", False)
    return b"".join(parts)


async def _reply(send: Send, status: int, kind: str, content: bytes) -> None:
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(content)).encode()),
        (b"date", format_datetime(datetime.now(UTC), usegmt=True).encode()),
    ]
    if status != 200:
        headers.append((b"connection", b"close"))  # what is left of a body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@contextlib.contextmanager
def opened(gate: Gate, folder: Path, host: str, port: int) -> Iterator[None]:
    """Let nodes in, from a thread of its own, until the context ends."""
    config = uvicorn.Config(
        gate, log_level="warning", lifespan="off", server_header=False, date_header=False, http="h11", ws="none",
        h11_max_incomplete_event_size=HEADERS, timeout_keep_alive=int(HOLD) * 2, access_log=False,
        proxy_headers=False,  # who a line belongs to follows from the line, never from what is said in it
    )  # fmt: skip
    config.load()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        raise RunError(
            f"{folder / CERTIFICATE} or {KEY} is damaged ({error}); `fedmosaic deploy renew` helps"
        ) from None
    ready, state = threading.Event(), ServerState()
    failed: list[BaseException] = []

    async def hold(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def line() -> Guarded:
            inner = H11Protocol(config=config, server_state=state, app_state={}, _loop=loop)
            return Guarded(inner, gate.lines, loop)

        door = await loop.create_server(line, host, port, ssl=context, ssl_handshake_timeout=SILENCE, backlog=512)
        ready.set()
        await stop.wait()
        door.close()
        for one in list(state.connections):
            one.transport.abort()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    loop, stop = asyncio.SelectorEventLoop(), asyncio.Event()  # whatever loop others have made the default

    def run() -> None:
        try:
            loop.run_until_complete(hold(stop))
        except BaseException as error:
            failed.append(error)
        finally:
            loop.close()
            ready.set()

    thread = threading.Thread(target=run, name="gate", daemon=True)
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5.0)
