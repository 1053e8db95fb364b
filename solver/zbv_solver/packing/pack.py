"""Chooses microbatches, their distribution over replicas, their order and the plans together.

1. Arrangements with microbatches of several sizes, and the best rival's, are improved by estimate.
2. The slowest replica of each is planned briefly, and the arrangement with the shortest of these plans goes
   on.
3. Its replicas are planned with the effort asked for.
4. Where their plans take unequally long, the arrangement is improved again with every replica's estimate
   corrected by its plan, and planned again, as long as the slowest replica gets faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from zbv_solver.packing.arrange import Arrangement, arranged, arrangements, improved, rival_packings
from zbv_solver.packing.arrangement import Microbatch, Packer
from zbv_solver.packing.batch import Batch
from zbv_solver.packing.floor import packing_bound
from zbv_solver.packing.packing import Packing, ReplicaPlan, RivalPacking
from zbv_solver.packing.step_costs import StepCosts
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search import search

Planner = Callable[[Problem, SearchOptions], Plan]
UNEQUAL = 0.002
"""Replicas are balanced again if the slowest takes this share longer than the average."""
ROUNDS = 2
"""How often they are balanced again."""


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
        Plan the rivals' packings, too.
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
    packer = Packer(StepCosts.of(batch.problem), batch.sequences, batch.max_tokens, batch.replicas)
    rivals = rival_packings(packer)
    say("choosing microbatches")
    found = arrangements(packer, rivals, options.seed)
    planning = _Planning(batch, options, planner, say)
    chosen = planning.best(found)
    plans, chosen = planning.balanced(chosen)
    results = [
        RivalPacking(
            name,
            sum(map(len, replicas)),
            arranged(packer, replicas).estimate,
            max(each.plan.objective for each in planning.plans(arranged(packer, replicas)))
            if compare
            else None,
        )
        for name, replicas in rivals.items()
    ]
    return Packing(
        batch,
        plans,
        chosen.estimate,
        packing_bound(packer),
        tuple(results),
        options.effort,
        options.seed,
        time.perf_counter() - began,
    )


class _Planning:
    """Plans of arrangements of one batch."""

    def __init__(
        self, batch: Batch, options: SearchOptions, planner: Planner, say: Callable[[str], None]
    ) -> None:
        self.batch, self.options, self.planner, self.say = batch, options, planner, say

    def best(self, found: Sequence[Arrangement]) -> Arrangement:
        """The arrangement with the smallest step, judged by a brief plan of its slowest replica."""
        if len(found) == 1:
            return found[0]
        brief = replace(self.options, effort="quick")
        planned = []
        for each in found:
            self.say(f"planning {sum(map(len, each.replicas))} microbatches")
            slowest = max(each.replicas, key=each.packer.estimate)
            planned.append(self._plan(slowest, brief).plan.objective)
        return found[min(range(len(found)), key=lambda place: (planned[place], place))]

    def balanced(self, chosen: Arrangement) -> tuple[tuple[ReplicaPlan, ...], Arrangement]:
        """Plans of all replicas, after balancing them by their plans."""
        plans = self.plans(chosen)
        for turn in range(ROUNDS):
            steps = [each.plan.objective for each in plans]
            if max(steps) <= (1 + UNEQUAL) * sum(steps) / len(steps):
                break
            weights = [
                step / chosen.packer.estimate(own) if step > 0 else 1.0
                for step, own in zip(steps, chosen.replicas, strict=True)
            ]
            changed = improved(chosen, self.options.seed + 1 + turn, weights)
            others = self.plans(changed)
            if max(each.plan.objective for each in others) >= max(steps):
                break
            plans, chosen = others, changed
        return plans, chosen

    def plans(self, chosen: Arrangement) -> tuple[ReplicaPlan, ...]:
        """Plans of all replicas."""
        made = []
        for place, own in enumerate(chosen.replicas):
            self.say(f"planning replica {place}")
            made.append(self._plan(own, self.options))
        return tuple(made)

    def _plan(self, own: Sequence[Microbatch], options: SearchOptions) -> ReplicaPlan:
        contents = _small_at_both_ends(own)
        return ReplicaPlan(contents, self.planner(self.batch.problem_of(contents), options))


def _small_at_both_ends(own: Sequence[Microbatch]) -> tuple[tuple[int, ...], ...]:
    """Microbatches in the order used in practice: by the sum of squared lengths, small ones at both ends."""
    ascending = sorted(own, key=lambda each: (each.squares, each.contents))
    ordered = [*ascending[::2], *ascending[1::2][::-1]]
    return tuple(each.contents for each in ordered)
