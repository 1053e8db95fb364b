"""The last stage of a search for durations that vary: choose among many orders by simulation.

A plan that is optimal for planned durations may lose to others when durations vary, because an order fixes
which tensor a rank waits for. Further orders are therefore searched with longer latencies between ranks: in
these, time is left between a tensor's arrival and its use. They and the plan for planned durations are
annealed in random scenarios (:mod:`zbv_solver.improve.scenario_annealing`), and the best ones go on. CP-SAT
reorders these window by window (:mod:`zbv_solver.improve.windows`), with longer latencies too, in turn with
annealing: where memory is tight, many actions must change places together, which annealing rarely finds, and
annealing leads out of the orders that no window improves. At last, the orders found and the plan for planned
durations are simulated in the same new scenarios, and the best one there is the plan.

Lower bound, gap and status of the plan remain those of planned durations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
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
from zbv_solver.search.pipeline import Pipeline
from zbv_solver.search.search_state import CHAINS
from zbv_solver.search.search_unit import in_search_unit
from zbv_solver.search.simulate import SCENARIOS, simulate
from zbv_solver.timing.step_times import iteration_times

PLANNED_SHARE, SEARCH_SHARE = 0.4, 0.12
"""Shares of a time limit for the search with planned durations, and for each search with longer latencies."""
LONGER = (0.05, 0.1, 0.15)
"""Latencies are longer by these multiples of the mean duration in further searches."""
WITHOUT = ("windows", "exact")
"""Stages that these searches leave out."""
STARTS = 3
"""Most orders of each of these searches that are annealed."""
MOVES = {"quick": 20_000_000, "standard": 1_200_000_000, "thorough": 8_000_000_000}
"""Moves in scenarios times the problem's actions, for all orders and phases together."""
MOST_MOVES = {"quick": 6_000, "standard": 200_000, "thorough": 1_400_000}
MOVES_PER_ACTION = 150
"""Most of these moves for every action: small problems need few."""
LARGEST = 200_000
"""Largest problem, in actions, whose orders are annealed: each thread takes about 0.4 GB for 32 scenarios."""
LANES = 32
"""Scenarios in which a round of annealing judges moves; every round draws others."""
KEPT, SHARES = (7, 2), (0.3, 0.7)
"""Orders that are annealed first, the best of these, which windows improve too, and both phases' shares of
the moves."""
ROUNDS = 4
"""Rounds of annealing in a cycle."""
WARM, COLD = 0.01, 0.001
"""Temperatures at the beginning and the end of a cycle, as shares of the mean duration."""
CYCLES = {"quick": 1, "standard": 8, "thorough": 24}
"""Most cycles of the second phase: windows first, then annealing."""
PATIENCE = 3
"""Cycles in a row without a better order, not counting the first cycle, after which an order gets no more."""
WINDOW_ACTIONS = {"quick": 0, "standard": 3_000, "thorough": 30_000}
"""Largest problem, in actions, that windows improve."""
WINDOW_TIME = 0.75
"""CP-SAT's deterministic time for the windows of a cycle."""
WINDOW_SIZE = 15
"""Actions in a window on every rank, on average."""
WINDOW_LONGER = 0.05
"""In windows, latencies are longer by this multiple of the mean duration."""
TRIES, LAST_TRIES = 256, 1024
"""Scenarios for comparisons of orders between phases, and at the end."""
MOST_SIMULATED, FEWEST_SCENARIOS = 1 << 26, 32
"""The plan's own simulation has at most this many scenarios times actions, and at least so many scenarios."""
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
        search = _Search(plan.problem, options, jitter, halt)
        chosen = search.run(plan.orders)
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
    simulation = None
    if halt.reason != "cancelled":
        scenarios = min(SCENARIOS, max(FEWEST_SCENARIOS, MOST_SIMULATED // plan.problem.max_actions))
        simulation = simulate(found, jitter, scenarios=scenarios)
    seconds = time.monotonic() - began
    provenance = replace(plan.provenance, method=found.provenance.method, seconds=seconds, extra=extra)
    return replace(found, provenance=provenance, simulation=simulation)


class _Search:
    """State of the choice; times are in the unit of :func:`.search_unit.in_search_unit`."""

    def __init__(self, given: Problem, options: SearchOptions, jitter: Jitter, halt: Halt):
        self.problem, _ = in_search_unit(given)
        self.options, self.jitter, self.halt = options, jitter, halt
        self.unit = float(self.problem.arrays.duration[:3].mean())
        actions = given.max_actions
        most = min(MOST_MOVES[options.effort], MOVES_PER_ACTION * actions)
        self.moves = min(most, MOVES[options.effort] // actions) if actions <= LARGEST else 0
        is_small = actions <= WINDOW_ACTIONS[options.effort]
        # Annealing goes on from the order that windows leave. It needs all stages to run the microbatches in
        # one order, and windows keep that only where microbatches are equal.
        self.has_windows = is_small and self.problem.is_equal and "windows" not in options.without
        self.cycles = CYCLES[options.effort] if self.has_windows else 1
        self.weight = 0.0 if options.quantile is None else NormalDist().inv_cdf(options.quantile)

    def run(self, planned: Orders) -> _Candidate:
        """The best order in the last comparison; ``planned`` itself if no other is better there."""
        first = _Candidate("planned", planned, math.inf)
        if self.jitter.is_constant or self.moves < 1 or self.halt.check():
            return first
        with ThreadPoolExecutor(min(self.options.workers, CHAINS)) as pool:
            searched = pool.map(self._searched, LONGER)
            candidates = [self._compared("planned", planned), *chain.from_iterable(searched)]
            for phase, kept in enumerate(KEPT if candidates else ()):
                candidates = sorted(candidates, key=_value)[:kept]
                moves = int(SHARES[phase] * self.moves) // len(candidates)
                tasks = [(phase, number, each, moves) for number, each in enumerate(candidates)]
                candidates = list(pool.map(self._improved, tasks))
            last = [first, *sorted(candidates, key=_value)]
            values = pool.map(lambda each: self._time(each.orders, CHOOSING, LAST_TRIES), last)
            return last[int(np.argmin(list(values)))]

    def _searched(self, longer: float) -> list[_Candidate]:
        """The best orders for longer latencies between ranks; none once it is time to stop."""
        if self.halt.check():
            return []
        limit = self.options.time_limit
        options = replace(
            self.options,
            time_limit=None if limit is None else SEARCH_SHARE * limit,
            workers=1,
            without=(*self.options.without, *WITHOUT),
            jitter=None,
            quantile=None,
        )
        with Pipeline(self._with_longer(longer), options, None, self.halt.check) as pipeline:
            pipeline.run()
        found = sorted(pipeline.bests, key=lambda each: each.value)[:STARTS]
        if not found and pipeline.found is not None:
            found = [pipeline.found]
        name = f"latencies + {longer:g}"
        return [self._compared(name, each.orders) for each in found]

    def _compared(self, name: str, orders: Orders) -> _Candidate:
        """The candidate of an order, in which equal microbatches ascend."""
        if self.problem.is_equal:
            orders = first_in_first_out(orders, self.problem.n_stages)
        return _Candidate(name, orders, self._time(orders, COMPARING, TRIES))

    def _with_longer(self, longer: float) -> Problem:
        """The problem with longer latencies between ranks, by a multiple of the mean duration."""
        arrays = self.problem.arrays
        added = np.where(arrays.rank_of[1:] != arrays.rank_of[:-1], longer * self.unit, 0.0)
        return self.problem.with_arrays(replace(arrays, latency=arrays.latency + added[:, None]))

    def _improved(self, task: tuple[int, int, _Candidate, int]) -> _Candidate:
        """The candidate after the cycles of a phase, or as it was if that is better."""
        phase, number, best, moves = task
        orders, cycles, helped = best.orders, self.cycles if phase else 1, 0
        for cycle in range(cycles):
            if cycle - helped > PATIENCE:
                break
            before = best.value
            # The next cycle goes on from the last order, even if it is worse: the best one is left alone.
            if phase and self.has_windows and not self.halt.check():
                orders = self._reordered(orders, cycle)
                best = self._better(best, orders)
            for step in range(ROUNDS):
                if self.halt.check():
                    return best
                orders = self._annealed(orders, (phase + cycle, step, number), moves // (cycles * ROUNDS))
                if step + 1 == ROUNDS or not phase:
                    best = self._better(best, orders)
            if best.value < before:
                helped = cycle
        return best

    def _better(self, best: _Candidate, orders: Orders) -> _Candidate:
        """The candidate with this order, if that is better."""
        value = self._time(orders, COMPARING, TRIES)
        return replace(best, orders=orders, value=value) if value < best.value else best

    def _annealed(self, orders: Orders, place: tuple[int, int, int], moves: int) -> Orders:
        """The order after a round of annealing; ``place`` is the round's cycle, step and candidate."""
        cycle, step, number = place
        round_number = (cycle * ROUNDS + step) << 8 | number
        return anneal_in_scenarios(
            self.problem,
            orders,
            draw(self.jitter, self.problem, ANNEALING + self.options.seed, range(LANES), round_number),
            moves=moves,
            temperature=self.unit * WARM * (COLD / WARM) ** (step / (ROUNDS - 1)),
            seed=round_number,
            weight=self.weight,
            halt=self.halt.flag,
        ).last

    def _reordered(self, orders: Orders, cycle: int) -> Orders:
        """The order after windows with longer latencies; every other cycle begins in the middle."""
        # Imported here because OR-Tools takes a second to import and many searches do not need it.
        from zbv_solver.improve.windows import sweep_windows

        found = sweep_windows(
            self._with_longer(WINDOW_LONGER),
            orders,
            effort=WINDOW_TIME,
            sizes=(WINDOW_SIZE * self.problem.pp_degree,),
            begin=0.5 if cycle % 2 else 1.0,
            seed=self.options.seed,
            cancelled=self.halt.check,
        )
        return orders if found is None else first_in_first_out(found, self.problem.n_stages)

    def _time(self, orders: Orders, purpose: int, scenarios: int) -> float:
        """The mean or quantile of the simulated times of an order."""
        seed = purpose + self.options.seed
        times = iteration_times(self.problem, orders, self.jitter, scenarios=scenarios, seed=seed)
        sample = times.makespan if self.problem.objective == "makespan" else times.span
        quantile = self.options.quantile
        return float(sample.mean() if quantile is None else np.quantile(sample, quantile))


def _value(candidate: _Candidate) -> float:
    return candidate.value
