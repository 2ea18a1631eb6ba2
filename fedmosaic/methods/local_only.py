"""No federation: every device trains a table of its own, and nothing leaves it. The row every table needs.

Under an honest protocol a device alone knows nothing about items it has not met, so this row stays at chance; where it
does not, the protocol leaks (docs/leak.md). Settings: those of FedMF, the local work that of PFedRec.
"""

from __future__ import annotations

from dataclasses import replace

from fedmosaic.algorithm.algorithm import Algorithm
from fedmosaic.algorithm.parameters import Role
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.methods.base import Entry, federation
from fedmosaic.methods.fedmf import LinearSettings, linear


def alone(host: Algorithm) -> Algorithm:
    """Nothing leaves the device: every parameter private."""
    return replace(host, roles=dict.fromkeys(host.specs, Role.PRIVATE))


METHODS = (
    Entry(
        "local-only",
        "No federation: every device trains its own table (the leak's litmus test)",
        "the row every table needs",
        LinearSettings,
        lambda s: federation(s, linear(s), dual(), alone),
        expect={"ml-100k ties=file rounds=30": (10.4, 4.7)},
    ),
)
