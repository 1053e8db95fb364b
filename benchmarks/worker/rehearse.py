"""Rehearsals, compared with their plans: real ranks and transfers, with sleeps instead of compute.

:func:`measure` compares one plan with its rehearsal. :func:`measure_schedules` rehearses our plan and
others for the same problem, with more ranks than this machine has cores.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict
from zbv_worker.host.local_ranks import LocalRanks, python_command

from benchmarks.findings import Finding, Target
from benchmarks.worker.paired_ratios import median_interval, paired_ratio

if TYPE_CHECKING:
    from zbv_solver.plans.orders import Orders
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.problem import Problem

MOST_PERCENT = 3.0

_TARGETS = {
    "ScheduleZBVZeroBubble": Target(1.0, "at most within noise"),
    "1F1B": Target(1.0, "below beyond noise"),
    "interleaved 1F1B": Target(1.0, "below beyond noise"),
}
_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True)
class RehearseWorkload:
    """A problem with uneven stages, in milliseconds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pp_degree: int = 8
    microbatches: int = 64
    forward: tuple[float, float] = (10.0, 11.0)
    backward_input: tuple[float, float] = (12.0, 13.0)
    backward_weight: tuple[float, float] = (10.0, 10.0)
    """One value for stages 0 to p-1, and one for the others."""
    p2p: float = 1.0
    memory: float = 1.0
    """Memory limit of every rank, as a multiple of the memory of 1F1B on its fullest rank."""
    transfer_bytes: int = 65536
    steps: int = 5
    """Measured steps, after one warm-up step."""

    def problem(self, pp_degree: int, microbatches: int) -> Problem:
        """Return the problem for any number of ranks."""
        from zbv_solver.problem.problem import Problem, Units
        from zbv_solver.problem.stages import Costs, Memory, Placement

        p, stages = pp_degree, 2 * pp_degree

        def staged(pair: tuple[float, float]) -> tuple[float, ...]:
            return (pair[0],) * p + (pair[1],) * p

        return Problem(
            Placement.of("v", p),
            microbatches,
            Costs(
                forward=staged(self.forward),
                backward_input=staged(self.backward_input),
                backward_weight=staged(self.backward_weight),
                p2p=tuple(0.0 if boundary == p - 1 else self.p2p for boundary in range(stages - 1)),
            ),
            Memory(
                (2.0,) * stages, (-1.0,) * stages, (-1.0,) * stages, (0.0,) * p, (4 * p * self.memory,) * p
            ),
            units=Units(time="ms"),
        )


def measure(workload: RehearseWorkload) -> list[Finding]:
    """Plan, rehearse, compare."""
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    plan = search(workload.problem(workload.pp_degree, workload.microbatches), SearchOptions(effort="quick"))
    return findings(workload, rehearsed(plan, workload))


def findings(workload: RehearseWorkload, outcome: dict[str, Any]) -> list[Finding]:
    """Excess over the planned time, and its three parts, averaged over the ranks."""
    import numpy as np

    planned = outcome["planned"]
    over, interval = median_interval(100 * (np.asarray(outcome["steps"]) / planned - 1))
    title = f"p={workload.pp_degree} m={workload.microbatches}: measured over planned"
    ranks = outcome["ranks"]
    parts = {
        "actions that took longer": [r["busy"] - r["planned_busy"] for r in ranks],
        "between actions": [r["between"] for r in ranks],
        "unplanned waiting": [r["waiting"] - r["planned_waiting"] for r in ranks],
    }
    return [
        Finding(title, over, "%", Target(MOST_PERCENT), interval),
        *(
            Finding(f"  of it {what}", 100 * float(np.mean(seconds)) / planned, "%")
            for what, seconds in parts.items()
        ),
    ]


def measure_schedules(workload: RehearseWorkload, pp_degree: int, microbatches: int) -> list[Finding]:
    """Rehearse our plan, PyTorch's ZBV and the classical schedules; returns ratios of step times.

    They are rehearsed one after another, so the intervals include the noise of each.
    """
    outcomes = {
        name: rehearsed(plan, workload)
        for name, plan in schedules(workload.problem(pp_degree, microbatches)).items()
    }
    mine = outcomes["zbv"]
    found = []
    for name, target in _TARGETS.items():
        other = outcomes[name]
        ratio, interval = paired_ratio(mine["steps"], other["steps"])
        title = f"rehearsed p={pp_degree} m={microbatches}: zbv / {name}"
        found.append(Finding(title, ratio, "", target, interval))
        found.append(Finding("  as planned", mine["planned"] / other["planned"]))
    return found


def schedules(problem: Problem) -> dict[str, Plan]:
    """Our plan of a problem, and the other schedules of the same model."""
    from zbv_solver.search.assemble import baseline_plan, make_plan
    from zbv_solver.search.run import search

    return {
        "zbv": search(problem),
        "ScheduleZBVZeroBubble": make_plan(
            _unlimited(problem), torch_zbv(problem), method="ScheduleZBVZeroBubble"
        ),
        "1F1B": baseline_plan("1f1b", problem),
        "interleaved 1F1B": baseline_plan("interleaved-1f1b", problem),
    }


def torch_zbv(problem: Problem) -> Orders:
    """Return the order of PyTorch's ZBV schedule, as its class computes it."""
    from torch.distributed.pipelining import ScheduleZBVZeroBubble
    from zbv_solver.plans.orders import Orders

    schedule: Any = object.__new__(ScheduleZBVZeroBubble)  # its constructor needs stages and a process group
    schedule.pp_group_size, schedule._n_microbatches = problem.pp_degree, problem.microbatches
    schedule.n_local_stages, schedule.num_stages = 2, problem.n_stages
    return Orders.from_text(
        [
            [str(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None]
            for rank in range(problem.pp_degree)
        ]
    )


def _unlimited(problem: Problem) -> Problem:
    from dataclasses import replace

    return replace(problem, memory=replace(problem.memory, limit=None))


def rehearsed(plan: Plan, workload: RehearseWorkload) -> dict[str, Any]:
    """Return the document of ``zbv-worker rehearse --json``, with all ranks of a plan on this machine."""
    from zbv_solver.plans.plan import plan_json

    with tempfile.TemporaryDirectory(prefix="zbv-bench-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan_json(plan)))
        command = python_command("zbv_worker", *_arguments(folder, workload))
        with LocalRanks([command] * plan.problem.pp_degree, folder) as ranks:
            ranks.wait(_LONGEST_SECONDS)
        numbers: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
        return numbers


def _arguments(folder: Path, workload: RehearseWorkload) -> Iterator[str]:
    yield "rehearse"
    yield from ("--plan-file", str(folder / "plan.json"))
    yield from ("--json", str(folder / "numbers.json"))
    yield from ("--steps", str(workload.steps), "--bytes", str(workload.transfer_bytes))
