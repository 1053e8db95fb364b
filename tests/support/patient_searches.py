"""``zbv-service`` with long searches that find a plan and then wait without using the CPU.

For tests of what happens during a long search: ``python -m support.patient_searches serve …``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from zbv_service.app import create_app
from zbv_service.commands import serving
from zbv_service.commands.cli import main
from zbv_service.documents.problems import Question
from zbv_service.searches.executors.layouts import rank_layouts
from zbv_service.searches.executors.task import solver_search
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.search.incumbent import Progress

from support.fake_kinds import kinds

WAIT_SECONDS = 600.0


def patient(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Search with the solver; a thorough search with a seed searches quickly, then waits to be cancelled."""
    if options["effort"] != "thorough" or not options["seed"]:
        return solver_search(problem, options, on_progress, cancelled, incumbent)
    until = time.monotonic() + WAIT_SECONDS
    plan = solver_search(problem, {**options, "effort": "quick"}, on_progress, cancelled, incumbent)
    while not cancelled() and time.monotonic() < until:
        time.sleep(0.05)
    return plan


if __name__ == "__main__":
    # Import it by its real name, which other processes use to find it.
    from support.patient_searches import patient as search

    setattr(serving, "create_app", partial(create_app, kinds=kinds(search, rank_layouts)))  # noqa: B010 (mypy knows no such name)
    sys.exit(main())
