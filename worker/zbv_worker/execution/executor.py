"""Walks one rank's action list: waits for an action's input, runs it on its stage, passes its output on.

Nothing here decides what comes next; the plan did. The loop never waits for a send, so a rank stands still
only where the plan says that it needs a tensor of another rank. On a GPU the host only queues, and stays a
few actions ahead of the device (:mod:`zbv_worker.execution.timeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from zbv_solver.channels import Transfer

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.place import CurrentPlace, Place, mark_error
from zbv_worker.execution.rank_plan import Instruction, Local, RankPlan, Remote, forwards, lower
from zbv_worker.execution.timeline import Clock, Overdue, Queued, Record, Timeline, timeline_of
from zbv_worker.execution.wait_errors import not_received, overdue, send_failed
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


@dataclass
class _State:
    """What one walk carries from action to action."""

    step: int
    microbatch: Callable[[int, int], tuple[Tensor, Tensor]]
    losses: dict[int, Tensor] = field(default_factory=dict)
    handed_over: dict[tuple[str, Transfer], Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)

    def values(self) -> dict[int, float]:
        """The losses, by microbatch; waits for the device."""
        return {microbatch: float(loss) for microbatch, loss in self.losses.items()}


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
        self._program = lower(plan, lambda position: layout.global_rank(position, replica))
        self._forwards = forwards(self._program)
        self._stages = stages
        self._batches = batches
        self._transport = transport
        self._device = device
        self._timeout = timeout
        self._place = place if place is not None else CurrentPlace()
        self._on_stage_done = on_stage_done
        self._timeline = timeline if timeline is not None else timeline_of(device, clock)
        self._last = plan.placement.n_stages - 1
        self._specs: dict[int, TensorSpec] = {}
        mine = plan.rank
        self._outboxes = {key_of(c): Outbox(transport, c) for c in plan.channels if c.sender == mine}
        self._inboxes = {
            key_of(c): Inbox(transport, c, self._specs, look_ahead)
            for c in plan.channels
            if c.receiver == mine
        }

    def step(self, step: int) -> StepResult:
        """Run every action of the plan once; gradients accumulate into the stages' parameters.

        Raises
        ------
        ChannelTimeout, PeerLost
            When a peer does not deliver. The transport is unusable afterwards.
        """
        state = _State(step, self._batches.microbatch)
        for inbox in self._inboxes.values():
            inbox.begin()
        records = self._walk(self._program, self._run, state)
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
        state = _State(step, _evaluation_data(self._batches))
        with ExitStack() as stack:
            for index, stage in self._stages.items():
                stack.enter_context(_evaluation(index, stage).evaluating())
            for key, inbox in self._inboxes.items():
                if key.kind == "activation":
                    inbox.begin()
            self._walk(self._forwards, self._evaluate, state)
            return state.values()

    def _walk(
        self,
        program: Iterable[Instruction],
        run: Callable[[Instruction, Tensor | None, _State], Tensor | None],
        state: _State,
    ) -> tuple[Record, ...]:
        """Run instructions in order; what happened when."""
        timeline, place, step = self._timeline, self._place, state.step
        timeline.begin()
        mark, done = timeline.mark, self._on_stage_done
        limit = timeline.run_ahead
        queued = Queued(limit, self._timeout, self._transport.check) if limit is not None else None
        records = []
        instruction: Instruction | None = None
        try:
            for instruction in program:
                place.now = (step, instruction)
                if queued is not None:
                    queued.make_room()
                wait = mark()
                value = self._input(instruction, state)
                start = mark()
                output = run(instruction, value, state)
                end = mark()
                if queued is not None:
                    queued.add(instruction, start, end)
                self._deliver(instruction, output, state)
                if done is not None and instruction.completes_stage:
                    done(instruction.action.stage)
                received = value.nbytes if value is not None and instruction.peer is not None else 0
                records.append(Record(instruction.action, wait, start, end, received))
                del value, output  # the next action's input may take their place
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

    def _input(self, instruction: Instruction, state: _State) -> Tensor | None:
        source = instruction.source
        try:
            self._transport.check()
        except (TimeoutError, ConnectionError) as error:
            raise send_failed(error, self._rank, instruction) from error
        if isinstance(source, Remote):
            try:
                return self._inboxes[source.channel].take(source.transfer, self._timeout)
            except (TimeoutError, ConnectionError) as error:
                raise not_received(error, self._rank, instruction, self._timeout) from error
        if isinstance(source, Local):
            return state.handed_over.pop((source.kind, source.transfer))
        if instruction.action.letter == "F":
            return self._data(instruction.action.microbatch, state)
        return None

    def _run(self, instruction: Instruction, value: Tensor | None, state: _State) -> Tensor | None:
        action = instruction.action
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.letter == "W":
            stage.backward_weight(microbatch)
            return None
        if action.letter == "I":
            return stage.backward_input(microbatch, value)
        if action.letter == "B":
            return stage.backward(microbatch, value)
        output = stage.forward(
            microbatch, _given(value), self._target(instruction, state), split=instruction.split
        )
        return self._forwarded(instruction, output, state)

    def _evaluate(self, instruction: Instruction, value: Tensor | None, state: _State) -> Tensor | None:
        """In place of :meth:`_run`, of F's only."""
        stage = _evaluation(instruction.action.stage, self._stages[instruction.action.stage])
        output = stage.evaluate(_given(value), self._target(instruction, state))
        return self._forwarded(instruction, output, state)

    def _forwarded(self, instruction: Instruction, output: Tensor, state: _State) -> Tensor | None:
        """What an F hands on: its output, but a loss is kept."""
        action = instruction.action
        if action.stage == self._last:
            state.losses[action.microbatch] = output
            return None
        self._specs[action.stage] = TensorSpec.of(output)
        return output

    def _deliver(self, instruction: Instruction, output: Tensor | None, state: _State) -> None:
        sink = instruction.sink
        if output is None or sink is None:
            return
        if isinstance(sink, Local):
            state.handed_over[sink.kind, sink.transfer] = output
            return
        try:
            self._outboxes[sink.channel].send(sink.transfer, output, str(instruction.action))
        except (TimeoutError, ConnectionError) as error:
            raise send_failed(error, self._rank, instruction) from error

    def _data(self, microbatch: int, state: _State) -> Tensor:
        input, target = state.microbatch(state.step, microbatch)
        if self._last in self._stages:
            state.targets[microbatch] = target
        return self._on_device(input)

    def _target(self, instruction: Instruction, state: _State) -> Tensor | None:
        action = instruction.action
        if action.stage != self._last:
            return None
        target = state.targets.pop(action.microbatch, None)
        if target is None:
            _, target = state.microbatch(state.step, action.microbatch)
        return self._on_device(target)

    def _on_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and tensor.device.type == "cpu":
            # From pageable memory the copy would hold up the host until the device had come to it.
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _mark(self, error: Exception, step: int, instruction: Instruction | None) -> None:
        """Have an error say where it happened, to people and to :func:`place_of_error`."""
        action = None if instruction is None else str(instruction.action)
        mark_error(error, Place(step, action, None if instruction is None else instruction.peer))
        error.add_note(f"rank {self._rank}, step {step}, action {action}")


def _given(value: Tensor | None) -> Tensor:
    if value is None:  # lowering gives every F a source or the data
        raise RuntimeError("found an F without an input")
    return value


def _evaluation_data(batches: Batches) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return batches.evaluation_microbatch if isinstance(batches, EvaluationBatches) else batches.microbatch


def _evaluation(index: int, stage: Computation) -> Evaluation:
    if not isinstance(stage, Evaluation):
        raise InvalidRun(f"stage {index}: a {type(stage).__name__} cannot be evaluated; it has no model.")
    return stage
