"""Imported once by the process from which search processes are forked, so that these begin at once.

Importing the planner and loading its machine code takes more than a second; a forked process has both.
"""

from __future__ import annotations

from zbv_solver.schema import parse_problem
from zbv_solver.search import SearchOptions, search

import zbv_service.searches.connection  # noqa: F401 (for those who are forked)

_COSTS = {"forward": 1, "backward_input": 1, "backward_weight": 1}
search(parse_problem({"pp_degree": 2, "microbatches": 2, "costs": _COSTS}), SearchOptions("quick"))
