"""From a problem to a verified plan: the pipeline of constructors and refinements, anytime.

Budgets are counted in attempts and in CP-SAT's deterministic time, never in seconds, so the same problem,
options and version give the same plan on every machine. A time limit is a cap on top; the plan's
provenance says when it, or a cancellation, cut the search short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

from zbv_solver.bounds import lower_bound
from zbv_solver.construct.baselines import BASELINES, baseline, without_limit
from zbv_solver.construct.board import Attempt
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.list_scheduling import priority_schedules, serial
from zbv_solver.errors import InvalidInput
from zbv_solver.improve.parameter_search import parameter_search
from zbv_solver.orders import Orders, first_in_first_out
from zbv_solver.plan import OPTIMAL_GAP, Baseline, Metrics, Plan, Provenance, gap_of
from zbv_solver.problem import Problem, exceeds
from zbv_solver.timing import evaluate
from zbv_solver.verify import verify, verify_orders

Effort = Literal["quick", "standard", "thorough"]
EFFORTS: tuple[str, ...] = get_args(Effort)


@dataclass(frozen=True)
class Budget:
    """What an effort spends.

    Attributes
    ----------
    cap_shares
        In-flight caps tried by list scheduling, as shares of what memory allows.
    placements
        Actions that the parameter search may place.
    exact_actions
        Largest problem, in actions, that goes to CP-SAT.
    exact_time
        CP-SAT's deterministic time.
    """

    cap_shares: tuple[float, ...]
    placements: int
    exact_actions: int
    exact_time: float


BUDGETS: dict[str, Budget] = {
    "quick": Budget((1.0,), placements=0, exact_actions=0, exact_time=0.0),
    "standard": Budget((1.0, 0.75), placements=1_000_000, exact_actions=200, exact_time=2.0),
    "thorough": Budget((1.0, 0.75, 0.5), placements=10_000_000, exact_actions=400, exact_time=40.0),
}


@dataclass(frozen=True)
class SearchOptions:
    """How hard to search.

    Attributes
    ----------
    time_limit
        Seconds, or None. A cap that makes the result depend on the machine.
    workers
        Threads that a search may use; the plan does not depend on it.
    """

    effort: Effort = "standard"
    time_limit: float | None = None
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS:
            raise InvalidInput.at("/effort", f"found {self.effort!r}; must be one of {', '.join(EFFORTS)}.")
        if self.time_limit is not None and not 0 < self.time_limit < float("inf"):
            raise InvalidInput.at(
                "/time_limit", f"found {self.time_limit}; must be a positive number of seconds."
            )
        if self.workers < 1:
            raise InvalidInput.at("/workers", f"found {self.workers}; must be at least 1.")
        if not 0 <= self.seed < 2**31:
            raise InvalidInput.at("/seed", f"found {self.seed}; must be from 0 to {2**31 - 1}.")


@dataclass(frozen=True, eq=False)
class Progress:
    """A better plan or a better bound, as reported while searching.

    ``orders`` are verified. ``objective`` may still be lowered a little at the end, when a span is
    computed exactly instead of from earliest starts.
    """

    objective: float
    lower_bound: float
    gap: float
    method: str
    seconds: float
    orders: Orders


OnProgress = Callable[[Progress], None]
Cancelled = Callable[[], bool]


def search(
    problem: Problem,
    options: SearchOptions | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Orders | None = None,
) -> Plan:
    """Find a plan, prove a bound, verify.

    Parameters
    ----------
    on_progress
        Called at every better plan or bound, from the searching thread.
    cancelled
        Polled between steps; once true, the best plan so far is returned.
    incumbent
        An order to start from, as of an earlier search that was cut short.

    Raises
    ------
    InfeasibleMemory
        When no plan fits the memory limit.
    InvalidPlan
        When ``incumbent`` is not an order of this problem.
    """
    problem.require_feasible()
    run = _Search(problem, options or SearchOptions(), on_progress, cancelled)
    if incumbent is not None:
        run.resume_from(incumbent)
    run.construct()
    run.tune()
    run.refine()
    return run.finish()


def make_plan(
    problem: Problem,
    orders: Orders,
    *,
    method: str,
    lower_bound: float | None = None,
    seed: int = 0,
    seconds: float = 0.0,
    extra: dict[str, Any] | None = None,
) -> Plan:
    """A verified plan, without baselines, from orders made elsewhere.

    Raises
    ------
    InvalidPlan
        When the orders break a rule of the problem.
    """
    verify_orders(problem, orders)
    timing = evaluate(problem, orders)
    bound = _simple_bound(problem) if lower_bound is None else lower_bound
    value = timing.span if problem.objective == "span" else timing.makespan
    if bound > value * (1 - OPTIMAL_GAP):
        bound = value  # they differ by rounding
    gap = gap_of(value, bound)
    metrics = Metrics(
        makespan=timing.makespan,
        span=timing.span,
        bubble_rate=timing.bubble_rate,
        peak_memory=timing.peak_memory,
        lower_bound=bound,
        gap=gap,
        status="optimal" if gap == 0 else "feasible",
    )
    plan = Plan(problem, orders, metrics, (), Provenance(method, seed, seconds, extra=extra or {}))
    verify(plan)
    return plan


def baseline_plan(name: str, problem: Problem) -> Plan:
    """A classical schedule of the same model as a verified plan, under its own placement.

    Its memory limit is dropped when it does not fit, so that it can be shown and run all the same.
    """
    own_problem, orders = baseline(name, problem)
    unlimited = without_limit(own_problem)
    peaks = evaluate(unlimited, orders).peak_memory
    return make_plan(own_problem if _fits(own_problem, peaks) else unlimited, orders, method=name)


def compare(problem: Problem) -> tuple[Baseline, ...]:
    """What every baseline achieves on the problem's model; ``fits`` judges its memory limit."""
    results = []
    for name in BASELINES:
        own_problem, orders = baseline(name, problem)
        unlimited = without_limit(own_problem)
        verify_orders(unlimited, orders)
        timing = evaluate(unlimited, orders)
        results.append(
            Baseline(
                name,
                timing.span,
                timing.makespan,
                timing.bubble_rate,
                timing.peak_memory,
                _fits(own_problem, timing.peak_memory),
            )
        )
    return tuple(results)


