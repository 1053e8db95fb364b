"""The check of stages' memory: measured bytes after F, I and W against an estimate without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from zbv_worker.gpu_report.check import Answers, Line, Place, ReportOptions, informative, that
from zbv_worker.measure.estimate.estimate import estimate_stages
from zbv_worker.measure.stage_memory import stage_memory
from zbv_worker.model.checks import build_stage
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.precision import AUTOCAST, Precision
from zbv_worker.stage.program import Program
from zbv_worker.stage.stage import Stage

MEMORY_TOLERANCE = 0.05
"""Relative difference between a GPU and the estimate: attention keeps slightly more or less there."""

BLOCK = 512
"""Bytes to which CUDA's allocator rounds every tensor up."""

_TENSORS = 64
"""A generous number of tensors that a stage of the report's model holds per microbatch."""

_STAGES = 2
_HELD = {"after_forward": "F", "after_input": "I", "after_weight": "W"}


def measure_memory(place: Place, precision: Precision) -> Any:
    """Run one microbatch through the stages; returns measured and estimated bytes by stage."""
    model = place.options.model.build()
    input, target = (tensor.to(place.device) for tensor in model.microbatch(0, 0))
    found = []
    for estimate, index in zip(
        estimate_stages(model, _STAGES, Program(precision)), range(_STAGES), strict=True
    ):
        is_last = index == _STAGES - 1
        module = build_stage(model, index, _STAGES, place.device)
        stage = Stage(index, _STAGES, module, 1, model.loss if is_last else None, AUTOCAST[precision])
        use_main_gradients(module.parameters())
        output, gradient = _first(stage, input, target if is_last else None)
        measured = stage_memory(stage, input, target if is_last else None, gradient, place.device)
        found.append({"measured": asdict(measured), "estimated": asdict(estimate.kept.memory)})
        input = output
    return found


def _first(stage: Stage, input: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run a microbatch to create the parameters' gradients; returns output and its gradient."""
    output = stage.forward(0, input, target, split=True)
    gradient = torch.ones_like(output) if target is None else None
    stage.backward_input(0, gradient)
    stage.backward_weight(0)
    return output, gradient


def judge_memory(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_memory`."""
    (stages,) = answers
    for index, found in enumerate(stages):
        measured, estimated = found["measured"], found["estimated"]
        for name, letter in _HELD.items():
            yield _close(f"stage {index}: bytes held after {letter}", measured[name], estimated[name])
        shown = f"{measured['workspace'] / 1e6:.2f} and {estimated['workspace'] / 1e6:.2f} MB"
        yield informative(f"stage {index}: workspace, measured and estimated", shown)


def _close(what: str, measured: int, estimated: int) -> Line:
    room = MEMORY_TOLERANCE * estimated + (BLOCK * _TENSORS if estimated else 0)
    shown = f"{measured / 1e6:.2f} MB, estimated {estimated / 1e6:.2f} MB"
    return that(what, abs(measured - estimated) <= room, "the estimate and the device differ", shown)
