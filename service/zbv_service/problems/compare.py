"""Compares the classical schedules of a problem with its best stored plan, without a search."""

from __future__ import annotations

from functools import partial
from typing import Any

from zbv_solver.documents.files import plain
from zbv_solver.problem.reading import parse_problem

from zbv_service.compute.computations import Computations
from zbv_service.compute.waiting import Cache
from zbv_service.database import PlanTable
from zbv_service.documents.parsing import parse_body
from zbv_service.documents.problems import (
    PackedQuestion,
    read_problem,
    require_stages,
    supported_bound,
    unpack,
)
from zbv_service.problems.documents import CompareRequest, Comparison
from zbv_service.problems.estimate import LONGEST_SECONDS
from zbv_service.settings import Settings

CACHED = 64


class Comparisons:
    """Computes the classical schedules in other processes, and caches them."""

    def __init__(self, plans: PlanTable, computations: Computations, settings: Settings):
        self._plans = plans
        self._computations = computations
        self._settings = settings
        self._made: Cache[dict[str, Any]] = Cache(CACHED)

    async def compare(self, body: bytes | bytearray) -> Comparison:
        """The baselines of the problem in a request body, and its best stored plan.

        Raises
        ------
        InvalidInput
            The body breaks a rule.
        ApiError
            400: the body is not JSON. 503: too many computations are waiting.
        ContradictedBound
            The best stored plan undercuts a bound.
        """
        asked = await self._computations.of_body(partial(read_compared, self._settings.max_cells), body)
        made = await self._made.get(
            asked.key, partial(self._computations.run, baselines_of, asked.packed, LONGEST_SECONDS)
        )
        best = await self._plans.best(asked.key)
        answer = {**made, "problem_summary": asked.summary, "best": None}
        if best is not None:
            bound = max(made["lower_bound"], best.lower_bound)
            answer["best"] = best
            answer["lower_bound"] = supported_bound(
                best.value, bound, "the bound of the problem", lambda: unpack(asked.packed)
            )
        return Comparison.model_validate(answer)


def read_compared(max_cells: int, body: Any) -> PackedQuestion:
    """The problem of a decoded body; raises :class:`InvalidInput`."""
    problem = read_problem(parse_body(CompareRequest, body).problem, max_cells)
    require_stages(problem)
    return PackedQuestion.of(problem)


def baselines_of(packed: bytes) -> dict[str, Any]:
    """The baselines of a packed problem document and a bound; runs in another process."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.search.assemble import compare

    problem = parse_problem(unpack(packed))
    return {
        "lower_bound": lower_bound(problem, "quick").value,
        "baselines": [plain(baseline) for baseline in compare(problem)],
    }
