"""Peak memory of real training steps, compared with the plan, rank by rank.

A model is profiled and planned with several memory limits, and trained with every plan. The peak of the bytes
alive on a rank during the steps, including parameters, gradients, optimizer state and receive buffers, is
compared with the plan's ``peak_memory``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict
from zbv_worker.measure.profile.profile import ProfileOptions, RankProfile, measure_ranks, to_problem
from zbv_worker.model.spec import ModelSpec

from benchmarks.findings import Finding, Target
from benchmarks.worker.ranks import meeting, on_ranks
from benchmarks.worker.workload import parse_workload, workload_json

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan
    from zbv_worker.transport.world import World

MOST_PERCENT = 5.0


@dataclass(frozen=True)
class MemoryWorkload:
    """The model, and how it is trained."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp_degrees: tuple[int, ...] = (2, 4)
    microbatches: int = 12
    limits: tuple[float | None, ...] = (0.7, 1.0, None)
    """Fractions of the memory of 1F1B on its fullest rank; None means no limit."""
    model: dict[str, Any] = field(
        default_factory=lambda: {"layers": 8, "width": 192, "heads": 6, "length": 128, "sequences": 2}
    )
    """Arguments of :func:`zbv_worker.models.gpt.gpt`."""
    profile_repeats: int = 3
    steps: int = 3
    """Steps per plan. The first allocates gradients and optimizer state and does not count."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec("zbv_worker.models.gpt:gpt", self.model)


def measure(workload: MemoryWorkload) -> list[Finding]:
    """Profile once per number of ranks, then train with every limit."""
    found = []
    for p in workload.pp_degrees:
        options = ProfileOptions(workload.spec, p, workload.microbatches, repeats=workload.profile_repeats)
        ranks = measure_ranks(options)
        for limit in workload.limits:
            plan = plan_of(options, ranks, limit)
            found += compare(plan, limit, peaks_of(workload, plan))
    return found


def plan_of(options: ProfileOptions, ranks: list[RankProfile], limit: float | None) -> Plan:
    """Plan within a fraction of the memory of 1F1B; raises :class:`InfeasibleMemory`."""
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    problem = to_problem(replace(options, memory_limit_fraction=limit), ranks)
    return search(problem, SearchOptions(effort="quick"))


def peaks_of(workload: MemoryWorkload, plan: Plan) -> list[int]:
    """Train; returns the peak bytes of every rank."""
    from zbv_solver.plans.plan import plan_json

    request = {"workload": workload_json(workload), "plan": plan_json(plan)}
    return on_ranks("memory", request, plan.problem.pp_degree)


def compare(plan: Plan, limit: float | None, peaks: list[int]) -> list[Finding]:
    """Difference of every rank's peak from the plan, in percent of the plan."""
    found = []
    limited = "no limit" if limit is None else f"{limit:g} of 1F1B"
    for rank, (planned, peak) in enumerate(zip(plan.metrics.peak_memory, peaks, strict=True)):
        off = 100 * (peak / planned - 1)
        where = "above" if off > 0 else "below"
        what = (
            f"p={plan.problem.pp_degree}, {limited}, rank {rank}: {where} planned {planned / 1e6:.1f} MB by"
        )
        found.append(Finding(what, abs(off), "%", target=Target(MOST_PERCENT)))
    return found


# --- on a rank


def on_rank(request: Mapping[str, Any], world: World) -> int:
    """Measure the peak of the bytes alive in the steps after the first.

    Gradients are kept from step to step, as with several replicas, because the plan counts them. If they were
    dropped, a peak before the first W's of a step would be lower.
    """
    import torch
    from zbv_worker.execution.whole_plan import WholePlan
    from zbv_worker.measure.live_bytes import watching

    from benchmarks.worker.gpt import zbv_pipeline

    workload = parse_workload(MemoryWorkload, request["workload"])
    plan, model = WholePlan.of_document(request["plan"]), workload.spec.build()
    peak = 0
    with meeting(world) as transport, watching(torch.device("cpu")) as held:
        pipeline = zbv_pipeline(model, plan, transport, model)
        parameters = list(chain.from_iterable(module.parameters() for module in pipeline.modules))
        optimizer = model.optimizer(parameters)
        for step in range(1 + workload.steps):
            held.restart()
            pipeline.step(step)
            peak = max(peak, held.peak) if step else 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return peak
