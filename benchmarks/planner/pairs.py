"""Problems with pairs: the planned order against DualPipeV, the best order without pairs, and the bound.

F and I take equally long, W two thirds of that. A share of F and I is communication. Stages are equal, or
differ by up to a tenth, with a heavier last one. The memory is what DualPipeV needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

from zbv_solver.construct.baselines import order_of
from zbv_solver.construct.pairs import joined
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of

from benchmarks.findings import Finding, at_least, at_most

LEAST_GAIN_PERCENT, MOST_GAP_PERCENT = 8.0, 4.0
"""In the mean over all problems: shorter than DualPipeV, and from the bound."""
SIZES = ((4, 8), (4, 16), (8, 16), (8, 32), (16, 32))
SHARES = (0.15, 0.3, 0.45)


class Instance(NamedTuple):
    """A problem with a name."""

    name: str
    problem: Problem


def instances() -> list[Instance]:
    """Thirty problems."""
    return [
        Instance(f"{p}x{m}-{share:g}-{'equal' if is_equal else 'uneven'}", _problem(p, m, share, is_equal))
        for (p, m), share, is_equal in product(SIZES, SHARES, (True, False))
    ]


def _problem(p: int, m: int, share: float, is_equal: bool) -> Problem:
    random = Random(100 * p + m)
    forward = [18.0 * (1 if is_equal else random.uniform(0.9, 1.1)) for _ in range(2 * p)]
    if not is_equal:
        forward[-1] *= 1.15
    hidden = [share * each for each in forward]
    return parse_problem(
        {
            "pp_degree": p,
            "microbatches": m,
            "costs": {
                "forward": forward,
                "backward_input": forward,
                "backward_weight": [each * 2 / 3 for each in forward],
                "communication": dict.fromkeys(("forward", "backward_input", "backward"), hidden),
            },
            "memory": {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": 2 * p + 1},
        }
    )


def pairs_table(
    chosen: Sequence[Instance], options: SearchOptions, write: Callable[[str], object]
) -> list[Finding]:
    """Search, print a row per problem, and return the means."""
    write(f"{'problem':20}{'span':>9}{'gap':>8}{'DualPipeV':>11}{'no pairs':>10}{'seconds':>9}\n")
    spans, worse, gaps = [], 0, []
    for name, problem in chosen:
        fixed = joined(problem, order_of("dualpipe-v", problem.placement, problem.microbatches))
        plan, alone = search(problem, options), search(problem.without_pairs(), options)
        others = objective_of(problem, fixed), alone.objective
        spans.append(plan.objective / others[0])
        gaps.append(plan.metrics.gap)
        worse += plan.objective > min(others)
        shorter = [f"{100 * (1 - plan.objective / other):9.2f}%" for other in others]
        seconds = plan.provenance.seconds
        write(f"{name:20}{plan.objective:9.1f}{plan.metrics.gap:8.2%} {' '.join(shorter)}{seconds:9.1f}\n")
    gain = 100 * (1 - math.exp(sum(map(math.log, spans)) / len(spans)))
    return [
        Finding("shorter than DualPipeV, geometric mean", gain, "%", at_least(LEAST_GAIN_PERCENT)),
        Finding("worse than DualPipeV or than no pairs", worse, "", at_most(0)),
        Finding("gap, mean", 100 * sum(gaps) / len(gaps), "%", at_most(MOST_GAP_PERCENT)),
    ]
