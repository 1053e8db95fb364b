"""The last stage of a search for durations that vary: choose among many orders by simulation.

A plan that is optimal for planned durations may lose more than another one when durations vary, because an
order fixes which tensor a rank waits for. Several orders are therefore annealed in random scenarios
(:mod:`zbv_solver.improve.scenario_annealing`): the best order for the planned durations, the best orders of
the search's chains, and orders that were searched with longer latencies, which leave time between a tensor's
arrival and its use. Half of them are dropped after every phase. At last, the orders left and the best order
for planned durations are simulated in the same new scenarios, and the best one there is the plan.

Lower bound, gap and status of the plan remain those of planned durations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from zbv_solver.improve.scenario_annealing import anneal_in_scenarios
from zbv_solver.improve.useless_splits import without_useless_splits
from zbv_solver.jitter.noise import Jitter, draw
from zbv_solver.jitter.reading import jitter_json
from zbv_solver.plans.certificate import gap_of
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.halt import Halt
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.pipeline import CHAINS, Pipeline
from zbv_solver.search.search_unit import in_search_unit
from zbv_solver.search.simulate import SCENARIOS, simulate
from zbv_solver.timing.step_times import iteration_times

PLANNED_SHARE = 0.4
"""Share of a time limit for the search with planned durations."""
LONGER = (0.05, 0.15)
"""Latencies are longer by these multiples of the mean duration in two more searches."""
LANES = 32
"""Scenarios in which a round of annealing judges moves; every round draws others."""
MOVES = {"quick": 20_000_000, "standard": 400_000_000, "thorough": 2_000_000_000}
"""Moves of annealing times the problem's actions, for all orders and phases together."""
MOST_MOVES = {"quick": 20_000, "standard": 400_000, "thorough": 2_000_000}
LARGEST = 200_000
"""Largest problem, in actions, whose orders are annealed: 32 scenarios of it take about a gigabyte."""
KEPT = (6, 3, 2)
"""Candidates that are annealed in every phase."""
ROUNDS = 4
"""Rounds of annealing in a phase."""
WARM, COLD = 0.01, 0.001
"""Temperatures at the beginning and the end, as shares of the mean duration."""
FINALISTS = 4
"""Orders in the last comparison, beside the best one for planned durations."""
WITHOUT = ("windows", "exact")
SEARCH_SHARE = 0.2
TRIES = 256
"""Scenarios for a comparison of orders between phases; the last comparison has four times as many."""
ANNEALING, COMPARING, CHOOSING = (1 << 40, 2 << 40, 3 << 40)
"""Added to the seed of the search, so that every purpose has its own random numbers. No simulation that a
user asks for has them, because its seed is smaller."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """An order, where it started, and its simulated time between phases."""

    name: str
    orders: Orders
    value: float


def planned_options(options: SearchOptions) -> SearchOptions:
    """The options of the search with planned durations, which comes first."""
    limit = options.time_limit
    if options.jitter is None or limit is None:
        return options
    return replace(options, time_limit=PLANNED_SHARE * limit)


def for_jitter(
    plan: Plan,
    options: SearchOptions,
    others: Sequence[Orders] = (),
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
    others
        Further orders of the same problem to start from.
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
        search = _Search(plan.problem, options, jitter, halt)
        chosen = search.run(plan.orders, others)
    extra = {**plan.provenance.extra, "jitter": jitter_json(jitter)}
    if options.quantile is not None:
        extra["quantile"] = options.quantile
    if halt.reason is not None:
        extra["cut"] = halt.reason
    found = plan
    if chosen.orders is not plan.orders:
        found = make_plan(
            plan.problem,
            without_useless_splits(plan.problem, chosen.orders),
            method=f"{chosen.name}, annealed in scenarios",
            lower_bound=plan.metrics.lower_bound,
        )
        cut = plan.cut
        if cut is not None:
            cut = replace(cut, gap=gap_of(found.objective, cut.lower_bound))
        found = replace(found, baselines=plan.baselines, cut=cut)
    simulation = None if halt.reason == "cancelled" else simulate(found, jitter, scenarios=SCENARIOS)
    seconds = time.monotonic() - began
    provenance = replace(plan.provenance, method=found.provenance.method, seconds=seconds, extra=extra)
    return replace(found, provenance=provenance, simulation=simulation)


class _Search:
    """State of the choice; times are in the unit of :func:`.search_unit.in_search_unit`."""

    def __init__(self, given: Problem, options: SearchOptions, jitter: Jitter, halt: Halt):
        self.problem, _ = in_search_unit(given)
        self.options, self.jitter, self.halt = options, jitter, halt
        self.unit = float(self.problem.arrays.duration[:3].mean())
        self.weight = 0.0 if options.quantile is None else NormalDist().inv_cdf(options.quantile)

    def run(self, planned: Orders, others: Sequence[Orders]) -> _Candidate:
        """The best order in the last comparison; ``planned`` itself if no other is better there."""
        nothing = _Candidate("planned", planned, 0.0)
        actions = self.problem.max_actions
        moves = min(MOST_MOVES[self.options.effort], MOVES[self.options.effort] // actions)
        if self.jitter.is_constant or actions > LARGEST or self.halt.check():
            return nothing
        with ThreadPoolExecutor(min(self.options.workers, CHAINS)) as pool:
            candidates = list(pool.map(self._started, _distinct([planned, *others])))
            candidates += [each for each in pool.map(self._searched, LONGER) if each is not None]
            for phase, kept in enumerate(KEPT):
                candidates = sorted(candidates, key=lambda each: each.value)[:kept]
                each_moves = moves // (len(KEPT) * len(candidates) * ROUNDS)
                tasks = [(phase, number, each, each_moves) for number, each in enumerate(candidates)]
                candidates += pool.map(self._annealed, tasks)
            last = sorted(candidates, key=lambda each: each.value)[:FINALISTS]
            last.insert(0, nothing)
            values = list(pool.map(lambda each: self._time(each.orders, CHOOSING, 4 * TRIES), last))
            return last[int(np.argmin(values))]

    def _started(self, orders: Orders) -> _Candidate:
        ascending = first_in_first_out(orders, self.problem.n_stages)
        return _Candidate("planned", ascending, self._time(ascending, COMPARING, TRIES))

    def _searched(self, longer: float) -> _Candidate | None:
        """The best order for longer latencies between ranks; None once it is time to stop."""
        if self.halt.check():
            return None
        host = self.problem.arrays.rank_of
        added = np.where(host[1:] != host[:-1], longer * self.unit, 0.0)
        latencies = tuple((self.problem.arrays.latency + added).tolist())
        problem = replace(self.problem, costs=replace(self.problem.costs, p2p=latencies))
        limit = self.options.time_limit
        options = replace(
            self.options,
            time_limit=None if limit is None else SEARCH_SHARE * limit,
            workers=1,
            without=WITHOUT,
            jitter=None,
            quantile=None,
        )
        with Pipeline(problem, options, None, self.halt.check) as pipeline:
            pipeline.run()
            found = pipeline.found
        if found is None:
            return None
        name = f"latencies + {longer:g}"
        return replace(self._started(found.orders), name=name)

    def _annealed(self, task: tuple[int, int, _Candidate, int]) -> _Candidate:
        """The candidate after some rounds of annealing, or as it was if that is better."""
        phase, number, best, moves = task
        orders = best.orders
        for round_number in range(ROUNDS):
            if self.halt.check() or moves < 1:
                break
            step = phase * ROUNDS + round_number
            seed = self.options.seed * len(KEPT) * ROUNDS + step
            own = ANNEALING + self.options.seed
            result = anneal_in_scenarios(
                self.problem,
                orders,
                draw(self.jitter, self.problem, own, range(LANES), number << 16 | step),
                moves=moves,
                temperature=self.unit * WARM * (COLD / WARM) ** (step / (len(KEPT) * ROUNDS - 1)),
                seed=seed,
                weight=self.weight,
                halt=self.halt.flag,
            )
            orders = result.last
            value = self._time(orders, COMPARING, TRIES)
            if value < best.value:
                best = replace(best, orders=orders, value=value)
        return best

    def _time(self, orders: Orders, purpose: int, scenarios: int) -> float:
        """The mean or quantile of the simulated times of an order."""
        seed = purpose + self.options.seed
        times = iteration_times(self.problem, orders, self.jitter, scenarios=scenarios, seed=seed)
        sample = times.makespan if self.problem.objective == "makespan" else times.span
        quantile = self.options.quantile
        return float(sample.mean() if quantile is None else np.quantile(sample, quantile))


def _distinct(orders: Sequence[Orders]) -> list[Orders]:
    """Orders without repetitions, in the same sequence."""
    return list({tuple(map(tuple, each.all_text())): each for each in orders}.values())
