"""Bytes between two processes of one machine, over a socket file that only its owner can open.

Flower starts a process for every message. It hands the message over here, to a process that stays, has everything
loaded and owns the node's folder. This module imports nothing heavy, because that short-lived process imports it.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LARGEST = 1 << 30
PATIENCE = 3600.0
LAST_WORDS = 2.0


def relay(address: str, content: bytes, patience: float = PATIENCE) -> bytes:
    """Hand a message over and wait for the answer."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(patience)
        line.connect(address)
        _put(line, content)
        return _take(line)


@contextmanager
def listening(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer what comes in, one message after the other, on the socket whose address is given."""
    with tempfile.TemporaryDirectory(prefix="fedmosaic-") as folder, socket.socket(socket.AF_UNIX) as door:
        address = str(Path(folder) / "node")  # short: socket addresses have little room
        door.bind(address)
        door.listen()
        thread = threading.Thread(target=_serve, args=(door, answer), daemon=True)
        thread.start()
        try:
            yield address
        finally:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            thread.join(LAST_WORDS)  # work that takes longer dies with the process; its state file is whole


def _serve(door: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    while True:
        try:
            line, _ = door.accept()
        except OSError:  # shut down
            return
        with line, suppress(OSError, EOFError):
            line.settimeout(PATIENCE)
            _put(line, answer(_take(line)))


def _put(line: socket.socket, content: bytes) -> None:
    line.sendall(len(content).to_bytes(8, "little") + content)


def _take(line: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(line, 8), "little")
    if size > LARGEST:
        raise EOFError(f"a message of {size} bytes is larger than {LARGEST}")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = line.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side has gone")
        parts += part
    return bytes(parts)
