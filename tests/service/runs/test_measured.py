"""Measured steps: the parts of their accounts add up, and the one deviation is found and put into words."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import copied_at_random, random_orders
from support.problems import problems, uniform
from support.rank_traces import trace_documents
from support.reference import inputs, simulate
from zbv_service.runs.measured.accounts import account, kind_times
from zbv_service.runs.measured.explain import explain, sentence
from zbv_service.runs.measured.step import (
    MeasuredStep,
    clock_conflict,
    lay_out,
    nanoseconds_of_unit,
    sources,
    step_length,
    typical,
)
from zbv_solver.construct.pairs import joined, starts
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.plans.orders import Action, Orders, durations
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Objective, Problem, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Copies
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import span_start_times

MICROSECOND = 1000.0


def plan_of(problem: Problem, seed: int = 1) -> Plan:
    named = replace(problem, units=Units(time="us"))
    return make_plan(named, random_orders(named, Random(seed)), method="random")


def noisy(plan: Plan, seed: int, steps: int = 1) -> list[RankTrace]:
    """Traces of steps whose actions, transfers and pauses take random whole nanoseconds."""
    chance, problem, rank_of = Random(seed), plan.problem, plan.problem.placement.rank_of
    ranks = range(problem.pp_degree)
    entries: list[list[dict[str, Any]]] = [[] for _ in ranks]
    begin = 0
    for step in range(steps):
        free = [begin + chance.randrange(3000) for _ in ranks]
        rows: list[list[list[Any]]] = [[] for _ in ranks]
        done: dict[Action, int] = {}
        for action in simulate(problem, plan.orders)[0]:
            rank = rank_of[action.stage]
            turned = free[rank] + chance.randrange(1000)
            sources = [each for choice, _ in inputs(problem, action) for each in choice if each in done]
            under_way = [chance.randrange(4000) if rank_of[each.stage] != rank else 0 for each in sources]
            start = max([turned, *(done[each] + late for each, late in zip(sources, under_way, strict=True))])
            done[action] = free[rank] = start + chance.randrange(6000)
            rows[rank].append([str(action), turned, start, free[rank], 0])
        begin = max(free)
        for rank in ranks:
            seconds = (rows[rank][-1][3] - rows[rank][0][2]) / 1e9
            entries[rank].append({"step": step, "loss": None, "seconds": seconds, "actions": rows[rank]})
    of_plan = {"replica": 0, "plan_id": plan.plan_id}
    return [parse_rank_trace({"rank": r, "pp_rank": r, "steps": entries[r]} | of_plan) for r in ranks]


def as_planned(plan: Plan) -> list[RankTrace]:
    return [*map(parse_rank_trace, trace_documents(plan.problem, plan.orders, plan_id=plan.plan_id))]


@given(problems(max_p=3, max_m=4), st.integers(0, 1000))
def test_the_parts_of_every_rank_add_up_to_the_difference(problem: Problem, seed: int) -> None:
    plan = plan_of(problem, seed)
    step = lay_out(plan, noisy(plan, seed), 0, MICROSECOND)
    found = account(plan, step)
    assert (found.planned, found.measured) == (plan.objective, step_length(plan, step))
    for row in found.ranks:
        for parts, total in (
            (row.planned, found.planned),
            (row.measured, found.measured),
            (row.difference, found.difference),
            (row.measured.without_transfer(), found.measured),
        ):
            assert parts.total == pytest.approx(total, abs=1e-6)
        for parts in (row.planned, row.measured):
            assert min(vars(parts).values()) >= -1e-12 * (1 + parts.total)


@given(problems(max_p=3, max_m=3), st.integers(0, 1000))
def test_each_part_matches_the_records(problem: Problem, seed: int) -> None:
    """Compares the parts with sums over the single records."""
    plan = plan_of(problem, seed)
    traces = noisy(plan, seed)
    step = lay_out(plan, traces, 0, 1.0)
    found = account(plan, step)
    end_of = {
        text: int(times[2])
        for trace in traces
        for text, times in zip(trace.steps[0].orders.text(0), trace.steps[0].times, strict=True)
    }
    source = sources(plan)
    texts = [text for texts in plan.orders.all_text() for text in texts]
    for row, trace in zip(found.ranks, traces, strict=True):
        times = trace.steps[0].times
        begin = plan.orders.slice_of(row.rank).start
        first = (
            times[0, 1] if plan.problem.objective == "span" else min(t.steps[0].times[0, 1] for t in traces)
        )
        transfer, still = 0, 0
        for index, (turned, start, _) in enumerate(times.tolist()):
            since = turned if index else int(first)
            still += start - since
            made = source[begin + index]
            if made >= 0:
                transfer += start - max(since, min(start, end_of[texts[made]]))
        assert row.measured.compute == (times[:, 2] - times[:, 1]).sum()
        assert row.measured.between == (times[1:, 0] - times[:-1, 2]).sum()
        assert row.measured.transfer == transfer
        slack = first + found.measured - times[-1, 2]
        assert row.measured.waiting == pytest.approx(still - transfer + slack)


@given(problems(max_p=4, max_m=4), st.integers(0, 1000))
def test_a_step_as_planned_has_no_difference(problem: Problem, seed: int) -> None:
    plan = plan_of(problem, seed)
    orders = plan.orders
    tolerance = 1e-6 * (1 + plan.objective)
    if plan.problem.objective == "makespan":
        tolerance += 1e-3 * len(orders)  # traces have whole nanoseconds; the plan's unit is a microsecond
        step = lay_out(plan, as_planned(plan), 0, MICROSECOND)
    else:
        start = span_start_times(plan.problem, orders)
        end = start + plan.problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
        turned = np.concatenate(
            [
                np.concatenate((start[part][:1], end[part][:-1]))
                for part in map(orders.slice_of, range(orders.pp_degree))
            ]
        )
        step = MeasuredStep(0, 0, turned, start, end, tuple(range(orders.pp_degree)), 0.0)
    found = account(plan, step)
    assert found.difference == pytest.approx(0, abs=tolerance)
    for row in found.ranks:
        for part in vars(row.difference).values():
            assert part == pytest.approx(0, abs=tolerance)


def test_a_step_with_copies_has_no_difference_if_it_ran_as_planned() -> None:
    """Traces have no entries for copies; what waits for them is as late as planned."""
    problem = replace(uniform(2, 4, p2p=0.5, objective="makespan"), units=Units(time="us"))
    slow, nothing = (30.0,) * problem.n_stages, (0.0,) * problem.n_stages
    problem = replace(problem, copies=Copies(slow, slow, nothing))
    orders = copied_at_random(random_orders(problem, Random(3)), Random(3))
    plan = make_plan(problem, orders, method="random")
    found = account(plan, lay_out(plan, as_planned(plan), 0, MICROSECOND))
    assert found.planned > make_plan(problem, orders.without_copies(), method="random").objective
    assert found.difference == pytest.approx(0, abs=1e-3 * len(orders))


@pytest.fixture(scope="module")
def paired() -> Plan:
    """DualPipeV's order, with the pairs that it has."""
    document = {
        **{"pp_degree": 3, "microbatches": 8, "units": {"time": "us"}, "objective": "makespan"},
        "costs": {"forward": 10, "backward_input": 12, "backward_weight": 8, "p2p": 1}
        | {"communication": {"forward": 4, "backward_input": 5, "backward": 6}},
    }
    problem = parse_problem(document)
    orders = joined(problem, next(orders for _, orders in starts(problem)))
    assert all(map(orders.pairs, range(3)))
    return make_plan(problem, orders, method="dualpipe-v")


