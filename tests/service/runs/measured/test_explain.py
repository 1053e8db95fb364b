"""Explanations: the one deviation from the plan is found and put into words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.problems import uniform
from support.rank_traces import trace_documents
from zbv_service.runs.measured.accounts import account
from zbv_service.runs.measured.explain import Explanation, explain, sentence
from zbv_service.runs.measured.step import lay_out
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Objective, Problem, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


@pytest.fixture(scope="module", params=["span", "makespan"])
def plan(request: pytest.FixtureRequest) -> Plan:
    objective: Objective = request.param
    problem = replace(uniform(4, 8, limit=8, p2p=0.25, objective=objective), units=Units(time="us"))
    return search(problem, SearchOptions("quick"))


def explained(plan: Plan, problem: Problem | None = None, change: Any = None) -> Explanation:
    """The explanation of the plan's order that runs with the costs of another problem."""
    documents = trace_documents(problem or plan.problem, plan.orders, plan_id=plan.plan_id)
    for document in documents:
        if change is not None:
            change(document)
    step = lay_out(plan, [parse_rank_trace(document) for document in documents], 0, 1000.0)
    return explain(plan, step, account(plan, step))


def times(plan: Plan, factor: float, *names: str, rank: int | None = None) -> Problem:
    """The plan's problem with these costs, of one rank or of all, this much longer."""
    costs, stages = plan.problem.costs, range(plan.problem.n_stages)
    slow = stages if rank is None else plan.problem.placement.stages_of[rank]
    changes = {
        name: tuple(
            cost * (factor if at in slow or name == "p2p" else 1.0)
            for at, cost in enumerate(getattr(costs, name))
        )
        for name in names
    }
    return replace(plan.problem, costs=replace(costs, **changes))


ACTIONS = ("forward", "backward_input", "backward_weight")


@pytest.mark.parametrize(
    ("factor", "names", "rank", "cause", "said"),
    [
        (2.5, ["backward_weight"], 2, ("actions", 2, "W"), "Rank 2's W took 2.50 × what was planned"),
        (1.5, ACTIONS, 1, ("actions", 1, None), "Rank 1's actions took 1.50 ×"),
        (6, ["p2p"], None, ("transfers", None, None), "Transfers took 6.00 × what was planned"),
        (1.4, ["forward"], None, ("actions", None, "F"), "F took 1.40 × what was planned, over all ranks"),
    ],
)
def test_the_one_deviation_is_the_main_cause(
    plan: Plan, factor: float, names: list[str], rank: int | None, cause: tuple[object, ...], said: str
) -> None:
    found = explained(plan, times(plan, factor, *names, rank=rank))
    assert found.main is not None
    assert (found.main.kind, found.main.rank, found.main.letter) == cause
    assert found.main.ratio == pytest.approx(factor)
    assert found.share(found.main) >= 0.6
    assert said in sentence(found)
    assert "longer than planned" in sentence(found)


def test_time_between_actions_is_found_although_none_is_planned(plan: Plan) -> None:
    """Every rank turns to its actions later than possible, which delays them by the same time."""

    def dawdle(document: dict[str, Any]) -> None:
        for index, row in enumerate(document["steps"][0]["actions"]):
            late = 300 * index
            row[1:4] = [row[1] + late, row[2] + late, row[3] + late]

    found = explained(plan, change=dawdle)
    assert found.main is not None
    assert found.main.kind == "between"
    assert "time between actions" in sentence(found)


def test_a_faster_step_is_explained_too(plan: Plan) -> None:
    found = explained(plan, times(plan, 0.5, "forward", "backward_input"))
    assert found.difference < 0
    assert found.main is not None
    assert found.main.effect < 0
    assert "less than planned" in sentence(found)


def test_a_step_as_planned_needs_no_cause() -> None:
    problem = replace(uniform(2, 4, objective="makespan"), units=Units(time="us"))
    plan = search(problem, SearchOptions("quick"))
    found = explained(plan)
    assert found.main is None
    assert sentence(found) == "The step took as long as planned (0.0\u202f%)."


def test_early_starts_are_a_cause_if_the_span_assumes_staggered_starts() -> None:
    ranks = [["0F0", "0F1", "3F0", "3I0", "3W0", "3F1", "3I1", "3W1", "0I0", "0W0", "0I1", "0W1"]]
    ranks += [["1F0", "2F0", "1F1", "2F1", "2I0", "1I0", "2W0", "1W0", "2I1", "1I1", "2W1", "1W1"]]
    problem = replace(uniform(2, 2, p2p=3.0), units=Units(time="us"))
    plan = make_plan(problem, Orders.from_text(ranks), method="test")
    found = explained(plan)
    (start,) = [cause for cause in found.causes if cause.kind == "start"]
    assert start.effect == pytest.approx(found.difference)


def test_slow_actions_are_found_among_microbatches_that_differ() -> None:
    """Their durations differ as planned, which is no cause."""

    def costing(weights: float) -> Problem:
        document = {
            "pp_degree": 2,
            "microbatches": 4,
            "features": {"tokens": [10, 40, 20, 30]},
            "costs": {
                "forward": {"fixed": 2, "tokens": 1},
                "backward_input": {"tokens": 1},
                "backward_weight": {"tokens": [weights, 1, 1, weights]},
                "p2p": {"tokens": 0.1},
            },
            "units": {"time": "us"},
        }
        return parse_problem(document)

    plan = search(costing(1), SearchOptions("quick"))
    assert explained(plan).main is None
    found = explained(plan, costing(3))
    assert found.main is not None
    assert (found.main.kind, found.main.rank) == ("actions", 0)
    assert found.main.letter in ("W", "B", None)
    assert found.share(found.main) >= 0.6
