"""The machine and the process: clocks, memory, and what a bug report needs."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Meter:
    """Wall and processor time of a process so far."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Meter:
        """Read both clocks now."""
        times = os.times()
        return cls(time.perf_counter(), times.user + times.system)

    def since(self, start: Meter) -> tuple[float, float]:
        """Seconds between two readings."""
        return self.wall - start.wall, self.cpu - start.cpu


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


def environment() -> dict[str, Any]:
    """Versions and machine, as a bug report needs them."""
    names = ("fedmosaic", "numpy", "scipy", "numba", "polars", "pydantic", "safetensors", "torch", "flwr")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "byte_order": sys.byteorder,
        "packages": versions,
    }
