"""How many directions a table of vectors really uses: its singular values, and two numbers made of them.

    information abundance   sum of σ / largest σ                   1: one direction; d: all alike
    effective rank          exp(entropy of σ / sum of σ)           (Roy & Vetterli 2007)

Embeddings that collapse use few of their dimensions, whatever their width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SMALL = 1e-4  # at or below it a number counts as zero, as in FedRAP's logs


def singular_values(table: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Singular values of a table, largest first."""
    values: npt.NDArray[np.float64] = np.linalg.svd(np.asarray(table, dtype=np.float64), compute_uv=False)
    return values


def information_abundance(table: npt.NDArray[np.floating]) -> float:
    """Sum of the singular values over the largest.

    >>> round(information_abundance(np.eye(4)), 6), round(information_abundance(np.ones((5, 3))), 6)
    (4.0, 1.0)
    """
    values = singular_values(table)
    return float(values.sum() / values[0]) if values.size and values[0] > 0 else 0.0


def effective_rank(table: npt.NDArray[np.floating]) -> float:
    """exp of the entropy of the normalised singular values.

    >>> round(effective_rank(np.eye(4)), 6), round(effective_rank(np.ones((5, 3))), 6)
    (4.0, 1.0)
    """
    values = singular_values(table)
    if not values.size or values[0] <= 0:
        return 0.0
    share = values / values.sum()
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))


def table_summary(table: npt.NDArray[np.floating]) -> dict[str, Any]:
    """What a run reports of its common item table."""
    return {
        "width": int(table.shape[1]),
        "information_abundance": round(information_abundance(table), 4),
        "effective_rank": round(effective_rank(table), 4),
        "zeros": round(float((np.abs(table) <= SMALL).mean()), 6),
    }
