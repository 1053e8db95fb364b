"""Walks one rank's action list: waits for an action's input, runs it on its stage, passes its output on.

The executor never decides what comes next; the plan does. It never waits for a send, so a rank waits only
where the plan needs a tensor of another rank. On a GPU the host only queues work and stays a few actions
ahead of the device (:mod:`zbv_worker.execution.timeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel

from zbv_worker.execution.binding import Batches, Binding, Bound, Computation, WalkState, evaluation_of
from zbv_worker.execution.progress import CurrentProgress, Progress, attach_progress
from zbv_worker.execution.rank_plan import Instruction, RankPlan, activations, forwards, lower
from zbv_worker.execution.timeline import CudaTimeline, HostTimeline, Overdue, Queued, Record, Timeline
from zbv_worker.execution.wait_errors import overdue, send_failed
from zbv_worker.model.protocol import Evaluated
from zbv_worker.transport.channels import ChannelKey, TensorSpec, Transport, key_of
from zbv_worker.transport.endpoints import Inbox, Outbox

DEFAULT_LOOK_AHEAD = 3


@dataclass(frozen=True)
class StepResult:
    """One step of one rank.

    Attributes
    ----------
    losses
        Losses by microbatch; empty on ranks without the last stage.
    records
        One per action, in execution order.
    """

    step: int
    losses: dict[int, float]
    records: tuple[Record, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the rank's first action to the end of its last."""
        return (self.records[-1].end - self.records[0].start) / 1e9

    @property
    def loss(self) -> float | None:
        """The mean loss over the microbatches; None on ranks without the last stage."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None


@dataclass(frozen=True)
class ExecutorOptions:
    """How an executor runs.

    Attributes
    ----------
    look_ahead
        Receives kept posted ahead per channel.
    progress
        Updated with every action.
    on_stage_done
        Called with a stage's index in each step, right after the last action that adds to its gradients.
    timeline
        Records when actions happen; by default the timeline of the device.
    """

    look_ahead: int = DEFAULT_LOOK_AHEAD
    progress: CurrentProgress | None = None
    on_stage_done: Callable[[int], None] | None = None
    timeline: Timeline | None = None


class Executor:
    """One rank of a pipeline.

    Parameters
    ----------
    stages
        The rank's stages by index, with the plan's number of microbatches.
    timeout
        Seconds to wait for any one tensor.

    Raises
    ------
    InvalidRun
        If the plan's lists and channels contradict each other.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Computation],
        batches: Batches,
        transport: Transport,
        *,
        device: torch.device,
        timeout: float,
        options: ExecutorOptions | None = None,
    ):
        options = options or ExecutorOptions()
        self.plan = plan
        self._rank = transport.rank
        replica, layout = transport.replica, transport.layout
        program = lower(plan, lambda position: layout.global_rank(position, replica))
        self._stages = stages
        self._batches = batches
        self._check = transport.check
        self._timeout = timeout
        self._progress = options.progress or CurrentProgress()
        self._on_stage_done = options.on_stage_done
        self._timeline = options.timeline or (
            CudaTimeline(device) if device.type == "cuda" else HostTimeline()
        )
        specs = dict[int, TensorSpec]()

        def inboxes(channels: Iterable[Channel]) -> dict[ChannelKey, Inbox]:
            return {key_of(c): Inbox(transport, c, specs, options.look_ahead) for c in channels}

        incoming = [channel for channel in plan.channels if channel.receiver == plan.rank]
        self._binding = Binding(
            rank=self._rank,
            last_stage=plan.placement.n_stages - 1,
            stages=stages,
            inboxes=inboxes(incoming),
            outboxes={key_of(c): Outbox(transport, c) for c in plan.channels if c.sender == plan.rank},
            specs=specs,
            device=device,
            timeout=timeout,
        )
        self._program = self._binding.of_step(program)
        self._evaluation = replace(self._binding, inboxes=inboxes(map(activations, incoming)))
        self._forwards = forwards(program)

    def step(self, step: int) -> StepResult:
        """Run every action of the plan once; gradients accumulate into the stages' parameters.

        Raises
        ------
        ChannelTimeout, PeerLost
            If a peer does not deliver. The transport is unusable afterwards.
        """
        state = WalkState(step, self._batches.microbatch)
        for inbox in self._binding.inboxes.values():
            inbox.begin()
        records = self._walk(self._program, state)
        return StepResult(step, state.values(), records)

    def evaluate(self, step: int) -> dict[int, float]:
        """Run only the plan's forwards; returns losses by microbatch on the rank of the last stage.

        Collective over the pipeline, between steps; changes no state of the stages. Modules are in evaluation
        mode, nothing is kept for a backward, and activations are sent in the same order as in a step. Without
        backwards, nothing delays the first ranks: up to one output per microbatch waits at its sender.

        Parameters
        ----------
        step
            Passed to the model's ``evaluation_microbatch``, or to ``microbatch`` if the model has no such
            method.

        Raises
        ------
        ChannelTimeout, PeerLost
            As :meth:`step`.
        InvalidRun
            If a stage cannot be evaluated.
        """
        batches = self._batches
        fetch = batches.evaluation_microbatch if isinstance(batches, Evaluated) else batches.microbatch
        state = WalkState(step, fetch)
        program = self._evaluation.of_evaluation(self._forwards)
        with ExitStack() as stack:
            for index, stage in self._stages.items():
                stack.enter_context(evaluation_of(index, stage).evaluating())
            for inbox in self._evaluation.inboxes.values():
                inbox.begin()
            self._walk(program, state)
            return state.values()

    def _walk(self, program: Iterable[Bound], state: WalkState) -> tuple[Record, ...]:
        """Run instructions in order; returns when each action ran."""
        timeline, progress, step = self._timeline, self._progress, state.step
        timeline.begin()
        mark, done, check = timeline.mark, self._on_stage_done, self._checked
        limit = timeline.run_ahead
        queued = Queued(limit, self._timeout, self._check) if limit is not None else None
        records = []
        instruction: Instruction | None = None
        value: Tensor | None = None
        try:
            for instruction, take, run, pass_on in program:
                progress.now = (step, instruction)
                if queued is not None:
                    queued.make_room()
                wait = mark()
                check(instruction)
                if take is not None:
                    value = take(state)
                start = mark()
                output = run(value, state)
                end = mark()
                if queued is not None:
                    queued.add(instruction, start, end)
                if pass_on is not None and output is not None:
                    pass_on(output, state)
                if done is not None and instruction.completes_stage:
                    done(instruction.action.stage)
                received = 0 if instruction.peer is None or value is None else value.nbytes
                records.append(Record(instruction.action, wait, start, end, received))
                value = output = None  # release the memory before the next action takes its input
            if queued is not None:
                queued.finish()
            return timeline.resolved(records)
        except Overdue as late:
            error = overdue(late, self._rank, self._timeout)
            self._mark(error, step, late.instruction)
            raise error from late
        except Exception as error:
            self._mark(error, step, instruction)
            raise

    def _checked(self, instruction: Instruction) -> None:
        try:
            self._check()
        except (TimeoutError, ConnectionError) as error:
            raise send_failed(error, self._rank, instruction) from error

    def _mark(self, error: Exception, step: int, instruction: Instruction | None) -> None:
        """Record where an error happened: as a note for people, and for :func:`progress_of_error`."""
        action = None if instruction is None else str(instruction.action)
        attach_progress(error, Progress(step, action, None if instruction is None else instruction.peer))
        error.add_note(f"rank {self._rank}, step {step}, action {action}")
