"""The last stage of a search for durations that vary: choose among several orders by simulation.

A plan that is optimal for planned durations may lose to others when durations vary, because an order fixes
which tensor a rank waits for. So the problem is also searched with longer latencies between ranks: in these
orders, time is left between a tensor's arrival and its use. The best orders of all searches and the plan for
planned durations are simulated in the same scenarios, and the best one there is the plan.

Lower bound, gap and status of the plan remain those of planned durations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import numpy as np

from zbv_solver.improve.useless_splits import without_useless_splits
from zbv_solver.jitter.noise import Jitter, jitter_json
from zbv_solver.plans.certificate import gap_of
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.halt import Halt
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.pipeline import Pipeline
from zbv_solver.search.search_state import CHAINS
from zbv_solver.search.search_unit import in_search_unit
from zbv_solver.search.simulate import SCENARIOS, simulate
from zbv_solver.timing.step_times import iteration_times

PLANNED_SHARE, SEARCH_SHARE = 0.4, 0.12
"""Shares of a time limit for the search with planned durations, and for each search with longer latencies."""
LONGER = (0.02, 0.05, 0.1, 0.15)
"""Latencies are longer by these multiples of the mean duration in further searches."""
KEPT = 8
"""Most orders of each of these searches that are simulated."""
TRIES, LAST_TRIES = 256, 1024
"""Scenarios that choose the best few orders, and the last one."""
LAST = 5
"""Orders that are compared in the end, in addition to the plan for planned durations."""
MOST_SIMULATED, FEWEST_SCENARIOS = 1 << 26, 32
"""The plan's own simulation has at most this many scenarios times actions, and at least so many scenarios."""
COMPARING, CHOOSING = (2 << 40, 3 << 40)
"""Added to the seed of the search, so that each comparison has its own random numbers. No simulation that a
user asks for has them, because its seed is smaller."""


def planned_options(options: SearchOptions) -> SearchOptions:
    """The options of the search with planned durations, which comes first."""
    limit = options.time_limit
    if options.jitter is None or limit is None:
        return options
    return replace(options, time_limit=PLANNED_SHARE * limit)


def for_jitter(
    plan: Plan,
    options: SearchOptions,
    *,
    began: float,
    cancelled: Callable[[], bool] | None = None,
) -> Plan:
    """The plan to run when durations vary as the options say, with a simulation of it.

    Parameters
    ----------
    plan
        The best plan for planned durations, or any other; the returned plan is not worse in the simulation
        that compares them.
    began
        When the search began, by ``time.monotonic``.
    cancelled
        Polled; once true, the best plan so far is returned, without a simulation.

    Raises
    ------
    InvalidInput
        When the jitter is for another number of ranks.
    """
    jitter = options.jitter
    if jitter is None:
        return plan
    deadline = None if options.time_limit is None else began + options.time_limit
    with Halt(cancelled, deadline) as halt:
        longer, orders = _chosen(plan, options, jitter, halt)
    extra = {**plan.provenance.extra, "jitter": jitter_json(jitter)}
    if options.quantile is not None:
        extra["quantile"] = options.quantile
    if halt.reason is not None:
        extra["cut"] = halt.reason
    found = plan
    if orders is not plan.orders:
        found = make_plan(
            plan.problem,
            without_useless_splits(plan.problem, orders),
            method=f"latencies + {longer:g}",
            lower_bound=plan.metrics.lower_bound,
        )
        cut = plan.cut
        if cut is not None:
            cut = replace(cut, gap=gap_of(found.objective, cut.lower_bound))
        found = replace(found, baselines=plan.baselines, cut=cut)
    simulation = None
    if halt.reason != "cancelled":
        scenarios = min(SCENARIOS, max(FEWEST_SCENARIOS, MOST_SIMULATED // plan.problem.max_actions))
        simulation = simulate(found, jitter, scenarios=scenarios)
    seconds = time.monotonic() - began
    provenance = replace(plan.provenance, method=found.provenance.method, seconds=seconds, extra=extra)
    return replace(found, provenance=provenance, simulation=simulation)


def _chosen(plan: Plan, options: SearchOptions, jitter: Jitter, halt: Halt) -> tuple[float, Orders]:
    """The best order in simulations, and by how much latencies were longer when it was found."""
    planned = (0.0, plan.orders)
    if jitter.is_constant or halt.check():
        return planned
    problem, _ = in_search_unit(plan.problem)

    def simulated(orders: Orders, purpose: int, scenarios: int) -> float:
        seed = purpose + options.seed
        times = iteration_times(problem, orders, jitter, scenarios=scenarios, seed=seed)
        sample = times.makespan if problem.objective == "makespan" else times.span
        quantile = options.quantile
        return float(sample.mean() if quantile is None else np.quantile(sample, quantile))

    def best(candidates: list[tuple[float, Orders]], purpose: int, scenarios: int) -> list[int]:
        """Places of candidates, the shortest one first."""
        values = pool.map(lambda each: simulated(each[1], purpose, scenarios), candidates)
        return [int(place) for place in np.argsort(list(values), kind="stable")]

    with ThreadPoolExecutor(min(options.workers, CHAINS)) as pool:
        searched = pool.map(lambda longer: _searched(problem, options, longer, halt), LONGER)
        found = list(chain.from_iterable(searched))
        last = [planned, *(found[place] for place in best(found, COMPARING, TRIES)[:LAST])]
        return last[best(last, CHOOSING, LAST_TRIES)[0]]


def _searched(
    problem: Problem, options: SearchOptions, longer: float, halt: Halt
) -> list[tuple[float, Orders]]:
    """The best orders for longer latencies between ranks; none once it is time to stop."""
    if halt.check():
        return []
    limit = options.time_limit
    options = replace(
        options,
        time_limit=None if limit is None else SEARCH_SHARE * limit,
        workers=1,
        jitter=None,
        quantile=None,
    )
    arrays = problem.arrays
    added = np.where(arrays.rank_of[1:] != arrays.rank_of[:-1], longer * arrays.duration[:3].mean(), 0.0)
    changed = problem.with_arrays(replace(arrays, latency=arrays.latency + added[:, None]))
    with Pipeline(changed, options, None, halt.check) as pipeline:
        pipeline.run()
    found = sorted(pipeline.bests, key=lambda each: each.value)[:KEPT]
    if not found and pipeline.found is not None:
        found = [pipeline.found]
    # Equal microbatches ascend.
    return [
        (longer, first_in_first_out(each.orders, problem.n_stages) if problem.is_equal else each.orders)
        for each in found
    ]
