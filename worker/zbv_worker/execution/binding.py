"""Binds a rank's instructions to its stages and channels, so that the executor needs no lookups.

Time between two actions is time in which a rank does not compute. So everything that is the same in every
step (the stage, the channel, the tensor's index on the channel) is looked up once per plan, and each
instruction becomes three calls: take the input, run, pass the output on. They are the methods of stages and
channels themselves, with their fixed arguments, wherever an action needs nothing else. What a stage must
offer for that is a protocol, because a rehearsal's stages only sleep.

A rank that waited without success says where it waited, what for, and which peer to look at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from zbv_solver.plans.channels import Transfer
from zbv_solver.plans.orders import Action

from zbv_worker.errors import ChannelTimeout, InvalidRun, ModelError, PeerLost, WorkerError
from zbv_worker.execution.fetch_ahead import Load
from zbv_worker.execution.rank_plan import Instruction, Local, Remote
from zbv_worker.execution.timeline import Overdue, Patience
from zbv_worker.failures.progress import Place
from zbv_worker.model.checks import checked_microbatch
from zbv_worker.model.protocol import Microbatch
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.endpoints import Inbox, Outbox
from zbv_worker.values.structure import map_tensors


class Batches(Protocol):
    """The source of the first stage's inputs, the last stage's targets, and all layers' keywords."""

    def microbatch(self, step: int, index: int) -> Microbatch | tuple[Any, ...]:
        """The data of a microbatch, on the CPU."""


class Computation(Protocol):
    """The actions of a stage in a step; see :class:`zbv_worker.stage.stage.Stage`."""

    def forward(self, microbatch: int, input: Any, target: Any = None, *, split: bool) -> Any:
        """Run F; returns the output, or the last stage's loss. See also :class:`TakesKeywords`."""

    def backward(self, microbatch: int, grad_output: Any) -> Any:
        """Run B; returns the input's gradient, None for the first stage."""

    def backward_input(self, microbatch: int, grad_output: Any) -> Any:
        """Run I; returns the input's gradient, None for the first stage."""

    def backward_weight(self, microbatch: int) -> None:
        """Run W."""


@runtime_checkable
class TakesKeywords(Protocol):
    """A stage whose F and evaluation may take the microbatch's ``keywords``."""

    @property
    def keywords(self) -> Keywords:
        """The keyword arguments that its layers take."""


@runtime_checkable
class Evaluation(Protocol):
    """The actions of a stage in an evaluation."""

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the stage's modules are in evaluation mode."""

    def evaluate(self, input: Any, target: Any = None) -> Any:
        """Run F without keeping anything for a backward. See also :class:`TakesKeywords`."""


def evaluation_of(index: int, stage: Computation) -> Evaluation:
    """Return a stage that can be evaluated; raises :class:`InvalidRun` if it cannot."""
    if not isinstance(stage, Evaluation):
        raise InvalidRun(f"stage {index}: a {type(stage).__name__} has no model and cannot be evaluated.")
    return stage


def keywords_of(stages: Iterable[Computation]) -> Keywords:
    """The keyword arguments that the layers of some stages take."""
    return Keywords.union(stage.keywords for stage in stages if isinstance(stage, TakesKeywords))


class WalkState:
    """State of the current walk through the action list, which the bound calls share."""

    def __init__(self) -> None:
        self.number = 0
        self.losses: dict[int, Tensor] = {}
        self.local: dict[Transfer, Any] = {}
        """What one stage of the rank has computed for another one."""
        self.data: dict[int, Microbatch] = {}
        """Microbatches that later stages of the rank need again."""

    def begin(self, number: int, load: Load) -> None:
        """Begin a walk, the run of the plan with this number, as ``load`` counts them."""
        self.number, self.load = number, load
        self.losses = {}
        self.local.clear()
        self.data.clear()


class Bound(NamedTuple):
    """An instruction and its calls."""

    instruction: Instruction
    take: Callable[[], Any] | None
    """Returns the input; None if the action has none."""
    run: Callable[..., Any]
    """Takes the input, if the action has one."""
    pass_on: Callable[[Any], object] | None
    """Takes the output; None if nothing needs it."""


class BoundPair(NamedTuple):
    """Two instructions that run together."""

    forward: Bound
    backward: Bound


class BoundCopy(NamedTuple):
    """An entry of a copy to the host, O, D or R, or the I or B that waits for the copy back."""

    action: Action
    peer: int | None = None
    """No other rank takes part."""


