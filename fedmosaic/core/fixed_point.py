"""Fixed point: integers add the same in any order and grouping, so a sum does not depend on who is added first."""

from __future__ import annotations

import numpy as np

SCALE = float(1 << 32)  # a resolution of 2.3e-10
LIMIT = float(1 << 20)  # of one client's numbers; no healthy training comes near


def fixed(value: float) -> int:
    """A number in fixed point.

    >>> fixed(0.5) == 2**31
    True
    """
    return int(np.floor(value * SCALE + 0.5))
