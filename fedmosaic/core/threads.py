"""Threads: how many a process may use, and compiled work that is dealt to them.

Compiled functions that are dealt out release the interpreter's lock, so plain threads run them side by side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
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
    """work(0) ... work(count - 1) side by side, the first in this thread; results in order.

    >>> deal(lambda worker: worker * 2, 3)
    [0, 2, 4]
    """
    others = [_pool(count - 1).submit(work, worker) for worker in range(1, count)] if count > 1 else []
    try:
        first = work(0)
    finally:
        wait(others)  # nobody goes on writing into arrays that the caller has given up
    return [first, *(other.result() for other in others)]


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    """Threads that stay: starting them takes as long as a small round."""
    return ThreadPoolExecutor(size, thread_name_prefix="fedmosaic")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of its parent's threads
