"""Classical schedules of a problem, beside the best plan that is stored for it. Nothing is searched."""

from __future__ import annotations

import asyncio
from typing import Any

from zbv_solver.plan import baseline_json
from zbv_solver.problem import Problem
from zbv_solver.schema import parse_problem, problem_json

from zbv_service.cache import Cache
from zbv_service.database import PlanTable
from zbv_service.documents import CompareRequest, Comparison, PlanSummaryDocument, parse_body
from zbv_service.packing import problem_key, supported_bound
from zbv_service.questions import read_problem, summary_of
from zbv_service.searches.aside import Aside
from zbv_service.settings import Settings

CACHED = 64


class Comparisons:
    """Makes comparisons."""

    def __init__(self, plans: PlanTable, aside: Aside, settings: Settings):
        self._plans = plans
        self._aside = aside
        self._settings = settings
        self._made: Cache[dict[str, Any]] = Cache(CACHED)

    async def compare(self, body: Any) -> Comparison:
        """What the baselines achieve on the problem of a request body, and the best stored plan of it.

        Raises
        ------
        InvalidInput
            When the body breaks a rule.
        ProblemError
            503 when too many others wait already.
        ContradictedBound
            When the best stored plan undercuts a bound.
        """
        problem = await asyncio.to_thread(self._read, body)
        document = problem_json(problem)
        key = problem_key(document)
        made = await self._made.get(key, lambda: self._aside.run(baselines_of, document))
        best = await self._plans.best(key)
        found = None if best is None else PlanSummaryDocument.of(best)
        bound = made["lower_bound"]
        if best is not None:
            bound = max(bound, best.lower_bound)
            bound = supported_bound(best.value, bound, "the bound of the problem", lambda: document)
        return Comparison.model_validate(
            {
                "problem_summary": summary_of(problem),
                "lower_bound": bound,
                "baselines": made["baselines"],
                "best": found,
            }
        )

    def _read(self, body: Any) -> Problem:
        return read_problem(parse_body(CompareRequest, body).problem, self._settings.max_cells)


def baselines_of(document: dict[str, Any]) -> dict[str, Any]:
    """The baselines of a normalised problem document, and a bound; runs in a process of its own."""
    # Imported here: the solver's kernels take a second that the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search import compare

    problem = parse_problem(document)
    return {
        "lower_bound": lower_bound(problem, "quick").value,
        "baselines": [baseline_json(baseline) for baseline in compare(problem)],
    }
