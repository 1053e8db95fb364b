"""Runs a plan on PyTorch's own pipelining runtime instead of :mod:`zbv_worker.execution.executor`.

The runtime, ``_PipelineScheduleRuntime``, walks lists of actions like the worker's executor, but notices few
errors in them. This module works around its known traps:

- It looks losses up by run order, so microbatches are relabelled such that the last stage runs them in
  ascending order, and labelled back in all results.
- It matches sends and receives of two ranks by their order, and divides gradients only where the list says
  so. The lists come from :mod:`zbv_solver.export.torch_comms_csv`, and every rank checks the loaded lists
  before anything runs (:mod:`zbv_solver.verify.communication`).
- Its split of the backward and its receive buffers are replaced
  (:mod:`benchmarks.worker.torch_runtime.stage`).
- It infers shapes by running the stages once on uninitialised memory; afterwards buffers (running statistics)
  are restored and gradients removed.
- A compiled module cannot be split, so it is refused.

It holds more memory than the plan: a stage's output from F to its backward, and all inputs of a step at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override
from zbv_solver.errors import InvalidPlan
from zbv_solver.export.torch_comms_csv import lowered
from zbv_solver.export.torch_csv import microbatch_labels, relabelled
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import LETTERS
from zbv_solver.verify.communication import verify_comms
from zbv_worker.errors import ChannelTimeout, InvalidRun, ModelError, PeerLost, WorkerError
from zbv_worker.execution.step import Launched, StepResult
from zbv_worker.execution.timeline import HostTimeline, Record
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.model.checks import checked_microbatch
from zbv_worker.model.protocol import PipelineModel

try:
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    from benchmarks.worker.torch_runtime.stage import StoreStage
except ImportError as error:
    raise InvalidRun(
        f"found torch {torch.__version__}, whose pipelining runtime differs ({error}); needed is that of "
        f"torch 2.13."
    ) from error


class TorchExecutor:
    """One rank on PyTorch's runtime; replaces :class:`zbv_worker.execution.executor.Executor`.

    All ranks must create theirs at the same time, because it opens a process group.

    Parameters
    ----------
    modules
        The rank's stages, by index.
    timeout
        Seconds to wait for any one tensor.

    Raises
    ------
    InvalidRun
        If the plan or a module cannot run this way.
    """

    def __init__(
        self,
        plan: WholePlan,
        rank: int,
        modules: Mapping[int, nn.Module],
        model: PipelineModel,
        *,
        device: torch.device,
        backend: str,
        timeout: float,
    ):
        self._rank = rank
        self._model = model
        self._modules = modules
        self._device = device
        self._timeout = timeout
        self._microbatches = plan.problem.microbatches
        last = plan.problem.n_stages - 1
        self._has_first, self._has_last = 0 in modules, last in modules
        orders = relabelled(plan.orders, last + 1)
        # The original microbatch of every label: the inverse of the permutation.
        self._original: list[int] = microbatch_labels(plan.orders, last + 1).argsort().tolist()
        split = {index: _split_microbatches(orders, index) for index in modules}
        refuse_compiled({index: module for index, module in modules.items() if split[index]})
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self._watch = _Watch(self._original)
        stages = [
            StoreStage(modules[index], index, last + 1, device, group, split[index], self._watch.begin)
            for index in sorted(modules)
        ]
        runtime: Any = _PipelineScheduleRuntime  # torch does not type its constructor
        # Divide losses, not gradients: the runtime would divide gradients per stage, so twice if two stages
        # share a parameter, and it does not know main gradients.
        self.runtime = runtime(stages, self._microbatches, loss_fn=self._share_of_loss, scale_grads=False)
        load(self.runtime, lowered(plan.problem, orders))
        check(self.runtime, plan, orders)
        self.runtime.pipeline_order_with_comms[rank] = _Watched(
            self.runtime.pipeline_order_with_comms[rank], self._watch
        )
        self._is_prepared = False

    def step(self, step: int) -> StepResult:
        """Run every action of the plan once; gradients accumulate into the modules' parameters.

        Raises
        ------
        ChannelTimeout, PeerLost
            If a peer does not deliver. The process group is unusable afterwards.
        """
        inputs, targets = self._batch(step)
        losses: list[Tensor] = []
        try:
            if not self._is_prepared:
                self._prepare(inputs, targets)
            self._watch.arm()
            arguments = () if inputs is None else (inputs,)
            self.runtime.step(*arguments, target=targets, losses=losses, return_outputs=False)
        except Exception as error:
            named = self._named(error, step)
            if named is error:
                raise
            raise named from error
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
            self._watch.end_last()
        whole = [float(loss.detach()) * self._microbatches for loss in losses]
        found = {self._original[at]: loss for at, loss in enumerate(whole)}
        return StepResult(step, dict(sorted(found.items())), tuple(self._watch.records))

    def launch(self, step: int, part: int = 0) -> Launched:
        """Like :meth:`step`, in the form of the worker's executor; waits for a GPU. A step has one part."""
        result = self.step(step)
        losses = {at: torch.tensor(loss, dtype=torch.float64) for at, loss in result.losses.items()}
        return Launched(step, losses, result.records, HostTimeline())

    def _share_of_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._model.loss(output, target) / self._microbatches

    def _batch(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """The step's inputs and targets, each joined to one tensor, which the runtime splits."""
        if not self._has_first and not self._has_last:
            return None, None
        data = [checked_microbatch(self._model.microbatch(step, j)) for j in self._original]
        if any(microbatch.keywords for microbatch in data):
            raise InvalidRun(
                "the microbatch has keyword arguments, which PyTorch's runtime does not pass to layers."
            )
        inputs = self._joined([each.input for each in data], "inputs") if self._has_first else None
        targets = self._joined([each.target for each in data], "targets") if self._has_last else None
        return inputs, targets

    def _joined(self, parts: list[Any], what: str) -> Tensor:
        for part in parts:
            if not isinstance(part, Tensor):
                raise InvalidRun(
                    f"rank {self._rank}: the microbatches' {what} are a {type(part).__name__}; for "
                    f"PyTorch's runtime each must be one tensor."
                )
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1 or () in shapes:
            raise ModelError(
                f"rank {self._rank}: the microbatches' {what} have the shapes {sorted(shapes)}; "
                f"PyTorch's runtime needs equal shapes with a first dimension to join them."
            )
        return torch.cat(parts).to(self._device)

    def _prepare(self, inputs: Tensor | None, targets: Tensor | None) -> None:
        """Let the runtime infer all shapes, and undo the side effects of running the stages for that."""
        modules = self._modules.values()
        kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
        arguments = () if inputs is None else (inputs.tensor_split(self._microbatches)[0],)
        target = None if targets is None else targets.tensor_split(self._microbatches)[0]
        self.runtime._initialize_stages(arguments, {}, target)
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        for module in modules:
            module.zero_grad()
        self._is_prepared = True

    def _named(self, error: Exception, step: int) -> Exception:
        """Convert an error of the runtime to the worker's, with the rank's position."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, WorkerError):
            cause = cause.__cause__
        if isinstance(cause, WorkerError):
            return cause
        action = self._watch.current
        at = f"step {step}, {action}" if action else f"step {step}, between the actions"
        text = str(error).strip().partition("\n")[0]
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        from_transport = timed_out or "gloo" in text.lower() or isinstance(error, dist.DistError)
        if self._watch.is_computing or not from_transport:
            error.add_note(f"rank {self._rank}, {at}")
            return error
        if timed_out:
            return ChannelTimeout(
                f"rank {self._rank} waited {self._timeout:g} s at {at} for {self._peer(action)} ({text}). "
                f"Check that rank; if it is only slow, raise --timeout."
            )
        return PeerLost(
            f"rank {self._rank} waited at {at} for {self._peer(action)}, and the connection broke ({text}). "
            f"Check why that rank ended."
        )

    def _peer(self, action: Any) -> str:
        """The rank that an action waits for."""
        step = _TOWARDS.get(action.computation_type.value) if action is not None else None
        if step is None:
            return "a neighbouring rank"  # at the end of a step, for all sends
        return f"rank {self.runtime.stage_index_to_group_rank[action.stage_index + step]}"


_TOWARDS = {"F": -1, "RECV_F": -1, "SEND_F": 1, "I": 1, "B": 1, "RECV_B": 1, "SEND_B": -1}
"""The stage that an action waits for, relative to its own."""


def load(runtime: Any, lists: Iterable[Iterable[str]]) -> None:
    """Load the lists of all ranks, including communication, into a runtime."""
    actions = {rank: [_Action.from_str(text) for text in texts] for rank, texts in enumerate(lists)}
    try:
        runtime._prepare_schedule_with_comms(actions, format="compute_comms")
    except (AssertionError, ValueError) as error:
        raise InvalidRun(f"PyTorch's runtime rejects the plan: {error}") from error


def check(runtime: Any, plan: WholePlan, orders: Orders) -> None:
    """Check the lists that a runtime has loaded against the plan and against the runtime's own traps.

    Parameters
    ----------
    orders
        The plan's orders with relabelled microbatches.

    Raises
    ------
    InvalidRun
        Names the entry, the rank and the violated rule.
    """
    loaded = runtime.pipeline_order_with_comms
    lists = [[str(action) for action in loaded[rank]] for rank in sorted(loaded)]
    try:
        verify_comms(plan.problem, orders, lists)
    except InvalidPlan as error:
        raise InvalidRun(f"PyTorch's runtime would not run the plan correctly: {error}") from error


def refuse_compiled(modules: Mapping[int, nn.Module]) -> None:
    """Refuse compiled modules in stages whose backward is split; raises :class:`InvalidRun`."""
    for index, module in modules.items():
        for name, part in module.named_modules():
            if isinstance(part, OptimizedModule) or part._compiled_call_impl is not None:
                where = f" ({name})" if name else ""
                raise InvalidRun(
                    f"stage {index} is compiled{where}, but the plan splits its backward into I and W, which "
                    f"a compiled module computes at once. Build the stage without torch.compile, or use a "
                    f"plan with B only."
                )


class _Watch:
    """The runtime's current action, and when every computing action was reached, began and ended.

    Parameters
    ----------
    original
        The plan's microbatch of each of the runtime's.
    """

    def __init__(self, original: Sequence[int]) -> None:
        self.current: Any = None
        self.is_computing = False
        self.records: list[Record] = []
        self._original = original
        self._turned = self._began = self._received = 0
        self._is_armed = False
        # The runtime logs the whole schedule, which can be megabytes, at every error.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

    def arm(self) -> None:
        """Watch the next walk over the list only, because the runtime also iterates over it to print it."""
        self.current, self.is_computing, self._is_armed = None, False, True
        self.records = []

    def disarm(self) -> bool:
        was, self._is_armed = self._is_armed, False
        return was

    def begin(self, received: int) -> None:
        """The current action has its input and begins."""
        self._began, self._received, self.is_computing = time.perf_counter_ns(), received, True

    def turn_to(self, action: Any) -> None:
        """The current action has ended; the next one follows, or None."""
        now = time.perf_counter_ns()
        if self.is_computing:
            letter, microbatch = self.current.computation_type.value, self.current.microbatch_index
            ended = Action(self.current.stage_index, letter, self._original[microbatch])
            self.records.append(Record(ended, self._turned, self._began, now, self._received))
        self.current, self.is_computing, self._turned = action, False, now

    def end_last(self) -> None:
        """Set the end of the last action to now, when the device has completed it."""
        self.records[-1] = self.records[-1]._replace(end=time.perf_counter_ns())


class _Watched(list[Any]):
    """A rank's list that reports the runtime's position, because the runtime offers no hook."""

    def __init__(self, actions: Iterable[Any], watch: _Watch):
        super().__init__(actions)
        self._watch = watch

    @override
    def __iter__(self) -> Iterator[Any]:
        if not self._watch.disarm():
            yield from super().__iter__()
            return
        for action in super().__iter__():
            self._watch.turn_to(action)
            yield action
        self._watch.turn_to(None)


def _split_microbatches(orders: Orders, stage: int) -> frozenset[int]:
    """The microbatches whose backward at a stage is I and W."""
    chosen = (orders.stage == stage) & (orders.letter == LETTERS.index("I"))
    return frozenset(orders.microbatch[chosen].tolist())
