"""Imported once by the process from which searches and computations are forked, so that these begin at once.

Importing the planner and what draws, and loading their machine code, takes seconds; a forked process has it.
"""

from __future__ import annotations

from zbv_solver.problem.stage_document import parse_problem
from zbv_solver.search.search import SearchOptions, search

from zbv_service.plans import pictures as plan_pictures

_COSTS = {"forward": 1, "backward_input": 1, "backward_weight": 1}
search(parse_problem({"pp_degree": 2, "microbatches": 2, "costs": _COSTS}), SearchOptions("quick"))
plan_pictures.load()
