"""Chooses microbatches, their distribution over replicas, their order and the plans together.

1. Arrangements with microbatches of several sizes, and the best rival's, are improved by estimate.
2. The slowest replica of each is planned briefly. Those with the shortest of these plans go on.
3. Their replicas are planned with the effort asked for, and the fastest arrangement stays.
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
from zbv_solver.plans.certificate import certify
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search import search

Planner = Callable[[Problem, SearchOptions], Plan]
Plans = tuple[ReplicaPlan, ...]
FINALISTS = 2
"""Arrangements of which all replicas are planned."""
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
        Plan the rivals' packings, too. The packing is then no slower than any of them.
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
    usual = {name: arranged(packer, replicas) for name, replicas in rivals.items()}
    compared = {name: planning.plans(each) for name, each in usual.items()} if compare else {}
    finalists = [(planning.plans(each), each) for each in planning.promising(found)]
    finalists += [(plans, usual[name]) for name, plans in compared.items()]
    plans, chosen = planning.balanced(*min(finalists, key=lambda each: _step(each[0])))
    certificate = certify(batch.problem, _step(plans), packing_bound(packer), "packings")
    results = [
        RivalPacking(
            name,
            sum(map(len, each.replicas)),
            each.estimate,
            _step(compared[name]) if compare else None,
        )
        for name, each in usual.items()
    ]
    return Packing(
        batch,
        plans,
        chosen.estimate,
        certificate.lower_bound,
        certificate.gap,
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

    def promising(self, found: Sequence[Arrangement]) -> list[Arrangement]:
        """The arrangements with the smallest steps, judged by a brief plan of each one's slowest replica."""
        if len(found) <= FINALISTS:
            return list(found)
        brief = replace(self.options, effort="quick")
        planned = []
        for each in found:
            self.say(f"planning {sum(map(len, each.replicas))} microbatches")
            slowest = max(each.replicas, key=each.packer.estimate)
            planned.append(self._plan(slowest, brief).plan.objective)
        ranking = sorted(range(len(found)), key=lambda place: (planned[place], place))
        return [found[place] for place in ranking[:FINALISTS]]

    def balanced(self, plans: Plans, chosen: Arrangement) -> tuple[Plans, Arrangement]:
        """Plans of all replicas, after balancing them by their plans."""
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
            if _step(others) >= max(steps):
                break
            plans, chosen = others, changed
        return plans, chosen

    def plans(self, chosen: Arrangement) -> Plans:
        """Plans of all replicas."""
        made = []
        for place, own in enumerate(chosen.replicas):
            self.say(f"planning replica {place}")
            made.append(self._plan(own, self.options))
        return tuple(made)

    def _plan(self, own: Sequence[Microbatch], options: SearchOptions) -> ReplicaPlan:
        contents = _small_at_both_ends(own)
        return ReplicaPlan(contents, self.planner(self.batch.problem_of(contents), options))


def _step(plans: Plans) -> float:
    """The objective of the slowest replica."""
    return max(each.plan.objective for each in plans)


def _small_at_both_ends(own: Sequence[Microbatch]) -> tuple[tuple[int, ...], ...]:
    """Microbatches in the order used in practice: by the sum of squared lengths, small ones at both ends."""
    ascending = sorted(own, key=lambda each: (each.squares, each.contents))
    ordered = [*ascending[::2], *ascending[1::2][::-1]]
    return tuple(each.contents for each in ordered)
