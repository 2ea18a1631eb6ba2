"""All that is used of Flower: its fleet API, by which nodes and a server exchange messages over HTTPS.

    node      `FleetLine`: Flower's own client, in the node's process; nothing that arrives is executed, only answered
    server    `CALLS`: how the calls of that client are read, and what answers them (`gate.py`)

A message is a name and parts, each named by its SHA-256 and fetched or sent by itself, so that an exchange that was cut
goes on with the part it had come to. The names below belong to Flower and may change: whatever else imports from Flower
is a mistake, and a version that this was not tried with is refused here.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedmosaic.core.errors import FedmosaicError, RunError, SettingsError
from fedmosaic.deploy.keys import node_key

TRIED = ("1.41",)  # versions of Flower that the tests were run with
PART = 1 << 20  # bytes of a part


def check_version() -> None:
    """Refuse a Flower that is missing, or that this was never run with."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise SettingsError("deployment needs Flower: pip install 'fedmosaic[flower]'") from None
    if ".".join(found.split(".")[:2]) not in TRIED:
        raise SettingsError(
            f"Flower {found} is installed; this version of fedmosaic knows the fleet API of {', '.join(TRIED)}: "
            "pip install 'fedmosaic[flower]'"
        )


check_version()

import httpx  # noqa: E402
from cryptography.exceptions import InvalidSignature  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.common.constant import TIMESTAMP_HEADER  # noqa: E402
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2  # noqa: E402
from flwr.proto.node_pb2 import Node as NodeName  # noqa: E402
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER  # noqa: E402
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext  # noqa: E402
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE  # noqa: E402
from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: E402

logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line for every request

KEY_HEADER, SIGNED_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER.lower(), FLEET_HTTP_SIGNATURE_HEADER.lower()
TIME_HEADER, MEDIA = TIMESTAMP_HEADER.lower(), PROTOBUF_MEDIA_TYPE
RUN = 1  # Flower numbers runs; a federation has one
HEARTBEAT = 15.0  # seconds between two signs of life while a node works; whoever asks for messages is there

# The calls that nodes need, by path: how the request is read. Everything else of Flower's API does not exist here.
CALLS: Mapping[str, Any] = {
    "/v1/fleet/activate-node": fleet_pb2.ActivateNodeRequest,
    "/v1/fleet/deactivate-node": fleet_pb2.DeactivateNodeRequest,
    "/v1/fleet/send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "/v1/fleet/pull-messages": fleet_pb2.PullMessagesRequest,
    "/v1/fleet/pull-object": message_pb2.PullObjectRequest,
    "/v1/fleet/confirm-message-received": message_pb2.ConfirmMessageReceivedRequest,
    "/v1/fleet/push-messages": fleet_pb2.PushMessagesRequest,
    "/v1/fleet/push-object": message_pb2.PushObjectRequest,
}


class AwayError(FedmosaicError):
    """The server cannot be reached, or does not answer now; it may later."""


class NotLetInError(FedmosaicError):
    """The server refuses this node, and says why."""


@dataclass(frozen=True)
class Packet:
    """A message as it travels: its name, and its parts in order.

    >>> packet = Packet.of("a task", b"x" * (PART + 1))
    >>> len(packet.parts), len(packet.content())
    (2, 1048577)
    """

    name: str
    order: tuple[str, ...]
    parts: Mapping[str, bytes] = field(repr=False)

    @staticmethod
    def of(name: str, content: bytes) -> Packet:
        """Cut into parts."""
        cut = [content[at : at + PART] for at in range(0, len(content), PART)] or [b""]
        order = tuple(digest(part) for part in cut)
        return Packet(name, order, dict(zip(order, cut, strict=True)))

    def content(self) -> bytes:
        """Put together again; all parts must be there."""
        return b"".join(self.parts[name] for name in self.order)


def digest(part: bytes) -> str:
    """The name of a part."""
    return hashlib.sha256(part).hexdigest()


# What the server reads, and what it says.


