"""A secure sum: the server learns the sum of what the parties send, and of each of them nothing but random numbers.

    masked_i = x_i + PRG(b_i) + Σ over neighbours j of ± PRG(s_ij)        modulo 2^64 or 2^32, + where i < j

s_ij is known to i and j alone (X25519 keys that were agreed when they joined, HKDF bound to the round), so pair masks
cancel in the sum; b_i is drawn by i for this round. Neighbours are those of a sparse random graph that everybody
computes alike (Bell et al., CCS 2020). Two exchanges:

    1  every party sends masked_i and, sealed to each neighbour, shares of b_i and of its pair seeds (Shamir, t of k)
    2  the server says who arrived; every party opens its shares: of b_i for who arrived, of s_id for who did not

For every party the server may learn the own seed or the pair seeds, never both: a party opens only the one or the
other, and answers once. With both masks on it, masked_i is uniformly random. Whoever has too few neighbours left counts
as not arrived (`arrived`); fewer than `least` parties, or a seed that cannot be put together any more, end the attempt
(`TooFewError`), and nothing was learnt.

Functions over values: state goes in and comes out, nothing is sent here. Devices, the simulator and the tests run the
same code. A silo is one party. Primitives are those of `cryptography` and MPyC (Shamir's shares).

Assumed: the server follows the protocol in what it tells the parties (that all are told the same arrivals), and fewer
than t neighbours of a party work with it. `docs/privacy.md` says what follows, and why k and t are what they are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import FedmosaicError, SettingsError
from fedmosaic.core.extras import require_extra
from fedmosaic.core.secret import KEY, Stream, new_secret, packed

Words = npt.NDArray[np.unsignedinteger[Any]]
I64 = npt.NDArray[np.int64]
Graph = Mapping[int, tuple[int, ...]]  # per party its neighbours, ascending

NEIGHBOURS = 64  # of a party in a large cohort: a third of all may be lost (docs/privacy.md)
SPARE = 1  # neighbours beyond the threshold that whoever counts has: so many may be lost before the second answer
LEAST = 3  # parties of a sum: of two, each would know the other's part
_NONCE = 12  # bytes, drawn: a sealing key is used once, and would give nothing away if it were used again
_SEED = 16  # bytes of a seed: 128 bits, as strong as the keys that agree on it
_SHARE = _SEED + 1  # bytes of a share: it lies in a field of a little over 128 bits


class TooFewError(FedmosaicError):
    """Too few are left to open a sum; nothing was learnt, and the round is begun again."""


class RevealError(FedmosaicError):
    """A request that would tell more than a sum; it is not answered."""


def check_installed() -> None:
    """Refuse a secure sum where its primitives are missing."""
    require_extra("a secure sum", "cryptography", "cryptography", "privacy")
    require_extra("a secure sum", "mpyc", "mpyc", "privacy")


@dataclass(frozen=True)
class SumTerms:
    """What an attempt at a sum is bound to; all parties know it, and refuse what is bound to something else.

    least: parties without whom nothing is opened. bits: of the numbers that are added. neighbours: of every party, an
    even number; all others where they are not more. attempt: what tells attempts at one round apart: if pair masks of
    one were those of another, a party that arrived in one and was lost in the other would be seen.
    """

    federation: str
    round: int
    table: str  # digest of the parameters that the numbers are about
    parties: tuple[int, ...]
    least: int = LEAST
    bits: Literal[32, 64] = 64
    neighbours: int = NEIGHBOURS
    attempt: str = ""

    def __post_init__(self) -> None:
        if self.neighbours < 2 or self.neighbours % 2:
            raise SettingsError(f"neighbours={self.neighbours}: an even number, two at least")
        if len(set(self.parties)) != len(self.parties) or list(self.parties) != sorted(self.parties):
            raise SettingsError("the parties of a sum are different numbers, ascending")
        if not LEAST <= self.least <= max(len(self.parties), LEAST):
            raise SettingsError(
                f"least={self.least}: a sum is of {LEAST} parties at least (of two, each would know the other's part) "
                f"and of {len(self.parties)} at most, who are all there are"
            )

    @cached_property
    def label(self) -> bytes:
        """Digest of all of it."""
        bound = (self.federation, self.round, self.attempt, self.table)
        return hashlib.sha256(packed(*bound, self.least, self.bits, self.neighbours, *self.parties)).digest()

    @cached_property
    def graph(self) -> Graph:
        """Who is whose neighbour: everybody where they are few; else, in a random order, whoever is some jumps away.

        It follows from the terms, so the server cannot choose it. The jumps are drawn, but for the first, 1, by which
        all hang together: if they were the smallest ones, as in a ring, neighbourhoods would be much alike, and those
        that lose too many would take their neighbours with them.

        >>> found = SumTerms("shop", 1, "", tuple(range(100)), neighbours=6).graph
        >>> {len(row) for row in found.values()}, all(i in found[j] for i, row in found.items() for j in row)
        ({6}, True)
        """
        n, parties = len(self.parties), np.asarray(self.parties)
        if n <= self.neighbours + 1:
            return {i: tuple(j for j in self.parties if j != i) for i in self.parties}
        drawn = Stream(hashlib.sha256(b"graph" + self.label).digest())
        order = parties[np.argsort(drawn.uint64(n), kind="stable")]
        jumps = [1, *(drawn.some_of((n - 1) // 2 - 1, self.neighbours // 2 - 1) + 2).tolist()]
        near = np.sort(np.stack([np.roll(order, turn * jump) for jump in jumps for turn in (1, -1)], axis=1), axis=1)
        return {int(i): tuple(row) for i, row in zip(order, near.tolist(), strict=True)}

    def threshold(self, party: int) -> int:
        """Shares that open a seed of a party: more than half of its neighbours', so no two halves open two seeds."""
        return len(self.graph[party]) // 2 + 1

    @property
    def words(self) -> type[np.unsignedinteger[Any]]:
        """The type of the numbers that are added."""
        return np.uint64 if self.bits == 64 else np.uint32


