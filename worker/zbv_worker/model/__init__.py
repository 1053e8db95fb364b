"""What a model offers to the worker, how a run names one, and checks of its answers.

A rank's running stages are in :mod:`zbv_worker.stage`, ready-made models in :mod:`zbv_worker.models`.
"""

from __future__ import annotations

from zbv_worker.model.model import Model
from zbv_worker.model.protocol import (
    Evaluated,
    Layered,
    Microbatch,
    NamedOptimizer,
    PipelineModel,
    Scheduled,
    Shaped,
    StatefulData,
    Tied,
    Weighted,
    Whole,
)
from zbv_worker.model.spec import ModelSpec

__all__ = [
    "Evaluated",
    "Layered",
    "Microbatch",
    "Model",
    "ModelSpec",
    "NamedOptimizer",
    "PipelineModel",
    "Scheduled",
    "Shaped",
    "StatefulData",
    "Tied",
    "Weighted",
    "Whole",
]
