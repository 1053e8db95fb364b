"""Memory of stages, cost of the split, and the step of a plan: what plans and estimates state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.on_devices import TIMEOUT, Devices, Here
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_worker import Pipeline
from zbv_worker.measure.estimate.estimate import estimate_stages
from zbv_worker.measure.live_bytes import watching
from zbv_worker.measure.profile.profile import ProfileOptions, to_problem
from zbv_worker.measure.profile.rank import RankProfiler
from zbv_worker.measure.ranks import connected
from zbv_worker.measure.stage_memory import stage_memory
from zbv_worker.model.checks import build_stage
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.gpt import gpt
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.program import AUTOCAST, Precision, Program
from zbv_worker.stage.stage import Stage
from zbv_worker.tracing.merged_trace import END, START

SMALL = {"layers": 4, "width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
LARGE = {"layers": 8, "width": 1536, "heads": 12, "length": 1024, "sequences": 4}
"""Large enough that kernels, and not their launches, take the time; about 4 GB with gradients."""
STAGES, MICROBATCHES = 2, 8
MEMORY_TOLERANCE = 0.05
"""Relative difference between a GPU and the estimate: attention keeps slightly more or less there."""
BLOCK, TENSORS = 512, 64
"""Bytes to which CUDA's allocator rounds tensors up; a generous number of tensors of a stage."""
SPLIT_LIMIT = 1.25
"""Time of I + W divided by B: the split reads some tensors twice, and starts more kernels."""
STEP_LIMIT = 1.05
"""A measured step divided by the plan's span."""
MEMORY_LIMIT = 1.05
"""A rank's memory divided by the plan's account: the allocator rounds sizes up."""


def sizes(here: Here) -> dict[str, int]:
    """A model whose times mean something on a GPU, and a small one elsewhere."""
    return LARGE if here.is_gpu else SMALL


def memory_of_stages(here: Here, precision: Precision) -> list[tuple[str, int, int]]:
    """See the test; returns what was compared, measured and estimated bytes."""
    model = gpt(**sizes(here))
    input, target = (tensor.to(here.device) for tensor in model.microbatch(0, 0))
    compared = []
    for estimate, index in zip(
        estimate_stages(model, STAGES, Program(precision)), range(STAGES), strict=True
    ):
        is_last = index == STAGES - 1
        module = build_stage(model, index, STAGES, here.device)
        stage = Stage(index, STAGES, module, 1, model.loss if is_last else None, AUTOCAST[precision])
        use_main_gradients(module.parameters())
        of_stage = target if is_last else None
        output = stage.forward(0, input, of_stage, split=True)  # creates the parameters' gradients
        gradient = None if is_last else torch.ones_like(output)
        stage.backward_input(0, gradient)
        stage.backward_weight(0)
        measured, estimated = (
            stage_memory(stage, input, of_stage, gradient, here.device),
            estimate.kept.memory,
        )
        for letter, name in (("F", "after_forward"), ("I", "after_input"), ("W", "after_weight")):
            what = f"stage {index} after {letter}"
            compared.append((what, getattr(measured, name), getattr(estimated, name)))
        input = output
    return compared


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stages_hold_what_an_estimate_without_a_gpu_states(alone: Devices, precision: Precision) -> None:
    """The memory that plans and estimates state is the memory that stages hold after F, I and W."""
    (compared,) = alone.run(memory_of_stages, precision=precision)
    for what, measured, estimated in compared:
        room = MEMORY_TOLERANCE * estimated + (BLOCK * TENSORS if estimated else 0)
        assert abs(measured - estimated) <= room, f"{what}: plan with measured memory (`zbv-worker profile`)"


def costs(here: Here, precision: Precision) -> dict[str, Any]:
    """See the tests; profiles one rank, plans, and runs the plan."""
    spec = ModelSpec("zbv_worker.models.gpt:gpt", sizes(here))
    options = ProfileOptions(
        spec, 1, MICROBATCHES, repeats=10 if here.is_gpu else 2, program=Program(precision), timeout=TIMEOUT
    )
    with connected(here.world, "gloo", here.device, TIMEOUT) as transport:
        profile = RankProfiler(options, transport, here.device).measure()
    plan = search(to_problem(options, [profile]), SearchOptions(effort="quick"))
    model: Any = spec.build()
    data = [model.microbatch(0, index) for index in range(MICROBATCHES)]
    times: Any = {"timeout": TIMEOUT, "startup_timeout": TIMEOUT}
    with Pipeline(plan, model, device=here.device, backend="gloo", precision=precision, **times) as pipe:
        steps = []
        for _ in range(4):
            pipe.step(microbatches=data)
            (trace,) = pipe.trace()
            times = trace.times[-1]
            steps.append(int(times[-1, END] - times[0, START]) / 1e3)
        with watching(here.device) as held:
            pipe.step(microbatches=data)
            peak = held.peak
    config = model.config
    passed = 2 * MICROBATCHES * 4 * config.sequences * config.length * config.width  # to the other stage
    static = profile.static
    kept = static.total - static.receives - static.workspace
    return {
        "split": {
            stage.stage: (stage.backward_input.median + stage.backward_weight.median) / stage.backward.median
            for stage in profile.stages
        },
        "step": min(steps[1:]) / plan.metrics.span,
        "memory": peak / (plan.metrics.peak_memory[0] - kept + passed),
        "is_timed": here.is_gpu,
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_takes_the_time_and_the_memory_of_its_plan(alone: Devices, precision: Precision) -> None:
    """A plan from profiled costs states what happens, and splitting the backward costs little."""
    (found,) = alone.run(costs, precision=precision)
    assert found["memory"] <= MEMORY_LIMIT, "memory beyond the plan's account and what stages pass on"
    if found["is_timed"]:
        assert found["step"] <= STEP_LIMIT, "compare a trace (`zbv-worker run --trace`) with the plan"
        assert max(found["split"].values()) <= SPLIT_LIMIT, "plan with fused backwards on this GPU"
