"""Compiled draws of noise. Imported where they are first used: Numba takes its time."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmosaic.core import keys
from fedmosaic.core.compiler import entry, piece
from fedmosaic.core.fixed_point import SCALE

_mix = piece(inline="always")(keys.mix)
_GOLDEN = keys.GOLDEN
_S32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
PAIRS = 512  # pairs of places that are drawn together: their loops vectorise, and they stay in the cache


@entry()
def add_noise(total: Any, client_keys: Any, scale: Any, laplace: Any, together: Any, first: Any, last: Any) -> None:
    """A 64-bit word per client and pair of places; its halves are the two draws. Every draw is rounded by itself."""
    for block in range(first, last):
        words, sums = np.empty((2, PAIRS), np.uint32), np.zeros((2, PAIRS), np.float64)
        number, draws = np.empty(PAIRS, np.float32), np.empty((2, PAIRS), np.float32)
        for c in range(client_keys.size):
            state = client_keys[c] + np.uint64(block * PAIRS) * _GOLDEN
            for j in range(PAIRS):
                state += _GOLDEN
                word = _mix(state)
                words[0, j], words[1, j] = np.uint32(word >> _S32), np.uint32(word & _LOW)
            if laplace:
                for side in range(2):
                    _laplace(words[side], number, draws[side])
            else:
                _gaussian(words[0], words[1], number, draws[0], draws[1])
            for side in range(2):
                for j in range(PAIRS):
                    sums[side, j] += np.floor(np.float64(scale * draws[side, j]) * SCALE + 0.5)
            if (c + 1) % together == 0 or c + 1 == client_keys.size:
                for side in range(2):
                    for j in range(min(PAIRS, (total.size - side - 2 * block * PAIRS + 1) // 2)):
                        total[2 * (block * PAIRS + j) + side] += np.int64(sums[side, j])
                sums[:] = 0


@entry()
def normal_rows(out: Any, row_keys: Any) -> None:
    """out[k] <- standard normal draws of the key of row k; a word per pair of numbers."""
    pairs = (out.shape[1] + 1) // 2
    words, draws = np.empty((2, pairs), np.uint32), np.empty((2, pairs), np.float32)
    number = np.empty(pairs, np.float32)
    for k in range(row_keys.size):
        state = row_keys[k]
        for j in range(pairs):
            state += _GOLDEN
            word = _mix(state)
            words[0, j], words[1, j] = np.uint32(word >> _S32), np.uint32(word & _LOW)
        _gaussian(words[0], words[1], number, draws[0], draws[1])
        for j in range(out.shape[1]):
            out[k, j] = draws[j % 2, j // 2]


@piece()
def _laplace(words: Any, number: Any, draws: Any) -> None:
    """draw <- ± -log u, from 31 bits and one for the sign."""
    for j in range(number.size):
        number[j] = np.float32(np.int32(words[j] >> np.uint32(1))) + np.float32(1)
    _minus_log(number, np.float32(31), draws)
    for j in range(number.size):
        draws[j] *= np.float32(np.int32(words[j] & np.uint32(1)) * 2 - 1)


@piece()
def _gaussian(words: Any, turns: Any, number: Any, draws: Any, others: Any) -> None:
    """draws, others <- sqrt(-2 log u) · (cos v, sin v) (Box & Muller 1958).

    The angle is within an eighth of a turn, where few terms of the series suffice; one bit of `turns` adds a quarter,
    one a half. That leaves no branch and no call, so the loop vectorises.
    """
    for j in range(number.size):
        number[j] = np.float32(np.int32(words[j] >> np.uint32(1))) + np.float32(1)
    _minus_log(number, np.float32(31), draws)
    for j in range(number.size):
        v = np.float32(np.int32(turns[j] >> np.uint32(2)) - np.int32(1 << 29)) * np.float32(np.pi / (1 << 31))
        q = v * v
        tail = np.float32(1 / 120) - q * (np.float32(1 / 5040) - q * np.float32(1 / 362880))
        sin = v * (np.float32(1) - q * (np.float32(1 / 6) - q * tail))
        tail = np.float32(1 / 24) - q * (np.float32(1 / 720) - q * np.float32(1 / 40320))
        cos = np.float32(1) - q * (np.float32(1 / 2) - q * tail)
        quarter = np.float32(np.int32(turns[j] & np.uint32(1)))
        radius = np.sqrt(np.float32(2) * draws[j]) * np.float32(np.int32(turns[j] & np.uint32(2)) - 1)
        draws[j] = radius * (cos * (np.float32(1) - quarter) - sin * quarter)
        others[j] = radius * (sin * (np.float32(1) - quarter) + cos * quarter)


@piece(error_model="numpy", fastmath={"nnan"})  # checks for zero or NaN would not vectorise
def _minus_log(number: Any, power: Any, result: Any) -> None:
    """result <- -log(number / 2^power): the exponent is read off the bits, the rest is 2 atanh((m - 1) / (m + 1))."""
    bits = number.view(np.int32)
    for j in range(number.size):
        result[j] = np.float32((bits[j] >> 23) - 127)
        bits[j] = (bits[j] & np.int32(0x7FFFFF)) | np.int32(0x3F800000)  # the same number, in [1, 2)
    for j in range(number.size):
        s = (number[j] - np.float32(1.4142135)) / (number[j] + np.float32(1.4142135))  # |s| < 0.172
        q = s * s
        tail = q * (np.float32(1 / 3) + q * (np.float32(1 / 5) + q * (np.float32(1 / 7) + q * np.float32(1 / 9))))
        whole = (power - result[j] - np.float32(0.5)) * np.float32(0.6931472)
        result[j] = max(whole - np.float32(2) * (s + s * tail), np.float32(0))


@entry(fastmath={"contract", "reassoc", "nsz", "arcp"})
def squares_within(values: Any, low: Any, high: Any) -> Any:
    """The sum of squares of numbers that are cut to [low, high]; NaN if one is."""
    total = 0.0
    for i in range(values.size):
        kept = min(max(values[i], low), high) if values[i] == values[i] else values[i]
        total += kept * kept
    return total


@entry()
def add_within(total: Any, values: Any, low: Any, high: Any, factor: Any) -> None:
    """total += factor · (numbers cut to [low, high]); most are zero, and stay unwritten."""
    for i in range(values.size):
        if values[i] != 0:
            total[i] += factor * min(max(values[i], low), high)
