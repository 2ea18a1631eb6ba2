"""A seeded generator: power-law popularity, latent taste, any size, produced chunk by chunk.

Each user draws 4 candidates per wanted item from a Zipf law over the catalogue and keeps those with the highest
taste·quality + Gumbel noise. Every draw is keyed by the user, so chunk size does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import polars as pl

from fedmosaic.core import keys
from fedmosaic.core.compiler import entry, piece
from fedmosaic.core.errors import SettingsError
from fedmosaic.core.ragged import I32
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.vocab import Vocab

_mix = piece(inline="always")(keys.mix)
_GOLDEN = keys.GOLDEN
_S11 = np.uint64(11)
TASTES = 8
F32 = npt.NDArray[np.float32]


def synthetic(
    users: int = 2000, items: int = 1000, per_user: int = 20, *, seed: int = 0, skew: float = 1.0
) -> Interactions:
    """Interactions of a made-up shop; user and item ids are integers from 0.

    >>> a = synthetic(50, 40, 5, seed=1)
    >>> len(a), int(np.bincount(a.user).min()), a.digest() == synthetic(50, 40, 5, seed=1).digest()
    (250, 5, True)
    """
    parts = list(synthetic_chunks(users, items, per_user, seed=seed, skew=skew))
    rows = np.concatenate(parts)
    return Interactions(
        users=Vocab(pl.Series("user", np.arange(users)), "user"),
        items=Vocab(pl.Series("item", np.arange(items)), "item"),
        user=np.repeat(np.arange(users, dtype=np.int32), per_user),
        item=rows.ravel(),
        time=np.tile(np.arange(per_user, dtype=np.int64), users),
    )


def synthetic_chunks(
    users: int,
    items: int,
    per_user: int,
    *,
    seed: int = 0,
    skew: float = 1.0,
    clients_per_chunk: int = 65_536,
) -> Iterator[I32]:
    """The item rows of successive groups of users, shape [group, per_user], in order of time."""
    if not 1 <= per_user <= items // 4:
        raise SettingsError(f"per_user must lie between 1 and items / 4 = {items // 4}; got {per_user}")
    rng = keys.generator(seed=seed, purpose=keys.Purpose.SYNTHETIC)
    popular = (np.arange(items) + 1.0) ** -skew
    cumulative = np.cumsum(popular[rng.permutation(items)])
    quality = rng.normal(0, 1, (items, TASTES)).astype(np.float32)
    for begin in range(0, users, clients_per_chunk):
        clients = np.arange(begin, min(begin + clients_per_chunk, users))
        client_keys = keys.derive(seed=seed, purpose=keys.Purpose.SYNTHETIC, client=clients)
        out = np.empty((clients.size, per_user), dtype=np.int32)
        _choose(client_keys, cumulative / cumulative[-1], quality, 4 * per_user, out)
        yield out


@entry()
def _choose(client_keys: keys.U64, cumulative: npt.NDArray[np.float64], quality: F32, tries: int, out: I32) -> None:
    items, width = quality.shape
    met = np.full(items, -1, dtype=np.int64)
    taste = np.empty(width, dtype=np.float64)
    score = np.empty(tries, dtype=np.float64)
    candidate = np.empty(tries, dtype=np.int32)
    for client in range(client_keys.size):
        state = client_keys[client]
        for d in range(width):  # Irwin-Hall: near enough to a normal taste, two draws each
            state += _GOLDEN
            a = np.float64(_mix(state) >> _S11) / 9007199254740992.0
            state += _GOLDEN
            b = np.float64(_mix(state) >> _S11) / 9007199254740992.0
            taste[d] = 2.4 * (a + b - 1.0)
        found = 0
        while found < tries:
            state += _GOLDEN
            item = np.searchsorted(cumulative, np.float64(_mix(state) >> _S11) / 9007199254740992.0, side="right")
            if item >= items or met[item] == client:
                if found < out.shape[1] * 2:  # keep drawing until there is a real choice, then accept repeats as misses
                    continue
                candidate[found], score[found] = 0, -np.inf
                found += 1
                continue
            met[item] = client
            state += _GOLDEN
            u = (np.float64(_mix(state) >> _S11) + 0.5) / 9007199254740992.0
            value = -np.log(-np.log(u))
            for d in range(width):
                value += taste[d] * quality[item, d]
            candidate[found], score[found] = item, value
            found += 1
        best = np.argsort(-score)
        for i in range(out.shape[1]):
            out[client, i] = candidate[best[i]]
