"""Walks a model's stages, or its layers one by one, through F, I and W without memory and without values.

It runs the worker's own :class:`zbv_worker.stage.stage.Stage` and counts memory storage by storage, as
``zbv-worker profile`` does (:func:`zbv_worker.measure.stage_memory.stage_memory`). So an estimate equals a
profile on a CPU. Allocators that round sizes up, as CUDA's does to 512 bytes, hold a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zbv_worker.errors import InvalidRun
from zbv_worker.measure.estimate.flops import count_flops
from zbv_worker.measure.estimate.likeness import likeness
from zbv_worker.measure.estimate.without_memory import CPU, built, numbers_are_one, without_values
from zbv_worker.measure.stage_memory import StageMemory, StaticBytes, stage_memory, static_bytes
from zbv_worker.model.checks import build_layers, build_stage, checked_microbatch, layer_names
from zbv_worker.model.protocol import Layered, Microbatch, PipelineModel
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.precision import AUTOCAST
from zbv_worker.stage.program import PLAIN, Program
from zbv_worker.stage.stage import Stage
from zbv_worker.values.packing import zero_gradient
from zbv_worker.values.structure import bytes_of, map_tensors


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one microbatch."""

    forward: int
    backward_input: int
    backward_weight: int


@dataclass(frozen=True)
class Walked:
    """Memory and operations of one microbatch in F, I and W."""

    memory: StageMemory
    flops: Flops


@dataclass(frozen=True)
class Estimate:
    """A stage or a layer."""

    name: str
    parameters: int
    """The number of parameters."""
    static: StaticBytes
    """Bytes that are held all the time; ``workspace`` and ``receives`` are 0."""
    input_bytes: int
    output_bytes: int
    """Bytes of one microbatch. The last output is the loss."""
    kept: Walked
    recomputed: Walked | None
    """Memory and operations with recomputed activations; for layers only."""


def estimate_stages(model: PipelineModel, n_stages: int, program: Program = PLAIN) -> Iterator[Estimate]:
    """Estimate every stage, as the model cuts them; raises :class:`InvalidRun`, :class:`ModelError`."""
    pieces = {str(stage): partial(build_stage, model, stage, n_stages) for stage in range(n_stages)}
    return _estimates(model, pieces, program, are_layers=False)


def estimate_layers(model: Layered, program: Program = PLAIN) -> Iterator[Estimate]:
    """Estimate every layer as if it were a stage; raises :class:`InvalidRun`, :class:`ModelError`.

    A tensor that two neighbours hold is counted with each, as if the model were cut between them.
    """
    if not isinstance(model, PipelineModel):
        raise InvalidRun(f"found a {type(model).__name__}; must also be a zbv_worker.model.PipelineModel.")
    pieces = {name: partial(build_layers, model, [name]) for name in layer_names(model)}
    return _estimates(model, pieces, program, are_layers=True)


def _estimates(
    model: PipelineModel,
    pieces: Mapping[str, Callable[[torch.device], nn.Module]],
    program: Program,
    *,
    are_layers: bool,
) -> Iterator[Estimate]:
    """Estimate a model piece by piece; each piece takes the output of the one before."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_values("microbatch(0, 0)"):
        data = checked_microbatch(model.microbatch(0, 0))
        data = Microbatch(*(map_tensors(mode.from_tensor, part) for part in data))
        input = data.input
    known: dict[Hashable, tuple[Estimate, Any]] = {}
    for at, (name, build) in enumerate(pieces.items()):
        is_last = at == len(pieces) - 1
        with without_values(f"building {name}"):
            module = built(build, mode)
        alike = likeness(module, input, place=0 if at == 0 else 2 if is_last else 1)
        if alike not in known:
            loss = model.loss if is_last else None
            stage = Stage(at, len(pieces), module, 1, loss, AUTOCAST[program.precision])
            if program.has_main_gradients:
                use_main_gradients(module.parameters())  # as in training
            with without_values(name), mode:
                given = data._replace(input=input, target=data.target if is_last else None)
                known[alike] = _estimate(model, stage, given, is_last=is_last, is_layer=are_layers)
        estimate, input = known[alike]
        yield replace(estimate, name=name)


def _estimate(
    model: PipelineModel, stage: Stage, data: Microbatch, *, is_last: bool, is_layer: bool
) -> tuple[Estimate, Any]:
    """Estimate a piece, without its name; returns its output too."""
    parameters = list(stage.module.parameters())
    output = stage.forward(0, data.input, data.target, split=False, keywords=data.keywords)
    kept = _walk(stage, data, is_last=is_last)
    recomputed = None
    if is_layer:
        stage.is_recomputed = True
        recomputed = _walk(stage, data, is_last=is_last)
    with numbers_are_one():
        static = static_bytes(model, {stage.index: stage}, receives=0, workspace=0)
    estimate = Estimate(
        name="",
        parameters=sum(parameter.numel() for parameter in parameters),
        static=static,
        input_bytes=bytes_of(data.input),
        output_bytes=bytes_of(output),
        kept=kept,
        recomputed=recomputed,
    )
    return estimate, output


def _walk(stage: Stage, data: Microbatch, *, is_last: bool) -> Walked:
    outputs = []

    def forward() -> None:
        outputs.append(stage.forward(0, data.input, data.target, split=True, keywords=data.keywords))

    # Counting also creates the parameters' gradients, which stage_memory expects.
    forward_flops = count_flops(forward)
    gradient = None if is_last else zero_gradient(outputs.pop())
    flops = Flops(
        forward_flops,
        count_flops(lambda: stage.backward_input(0, gradient)),
        count_flops(lambda: stage.backward_weight(0)),
    )
    return Walked(stage_memory(stage, data.input, data.target, gradient, CPU, data.keywords), flops)
