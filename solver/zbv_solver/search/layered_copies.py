"""Layers with copies to the host: cuts for several amounts of memory, and copies that make their orders fit.

What copies move takes no memory of the device until its backward. So layers that keep a share of what they do
are planned without copies (:func:`with_less`), and copies make the orders fit.
The best one is searched on with its copies (:mod:`zbv_solver.search.offload`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter, sub

import numpy as np

from zbv_solver.errors import InfeasibleMemory
from zbv_solver.improve.copies import plan_copies
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import level_cut
from zbv_solver.partition.least_memory import least_memory_cut
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import CutCertificate, Plan, certify, gap_of
from zbv_solver.problem.layer import LayerCosts, LayerMemory
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem, require_same_problem
from zbv_solver.search.incumbent import Cancelled, OnProgress, Progress
from zbv_solver.search.offload import first_with_copies, search_with_copies, serial_with_copies
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.start_times import objective_of

KEPT = ((0.0, 1.0), (0.5, 0.5), (0.5, 1.0), (0.7, 0.7), (0.75, 1.0))
"""Shares of what F's and W's keep, for which cuts and orders are planned, the freest first. With less, orders
are shorter, but more must be copied, so the best share depends on the speed of copies. Where W's keep less,
too, some run earlier in the end."""
ALONE_SHARE = 0.25
"""Share of a time limit for a plan without copies. Half of the limit is for the search on the best cut."""

Planner = Callable[[LayeredProblem], Plan]


@dataclass(frozen=True, eq=False)
class Entrant:
    """An order with copies on a cut, that fits."""

    problem: Problem
    orders: Orders
    value: float
    method: str


def with_less(problem: LayeredProblem, is_quick: bool) -> Iterator[LayeredProblem]:
    """Problems without copies whose orders copies may make fit, from the freest to the tightest.

    A copy moves what a stage keeps as a whole, so small stages need less room: besides the placement that is
    best without copies, V is planned, if there is time.
    """
    for by_forwards, by_weights in KEPT:
        less = keeping(problem, by_forwards, by_weights)
        yield less
        if not is_quick and problem.placement == "auto" and problem.placements[0].kind == "v":
            yield replace(less, placement="v")


def plan_with_copies(
    problem: LayeredProblem,
    bound: float,
    quickly: Planner,
    plan: Planner,
    options: SearchOptions | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Plan | None = None,
    useless: float = np.inf,
) -> Plan:
    """A verified plan of layers with copies.

    Parameters
    ----------
    bound
        Proven lower bound over all cuts.
    quickly
        Plans layers without copies in less than a second.
    plan
        Plans the layers themselves without copies, with as much effort as there is time for.
    options
        Of the search on the best cut; None leaves it out.
    on_progress, cancelled, incumbent
        As in :func:`zbv_solver.search.layered.plan_layers`.
    useless
        As in :func:`zbv_solver.search.layered.first_plan`.

    Raises
    ------
    InfeasibleMemory
        When no cut was found that fits; without a proof that there is none.
    """
    began = time.monotonic()
    report = _over_cuts(on_progress, bound, began)
    limit = None if options is None else options.time_limit

    def is_over() -> bool:
        # The options' limit is that of the search which follows.
        is_late = limit is not None and time.monotonic() - began > limit
        return is_late or (cancelled is not None and cancelled())

    best, *others = _best_cuts(problem, bound, quickly, plan, report, is_over, incumbent, useless)
    has_left_out = best.value > bound and is_over()
    if options is None:
        # Copies fit smaller stages better, which shows in orders that are constructed for them.
        plans = ((_first_plan(each, is_over), each.method) for each in (best, *others[:1]))
        made, method = min(plans, key=lambda found: found[0].objective)
    else:
        made = search_with_copies(best.problem, options, report, cancelled, best.orders)
        method = best.method
    extra = dict(made.provenance.extra)
    if has_left_out:
        extra["cut"] = "cancelled" if cancelled is not None and cancelled() else "time limit"
    certificate = certify(problem, made.objective, bound, "cuts")
    return replace(
        made,
        cut=CutCertificate(method, certificate.lower_bound, certificate.gap),
        provenance=replace(made.provenance, seconds=time.monotonic() - began, extra=extra),
    )


def _first_plan(cut: Entrant, is_over: Cancelled) -> Plan:
    return first_with_copies(cut.problem, cut.orders, cut.method, is_over)


def _best_cuts(
    problem: LayeredProblem,
    bound: float,
    quickly: Planner,
    plan: Planner,
    report: OnProgress | None,
    is_over: Cancelled,
    incumbent: Plan | None,
    useless: float,
) -> list[Entrant]:
    """The best order with copies of each number of stages, of all cuts that are tried, the best one first.

    Raises :class:`InfeasibleMemory`.
    """
    best = None if incumbent is None else _of_incumbent(problem, incumbent)
    found_by_stages = {} if best is None else {best.problem.n_stages: best}
    less = with_less(problem, plan is quickly)
    for planner, layers in ((plan, keeping(problem)), *((quickly, each) for each in less)):
        if best is not None and (best.value <= bound or is_over()):
            break
        try:
            planned = planner(layers)
            found = _fitted(problem, planned, is_over)
        except InfeasibleMemory:
            continue
        stages = found.problem.n_stages
        if stages not in found_by_stages or found.value < found_by_stages[stages].value:
            found_by_stages[stages] = found
        if best is None or found.value < best.value:
            best = found
            if report is not None:
                report(Progress(best.value, bound, 0.0, best.method, 0.0, best.orders, best.problem))
        if layers.model is not problem.model and planned.objective >= min(best.value, useless):
            break  # with less memory freed, orders are even longer
    return sorted(found_by_stages.values(), key=attrgetter("value")) or [_leanest(problem)]


def _leanest(problem: LayeredProblem) -> Entrant:
    """One microbatch after another, on the cut that needs the least memory without copies.

    Raises :class:`InfeasibleMemory`, without a proof, if it does not fit with copies either.
    """
    alone = keeping(problem)
    tables, cuts = CutTables.of(alone), list[tuple[float, Problem]]()
    for placement in problem.placements:
        space = CutSpace(alone, placement, tables)
        least = least_memory_cut(space, level_cut(space), enough=np.inf)
        cut = problem.cut_into(placement, least.cut)
        lacking = max(map(sub, cut.smallest_limit, problem.limit or cut.smallest_limit))
        cuts.append((lacking, cut))
    _, cut = min(cuts, key=itemgetter(0))
    try:
        cut.require_feasible()
    except InfeasibleMemory as error:
        raise InfeasibleMemory(
            error.smallest, error.limits, of_cut=True, is_proved=False, unit=error.unit, has_copies=True
        ) from None
    orders = serial_with_copies(cut)
    return Entrant(cut, orders, objective_of(cut, orders), "least memory")


def keeping(problem: LayeredProblem, by_forwards: float = 1.0, by_weights: float = 1.0) -> LayeredProblem:
    """The layers without copies, if F's and W's kept a share of what they do."""

    def less(costs: LayerCosts) -> LayerCosts:
        held = costs.memory
        kept, left = by_forwards * held.forward, by_weights * (held.forward + held.backward_input)
        return replace(costs, memory=LayerMemory(kept, left - kept, -left, held.static, held.workspace))

    model = problem.model
    if by_forwards < 1:
        model = replace(model, layers=tuple(layer.with_costs(less) for layer in model.layers))
    return replace(problem, model=model, host=None, host_limit=None)


def _fitted(problem: LayeredProblem, plan: Plan, is_over: Cancelled) -> Entrant:
    """A plan without copies of layers that keep less, with copies that make it fit.

    Raises :class:`InfeasibleMemory` if its cut cannot fit.
    """
    if plan.problem.model is None:
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    cut = problem.cut_into(plan.problem.placement, plan.problem.model.cut)
    cut.require_feasible()
    name = "" if plan.cut is None else plan.cut.method
    made = plan_copies(cut, plan.orders, is_over)
    if made is None:
        orders = serial_with_copies(cut)
        return Entrant(cut, orders, objective_of(cut, orders), name)
    return Entrant(cut, made[1], made[0], name)


def _of_incumbent(problem: LayeredProblem, incumbent: Plan) -> Entrant:
    """A caller's plan; raises :class:`InvalidPlan` if it is not one of these layers."""
    cut = problem.as_cut_in(incumbent.problem)
    require_same_problem(cut, incumbent.problem)
    return Entrant(cut, incumbent.orders, objective_of(cut, incumbent.orders), "resumed")


def _over_cuts(on_progress: OnProgress | None, bound: float, began: float) -> OnProgress | None:
    """Reports of a search on one cut, with the bound over all cuts and the time since the beginning."""
    if on_progress is None:
        return None

    def report(progress: Progress) -> None:
        gap, seconds = gap_of(progress.objective, bound), time.monotonic() - began
        on_progress(replace(progress, lower_bound=bound, gap=gap, seconds=seconds))

    return report
