"""``zbv-service`` with long searches that find a plan or a layout and then wait without using the CPU.

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
from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.task import Reporter, solver_search
from zbv_service.searches.kinds import rank_layouts
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Progress

from support.fake_kinds import kinds
from support.fake_searches import orders_of, stages_of

WAIT_SECONDS = 600.0


def patient(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Search with the solver; a thorough search with a seed has a plan at once, and waits to be cancelled."""
    if options["effort"] != "thorough" or not options["seed"]:
        return solver_search(problem, options, on_progress, cancelled, incumbent)
    stages = stages_of(problem)
    orders = incumbent.orders if isinstance(incumbent, Plan) else incumbent or orders_of(stages)
    plan = make_plan(stages, orders, method="patient")
    metrics, until = plan.metrics, time.monotonic() + WAIT_SECONDS
    on_progress(Progress(plan.objective, metrics.lower_bound, metrics.gap, "patient", 0.0, orders, stages))
    while not cancelled() and time.monotonic() < until:
        time.sleep(0.05)
    return plan


class Patient:
    """A reporter that waits for the request to stop once it has reported a layout."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter
        self.is_stopped = reporter.is_stopped

    def report(self, make: Callable[[], Update]) -> None:
        """Report, and wait if this is a layout."""
        update = make()
        self._reporter.report(lambda: update)
        until = time.monotonic() + WAIT_SECONDS
        while update.objective is not None and not self.is_stopped() and time.monotonic() < until:
            time.sleep(0.05)


def patient_layouts(claim: Claim, reporter: Reporter) -> Outcome:
    """Search with the solver; a thorough search waits after its first layout."""
    is_patient = claim.options.get("effort") == "thorough"
    return rank_layouts(claim, Patient(reporter) if is_patient else reporter)


if __name__ == "__main__":
    # Import it by its real name, which other processes use to find it.
    from support.patient_searches import patient as search
    from support.patient_searches import patient_layouts as layouts

    setattr(serving, "create_app", partial(create_app, kinds=kinds(search, layouts)))  # noqa: B010 (mypy knows no such name)
    sys.exit(main())
