"""Compare the library's results for one problem with the independent model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zbv_solver import bounds
from zbv_solver.bounds.directions import directions, may_fuse
from zbv_solver.bounds.ramps import Window, heads_and_tails
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.improve.cp_entries import refine_entries
from zbv_solver.improve.cp_search import ExactResult, refine
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import level_cut
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.layer import LayerCosts
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import PHASES, SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

from benchmarks.soak.cuts import every_cut
from benchmarks.soak.optimum import Optimum, optimum
from benchmarks.soak.pipeline import (
    B,
    I,
    Order,
    Pipeline,
    Schedule,
    ascending,
    order_of,
    pairs_of,
    read,
    separated,
    text,
)

TOLERANCE = Fraction(1, 10**9)
"""Relative difference that float rounding may cause."""
ROUNDED_SUMS = Fraction(1, 10**14)
"""The same of a sum, relative to the largest of the sums that it is a difference of."""
SHORT_EFFORT = 0.02
"""CP-SAT's deterministic time for proving a bound from scratch."""
Document = dict[str, Any]
FloatArray = NDArray[np.float64]


class Contradiction(Exception):
    """Two results for a problem contradict each other."""

    def __init__(self, check: str, detail: str):
        super().__init__(f"{check}: {detail}")
        self.check, self.detail = check, detail


@dataclass
class Coverage:
    """Counts of checks, and the largest gaps of bounds."""

    problems: Counter[str] = field(default_factory=Counter)
    exact: Counter[str] = field(default_factory=Counter)
    """Number of problems by kind, and of those with a known exact optimum."""
    gaps: dict[tuple[str, str], float] = field(default_factory=dict)
    """Largest gap optimum / bound - 1 by kind and bound, over problems with a known exact optimum."""
    checks: Counter[str] = field(default_factory=Counter)
    """Number of times that each check was made."""

    def require(self, is_true: bool, check: str, detail: Callable[[], str]) -> None:
        """Count a check, and raise :class:`Contradiction` if it failed."""
        self.checks[check] += 1
        if not is_true:
            raise Contradiction(check, detail())


def check(kind: str, document: Document, seed: str, coverage: Coverage) -> None:
    """Make all checks of one problem.

    ``seed`` selects the searches.

    Raises
    ------
    Contradiction
        At the first contradiction.
    """
    coverage.problems[kind] += 1
    chance = Random(seed)
    examine = _Layers if "layers" in document else _Stages
    examine(kind, document, chance, coverage).run()


class _Examination:
    def __init__(self, kind: str, document: Document, chance: Random, coverage: Coverage):
        self.kind, self.document, self.chance = kind, document, chance
        self.coverage = coverage
        self.best: Optimum | None = None

    def require(self, is_true: bool, check: str, detail: Callable[[], str]) -> None:
        self.coverage.require(is_true, check, detail)

    def bound(self, name: str, value: float) -> None:
        """A lower bound must not exceed the best value known."""
        if self.best is None:
            return
        best = self.best
        self.require(
            Fraction(value) <= best.value * (1 + TOLERANCE),
            f"bound: {name}",
            lambda: f"states {value!r}; an order takes {float(best.value)!r}: {text(best.order)}",
        )
        if best.is_exact and best.value > 0:
            gap = float(best.value) / value - 1 if value > 0 else float("inf")
            at = self.kind.split(",")[0], name
            self.coverage.gaps[at] = max(self.coverage.gaps.get(at, 0.0), gap)

    def plan(self, name: str, plan: Plan, pipeline: Pipeline) -> None:
        """A plan is valid, and its metrics and bound are true."""
        verify(plan)
        order = order_of(plan.orders)
        value = pipeline.value(order, pairs_of(plan.orders))
        fits = all(pipeline.fits(rank, actions) for rank, actions in enumerate(order))
        self.require(value is not None, f"plan: {name}", lambda: f"deadlocks: {text(order)}")
        self.require(
            fits or _is_borderline(pipeline, order), f"memory: {name}", lambda: f"exceeds: {text(order)}"
        )
        stated = Fraction(plan.objective)
        self.require(
            value is not None and abs(stated - value) <= TOLERANCE * value,
            f"objective: {name}",
            lambda: f"states {plan.objective!r} where the order takes {float(value or 0)!r}: {text(order)}",
        )
        self.bound(name, plan.metrics.lower_bound)
        if self.best is not None and value is not None:
            best = self.best
            self.require(
                not best.is_exact or value >= best.value * (1 - TOLERANCE),
                "independent optimum",
                lambda: f"is {float(best.value)!r}, yet {name} takes {float(value)!r}: {text(order)}",
            )
            self.require(
                plan.metrics.status != "optimal" or stated <= best.value * (1 + TOLERANCE),
                f"optimal: {name}",
                lambda: f"at {plan.objective!r}; an order takes {float(best.value)!r}: {text(best.order)}",
            )
        again = parse_plan(plan_json(plan))
        self.require(
            again.plan_id == plan.plan_id and again.metrics == plan.metrics,
            "round trip",
            lambda: f"{plan.plan_id} became {again.plan_id}",
        )

    def options(self) -> SearchOptions:
        """A short standard search that leaves out random stages, and seldom CP-SAT's proof."""
        without = tuple(phase for phase in PHASES[:4] if self.chance.random() < 0.85)
        return SearchOptions(effort="standard", without=without, seed=self.chance.randint(0, 99))