class Keeps(Protocol):
    """Notes what F's keep; see :class:`zbv_worker.execution.copies.Copies`."""

    def keeping(self, stage: int, microbatch: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """An F that notes what it keeps."""


class Pinning:
    """Makes tensors for copies to the device that do not block the host; callable on any thread.

    Attributes
    ----------
    kept
        What was pinned since this was set to a list. A first step keeps its tensors, or the next one, in
        which the host is ahead of the device, would have to take more pinned memory from CUDA.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.kept: list[Tensor] | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """A tensor in pinned memory; the same one if it is not copied to a GPU."""
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor
        with torch.cuda.device(self._device):  # other threads begin with device 0
            made = tensor.pin_memory()
        if self.kept is not None:
            self.kept.append(made)
        return made


@dataclass(frozen=True)
class Binding:
    """The stages, channels and device that instructions are bound to."""

    rank: int
    """The global rank, for errors."""
    last_stage: int
    stages: Mapping[int, Computation]
    inboxes: Mapping[ChannelKey, Inbox]
    outboxes: Mapping[ChannelKey, Outbox]
    device: torch.device
    pinned: Pinning
    keywords: Keywords | None = None
    """Those that layers of the whole model take; None if unknown."""
    keeps: Keeps | None = None
    """None for a plan without copies."""
    state: WalkState = field(default_factory=WalkState)

    def of_step(
        self, program: Iterable[Instruction], copies: Sequence[tuple[int, Action]] = ()
    ) -> tuple[Bound | BoundPair | BoundCopy, ...]:
        """Bind instructions, and a plan's copies, for a training step."""
        before: defaultdict[int, list[BoundCopy]] = defaultdict(list)
        for place, action in copies:
            before[place].append(BoundCopy(action))
        copied = {(action.stage, action.microbatch) for _, action in copies}
        found: list[Bound | BoundPair | BoundCopy] = []
        instructions = enumerate(program)
        for place, instruction in instructions:
            found += before[place]
            stage, letter, microbatch = instruction.action
            is_copied = (stage, microbatch) in copied
            if is_copied and letter in "IB":
                found.append(BoundCopy(instruction.action))
            one = self._bound(instruction, self._run(instruction, is_copied=is_copied))
            if instruction.is_paired:
                _, other = next(instructions)
                found.append(BoundPair(one, self._bound(other, self._run(other))))
            else:
                found.append(one)
        return tuple(found)

    def of_evaluation(self, forwards: Iterable[Instruction]) -> tuple[Bound, ...]:
        """Bind F's for an evaluation; raises :class:`InvalidRun` for stages that cannot be evaluated."""
        return tuple(self._bound(instruction, self._evaluate(instruction)) for instruction in forwards)

    def _bound(self, instruction: Instruction, run: Callable[..., Any]) -> Bound:
        return Bound(instruction, self._take(instruction), run, self._pass_on(instruction))

    def _take(self, instruction: Instruction) -> Callable[[], Any] | None:
        source = instruction.source
        if isinstance(source, Remote):
            inbox = self.inboxes[source.channel]
            return partial(inbox.take, inbox.index(source.transfer))
        if isinstance(source, Local):
            return partial(self.state.local.pop, source.transfer)
        if instruction.action.letter != "F":
            return None
        data_of, on_device = self._data(0, "input", instruction.action.microbatch), self._on_device()

        def take_input() -> Any:
            return on_device(data_of().input)

        return take_input

    @cached_property
    def data_stages(self) -> tuple[int, ...]:
        """The stages of this rank that need the data of microbatches, in order."""
        return tuple(dict.fromkeys(stage for stage, _ in self._data_users))

    @cached_property
    def _data_users(self) -> list[tuple[int, str]]:
        """The uses of a microbatch's data on this rank, in order: stages, and which part they use."""
        users = []
        for stage in sorted(self.stages):
            if stage == 0:
                users.append((stage, "input"))
            if stage == self.last_stage or self._takes_keywords(stage):
                users.append((stage, "target and keywords"))
        return users

    def _takes_keywords(self, stage: int) -> bool:
        return bool(keywords_of([self.stages[stage]]))

    def _data(self, stage: int, part: str, microbatch: int) -> Callable[[], Microbatch]:
        """How to get the data of a microbatch, which is fetched once for all its uses on the rank."""
        users, state = self._data_users, self.state
        is_first, is_last = (stage, part) == users[0], (stage, part) == users[-1]

        def data() -> Microbatch:
            if not is_first:
                return state.data.pop(microbatch) if is_last else state.data[microbatch]
            loaded = state.load(state.number, microbatch)
            if type(loaded) is not Microbatch:
                loaded = checked_microbatch(loaded)
            if loaded.keywords:
                self._require_taken(loaded)
            if not is_last:
                state.data[microbatch] = loaded
            return loaded

        return data

    def _require_taken(self, microbatch: Microbatch) -> None:
        """Refuse keywords that no layer of the model takes."""
        wrong = [] if self.keywords is None else self.keywords.untaken(microbatch.keywords)
        if wrong:
            raise ModelError(
                f"rank {self.rank}: the microbatch has the keyword {wrong[0]!r}, and no layer of the model "
                f"takes it. Name it in the forward of a layer, or leave it out."
            )

    def _run(self, instruction: Instruction, *, is_copied: bool = False) -> Callable[..., Any]:
        stage, letter, microbatch = instruction.action
        computation = self.stages[stage]
        if letter == "F":
            forward: Callable[..., Any] = partial(computation.forward, microbatch, split=instruction.split)
            if is_copied and self.keeps is not None:
                forward = self.keeps.keeping(stage, microbatch, forward)
            return self._forward(instruction, forward)
        if letter == "W":
            return partial(computation.backward_weight, microbatch)
        backward = computation.backward_input if letter == "I" else computation.backward
        is_of_loss = instruction.source is None  # which has no gradient to take
        return partial(backward, microbatch, None) if is_of_loss else partial(backward, microbatch)

    def _evaluate(self, instruction: Instruction) -> Callable[..., Any]:
        stage = instruction.action.stage
        return self._forward(instruction, evaluation_of(stage, self.stages[stage]).evaluate)

    def _forward(self, instruction: Instruction, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Bind an F: its output is passed on, or kept if it is a loss."""
        stage, _, microbatch = instruction.action
        is_last, takes_keywords = stage == self.last_stage, self._takes_keywords(stage)
        if not is_last and not takes_keywords:
            return forward
        data_of, on_device = self._data(stage, "target and keywords", microbatch), self._on_device()
        state = self.state

        def forward_with_data(value: Any) -> Any:
            data = data_of()
            more = {"keywords": on_device(data.keywords)} if takes_keywords and data.keywords else {}
            if not is_last:
                return forward(value, None, **more)
            state.losses[microbatch] = forward(value, on_device(data.target), **more)
            return None

        return forward_with_data

    def _pass_on(self, instruction: Instruction) -> Callable[[Any], object] | None:
        sink = instruction.sink
        if sink is None:
            return None
        if isinstance(sink, Local):
            return partial(self.state.local.__setitem__, sink.transfer)
        return self.outboxes[sink.channel].sender(sink.transfer, instruction.action)

    def _on_device(self) -> Callable[[Any], Any]:
        """Moves the tensors of a value to the device."""
        device, is_gpu = self.device, self.device.type == "cuda"

        def moved(tensor: Tensor) -> Tensor:
            is_on_host = is_gpu and tensor.device.type == "cpu"
            if is_on_host and not (tensor.requires_grad or tensor.is_inference()):
                # A copy from pageable memory would block the host until the device reaches it. torch reuses
                # pinned memory only after the copies queued from it.
                return self.pinned(tensor).to(device, non_blocking=True)
            there = tensor.to(device)
            return there.clone() if there.is_inference() else there  # autograd cannot save the former

        return partial(map_tensors, moved)


def send_failed(error: Exception, rank: int, instruction: Place) -> ChannelTimeout | PeerLost:
    """Convert a transport's error of a send, which an earlier action may have started."""
    kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
    return kind(f"rank {rank} at {instruction.action}: an earlier send failed ({error}).")


def not_received(
    error: Exception, rank: int, instruction: Instruction, patience: Patience
) -> ChannelTimeout | PeerLost:
    """Convert a transport's error of receiving an action's input."""
    what, peer = _what(instruction), instruction.peer
    if isinstance(error, TimeoutError):
        return ChannelTimeout(
            f"rank {rank} waited {patience.seconds:g} s at {instruction.action} for {what}, which did not "
            f"arrive. Check rank {peer}; if it is only slow, raise {patience.option}."
        )
    return PeerLost(
        f"rank {rank} waited at {instruction.action} for {what}, and the connection broke ({error}). Check "
        f"why rank {peer} ended."
    )


def overdue(found: Overdue, rank: int, siblings: Sequence[int] = ()) -> WorkerError:
    """The error of a GPU that makes no progress: it lacks a tensor, or hangs in the rank's own work.

    An update may wait for any rank, in a sum, and an action for a sibling, in a gather of parameters. So it
    is a peer's failure until none is found silent.

    Parameters
    ----------
    siblings
        The ranks of other replicas that hold the same stages.
    """
    _, step, instruction, _, _, patience = found.work
    if instruction is None:
        return ChannelTimeout(
            f"rank {rank}: its GPU did not complete the update after step {step} within "
            f"{patience.seconds:g} s. A sum over ranks may wait for a rank that does not take part; check "
            f"the other ranks. If it takes that long, raise {patience.option}."
        )
    if instruction.peer is not None and not found.started:
        return not_received(TimeoutError(), rank, instruction, patience)
    if siblings:
        return ChannelTimeout(
            f"rank {rank}: its GPU did not complete {instruction.action} within {patience.seconds:g} s. With "
            f"--shard, it may wait for the parameters of rank {' or '.join(map(str, siblings))}, which "
            f"{'holds' if len(siblings) == 1 else 'hold'} the same stages; check whether it ended. If the "
            f"action takes that long, raise {patience.option}."
        )
    return WorkerError(
        f"rank {rank}: its GPU did not complete {instruction.action} within {patience.seconds:g} s. If it "
        f"takes that long, raise {patience.option}; otherwise a kernel or a collective inside the stage "
        f"hangs."
    )


def _what(instruction: Instruction) -> str:
    """The tensor that an action waits for, named by its producer."""
    source = instruction.source
    if not isinstance(source, Remote):
        return "its input"
    transfer = source.transfer
    boundary, microbatch = transfer.boundary, transfer.microbatch
    if transfer.kind == "activation":
        return f"the activation of {boundary}F{microbatch} from rank {instruction.peer}"
    return f"the gradient of stage {boundary + 1}, microbatch {microbatch} from rank {instruction.peer}"
