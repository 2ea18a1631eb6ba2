"""Randomness as a function: every draw is a hash of (seed, round, client, purpose, counter). Public, never secret.

It is fast and repeatable, and invertible: two neighbouring numbers give the key, and with it all others. What must not
be drawn again by others, a device's noise above all, comes from `core.secret`.

No generator is carried around, so a draw does not depend on chunk size, worker count or the order in which clients
are visited. The generator is SplitMix64 in counter form:

    draw_i = mix(key + (i + 1) · GOLDEN)        key = fold of mix over (seed, purpose, round, client)

`mix`, `derive` and `below` are written once, in arithmetic that NumPy arrays and Numba scalars share; compiled code
uses the same functions (`numba.njit(mix)`), so both sides agree to the bit.

>>> key = derive(seed=0, round=3, client=np.arange(2), purpose=Purpose.NEGATIVES)
>>> below(draws(key[0], 5), 100).tolist()
[96, 25, 62, 52, 93]
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


class Purpose(IntEnum):
    """What a draw is for; two purposes never share a stream."""

    COHORT = 1
    NEGATIVES = 2
    SHUFFLE = 3
    CANDIDATES = 4
    INIT = 5
    NOISE = 6
    SYNTHETIC = 7
    BOOTSTRAP = 8
    TIES = 9
    SPLIT = 10
    PROJECTION = 11
    NEIGHBOURS = 12
    DIRECTIONS = 13
    PSEUDO = 14


def mix(x: Any) -> Any:
    """SplitMix64's finaliser: a bijection of 64-bit words that avalanches."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def fold(key: Any, word: Any) -> Any:
    """Absorb one 64-bit word into a key."""
    return mix((key ^ mix(word + GOLDEN)) + GOLDEN)


def below(draw: Any, n: Any) -> Any:
    """Map 64-bit draws to integers in [0, n) by the multiply-shift rule (n < 2^32; bias under n / 2^32)."""
    if isinstance(n, int):
        n = np.uint64(n)
    return ((draw >> _S32) * n) >> _S32


def words(value: Any) -> U64:
    """Integers of any sign as an array of 64-bit words (arrays wrap silently where scalars would warn)."""
    return np.atleast_1d(np.asarray(value, dtype=np.int64)).astype(np.uint64)


def derive(*, seed: int, purpose: Purpose, round: int = 0, client: Any = 0) -> U64:
    """Keys for one client or an array of clients."""
    key = fold(words(0), words(seed))
    key = fold(key, words(int(purpose)))
    key = fold(key, words(round))
    result: U64 = fold(key, words(client))
    return result


def draws(key: Any, count: int, start: int = 0) -> U64:
    """`count` 64-bit draws of one key, from counter `start` on."""
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    result: U64 = mix(words_of(key) + counters * GOLDEN)
    return result


def draws_of(key: U64, count: int) -> U64:
    """`count` draws of each key: shape [keys, count]."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    result: U64 = mix(key[:, None] + counters[None, :])
    return result


def words_of(key: Any) -> U64:
    """A key (scalar or array) as an array, so that arithmetic wraps silently."""
    return np.atleast_1d(np.asarray(key, dtype=np.uint64))


def uniform(draw: Any) -> Any:
    """64-bit draws as float64 in [0, 1)."""
    return (draw >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))


def generator(*, seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
    """A NumPy generator on a derived key, for work that is not per client (initial tables, bootstrap)."""
    return np.random.Generator(
        np.random.Philox(key=int(derive(seed=seed, purpose=purpose, round=round, client=client)[0]))
    )
