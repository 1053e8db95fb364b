"""CPU time per action that a runtime adds to the compute of the stages: ours, compared with PyTorch's.

The same plan of tiny stages runs in turns on our executor, on PyTorch's runtime with our split, and
on PyTorch's runtime with its own split. The same actions also run in two plain
loops in the same processes:

- only F, I, W and B of the modules. This is the cost of compute. It is subtracted from all three runtimes;
  the rest includes their transfers.
- the same with plain sends and receives on the plan's channels. Any program that uses gloo has this cost,
  with caches as cold as waiting leaves them. The difference to it is the overhead of our executor.

Only CPU time counts, so waiting for peers and other processes does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict
from zbv_worker.model.spec import ModelSpec

from benchmarks.findings import Finding, Target
from benchmarks.worker.paired_ratios import median_interval
from benchmarks.worker.ranks import MEETING_SECONDS, meeting, on_ranks
from benchmarks.worker.workload import parse_workload, workload_json

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan
    from zbv_worker.transport.world import World

OURS, STORE, STOCK = "zbv", "torch with our split", "torch as shipped"
PLAIN, BARE = "plain loop", "plain loop with bare transfers"
RIVALS = (STORE, STOCK)

MOST_US = 45.0
MOST_RATIO = 0.35

Sample = tuple[int, int]
"""CPU time of a turn in nanoseconds: of the thread that runs the plan, and of the whole process."""


@dataclass(frozen=True)
class OverheadWorkload:
    """The plan, and how often it runs."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp_degrees: tuple[int, ...] = (2, 4)
    """Numbers of ranks; one measurement each."""
    microbatches: int = 16
    in_a_row: int = 4
    """Steps per turn, as in training; together they are one sample."""
    rounds: int = 20
    """Measured turns of every runtime, after ``warm_up`` turns."""
    warm_up: int = 2

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec("zbv_worker.models.tiny:tiny")


def measure(workload: OverheadWorkload) -> list[Finding]:
    """Measure every number of ranks."""
    from zbv_solver.plans.plan import plan_json

    found: list[Finding] = []
    for p in workload.pp_degrees:
        plan = plan_of(p, workload.microbatches)
        request = {"workload": workload_json(workload), "plan": plan_json(plan)}
        found += findings(p, on_ranks("overhead", request, p))
    return found


def plan_of(p: int, microbatches: int) -> Plan:
    """A V plan of equal stages."""
    from zbv_solver.problem.problem import Problem
    from zbv_solver.problem.stages import Costs, Memory, Placement
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    placement = Placement.of("v", p)
    ones = (1.0,) * placement.n_stages
    deltas = tuple(tuple(delta * one for one in ones) for delta in (2.0, -1.0, -1.0))
    memory = Memory(deltas[0], deltas[1], deltas[2], (0.0,) * p, (4.0 * p,) * p)
    problem = Problem(placement, microbatches, Costs(ones, ones, ones, (0.0,) * (len(ones) - 1)), memory)
    return search(problem, SearchOptions(effort="quick"))


def findings(p: int, answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings from the samples: medians over the rounds of the mean over the ranks."""
    of = {name: _microseconds(answers, name) for name in (OURS, *RIVALS)}
    own = _microseconds(answers, OURS, beyond=BARE)
    found = []
    for at, what in enumerate(("executor's thread", "whole process")):
        value, interval = median_interval(own[:, at])
        title = f"p={p}: CPU per action beyond compute and bare transfers, {what}"
        found.append(Finding(title, value, "us", Target(MOST_US), interval))
    for at, what in enumerate(("executor's thread", "whole process")):
        value, interval = median_interval(of[OURS][:, at])
        found.append(Finding(f"p={p}: CPU per action beyond compute, {what}", value, "us", interval=interval))
    for rival in RIVALS:
        value, interval = median_interval(of[OURS][:, 1] / of[rival][:, 1])
        found.append(Finding(f"p={p}: zbv / {rival}, whole process", value, "", Target(MOST_RATIO), interval))
    # No program that moves every tensor over gloo is faster than this.
    for rival in RIVALS:
        value, interval = median_interval(_microseconds(answers, BARE)[:, 1] / of[rival][:, 1])
        found.append(Finding(f"p={p}: bare transfers / {rival}, whole process", value, "", interval=interval))
    for rival in RIVALS:
        value, interval = median_interval(of[rival][:, 1])
        found.append(Finding(f"p={p}: {rival}, whole process", value, "us", interval=interval))
    return found


def _microseconds(
    answers: Sequence[Mapping[str, Any]], name: str, beyond: str = PLAIN
) -> NDArray[np.float64]:
    """CPU time per action beyond a plain loop, as the mean over the ranks; shape (rounds, 2)."""
    per_rank = [
        (np.asarray(answer[name]) - np.median(np.asarray(answer[beyond]), axis=0)) / answer["actions"] / 1e3
        for answer in answers
    ]
    mean: NDArray[np.float64] = np.mean(per_rank, axis=0)
    return mean


# --- on a rank


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, Any]:
    """CPU time of every round, by runtime."""
    import gc

    import torch
    from zbv_worker.execution.whole_plan import WholePlan
    from zbv_worker.model.checks import build_stage

    from benchmarks.worker.gpt import zbv_pipeline
    from benchmarks.worker.plain_loop import BareLoop, PlainLoop
    from benchmarks.worker.torch_runtime.executor import TorchExecutor
    from benchmarks.worker.torch_schedules import StepData, torch_plan

    workload = parse_workload(OverheadWorkload, request["workload"])
    plan = WholePlan.of_document(request["plan"])
    model, mine, device = workload.spec.build(), plan.of_rank(world.rank), torch.device("cpu")
    data = StepData(model, mine.microbatches)
    data.load(0)
    crossing, _ = data.microbatch(0, 0)  # stages keep the width, so every transfer has this shape
    with meeting(world) as transport:
        built = {index: build_stage(model, index, plan.problem.n_stages, device) for index in mine.stages}
        steps: dict[str, Callable[[int], object]] = {
            OURS: zbv_pipeline(model, plan, transport, data).step,
            STORE: TorchExecutor(
                plan, world.rank, built, model, device=device, backend="gloo", timeout=MEETING_SECONDS
            ).step,
            STOCK: torch_plan(model, plan, world.rank, data).step,
            PLAIN: PlainLoop(model, mine, data).step,
            BARE: BareLoop(model, mine, data, transport, crossing).step,
        }
        samples: dict[str, list[Sample]] = {name: [] for name in steps}
        gc.freeze()  # garbage collection would be charged to the runtime that happens to run
        for turn in range(workload.warm_up + workload.rounds):
            for name, step in steps.items():
                transport.barrier(MEETING_SECONDS)
                sample = _cpu_of(step, workload.in_a_row)
                if turn >= workload.warm_up:
                    samples[name].append(sample)
    return {**samples, "actions": workload.in_a_row * len(mine.actions)}


def _cpu_of(step: Callable[[int], object], steps: int) -> Sample:
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for number in range(steps):
        step(number)
    return time.thread_time_ns() - thread, time.process_time_ns() - process
