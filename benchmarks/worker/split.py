"""I and W with our store of weight gradients, compared with the fused backward, on a transformer block."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
from zbv_worker.models.gpt import Block
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.world import World

from benchmarks.findings import Finding, Target, paired_ratio
from benchmarks.worker.ranks import Workload, on_ranks

MOST = 1.03


class SplitWorkload(Workload):
    """The block, and the number of measurements."""

    widths: tuple[int, ...] = (256, 512)
    heads: int = 4
    sequences: int = 4
    tokens: int = 512
    """Number of sequences times their length."""
    in_flight: int = 2
    """Microbatches that take turns, so that their tensors are not in the cache."""
    rounds: int = 60
    warm_up: int = 5


def measure(workload: SplitWorkload) -> list[Finding]:
    """One ratio per width, in one process on one core."""
    (answer,) = on_ranks("split", {"workload": workload.model_dump()}, 1)
    found = []
    for width in workload.widths:
        times = answer[str(width)]
        ratio, interval = paired_ratio(times["split"], times["fused"])
        what = f"hidden {width}, {workload.tokens} tokens: (I + W) / B"
        found.append(Finding(what, ratio, "", Target(MOST), interval))
    return found


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, dict[str, list[float]]]:
    """Return seconds of I + W and of B, by width."""
    workload = SplitWorkload(**request["workload"])
    return {str(width): _times(workload, width) for width in workload.widths}


def _times(workload: SplitWorkload, width: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    shape = (workload.sequences, workload.tokens // workload.sequences, width)
    # an inner stage, which returns the gradient of its input
    stage = Stage(1, 3, Block(width, workload.heads), 1)
    x, gradient = torch.randn(shape), torch.randn(shape)
    gc.freeze()
    found: dict[str, list[float]] = {"split": [], "fused": []}
    for turn in range(workload.warm_up + workload.rounds):
        names = ("split", "fused") if turn % 2 else ("fused", "split")
        for name in names:
            seconds = _backward_seconds(stage, x, gradient, workload.in_flight, split=name == "split")
            if turn >= workload.warm_up:
                found[name].append(seconds)
    return found


def _backward_seconds(stage: Stage, x: Any, gradient: Any, in_flight: int, *, split: bool) -> float:
    """Time the backwards of some microbatches after their forwards."""
    for microbatch in range(in_flight):
        stage.forward(microbatch, x, split=split)
    start = time.perf_counter()
    for microbatch in range(in_flight):
        if split:
            stage.backward_input(microbatch, gradient)
            stage.backward_weight(microbatch)
        else:
            stage.backward(microbatch, gradient)
    return time.perf_counter() - start
