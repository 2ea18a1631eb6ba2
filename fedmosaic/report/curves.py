"""What a run recorded, as curves."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmosaic.folder import RunFolder

HR = "HR@10, drawn (%)"


class Curve(NamedTuple):
    """Validation HR@10 in percent, and where it was measured."""

    rounds: list[float]
    values: list[float]
    seconds: list[float]  # so far
    megabytes: list[float]  # sent so far, per client


def validation_curve(place: Path) -> Curve:
    """The evaluated rounds of a run; empty where nothing was held out for validation."""
    lines = RunFolder(place).metrics()
    seconds = np.cumsum([line["seconds"] for line in lines])
    sent = np.cumsum([line["bytes_up"] for line in lines]) / 1e6
    at = [i for i, line in enumerate(lines) if "validation" in line]
    return Curve(
        [float(lines[i]["round"]) for i in at],
        [100 * lines[i]["validation"]["sampled"]["hr@10"] for i in at],
        [float(seconds[i]) for i in at],
        [float(sent[i]) for i in at],
    )
