"""Recycled memory: never one block for two readers, used again when it is idle, given back in the end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from fedmosaic.core import buffers

ROWS = (buffers.SMALLEST // 16, 4)  # the smallest table that is recycled


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    buffers.release()
    yield
    buffers.release()


def where(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_a_block_has_one_reader_however_it_is_looked_at() -> None:
    table = buffers.empty(ROWS, np.float32)
    first, view = where(table), table.reshape(-1)[7:].view(np.int32)
    del table
    other = buffers.empty(ROWS, np.float32)
    assert where(other) != first, "a block was handed out although a view of it is still there"
    del view
    assert where(buffers.empty(ROWS, np.float32)) == first


def test_tables_that_change_by_turns_need_two_blocks() -> None:
    state, places = buffers.empty(ROWS, np.float32), set()
    for _ in range(6):
        new = buffers.empty(ROWS, np.float32)
        places |= {where(state), where(new)}
        state = new
    assert len(places) == 2


def test_outgrown_and_spare_blocks_are_given_back() -> None:
    many = [buffers.empty(ROWS, np.float32) for _ in range(3)]
    del many
    grown = buffers.empty((int(1.5 * ROWS[0]), ROWS[1]), np.float32)
    assert len(buffers._blocks) == 1
    assert grown.size == int(1.5 * ROWS[0]) * ROWS[1]


def test_a_small_array_does_not_take_a_large_block() -> None:
    large = buffers.empty((4 * ROWS[0], ROWS[1]), np.float32)
    first = where(large)
    del large
    assert where(buffers.empty(ROWS, np.float32)) != first
    assert where(buffers.empty((4 * ROWS[0], ROWS[1]), np.float32)) == first
    assert buffers.empty((3,), np.int64).base is None


def test_what_is_in_use_outlives_the_release() -> None:
    table = buffers.empty(ROWS, np.float32)
    table[:] = 5
    buffers.release()
    other = buffers.empty(ROWS, np.float32)
    other[:] = 1
    assert (table == 5).all()


def test_freed_memory_can_be_kept_by_the_process() -> None:
    """After it, arrays that come and go fetch no fresh pages; without glibc there is nothing to see."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("needs glibc")
    code = """
import resource, sys
import numpy as np
from fedmosaic.core import buffers
if sys.argv[1] == "keep":
    buffers.keep_freed()
for _ in range(3):
    np.ones(10_000_000, np.float32)
first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(10_000_000, np.float32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
"""
    small_pages = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    faults = {
        way: int(
            subprocess.run([sys.executable, "-c", code, way], env=small_pages, check=True, capture_output=True).stdout
        )
        for way in ("keep", "return")
    }
    assert faults["keep"] < faults["return"] / 5, faults
