"""EASE (Steck, WWW 2019): a linear item-item model in closed form, from the summed Gram matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmosaic.methods.base import Entry
from fedmosaic.methods.closed_form import zero_diagonal
from fedmosaic.methods.pair_form import F64, PairForm

RIDGE = 10.0  # under an epsilon, where every history counts for one


class EASE(PairForm):
    """score(u, ·) = r_u B,  B = I - P diag(1 / P),  P = (R'R + lam I)^-1, diagonal of B zero."""

    lam: float = Field(default=500.0, gt=0, description=f"ridge penalty; under an epsilon it is {RIDGE:g}")

    def solved(self, g: F64) -> npt.NDArray[np.float32]:
        """Invert the summed Gram matrix."""
        return zero_diagonal(g, self.lam if self.epsilon is None else RIDGE)


METHODS = (
    Entry(
        "ease",
        "Linear item-item model in closed form",
        "Steck, Embarrassingly shallow autoencoders, WWW 2019",
        EASE,
        expect={"ml-100k": (66.3, 38.5)},
    ),
)
