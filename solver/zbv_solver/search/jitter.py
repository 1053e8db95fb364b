"""Plans for durations that vary: how they behave in simulations, and a search that chooses by these.

A plan that is optimal for planned durations may lose to others when durations vary, because an order fixes
which tensor a rank waits for. So the problem is also searched with longer latencies between ranks: in these
orders, time is left between a tensor's arrival and its use. The best orders of all searches and the plan for
planned durations are simulated in the same scenarios, and the best one there is the plan.

Lower bound, gap and status of the plan remain those of planned durations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from zbv_solver.construct.baselines import baseline_names, without_limit
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.plans.plan import Plan, SimulatedBaseline, Simulation, Spans, gap_of
from zbv_solver.problem.jitter import MAX_SEED, Jitter, check_quantile, jitter_json
from zbv_solver.problem.layered_problem import AnyProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import compare, in_search_unit, make_plan, stated
from zbv_solver.search.incumbent import CHAINS, Cancelled, Halt, OnProgress, without_useless_splits
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import Search, search
from zbv_solver.timing.step_times import iteration_times

SCENARIOS = 256
P95 = 0.95
DEFAULT_JITTER = Jitter.of(action=0.05, transfer=0.2)
"""What a plan's page shows: compute that varies by a few percent, and transfers that share their links."""
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
SIMULATING_SECONDS = 5.0
"""Simulations may take so long after the time limit. Then the planned order is kept, or has no simulation."""
COMPARING, CHOOSING = (2 << 40, 3 << 40)
"""Added to the seed of the search, so that each comparison has its own random numbers. No simulation that a
user asks for has them, because its seed is smaller."""


