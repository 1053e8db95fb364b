"""What optimizers and checkpoints see of a pipeline: :class:`PipelineState`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.pipeline.checkpoints import PipelineCheckpoints, Stateful, training_state
from zbv_worker.pipeline.failures import Failures
from zbv_worker.pipeline.preparing import Prepared
from zbv_worker.pipeline.rank import PipelineRank
from zbv_worker.pipeline.state import gather_state, load_state, state_of, with_all_names
from zbv_worker.training.checkpoint import DEFAULT_KEPT, DEFAULT_TIMEOUT, CheckpointOptions
from zbv_worker.transport.connected import ConnectedTransport


class PipelineState:
    """The parameters of this rank's layers, the state of the whole model, and checkpoints of both.

    Attributes
    ----------
    modules
        This rank's modules, by stage.
    """

    def __init__(
        self,
        prepared: Prepared,
        own: PipelineRank,
        transport: ConnectedTransport,
        failures: Failures,
        saving: list[PipelineCheckpoints],
        timeout: float,
    ) -> None:
        self.modules: Mapping[int, nn.Module] = MappingProxyType(prepared.modules)
        self._own, self._transport, self._failures = own, transport, failures
        self._layers, self._saving, self._timeout = prepared.layers, saving, timeout
        self._no_parameter = ("no_parameter", nn.Parameter(torch.empty(0, device=own.device)))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the whole model, each parameter once.

        A tied parameter has its first name in the model on every rank that has a copy. A rank without a
        trainable parameter also gets one without elements, because torch's optimizers refuse an empty list.
        """
        named = [*self._own.ties.named_parameters()]
        if any(parameter.requires_grad for _, parameter in named):
            return iter(named)
        self._no_parameter[1].requires_grad_(True)  # the user may have frozen all parameters
        return iter([*named, self._no_parameter])

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns the norm before, a scalar tensor. A parameter that several layers share counts once.
        """
        with self._failures.watched("clipping gradients"):
            return self._own.clip(max_norm)

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters and buffers by their names in the whole model; they are not copied."""
        return state_of(self.modules)

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's parameters and buffers on the CPU, on rank 0; None on other ranks."""
        with self._failures.watched("gathering the model"):
            self._own.join("full_state_dict")
            self._own.check_ties("gathering the model")
            return gather_state(self.modules, self._transport, self._timeout)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict of the whole model; raises :class:`InvalidRun`.

        A tied parameter needs only one of its names.
        """
        load_state(self.modules, with_all_names(state, self._own.ties.names), self._layers)

    def checkpoints(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Stateful | Sequence[Stateful] | None = None,
        *,
        data: Stateful | None = None,
        kept: int = DEFAULT_KEPT,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> PipelineCheckpoints:
        """Resume from the newest checkpoint of a directory, if it has one, and save others there.

        A checkpoint has the parameters, buffers, optimizers, schedules, random number generators (of torch
        and Python), the state of the data, and the number of steps. Its format, and the rules of its
        directory, are those of ``zbv-worker run``. It fits other plans and other numbers of ranks.

        Parameters
        ----------
        directory
            All ranks must share it. A pipeline that uses it later takes it over.
        optimizer
            The optimizer of this rank's parameters, or several.
        schedule
            The learning-rate schedule, or several.
        data
            A data loader with a state, such as torchdata's ``StatefulDataLoader``; saved per rank.
        kept
            How many of the newest checkpoints to keep.
        timeout
            Seconds to wait for the slowest rank's files.

        Raises
        ------
        InvalidRun
            If the newest checkpoint belongs to another model, or the ranks see different directories.
        """
        with self._failures.watched("resuming from a checkpoint"):
            self._own.join("checkpoints")
        options = CheckpointOptions(Path(directory), every=1, kept=kept, timeout=timeout)
        own = self._own
        trained = training_state(self.modules, optimizer, schedule, data, own.ties)
        made = PipelineCheckpoints(options, trained, self._transport, own.device, self._failures, own.join)
        self._saving.append(made)
        return made
