"""Estimates a problem: the plan of a half-second search, and the classical schedules. Stores nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zbv_solver.documents.files import plain
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.partition.cut_space import CutTables
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.plans.plan import Plan, gap_of
from zbv_solver.problem.documents import LayeredProblemDocument
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_problem, to_layered
from zbv_solver.search.options import SearchOptions

from zbv_service.compute.computations import Computations
from zbv_service.compute.waiting import Cache
from zbv_service.documents.parsing import parse_body
from zbv_service.documents.problems import (
    PackedQuestion,
    finite_or_none,
    largest_stages,
    read_question,
    require_stages,
    supported_bound,
    unpack,
)
from zbv_service.errors import INFEASIBLE_MEMORY, ApiError, infeasible
from zbv_service.problems.documents import EstimateRequest, ProblemEstimate
from zbv_service.settings import Settings

SECONDS = 0.5
"""Time limit of an estimate's search; the first plan of the largest problems takes a second more."""
LONGEST_SECONDS = 30.0
"""Deadline of an estimate and of a comparison: a form waits for them while its user is typing."""
MAX_CELLS = 131_072
"""Largest number of stages times microbatches for which an estimate makes a plan."""
MAX_LAYERED_STAGES = 512
MAX_LAYERED_CELLS = 16_384
"""The same limits for layers."""
MAX_KIND_CELLS = 32_768
"""Largest number of layers times stages times kinds of devices, if there are several. Cuts of 512 layers on
ranks of 8 kinds take half a minute."""
CACHED = 256


class Estimates:
    """Computes estimates in other processes, and caches them."""

    def __init__(self, computations: Computations, settings: Settings):
        self._computations = computations
        self._settings = settings
        self._made: Cache[dict[str, Any]] = Cache(CACHED)

    async def estimate(self, body: bytes | bytearray) -> ProblemEstimate:
        """The estimate of the problem in a request body.

        Raises
        ------
        InvalidInput
            The body breaks a rule.
        ApiError
            400: the body is not JSON. 422: no plan fits the memory limit. 503: too many computations are
            waiting.
        """
        read = partial(read_estimated, self._settings.max_cells)
        try:
            asked, make = await self._computations.of_body(read, body)
            made = await self._made.get(
                asked.key, partial(self._computations.run, make, asked.packed, LONGEST_SECONDS)
            )
        except InfeasibleMemory as error:  # for layers, only a cut shows it
            document = infeasible(error)
            raise ApiError(INFEASIBLE_MEMORY, document["detail"], document["errors"]) from None
        return ProblemEstimate.model_validate({"problem_summary": asked.summary, **made})


Estimating = Callable[[bytes], dict[str, Any]]


def read_estimated(max_cells: int, body: Any) -> tuple[PackedQuestion, Estimating]:
    """The problem of a decoded body, and the function that estimates it.

    Raises
    ------
    InvalidInput, InfeasibleMemory
    """
    question = read_question(parse_body(EstimateRequest, body).problem, max_cells)
    if isinstance(question, LayeredProblem):
        return PackedQuestion.of(question), estimate_of_layers
    require_stages(question)
    question.require_feasible()
    return PackedQuestion.of(question), estimate_of


def estimate_of(packed: bytes) -> dict[str, Any]:
    """The estimate of a packed problem document; runs in another process."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search.assemble import compare
    from zbv_solver.search.run import search

    problem = parse_problem(unpack(packed))
    if problem.n_stages * problem.microbatches > MAX_CELLS:
        bound, plan, baselines = lower_bound(problem, "quick").value, None, compare(problem)
    else:
        found = search(problem, SearchOptions("quick", time_limit=SECONDS))
        bound, plan, baselines = found.metrics.lower_bound, _figures(found), found.baselines
    return {"lower_bound": bound, "plan": plan, "baselines": [plain(each) for each in baselines]}


def estimate_of_layers(packed: bytes) -> dict[str, Any]:
    """The estimate of a packed layered document; runs in another process.

    Raises
    ------
    InfeasibleMemory
        When no cut fits.
    ContradictedBound
        When the plan undercuts the bound.
    """
    document = unpack(packed)
    problem = to_layered(validated(LayeredProblemDocument, document))
    if _is_too_large(problem):
        bound = problem.microbatches * least_worst_load(problem, CutTables.of(problem))
        return {"lower_bound": bound, "plan": None, "baselines": []}
    from zbv_solver.frontiers.frontier import floor

    from zbv_service.problems.sketch import sketch

    found = sketch(problem, SECONDS)
    bound = supported_bound(found.objective, floor(problem), "the bound of every cut", lambda: document)
    # The bound holds for every cut, so the gap compares the plan with all cuts, not only with its own.
    gap = gap_of(found.objective, bound)
    status = "feasible" if gap else "optimal"
    return {
        "lower_bound": bound,
        "plan": {**_figures(found), "gap": finite_or_none(gap), "status": status},
        "baselines": [plain(each) for each in found.baselines],
    }


def _is_too_large(problem: LayeredProblem) -> bool:
    """Whether a plan would take too long; the bound is fast for all problems."""
    stages, kinds = largest_stages(problem), len(problem.kinds)
    return (
        stages > MAX_LAYERED_STAGES
        or stages * problem.microbatches > MAX_LAYERED_CELLS
        or (kinds > 1 and problem.model.n_layers * stages * kinds > MAX_KIND_CELLS)
    )


def _figures(plan: Plan) -> dict[str, Any]:
    metrics = plan.metrics
    return {
        "span": metrics.span,
        "makespan": metrics.makespan,
        "bubble_rate": metrics.bubble_rate,
        "peak_memory": list(metrics.peak_memory),
        "gap": finite_or_none(metrics.gap),
        "status": metrics.status,
        "method": plan.provenance.method,
    }