def test_the_two_actions_of_a_pair_occupy_a_rank_once(paired: Plan) -> None:
    step = lay_out(paired, as_planned(paired), 0, MICROSECOND)
    found = account(paired, step)
    took = durations(paired.problem, paired.orders)
    for row in found.ranks:
        assert row.planned.compute == pytest.approx(took[paired.orders.slice_of(row.rank)].sum())
        assert min(*vars(row.planned).values(), *vars(row.measured).values()) >= -1e-9
        for part in vars(row.difference).values():
            assert part == pytest.approx(0, abs=0.1)
    kinds = {kind.letter: kind for kind in kind_times(paired, [step]) if kind.rank == 0}
    assert kinds["pair"].count == len(paired.orders.pairs(0))
    assert kinds["pair"].ratio == pytest.approx(1, abs=1e-3)
    assert kinds["F"].planned == pytest.approx(10)
    assert kinds["F"].count == 16 - kinds["pair"].count
    assert explain(paired, step, found).main is None


@pytest.mark.parametrize("unit", ["us", "forwards"])
def test_pairs_that_hide_less_than_planned_are_the_main_cause(paired: Plan, unit: str) -> None:
    named = replace(paired.problem, units=Units(time=unit))
    plan = make_plan(named, paired.orders, method="dualpipe-v")
    slow = make_plan(replace(named, pair_factor=1.3), plan.orders, method="slow")
    traces = [replace(each, plan_id=plan.plan_id) for each in as_planned(slow)]
    nanoseconds, _ = nanoseconds_of_unit(plan, traces)
    step = lay_out(plan, traces, 0, MICROSECOND)
    found = explain(plan, step, account(plan, step))
    assert found.main is not None
    assert "Pairs took 1.30 × what was planned: that alone explains all" in sentence(found)
    assert found.measured == pytest.approx(slow.metrics.makespan, rel=1e-3)
    took = [durations(each.problem, plan.orders).sum() for each in (slow, plan)]
    assert nanoseconds == pytest.approx(MICROSECOND * (1 if unit == "us" else took[0] / took[1]), rel=1e-3)


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_ranks_without_a_trace_are_left_out(objective: Objective) -> None:
    plan = plan_of(uniform(3, 5, p2p=0.5, objective=objective))
    traces = as_planned(plan)
    step = lay_out(plan, [traces[0], traces[2]], 0, MICROSECOND)
    assert step.ranks == (0, 2)
    assert np.isnan(step.start[plan.orders.slice_of(1)]).all()
    found = account(plan, step)
    assert [row.rank for row in found.ranks] == [0, 2]
    for row in found.ranks:
        assert row.difference.total == pytest.approx(found.difference)
    assert {kind.rank for kind in kind_times(plan, [step])} == {0, 2}


