"""Classical schedules of a problem, beside the best plan that is stored for it. Nothing is searched."""

from __future__ import annotations

import asyncio
from concurrent.futures import BrokenExecutor
from typing import Any

from pydantic import ValidationError
from zbv_solver.errors import InvalidInput
from zbv_solver.plan import baseline_json
from zbv_solver.problem import Problem
from zbv_solver.schema import issues_of, parse_problem, problem_json, to_problem

from zbv_service.cache import Cache
from zbv_service.database import PlanTable
from zbv_service.documents import CompareRequest, Comparison, PlanSummaryDocument
from zbv_service.http.problems import NOT_READY, ProblemError
from zbv_service.packing import problem_key
from zbv_service.searches.processes import IsolatedProcesses
from zbv_service.searches.searches import require_size, summary_of
from zbv_service.settings import Settings

AT_A_TIME = 2
WAITING = 32
"""So many comparisons may wait for the processes that make them; a large one takes some seconds."""
CACHED = 64


class Comparisons:
    """Makes comparisons, in processes of its own: the largest keep a core busy for seconds."""

    def __init__(self, plans: PlanTable, settings: Settings):
        self._plans = plans
        self._settings = settings
        self._made: Cache[dict[str, Any]] = Cache(CACHED)
        self._processes = IsolatedProcesses()
        self._turn = asyncio.Semaphore(AT_A_TIME)
        self._waiting = 0

    async def compare(self, body: Any) -> Comparison:
        """What the baselines achieve on the problem of a request body, and the best stored plan of it.

        Raises
        ------
        InvalidInput
            When the body breaks a rule.
        ProblemError
            503 when too many others wait already.
        """
        problem = await asyncio.to_thread(self._read, body)
        document = problem_json(problem)
        key = problem_key(document)
        made = await self._made.get(key, lambda: self._make(document))
        best = await self._plans.best(key)
        found = None if best is None else PlanSummaryDocument.of(best)
        bound = made["lower_bound"] if best is None else max(made["lower_bound"], best.lower_bound)
        return Comparison.model_validate(
            {
                "problem_summary": summary_of(problem),
                "lower_bound": bound,
                "baselines": made["baselines"],
                "best": found,
            }
        )

    def stop(self) -> None:
        """End the processes, whatever they do."""
        self._processes.kill()
        self._processes.shutdown(wait=False, cancel_futures=True)

    def _read(self, body: Any) -> Problem:
        try:
            request = CompareRequest.model_validate(body)
        except ValidationError as error:
            raise InvalidInput(issues_of(error, body)) from None
        try:
            problem = to_problem(request.problem)
        except InvalidInput as error:
            raise error.below("/problem") from None
        require_size(problem.pp_degree, problem.microbatches, self._settings.max_cells)
        return problem

    async def _make(self, problem: dict[str, Any]) -> dict[str, Any]:
        if self._waiting >= WAITING:
            raise ProblemError(
                NOT_READY,
                f"{WAITING} comparisons wait already; send this one again in some seconds.",
                headers={"Retry-After": "5"},
            )
        self._waiting += 1
        try:
            async with self._turn:
                # Starting a process takes the calling thread some milliseconds, so it is not this one.
                future = await asyncio.to_thread(self._processes.submit, baselines_of, problem)
                return await asyncio.wrap_future(future)
        except BrokenExecutor:
            raise ProblemError(
                NOT_READY,
                "The process that compared died; most often memory ran out. Try fewer microbatches.",
            ) from None
        finally:
            self._waiting -= 1


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
