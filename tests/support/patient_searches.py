"""``zbv-service`` with searches of which tests of processes need no more than that they run or have ended.

``python -m support.patient_searches serve …``. A thorough search finds a plan or a layout and then waits, and
one of standard effort ends at once, both without the planner, if a plan's search has a seed. Others are real.
The service kills itself instead of calling the function that ``ZBV_TEST_DIES_IN`` names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from zbv_models.layouts.progress import LayoutProgress
from zbv_service.records.searches import Claim, Outcome
from zbv_service.searches.executors.task import Reporter, solver_search
from zbv_service.searches.kinds import rank_layouts, update_of_layouts
from zbv_solver.plans.plan import Plan
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Progress

from support.fake_kinds import BOUND, kinds, ranking
from support.fake_searches import Arguments, fake, orders_of

WAIT_SECONDS = 600.0


@fake
def patient(given: Arguments) -> Plan:
    """A search for a plan."""
    effort = given.options["effort"]
    if effort not in ("standard", "thorough") or not given.options["seed"]:
        return solver_search(*given)
    stages, incumbent = given.problem, given.incumbent
    orders = incumbent.orders if isinstance(incumbent, Plan) else incumbent or orders_of(stages)
    plan = make_plan(stages, orders, method="patient")
    metrics = plan.metrics
    if effort == "thorough":
        found = metrics.lower_bound, metrics.gap
        given.on_progress(Progress(plan.objective, *found, "patient", 0.0, orders, stages))
        wait_for(given.cancelled)
    return plan


def patient_layouts(claim: Claim, reporter: Reporter) -> Outcome:
    """A search for layouts."""
    effort = claim.options.get("effort")
    if effort not in ("standard", "thorough"):
        return rank_layouts(claim, reporter)
    if effort == "thorough":
        reporter.report(lambda: update_of_layouts(LayoutProgress(3, 1, 1, 9.0, BOUND)))
        wait_for(reporter.is_stopped)
    return ranking(1 if effort == "thorough" else 2)


def wait_for(is_stopped: Callable[[], bool]) -> None:
    """Wait for the request to stop."""
    until = time.monotonic() + WAIT_SECONDS
    while not is_stopped() and time.monotonic() < until:
        time.sleep(0.05)


if __name__ == "__main__":
    # Search processes and workers, which import this module by its real name, need none of these.
    import os
    import signal
    from unittest.mock import patch

    from zbv_service import app
    from zbv_service.commands import serving
    from zbv_service.commands.cli import main
    from zbv_service.compute import processes

    from support.patient_searches import patient as search
    from support.patient_searches import patient_layouts as layouts

    # mypy knows neither name in these modules.
    if named := os.environ.get("ZBV_TEST_PRELOAD"):
        preloaded: str = named
        setattr(app, "preload", lambda *_: processes.preload(preloaded))  # noqa: B010
    if fatal := os.environ.get("ZBV_TEST_DIES_IN"):
        patch(fatal, lambda *_: os.kill(os.getpid(), signal.SIGKILL)).start()
    setattr(serving, "create_app", partial(app.create_app, kinds=kinds(search, layouts)))  # noqa: B010
    sys.exit(main())
