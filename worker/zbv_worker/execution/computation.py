"""What the executor asks of whatever computes: stages of a model, or stages that only sleep."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from zbv_worker.errors import InvalidRun


class Batches(Protocol):
    """Where the first stage's inputs and the last stage's targets come from."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Input and target, on the CPU."""


@runtime_checkable
class EvaluationBatches(Protocol):
    """What a model may have beside :class:`Batches`: data for evaluation only."""

    def evaluation_microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Input and target, on the CPU, of the shapes of training."""


class Computation(Protocol):
    """What the executor asks of a stage in a step: see :class:`zbv_worker.execution.stage.Stage`."""

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """F: the output, or the last stage's loss."""

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """B: the input's gradient, None for the first stage."""

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """I: as B."""

    def backward_weight(self, microbatch: int) -> None:
        """W."""


@runtime_checkable
class Evaluation(Protocol):
    """What the executor asks of a stage in an evaluation."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it, the stage's modules behave as in evaluation."""

    def evaluate(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """F that leaves nothing behind."""


def evaluation_of(index: int, stage: Computation) -> Evaluation:
    """A stage as an evaluation sees it; raises :class:`InvalidRun` when it has no model."""
    if not isinstance(stage, Evaluation):
        raise InvalidRun(f"stage {index}: a {type(stage).__name__} cannot be evaluated; it has no model.")
    return stage