def decoded(path: str, body: bytes) -> Any:
    """A request as Flower has it; ValueError where it is none."""
    from google.protobuf.message import DecodeError

    request = CALLS[path]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise ValueError("that is no request of Flower's") from None
    return request


def announced(packet: Packet | None, node: int, seconds: float) -> bytes:
    """The answer to who asks for messages: the next one's name and parts, or that there is none."""
    if packet is None:
        return bytes(fleet_pb2.PullMessagesResponse().SerializeToString())
    head = _head(packet.name, "", node, seconds)
    return bytes(
        fleet_pb2.PullMessagesResponse(messages_list=[head], message_object_trees=[_tree(packet)]).SerializeToString()
    )


def answered(request: Any) -> tuple[str, tuple[str, ...]]:
    """Which message a pushed one answers, and the parts it will have; ValueError where it does not say."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise ValueError("a node sends one message at a time")
    order = tuple(child.object_id for child in request.message_object_trees[0].children)
    return request.messages_list[0].metadata.reply_to_message_id, order


def said(kind: str, **fields: Any) -> bytes:
    """Another answer: of `fleet_pb2`, `heartbeat_pb2` or `message_pb2`, by its name."""
    for module in (fleet_pb2, heartbeat_pb2, message_pb2):
        if hasattr(module, kind):
            return bytes(getattr(module, kind)(**fields).SerializeToString())
    raise KeyError(kind)


def signed_by(key: bytes, signature: bytes, text: str) -> bool:
    """Whether the owner of a public key (PEM) signed a text, as Flower's nodes do."""
    try:
        public = serialization.load_pem_public_key(key)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(signature, text.encode(), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, AssertionError, TypeError):
        return False
    return True


def _head(name: str, answers: str, node: int, seconds: float) -> Any:
    meta = message_pb2.Metadata(
        run_id=RUN, message_id=name, dst_node_id=node, reply_to_message_id=answers, ttl=seconds, message_type="train",
        created_at=time.time(),
    )  # fmt: skip
    return message_pb2.Message(metadata=meta)


def pushed(packet: Packet, answers: str, node: int) -> bytes:
    """How a node begins to answer a message."""
    return bytes(_pushed(packet, answers, NodeName(node_id=node)).SerializeToString())


def _pushed(packet: Packet, answers: str, node: Any) -> Any:
    head = _head(packet.name, answers, 0, HEARTBEAT)
    return fleet_pb2.PushMessagesRequest(node=node, messages_list=[head], message_object_trees=[_tree(packet)])


def _tree(packet: Packet) -> Any:
    children = [message_pb2.ObjectTree(object_id=part) for part in packet.order]
    return message_pb2.ObjectTree(object_id=packet.name, children=children)


# The node's side.


class _Signed:
    """Every request carries the node's public key and a signed time, by the server's clock as far as it is known."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        public = serialization.PublicFormat.SubjectPublicKeyInfo
        self.key, self.pem = key, key.public_key().public_bytes(serialization.Encoding.PEM, public)
        self.ahead = timedelta(0)  # of the server's clock

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Sign, send, and look at the server's clock."""
        now = (datetime.now(UTC) + self.ahead).isoformat()
        signature = self.key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
        context.request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = b64encode(self.pem).decode()
        context.request.headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode()
        context.request.headers[TIMESTAMP_HEADER] = now
        return call_next(context)

    def set_clock(self, date: str) -> timedelta:
        """Go by the server's clock; how far this machine's is behind."""
        with suppress(TypeError, ValueError):
            self.ahead = parsedate_to_datetime(date) - datetime.now(UTC)
        return self.ahead


def _client(address: str, authority: Path, signed: _Signed) -> FleetHttpClient:
    try:
        return FleetHttpClient.from_server_address(address, False, authority.read_bytes(), [signed])
    except (OSError, ValueError) as error:
        raise RunError(f"{authority} is missing or damaged: {error}") from None


