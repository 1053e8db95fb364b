"""What a problem promises: a plan of half a second, and the classical schedules. Nothing is stored."""

from __future__ import annotations

import asyncio
from typing import Any

from zbv_solver.certificate import gap_of
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.layers.layered_problem import LayeredProblem
from zbv_solver.options import SearchOptions
from zbv_solver.plan import Plan, baseline_json
from zbv_solver.schema import parse_problem

from zbv_service.cache import Cache
from zbv_service.documents import parse_body
from zbv_service.http.problems import INFEASIBLE_MEMORY, ProblemError, infeasible
from zbv_service.packing import finite, problem_key
from zbv_service.questions import Question, question_json, read_question, summary_of
from zbv_service.searches.aside import Aside
from zbv_service.searches.check_documents import Estimate, EstimateRequest
from zbv_service.searches.layered import estimate_of_layers
from zbv_service.settings import Settings

SECONDS = 0.5
"""What the search of an estimate may take; of the largest problems the first plan takes a second more."""
MAX_CELLS = 131_072
"""Most stages times microbatches of which a plan is made: a larger one takes more than it is worth."""
MAX_STAGES = 16_384
"""Bounds take time in the square of the stages: of more than so many, a minute."""
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
        question = await asyncio.to_thread(self._read, body)
        document = question_json(question)
        make = estimate_of_cut if isinstance(question, LayeredProblem) else estimate_of
        try:
            made = await self._made.get(problem_key(document), lambda: self._aside.run(make, document))
        except InfeasibleMemory as error:  # which of layers shows only when they are cut
            raise _refusal(error) from None
        return Estimate.model_validate({"problem_summary": summary_of(question), **made})

    def _read(self, body: Any) -> Question:
        problem = read_question(parse_body(EstimateRequest, body).problem, self._settings.max_cells)
        if isinstance(problem, LayeredProblem):
            return problem
        if problem.n_stages > MAX_STAGES:
            raise InvalidInput.at(
                "/problem/chunks",
                f"found {problem.n_stages} stages; an estimate is made of at most {MAX_STAGES}. Have it "
                f"searched instead.",
            )
        try:
            problem.require_feasible()
        except InfeasibleMemory as error:
            raise _refusal(error) from None
        return problem


def _refusal(error: InfeasibleMemory) -> ProblemError:
    document = infeasible(error)
    return ProblemError(INFEASIBLE_MEMORY, document["detail"], document["errors"])


def estimate_of(document: dict[str, Any]) -> dict[str, Any]:
    """The estimate of a normalised problem document; runs in a process of its own."""
    # Imported here: the solver's kernels take a second that the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search import compare, search

    problem = parse_problem(document)
    if problem.n_stages * problem.microbatches > MAX_CELLS:
        bound, plan, baselines = lower_bound(problem, "quick").value, None, compare(problem)
    else:
        found = search(problem, SearchOptions("quick", time_limit=SECONDS))
        bound, plan, baselines = found.metrics.lower_bound, _figures(found), found.baselines
    return {"lower_bound": bound, "plan": plan, "baselines": [baseline_json(each) for each in baselines]}


def estimate_of_cut(document: dict[str, Any]) -> dict[str, Any]:
    """The estimate of a normalised layered document; runs in a process of its own."""
    bound, found = estimate_of_layers(SECONDS, document)
    plan = None
    if found is not None:
        # Held against every other cut, as the bound is, and not only against other orders of its own.
        gap = gap_of(found.objective, bound)
        plan = {**_figures(found), "gap": finite(gap), "status": "feasible" if gap else "optimal"}
    return {
        "lower_bound": bound,
        "plan": plan,
        "baselines": [] if found is None else [baseline_json(each) for each in found.baselines],
    }


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
