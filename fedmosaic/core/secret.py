"""Randomness that nobody else can draw again: for everything secret on a device (its noise, its own draws).

`core.keys` is for simulations: whoever sees two numbers of it knows all others. Here every use has a stream of its own,

    key = HKDF-SHA256(secret of the device; federation, use, round, labels)
    stream = ChaCha20 keystream under that key

so two uses share nothing. Noise is bound to the digest of the table that was received, too, so that two tables sent in
one round cannot cancel it. Both primitives are those of `cryptography`; ChaCha20 rather than AES, because it is as fast
and takes constant time on devices without AES instructions.

    uniform    (2 i + 1) / 2^53, i of 52 bits: never 0, never 1
    laplace    ± scale · -log u                            cut at 36 scales
    gaussian   scale · sqrt(-2 log u) · cos, sin (2 pi v)    (Box & Muller 1958), cut at 8.5 scales

Both laws are real ones in floating point; the cuts have a probability of 2^-52 a number.

>>> mine = DeviceSecret(bytes(range(32)), "shop")
>>> mine.stream("noise", 3, "item").uint64(2).tolist() == mine.stream("noise", 3, "item").uint64(2).tolist()
True
>>> mine.seed(3) == mine.seed(4), mine
(False, DeviceSecret(federation='shop'))
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedmosaic.core.errors import SettingsError
from fedmosaic.core.extras import require_extra

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
Label = str | int

KEY = 32  # bytes of a secret


def new_secret() -> bytes:
    """256 bits of the operating system."""
    return secrets.token_bytes(KEY)


def packed(*labels: Label) -> bytes:
    """Labels as bytes, one way only: every part says its kind and length.

    >>> packed("a", "b") == packed("ab"), packed(1) == packed("1")
    (False, False)
    """
    parts = []
    for label in labels:
        body = str(label).encode()
        parts.append(f"{type(label).__name__}:{len(body)}:".encode() + body)
    return b"".join(parts)


class Stream:
    """The keystream of one key, read from its beginning on; every number is read once."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._cipher = Cipher(ChaCha20(key, bytes(16)), None).encryptor()  # a key is used once: its nonce is 0

    def uint64(self, count: int) -> U64:
        """Words of 64 bits."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")

    def laplace(self, scale: float, count: int) -> F64:
        """Draws of Laplace(0, scale)."""
        words = self.uint64(count)
        signs = (words & np.uint64(1)).astype(np.float64) * 2 - 1  # a bit that `_open` leaves
        return signs * (-scale * np.log(_open(words)))

    def gaussian(self, scale: float, count: int) -> F64:
        """Draws of N(0, scale²)."""
        pairs = (count + 1) // 2
        radius = scale * np.sqrt(-2 * np.log(_open(self.uint64(pairs))))
        angle = 2 * np.pi * _open(self.uint64(pairs))
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def some_of(self, count: int, chosen: int) -> npt.NDArray[np.int64]:
        """So many of the numbers below `count`, each set of them as likely, ascending."""
        return np.sort(np.argsort(self.uint64(count), kind="stable")[:chosen])


def _open(words: U64) -> F64:
    """Words as numbers in (0, 1): with 53 bits and a half, the largest would be rounded to 1."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True)
class DeviceSecret:
    """A device's secret in a federation; it is not shown."""

    value: bytes = field(repr=False)
    federation: str

    def __post_init__(self) -> None:
        require_extra("a secret of a device", "cryptography", "cryptography", "privacy")
        if len(self.value) != KEY:
            raise SettingsError(f"the secret of a device has {KEY} bytes, not {len(self.value)}")

    def stream(self, use: str, *labels: Label) -> Stream:
        """The stream of one use; labels keep apart what is drawn for it."""
        return Stream(self._key(use, *labels))

    def seed(self, round: int) -> int:
        """What a round's fast draws (negatives, order of examples) are keyed by; other rounds do not follow from it."""
        return int.from_bytes(self._key("draws", round)[:8], "little") >> 2

    def _key(self, *labels: Label) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), KEY, b"fedmosaic", packed(self.federation, *labels)).derive(self.value)
