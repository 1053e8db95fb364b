"""Checkpoints of a pipeline in the user's own training loop, in the format of ``zbv-worker run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zbv_worker.checkpoints.checkpoint import CheckpointOptions, Checkpoints
from zbv_worker.checkpoints.checkpoint_state import TrainedState
from zbv_worker.errors import Disagreement, InvalidRun, WorkerError
from zbv_worker.failures.failures import Failures
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.gradients.ties import Ties
from zbv_worker.transport.connected import ConnectedTransport


class Stateful(Protocol):
    """Anything with a state that a checkpoint can hold, for instance torchdata's ``StatefulDataLoader``."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Continue from a state."""


class PipelineCheckpoints:
    """The checkpoints of one directory, from :meth:`zbv_worker.Pipeline.checkpoints`.

    Every rank calls its methods, in the same order.

    Attributes
    ----------
    step
        The number of steps that the newest checkpoint contains; 0 without one.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        trained: TrainedState,
        transport: ConnectedTransport,
        device: torch.device,
        failures: Failures,
        join: Callable[[str], None],
    ):
        self._join = join
        self._failures = failures
        self._transport = transport
        self._timeout = options.timeout
        self._checkpoints = Checkpoints(options, trained, transport, device)
        with failures.watched("resuming from a checkpoint"):
            self.step = self._checkpoints.load_newest()

    def steps(self, total: int, *, every: int) -> Iterator[int]:
        """The steps that are still to do, and checkpoints between them.

        ::

            for step in checkpoints.steps(1000, every=100):
                pipe.step(*batch_of(step))
                optimizer.step()
                optimizer.zero_grad()

        Saves a checkpoint after every ``every`` steps and after the last one, and ends when that is complete.
        A loop that is left by ``break`` saves nothing more.
        """
        if every < 1:
            raise InvalidRun(f"found every={every}; must be at least 1.")
        for step in range(self.step, total):
            yield step
            with self._failures.watched("saving a checkpoint"):
                self._checkpoints.check()
            if (step + 1) % every == 0 or step + 1 == total:
                self.save(step + 1)
        self.finish()

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps, or start to: files are written in the background.

        Waits while every rank copies its state, and for the checkpoint before. Gradients are not saved, so
        call it between the optimizer's step and the next step of the pipeline.

        Raises
        ------
        InvalidRun
            If there is a later checkpoint, or this one or the one before cannot be written.
        Disagreement
            If another rank saves another step.
        """
        if step <= self.step:
            raise InvalidRun(
                f"found step {step} to save, and the newest checkpoint is that of step {self.step}; steps "
                f"must increase. Begin the loop at checkpoints.step, or use another directory."
            )
        with self._failures.watched(f"saving the checkpoint of step {step}"):
            self._join("checkpoints.save")
            found = self._transport.gather(step, self._timeout)
            if found != [step] * len(found):
                raise Disagreement(f"the ranks save the steps {found}; every rank must save the same step.")
            self._checkpoints.save(step)
            self.step = step

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; raises like :meth:`save`."""
        with self._failures.watched("waiting for a checkpoint"):
            self._join("checkpoints.finish")
        self.complete()

    def complete(self) -> None:
        """Like :meth:`finish`, within another call."""
        with self._failures.watched("waiting for a checkpoint"):
            self._checkpoints.finish()

    def leave(self) -> None:
        """Let a checkpoint in progress be completed when the process ends; the other ranks need not wait."""
        with suppress(WorkerError, OSError, TimeoutError, ConnectionError):
            self._checkpoints.complete_alone()

    def give_up(self) -> None:
        """Give up a checkpoint in progress, after a failure."""
        self._checkpoints.close()


@dataclass(frozen=True)
class _Data:
    """A data loader in the form in which checkpoints ask for its state."""

    loader: Stateful

    def data_state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_data_state(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def training_state(
    modules: Mapping[int, nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    schedule: Stateful | Sequence[Stateful] | None,
    data: Stateful | None,
    ties: Ties,
    loss_scale: LossScale,
) -> TrainedState:
    """What checkpoints hold of a pipeline's rank.

    Raises
    ------
    InvalidRun
        If something has no state, or the optimizer is not torch's.
    """
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise InvalidRun(
                f"checkpoints: found a {type(each).__name__} as the optimizer; must be a "
                f"torch.optim.Optimizer, or a list of them."
            )
    schedules = list(schedule) if isinstance(schedule, list | tuple) else [schedule]
    for name, stateful in (*(("schedule", each) for each in schedules), ("data", data)):
        if stateful is not None and not hasattr(stateful, "load_state_dict"):
            raise InvalidRun(
                f"checkpoints: {name} is a {type(stateful).__name__}; must have state_dict and "
                f"load_state_dict."
            )
    return TrainedState(
        modules,
        optimizers=optimizers,
        schedules=[each for each in schedules if each is not None],
        loss_scale=loss_scale,
        data=None if data is None else _Data(data),
        ties=ties,
    )