def simulate(
    plan: Plan,
    jitter: Jitter,
    *,
    scenarios: int = SCENARIOS,
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
) -> Simulation:
    """Simulate a plan and the classical schedules of its problem.

    Parameters
    ----------
    check
        Called often; the simulation ends with what it raises.

    Raises
    ------
    InvalidInput
        When ``scenarios`` or ``seed`` is out of range, or the jitter is for another number of ranks.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InvalidInput.at("/seed", f"found {seed}; must be from 0 to {MAX_SEED}.")
    problem = plan.problem

    def spans(problem: Problem, orders: Orders) -> Spans:
        times = iteration_times(problem, orders, jitter, scenarios=scenarios, seed=seed, check=check)
        return Spans(
            float(times.span.mean()),
            float(np.quantile(times.span, P95)),
            float(times.makespan.mean()),
            float(np.quantile(times.makespan, P95)),
        )

    names = baseline_names(problem)
    rows = [row for row in plan.baselines if row.name in names] or compare(problem)
    others = [
        SimulatedBaseline(row.name, spans(without_limit(of), orders), row.fits)
        for row in rows
        for of, orders in [stated(row, problem)]
    ]
    return Simulation(jitter, scenarios, seed, spans(problem, plan.orders), tuple(others))


def search_for_jitter(
    problem: AnyProblem,
    options: SearchOptions | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Orders | Plan | None = None,
    *,
    jitter: Jitter | None,
    quantile: float | None = None,
) -> Plan:
    """The plan to run when durations vary, with a simulation of it; without ``jitter``, the planned one.

    Parameters
    ----------
    options, on_progress, cancelled, incumbent
        As in :func:`zbv_solver.search.run.search`, which plans for planned durations first.
    quantile
        The quantile of the simulated times to choose for, or None for their mean.

    Raises
    ------
    InvalidInput
        When the jitter is for another number of ranks, or the quantile is out of range or without jitter,
        or for a problem with copies to the host;
        and as :func:`zbv_solver.search.run.search`.
    """
    began, options = time.monotonic(), options or SearchOptions()
    check_quantile(quantile, jitter)
    if jitter is None:
        return search(problem, options, on_progress, cancelled, incumbent)
    try:
        jitter.require_ranks(problem.pp_degree)
    except InvalidInput as error:
        raise error.below("/jitter") from None
    if (problem.copies if isinstance(problem, Problem) else problem.host) is not None:
        raise InvalidInput.at(
            "/costs/offload" if isinstance(problem, Problem) else "/costs/host_link",
            "found together with jitter, but copies to the host are not simulated; leave out one of the two.",
        )
    limit = options.time_limit
    planned = options if limit is None else replace(options, time_limit=PLANNED_SHARE * limit)
    plan = search(problem, planned, on_progress, cancelled, incumbent)
    deadline = math.inf if limit is None else began + limit

    halt = Halt(cancelled, None if limit is None else deadline)

    def check() -> None:
        halt.check()
        if halt.reason == "cancelled" or time.monotonic() > deadline + SIMULATING_SECONDS:
            raise _Ended

    longer, orders = 0.0, plan.orders
    with halt, suppress(_Ended):
        longer, orders = _chosen(plan, options, jitter, quantile, halt, check)
    extra = {**plan.provenance.extra, "jitter": jitter_json(jitter)}
    if quantile is not None:
        extra["quantile"] = quantile
    if halt.reason is not None:
        extra["cut"] = halt.reason
    chosen = plan
    if orders is not plan.orders:
        chosen = make_plan(
            plan.problem,
            without_useless_splits(plan.problem, orders),
            method=f"latencies + {longer:g}",
            lower_bound=plan.metrics.lower_bound,
        )
        cut = plan.cut
        if cut is not None:
            cut = replace(cut, gap=gap_of(chosen.objective, cut.lower_bound))
        chosen = replace(chosen, baselines=plan.baselines, cut=cut)
    simulation = None
    if halt.reason != "cancelled":
        scenarios = min(SCENARIOS, max(FEWEST_SCENARIOS, MOST_SIMULATED // plan.problem.max_actions))
        with suppress(_Ended):
            simulation = simulate(chosen, jitter, scenarios=scenarios, check=check)
    seconds = time.monotonic() - began
    provenance = replace(plan.provenance, method=chosen.provenance.method, seconds=seconds, extra=extra)
    return replace(chosen, provenance=provenance, simulation=simulation)


class _Ended(Exception):
    """A simulation was cancelled or took too long."""


def _chosen(
    plan: Plan,
    options: SearchOptions,
    jitter: Jitter,
    quantile: float | None,
    halt: Halt,
    check: Callable[[], None],
) -> tuple[float, Orders]:
    """The best order in simulations, and by how much latencies were longer when it was found."""
    planned = (0.0, plan.orders)
    if jitter.is_constant or halt.check():
        return planned
    problem, _ = in_search_unit(plan.problem)

    def simulated(orders: Orders, purpose: int, scenarios: int) -> float:
        seed = purpose + options.seed
        times = iteration_times(problem, orders, jitter, scenarios=scenarios, seed=seed, check=check)
        sample = times.makespan if problem.objective == "makespan" else times.span
        return float(sample.mean() if quantile is None else np.quantile(sample, quantile))

    def best(candidates: list[tuple[float, Orders]], purpose: int, scenarios: int) -> list[int]:
        """Places of candidates, the shortest one first."""
        values = threads.map(lambda candidate: simulated(candidate[1], purpose, scenarios), candidates)
        return [int(place) for place in np.argsort(list(values), kind="stable")]

    with ThreadPoolExecutor(min(options.workers, CHAINS)) as threads:
        searched = threads.map(lambda longer: _searched(problem, options, longer, halt), LONGER)
        candidates = list(chain.from_iterable(searched))
        last = [planned, *(candidates[place] for place in best(candidates, COMPARING, TRIES)[:LAST])]
        return last[best(last, CHOOSING, LAST_TRIES)[0]]


def _searched(
    problem: Problem, options: SearchOptions, longer: float, halt: Halt
) -> list[tuple[float, Orders]]:
    """The best orders for longer latencies between ranks; none once it is time to stop."""
    if halt.check():
        return []
    limit = options.time_limit
    options = replace(options, time_limit=None if limit is None else SEARCH_SHARE * limit, workers=1)
    arrays = problem.arrays
    added = np.where(arrays.rank_of[1:] != arrays.rank_of[:-1], longer * arrays.duration[:3].mean(), 0.0)
    changed = problem.with_arrays(replace(arrays, latency=arrays.latency + added[:, None]))
    longer_search = Search(changed, options, None, halt.check)
    longer_search.run()
    bests = sorted(longer_search.incumbent.bests, key=lambda solution: solution.value)[:KEPT]
    if not bests and longer_search.incumbent.current is not None:
        bests = [longer_search.incumbent.current]
    orders = [solution.orders for solution in bests]
    # Equal microbatches ascend.
    return [
        (longer, first_in_first_out(order, problem.n_stages) if problem.is_equal else order)
        for order in orders
    ]
