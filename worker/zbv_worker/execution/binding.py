"""Binds a rank's instructions to its stages and channels, so that the executor needs no lookups.

Time between two actions is time in which a rank does not compute. So everything that is the same in every
step (the stage, the channel, the tensor's index on the channel) is looked up once per plan, and each
instruction becomes three calls: take the input, run, pass the output on. What a stage must offer for that is
a protocol, because a rehearsal's stages only sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from zbv_solver.plans.channels import Transfer

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.progress import CurrentProgress
from zbv_worker.execution.rank_plan import Instruction, Local, Remote
from zbv_worker.execution.timeline import Patience
from zbv_worker.execution.wait_errors import not_received, send_failed
from zbv_worker.transport.channels import ChannelKey, TensorSpec
from zbv_worker.transport.endpoints import Inbox, Outbox


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


@dataclass
class WalkState:
    """State of one walk through the action list."""

    step: int
    microbatch: Callable[[int, int], tuple[Tensor, Tensor]]
    patience: Patience
    losses: dict[int, Tensor] = field(default_factory=dict)
    handed_over: dict[Transfer, Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)


Take = Callable[[WalkState], Tensor]
Run = Callable[[Any, WalkState], Tensor | None]
"""Takes the input, or None if the action has none."""
PassOn = Callable[[Tensor, WalkState], None]


class Bound(NamedTuple):
    """An instruction and its calls; ``take`` and ``pass_on`` are None if there is nothing to do."""

    instruction: Instruction
    take: Take | None
    run: Run
    pass_on: PassOn | None


@dataclass(frozen=True)
class Binding:
    """The stages, channels and device that instructions are bound to.

    Attributes
    ----------
    rank
        The global rank, for errors.
    specs
        Shape and dtype of the tensors at each boundary; forwards record those of their outputs.
    """

    rank: int
    last_stage: int
    stages: Mapping[int, Computation]
    inboxes: Mapping[ChannelKey, Inbox]
    outboxes: Mapping[ChannelKey, Outbox]
    specs: dict[int, TensorSpec]
    device: torch.device
    progress: CurrentProgress

    def of_step(self, program: Iterable[Instruction]) -> tuple[Bound, ...]:
        """Bind instructions for a training step."""
        return tuple(self._bound(instruction, self._run(instruction)) for instruction in program)

    def of_evaluation(self, forwards: Iterable[Instruction]) -> tuple[Bound, ...]:
        """Bind F's for an evaluation; raises :class:`InvalidRun` for stages that cannot be evaluated."""
        return tuple(self._bound(instruction, self._evaluate(instruction)) for instruction in forwards)

    def _bound(self, instruction: Instruction, run: Run) -> Bound:
        return Bound(instruction, self._take(instruction), run, self._pass_on(instruction))

    def _take(self, instruction: Instruction) -> Take | None:
        source = instruction.source
        if isinstance(source, Remote):
            return self._receive(instruction, source)
        if isinstance(source, Local):
            transfer = source.transfer
            return lambda state: state.handed_over.pop(transfer)
        return self._load(instruction.action.microbatch) if instruction.action.letter == "F" else None

    def _receive(self, instruction: Instruction, source: Remote) -> Take:
        inbox, rank, progress = self.inboxes[source.channel], self.rank, self.progress
        index, peer = inbox.index(source.transfer), instruction.peer

        def receive(state: WalkState) -> Tensor:
            progress.waiting_for = peer
            try:
                tensor = inbox.take(index, state.patience.seconds)
            except (TimeoutError, ConnectionError) as error:
                raise not_received(error, rank, instruction, state.patience) from error
            progress.waiting_for = None
            return tensor

        return receive

    def _load(self, microbatch: int) -> Take:
        on_device, has_last = self._on_device(), self.last_stage in self.stages

        def load(state: WalkState) -> Tensor:
            input, target = state.microbatch(state.step, microbatch)
            if has_last:
                state.targets[microbatch] = target
            return on_device(input)

        return load

    def _run(self, instruction: Instruction) -> Run:
        stage, letter, microbatch = instruction.action
        computation = self.stages[stage]
        if letter == "F":
            forward, split = computation.forward, instruction.split
            return self._forward(instruction, lambda x, y: forward(microbatch, x, y, split=split))
        if letter == "W":
            backward_weight = computation.backward_weight
            return lambda value, state: backward_weight(microbatch)
        backward = computation.backward_input if letter == "I" else computation.backward
        return lambda value, state: backward(microbatch, value)

    def _evaluate(self, instruction: Instruction) -> Run:
        stage = instruction.action.stage
        return self._forward(instruction, evaluation_of(stage, self.stages[stage]).evaluate)

    def _forward(self, instruction: Instruction, forward: Callable[[Tensor, Tensor | None], Tensor]) -> Run:
        """Bind an F: its output is passed on, or kept if it is a loss."""
        stage, _, microbatch = instruction.action
        specs, target_of = self.specs, self._target(microbatch)

        def run(value: Tensor, state: WalkState) -> Tensor:
            output = forward(value, None)
            known = specs.get(stage)
            if known is None or not known.fits(output):
                specs[stage] = TensorSpec.of(output)
            return output

        def run_last(value: Tensor, state: WalkState) -> None:
            state.losses[microbatch] = forward(value, target_of(state))

        return run_last if stage == self.last_stage else run

    def _target(self, microbatch: int) -> Take:
        on_device = self._on_device()

        def target_of(state: WalkState) -> Tensor:
            target = state.targets.pop(microbatch, None)
            if target is None:
                _, target = state.microbatch(state.step, microbatch)
            return on_device(target)

        return target_of

    def _pass_on(self, instruction: Instruction) -> PassOn | None:
        sink = instruction.sink
        if sink is None:
            return None
        if isinstance(sink, Local):
            handed = sink.transfer

            def hand_over(output: Tensor, state: WalkState) -> None:
                state.handed_over[handed] = output

            return hand_over
        send = self.outboxes[sink.channel].sender(sink.transfer)
        rank, action = self.rank, instruction.action

        def pass_on(output: Tensor, state: WalkState) -> None:
            try:
                send(output, action)
            except (TimeoutError, ConnectionError) as error:
                raise send_failed(error, rank, instruction) from error

        return pass_on

    def _on_device(self) -> Callable[[Tensor], Tensor]:
        device = self.device

        def through_pinned_memory(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                return tensor.to(device)
            # A copy from pageable memory would block the host until the device reaches it. torch reuses
            # pinned memory only after the copies queued from it.
            return self.pinned(tensor).to(device, non_blocking=True)

        return through_pinned_memory if device.type == "cuda" else lambda tensor: tensor.to(device)

    def pinned(self, tensor: Tensor) -> Tensor:
        """A tensor for a copy to the device that does not block the host; callable on any thread."""
        if self.device.type != "cuda" or tensor.device.type != "cpu":
            return tensor
        with torch.cuda.device(self.device):  # other threads begin with device 0
            return tensor.pin_memory()
