"""The one place that code of your own imports from: methods, models, metrics, data sources, reductions, engines.

    from fedmosaic import extend as fm

    register(Entry(...))                       a method          run mine ml-100k --import my.py
    register_source(OwnSource(...))            a data set        run fedmf mine --import my.py
    register_metric("name", Metric(...))       a metric          select=full:name@10
    register_reduction("median", ...)          a reduction       Server("median")
    register_engine("name", factory)           an engine         engine=name

Begin with examples/own_algorithm.py. An installed package does the same by entry points: groups `fedmosaic.methods`
(an `Entry`) and `fedmosaic.sources` (an `OwnSource`). A wrapper needs no name: it is a function Algorithm -> Algorithm.
What a model is given (`View`, `Batch`, `Context`) is explained in their docstrings; `check_engines`, `check_chunks` and
`check_privacy` hold it to the laws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmosaic.algorithm.algorithm import Algorithm, Wrapper, compose
from fedmosaic.algorithm.local import SGD, Adagrad, Adam, Context, Decay, Move, Pass, PerItem, Phase, Schedule, StepRule
from fedmosaic.algorithm.models.linear import LinearScorer
from fedmosaic.algorithm.models.ncf import NCF, NeuMF, ScoreFunction
from fedmosaic.algorithm.objective import Objective, bce, bpr, mean
from fedmosaic.algorithm.parameters import Axis, Init, Role, Spec
from fedmosaic.algorithm.reduction import Reduction, register_reduction
from fedmosaic.algorithm.server import Server
from fedmosaic.algorithm.upload import Encoder, Parcel, Upload, UploadSum
from fedmosaic.algorithm.view import Batch, Model, View
from fedmosaic.algorithm.wrappers.additive import additive
from fedmosaic.algorithm.wrappers.dual import dual
from fedmosaic.algorithm.wrappers.low_rank import low_rank
from fedmosaic.algorithm.wrappers.mixing import NTKWeight, mixing
from fedmosaic.algorithm.wrappers.sharpness import sharpness_aware
from fedmosaic.data.interactions import Interactions
from fedmosaic.data.sources import OwnSource, register_source
from fedmosaic.data.training_set import TrainingSet
from fedmosaic.engines.choice import register_engine
from fedmosaic.engines.engine import Engine, Refusal
from fedmosaic.engines.federation import Federation
from fedmosaic.engines.task import Outcome, Task
from fedmosaic.evaluation.metrics import Metric, Ranks, register_metric
from fedmosaic.methods.base import Entry, FederatedSettings, federation, one_pass, roles_of
from fedmosaic.methods.closed_form import ClosedForm
from fedmosaic.methods.fedmf import LinearSettings, linear
from fedmosaic.methods.registry import register
from fedmosaic.privacy.noise import clipped, noisy
from fedmosaic.training.method import Method, RoundRecord

if TYPE_CHECKING:
    from fedmosaic.testing import check_chunks, check_engines, check_privacy

__all__ = [
    "NCF", "SGD", "Adagrad", "Adam", "Algorithm", "Axis", "Batch", "ClosedForm", "Context", "Decay", "Encoder",
    "Engine", "Entry", "FederatedSettings", "Federation", "Init", "Interactions", "LinearScorer", "LinearSettings",
    "Method", "Metric", "Model", "Move", "NTKWeight", "NeuMF", "Objective", "Outcome", "OwnSource", "Parcel", "Pass",
    "PerItem", "Phase", "Ranks", "Reduction", "Refusal", "Role", "RoundRecord", "Schedule", "ScoreFunction", "Server",
    "Spec", "StepRule", "Task", "TrainingSet", "Upload", "UploadSum", "View", "Wrapper", "additive", "bce", "bpr",
    "check_chunks", "check_engines", "check_privacy", "clipped", "compose", "dual", "federation", "linear", "low_rank",
    "mean", "mixing", "noisy", "one_pass", "register", "register_engine", "register_metric", "register_reduction",
    "register_source", "roles_of", "sharpness_aware",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("check_chunks", "check_engines", "check_privacy"):  # the laws need every engine, and so PyTorch
        from fedmosaic import testing

        return getattr(testing, name)
    raise AttributeError(f"module 'fedmosaic.extend' has no attribute {name!r}; it has {', '.join(__all__)}")
