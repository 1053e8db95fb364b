"""Packs a batch: its microbatches, their distribution over replicas, their order and the plans together.

1. Arrangements with microbatches of several sizes are improved by estimate.
2. The slowest replica of each is planned briefly. Those with the shortest of these plans go on.
3. Their replicas are planned with the wanted effort, and the fastest arrangement stays.
4. As long as their plans exceed the lower bound, the arrangement is improved again with every replica's
   estimate corrected by its plan, and planned again. The new one stays if its slowest replica is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from typing import Any

from zbv_solver._version import __version__
from zbv_solver.documents.files import number
from zbv_solver.packing.arrange import Arrangement, Microbatch, Packer, arrangements, equal_tokens, improved
from zbv_solver.packing.batch import Batch
from zbv_solver.packing.step_costs import StepCosts, packing_bound
from zbv_solver.plans.plan import Plan, certify, plan_json
from zbv_solver.problem.problem import F, Problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

Planner = Callable[[Problem, SearchOptions], Plan]
FINALISTS = 3
"""Arrangements of which all replicas are planned."""
ENOUGH = 0.0005
"""Replicas are balanced again if the step exceeds the lower bound by more than this share."""
ROUNDS = 4
"""How often they are balanced again, at most."""


@dataclass(frozen=True)
class ReplicaPlan:
    """What one replica runs."""

    microbatches: tuple[tuple[int, ...], ...]
    """Indices of the batch's sequences, for every microbatch as the plan numbers them."""
    plan: Plan

    @property
    def entry_order(self) -> tuple[int, ...]:
        """The microbatches in the order in which they enter the pipeline."""
        orders = self.plan.orders
        enters = (orders.stage == 0) & (orders.letter == F)
        return tuple(orders.microbatch[enters].tolist())


Plans = tuple[ReplicaPlan, ...]


@dataclass(frozen=True)
class PackedBaseline:
    """What the usual way to pack achieves."""

    name: str
    microbatches: int
    """Of all replicas together."""
    estimate: float
    """Of the step, by the same estimate as the packing's."""
    step_time: float | None
    """Of plans by the same search; None if they were not asked for."""


@dataclass(frozen=True)
class Packing:
    """A batch as microbatches of replicas, with their plans."""

    batch: Batch
    replicas: Plans
    estimate: float
    """The estimate of the step that the microbatches were chosen by."""
    lower_bound: float
    """Proven: no packing of the batch into microbatches of at most ``max_tokens`` tokens has plans with a
    smaller step time."""
    gap: float
    """step_time / lower_bound - 1."""
    baselines: tuple[PackedBaseline, ...]
    effort: str
    seed: int
    seconds: float

    @property
    def step_time(self) -> float:
        """The objective of the slowest replica's plan: all replicas wait for it."""
        return step_time(self.replicas)


def pack(
    batch: Batch,
    options: SearchOptions,
    *,
    compare: bool = False,
    say: Callable[[str], None] = lambda text: None,
    planner: Planner = search,
) -> Packing:
    """Pack a batch.

    Parameters
    ----------
    options
        Of the search of every replica's plan; a time limit holds for each.
    compare
        Plan the usual packing, too. The packing is then no slower.
    say
        Called with what is being done.
    planner
        Searches a plan.

    Raises
    ------
    InvalidInput
        When an option is out of range.
    ContradictedBound
        When a plan undercuts a lower bound, which is a bug in zbv.
    """
    began = time.perf_counter()
    packer = packer_of(batch)
    planner = cache(planner)  # brief plans of replicas may be those that are wanted
    usual = Arrangement.of(packer, equal_tokens(packer))

    def planned(arrangement: Arrangement) -> Plans:
        return plans_of(batch, arrangement, options, planner, say)

    say("choosing microbatches")
    candidates = _promising(batch, arrangements(packer, options.seed), options, planner, say)
    finalists = [(planned(candidate), candidate) for candidate in candidates]
    usual_plans = planned(usual) if compare else None
    if usual_plans is not None:
        finalists.append((usual_plans, usual))
    bound = packing_bound(packer.costs, packer.lengths, packer.capacity, packer.replicas)
    plans, arrangement = min(finalists, key=lambda pair: step_time(pair[0]))
    plans, arrangement = _balanced(plans, arrangement, bound, options.seed, planned)
    certificate = certify(batch.problem, step_time(plans), bound, "packings")
    usual_time = None if usual_plans is None else step_time(usual_plans)
    return Packing(
        batch,
        plans,
        arrangement.estimate,
        certificate.lower_bound,
        certificate.gap,
        (PackedBaseline("equal-tokens", usual.microbatches, usual.estimate, usual_time),),
        options.effort,
        options.seed,
        time.perf_counter() - began,
    )