class FleetLine:
    """A node's connection: TLS against the federation's authority, the node's key, messages in and answers out.

    >>> FleetLine("127.0.0.1:1", Path("ca.crt"), Path("node.key"))  # doctest: +SKIP
    """

    def __init__(self, address: str, authority: Path, key: Path) -> None:
        self._signed = _Signed(node_key(key))
        self._client = _client(address, authority, self._signed)
        self.address, self.node = address, NodeName(node_id=0)
        self._parts: dict[str, bytes] = {}  # of a message that is on its way

    def __enter__(self) -> FleetLine:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(AwayError, NotLetInError):
            self._call("DeactivateNode", fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id))
        self._client.close()

    def join(self) -> None:
        """Say that this node is there."""
        request = fleet_pb2.ActivateNodeRequest(public_key=self._signed.pem, heartbeat_interval=HEARTBEAT)
        self.node = NodeName(node_id=self._call("ActivateNode", request).node_id)

    def receive(self) -> tuple[str, bytes] | None:
        """The next message's name and content; the server holds the line for a while, and none may come."""
        found = self._call("PullMessages", fleet_pb2.PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        name, order = found.messages_list[0].metadata.message_id, found.message_object_trees[0].children
        wanted = [child.object_id for child in order]
        self._parts = {part: held for part, held in self._parts.items() if part in wanted}
        for part in wanted:
            if part not in self._parts:
                self._parts[part] = self._part(part)
        self._call(
            "ConfirmMessageReceived",
            message_pb2.ConfirmMessageReceivedRequest(node=self.node, run_id=RUN, message_object_id=name),
        )
        content = Packet(name, tuple(wanted), self._parts).content()
        self._parts = {}
        return name, content

    def _part(self, part: str) -> bytes:
        found = self._call("PullObject", message_pb2.PullObjectRequest(node=self.node, run_id=RUN, object_id=part))
        if not found.object_found or digest(found.object_content) != part:
            raise AwayError("a part of a message is not what it was announced to be")
        return bytes(found.object_content)

    def send(self, name: str, content: bytes) -> None:
        """Answer a message; parts that the server holds already are not sent again."""
        packet = Packet.of(f"answer-{name}", content)
        found = self._call("PushMessages", _pushed(packet, name, self.node))
        for part in found.objects_to_push:
            sent = message_pb2.PushObjectRequest(
                node=self.node, run_id=RUN, object_id=part, object_content=packet.parts[part],
                session_id=found.session_id,
            )  # fmt: skip
            if not self._call("PushObject", sent).stored:
                return  # the server wants it no longer

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Let the server know that this node is there while it works."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT):
                with suppress(AwayError, NotLetInError):
                    request = heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
                    self._call("SendNodeHeartbeat", request)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _call(self, name: str, request: Any, again: bool = True) -> Any:
        """One call of Flower's client, its failures by what they mean."""
        try:
            return getattr(self._client, name)(request)
        except httpx.HTTPStatusError as error:
            status, text = error.response.status_code, error.response.text[:300]
            if status == httpx.codes.REQUEST_TIMEOUT and again:  # the clocks differ
                self._signed.set_clock(error.response.headers.get("date", ""))
                return self._call(name, request, again=False)
            if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise NotLetInError(text) from None
            raise AwayError(f"it answers {status}: {text}") from None
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise NotLetInError("its certificate is not signed by this federation's authority (ca.crt)") from None
            raise AwayError(str(error) or type(error).__name__) from None
        except ValueError as error:
            raise AwayError(f"its answer cannot be read: {error}") from None


def public_pem(openssh: str) -> bytes:
    """A public key as requests carry it, from the line that a roster has."""
    public = serialization.load_ssh_public_key(openssh.encode())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return public.public_bytes(serialization.Encoding.PEM, form)


def names(parts: Sequence[str]) -> bool:
    """Whether all of them could be names of parts.

    >>> names(["a" * 64]), names(["../etc"])
    (True, False)
    """
    return all(len(part) == 64 and set(part) <= set("0123456789abcdef") for part in parts)