def test_the_typical_step_is_a_measured_one() -> None:
    plan = plan_of(uniform(2, 4))
    traces = noisy(plan, 3, steps=5)
    steps = [lay_out(plan, traces, at, MICROSECOND) for at in range(5)]
    for some, at in ((steps, 2), (steps[:2], 0)):
        assert step_length(plan, typical(plan, some)) == sorted(step_length(plan, s) for s in some)[at]


def test_a_named_unit_is_used_and_any_other_is_fitted() -> None:
    plan = plan_of(uniform(2, 4))
    assert nanoseconds_of_unit(plan, as_planned(plan)) == (1000.0, True)
    bare = make_plan(uniform(2, 4), plan.orders, method="random")
    nanoseconds, is_named = nanoseconds_of_unit(bare, as_planned(bare))
    assert nanoseconds == pytest.approx(1000.0)
    assert not is_named


def test_contradicting_clocks_are_detected() -> None:
    plan = plan_of(uniform(2, 4, p2p=0.5))
    agreed = clock_conflict(plan, lay_out(plan, as_planned(plan), 0, MICROSECOND))
    assert (agreed.count, agreed.inputs) == (0, 2 * 2 * 4), "two inputs from the other rank in each direction"
    documents = trace_documents(plan.problem, plan.orders, plan_id=plan.plan_id, ahead=[0, -20_000])
    documents[1]["clock_offset_ns"] = 0
    found = clock_conflict(plan, lay_out(plan, [*map(parse_rank_trace, documents)], 0, MICROSECOND))
    assert found.count > 0
    assert found.worst == pytest.approx(20.0 - 0.5)
    # Of what the clocks do not know, nobody can say that it is wrong; the worse of them counts.
    documents[1]["uncertainty_ns"] = 30_000
    vague = lay_out(plan, [*map(parse_rank_trace, documents)], 0, MICROSECOND)
    assert (vague.uncertainty, clock_conflict(plan, vague).count) == (30.0, 0)


def test_a_step_that_is_not_the_plans_is_refused() -> None:
    plan, other = plan_of(uniform(2, 4), 1), plan_of(uniform(2, 4), 2)
    documents = trace_documents(plan.problem, plan.orders, plan_id=plan.plan_id)
    for document in documents:
        document["steps"][0]["actions"] = []
    for traces, step, message in (
        ([parse_rank_trace(document) for document in documents], 0, "ran 0 actions"),
        (as_planned(other), 0, "not its list of plan"),
        (as_planned(plan_of(uniform(3, 4)))[2:], 0, "ranks 0 to 1"),
        (as_planned(plan), 9, "step 9"),
    ):
        with pytest.raises(InvalidInput, match=message):
            lay_out(plan, traces, step, MICROSECOND)


@pytest.fixture(scope="module", params=["span", "makespan"])
def plan(request: pytest.FixtureRequest) -> Plan:
    objective: Objective = request.param
    problem = replace(uniform(4, 8, limit=8, p2p=0.25, objective=objective), units=Units(time="us"))
    return search(problem, SearchOptions("quick"))


def explained(plan: Plan, problem: Problem | None = None, change: Any = None) -> Any:
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
        (0.5, ["forward"], None, ("actions", None, "F"), "F took 0.50 × what was planned, over all ranks"),
    ],
)
def test_the_one_deviation_is_the_main_cause(
    plan: Plan, factor: float, names: list[str], rank: int | None, cause: tuple[object, ...], said: str
) -> None:
    found = explained(plan, times(plan, factor, *names, rank=rank))
    assert (found.main.kind, found.main.rank, found.main.letter) == cause
    assert found.main.ratio == pytest.approx(factor)
    assert found.share(found.main) >= 0.6
    assert said in sentence(found)
    assert (found.main.effect < 0) == (found.difference < 0) == (factor < 1)
    assert f"{'longer' if factor > 1 else 'less'} than planned" in sentence(found)


def test_time_between_actions_is_found_although_none_is_planned(plan: Plan) -> None:
    """Every rank turns to its actions later than possible, which delays them by the same time."""

    def dawdle(document: dict[str, Any]) -> None:
        for index, row in enumerate(document["steps"][0]["actions"]):
            late = 300 * index
            row[1:4] = [row[1] + late, row[2] + late, row[3] + late]

    found = explained(plan, change=dawdle)
    assert found.main.kind == "between"
    assert "time between actions" in sentence(found)


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
    assert (found.main.kind, found.main.rank) == ("actions", 0)
    assert found.main.letter in ("W", "B", None)
    assert found.share(found.main) >= 0.6
