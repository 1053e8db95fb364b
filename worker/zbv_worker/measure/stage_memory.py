"""What a stage holds after F, I and W, what its actions need beside that, and what a rank holds all the time.

The account is the plan's (see "Problem" in docs/formats.md): an action holds what the rank held before it
plus its delta if that is positive. Whatever it needs more than that while it runs, tensors that are made and
dropped within it, is workspace; a rank runs one action at a time and needs the largest of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from zbv_solver.problem.placement import Placement

from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.execution.main_gradients import gradient_of, round_main_gradients
from zbv_worker.execution.stage import Stage
from zbv_worker.measure.live_bytes import HeldMemory, watching
from zbv_worker.measure.profile.profile import StaticBytes
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.transport.channels import ChannelKey


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one microbatch held after F, after I and after W, and the most workspace of any action."""

    after_forward: int
    after_input: int
    after_weight: int
    workspace: int


def stage_memory(
    stage: Stage, input: Tensor, target: Tensor | None, gradient: Tensor | None, device: torch.device
) -> StageMemory:
    """Run one microbatch split and one fused.

    The input and the gradient count: a rank receives new ones each time. The parameters must have their
    gradients already.
    """
    with watching(device) as held:
        after_forward, first = _forward(stage, input, target, held, split=True)
        after_input, second = _backward(held, lambda: stage.backward_input(0, _copy(gradient)))
        after_weight, third = _backward(held, lambda: stage.backward_weight(0))
    with watching(device) as held:
        _forward(stage, input, target, held, split=False)
        _, fused = _backward(held, lambda: stage.backward(0, _copy(gradient)))
    return StageMemory(
        max(0, after_forward), max(0, after_input), max(0, after_weight), max(first, second, third, fused)
    )


def _forward(
    stage: Stage, input: Tensor, target: Tensor | None, held: HeldMemory, *, split: bool
) -> tuple[int, int]:
    """Bytes held after F, and its workspace, to which its output belongs."""
    held.restart()
    stage.forward(0, input.clone(), target, split=split)
    return held.bytes, held.peak - held.bytes


def _backward(held: HeldMemory, work: Callable[[], object]) -> tuple[int, int]:
    """Bytes held after a backward action, and what it needed beyond the larger of before and after."""
    before = held.bytes
    held.restart()
    work()
    return held.bytes, held.peak - max(before, held.bytes)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def static_bytes(
    model: PipelineModel, stages: Mapping[int, Stage], receives: int, workspace: int
) -> StaticBytes:
    """What is always there; runs one step of the optimizer, which brings its state into being.

    Parameters
    ----------
    receives
        Bytes of one receive on every channel.
    """
    modules = [stage.module for stage in stages.values()]
    # Parameters that stages share are one (ids, because tensors compare by element).
    by_id = {id(p): p for module in modules for p in module.parameters()}
    parameters = list(by_id.values())
    state: list[object] = []
    gradients = 0
    if parameters:
        gradients = tensor_bytes(map(gradient_of, parameters))
        round_main_gradients(parameters, keep=True)
        optimizer = model.optimizer(parameters)
        optimizer.step()
        state = [value for entry in optimizer.state.values() for value in entry.values()]
    return StaticBytes(
        parameters=tensor_bytes(parameters),
        gradients=gradients,
        optimizer=tensor_bytes(state),
        buffers=tensor_bytes(chain.from_iterable(module.buffers() for module in modules)),
        receives=DEFAULT_LOOK_AHEAD * receives,
        workspace=workspace,
    )


def received_bytes(
    placement: Placement, rank: int, inputs: Mapping[int, Tensor], gradients: Mapping[int, Tensor | None]
) -> int:
    """One tensor of every channel that a rank receives on, the largest where boundaries differ."""
    largest: dict[ChannelKey, int] = {}
    for index in inputs:
        for key, tensor in (
            (_incoming(placement, rank, index - 1, "activation"), inputs[index]),
            (_incoming(placement, rank, index + 1, "gradient"), gradients[index]),
        ):
            if key is not None:
                largest[key] = max(largest.get(key, 0), tensor_bytes([tensor]))
    return sum(largest.values())


def _incoming(placement: Placement, rank: int, stage: int, kind: str) -> ChannelKey | None:
    """The channel on which a rank hears of a stage; None where it has that stage itself or there is none."""
    if not 0 <= stage < placement.n_stages or placement.rank_of[stage] == rank:
        return None
    return ChannelKey(placement.rank_of[stage], rank, "activation" if kind == "activation" else "gradient")


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Bytes of those that are tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
