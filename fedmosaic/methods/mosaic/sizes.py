"""How large the sums of the next-item method are, before any is made."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def full(k: int, m: int, windows: int, features: int = 0, folds: int = 0) -> int:
    """Bytes of the full form's sums, where k of m items predict.

    >>> full(100, 1000, 2)
    1840000
    """
    inputs = k + features
    return 8 * inputs * (windows * (inputs + m) + k) * max(folds, 1)


def factored(k: int, m: int, windows: int, rank: int) -> int:
    """Bytes of the factored form's sums: two that seek bases, and the last.

    >>> factored(100, 1000, 2, 64)
    1382400
    """
    return 8 * rank * (k * (1 + windows) + m * windows + 2 * 2 * k)


def predicting(events: npt.NDArray[np.int64], least: int) -> int:
    """How many items were met often enough to predict others."""
    return int((events >= least).sum()) or int((events > 0).sum())
