"""A plan with the interface of torchtitan's pipeline schedules: :class:`PlanSchedule`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from zbv_worker.errors import InvalidRun, WorkerError, naming_errors
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD, Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.failures.failures import Failures
from zbv_worker.gradients.fully_sharded import FullySharded
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.batch import StepData
from zbv_worker.pipeline.connecting import PipelineOptions, RankDevice
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.nccl_operations import NCCL_LOOK_AHEAD

_LEAVE_SECONDS = 10.0
"""How long a process that ends waits for its peers to receive what it sent."""


class PlanSchedule:
    """Runs a plan when torchtitan's trainer or validator calls ``step`` or ``eval``; both are collective.

    The trainer materialises and initialises the parameters after it has got the schedule, so everything that
    refers to them is made in the first call.

    Parameters
    ----------
    parts
        This rank's modules by stage.
    loss_fn
        torchtitan's loss: takes output, target and keywords; returns the loss and metrics. It is already
        divided by the tokens of the whole batch, so gradients are added up over microbatches and ranks.
    """

    def __init__(
        self,
        options: PipelineOptions,
        plan: RankPlan,
        parts: Mapping[int, nn.Module],
        loss_fn: Callable[..., Any],
        transport: ConnectedTransport,
        place: RankDevice,
    ):
        self._options = options
        self._plan = plan
        self._parts = parts
        self._loss_fn = loss_fn
        self._loss_keywords: Mapping[str, Any] = {}
        self._transport = transport
        self._place = place
        self._data = StepData()
        self._steps = 0
        self._failures = Failures(transport.control, options.timeout, options.patience)
        self._failures.connected(transport)
        self._failures.watch()
        self._sharded: FullySharded | None = None
        self._executor: Executor | None = None
        self._finalizer = weakref.finalize(self, _leave, self._failures, transport)

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Run the plan once; gradients are added to the parameters'.

        Parameters
        ----------
        arg_mbs, kwarg_mbs, target_mbs
            Positional arguments (on ranks with the first stage), keyword arguments, and targets (on ranks
            with the last stage) of every microbatch.
        losses
            Receives the losses of the microbatches, in their order, on ranks with the last stage.
        loss_kwargs
            Keyword arguments of the loss.
        return_outputs
            Must be False; outputs are not kept.

        Raises
        ------
        InvalidRun
            If the microbatches do not fit the plan.
        ChannelTimeout, PeerLost
            If a peer failed.
        """
        if return_outputs:
            raise InvalidRun("found return_outputs=True; a plan's schedule returns no outputs. Pass False.")
        self._data.microbatches = self._microbatches(arg_mbs, kwarg_mbs, target_mbs)
        self._loss_keywords = loss_kwargs or {}
        with self._failures.watched(f"step {self._steps}"):
            executor, sharded = self._started()
            sharded.begin()
            launched = executor.launch(self._steps)
            sharded.finish()
            launched.end()
        if self._steps == 0:
            self._failures.started()
        self._steps += 1
        if losses is not None:
            losses.extend(launched.losses[at].detach() for at in sorted(launched.losses))

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run only the forwards, without gradients; parameters and errors as of :meth:`step`."""
        self._data.microbatches = self._microbatches(arg_mbs, kwarg_mbs, target_mbs)
        self._loss_keywords = loss_kwargs or {}
        with self._failures.watched("evaluating"):
            executor, sharded = self._started()
            found = executor.evaluate(self._steps)
            sharded.free()
        if losses is not None:
            losses.extend(torch.tensor(found[at], device=self._place.device) for at in sorted(found))

    def _microbatches(
        self,
        arguments: Sequence[tuple[Any, ...]] | None,
        keywords: Sequence[Mapping[str, Any]] | None,
        targets: Sequence[Any] | None,
    ) -> list[Microbatch]:
        count = self._plan.microbatches
        for name, given in (("arg_mbs", arguments), ("kwarg_mbs", keywords), ("target_mbs", targets)):
            if given is not None and len(given) != count:
                raise InvalidRun(f"found {len(given)} microbatches in {name}; the plan has {count}.")
        return [
            Microbatch(
                None if arguments is None else _input(arguments[at]),
                None if targets is None else targets[at],
                {} if keywords is None else dict(keywords[at]),
            )
            for at in range(count)
        ]

    def _started(self) -> tuple[Executor, FullySharded]:
        if self._executor is None or self._sharded is None:
            self._sharded = FullySharded(self._parts, None)
            self._require_sharded(self._sharded.parameters)
            self._executor = Executor(
                self._plan,
                {index: self._stage(index, module, self._sharded) for index, module in self._parts.items()},
                self._data,
                self._transport,
                device=self._place.device,
                timeout=self._options.timeout,
                options=ExecutorOptions(
                    look_ahead=NCCL_LOOK_AHEAD if self._place.backend == "nccl" else DEFAULT_LOOK_AHEAD,
                    on_stage_done=self._sharded.stage_done,
                    startup_timeout=self._options.startup_timeout,
                ),
            )
        return self._executor, self._sharded

    def _stage(self, index: int, module: nn.Module, sharded: FullySharded) -> Stage:
        n_stages = self._plan.placement.n_stages
        return _ShardedStage(
            sharded,
            index,
            n_stages,
            module,
            1,  # the loss is already divided
            self._loss if index == n_stages - 1 else None,
            is_recomputed=self._plan.cut.recomputes(index),
        )

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss: Tensor = self._loss_fn(output, target, **self._loss_keywords)[0]
        return loss

    def _require_sharded(self, managed: set[nn.Parameter]) -> None:
        """Several ranks with the same stages need ``fully_shard`` to sum their gradients."""
        if self._transport.layout.columns == 1:
            return
        for stage, module in self._parts.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter not in managed:
                    raise InvalidRun(
                        f"stage {stage}: the parameter {name} is outside of fully_shard, so its gradients "
                        f"would not be summed over the {self._transport.layout.columns} ranks of the stage. "
                        f"Apply fully_shard to it in the spec's parallelize_fn."
                    )


class _ShardedStage(Stage):
    """A stage whose W's are added up in the dtype in which ``fully_shard`` sums over ranks."""

    def __init__(self, sharded: FullySharded, index: int, *arguments: Any, **options: Any):
        super().__init__(index, *arguments, **options)
        self._sharded = sharded

    def backward_weight(self, microbatch: int) -> None:
        super().backward_weight(microbatch)
        self._sharded.widen(self.index)


def _input(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if len(arguments) == 1 else tuple(arguments)


def _leave(failures: Failures, transport: ConnectedTransport) -> None:
    """Let the peers receive what this rank has sent, when the process ends."""
    if not failures.has_failed:
        failures.stop_watching()
        with suppress(TimeoutError, ConnectionError, WorkerError), naming_errors(transport.rank, "leaving"):
            transport.flush(_LEAVE_SECONDS)
