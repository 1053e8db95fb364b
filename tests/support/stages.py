"""Stages of a model in one process: a microbatch forth and back, or all of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbv_worker.stage.stage import Stage


def backward(stage: Stage, gradient: Any = None, *, split: bool = True, microbatch: int = 0) -> Any:
    """I and W, or B; returns the gradient of the input."""
    if not split:
        return stage.backward(microbatch, gradient)
    found = stage.backward_input(microbatch, gradient)
    stage.backward_weight(microbatch)
    return found


def forth_and_back(stage: Stage, x: Any, gradient: Any, *, split: bool = True, microbatch: int = 0) -> Any:
    """F, then the whole backward; returns the gradient of the input."""
    stage.forward(microbatch, x, split=split)
    return backward(stage, gradient, split=split, microbatch=microbatch)


def run_step(stages: Sequence[Stage], batch: Sequence[tuple[Any, Any, Any]], *, split: bool) -> list[Any]:
    """The losses of a step, of whose microbatches all F's come first, and all W's last.

    A microbatch is an input, a target, and keywords.
    """
    losses = []
    for at, (value, target, keywords) in enumerate(batch):
        for stage in stages:
            own = target if stage is stages[-1] else None
            value = stage.forward(at, value, own, split=split, keywords=keywords)
        losses.append(value)
    for at in range(len(batch)):
        gradient = None
        for stage in reversed(stages):
            gradient = (stage.backward_input if split else stage.backward)(at, gradient)
    for stage in stages if split else []:
        for at in range(len(batch)):
            stage.backward_weight(at)
    return losses