@dataclass(frozen=True)
class Pair:
    """An X25519 key pair of a party, made when it joins; the private half stays where it was made."""

    private: bytes = field(repr=False)
    public: bytes

    @staticmethod
    def new(private: bytes | None = None) -> Pair:
        """A new one, or the one of a private half that was kept."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        private = new_secret() if private is None else private
        return Pair(private, X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())

    def shared(self, other: bytes) -> bytes:
        """What this party and the owner of another public half know, and nobody else."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        return X25519PrivateKey.from_private_bytes(self.private).exchange(X25519PublicKey.from_public_bytes(other))


@dataclass(frozen=True, eq=False)
class MaskedUpload:
    """What a party sends first: its masked numbers, and to each neighbour a sealed letter with its shares."""

    masked: Words
    letters: Mapping[int, bytes]

    @property
    def nbytes(self) -> int:
        """Its size; the same for all parties with as many neighbours."""
        return int(self.masked.nbytes) + sum(len(letter) for letter in self.letters.values())


@dataclass(frozen=True, eq=False)
class Opening:
    """What a party answers when it is told who arrived.

    own: per neighbour that arrived, the share of its own seed. lost: per neighbour that did not, the seed of the pair.
    theirs: per neighbour i that arrived and its neighbour d that did not, the share of the seed of (i, d).
    """

    own: Mapping[int, int]
    lost: Mapping[int, bytes]
    theirs: Mapping[tuple[int, int], int]

    @property
    def nbytes(self) -> int:
        """Its size, without the names of the parties."""
        return _SHARE * (len(self.own) + len(self.theirs)) + _SEED * len(self.lost)


