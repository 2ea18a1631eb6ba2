"""How programs that run for long end: as well by SIGTERM as by Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def ending() -> Iterator[None]:
    """Let SIGTERM end a program as Ctrl-C does: lines are closed, and the other side knows at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = None
    with suppress(ValueError):  # not in the main thread: whoever started that ends it
        before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
