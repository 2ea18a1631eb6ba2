"""Compiled half steps of alternating least squares. Imported where they are first used: Numba takes its time.

Rows of the other side's table are gathered into a block that stays in the cache; products are SciPy's BLAS, in the
precision of the table, and systems are solved by Cholesky in place. Nothing large is allocated per client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types
from numba.extending import get_cython_function_address

from fedmosaic.core.compiler import entry, piece

BLOCK = 192  # gathered rows that are multiplied at once
TILE = 64  # OpenBLAS starts threads, which wait for those of ours, for products of more than TILE³ multiplications
STRIP = 16  # rows of a factor that are made at once
N, T = (np.array([ord(letter)], np.uint8) for letter in "NT")


def _blas(name: str) -> Any:
    """A product of SciPy's BLAS, for compiled code: by name, because a function with an address in it is not cached."""
    binding.add_symbol(f"fedmosaic_{name}", get_cython_function_address("scipy.linalg.cython_blas", name))
    return types.ExternalFunction(f"fedmosaic_{name}", types.void(*(types.voidptr,) * 13))


SGEMM, DGEMM = _blas("sgemm"), _blas("dgemm")


@piece()
def _multiply(sign: Any, a: Any, b: Any, c: Any, sides: Any, across: Any) -> None:
    """c += sign · b'a, or sign · b a' (across): m columns of c, n rows of it, depth k; sides = (m, n, k, row length).

    Arrays are flat and begin where the factors do; rows of all three are equally long.
    """
    factor, one = np.full(1, sign, c.dtype), np.ones(1, c.dtype)
    turns = (T.ctypes, N.ctypes) if across else (N.ctypes, T.ctypes)
    m, n, k, wide = sides.ctypes, sides[1:].ctypes, sides[2:].ctypes, sides[3:].ctypes
    given = (*turns, m, n, k, factor.ctypes, a.ctypes, wide, b.ctypes, wide, one.ctypes, c.ctypes, wide)
    if c.itemsize == 4:
        SGEMM(*given)
    else:
        DGEMM(*given)


@piece()
def _products(block: Any, count: Any, across: Any, matrix: Any) -> None:
    """Upper tiles of matrix += Z Z' (across) or Z' Z (else), where Z is the first count rows of the block."""
    d = block.shape[1]
    size, depth, step, deeper = (count, d, d, 1) if across else (d, count, 1, d)
    flat, sides = block.ravel(), np.array([0, 0, 0, d], np.int32)
    for p in range(0, size, TILE):
        for q in range(p, size, TILE):
            for k in range(0, depth, TILE):
                sides[0], sides[1], sides[2] = min(TILE, size - q), min(TILE, size - p), min(TILE, depth - k)
                at = k * deeper
                _multiply(1, flat[at + q * step :], flat[at + p * step :], matrix[p, q:], sides, across)


@piece(fastmath={"contract"})
def _take(target: Any, factor: Any, row: Any) -> None:
    """target -= factor · row."""
    for k in range(target.size):
        target[k] -= factor * row[k]


@piece(fastmath={"contract", "reassoc"})
def _dot(a: Any, b: Any, total: Any) -> Any:
    """total - a·b."""
    for k in range(a.size):
        total -= a[k] * b[k]
    return total


@piece()
def _solve(matrix: Any, right: Any) -> None:
    """right <- A^-1 right, A being the symmetric positive matrix whose upper half begins the given one.

    That half becomes its factor U, U'U = A, a strip of rows at a time: first the rows above are taken off by BLAS.
    """
    n, sides = right.size, np.array([0, 0, 0, matrix.shape[1]], np.int32)
    for p in range(0, n, STRIP):
        last = min(p + STRIP, n)
        sides[0], sides[1], sides[2] = n - p, last - p, p
        above = matrix[0, p:]
        _multiply(-1, above, above, matrix[p, p:], sides, False)
        for j in range(p, last):
            row = matrix[j, j:n]
            root = 1 / np.sqrt(row[0])
            for k in range(row.size):
                row[k] *= root
            for i in range(j + 1, last):
                _take(matrix[i, i:n], matrix[j, i], matrix[j, i:n])
    for j in range(n):  # U' z = right
        right[j] /= matrix[j, j]
        _take(right[j + 1 :], right[j], matrix[j, j + 1 : n])
    for j in range(n - 1, -1, -1):  # U x = z
        right[j] = _dot(matrix[j, j + 1 : n], right[j + 1 :], right[j]) / matrix[j, j]