def _fits(problem: Problem, peaks: tuple[float, ...]) -> bool:
    limits = problem.memory.limit
    return limits is None or not any(exceeds(p, limit) for p, limit in zip(peaks, limits, strict=True))


def _simple_bound(problem: Problem) -> float:
    return lower_bound(problem).value


class _Search:
    """State of one search: incumbent, bound, budget, and who wants to hear of it."""

    def __init__(
        self,
        problem: Problem,
        options: SearchOptions,
        on_progress: OnProgress | None,
        cancelled: Cancelled | None,
    ):
        self.problem = problem
        self.options = options
        self.budget = BUDGETS[options.effort]
        self.on_progress = on_progress
        self.cancelled = cancelled
        self.began = time.monotonic()
        self.bound = _simple_bound(problem)
        self.value = float("inf")
        self.orders: Orders | None = None
        self.method = "none"
        self.cut: str | None = None

    def resume_from(self, incumbent: Orders) -> None:
        """Start from an order found earlier."""
        verify_orders(self.problem, incumbent)
        orders = first_in_first_out(incumbent, self.problem.n_stages)
        timing = evaluate(self.problem, orders)
        value = timing.span if self.problem.objective == "span" else timing.makespan
        self._offer(value, orders, "resumed")

    def construct(self) -> None:
        """Greedy and list-scheduled orders; the serial one where nothing else fits the memory."""
        for attempt in self._attempts():
            if attempt.value < self.value * (1 - OPTIMAL_GAP):
                self._offer(attempt.value, attempt.orders, attempt.method)
            if self._is_over():
                return
        if self.orders is None:
            attempt = serial(self.problem)
            self._offer(attempt.value, attempt.orders, attempt.method)

    def _attempts(self) -> Iterator[Attempt]:
        listed = priority_schedules(self.problem, self.budget.cap_shares)
        if self.problem.placement.kind == "v":
            return chain(get_v_schedule(self.problem), listed)
        return listed

    def tune(self) -> None:
        """List scheduling with searched parameters."""
        if self._is_over():
            return
        for attempt in parameter_search(self.problem, self.budget.placements, self.options.seed):
            if attempt is not None and attempt.value < self.value * (1 - OPTIMAL_GAP):
                self._offer(attempt.value, attempt.orders, attempt.method)
            if self._is_over():
                return

    def refine(self) -> None:
        """CP-SAT on the whole problem, where its size allows."""
        if self._is_over() or self.problem.max_actions > self.budget.exact_actions or self.orders is None:
            return
        # OR-Tools takes a second to import; most problems never get here.
        from zbv_solver.improve.exact import refine

        result = refine(
            self.problem,
            self.orders,
            lower_bound=self.bound,
            effort=self.budget.exact_time,
            time_limit=self._seconds_left(),
            seed=self.options.seed,
            cancelled=self._is_cut,
        )
        if result.orders is not None:
            timing = evaluate(self.problem, result.orders)
            value = timing.span if self.problem.objective == "span" else timing.makespan
            if value < self.value * (1 - OPTIMAL_GAP):
                self._offer(value, result.orders, "cp-sat")
        if result.lower_bound > self.bound:
            self.bound = min(result.lower_bound, self.value)
            self._report()

    def finish(self) -> Plan:
        """The verified plan of the incumbent, with baselines beside it."""
        if self.orders is None:
            raise RuntimeError(
                "the search ended without an order; this is a fault of ours, please report it."
            )
        plan = make_plan(
            self.problem,
            self.orders,
            method=self.method,
            lower_bound=self.bound,
            seed=self.options.seed,
            seconds=time.monotonic() - self.began,
            extra={"effort": self.options.effort, **({"cut": self.cut} if self.cut else {})},
        )
        return replace(plan, baselines=compare(self.problem))

    def _offer(self, value: float, orders: Orders, method: str) -> None:
        verify_orders(self.problem, orders)
        self.value, self.orders, self.method = value, orders, method
        self._report()

    def _report(self) -> None:
        if self.on_progress is not None and self.orders is not None:
            self.on_progress(
                Progress(
                    objective=self.value,
                    lower_bound=min(self.bound, self.value),
                    gap=max(0.0, gap_of(self.value, self.bound)),
                    method=self.method,
                    seconds=time.monotonic() - self.began,
                    orders=self.orders,
                )
            )

    def _is_over(self) -> bool:
        return self.orders is not None and (self.value <= self.bound * (1 + OPTIMAL_GAP) or self._is_cut())

    def _is_cut(self) -> bool:
        if self.cancelled is not None and self.cancelled():
            self.cut = "cancelled"
        elif (left := self._seconds_left()) is not None and left <= 0:
            self.cut = "time limit"
        return self.cut is not None

    def _seconds_left(self) -> float | None:
        if self.options.time_limit is None:
            return None
        return self.options.time_limit - (time.monotonic() - self.began)
