"""Is the plan weak, or the bound? Small problems whose microbatches differ, solved over all orders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zbv_solver.bounds import lower_bound
from zbv_solver.improve.cp_search import refine
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of

from benchmarks.findings import Finding
from benchmarks.lengths.distributions import MADE
from benchmarks.lengths.instances import PlanningInstance

SIZES = ((4, 5), (4, 6))
"""Ranks and microbatches: what CP-SAT often solves."""
SEEDS = range(4)
HEADER = f"{'instance':22}{'seed':>5}{'load':>9}{'bound':>9}{'CP-SAT proves':>15}{'and finds':>11}\n"
"""All in percent of the plan's objective: the largest load of a rank, the bound without CP-SAT, and what
CP-SAT proves and finds, with the plan as its start."""
SAME_PERCENT = 0.01
"""CP-SAT's bound and order may differ by this much, as it rounds durations."""


@dataclass(frozen=True)
class ExactCase:
    """One problem; numbers are objectives as shares of the plan's."""

    name: str
    seed: int
    load: float
    bound: float
    proved: float
    found: float

    @property
    def is_solved(self) -> bool:
        """Whether CP-SAT has proved its order optimal."""
        return 100 * (self.found - self.proved) <= SAME_PERCENT


def exact_instances(share: float) -> Iterator[PlanningInstance]:
    """Problems with a memory limit as a share of what 1F1B needs for the largest microbatch."""
    for p, m in SIZES:
        for law in MADE:
            for seed in SEEDS:
                yield PlanningInstance(law, p, m, share, "max", seed)


def exact_table(
    chosen: Sequence[PlanningInstance], effort: float, options: SearchOptions, write: Callable[[str], object]
) -> list[Finding]:
    """Plan and solve every instance, write its row, and return what the solved ones say in the mean.

    Parameters
    ----------
    effort
        CP-SAT's deterministic time for each.
    """
    write(HEADER)
    cases = []
    for each in chosen:
        cases.append(exact_case(each, effort, options))
        write(exact_line(cases[-1]))
        sys.stdout.flush()
    return list(exact_findings(cases))


def exact_case(instance: PlanningInstance, effort: float, options: SearchOptions) -> ExactCase:
    """Plan an instance, and solve it from there."""
    problem = parse_problem(instance.document())
    plan = search(problem, options)
    bound = lower_bound(problem, "thorough").value
    result = refine(problem, plan.orders, lower_bound=bound, effort=effort)
    found = plan.objective if result.orders is None else objective_of(problem, result.orders)
    return ExactCase(
        instance.name,
        instance.seed,
        max(problem.busy_time(rank) for rank in range(problem.pp_degree)) / plan.objective,
        bound / plan.objective,
        (found if result.proved else result.lower_bound) / plan.objective,
        found / plan.objective,
    )


def exact_line(case: ExactCase) -> str:
    """A row as text."""
    load, bound, proved, found = (
        f"{100 * (share - 1):+.2f}" for share in (case.load, case.bound, case.proved, case.found)
    )
    return f"{case.name:22}{case.seed:5}{load:>9}{bound:>9}{proved:>15}{found:>11}\n"


def exact_findings(cases: Sequence[ExactCase]) -> Iterator[Finding]:
    """Means over the solved problems: how far the plan is from the optimum, and how far the bound is."""
    solved = [case for case in cases if case.is_solved]
    yield Finding("solved by CP-SAT", len(solved), f"of {len(cases)}")
    if solved:
        count = len(solved) / 100
        plans = [1 / case.found - 1 for case in solved]
        yield Finding("plans longer than the optimum, mean", sum(plans) / count, "%")
        yield Finding("plans longer than the optimum, largest", 100 * max(plans), "%")
        yield Finding(
            "bounds below the optimum, mean", sum(1 - case.bound / case.found for case in solved) / count, "%"
        )
