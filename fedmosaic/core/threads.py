"""Threads: how many a process may use, and compiled work that is dealt to them.

Compiled functions that are dealt out release the interpreter's lock, so plain threads run them side by side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "FEDMOSAIC_THREADS"


def thread_count() -> int:
    """Threads this process may use: what `use_threads` or the environment says, else one per processor."""
    said = os.environ.get(VARIABLE, "")
    if said.isdigit() and int(said):
        return int(said)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(count: int) -> None:
    """Limit this process, and those it starts; PyTorch too where it is in use."""
    os.environ[VARIABLE] = str(count)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)


def deal(work: Callable[[int], T], count: int) -> list[T]:
    """work(0) ... work(count - 1), each in a thread of its own; results in order.

    >>> deal(lambda worker: worker * 2, 3)
    [0, 2, 4]
    """
    if count == 1:
        return [work(0)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))
