"""A GPT trained with our plan and runtime, and with PyTorch's schedule classes, in turns on the same ranks.

All start from the same parameters and read the same data, so their losses must agree. A turn is one iteration
between two barriers. Its time is the makespan without the optimizer, so our plan minimizes the makespan.

The costs of the plan's actions are measured in turns as well, as ``zbv-worker profile`` measures them. So the
step can be compared with its plan although the machine's speed changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ConfigDict
from zbv_worker.errors import WorkerError
from zbv_worker.measure.profile.profile import ACTION_TIMES, ProfileOptions, profile
from zbv_worker.model.spec import ModelSpec

from benchmarks.findings import Finding, Target
from benchmarks.worker.paired_ratios import paired_ratio
from benchmarks.worker.ranks import MEETING_SECONDS, meeting, on_ranks
from benchmarks.worker.workload import parse_workload, workload_json

if TYPE_CHECKING:
    from torch import nn
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.problem import Problem
    from zbv_worker.execution.binding import Batches
    from zbv_worker.execution.executor import Executor
    from zbv_worker.execution.whole_plan import WholePlan
    from zbv_worker.transport.channels import Transport
    from zbv_worker.transport.world import World

    from benchmarks.worker.torch_schedules import StepData

OURS = "zbv"
COSTS = "costs"

FIRST_LOSS_TOLERANCE = 1e-5
"""Relative tolerance for losses of the first step, which has equal parameters."""

MOST_OF_PLAN = 1.03
"""The longest step, as a multiple of the planned one."""

LOSS_TOLERANCE = 1e-2
"""Relative tolerance for later steps: schedules sum gradients in different orders, and training amplifies
rounding."""


@dataclass(frozen=True)
class GptWorkload:
    """The model, and how it is trained."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp_degree: int = 2
    microbatches: tuple[int, ...] = (4, 8)
    model: dict[str, Any] = field(
        default_factory=lambda: {"layers": 8, "width": 192, "heads": 6, "length": 128, "sequences": 2}
    )
    """Arguments of :func:`zbv_worker.models.gpt.gpt`."""
    memory_limit_fraction: float = 1.0
    """The plan's memory limit as a share of the memory of 1F1B on its fullest rank, as in ``zbv-worker
    profile``."""
    profile_repeats: int = 12
    rounds: int = 40
    """Measured turns, after one warm-up turn."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec("zbv_worker.models.gpt:gpt", self.model)


Costs = Mapping[tuple[int, str], float]
"""Seconds by stage and letter."""


@dataclass(frozen=True)
class Turns:
    """The measurements of the ranks."""

    seconds: Mapping[str, Sequence[float]]
    losses: Mapping[str, Sequence[float]]
    """By schedule, one number per round."""
    costs: Sequence[Costs]
    """Seconds by stage and letter, for every round."""

    @classmethod
    def of_ranks(cls, answers: Sequence[Mapping[str, Any]]) -> Turns:
        """Combine the times and losses of the ranks; on one host they share a clock."""
        seconds: dict[str, list[float]] = {}
        losses: dict[str, list[float]] = {}
        costs = [
            _means(chain.from_iterable(ranks))
            for ranks in zip(*(answer[COSTS] for answer in answers), strict=True)
        ]
        for name in answers[0].keys() - {COSTS}:
            rounds = zip(*(answer[name] for answer in answers), strict=True)
            for ranks in rounds:
                first, last = min(rank["start"] for rank in ranks), max(rank["end"] for rank in ranks)
                seconds.setdefault(name, []).append((last - first) / 1e9)
                losses.setdefault(name, []).extend(r["loss"] for r in ranks if r["loss"] is not None)
        return cls(seconds, losses, costs)

    def planned(self, plan: Plan) -> list[float]:
        """The plan's makespan in seconds for every round, with the costs measured around that round."""
        from zbv_solver.timing.start_times import evaluate

        found = []
        for turn in range(len(self.costs)):
            near = self.costs[max(0, turn - 1) : turn + 2]
            times = {
                name: tuple(
                    fmean(c[stage, letter] for c in near) * 1e6 for stage in range(plan.problem.n_stages)
                )
                for name, letter in zip(ACTION_TIMES, "FIWB", strict=True)
            }
            problem = replace(plan.problem, costs=replace(plan.problem.costs, **times))
            found.append(evaluate(problem, plan.orders).makespan / 1e6)
        return found

    def check_losses(self) -> None:
        """Raise :class:`WorkerError` if the schedules did not train the same model."""
        for name, losses in self.losses.items():
            for step, (mine, right) in enumerate(zip(losses, self.losses[OURS], strict=True)):
                tolerance = LOSS_TOLERANCE if step else FIRST_LOSS_TOLERANCE
                if abs(mine - right) > tolerance * abs(right):
                    raise WorkerError(
                        f"step {step}: the loss of {name} is {mine:.6f}, that of {OURS} {right:.6f}; they "
                        f"must train the same model."
                    )


def _means(samples: Iterable[tuple[int, str, float]]) -> Costs:
    of: dict[tuple[int, str], list[float]] = {}
    for stage, letter, seconds in samples:
        of.setdefault((stage, letter), []).append(seconds)
    return {action: fmean(times) for action, times in of.items()}


def measure(workload: GptWorkload) -> list[Finding]:
    """Profile, plan, and run all schedules in turns, for every number of microbatches."""
    measured = profile(
        ProfileOptions(
            workload.spec,
            workload.pp_degree,
            workload.microbatches[0],
            repeats=workload.profile_repeats,
            memory_limit_fraction=workload.memory_limit_fraction,
        )
    )
    found: list[Finding] = []
    for microbatches in workload.microbatches:
        found += _measure(workload, plan_of(measured, microbatches))
    return found