class _Stages(_Examination):
    def run(self) -> None:
        pipeline = read(self.document)
        problem = parse_any_problem(self.document)
        if not isinstance(problem, Problem):
            raise TypeError("a document without layers became layers.")
        if not pipeline.is_feasible():
            self._refuses(problem)
            return
        self.best = optimum(pipeline, with_presolve=self.chance.random() < 0.7)
        if self.best.is_exact:
            self.coverage.exact[self.kind] += 1
        self.bound("quick", bounds.lower_bound(problem, effort="quick").value)
        self.bound("full", bounds.lower_bound(problem).value)
        self.bound("thorough", bounds.lower_bound(problem, effort="thorough").value)
        if problem.communication is not None or problem.copies is not None:
            self._proof(problem, refine_entries(problem, serial(problem).orders, effort=SHORT_EFFORT))
        else:
            if problem.is_equal:
                self._windows(problem, pipeline)
            if self.chance.random() < 0.4:
                start = serial(problem).orders
                self._proof(problem, refine(problem, start, lower_bound=0.0, effort=SHORT_EFFORT))
        try:
            quick = search(problem, SearchOptions(effort="quick", seed=self.chance.randint(0, 99)))
        except InfeasibleMemory:
            if not _counts_on_tolerance(problem):
                raise
            self.coverage.checks["infeasible but for the tolerance"] += 1
            return
        self.plan("quick search", quick, pipeline)
        if self.chance.random() < 0.3:
            self.plan("standard search", search(problem, self.options()), pipeline)
        if self.chance.random() < 0.3:
            self._resume(problem, pipeline)

    def _refuses(self, problem: Problem) -> None:
        try:
            search(problem, SearchOptions(effort="quick"))
        except InfeasibleMemory:
            self.coverage.checks["infeasible"] += 1
        else:
            raise Contradiction("infeasible", "a plan was found where one microbatch does not fit.")

    def _windows(self, problem: Problem, pipeline: Pipeline) -> None:
        """In the best order, no action starts before its head, and its tail fits after its end."""
        if self.best is None:
            return
        order, pays = ascending(self.best.order), may_fuse(problem)
        order = tuple(tuple(separated(actions, pays.tolist())) for actions in order)
        schedule = Schedule.of(pipeline, ascending(order))
        if schedule is None:
            raise Contradiction("windows", f"deadlocks once split and in ascending order: {text(order)}")
        head, tail = all_heads_and_tails(problem)
        firsts, lasts = [a[0] for a in schedule.order], [a[-1] for a in schedule.order]
        is_span = problem.objective == "span"
        for rank, actions in enumerate(schedule.order):
            earliest = schedule.starts_after([firsts[rank]] if is_span else firsts)
            latest = schedule.ends_before([lasts[rank]] if is_span else lasts)
            slack = TOLERANCE * (1 + max(earliest.values()) + max(latest.values()))
            for letter, stage, j in actions:
                cell = I if letter == B else letter, stage, j
                for side, least, paths in (
                    ("head", head[cell], earliest),
                    ("tail", tail[cell], latest),
                ):
                    self.require(
                        Fraction(float(least)) / pipeline.time_unit <= paths[letter, stage, j] + slack,
                        f"windows: {side}",
                        lambda cell=cell, least=least: f"of {cell} is {least!r} in vain: {text(order)}",  # type: ignore[misc]
                    )

    def _proof(self, problem: Problem, result: ExactResult) -> None:
        """The bound that CP-SAT proves from scratch, starting with the worst order."""
        start = serial(problem)
        self.bound("cp-sat", result.lower_bound)
        if result.proved and self.best is not None:
            reached = make_plan(problem, result.orders or start.orders, method="soak", lower_bound=0.0)
            best = self.best
            self.require(
                Fraction(reached.objective) <= best.value * (1 + TOLERANCE),
                "cp-sat proved",
                lambda: f"{reached.objective!r}; an order takes {float(best.value)!r}: {text(best.order)}",
            )

    def _resume(self, problem: Problem, pipeline: Pipeline) -> None:
        start = serial(problem)
        options = SearchOptions(effort="quick", seed=self.chance.randint(0, 99))
        self.plan("resumed search", search(problem, options, incumbent=start.orders), pipeline)