@piece()
def _gather(table: Any, listed: Any, scale: Any, block: Any, right: Any) -> None:
    """block[k] <- scale · table[listed[k]], right += their sum."""
    for k in range(listed.size):
        source, target = table[listed[k]], block[k]
        for j in range(scale.size):
            value = source[j] * scale[j]
            target[j] = value
            right[j] += value


@piece()
def _gram(table: Any, listed: Any, scale: Any, block: Any, matrix: Any, right: Any) -> None:
    """Upper tiles of matrix += sum of z z', right += sum of z, over z = scale · table[j], j listed."""
    for first in range(0, listed.size, BLOCK):
        part = listed[first : first + BLOCK]
        _gather(table, part, scale, block, right)
        _products(block, part.size, False, matrix)


@entry()
def solve_rows(table: Any, indices: Any, offsets: Any, base: Any, ridge: Any, out: Any, low: Any, high: Any) -> None:
    """out[u] <- (diag(base + ridge[u]) + sum of y y')^-1 sum of y, over the rows y that u lists; rows low <= u < high.

    With s = (base + ridge[u])^-1/2 and Z the listed rows times s, that is s (I + Z'Z)^-1 Z'1 = s Z'(I + ZZ')^-1 1:
    the system has as many unknowns as there are columns, or listed rows, whichever are fewer.
    """
    d = table.shape[1]
    block, matrix = np.empty((max(BLOCK, d), d), table.dtype), np.empty((d, d), table.dtype)
    right, scale = np.empty(d, table.dtype), np.empty(d, table.dtype)
    for u in range(low, high):
        listed = indices[offsets[u] : offsets[u + 1]]
        for j in range(d):
            scale[j] = 1 / np.sqrt(base[j] + ridge[u])
        n = min(d, listed.size)
        x, unknown = out[u], right[:n]
        x[:] = 0
        for i in range(n):
            matrix[i] = 0
            matrix[i, i] = 1
        if n < d:
            _gather(table, listed, scale, block, x)
            _products(block, n, True, matrix)
            unknown[:] = 1
            _solve(matrix, unknown)
            x[:] = 0
            for k in range(n):
                row, weight = block[k], unknown[k]
                for j in range(d):
                    x[j] += weight * row[j]
        else:
            _gram(table, listed, scale, block, matrix, x)
            _solve(matrix, x)
        for j in range(d):
            x[j] *= scale[j]


@entry()
def add_products(table: Any, indices: Any, offsets: Any, outer: Any, vector: Any, low: Any, high: Any) -> None:
    """Per row j: outer[j] += sum of x x' (upper triangle, row by row), vector[j] += sum of x, over the x it lists."""
    d = table.shape[1]
    block, matrix = np.empty((BLOCK, d), table.dtype), np.empty((d, d), table.dtype)
    one = np.ones(d, table.dtype)
    for j in range(low, high):
        if offsets[j] == offsets[j + 1]:
            continue
        matrix[:] = 0
        _gram(table, indices[offsets[j] : offsets[j + 1]], one, block, matrix, vector[j])
        at = 0
        for i in range(d):
            for k in range(i, d):
                outer[j, at] += matrix[i, k]
                at += 1


@entry()
def solve_sums(outer: Any, vector: Any, base: Any, ridge: Any, out: Any, low: Any, high: Any) -> None:
    """out[j] <- (base + outer[j] + ridge[j] I)^-1 vector[j], from upper triangles; rows low <= j < high."""
    d = vector.shape[1]
    matrix = np.empty((d, d), vector.dtype)
    for j in range(low, high):
        at = 0
        for i in range(d):
            for k in range(i, d):
                matrix[i, k] = base[i, k] + outer[j, at]
                at += 1
            matrix[i, i] += ridge[j]
            out[j, i] = vector[j, i]
        _solve(matrix, out[j])
