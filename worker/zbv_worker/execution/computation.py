"""What the executor needs of a stage, as protocols: stages of a model, or stages that only sleep."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from zbv_worker.errors import InvalidRun


class Batches(Protocol):
    """The source of the first stage's inputs and the last stage's targets."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Input and target, on the CPU."""


class Computation(Protocol):
    """The actions of a stage in a step; see :class:`zbv_worker.stage.stage.Stage`."""

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """Run F; returns the output, or the last stage's loss."""

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Run B; returns the input's gradient, None for the first stage."""

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Run I; returns the input's gradient, None for the first stage."""

    def backward_weight(self, microbatch: int) -> None:
        """Run W."""


@runtime_checkable
class Evaluation(Protocol):
    """The actions of a stage in an evaluation."""

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the stage's modules are in evaluation mode."""

    def evaluate(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Run F without keeping anything for a backward."""


def evaluation_of(index: int, stage: Computation) -> Evaluation:
    """Return a stage that can be evaluated; raises :class:`InvalidRun` if it cannot."""
    if not isinstance(stage, Evaluation):
        raise InvalidRun(f"stage {index}: a {type(stage).__name__} has no model and cannot be evaluated.")
    return stage