@dataclass(frozen=True, eq=False)
class Party:
    """One party of one attempt: its seeds. `begin` makes it; `mask` and `open` are its two answers."""

    me: int
    terms: SumTerms
    own: bytes = field(repr=False)
    pairs: Mapping[int, bytes] = field(repr=False)  # seeds of masks
    seals: Mapping[int, bytes] = field(repr=False)  # keys of letters

    @staticmethod
    def begin(me: int, keys: Pair, publics: Mapping[int, bytes], terms: SumTerms, own: bytes | None = None) -> Party:
        """Seeds for an attempt.

        publics: public halves as this party has pinned them when it joined. own: its seed, drawn anew if not given.
        """
        pairs, seals = {}, {}
        for other in terms.graph[me]:
            shared = keys.shared(publics[other])
            pairs[other] = _derived(shared, "mask", terms)[:_SEED]
            seals[other] = _derived(shared, "seal", terms)
        return Party(me, terms, own or new_secret()[:_SEED], pairs, seals)

    def mask(self, values: I64) -> MaskedUpload:
        """The first answer; values are whole numbers whose sum lies within the terms' bits."""
        masked = values.astype(np.int64).astype(self.terms.words)  # two's complement: negative numbers wrap around
        masked += _mask(self.own, masked.size, self.terms)
        for other, seed in self.pairs.items():
            _add(masked, _mask(seed, masked.size, self.terms), self.me < other)
        near = tuple(self.pairs)
        shares = _split([self.own, *self.pairs.values()], self.terms.threshold(self.me), len(near))
        return MaskedUpload(masked, {other: self._sealed(other, shares[at]) for at, other in enumerate(near)})

    def open(self, arrived: Collection[int], letters: Mapping[int, bytes]) -> Opening:
        """The second answer: shares for those who arrived, pair seeds for those who did not.

        letters: of the neighbours that arrived, to this party. Refused unless this party is among those who arrived and
        they are enough; whoever holds a party asks it once for an attempt.
        """
        here, near = set(arrived), self.terms.graph
        if not here <= set(self.terms.parties) or self.me not in here:
            raise RevealError("those who arrived are not of this sum, or this party is not among them")
        there = [j for j in self.pairs if j in here]
        needed = self.terms.threshold(self.me)
        if len(here) < self.terms.least or len(there) < needed:
            raise RevealError(
                f"{len(here)} parties arrived, {len(there)} of them neighbours; this party opens for "
                f"{self.terms.least} and {needed} at least"
            )
        own, theirs = dict[int, int](), dict[tuple[int, int], int]()
        for i in there:
            shares = self._opened(i, letters[i])
            own[i] = shares[0]
            theirs |= {(i, d): share for d, share in zip(near[i], shares[1:], strict=True) if d not in here}
        return Opening(own, {d: seed for d, seed in self.pairs.items() if d not in here}, theirs)

    def _sealed(self, other: int, shares: Sequence[int]) -> bytes:
        content = b"".join(share.to_bytes(_SHARE, "big") for share in shares)
        nonce = new_secret()[:_NONCE]
        sealed: bytes = _cipher(self.seals[other], self.me).encrypt(nonce, content, self._route(self.me, other))
        return nonce + sealed

    def _opened(self, sender: int, letter: bytes) -> list[int]:
        from cryptography.exceptions import InvalidTag

        try:
            cipher, nonce, sealed = _cipher(self.seals[sender], sender), letter[:_NONCE], letter[_NONCE:]
            content = cipher.decrypt(nonce, sealed, self._route(sender, self.me))
        except (InvalidTag, ValueError):
            raise RevealError(f"a letter of party {sender} was not sealed by it for this attempt") from None
        return [int.from_bytes(content[at : at + _SHARE], "big") for at in range(0, len(content), _SHARE)]

    def _route(self, sender: int, reader: int) -> bytes:
        return self.terms.label + struct.pack("<qq", sender, reader)


def arrived(terms: SumTerms, uploads: Collection[int], spare: int = SPARE) -> tuple[int, ...]:
    """Who counts: those who sent, less those with too few neighbours among them, until nothing changes."""
    here, near = set(uploads) & set(terms.parties), terms.graph
    alone = here
    while alone:
        alone = {i for i in here if sum(j in here for j in near[i]) < min(terms.threshold(i) + spare, len(near[i]))}
        here = here - alone
    if len(here) < terms.least:
        raise TooFewError(f"{len(here)} of {len(terms.parties)} parties are left, {terms.least} are needed")
    return tuple(sorted(here))


def letters_to(reader: int, letters: Mapping[int, Mapping[int, bytes]], here: Collection[int]) -> dict[int, bytes]:
    """Of all letters, by sender and reader, those of whoever arrived to one of them."""
    return {i: letters[i][reader] for i in here if reader in letters[i]}


def can_open(terms: SumTerms, here: Sequence[int], openings: Collection[int]) -> bool:
    """Whether some openings are enough: of every party that arrived, as many neighbours' as open a seed."""
    near = terms.graph
    return all(sum(j in openings for j in near[i]) >= terms.threshold(i) for i in here)


