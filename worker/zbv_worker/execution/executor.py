"""Walks one rank's action list: waits for an action's input, runs it on its stage, passes its output on.

Nothing here decides what comes next; the plan did. The loop never waits for a send, so a rank stands still
only where the plan says that it needs a tensor of another rank. On a GPU the host only queues, and stays a
few actions ahead of the device (:mod:`zbv_worker.execution.timeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from zbv_worker.execution.binding import Binding, Bound, WalkState
from zbv_worker.execution.computation import (
    Batches,
    Computation,
    Evaluation,
    EvaluationBatches,
    evaluation_of,
)
from zbv_worker.execution.progress import CurrentPlace, Place, mark_error
from zbv_worker.execution.rank_plan import Instruction, RankPlan, forwards, lower
from zbv_worker.execution.timeline import Clock, Overdue, Queued, Record, Timeline, timeline_of
from zbv_worker.execution.wait_errors import overdue, send_failed
from zbv_worker.transport.channels import Inbox, Outbox, TensorSpec, Transport, key_of

__all__ = [
    "DEFAULT_LOOK_AHEAD",
    "Batches",
    "Computation",
    "Evaluation",
    "EvaluationBatches",
    "Executor",
    "Record",
    "StepResult",
]

DEFAULT_LOOK_AHEAD = 3


@dataclass(frozen=True)
class StepResult:
    """One step of one rank.

    Attributes
    ----------
    losses
        By microbatch; empty on ranks without the last stage.
    records
        One per action, in execution order.
    """

    step: int
    losses: dict[int, float]
    records: tuple[Record, ...]

    @property
    def seconds(self) -> float:
        """From the start of the rank's first action to the end of its last."""
        return (self.records[-1].end - self.records[0].start) / 1e9

    @property
    def loss(self) -> float | None:
        """Mean over the microbatches."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None


class Executor:
    """One rank of a pipeline.

    Parameters
    ----------
    stages
        By index: the rank's stages, whose microbatch count is the plan's.
    timeout
        Seconds to wait for any one tensor.
    look_ahead
        Receives kept posted ahead per channel.
    clock
        Of the records, in nanoseconds; the host's monotonic clock.
    place
        Where to say which action the rank has turned to.
    on_stage_done
        Called with a stage's index, in a step, right after the action that adds the last to its gradients.
    timeline
        When actions happen; by default that of the device.

    Raises
    ------
    InvalidRun
        When the plan's lists and channels contradict each other.
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
        look_ahead: int = DEFAULT_LOOK_AHEAD,
        clock: Clock = time.perf_counter_ns,
        place: CurrentPlace | None = None,
        on_stage_done: Callable[[int], None] | None = None,
        timeline: Timeline | None = None,
    ):
        self.plan = plan
        self._rank = transport.rank
        replica, layout = transport.replica, transport.layout
        program = lower(plan, lambda position: layout.global_rank(position, replica))
        self._stages = stages
        self._batches = batches
        self._check = transport.check
        self._timeout = timeout
        self._place = place if place is not None else CurrentPlace()
        self._on_stage_done = on_stage_done
        self._timeline = timeline if timeline is not None else timeline_of(device, clock)
        mine, specs = plan.rank, dict[int, TensorSpec]()
        self._inboxes = {
            key_of(c): Inbox(transport, c, specs, look_ahead) for c in plan.channels if c.receiver == mine
        }
        self._binding = Binding(
            rank=self._rank,
            last_stage=plan.placement.n_stages - 1,
            stages=stages,
            inboxes=self._inboxes,
            outboxes={key_of(c): Outbox(transport, c) for c in plan.channels if c.sender == mine},
            specs=specs,
            device=device,
            timeout=timeout,
        )
        self._program = self._binding.of_step(program)
        self._forwards = forwards(program)

    def step(self, step: int) -> StepResult:
        """Run every action of the plan once; gradients accumulate into the stages' parameters.

        Raises
        ------
        ChannelTimeout, PeerLost
            When a peer does not deliver. The transport is unusable afterwards.
        """
        state = WalkState(step, self._batches.microbatch)
        for inbox in self._inboxes.values():
            inbox.begin()
        records = self._walk(self._program, state)
        return StepResult(step, state.values(), records)

    def evaluate(self, step: int) -> dict[int, float]:
        """Run the plan's forwards alone; losses by microbatch where the last stage is. Nothing else changes.

        Collective over the pipeline, between steps. Modules are in evaluation mode, nothing is kept for a
        backward, and activations go over their channels in the order in which a step sends them. Without
        backwards nothing holds up the first ranks: outputs wait at their senders until they are taken, up to
        one per microbatch.

        Parameters
        ----------
        step
            Handed to the model's ``evaluation_microbatch``, or to ``microbatch`` where it has none.

        Raises
        ------
        ChannelTimeout, PeerLost
            As :meth:`step`.
        InvalidRun
            When a stage cannot be evaluated.
        """
        state = WalkState(step, _evaluation_data(self._batches))
        program = self._binding.of_evaluation(self._forwards)
        with ExitStack() as stack:
            for index, stage in self._stages.items():
                stack.enter_context(evaluation_of(index, stage).evaluating())
            for key, inbox in self._inboxes.items():
                if key.kind == "activation":
                    inbox.begin()
            self._walk(program, state)
            return state.values()

    def _walk(self, program: Iterable[Bound], state: WalkState) -> tuple[Record, ...]:
        """Run instructions in order; what happened when."""
        timeline, place, step = self._timeline, self._place, state.step
        timeline.begin()
        mark, done, check = timeline.mark, self._on_stage_done, self._checked
        limit = timeline.run_ahead
        queued = Queued(limit, self._timeout, self._check) if limit is not None else None
        records = []
        instruction: Instruction | None = None
        value: Tensor | None = None
        try:
            for instruction, take, run, pass_on, is_received in program:
                place.now = (step, instruction)
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
                received = value.nbytes if is_received and value is not None else 0
                records.append(Record(instruction.action, wait, start, end, received))
                value = output = None  # the next action's input may take their place
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
        """Have an error say where it happened, to people and to :func:`place_of_error`."""
        action = None if instruction is None else str(instruction.action)
        mark_error(error, Place(step, action, None if instruction is None else instruction.peer))
        error.add_note(f"rank {self._rank}, step {step}, action {action}")


def _evaluation_data(batches: Batches) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return batches.evaluation_microbatch if isinstance(batches, EvaluationBatches) else batches.microbatch
