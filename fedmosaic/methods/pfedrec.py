"""PFedRec: dual personalisation. A private score function, and item rows that every device tunes for itself.

For every batch first the score function takes a step with the items held still, then the items with the score function
held still. The tables are averaged on the server; a device answers with the rows it tuned (algorithm/wrappers/dual.py).

Paper: Zhang et al., Dual personalization on federated recommendation, IJCAI 2023. Settings: those of FedMF.
Under the strict pool it is below FedMF, under the paper's pool above it: docs/leak.md says why.
"""

from __future__ import annotations

from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.methods.base import Entry, federation
from fedmosaic.methods.fedmf import LinearSettings, linear

PAPER = "Zhang et al., Dual personalization on federated recommendation, IJCAI 2023"

METHODS = (
    Entry(
        "pfedrec",
        "Dual personalisation: private score function, locally tuned item rows",
        PAPER,
        LinearSettings,
        lambda s: federation(s, linear(s), dual()),
        expect={"ml-100k ties=file": (56.4, 33.6)},
    ),
)
