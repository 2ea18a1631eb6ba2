"""Compiled half steps of alternating least squares. Imported where they are first used: Numba takes its time.

Rows of the other side's table are gathered into a block that stays in the cache, and their products are BLAS's; the
systems are solved by Cholesky in place. Nothing is allocated per client.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core.compiler import entry, piece

BLOCK = 256  # gathered rows that are multiplied at once


@piece()
def _gram(table: Any, indices: Any, begin: Any, end: Any, block: Any, part: Any, total: Any, right: Any) -> None:
    """total += sum of y y', right += sum of y, over the rows of a table that are listed in indices[begin:end]."""
    for first in range(begin, end, BLOCK):
        count = min(BLOCK, end - first)
        for k in range(count):
            row = indices[first + k]
            for j in range(table.shape[1]):
                block[k, j] = table[row, j]
                right[j] += table[row, j]
        np.dot(block[:count].T, block[:count], part)
        for i in range(part.shape[0]):
            for j in range(part.shape[1]):
                total[i, j] += part[i, j]


@piece(fastmath={"contract"})
def _solve(matrix: Any, right: Any) -> None:
    """right <- matrix^-1 right for a symmetric positive matrix, whose upper half becomes its factor U, U'U = matrix.

    All inner loops run along rows, so that they vectorise.
    """
    d = right.size
    for j in range(d):
        root = np.sqrt(matrix[j, j])
        for k in range(j, d):
            matrix[j, k] /= root
        for i in range(j + 1, d):
            factor = matrix[j, i]
            for k in range(i, d):
                matrix[i, k] -= factor * matrix[j, k]
    for j in range(d):  # U' z = right
        right[j] /= matrix[j, j]
        for k in range(j + 1, d):
            right[k] -= matrix[j, k] * right[j]
    for j in range(d - 1, -1, -1):  # U x = z
        for k in range(j + 1, d):
            right[j] -= matrix[j, k] * right[k]
        right[j] /= matrix[j, j]


@entry()
def solve_rows(table: Any, indices: Any, offsets: Any, base: Any, ridge: Any, out: Any, low: Any, high: Any) -> None:
    """out[u] <- (base + sum of y y' + ridge[u] I)^-1 sum of y, over the rows y that u lists; rows low <= u < high."""
    d = table.shape[1]
    block, part = np.empty((BLOCK, d), table.dtype), np.empty((d, d), table.dtype)
    matrix = np.empty((d, d), table.dtype)
    for u in range(low, high):
        matrix[:] = base
        for j in range(d):
            matrix[j, j] += ridge[u]
            out[u, j] = 0
        _gram(table, indices, offsets[u], offsets[u + 1], block, part, matrix, out[u])
        _solve(matrix, out[u])


@entry()
def add_products(table: Any, indices: Any, offsets: Any, outer: Any, vector: Any, low: Any, high: Any) -> None:
    """Per row j: outer[j] += sum of x x' (upper triangle, row by row), vector[j] += sum of x, over the x it lists."""
    d = table.shape[1]
    block, part = np.empty((BLOCK, d), table.dtype), np.empty((d, d), table.dtype)
    matrix = np.empty((d, d), table.dtype)
    for j in range(low, high):
        if offsets[j] == offsets[j + 1]:
            continue
        matrix[:] = 0
        _gram(table, indices, offsets[j], offsets[j + 1], block, part, matrix, vector[j])
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
