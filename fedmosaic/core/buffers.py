"""Large arrays that come and go every round, in memory that is used again.

The system clears every page it hands out, which for tables of gigabytes takes as long as filling them. Here a block
that nobody reads any more is handed out again. A training gives all of them back when it ends.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]
LINE = 64  # bytes of a cache line
SMALLEST = 16 << 20  # bytes; smaller arrays are left to NumPy
SLACK = 1.25  # tables grow a little from round to round; what is not touched costs nothing
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as mallopt(3) numbers them
_blocks: list[Buffer] = []
_lock = threading.Lock()


def _readers(blocks: list[Buffer]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


_NOBODY = _readers([np.empty(1, np.uint8)])[0]  # what is counted where only the list knows of a block


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As np.empty. An array and its views count as readers of their block, wherever they are kept.

    >>> table = empty((1 << 21, 4), np.float32)
    >>> where, table = table.ctypes.data, None
    >>> empty((1 << 21, 4), np.float32).ctypes.data == where
    True
    >>> release()
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    if size < SMALLEST:
        return np.empty(shape, dtype)
    with _lock:
        idle = [i for i, readers in enumerate(_readers(_blocks)) if readers == _NOBODY]
        alike = [i for i in idle if size <= 2 * _blocks[i].size <= 4 * size]
        fitting = min((i for i in alike if _blocks[i].size >= size), key=lambda i: _blocks[i].size, default=None)
        block = np.empty(int(SLACK * size), np.uint8) if fitting is None else _blocks[fitting]
        # one spare block of a size is enough; outgrown ones are given back
        _blocks[:] = [b for i, b in enumerate(_blocks) if i not in alike] + [block]
    return block[:size].view(dtype).reshape(shape)


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As np.empty, beginning at a cache line: rows of 32 numbers then lie in two lines instead of three.

    >>> aligned((3, 32), np.float32).ctypes.data % 64
    0
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    block = np.empty(size + LINE, np.uint8)
    begin = -block.ctypes.data % LINE
    return block[begin : begin + size].view(dtype).reshape(shape)


def keep_freed() -> None:
    """Have the C library keep what is freed for the next request, in blocks of up to 256 MB; larger ones go back.

    For programs that train and end, since it holds for the whole process. Where the library is not glibc, nothing
    happens.
    """
    with suppress(OSError, TypeError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_MMAP_THRESHOLD, 256 << 20)
        set_option(_TRIM_THRESHOLD, 1 << 30)


def release() -> None:
    """Give idle blocks back to the system, and those in use when their last reader goes."""
    with _lock:
        _blocks.clear()
