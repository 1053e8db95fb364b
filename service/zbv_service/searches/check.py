"""Checking a problem before it is searched: every broken rule, and what its numbers mean."""

from __future__ import annotations

import asyncio
from typing import Any

from zbv_solver import memory_fraction
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem import Problem, exceeds

from zbv_service.documents import ProblemSummary, parse_body
from zbv_service.searches.check_documents import CheckRequest, IssueDocument, ProblemCheck, ProblemFacts
from zbv_service.searches.searches import parse_request, summary_of
from zbv_service.settings import Settings


async def check(body: Any, settings: Settings) -> ProblemCheck:
    """What is wrong with the request for a search that a body is, and what it asks for when nothing is."""
    return await asyncio.to_thread(_check, body, settings)


def _check(body: Any, settings: Settings) -> ProblemCheck:
    try:
        problem = _problem_of(body, settings)
    except InvalidInput as error:
        issues = [IssueDocument(pointer=issue.pointer, detail=issue.detail) for issue in error.issues]
        return ProblemCheck(is_valid=False, issues=issues, problem_summary=None, facts=None)
    summary = ProblemSummary.model_validate(summary_of(problem))
    return ProblemCheck(is_valid=True, issues=[], problem_summary=summary, facts=facts_of(problem))


def _problem_of(body: Any, settings: Settings) -> Problem:
    request = parse_body(CheckRequest, body)
    asked = {key: value for key, value in body.items() if key != "limit_fraction"}
    problem, _ = parse_request(asked, settings)
    return problem if request.limit_fraction is None else _limited(problem, request.limit_fraction)


def _limited(problem: Problem, fraction: float) -> Problem:
    if problem.memory.limit is not None:
        raise InvalidInput.at(
            "/limit_fraction",
            "found a limit_fraction and a memory.limit; the one replaces the other. Send one.",
        )
    if memory_fraction.one_f_one_b_memory(problem) == 0:
        raise InvalidInput.at(
            "/limit_fraction",
            "the stages hold no memory, so there is no fraction of it. Give memory.forward, "
            "memory.backward_input and memory.backward_weight, or leave the limit out.",
        )
    try:
        return memory_fraction.at_fraction(problem, fraction)
    except InvalidInput as error:  # beyond the largest number
        raise InvalidInput([Issue("/limit_fraction", issue.detail) for issue in error.issues]) from None


def facts_of(problem: Problem) -> ProblemFacts:
    """What can be said of a problem at once."""
    limits, smallest = problem.memory.limit, problem.smallest_limit
    whole = memory_fraction.one_f_one_b_memory(problem)
    return ProblemFacts(
        stages=problem.n_stages,
        actions=problem.max_actions,
        limit=None if limits is None else list(limits),
        limit_fraction=memory_fraction.of_limit(problem) if whole else None,
        smallest_limit=list(smallest),
        smallest_fraction=memory_fraction.smallest(problem) if whole else None,
        fits=limits is None or not any(map(exceeds, smallest, limits)),
        one_f_one_b_memory=whole,
        busy=[problem.busy_time(rank) for rank in range(problem.pp_degree)],
    )
