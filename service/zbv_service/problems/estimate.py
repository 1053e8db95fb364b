"""What a problem promises: a plan of half a second, and the classical schedules. Nothing is stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.certificate import gap_of
from zbv_solver.plans.plan import Plan, baseline_json
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.stage_document import parse_problem
from zbv_solver.search.options import SearchOptions

from zbv_service.compute.cache import Cache
from zbv_service.compute.computations import Computations
from zbv_service.documents.packing import PackedQuestion, finite, unpack
from zbv_service.documents.problems import read_question, require_stages
from zbv_service.documents.shared import parse_body
from zbv_service.errors import INFEASIBLE_MEMORY, ProblemError, infeasible
from zbv_service.problems.documents import Estimate, EstimateRequest
from zbv_service.problems.layer_facts import estimate_of_layers
from zbv_service.settings import Settings

SECONDS = 0.5
"""What the search of an estimate may take; of the largest problems the first plan takes a second more."""
MAX_CELLS = 131_072
"""Most stages times microbatches of which a plan is made: a larger one takes more than it is worth."""
CACHED = 256


class Estimates:
    """Makes estimates."""

    def __init__(self, computations: Computations, settings: Settings):
        self._computations = computations
        self._settings = settings
        self._made: Cache[dict[str, Any]] = Cache(CACHED)

    async def estimate(self, body: bytes | bytearray) -> Estimate:
        """What a moment's search reaches on the problem of a request body.

        Raises
        ------
        InvalidInput
            When the body breaks a rule.
        ProblemError
            400 when it is not JSON, 422 when no plan fits the memory limit, 503 when too many others wait
            already.
        """
        read = partial(read_estimated, self._settings.max_cells)
        try:
            asked, make = await self._computations.of_body(read, body)
            made = await self._made.get(asked.key, lambda: self._computations.run(make, asked.packed))
        except InfeasibleMemory as error:  # of layers, only cutting them shows it
            raise _refusal(error) from None
        return Estimate.model_validate({"problem_summary": asked.summary, **made})


Estimating = Callable[[bytes], dict[str, Any]]


def read_estimated(max_cells: int, body: Any) -> tuple[PackedQuestion, Estimating]:
    """The question of a decoded body, and what estimates it.

    Raises
    ------
    InvalidInput, InfeasibleMemory
    """
    question = read_question(parse_body(EstimateRequest, body).problem, max_cells)
    if isinstance(question, LayeredProblem):
        return PackedQuestion.of(question), estimate_of_cut
    require_stages(question)
    question.require_feasible()
    return PackedQuestion.of(question), estimate_of


def _refusal(error: InfeasibleMemory) -> ProblemError:
    document = infeasible(error)
    return ProblemError(INFEASIBLE_MEMORY, document["detail"], document["errors"])


def estimate_of(packed: bytes) -> dict[str, Any]:
    """The estimate of a packed problem document; runs in a process of its own."""
    # Imported here: the solver's kernels take a second that the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search.search import compare, search

    problem = parse_problem(unpack(packed))
    if problem.n_stages * problem.microbatches > MAX_CELLS:
        bound, plan, baselines = lower_bound(problem, "quick").value, None, compare(problem)
    else:
        found = search(problem, SearchOptions("quick", time_limit=SECONDS))
        bound, plan, baselines = found.metrics.lower_bound, _figures(found), found.baselines
    return {"lower_bound": bound, "plan": plan, "baselines": [baseline_json(each) for each in baselines]}


def estimate_of_cut(packed: bytes) -> dict[str, Any]:
    """The estimate of a packed layered document; runs in a process of its own."""
    bound, found = estimate_of_layers(SECONDS, unpack(packed))
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
