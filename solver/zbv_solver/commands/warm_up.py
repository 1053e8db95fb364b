"""Compile all kernels ahead of time: ``python -m zbv_solver.commands.warm_up``.

Numba caches the machine code on disk. ``make install`` runs this; without it, the first plan takes one
to two minutes longer.
"""

from __future__ import annotations

import sys

from zbv_solver.commands.messages import spinner
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.reading import parse_any_problem, parse_problem


def main() -> int:
    """Plan tiny problems that run every kernel."""
    with spinner("compiling kernels (once)"):
        from zbv_solver.bounds import lower_bound
        from zbv_solver.search.jitter import search_for_jitter
        from zbv_solver.search.options import SearchOptions
        from zbv_solver.search.run import search

        jitter = Jitter.of(action=0.1)
        costs = {"forward": [2, 3, 2, 4], "backward_input": 2, "backward_weight": 1, "p2p": 1}
        memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 4}
        for objective in ("span", "makespan"):
            problem = {
                "pp_degree": 2,
                "microbatches": 3,
                "costs": costs,
                "memory": memory,
                "objective": objective,
            }
            search(parse_problem(problem), SearchOptions(without=("windows", "exact")))
            search_for_jitter(parse_problem(problem), SearchOptions("quick"), jitter=jitter)
            # A search that meets a weaker bound does not compute the strongest.
            lower_bound(parse_problem(problem), "thorough")
        hidden = dict.fromkeys(("forward", "backward_input", "backward"), 1)
        search(parse_problem(problem | {"costs": costs | {"communication": hidden}}), SearchOptions("quick"))
        copied = {"costs": costs | {"offload": 1}, "memory": memory | {"limit": 3}}
        search(parse_problem(problem | copied), SearchOptions("quick"))
        # Microbatches that differ have bounds that are compiled separately. Their search always includes one
        # for injections, which the searches above leave out.
        held = {"forward": {"x": 2}, "backward_input": {"x": -1}, "backward_weight": {"x": -1}, "limit": 12}
        differing = problem | {"features": {"x": [1, 2, 3]}, "memory": held}
        lower_bound(parse_problem(differing), "full")
        search(parse_problem(differing), SearchOptions("quick"))
        # Small microbatches overtake one whose path decides.
        slopes = {name: {"x": 1} for name in ("forward", "backward_input", "backward_weight")}
        one_large = {"costs": slopes, "features": {"x": [1, 1, 40]}, "memory": held | {"limit": 400}}
        search(parse_problem(differing | one_large), SearchOptions("quick"))
        layer = {"name": "block", "forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 9}
        for placement in ("v", "loop"):
            layered = {"pp_degree": 2, "microbatches": 2, "placement": placement, "layers": [layer]}
            search(parse_any_problem(layered), SearchOptions("quick"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
