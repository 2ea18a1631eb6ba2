"""fedmosaic: federated recommendation.

Every user's history stays on the user's device, devices share only what the common picture needs, and each user gets
recommendations of their own. Names are loaded when first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

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
    from fedmosaic.core.errors import DataError as DataError
    from fedmosaic.core.errors import FedmosaicError as FedmosaicError
    from fedmosaic.data.interactions import Interactions as Interactions
    from fedmosaic.data.sources import load as load
    from fedmosaic.data.split import Split as Split
    from fedmosaic.data.split import leave_one_out as leave_one_out
    from fedmosaic.data.split import ratio_split as ratio_split
    from fedmosaic.data.split import time_split as time_split
    from fedmosaic.evaluation.evaluate import evaluate as evaluate
    from fedmosaic.evaluation.metrics import bootstrap as bootstrap
    from fedmosaic.evaluation.metrics import paired_test as paired_test
    from fedmosaic.runs.settings import Settings as Settings
    from fedmosaic.serving.recommender import FederatedRecommender as FederatedRecommender


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedmosaic' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
