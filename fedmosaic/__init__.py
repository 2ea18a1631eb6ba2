"""fedmosaic: federated recommendation.

Every user's history stays on the user's device, devices share only what the common picture needs, and each user gets
recommendations of their own. Names are loaded when first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "FederatedRecommender": "fedmosaic.serving.recommender",
    "Interactions": "fedmosaic.data.interactions",
    "Split": "fedmosaic.data.split",
    "leave_one_out": "fedmosaic.data.split",
    "time_split": "fedmosaic.data.split",
    "ratio_split": "fedmosaic.data.split",
    "load": "fedmosaic.data.sources",
    "evaluate": "fedmosaic.evaluation.evaluate",
    "paired_test": "fedmosaic.evaluation.metrics",
    "bootstrap": "fedmosaic.evaluation.metrics",
    "Settings": "fedmosaic.runs.settings",
    "FedmosaicError": "fedmosaic.core.errors",
    "DataError": "fedmosaic.core.errors",
}

__all__ = [*_PLACES, "__version__"]

if TYPE_CHECKING:
    from fedmosaic.core.errors import DataError, FedmosaicError
    from fedmosaic.data.interactions import Interactions
    from fedmosaic.data.sources import load
    from fedmosaic.data.split import Split, leave_one_out, ratio_split, time_split
    from fedmosaic.evaluation.evaluate import evaluate
    from fedmosaic.evaluation.metrics import bootstrap, paired_test
    from fedmosaic.runs.settings import Settings
    from fedmosaic.serving.recommender import FederatedRecommender


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedmosaic' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
