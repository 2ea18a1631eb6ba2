"""Clipping and noise on what a device sends.

    clip       change <- change · min(1, bound / |change|), one joint norm per client, or (`rows_clipped`) one per row
    laplace    every number sent, touched or not, gains a draw of Laplace(0, scale)
    gaussian   ... of N(0, scale²)

Noise alone is not a guarantee: without a bound on how far one interaction can move the upload (`clip`), no epsilon
follows from it. PFedRec's "local differential privacy" is such noise: its item rows move by norms of 6 to 17 in a
round, unclipped, beside noise of 0.5 at the strongest. In simulations each draw is a function of (seed, round, client,
place), so every engine adds the same noise. A device draws from a stream of its own (`core/secret.py`): whoever sees
two numbers of the fast generator knows all others.

A server sees only the sum, and the law of the sum is known: one draw from it stands for all the clients' draws,

    Σ Laplace(scale) over n clients ~ scale · (Gamma(n) - Gamma(n))     Σ N(0, scale²) ~ N(0, n · scale²)

which makes noise as cheap for thousands of clients as for one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper
from fedmosaic.algorithm.local import Context
from fedmosaic.algorithm.parameters import F32, Spec
from fedmosaic.algorithm.server import soft_threshold
from fedmosaic.algorithm.upload import F64, I32, Parcel
from fedmosaic.core import keys
from fedmosaic.core.errors import SettingsError, one_of
from fedmosaic.core.fixed_point import SCALE
from fedmosaic.core.ragged import I64
from fedmosaic.core.secret import Stream
from fedmosaic.core.threads import deal, thread_count

_LARGEST = 24.0  # no draw of either kind is larger than this many scales
_EXACT = float(1 << 52)  # whole numbers add exactly in float64 up to here

Kind = Literal["laplace", "gaussian"]
Draws = Literal["each", "summed"]


class NoiseSettings(BaseModel):
    """How a method that adds noise draws it."""

    noise_draws: Draws = Field(
        default="each",
        description="each: every client draws its own, the same numbers as on devices; "
        "summed: their sum is drawn at once, by its law, in a fraction of the time",
    )


@dataclass(frozen=True)
class AddedNoise:
    """Noise on every number of every client's upload."""

    kind: Kind
    scale: float
    draws: Draws = "each"

    def __post_init__(self) -> None:
        one_of("noise", self.kind, ("laplace", "gaussian"))
        one_of("way to draw noise", self.draws, ("each", "summed"))

    def add(self, total: I64, name: str, clients: Any, ctx: Context) -> None:
        """Sum of the clients' noise, in place and in fixed point."""
        if ctx.secret is not None:
            for client in np.ravel(clients):
                total += self._own(ctx.noise(name, int(client)), total.size).reshape(total.shape)
            return
        label = zlib.crc32(name.encode())
        key = keys.derive(seed=ctx.own_seed, purpose=keys.Purpose.NOISE, round=ctx.round, client=clients)
        together = max(1, int(_EXACT / (_LARGEST * self.scale * SCALE)))  # clients whose draws add exactly
        client_keys = keys.fold(key, keys.words(label))
        if self.draws == "summed":
            total += np.floor(self._sum(client_keys, total.shape) * SCALE + 0.5).astype(np.int64)
            return
        from fedmosaic.privacy.compiled import PAIRS, add_noise

        flat, scale, workers = total.reshape(-1), np.float32(self.scale), thread_count()
        cuts = np.linspace(0, -(-flat.size // (2 * PAIRS)), workers + 1).astype(np.int64)
        laplace = self.kind == "laplace"
        deal(lambda w: add_noise(flat, client_keys, scale, laplace, together, cuts[w], cuts[w + 1]), workers)

    def _own(self, stream: Stream | None, count: int) -> I64:
        """A device's own draws, in fixed point."""
        assert stream is not None
        draws = stream.laplace(self.scale, count) if self.kind == "laplace" else stream.gaussian(self.scale, count)
        return np.floor(draws * SCALE + 0.5).astype(np.int64)

    def _sum(self, client_keys: keys.U64, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """One draw per number from the law of the clients' sum; keyed by all of them, in any order."""
        clients, key = client_keys.size, int(np.bitwise_xor.reduce(client_keys))
        rng = np.random.Generator(np.random.Philox(key=key))
        if self.kind == "gaussian":
            return self.scale * sqrt(clients) * rng.standard_normal(shape)
        return self.scale * (rng.standard_gamma(clients, shape) - rng.standard_gamma(clients, shape))


class OneSided:
    """An encoder whose work is all done on the device: rows keep their shape, and the server undoes nothing."""

    whole: ClassVar[bool] = False

    def shape(self, spec: Spec) -> tuple[int, ...]:
        """Rows keep their shape."""
        return spec.shape

    def decode(self, spec: Spec, total: npt.NDArray[np.float64], ctx: Context) -> npt.NDArray[np.float64]:
        """There is nothing to undo."""
        return total


@dataclass(frozen=True)
class Clip(OneSided):
    """Bound the joint norm of everything a client sends."""

    bound: float

    def encode(self, parcel: Parcel) -> Parcel:
        """Scale a client's changes down to the bound."""
        return scaled_to(self.bound, joint_norms(parcel), parcel)


def joint_norms(parcel: Parcel) -> F64:
    """Of everything that each client sends."""
    squares = np.zeros(parcel.clients)
    for name, change in parcel.changes.items():
        norms = np.square(change, dtype=np.float64).reshape(change.shape[0], -1).sum(1)
        squares += np.bincount(parcel.owners[name], norms, minlength=parcel.clients)
    return np.sqrt(squares)


def scaled_to(bound: float | F64, norms: F64, parcel: Parcel) -> Parcel:
    """A parcel whose clients' changes, of these norms, are no larger than a bound (or each client's own)."""
    factor = np.minimum(bound / np.maximum(norms, 1e-30), 1).astype(np.float32)
    changes = {n: v * factor[parcel.owners[n]].reshape(-1, *[1] * (v.ndim - 1)) for n, v in parcel.changes.items()}
    return replace(parcel, changes=changes)


@dataclass(frozen=True)
class ClipRows(OneSided):
    """Bound the norm of every item row that a client sends."""

    bound: float

    def encode(self, parcel: Parcel) -> Parcel:
        """Scale rows down to the bound."""
        changes = dict(parcel.changes)
        for name in parcel.items:
            rows = changes[name]
            norms = np.sqrt(np.square(rows, dtype=np.float64).reshape(rows.shape[0], -1).sum(1))
            factor = np.minimum(self.bound / np.maximum(norms, 1e-30), 1).astype(np.float32)
            changes[name] = rows * factor.reshape(-1, *[1] * (rows.ndim - 1))
        return replace(parcel, changes=changes)


@dataclass(frozen=True)
class ClipValues(OneSided):
    """Bound every number that is sent to ±bound, as FedPerGNN does."""

    bound: float

    def encode(self, parcel: Parcel) -> Parcel:
        """Cut off what is larger."""
        return replace(parcel, changes={n: v.clip(-self.bound, self.bound) for n, v in parcel.changes.items()})


@dataclass(frozen=True)
class PseudoItems(OneSided):
    """Send `count` more item rows, which the client did not train: random numbers with the real ones' mean and spread.

    The rows are drawn by a key of (seed, round, client); on the wire they cannot be told from the rest by size alone.
    """

    count: int

    def encode(self, parcel: Parcel) -> Parcel:
        """Rows of a client's other items, behind all real ones."""
        key = keys.derive(
            seed=parcel.ctx.own_seed, purpose=keys.Purpose.PSEUDO, round=parcel.ctx.round, client=parcel.client_ids
        )
        changes, before, owners = dict(parcel.changes), dict(parcel.before), dict(parcel.owners)
        items = dict(parcel.items)
        for name, of in parcel.items.items():
            change, owner = changes[name], owners[name]
            real = np.flatnonzero((change != 0).any(-1))
            ends = np.searchsorted(owner[real], np.arange(parcel.clients + 1))  # rows stand client by client
            made = []
            for place, mine in enumerate(np.split(real, ends[1:-1])):
                drawn = parcel.ctx.noise("pseudo", name, int(parcel.client_ids[place])) or np.random.Generator(
                    np.random.Philox(key=int(key[place]) ^ zlib.crc32(name.encode()))
                )
                made.append(self._rows(change[mine], of[mine], parcel.ctx.n_items, drawn))
            whose = np.repeat(np.arange(parcel.clients), [which.size for which, _ in made])
            more = np.concatenate([rows for _, rows in made])
            changes[name] = np.concatenate([change, more])
            before[name] = np.concatenate([before[name], np.zeros_like(more)])
            owners[name] = np.concatenate([owner, whose])
            items[name] = np.concatenate([of, *(which for which, _ in made)])
        return replace(parcel, changes=changes, before=before, owners=owners, items=items)

    def _rows(self, values: F32, of: I32, n_items: int, drawn: Stream | np.random.Generator) -> tuple[I32, F32]:
        """Items that are not among those of the given rows, and numbers like theirs."""
        free = np.ones(n_items, dtype=bool)
        free[of] = False
        others = np.flatnonzero(free).astype(np.int32)
        count = min(self.count, others.size) * bool(of.size)
        if isinstance(drawn, Stream):
            chosen = others[drawn.some_of(others.size, count)]
        else:
            chosen = others[drawn.choice(others.size, count, replace=False)]
        if not chosen.size:
            return chosen, np.empty((0, values.shape[1]), np.float32)
        shape, mean = (chosen.size, values.shape[1]), values.mean(dtype=np.float64)
        spread = float(values.std(dtype=np.float64))
        if isinstance(drawn, Stream):
            made = mean + drawn.gaussian(spread, chosen.size * values.shape[1]).reshape(shape)
        else:
            made = drawn.normal(mean, spread, shape)
        return chosen, made.astype(np.float32)


@dataclass(frozen=True)
class SoftThreshold(OneSided):
    """Pull every number of the item rows a client sends towards zero by `size`; small ones become exactly zero."""

    size: float
    whole: ClassVar[bool] = True  # all rows are sent, so all are counted

    def encode(self, parcel: Parcel) -> Parcel:
        """value <- sign(value) · max(|value| - size, 0), on rows that changed."""
        changes = dict(parcel.changes)
        for name in parcel.items:
            before, change = parcel.before[name], changes[name]
            moved = (change != 0).any(1, keepdims=True)
            changes[name] = np.where(moved, soft_threshold(before + change, self.size) - before, change)
        return replace(parcel, changes=changes)


def noisy(kind: Kind, scale: float, draws: Draws = "each") -> Wrapper:
    """Add noise to everything a host sends; a scale of 0 is the host itself.

    kind: `laplace` or `gaussian`. scale: of the law. draws: by every client, or their sum at once.
    """

    def wrap(host: Algorithm) -> Algorithm:
        if not scale:
            return host
        if host.upload.noise is not None:
            raise SettingsError("the uploads carry noise already")
        return replace(host, upload=replace(host.upload, noise=AddedNoise(kind, scale, draws)))

    return wrap


def clipped(bound: float) -> Wrapper:
    """Bound the joint norm of what a client of a host sends."""
    return lambda host: replace(host, upload=replace(host.upload, stack=(*host.upload.stack, Clip(bound))))


def rows_clipped(bound: float) -> Wrapper:
    """Bound the norm of every item row that a client of a host sends."""
    return lambda host: replace(host, upload=replace(host.upload, stack=(*host.upload.stack, ClipRows(bound))))


def sparse_values(size: float) -> Wrapper:
    """Send item tables as values with small numbers made zero; the server does the same after its mean."""

    def wrap(host: Algorithm) -> Algorithm:
        if not size:
            return host
        if host.upload.kind != "value":
            raise SettingsError(f"a soft threshold acts on values; this host uploads {host.upload.kind}")
        upload = replace(host.upload, support="nonzero", stack=(*host.upload.stack, SoftThreshold(size)))
        return replace(host, upload=upload, server=replace(host.server, threshold=size))

    return wrap
