"""Time of ``Pipeline.step`` compared with the bare executor: the same plan and layers, in turns.

The step splits the batch, keeps earlier gradients, combines the losses and watches for failures. The bare
executor only walks its list. Both compute the same, so the ratio of their wall-clock times shows what the
step adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import zbv_worker as zbv
from torch import nn
from zbv_solver.plans.plan import plan_json
from zbv_worker.execution.plan_source import WholePlan
from zbv_worker.pipeline.batch import StepData, split_batch
from zbv_worker.transport.world import World

from benchmarks.findings import Finding, Target, paired_ratio
from benchmarks.worker.ranks import MEETING_SECONDS, Workload, bare_executor, meeting, on_ranks, plan_of

MOST = 1.05
STEP, BARE = "Pipeline.step", "executor"


class PipelineStepWorkload(Workload):
    """Stages of one linear layer."""

    pp_degrees: tuple[int, ...] = (1, 2)
    """Numbers of ranks; one measurement each."""
    microbatches: int = 32
    rows: int = 256
    width: int = 512
    """The activations of a microbatch; the defaults make an action take about 1 ms on one core."""
    rounds: int = 20
    """Measured pairs of steps, after ``warm_up`` pairs."""
    warm_up: int = 2


def measure(workload: PipelineStepWorkload) -> list[Finding]:
    """Measure every number of ranks."""
    found = []
    for p in workload.pp_degrees:
        plan = plan_json(plan_of(p, workload.microbatches))
        found += findings(p, on_ranks("pipeline_step", {"workload": workload.model_dump(), "plan": plan}, p))
    return found


def findings(p: int, answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings from the seconds of every step, by rank; a step takes as long as on its slowest rank."""
    step, bare = (np.max([answer[name] for answer in answers], axis=0) for name in (STEP, BARE))
    value, interval = paired_ratio(step.tolist(), bare.tolist())
    milliseconds = 1e3 * float(np.median(bare)) / answers[0]["actions"]
    return [
        Finding(f"p={p}: Pipeline.step / bare executor", value, "", Target(MOST), interval),
        Finding(f"p={p}: time per action", milliseconds, "ms"),
    ]


# --- on a rank


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Seconds of every step, by kind."""
    workload = PipelineStepWorkload(**request["workload"])
    plan = WholePlan.of_document(request["plan"])
    rows, width, loss = workload.rows * workload.microbatches, workload.width, nn.functional.mse_loss
    torch.manual_seed(0)  # equal batches on every rank
    inputs, targets = torch.randn(2, rows, width).unbind()
    data = StepData()
    data.microbatches = split_batch(inputs, targets, {}, workload.microbatches)
    model = zbv.Model(_layers(plan.problem.n_stages, width), loss=loss, data=data.microbatch)
    with meeting(world) as transport:
        bare, bare_modules = bare_executor(model, plan, transport, data)
        pipe = zbv.Pipeline(plan, _layers(plan.problem.n_stages, width), loss=loss, backend="gloo")
        steps: dict[str, Callable[[int], object]] = {
            STEP: lambda number: pipe.step(inputs, targets),
            BARE: bare.step,
        }
        modules = {STEP: pipe.modules.values(), BARE: bare_modules}
        found: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(workload.warm_up + workload.rounds):
            # in alternating order, so that neither always finds the caches of the other
            for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
                for module in modules[name]:
                    module.zero_grad()
                transport.barrier(MEETING_SECONDS)
                begun = time.perf_counter()
                step(turn)
                if turn >= workload.warm_up:
                    found[name].append(time.perf_counter() - begun)
        pipe.close()
    return {**found, "actions": len(plan.of_rank(world.rank).actions)}


def _layers(count: int, width: int) -> list[Any]:
    return [nn.Linear(width, width) for _ in range(count)]
