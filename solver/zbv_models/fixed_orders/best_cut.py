"""The best cut of layers for the fixed order of an executor, with a proven bound over all cuts.

The objective of a fixed order is the largest of many linear functions of the cut. A local search finds good
cuts, and a linear program finds the functions that matter and a bound. If there are few cuts, those are timed
that may be better by these functions, until none is left: then the best cut is optimal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zbv_solver.errors import InfeasibleMemory, InvalidInput, Issue
from zbv_solver.partition.cut_space import Boundaries
from zbv_solver.partition.runs import WHOLE, Choice, First, Recomputed
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import CutCertificate, Plan, certify
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import OwnUnit, make_plan
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.layered import bound_over_all_cuts
from zbv_solver.search.options import Effort, SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

from zbv_models.fixed_orders.order_search import OrderSearch, order_search
from zbv_models.fixed_orders.regular_cut import Once, regular_cut
from zbv_models.fixed_orders.schedules import Schedule, placed_on

Recompute = Literal["none", "all", "uniform", "per-stage"]
"""Stages that may be recomputed: no stage, every stage, either of the two, or any."""

FINALISTS = {"quick": 1, "standard": 2, "thorough": 8}
"""Searches that get the full budget."""
REST = 1.0
"""The budget that the other searches share, in full budgets; each gets less than one."""


@dataclass(frozen=True)
class OrderResult:
    """What one schedule achieves with its best known cut."""

    schedule: Schedule
    recompute: str
    """``none``, ``all``, ``block`` or ``per-stage``."""
    objective: float
    """inf if no cut was found that fits the memory limit, or none was tried."""
    lower_bound: float
    """A proven bound over all cuts under this schedule."""
    even: float
    """The objective of the even cut, without the memory limit; inf if it was not tried."""
    is_searched: bool = True
    """Whether any cuts were tried. The time limit may end the search before."""
    recompute_layers: int | None = None
    """With ``block``, how many first layers of every stage are recomputed; None if no cut is known."""

    def document(self) -> dict[str, str | int | None]:
        """What identifies it in a JSON document."""
        again = {"recompute": self.recompute, "recompute_layers": self.recompute_layers}
        return self.schedule.document() | again


@dataclass(frozen=True, eq=False)
class BestCut:
    """The best cut that was found, under the schedule that suits it best."""

    schedule: Schedule
    problem: Problem
    orders: Orders
    """The layers, cut and placed, and the executor's action lists for them. The cut is the most regular of
    those that are hardly longer than the best one (:mod:`.regular_cut`)."""
    objective: float
    lower_bound: float
    """Of this cut, and of this schedule: no cut has a smaller objective than the bound."""
    even: float
    """The objective of the even cut under this schedule, without the memory limit."""
    results: tuple[OrderResult, ...]
    """All schedules with their shortest cuts, the best first and those that were not searched last."""
    shortest: Problem
    least: float
    """The layers with the shortest cut that was found under this schedule, and its objective."""
    refused: Mapping[Schedule, Issue] = field(default_factory=dict)
    """Why other schedules have no cut that keeps the rules."""

    @property
    def bound_of_all(self) -> float:
        """A proven bound over all cuts under all schedules, also those that were not searched."""
        return min(result.lower_bound for result in self.results)

    @property
    def unsearched(self) -> int:
        """How many schedules were not searched, because the time limit ended the search."""
        return sum(not result.is_searched for result in self.results)

    @property
    def is_optimal(self) -> bool:
        """Whether no cut under the chosen schedule is shorter than the shortest that was found."""
        return self.least <= self.lower_bound * (1 + OPTIMAL_GAP)


def best_cut(
    problem: LayeredProblem,
    schedules: Sequence[Schedule],
    *,
    recompute: Recompute | First = "none",
    plain: Collection[Schedule] = (),
    allow_empty: bool = False,
    late: str | None = None,
    even: Mapping[Schedule, Boundaries] | None = None,
    effort: Effort = "standard",
    seed: int = 0,
    time_limit: float | None = None,
    cancelled: Cancelled | None = None,
) -> BestCut:
    """The best cut for the fixed orders of an executor.

    Parameters
    ----------
    problem
        Layers; the placement is that of every schedule.
    schedules
        Orders to choose from.
    recompute
        Which stages may be recomputed, or how many first layers of every stage.
    plain
        Schedules under which nothing is recomputed.
    allow_empty
        Whether stages other than the first and the last may be empty, unless the problem forbids it.
    late
        Name of the first layer that must lie on the last chunk of its rank (Megatron-LM's MTP layers).
    even
        The executor's own cuts, as layer indices: the result is not worse than these.
    time_limit
        Seconds until the best cut so far is the answer, with the bounds that are proved; None for no limit.
    cancelled
        Asked often: whether to end as after the time limit.

    Raises
    ------
    InvalidInput
        When no schedule is given, none has a cut that keeps the rules of the problem, or ranks differ.
    InfeasibleMemory
        When no cut fits the memory limit under any of the schedules.
    """
    if not problem.has_equal_ranks:
        at = "/devices" if problem.devices else "/costs/link"
        detail = "cuts for the order of an executor are searched for equal ranks and links. Remove this key."
        raise InvalidInput.at(at, f"found one value per rank; {detail}")
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    own = OwnUnit.of(problem)
    searches: list[OrderSearch] = []
    refused: dict[Schedule, Issue] = {}
    for schedule in schedules:
        asked = "none" if schedule in plain else recompute
        for chosen in _variants(asked, schedule.placement.n_stages, problem):
            try:
                made = order_search(
                    own,
                    schedule,
                    chosen,
                    allow_empty=allow_empty,
                    late=late,
                    effort=effort,
                    seed=seed,
                    deadline=deadline,
                    even=(even or {}).get(schedule),
                )
            except InvalidInput as error:
                refused[schedule] = error.issues[0]
                break
            made.cancelled = cancelled
            searches.append(made)
    if not searches:
        raise _refusal(problem, schedules, refused, allow_empty)
    for number, each in enumerate(searches):
        # Without time, simple cuts of every schedule are timed until one fits.
        if not each.is_over or all(other.best is None for other in searches[:number]):
            each.screen()
    searches.sort(key=lambda each: each.value)
    for number, each in enumerate(searches):
        below = min(other.value for other in searches)
        if each.is_over:
            break
        if math.isinf(below) or each.bound < below * (1 - OPTIMAL_GAP):
            each.finish(below, 1.0 if number < FINALISTS[effort] else min(0.25, REST / len(searches)))
    searches.sort(key=lambda each: (each.value, not each.is_searched))
    best = searches[0]
    if best.best is None:
        raise _infeasible(searches, own.given)
    return replace(answer_of(own, searches, allow_empty), refused=refused)


def _refusal(
    problem: LayeredProblem,
    schedules: Sequence[Schedule],
    refused: Mapping[Schedule, Issue],
    allow_empty: bool,
) -> InvalidInput:
    """The error of layers that no schedule can cut: broken rules first, else too few layers."""
    rules = dict.fromkeys(issue for issue in refused.values() if issue.pointer != "/layers")
    if rules:
        return InvalidInput([*rules])
    fewest = min((schedule.placement for schedule in schedules), key=lambda each: each.n_stages)
    may_be_empty = allow_empty and problem.rules.allow_empty is not False
    advice = [
        *(["fewer virtual stages"] if fewest.chunks > 1 else []),
        *(["fewer ranks"] if fewest.pp_degree > 1 else []),
        *(["empty stages (cut.allow_empty)"] if allow_empty and not may_be_empty else []),
        "finer layers",
    ]
    return InvalidInput.at(
        "/layers",
        f"found {problem.n_atoms} separable {'layer' if problem.n_atoms == 1 else 'layers'} for "
        f"{fewest.n_stages} stages; "
        f"{'the first and the last stage need' if may_be_empty else 'every stage needs'} at least one. "
        f"Give {' or '.join(advice)}.",
    )


def _variants(
    recompute: Recompute | First, stages: int, problem: LayeredProblem
) -> tuple[Recomputed | First | None, ...]:
    """What is recomputed, for every search; None lets the search choose stages."""
    none, every = (0,) * stages, (WHOLE,) * stages
    if recompute == "none" or not problem.model.can_recompute:
        return (none,)
    if recompute == "per-stage":
        return (None,)
    if isinstance(recompute, First):
        # All first layers are all layers, unless others can be recomputed.
        has_every = recompute.others and recompute == First(others=recompute.others)
        return (recompute, every) if has_every else (recompute,)
    return (every,) if recompute == "all" else (none, every)


def answer_of(
    own: OwnUnit, searches: Sequence[OrderSearch], allow_empty: bool, once: Once | None = None
) -> BestCut:
    """The answer in the caller's units, verified; the first search has the best cut.

    ``once`` is what a step needs in addition to the objective, in the units of the searches.
    """
    results = [
        OrderResult(
            each.schedule,
            each.recompute_name(each.best),
            each.value * own.length,
            min(each.bound, each.value) * own.length,
            each.even * own.length,
            each.is_searched,
            each.best[1][0] if each.best is not None and each.recompute_name(each.best) == "block" else None,
        )
        for each in searches
    ]
    best = searches[0]
    schedule = best.schedule
    if best.best is None:
        raise RuntimeError("no cut was found; this is a bug in zbv, please report it.")
    placed, chosen = placed_on(own.given, schedule, allow_empty), regular_cut(best, once)
    problem = _cut_by(best, placed, chosen)
    orders = best.order.orders
    verify_orders(problem, orders)
    objective = objective_of(problem, orders)
    bound = min(each.lower_bound for each in results if each.schedule == schedule)
    optimum = _cut_by(best, placed, best.best)
    shortest = objective if chosen == best.best else objective_of(optimum, orders)
    bound = shortest if bound >= shortest * (1 - OPTIMAL_GAP) else bound
    results[0] = replace(
        results[0],
        recompute=best.recompute_name(chosen),
        objective=shortest,
        lower_bound=min(results[0].lower_bound, shortest),
    )
    return BestCut(
        schedule, problem, orders, objective, bound, results[0].even, tuple(results), optimum, shortest
    )


def _cut_by(search: OrderSearch, placed: LayeredProblem, choice: Choice) -> Problem:
    """The problem of a cut; if first layers are recomputed, these layers have no other costs."""
    bounds, chosen = choice
    if isinstance(search.recompute, First) and search.recompute_name(choice) == "block":
        placed = replace(placed, model=search.recompute.model(placed, bounds, chosen[0]))
        chosen = (0,) * len(chosen)
    return placed.cut_into(search.schedule.placement, search.space.cut(bounds, tuple(map(bool, chosen))))


def _infeasible(searches: Sequence[OrderSearch], problem: LayeredProblem) -> InfeasibleMemory:
    """The error of layers that fit under no schedule."""
    closest = min(searches, key=lambda each: each.local.excess)
    return InfeasibleMemory(
        closest.closest_peaks(),
        problem.limit or (),
        of_cut=True,
        is_proved=all(each.is_infeasible for each in searches),
        ended_early=any(each.is_over for each in searches),
        unit=problem.units.memory,
    )


LEAST_SECONDS = 0.01
"""What a search may take at least."""


def free_plan(
    problem: LayeredProblem, best: BestCut, options: SearchOptions, cancelled: Cancelled | None = None
) -> Plan:
    """The better of a plan of the layers, and of a plan that improves an executor's order and keeps its cut.

    So it is never longer than the executor's order, which is one of the possible orders. The second is only
    searched if the first is longer; its placement is that of the executor. The bound is over all cuts on both
    placements.
    """
    began = time.monotonic()
    try:
        found = search(problem, options, cancelled=cancelled)
    except InfeasibleMemory:  # on its own placement; the executor's cut fits
        found = None
    if found is not None and found.objective <= best.objective:
        return found
    if options.time_limit is not None:
        left = options.time_limit - (time.monotonic() - began)
        options = replace(options, time_limit=max(left, LEAST_SECONDS))
    improved = improved_plan(best, options, is_blocking=problem.blocking, cancelled=cancelled)
    if found is None or found.cut is None or improved.cut is None:
        return improved
    if found.objective <= improved.objective:
        return found
    bound = min(improved.cut.lower_bound, found.cut.lower_bound)
    proven = certify(problem, improved.objective, bound, "cuts")
    return replace(improved, cut=replace(improved.cut, lower_bound=proven.lower_bound, gap=proven.gap))


def improved_plan(
    best: BestCut,
    options: SearchOptions | None,
    *,
    is_blocking: bool = False,
    cancelled: Cancelled | None = None,
) -> Plan:
    """A plan of an executor's cut that is not longer than the executor's order, with a bound over all cuts.

    Parameters
    ----------
    options
        Without them, the order stays that of the executor.
    is_blocking
        Whether transfers keep ranks waiting in a free order, too.
    """
    if best.problem.model is None:
        raise TypeError("the problem was not given by layers.")
    layers = replace(uncut(best.problem), blocking=is_blocking)
    own = layers.cut_into(best.problem.placement, best.problem.model.cut)
    if options is None:
        found = make_plan(own, best.orders, method="executor")
    else:
        found = search(own, options, cancelled=cancelled, incumbent=best.orders)
    proven = certify(layers, found.objective, bound_over_all_cuts(layers), "cuts")
    return replace(found, cut=CutCertificate("executor", proven.lower_bound, proven.gap))