def plan_of(measured: Problem, microbatches: int) -> Plan:
    """Plan single iterations of a measured model."""
    from zbv_solver.search.run import search

    return search(replace(measured, microbatches=microbatches, objective="makespan"))


def _measure(workload: GptWorkload, plan: Plan) -> list[Finding]:
    from zbv_solver.plans.plan import plan_json

    request = {"workload": workload_json(workload), "plan": plan_json(plan)}
    turns = Turns.of_ranks(on_ranks("gpt", request, workload.pp_degree))
    turns.check_losses()
    return findings(turns, workload.pp_degree, plan)


def findings(turns: Turns, p: int, plan: Plan) -> list[Finding]:
    """Ratios of our times to those of the other schedules, and to the planned time."""
    targets = {
        "ScheduleZBVZeroBubble": Target(1.0, "at most within noise"),
        "ScheduleInterleaved1F1B": Target(1.0, "below beyond noise"),
        "Schedule1F1B": Target(1.0, "below beyond noise"),
    }
    mine, name = turns.seconds[OURS], f"GPT p={p} m={plan.problem.microbatches}: zbv /"
    found = []
    for other, target in targets.items():
        ratio, interval = paired_ratio(mine, turns.seconds[other])
        found.append(Finding(f"{name} {other}", ratio, interval=interval, target=target))
    ratio, interval = paired_ratio(mine, turns.planned(plan))
    found.append(
        Finding(f"{name} its plan, costs measured in turns", ratio, "", Target(MOST_OF_PLAN), interval)
    )
    ratio, interval = paired_ratio(mine, [plan.metrics.makespan / 1e6] * len(mine))
    return [*found, Finding(f"{name} its plan, costs measured before", ratio, interval=interval)]


# --- on a rank


class _Pipeline(Protocol):
    modules: list[nn.Module]

    def step(self, step: int) -> float | None:
        """Run one iteration; returns the mean loss on the rank with the last stage."""


class ZbvPipeline:
    """One rank of a plan on our executor."""

    def __init__(self, executor: Executor, modules: list[nn.Module]):
        self._executor = executor
        self.modules = modules

    def step(self, step: int) -> float | None:
        """Run the plan once."""
        return self._executor.step(step).loss


def zbv_pipeline(
    model: Any, plan: WholePlan, transport: Transport, data: Batches, timeout: float = MEETING_SECONDS
) -> ZbvPipeline:
    """A plan on our executor; collective."""
    import torch
    from zbv_solver.plans.channels import channels
    from zbv_worker.execution.build_stages import build_stages
    from zbv_worker.execution.executor import Executor
    from zbv_worker.transport.channels import key_of

    device = torch.device("cpu")
    transport.open([key_of(channel) for channel in channels(plan.problem, plan.orders)], timeout)
    mine = plan.of_rank(transport.rank)
    stages = build_stages(model, mine, device)
    executor = Executor(mine, stages, data, transport, device=device, timeout=timeout)
    return ZbvPipeline(executor, [stage.module for stage in stages.values()])


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, list[Any]]:
    """Run the schedules in turns; returns when each began and ended on this rank in ns, and its loss.

    Under :data:`COSTS`, returns the seconds of actions by stage and letter.
    """
    import torch
    from zbv_worker.execution.whole_plan import WholePlan
    from zbv_worker.measure.profile.rank import RankProfiler

    from benchmarks.worker.torch_schedules import SCHEDULES, StepData, torch_schedule

    workload = parse_workload(GptWorkload, request["workload"])
    plan = WholePlan.of_document(request["plan"])
    model, p, m = workload.spec.build(), workload.pp_degree, plan.problem.microbatches
    data = StepData(model, m)
    with meeting(world) as transport:
        pipelines: dict[str, _Pipeline] = {OURS: zbv_pipeline(model, plan, transport, data)}
        for name in SCHEDULES:
            pipelines[name] = torch_schedule(name, model, world.rank, p, m, data)
        profiler = RankProfiler(ProfileOptions(workload.spec, p, m), transport, torch.device("cpu"))
        captured = profiler.capture()

        def costs() -> list[tuple[int, str, float]]:
            return [(stage, letter, seconds()) for (stage, letter), seconds in profiler.round(captured)]

        return dict(_turns(pipelines, costs, data, transport, model, workload.rounds))


def _turns(
    pipelines: Mapping[str, _Pipeline],
    costs: Callable[[], list[tuple[int, str, float]]],
    data: StepData,
    transport: Transport,
    model: Any,
    rounds: int,
) -> Iterator[tuple[str, list[Any]]]:
    names = [*pipelines, COSTS]
    found: dict[str, list[Any]] = {name: [] for name in names}
    optimizers = {
        name: model.optimizer(list(chain.from_iterable(m.parameters() for m in pipeline.modules)))
        for name, pipeline in pipelines.items()
    }
    data.load(0)
    # in the first turn, ranks exchange shapes; PyTorch's schedules run the stages for that
    for name, pipeline in pipelines.items():
        pipeline.step(0)
        optimizers[name].zero_grad()
    for turn in range(rounds):
        data.load(turn)
        at = turn % len(names)
        # vary the order, so that no schedule always follows the slowest
        for name in (*names[at:], *names[:at]):
            transport.barrier(MEETING_SECONDS)
            if name == COSTS:
                found[name].append(costs())
                continue
            start = time.perf_counter_ns()
            loss = pipelines[name].step(turn)
            end = time.perf_counter_ns()
            found[name].append({"start": start, "end": end, "loss": loss})
            optimizers[name].step()
            optimizers[name].zero_grad()
    yield from found.items()