def opened(terms: SumTerms, masked: Words, here: Sequence[int], openings: Mapping[int, Opening]) -> I64:
    """The sum of the numbers of all who arrived; some of them may be lost before they open anything.

    masked: the sum of what they sent.
    """
    near, total = terms.graph, masked.astype(terms.words)
    gone = set(terms.parties) - set(here)
    for i in here:
        needed = terms.threshold(i)
        places = {j: at for at, j in enumerate(near[i], 1)}  # whose share lies at which point
        shares = {places[j]: openings[j].own[i] for j in near[i] if j in openings}
        total -= _mask(_joined(shares, needed, f"the own seed of party {i}"), total.size, terms)
        for d in (d for d in near[i] if d in gone):
            if i in openings:
                seed = openings[i].lost[d]
            else:
                held = {places[j]: openings[j].theirs[i, d] for j in near[i] if j in openings}
                seed = _joined(held, needed, f"the seed of the pair ({i}, {d})")
            _add(total, _mask(seed, total.size, terms), not i < d)
    signed: I64 = total.view(np.int64 if terms.bits == 64 else np.int32).astype(np.int64)
    return signed


def simulated(
    values: Callable[[int], I64], terms: SumTerms, lost: Collection[int] = (), late: Collection[int] = ()
) -> tuple[I64, tuple[int, ...], int]:
    """All of it in one process: the sum, whose it is, and the bytes that each of them sent.

    values: of a party; asked once for each. lost: parties that never send. late: parties that send, and are gone before
    they open anything.

    >>> total, whose, _ = simulated(lambda i: np.array([i, -2 * i]), SumTerms("shop", 1, "", tuple(range(7))), lost=[4])
    >>> total.tolist(), whose
    ([17, -34], (0, 1, 2, 3, 5, 6))
    """
    check_installed()
    keys = {i: Pair.new() for i in terms.parties}
    publics = {i: pair.public for i, pair in keys.items()}
    here = arrived(terms, [i for i in terms.parties if i not in lost])
    parties = {i: Party.begin(i, keys[i], publics, terms) for i in here}
    masked, letters, size = np.zeros(0, terms.words), dict[int, Mapping[int, bytes]](), 0
    for i, party in parties.items():
        upload = party.mask(values(i))
        masked = masked + upload.masked if masked.size else upload.masked
        letters[i], size = upload.letters, upload.nbytes
    openings = {i: parties[i].open(here, letters_to(i, letters, here)) for i in here if i not in late}
    size += max((opening.nbytes for opening in openings.values()), default=0)
    return opened(terms, masked, here, openings), here, size


def _derived(shared: bytes, use: str, terms: SumTerms) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY, b"fedmosaic secure sum", packed(use) + terms.label).derive(shared)


def _cipher(key: bytes, sender: int) -> Any:
    """A sealing key for each direction."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(hashlib.sha256(key + struct.pack("<q", sender)).digest())


def _mask(seed: bytes, count: int, terms: SumTerms) -> Words:
    stream = Stream(hashlib.sha256(b"mask" + seed).digest())
    return stream.uint64(count) if terms.bits == 64 else stream.uint64(-(-count // 2)).view("<u4")[:count]


def _add(total: Words, mask: Words, plus: bool) -> None:
    if plus:
        total += mask
    else:
        total -= mask


@cache
def _field() -> Any:
    from mpyc.finfields import GF

    return GF(2**128 + 51)  # the least prime above all seeds


def _split(seeds: Sequence[bytes], threshold: int, count: int) -> list[list[int]]:
    """Shares of every seed for every neighbour, any `threshold` of which give it back."""
    from mpyc.thresha import random_split

    shares: list[list[int]] = random_split(_field(), [int.from_bytes(s, "big") for s in seeds], threshold - 1, count)
    return shares


def _joined(shares: Mapping[int, int], needed: int, what: str) -> bytes:
    """A seed from its shares, by the points at which they lie."""
    from mpyc.thresha import recombine

    if len(shares) < needed:
        raise TooFewError(f"{len(shares)} shares of {what} are left, {needed} are needed")
    some = sorted(shares.items())[:needed]
    value = int(recombine(_field(), [(at, [share]) for at, share in some])[0]) % int(_field().modulus)
    if value >> (8 * _SEED):
        raise TooFewError(f"the shares of {what} do not fit together: somebody sent others")
    return value.to_bytes(_SEED, "big")
