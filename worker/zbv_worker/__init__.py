"""Runs pipeline-parallel training by zbv's plans: your model in five lines, and the command ``zbv-worker``.

::

    import torch, zbv_worker as zbv

    pipe = zbv.Pipeline(plan, layers, loss=loss)
    optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=3e-4)
    for inputs, targets in loader:
        loss = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

Importing the package is fast: torch is imported when something is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbv_worker.errors import (
    ChannelTimeout,
    Disagreement,
    InvalidRun,
    ModelError,
    PeerLost,
    StorageFailed,
    WorkerError,
)

if TYPE_CHECKING:
    from zbv_worker.adapters.transformers import from_transformers
    from zbv_worker.execution.turns import hand_over, in_turns
    from zbv_worker.model.model import Model
    from zbv_worker.model.protocol import Microbatch, Whole
    from zbv_worker.pipeline.agent_run import run_plan
    from zbv_worker.pipeline.pipeline import Pipeline
    from zbv_worker.stage.loss import add_auxiliary_loss

__all__ = [
    "ChannelTimeout",
    "Disagreement",
    "InvalidRun",
    "Microbatch",
    "Model",
    "ModelError",
    "PeerLost",
    "Pipeline",
    "StorageFailed",
    "Whole",
    "WorkerError",
    "add_auxiliary_loss",
    "from_transformers",
    "hand_over",
    "in_turns",
    "run_plan",
]

_HOMES = {
    "Microbatch": "model.protocol",
    "Model": "model.model",
    "Pipeline": "pipeline.pipeline",
    "Whole": "model.protocol",
    "add_auxiliary_loss": "stage.loss",
    "from_transformers": "adapters.transformers",
    "hand_over": "execution.turns",
    "in_turns": "execution.turns",
    "run_plan": "pipeline.agent_run",
}


def __getattr__(name: str) -> Any:
    """Import a class or function when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
