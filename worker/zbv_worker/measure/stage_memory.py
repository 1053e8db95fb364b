"""Memory of a stage after F, I and W, the workspace of its actions, and a rank's static memory.

The account is the plan's (see "Problem" in docs/formats.md): an action holds what the rank held before, plus
its delta if that is positive. Everything beyond that, such as temporaries of the action, is workspace. A rank
runs one action at a time, so it needs the largest workspace once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from zbv_solver.problem.stages import Placement

from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.measure.live_bytes import AllocatedBytes, LiveBytes, watching
from zbv_worker.model.layer_list import whole_name
from zbv_worker.model.optimizers import optimizer_of
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.boundary import Gradient
from zbv_worker.stage.dtensors import local_of
from zbv_worker.stage.layers import NO_KEYWORDS
from zbv_worker.stage.main_gradients import round_main_gradients
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import gradient_of
from zbv_worker.values.packing import copied


@dataclass(frozen=True)
class StageMemory:
    """Bytes held per microbatch after F, I and W, and the largest workspace of any action."""

    after_forward: int
    after_input: int
    after_weight: int
    workspace: int


def stage_memory(
    stage: Stage,
    input: Any,
    target: Any,
    gradient: Gradient | None,
    device: torch.device,
    keywords: Mapping[str, Any] = NO_KEYWORDS,
) -> StageMemory:
    """Run one microbatch with a split and one with a fused backward.

    The input and the gradient count, because a rank receives new ones each time. The parameters must already
    have gradients.
    """
    with watching(device) as held:
        after_forward, first = _forward(stage, input, target, keywords, held, split=True)
        after_input, second = _backward(held, lambda: stage.backward_input(0, copied(gradient)))
        after_weight, third = _backward(held, lambda: stage.backward_weight(0))
    with watching(device) as held:
        after_fused_forward, _ = _forward(stage, input, target, keywords, held, split=False)
        _, fused = _backward(held, lambda: stage.backward(0, copied(gradient)))
    # Under autocast, a forward with a fused backward also keeps the weights that were cast. A plan has one
    # number for both.
    after_forward = max(after_forward, after_fused_forward)
    return StageMemory(
        max(0, after_forward), max(0, after_input), max(0, after_weight), max(first, second, third, fused)
    )


def _forward(
    stage: Stage,
    input: Any,
    target: Any,
    keywords: Mapping[str, Any],
    held: AllocatedBytes | LiveBytes,
    *,
    split: bool,
) -> tuple[int, int]:
    """Bytes held after F, and its workspace, which includes the output."""
    held.restart()
    stage.forward(0, copied(input), target, split=split, keywords=keywords)
    return held.bytes, held.peak - held.bytes


def _backward(held: AllocatedBytes | LiveBytes, work: Callable[[], object]) -> tuple[int, int]:
    """Bytes held after a backward action, and its workspace."""
    before = held.bytes
    held.restart()
    work()
    return held.bytes, held.peak - max(before, held.bytes)


def static_bytes(
    model: PipelineModel, stages: Mapping[int, Stage], receives: int, workspace: int
) -> StaticBytes:
    """Memory that is held all the time; runs one optimizer step to create the optimizer's state.

    Parameters
    ----------
    receives
        Bytes of one receive on every channel.
    """
    modules = [stage.module for stage in stages.values()]
    # By id, because tensors compare by element; stages may share parameters.
    by_id = {id(p): (whole_name(name), p) for module in modules for name, p in module.named_parameters()}
    parameters = [parameter for _, parameter in by_id.values()]
    state: list[object] = []
    gradients = 0
    if parameters:
        gradients = tensor_bytes(map(gradient_of, parameters))
        round_main_gradients(parameters, keep=True)
        optimizer = optimizer_of(model, list(by_id.values()))
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


def received_bytes(placement: Placement, rank: int, sizes: Mapping[int, tuple[int, int]]) -> int:
    """Bytes of one receive on every channel of a rank; the largest, if a channel's boundaries differ.

    Parameters
    ----------
    sizes
        For each stage of the rank, the bytes of its input and of its output's gradient.
    """
    largest: dict[int, int] = {}
    for stage, received in sizes.items():
        for other, size in zip((stage - 1, stage + 1), received, strict=True):
            if 0 <= other < placement.n_stages and placement.rank_of[other] != rank:
                peer = placement.rank_of[other]
                largest[peer] = max(largest.get(peer, 0), size)
    return sum(largest.values())


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Total bytes of those objects that are tensors; of a DTensor, those on this rank."""
    own = (local_of(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


@dataclass(frozen=True)
class StaticBytes:
    """Memory that a rank holds all the time, in bytes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    """Buffers of the modules (running statistics)."""
    receives: int = 0
    """Buffers of receives that are posted ahead."""
    workspace: int = 0
    """The largest temporary memory of any action; a rank runs one at a time."""
    communicators: int = 0
    """Buffers of NCCL's communicators, measured while they were connected; 0 over gloo."""

    @property
    def total(self) -> int:
        """The sum, which is the problem's ``static``."""
        return sum(asdict(self).values())