def packer_of(batch: Batch) -> Packer:
    """The sequences, costs and capacity of a batch."""
    return Packer(StepCosts.of(batch.problem), batch.sequences, batch.max_tokens, batch.replicas)


def plans_of(
    batch: Batch,
    arrangement: Arrangement,
    options: SearchOptions,
    planner: Planner = search,
    say: Callable[[str], None] = lambda text: None,
) -> Plans:
    """Plans of all replicas of an arrangement; parameters are those of :func:`pack`."""
    plans = []
    for place, microbatches in enumerate(arrangement.replicas):
        say(f"planning replica {place}")
        plans.append(_plan(batch, microbatches, options, planner))
    return tuple(plans)


def step_time(plans: Iterable[ReplicaPlan]) -> float:
    """The objective of the slowest replica."""
    return max(replica.plan.objective for replica in plans)


def _plan(
    batch: Batch, microbatches: Iterable[Microbatch], options: SearchOptions, planner: Planner
) -> ReplicaPlan:
    """The plan of a replica, in the order used in practice: the smallest microbatches at both ends."""
    ascending = sorted(
        (microbatch.contents for microbatch in microbatches),
        key=lambda contents: (sum(batch.sequences[index] ** 2 for index in contents), contents),
    )
    contents = (*ascending[::2], *ascending[1::2][::-1])
    return ReplicaPlan(contents, planner(batch.problem_of(contents), options))


def _promising(
    batch: Batch,
    candidates: Sequence[Arrangement],
    options: SearchOptions,
    planner: Planner,
    say: Callable[[str], None],
) -> list[Arrangement]:
    """The candidates with the smallest steps, judged by a brief plan of each one's slowest replica."""
    if len(candidates) <= FINALISTS:
        return list(candidates)
    brief = replace(options, effort="quick")
    steps = []
    for candidate in candidates:
        say(f"planning {candidate.microbatches} microbatches")
        slowest = max(candidate.replicas, key=candidate.packer.estimate)
        steps.append(_plan(batch, slowest, brief, planner).plan.objective)
    ranking = sorted(range(len(candidates)), key=lambda place: (steps[place], place))
    return [candidates[place] for place in ranking[:FINALISTS]]


def _balanced(
    plans: Plans,
    arrangement: Arrangement,
    bound: float,
    seed: int,
    planned: Callable[[Arrangement], Plans],
) -> tuple[Plans, Arrangement]:
    """Plans of all replicas, after balancing them by their plans."""
    for turn in range(ROUNDS):
        steps = [replica.plan.objective for replica in plans]
        if len(steps) == 1 or max(steps) <= (1 + ENOUGH) * bound:
            break
        weights = [
            step / arrangement.packer.estimate(microbatches) if step > 0 else 1.0
            for step, microbatches in zip(steps, arrangement.replicas, strict=True)
        ]
        changed = improved(arrangement, seed + 1 + turn, weights)
        changed_plans = planned(changed)
        if step_time(changed_plans) < max(steps):
            plans, arrangement = changed_plans, changed
    return plans, arrangement


def packing_json(packing: Packing) -> dict[str, Any]:
    """A packing as a JSON document."""
    lengths = packing.batch.sequences
    return {
        "objective": packing.batch.problem.objective,
        "step_time": number(packing.step_time),
        "lower_bound": number(packing.lower_bound),
        "gap": packing.gap if isfinite(packing.gap) else None,
        "estimate": number(packing.estimate),
        "replicas": [
            {
                "microbatches": [list(contents) for contents in replica.microbatches],
                "sequences": [[lengths[index] for index in contents] for contents in replica.microbatches],
                "entry_order": list(replica.entry_order),
                "step_time": number(replica.plan.objective),
                "plan": plan_json(replica.plan),
            }
            for replica in packing.replicas
        ],
        "baselines": [
            {
                "name": baseline.name,
                "microbatches": baseline.microbatches,
                "estimate": number(baseline.estimate),
                "step_time": None if baseline.step_time is None else number(baseline.step_time),
            }
            for baseline in packing.baselines
        ],
        "provenance": {
            "version": __version__,
            "effort": packing.effort,
            "seed": packing.seed,
            "seconds": packing.seconds,
        },
    }
