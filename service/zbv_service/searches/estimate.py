"""What a problem promises: a plan of half a second, and the classical schedules. Nothing is stored."""

from __future__ import annotations

import asyncio
from typing import Any

from zbv_solver.errors import InfeasibleMemory
from zbv_solver.options import SearchOptions
from zbv_solver.plan import Plan, baseline_json
from zbv_solver.problem import Problem
from zbv_solver.schema import parse_problem, problem_json

from zbv_service.cache import Cache
from zbv_service.documents import parse_body
from zbv_service.http.problems import INFEASIBLE_MEMORY, ProblemError, infeasible
from zbv_service.packing import finite, problem_key
from zbv_service.searches.aside import Aside
from zbv_service.searches.check_documents import Estimate, EstimateRequest
from zbv_service.searches.searches import read_problem, summary_of
from zbv_service.settings import Settings

SECONDS = 0.5
"""What the search of an estimate may take; of the largest problems the first plan takes a second more."""
MAX_CELLS = 65_536
"""Largest pp_degree times microbatches of which a plan is made: a larger one takes more than it is worth."""
CACHED = 256


class Estimates:
    """Makes estimates."""

    def __init__(self, aside: Aside, settings: Settings):
        self._aside = aside
        self._settings = settings
        self._made: Cache[dict[str, Any]] = Cache(CACHED)

    async def estimate(self, body: Any) -> Estimate:
        """What a moment's search reaches on the problem of a request body.

        Raises
        ------
        InvalidInput
            When the body breaks a rule.
        ProblemError
            422 when no plan fits the memory limit, 503 when too many others wait already.
        """
        problem = await asyncio.to_thread(self._read, body)
        document = problem_json(problem)
        made = await self._made.get(problem_key(document), lambda: self._aside.run(estimate_of, document))
        return Estimate.model_validate({"problem_summary": summary_of(problem), **made})

    def _read(self, body: Any) -> Problem:
        problem = read_problem(parse_body(EstimateRequest, body).problem, self._settings.max_cells)
        try:
            problem.require_feasible()
        except InfeasibleMemory as error:
            document = infeasible(error)
            raise ProblemError(INFEASIBLE_MEMORY, document["detail"], document["errors"]) from None
        return problem


def estimate_of(document: dict[str, Any]) -> dict[str, Any]:
    """The estimate of a normalised problem document; runs in a process of its own."""
    # Imported here: the solver's kernels take a second that the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search import compare, search

    problem = parse_problem(document)
    if problem.pp_degree * problem.microbatches > MAX_CELLS:
        bound, plan, baselines = lower_bound(problem, "quick").value, None, compare(problem)
    else:
        found = search(problem, SearchOptions("quick", time_limit=SECONDS))
        bound, plan, baselines = found.metrics.lower_bound, _figures(found), found.baselines
    return {"lower_bound": bound, "plan": plan, "baselines": [baseline_json(each) for each in baselines]}


def _figures(plan: Plan) -> dict[str, Any]:
    metrics = plan.metrics
    return {
        "span": metrics.span,
        "makespan": metrics.makespan,
        "bubble_rate": metrics.bubble_rate,
        "peak_memory": list(metrics.peak_memory),
        "gap": finite(metrics.gap),
        "status": metrics.status,
        "method": plan.provenance.method,
    }
