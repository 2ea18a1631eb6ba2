"""The gate: the only door to the server from outside. It lets nodes through and nothing else.

Flower serves everything on one port, and its control calls (start a run, register a node) ask for no credential. So the
server listens on the loopback interface alone, and this gate, with TLS of its own, passes on what begins with
`/v1/fleet/` and refuses the rest.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from fedmosaic.deploy.keys import CA, CERTIFICATE, KEY

OPEN = "/v1/fleet/"
LARGEST = 256 << 20  # bytes of a request
AT_ONCE = 64  # requests; more are told to come again
HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """An ASGI application that forwards fleet calls to one server."""

    def __init__(self, server: str, authority: Path) -> None:
        context = ssl.create_default_context(cafile=str(authority))
        self.client = httpx.AsyncClient(base_url=server, verify=context, timeout=None, trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return None
        path = scope["raw_path"].decode("ascii", "replace")
        if not path.startswith(OPEN) or ".." in path or "//" in path or "%" in path:
            return await _plain(send, 403, "this gate lets nodes through and nothing else")
        body = await _body(receive)
        if body is None:
            return await _plain(send, 413, "too large")
        query = scope["query_string"].decode("ascii", "replace")
        headers = [(k, v) for k, v in scope["headers"] if k.decode("latin-1").lower() not in HOP]
        try:
            found = await self.client.request(
                scope["method"], path + (f"?{query}" if query else ""), headers=headers, content=body
            )
        except httpx.InvalidURL:
            return await _plain(send, 400, "that is no address")
        except httpx.HTTPError:
            return await _plain(send, 502, "the server does not answer")
        kept = [(k, v) for k, v in found.headers.raw if k.decode("latin-1").lower() not in HOP | {"content-encoding"}]
        await send({"type": "http.response.start", "status": found.status_code, "headers": kept})
        return await send({"type": "http.response.body", "body": found.content})


async def _body(receive: Receive) -> bytes | None:
    parts, size, more = [], 0, True
    while more:
        event = await receive()
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST:
            return None
        more = event.get("more_body", False)
    return b"".join(parts)


async def _plain(send: Send, status: int, text: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": text.encode()})


def run_gate(folder: Path, host: str, port: int, server: str) -> None:
    """Let nodes in until the process is stopped."""
    config = uvicorn.Config(
        Gate(server, folder / CA), host=host, port=port, log_level="warning", lifespan="off", server_header=False,
        limit_concurrency=AT_ONCE,
        ssl_certfile=str(folder / CERTIFICATE), ssl_keyfile=str(folder / KEY),
    )  # fmt: skip
    asyncio.run(uvicorn.Server(config).serve())
