"""A plan in any order, to compare an executor's with: the executor's own cut and order are a candidate."""

from __future__ import annotations

import time
from dataclasses import replace

from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.certificate import certify
from zbv_solver.plans.plan import CutCertificate, Plan
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.layered import bound_over_all_cuts
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search import search

from zbv_models.fixed_orders.best_cut import BestCut

LEAST_SECONDS = 0.01
"""What a search may take at least."""


def free_plan(problem: LayeredProblem, best: BestCut, options: SearchOptions) -> Plan:
    """The better of a plan of the layers, and of a plan that improves an executor's order and keeps its cut.

    So it is never longer than the executor's order, which is one of the possible orders. The second is only
    searched if the first is longer; its placement is that of the executor. The bound is over all cuts on both
    placements.
    """
    began = time.monotonic()
    try:
        found = search(problem, options)
    except InfeasibleMemory:  # on its own placement; the executor's cut fits
        found = None
    if found is not None and found.objective <= best.objective:
        return found
    if options.time_limit is not None:
        left = options.time_limit - (time.monotonic() - began)
        options = replace(options, time_limit=max(left, LEAST_SECONDS))
    improved = improved_plan(best, options, is_blocking=problem.blocking)
    if found is None or found.cut is None or improved.cut is None:
        return improved
    if found.objective <= improved.objective:
        return found
    bound = min(improved.cut.lower_bound, found.cut.lower_bound)
    proven = certify(problem, improved.objective, bound, "cuts")
    return replace(improved, cut=replace(improved.cut, lower_bound=proven.lower_bound, gap=proven.gap))


def improved_plan(best: BestCut, options: SearchOptions | None, *, is_blocking: bool = False) -> Plan:
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
        found = search(own, options, incumbent=best.orders)
    proven = certify(layers, found.objective, bound_over_all_cuts(layers), "cuts")
    return replace(found, cut=CutCertificate("executor", proven.lower_bound, proven.gap))
