"""Costs and jitter that traces show are those that the traces were made from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed import ABSENT, changed
from support.cut_models import cut_problem
from support.layered import RECOMPUTED
from support.plans import write_plan
from support.rank_traces import mixed_orders, trace_documents
from zbv_solver.commands.cli import main
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.measure.refit import (
    fitted,
    jitter_of_traces,
    largest_change,
    non_negative_least_squares,
    refit,
    relative_residual,
    with_stage_costs,
)
from zbv_solver.plans.plan import identity
from zbv_solver.problem.problem import B, F, Problem, Units
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.stages import Costs, PlacementKind
from zbv_solver.problem.writing import problem_json

PLANNED: dict[str, Any] = {
    "pp_degree": 3,
    "microbatches": 5,
    "costs": {"forward": 10, "backward_input": 20, "backward_weight": 30, "backward": 45, "p2p": 4},
    "units": {"time": "us"},
}
DIFFERING: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 6,
    "sequences": [[100], [30, 40], [200], [64, 64], [10], [150]],
    "costs": {
        "forward": {"fixed": 5, "tokens": 0.1, "tokens_squared": 0.001},
        "backward_input": {"fixed": 5, "tokens": 0.12, "tokens_squared": 0.002},
        "backward_weight": {"tokens": 0.1},
        "p2p": {"fixed": 2, "tokens": 0.01},
    },
    "units": {"time": "us"},
}


def planned(**changes: Any) -> Problem:
    return parse_problem({**PLANNED, **changes})


def parts(problem: Problem) -> list[Costs]:
    """The fixed part of the costs, and the coefficients of every feature."""
    return [problem.costs, *(feature.costs for feature in problem.features)]


def slower(problem: Problem, factor: Callable[[int], float] = lambda stage: 2.0 + stage) -> Problem:
    """The same pipeline with all costs multiplied, differently on every stage and boundary."""

    def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor(at) for at, value in enumerate(values))

    fixed, *coefficients = (part.mapped(scaled, scaled(part.p2p)) for part in parts(problem))
    features = zip(problem.features, coefficients, strict=True)
    return replace(problem, costs=fixed, features=tuple(replace(f, costs=costs) for f, costs in features))


def documents_of(
    problem: Problem, fused: Sequence[int] = range(0, 99, 2), **how: Any
) -> list[dict[str, Any]]:
    """Traces of a random order on ranks where every action takes its cost; some microbatches have a B."""
    return trace_documents(problem, mixed_orders(problem, fused.__contains__), **how)


def traces_of(problem: Problem, fused: Sequence[int] = range(0, 99, 2), **how: Any) -> list[RankTrace]:
    return list(map(parse_rank_trace, documents_of(problem, fused, **how)))


@pytest.mark.parametrize("placement", ["v", "loop", "single"])
def test_every_measured_cost_is_recovered_and_nothing_else_changes(placement: PlacementKind) -> None:
    problem = planned(placement=placement)
    actual = slower(problem)
    found = refit(replace(problem, measured=(("device", "H200"),)), traces_of(actual))
    p2p = found.costs.p2p
    assert found == replace(actual, costs=replace(actual.costs, p2p=p2p))
    # A transfer is measured only if its receiver waited for it, and inside a rank there is none.
    choices = list(zip(p2p, actual.costs.p2p, problem.costs.p2p, strict=True))
    assert all(mine in (true, before) for mine, true, before in choices)
    assert sum(mine == true for mine, true, _ in choices) > len(choices) / 2
    local = [b for b in range(len(p2p)) if problem.placement.is_local(b)]
    assert [p2p[b] for b in local] == [problem.costs.p2p[b] for b in local]


def test_offsets_of_clocks_and_one_slow_step_have_no_effect() -> None:
    actual = slower(planned())
    documents = documents_of(actual, steps=3, ahead=[77, 123_456_789, -(10**15)])
    for row in documents[0]["steps"][1]["actions"]:
        row[3] += 50_000
    assert refit(planned(), list(map(parse_rank_trace, documents))) == refit(planned(), traces_of(actual))


def test_replicas_count_equally_and_inputs_come_from_the_same_replica() -> None:
    problem, actual = planned(), slower(planned())
    slow = replace(actual, costs=replace(actual.costs, forward=tuple(3 * f for f in actual.costs.forward)))
    found = refit(problem, traces_of(actual) + traces_of(slow, replica=1)).costs
    assert found.forward == tuple(2 * f for f in actual.costs.forward)
    assert found.backward_input == actual.costs.backward_input
    assert max(found.p2p) <= max(*actual.costs.p2p, *problem.costs.p2p)


@pytest.mark.parametrize("has_fused", [True, False])
@pytest.mark.parametrize("is_fused", [False, True])
def test_unmeasured_costs_stay_in_proportion(is_fused: bool, has_fused: bool) -> None:
    """Without a measured or a planned B it stays I + W."""
    problem = planned(costs={**PLANNED["costs"], "backward": 45 if has_fused else None})
    found = refit(problem, traces_of(slower(problem, lambda _stage: 2.0), range(5 * is_fused))).costs
    fused = None if not (has_fused or is_fused) else (90.0 if has_fused else 100.0,) * 6
    assert (found.backward, found.backward_input, found.backward_weight) == (fused, (40.0,) * 6, (60.0,) * 6)


@pytest.mark.parametrize(
    ("unit", "expected"), [("ns", 1000.0), ("µs", 1.0), ("ms", 0.001), ("s", 1e-6), (None, 0.75)]
)
def test_measured_costs_are_in_the_problem_s_unit(unit: str | None, expected: float) -> None:
    """Without a known one, the actions take as long in total as planned: 60 for F, I and W."""
    problem = replace(planned(), units=Units(unit))
    actual = replace(problem, costs=replace(problem.costs, forward=(30.0,) * 6))
    found = refit(problem, traces_of(actual, ())).costs
    assert found.forward == pytest.approx([expected * 30] * 6, rel=1e-5)
    assert found.backward_weight == pytest.approx([expected * 30] * 6, rel=1e-5)


WRONG_RECORDS: list[tuple[str, Any, str]] = [
    ("plan_id", ABSENT, "/plan_id"),
    ("steps.0.actions.0.4", 2**64, "/steps/0/actions/0/4"),
    ("steps.0.step", 1, "/steps/1/step"),
    ("steps.0.actions.2.0", "0X0", "/steps/0/actions/2/0"),
    ("steps.0.actions.2.3", -5, "/steps/0/actions/2"),
    ("steps.0.actions.2", ["0F0", 0, 0, 0], "/steps/0/actions/2"),
]


@pytest.mark.parametrize(("path", "value", "pointer"), WRONG_RECORDS)
def test_an_invalid_trace_is_refused_at_the_broken_key(path: str, value: Any, pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_rank_trace(changed(documents_of(planned(), steps=2)[0], {path: value}))
    assert caught.value.issues[0].pointer == pointer


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"placement": "loop"}, "ran stage 5, which does not belong to rank 0 of the pipeline"),
        ({"microbatches": 4}, "ran microbatch 4"),
        ({"pp_degree": 2}, "/pp_rank: found 2; the problem has ranks 0 to 1|ran stage"),
    ],
)
def test_traces_of_another_problem_are_refused(change: dict[str, Any], says: str) -> None:
    traces = traces_of(planned())
    for measure in (refit, jitter_of_traces, relative_residual):
        with pytest.raises(InvalidInput, match=says):
            measure(planned(**change), traces)
        with pytest.raises(InvalidInput, match="no measured action"):
            measure(planned(), [traces[0].only(frozenset())])


# --- microbatches that differ


def test_the_coefficients_of_every_measured_stage_are_recovered() -> None:
    problem = parse_problem(DIFFERING)
    actual = slower(problem)
    traces = traces_of(actual, ())
    found, partly = refit(problem, traces), refit(problem, traces[:1])
    assert found.costs.backward is None
    for name in ("forward", "backward_input", "backward_weight"):
        for mine, one, true, before in zip(*map(parts, (found, partly, actual, problem)), strict=True):
            expected = getattr(true, name)
            assert getattr(mine, name) == pytest.approx(expected, rel=0.02, abs=0.003)
            assert getattr(one, name)[::3] == pytest.approx(expected[::3], rel=0.02, abs=0.003)
            assert getattr(one, name)[1:3] == getattr(before, name)[1:3], "rank 1 was not measured"
    assert relative_residual(found, traces) < 1e-4
    assert largest_change(actual, found) < 1e-2
    assert largest_change(problem, found) > 0.5


def test_too_few_kinds_scale_the_planned_coefficients() -> None:
    """A B that only one microbatch ran says nothing about single features."""
    problem = parse_problem(DIFFERING)
    found = refit(problem, traces_of(slower(problem, lambda _stage: 2.0), [5]))
    assert found.costs.backward is not None
    assert largest_change(problem, found) == pytest.approx(1.0, rel=1e-3)
    assert found.arrays.duration[B] == pytest.approx(2 * problem.arrays.duration[B], rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_coefficients_fit_better(seed: int) -> None:
    """The best fit over every choice of the coefficients that are not 0."""
    random = np.random.default_rng(seed)
    design, target = random.normal(size=(7, 4)), random.normal(size=7)
    found = non_negative_least_squares(design, target)
    best = float(target @ target)
    for chosen in (list(some) for count in range(1, 5) for some in combinations(range(4), count)):
        fit = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
        if (fit >= 0).all():
            best = min(best, float(np.sum((design[:, chosen] @ fit - target) ** 2)))
    assert (found >= 0).all()
    assert float(np.sum((design @ found - target) ** 2)) == pytest.approx(best, rel=1e-9)


def test_microbatches_that_take_no_time_do_not_hide_the_others() -> None:
    amounts = np.array([[1.0, 0.0], [1.0, 2.0]])
    found = fitted(amounts, np.array([[0.0], [1.0]]), np.array([[0.0, 800.0]]))
    assert found.ravel() == pytest.approx([0, 400])


def test_the_command_says_how_well_the_coefficients_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = parse_problem(DIFFERING)
    orders, out = mixed_orders(problem, bool), tmp_path / "measured.json"
    plan = write_plan(tmp_path / "plan.json", problem, orders)
    paths = [tmp_path / f"trace-{rank}.json" for rank in range(2)]
    plan_id = identity(problem_json(problem), orders.all_text())
    for name, status, message in (
        (plan_id, 0, r"2 ranks measured(.|\n)*relative residual 0\.0%"),
        ("0" * 64, 2, "trace-0.json: /plan_id: found 000000000000; the plan given is"),
    ):
        for path, document in zip(paths, trace_documents(slower(problem), orders, plan_id=name), strict=True):
            path.write_text(json.dumps(document))
        assert main(["refit", str(plan), *map(str, paths), "-o", str(out)]) == status
        assert re.search(message, capsys.readouterr().err)
    assert json.loads(out.read_text()) == problem_json(
        refit(problem, traces_of(slower(problem), range(1, 9)))
    )


# --- jitter


@pytest.mark.parametrize("document", [PLANNED, DIFFERING])
def test_traces_without_variation_give_factors_of_1(document: dict[str, Any]) -> None:
    problem = parse_problem(document)
    found = jitter_of_traces(problem, traces_of(problem, steps=2))
    for spread in (*found.actions, *found.rank, found.transfer):
        assert spread.samples
        assert spread.samples == pytest.approx([1.0] * len(spread.samples), abs=0.02)


def test_slow_steps_of_a_rank_are_not_taken_for_slow_actions() -> None:
    problem = planned(pp_degree=2, microbatches=6)
    documents = documents_of(problem, steps=4)
    for record in documents[1]["steps"][2]["actions"]:  # rank 1 is twice as slow in one step
        record[3] = record[2] + 2 * (record[3] - record[2])
    slow = next(record for record in documents[0]["steps"][0]["actions"] if record[0] == "0F3")
    slow[3] = slow[2] + 3 * (slow[3] - slow[2])
    found = jitter_of_traces(problem, list(map(parse_rank_trace, documents)))
    assert sorted(found.rank[0].samples) == [1.0] * 7 + [2.0]
    forward = found.actions[F].samples
    assert (max(forward), forward.count(3.0)) == (3.0, 1)


def test_many_factors_become_quantiles() -> None:
    problem, noise = planned(pp_degree=2, microbatches=6), np.random.default_rng(1)
    documents = documents_of(problem, steps=60)
    for step in (step for document in documents for step in document["steps"]):
        for record in step["actions"]:
            record[3] = record[2] + round((record[3] - record[2]) * noise.lognormal(0, 0.1))
    found = jitter_of_traces(problem, list(map(parse_rank_trace, documents)))
    assert len(found.actions[F].samples) == 1000
    assert np.std(np.log(found.actions[F].samples)) == pytest.approx(0.1, rel=0.1)


# --- layers

PARTITION = [["embedding", "block.0"], ["block.1", "block.2"], ["block.3", "block.4"], ["block.5", "head"]]
FLAGS = [False, True, True, False]
CUT = parse_any_problem({**RECOMPUTED, "partition": PARTITION, "recompute": FLAGS})
MEASURED = Costs((5.0, 30.0, 40.0, 50.0), (3.0, 31.0, 41.0, 51.0), (2.0, 32.0, 42.0, 52.0), (7.0, 8.0, 9.0))


@pytest.mark.parametrize("fused", [None, (4.0, 50.0, 60.0, 70.0)])
def test_scaled_layers_keep_cut_and_shares_and_sum_to_the_costs_of_stages(
    fused: tuple[float, ...] | None,
) -> None:
    assert isinstance(CUT, Problem) and CUT.model is not None  # noqa: PT018
    costs = replace(MEASURED, backward=fused)
    found = with_stage_costs(CUT, costs)
    for name, values in vars(costs).items():
        assert getattr(found.costs, name) == (values and pytest.approx(values)), name
    assert found.model is not None
    assert (found.model.cut, found.model.partition) == (CUT.model.cut, CUT.model.partition)
    assert (found.memory, found.placement, found.units) == (CUT.memory, CUT.placement, CUT.units)
    assert parse_problem(problem_json(found)) == found
    again = refit(CUT, traces_of(found))
    assert again.costs.forward == pytest.approx(MEASURED.forward, rel=1e-5)
    assert again.model is not None
    assert again.model.partition == found.model.partition
    plain = replace(CUT, model=None)
    assert with_stage_costs(plain, costs) == replace(plain, costs=costs)
    # Stages 1 and 2 are recomputed: there, I is the recomputed one, and the plain I is scaled with it.
    for stage, (begin, end) in enumerate(pairwise(CUT.model.cut.bounds)):
        for layer, before in zip(
            found.model.model.each[begin:end], CUT.model.model.each[begin:end], strict=True
        ):
            for is_recomputed in (False, True):
                own, planned_costs = (one.costs_when(is_recomputed, None) for one in (layer, before))
                share = planned_costs.backward_input / CUT.costs.backward_input[stage]
                assert own.backward_input == pytest.approx(share * MEASURED.backward_input[stage])
                assert own.memory == planned_costs.memory


def test_layers_planned_at_zero_share_evenly_and_an_empty_stage_costs_nothing() -> None:
    known = cut_problem(["a", "b", "c", "d"], [2, 1, 0, 1])
    free = replace(known.costs, backward_weight=(0.0,) * 4)
    found = with_stage_costs(with_stage_costs(known, free), MEASURED)
    assert found.costs.backward_weight == pytest.approx((2.0, 32.0, 0.0, 52.0))
    assert found.costs.forward == pytest.approx((5.0, 30.0, 0.0, 50.0))
    assert found.model is not None
    assert [layer.costs.backward_weight for layer in found.model.model.each[:2]] == [1.0, 1.0]
