"""What a run recorded, as curves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedmosaic.runs.ledger import Record

HR = "HR@10, drawn (%)"


class Curve(NamedTuple):
    """Validation HR@10 in percent, and where it was measured."""

    rounds: list[float]
    values: list[float]
    seconds: list[float]  # so far
    megabytes: list[float]  # sent so far, per client


def validation_curve(record: Record) -> Curve:
    """The evaluated rounds of a run; empty where nothing was held out for validation."""
    columns = {name: np.array(values, dtype=np.float64) for name, values in record.curve.items()}
    at = np.flatnonzero(~np.isnan(columns["validation"]))
    seconds, sent = np.cumsum(columns["seconds"]), np.cumsum(columns["bytes_up"]) / 1e6
    found = (at + 1.0, 100 * columns["validation"][at], seconds[at], sent[at])
    return Curve(*(values.tolist() for values in found))