class _Layers(_Examination):
    def run(self) -> None:
        problem = parse_any_problem(self.document)
        if not isinstance(problem, LayeredProblem):
            raise TypeError("a document with layers became stages.")
        cuts = list(every_cut(self.document))
        feasible = [pipeline for pipeline in cuts if pipeline.is_feasible()]
        options = SearchOptions("quick") if self.chance.random() < 0.7 else self.options()
        try:
            plan = search(problem, options)
        except InfeasibleMemory:
            wrong = list(filter(_surely_fits, feasible))
            self.require(not wrong, "infeasible cut", lambda: f"{len(wrong)} of {len(cuts)} cuts fit.")
            return
        self.require(bool(feasible), "infeasible cut", lambda: "a plan was found where no cut fits.")
        self._balanced(problem, feasible)
        self.best = self._best(feasible)
        if self.best is not None and self.best.is_exact:
            self.coverage.exact[self.kind] += 1
        if plan.cut is not None:
            self.bound("any cut", plan.cut.lower_bound)
        self._of_its_cut(plan)

    def _balanced(self, problem: LayeredProblem, cuts: list[Pipeline]) -> None:
        """The balanced cut has the least largest load of all cuts; the bound of all cuts is not above it."""
        loads = [_load(cut) / problem.microbatches for cut in cuts]
        # Loads are differences of sums over all layers, which may be much larger, on any device.
        sums = sum(max(_work(costs) for _, costs in layer.costs_by_pointer()) for layer in problem.model.each)
        least, room = min(loads), min(loads) * TOLERANCE + Fraction(sums) * ROUNDED_SUMS
        tables = CutTables.of(problem)
        self.require(
            Fraction(least_worst_load(problem, tables)) <= least + room,
            "floor of loads",
            lambda: f"is {least_worst_load(problem, tables)!r}; a cut has {float(least)!r}",
        )
        if problem.placement in ("v", "single"):
            space = CutSpace(problem, problem.placements[0], tables)
            found = balanced_cut(space, level_cut(space))
            self.require(
                found is not None and abs(Fraction(found.value) - least) <= room,
                "balanced cut",
                lambda: f"has {found and found.value!r}; a cut has {float(least)!r}",
            )

    def _best(self, cuts: list[Pipeline]) -> Optimum | None:
        """The best order over all cuts. Cuts with a load of at least the best value are skipped."""
        best: Optimum | None = None
        is_exact = True
        for pipeline in sorted(cuts, key=_load):
            if best is not None and _load(pipeline) >= best.value:
                break
            found = optimum(pipeline, effort=0.2)
            is_exact = is_exact and found.is_exact
            if best is None or found.value < best.value:
                best = found
        return best and replace(best, is_exact=is_exact)

    def _of_its_cut(self, plan: Plan) -> None:
        """Check the plan for its own stages, and its bound with the optimum of these stages."""
        document = plan_json(plan)["problem"]
        stages = {key: document[key] for key in ("pp_degree", "microbatches", "placement", "objective")}
        stages |= {"chunks": plan.problem.placement.chunks, "costs": document["costs"]}
        held = document["memory"]
        stages["memory"] = held
        pipeline = read(stages)
        over_all, self.best = self.best, optimum(pipeline)
        self.plan("layered search", plan, pipeline)
        if over_all is not None and over_all.is_exact:
            self.require(
                Fraction(plan.objective) >= over_all.value * (1 - TOLERANCE),
                "independent optimum of all cuts",
                lambda: f"is {float(over_all.value)!r}; the plan takes {plan.objective!r}",
            )


def _work(costs: LayerCosts) -> float:
    """Time of a layer's F, I and W."""
    return costs.forward + costs.backward_input + costs.backward_weight


def _load(pipeline: Pipeline) -> Fraction:
    return max(map(pipeline.load, range(pipeline.pp_degree))) * pipeline.time_unit


def _is_borderline(pipeline: Pipeline, order: Order) -> bool:
    """Whether the order fits within twice the tolerance: the library may round differently."""
    if pipeline.limit is None:
        return True
    wider = tuple(limit + limit * 2 // 10**9 for limit in pipeline.limit)
    roomy = replace(pipeline, limit=wider)
    return all(roomy.fits(rank, actions) for rank, actions in enumerate(order))


def _surely_fits(cut: Pipeline) -> bool:
    """Whether one microbatch fits with a tenth of the tolerance; of a cut, the search accepts an eighth."""
    if cut.limit is None:
        return True
    narrow = tuple(limit - limit * 9 // 10**10 for limit in cut.limit)
    return replace(cut, limit=narrow).is_feasible()


def _counts_on_tolerance(problem: Problem) -> bool:
    """Whether one microbatch exceeds a limit by so little that the verifier would accept it.

    Bounds must hold for this problem, but the search may refuse it, because it leaves a part of the
    tolerance unused.
    """
    limits = problem.memory.limit or ()
    return any(need > limit for need, limit in zip(problem.smallest_limit, limits, strict=False))


def all_heads_and_tails(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Heads and tails of all operations of a problem, as zbv's bounds use them: Lemma 18.

    The shape is (3, S, m), indexed [letter F, I or W, stage, microbatch]; a B is under I. The window of a
    makespan is that of all ranks; the window of a span is that of an operation's rank. A W's
    head and tail hold where it exists.
    """
    forwards, backwards = directions(problem)
    m = problem.microbatches
    head = np.zeros((3, problem.n_stages, m))
    tail = np.zeros_like(head)
    for rank, stages in enumerate(problem.placement.stages_of):
        opener = rank if problem.objective == "span" else None
        window = Window.of(forwards, backwards, opener, m, m)
        head[:, stages], tail[:, stages] = heads_and_tails(window, rank)
    return head, tail
