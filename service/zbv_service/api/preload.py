"""Imported once by the fork server, so that forked processes start with all code that they may run.

It takes seconds to import the planner and the drawing code and to load their machine code.
"""

from __future__ import annotations

from zbv_models.layouts import search as layout_search
from zbv_solver.packing import packing as pack
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from zbv_service.frontier import frontier
from zbv_service.plans import renderings
from zbv_service.problems import check, compare, estimate, packing
from zbv_service.runs import measurements
from zbv_service.searches import searches
from zbv_service.searches.executors import local

PRELOADED = (
    *(check, compare, estimate, frontier, layout_search, local, measurements, searches),
    *(pack, packing, renderings),
)

_COSTS = {"forward": 1, "backward_input": 1, "backward_weight": 1}
search(parse_problem({"pp_degree": 2, "microbatches": 2, "costs": _COSTS}), SearchOptions("quick"))
renderings.load()
