"""Walks one rank's action list: waits for an action's input, runs it on its stage, passes its output on.

Nothing here decides what comes next; the plan did. The loop never waits for a send, so a rank stands still
only where the plan says that it needs a tensor of another rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from zbv_solver.channels import Transfer
from zbv_solver.orders import Action

from zbv_worker.channels import ChannelKey, Inbox, Outbox, TensorSpec, Transport, key_of
from zbv_worker.errors import ChannelTimeout, PeerLost
from zbv_worker.rank_plan import Instruction, Local, RankPlan, Remote, lower

DEFAULT_LOOK_AHEAD = 3


class Batches(Protocol):
    """Where the first stage's inputs and the last stage's targets come from."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Input and target, on the CPU."""


class Computation(Protocol):
    """What the executor asks of a stage: see :class:`zbv_worker.stage.Stage`."""

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """F: the output, or the last stage's loss."""

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """B: the input's gradient, None for the first stage."""

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """I: as B."""

    def backward_weight(self, microbatch: int) -> None:
        """W."""


class Record(NamedTuple):
    """When an action happened, in nanoseconds of the rank's clock.

    ``wait`` is when the rank turned to the action, ``start`` when its input was there, ``end`` when it was
    done; ``received`` is the size in bytes of an input that came from another rank.
    """

    action: Action
    wait: int
    start: int
    end: int
    received: int = 0


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
class _StepState:
    """What one step carries from action to action."""

    step: int
    losses: dict[int, Tensor] = field(default_factory=dict)
    handed_over: dict[tuple[str, Transfer], Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)


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
        clock: Callable[[], int] = time.perf_counter_ns,
    ):
        self.plan = plan
        self._clock = clock
        self._program = lower(plan)
        self._stages = stages
        self._batches = batches
        self._transport = transport
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._timeout = timeout
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
        state = _StepState(step)
        records = []
        clock = self._clock
        for inbox in self._inboxes.values():
            inbox.begin()
        for instruction in self._program:
            try:
                wait = clock()
                value = self._input(instruction, state)
                start = clock()
                output = self._run(instruction, value, state)
                if self._is_cuda:
                    torch.cuda.current_stream(self._device).synchronize()
                end = clock()
                self._deliver(instruction, output, state)
            except Exception as error:
                error.add_note(f"rank {self.plan.rank}, step {step}, action {instruction.action}")
                raise
            received = value.nbytes if value is not None and isinstance(instruction.source, Remote) else 0
            records.append(Record(instruction.action, wait, start, end, received))
        losses = {microbatch: float(loss) for microbatch, loss in state.losses.items()}
        return StepResult(step, losses, tuple(records))

    def _input(self, instruction: Instruction, state: _StepState) -> Tensor | None:
        action, source = instruction.action, instruction.source
        try:
            self._transport.check()
            if isinstance(source, Remote):
                return self._inboxes[source.channel].take(source.transfer, self._timeout)
        except (TimeoutError, ConnectionError) as error:
            raise self._named(error, action, source if isinstance(source, Remote) else None) from error
        if isinstance(source, Local):
            return state.handed_over.pop((source.kind, source.transfer))
        if action.letter == "F":
            return self._data(action.microbatch, state)
        return None

    def _run(self, instruction: Instruction, value: Tensor | None, state: _StepState) -> Tensor | None:
        action = instruction.action
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.letter == "W":
            stage.backward_weight(microbatch)
            return None
        if action.letter == "I":
            return stage.backward_input(microbatch, value)
        if action.letter == "B":
            return stage.backward(microbatch, value)
        if value is None:  # lowering gives every F a source or the data
            raise RuntimeError(f"{action} has no input")
        is_last = action.stage == self.plan.placement.n_stages - 1
        target = self._target(microbatch, state) if is_last else None
        output = stage.forward(microbatch, value, target, split=instruction.split)
        if is_last:
            state.losses[microbatch] = output
            return None
        self._specs[action.stage] = TensorSpec.of(output)
        return output

    def _deliver(self, instruction: Instruction, output: Tensor | None, state: _StepState) -> None:
        sink = instruction.sink
        if output is None or sink is None:
            return
        if isinstance(sink, Local):
            state.handed_over[sink.kind, sink.transfer] = output
            return
        try:
            self._outboxes[sink.channel].send(sink.transfer, output, str(instruction.action))
        except (TimeoutError, ConnectionError) as error:
            raise self._named(error, instruction.action, None) from error

    def _data(self, microbatch: int, state: _StepState) -> Tensor:
        input, target = self._batches.microbatch(state.step, microbatch)
        if self.plan.placement.n_stages - 1 in self._stages:
            state.targets[microbatch] = target
        return input.to(self._device)

    def _target(self, microbatch: int, state: _StepState) -> Tensor:
        target = state.targets.pop(microbatch, None)
        if target is None:
            _, target = self._batches.microbatch(state.step, microbatch)
        return target.to(self._device)

    def _named(self, error: Exception, action: Action, source: Remote | None) -> ChannelTimeout | PeerLost:
        """A transport's error with what it means for this rank."""
        rank = self.plan.rank
        kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
        if source is None:
            return kind(f"rank {rank} at {action}: an earlier send failed ({error}).")
        key, transfer = source.channel, source.transfer
        what = f"the {key.kind} of {_producer(key, transfer)} from rank {key.sender}"
        if isinstance(error, TimeoutError):
            return ChannelTimeout(
                f"rank {rank} waited {self._timeout:g} s at {action} for {what}, and it did not come. See "
                f"what rank {key.sender} does; if it is merely slow, raise --timeout."
            )
        return PeerLost(
            f"rank {rank} waited at {action} for {what}, and the connection broke ({error}). Look at why "
            f"rank {key.sender} ended."
        )


def _producer(key: ChannelKey, transfer: Transfer) -> str:
    if key.kind == "activation":
        return f"{transfer.boundary}F{transfer.microbatch}"
    return f"stage {transfer.boundary + 1}, microbatch {transfer.microbatch}"
