"""Costs and jitter that traces show are those that the traces were made from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
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
from zbv_solver.construct.pairs import joined, starts
from zbv_solver.errors import InvalidInput
from zbv_solver.measure import refit as refitting
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.measure.refit import jitter_of_traces, largest_change, refit, with_stage_costs
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, Units
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of

PLANNED: dict[str, Any] = {
    **{"pp_degree": 3, "microbatches": 5, "units": {"time": "us"}},
    "costs": {"forward": 10, "backward_input": 20, "backward_weight": 30, "backward": 45, "p2p": 4},
}
DIFFERING: dict[str, Any] = {
    **{"pp_degree": 2, "microbatches": 6, "units": {"time": "us"}},
    "sequences": [[100], [30, 40], [200], [64, 64], [10], [150]],
    "costs": {
        "forward": {"fixed": 5, "tokens": 0.1, "tokens_squared": 0.001},
        "backward_input": {"fixed": 5, "tokens": 0.12, "tokens_squared": 0.002},
        "backward_weight": {"tokens": 0.1},
        "p2p": {"fixed": 2, "tokens": 0.01},
    },
}


def planned(**changes: Any) -> Problem:
    return parse_problem({**PLANNED, **changes})


def parts(problem: Problem) -> list[Costs]:
    """The fixed part of the costs, and the coefficients of every feature."""
    return [problem.costs, *(feature.costs for feature in problem.features)]


def slower(problem: Problem, slope: float = 1.0) -> Problem:
    """The same pipeline with all costs multiplied, differently on every stage and boundary."""

    def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * (2.0 + slope * at) for at, value in enumerate(values))

    fixed, *coefficients = (part.mapped(scaled, scaled(part.p2p)) for part in parts(problem))
    features = zip(problem.features, coefficients, strict=True)
    return replace(problem, costs=fixed, features=tuple(replace(f, costs=costs) for f, costs in features))


def documents_of(problem: Problem, fused: Sequence[int] = range(0, 99, 2), **how: Any) -> list[Any]:
    """Traces of a random order on ranks where every action takes its cost; some microbatches have a B."""
    return trace_documents(problem, mixed_orders(problem, fused.__contains__), **how)


def traces_of(problem: Problem, fused: Sequence[int] = range(0, 99, 2), **how: Any) -> list[RankTrace]:
    return list(map(parse_rank_trace, documents_of(problem, fused, **how)))


@pytest.mark.parametrize(
    "problem", [*(planned(placement=kind) for kind in ("v", "loop", "single")), parse_problem(DIFFERING)]
)
def test_the_costs_and_coefficients_of_every_measured_stage_are_recovered(problem: Problem) -> None:
    actual = slower(problem)
    traces = traces_of(actual, () if problem.features else range(0, 5, 2))
    found = refit(replace(problem, measured=(("device", "H200"),)), traces)
    partly, mine = refit(problem, traces[:1]), list(problem.placement.stages_of[0])
    for measured, own, true, before in zip(*map(parts, (found, partly, actual, problem)), strict=True):
        # Of every transfer between ranks some receiver waited; inside a rank there is none.
        choices = enumerate(zip(before.p2p, true.p2p, strict=True))
        p2p = [costs[not problem.placement.is_local(boundary)] for boundary, costs in choices]
        assert measured.p2p == pytest.approx(p2p, rel=1e-9)
        for name in ("forward", "backward_input", "backward_weight"):
            expected = np.array(getattr(true, name))
            assert getattr(measured, name) == pytest.approx(expected, rel=0.02, abs=0.003)
            partial = np.array(getattr(before, name))  # other ranks were not measured
            partial[mine] = expected[mine]
            assert getattr(own, name) == pytest.approx(partial, rel=0.02, abs=0.003)
    assert refitting.relative_residual(found, traces) < 1e-4
    assert largest_change(actual, found) < 1e-2
    assert largest_change(problem, found) > 0.5
    steady = jitter_of_traces(problem, traces_of(problem, steps=2))
    for spread in (*steady.actions, *steady.rank, steady.transfer):
        assert spread.samples == pytest.approx([1.0] * (len(spread.samples) or 1), abs=0.02)
    if problem.features:
        assert found.costs.backward is None
        return
    assert found == replace(actual, costs=replace(actual.costs, p2p=found.costs.p2p))


def test_offsets_of_clocks_and_one_slow_step_have_no_effect_and_replicas_count_equally() -> None:
    problem, actual = planned(), slower(planned())
    documents = documents_of(actual, steps=3, ahead=[77, 123_456_789, -(10**15)])
    for row in documents[0]["steps"][1]["actions"]:
        row[3] += 50_000
    assert refit(problem, list(map(parse_rank_trace, documents))) == refit(problem, traces_of(actual))
    slow = replace(actual, costs=replace(actual.costs, forward=tuple(3 * f for f in actual.costs.forward)))
    found = refit(problem, traces_of(actual) + traces_of(slow, replica=1)).costs
    assert found.forward == tuple(2 * f for f in actual.costs.forward)
    assert found.backward_input == actual.costs.backward_input
    # Inputs come from the same replica.
    assert max(found.p2p) <= max(*actual.costs.p2p, *problem.costs.p2p)


@pytest.mark.parametrize(("is_fused", "has_fused"), [(0, True), (1, True), (0, False), (1, False)])
def test_unmeasured_costs_stay_in_proportion(is_fused: bool, has_fused: bool) -> None:
    """Without a measured or a planned B it stays I + W."""
    problem = planned(costs={**PLANNED["costs"], "backward": 45 if has_fused else None})
    found = refit(problem, traces_of(slower(problem, slope=0.0), range(5 * is_fused))).costs
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
    assert (*found.forward, *found.backward_weight) == pytest.approx([expected * 30] * 12, rel=1e-5)


@pytest.mark.parametrize(("path", "value", "pointer"), [
    ("plan_id", ABSENT, "/plan_id"),
    ("steps.0.actions.0.4", 2**64, "/steps/0/actions/0/4"),
    ("steps.0.step", 1, "/steps/1/step"),
    ("steps.0.actions.2.0", "0X0", "/steps/0/actions/2/0"),
    ("steps.0.actions.2.3", -5, "/steps/0/actions/2"),
    ("steps.0.actions.2", ["0F0", 0, 0, 0], "/steps/0/actions/2"),
    ("steps.0.actions.2.0", "0F1+0I0", "/steps/0/actions"),
])  # fmt: skip
def test_an_invalid_trace_is_refused_at_the_broken_key(path: str, value: Any, pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_rank_trace(changed(documents_of(planned(), steps=2)[0], {path: value}))
    assert caught.value.issues[0].pointer == pointer


@pytest.mark.parametrize("measure", [refit, jitter_of_traces, refitting.relative_residual])
def test_traces_of_another_problem_are_refused(measure: Any) -> None:
    traces = traces_of(planned())
    for problem, says in (
        (planned(placement="loop"), "ran stage 5, which does not belong to rank 0 of the pipeline"),
        (planned(microbatches=4), "ran microbatch 4"),
        (planned(pp_degree=2), "/pp_rank: found 2; the problem has ranks 0 to 1|ran stage"),
    ):
        with pytest.raises(InvalidInput, match=says):
            measure(problem, traces)
    with pytest.raises(InvalidInput, match="no measured action"):
        measure(planned(), [traces[0].only(frozenset())])


HIDDEN = {"forward": 4, "backward_input": 8, "backward": 10}
PAIRED = {"microbatches": 8, "costs": {**PLANNED["costs"], "communication": HIDDEN, "pair_factor": 1.1}}


def pairs_of(problem: Problem) -> Orders:
    """DualPipeV's order, with the pairs that it has."""
    return joined(problem, next(orders for _, orders in starts(problem)))


def test_pairs_that_ran_are_no_actions_that_took_longer() -> None:
    problem = planned(**PAIRED)
    orders = pairs_of(problem)
    pairs = [at for rank in range(3) for at in orders.pairs(rank)]
    actual = replace(refitting.with_stage_costs(problem, slower(problem).costs), pair_factor=1.25)
    traces = list(map(parse_rank_trace, trace_documents(actual, orders)))
    found = refit(problem, traces, orders)
    assert found.arrays.duration == pytest.approx(actual.arrays.duration, rel=1e-3)
    assert found.arrays.communication == pytest.approx(actual.arrays.communication, rel=1e-3)
    assert found.pair_factor == pytest.approx(1.25, rel=1e-3)
    assert objective_of(found, orders) == pytest.approx(objective_of(actual, orders), rel=1e-3)
    for spread in (jitter := jitter_of_traces(problem, traces, orders)).actions:
        assert spread.samples == pytest.approx([1.0] * len(spread.samples), abs=0.02)
    assert len(jitter.actions[F].samples) == (orders.letter == F).sum() - len(pairs)
    with pytest.raises(InvalidInput, match="/costs/communication: found a problem with pairs"):
        refit(problem, traces)
    with pytest.raises(InvalidInput, match="rank 0 did not run its list"):
        refit(problem, traces, replace(orders, microbatch=orders.microbatch[::-1]))


def test_pairs_of_microbatches_that_differ_are_fitted_too() -> None:
    """Every coefficient keeps its share of communication."""

    def problem(forward: float, inputs: float, factor: float) -> Problem:
        costs = {"forward": forward, "backward_input": inputs, "backward_weight": 1}
        hidden = {"forward": forward / 2, "backward_input": inputs / 2}
        by_token = {name: {"tokens": value} for name, value in costs.items()}
        communication = {name: {"tokens": value} for name, value in hidden.items()}
        document = {"pp_degree": 1, "microbatches": 4, "placement": "single", "units": {"time": "us"}}
        document |= {"sequences": [[10], [20], [10], [30]]}
        all_costs = {**by_token, "communication": communication, "pair_factor": factor}
        return parse_problem({**document, "costs": all_costs})

    ran = "0F0 0F1+0I0 0W0 0F2+0I1 0W1 0I2 0W2 0F3 0I3 0W3"
    orders, actual = Orders.from_text([ran.split()]), problem(3, 4, 1.2)
    found = refit(problem(2, 2, 1.0), list(map(parse_rank_trace, trace_documents(actual, orders))), orders)
    assert found.arrays.duration == pytest.approx(actual.arrays.duration, rel=1e-3)
    assert found.arrays.communication == pytest.approx(actual.arrays.communication, rel=1e-3)
    assert found.pair_factor == pytest.approx(1.2, rel=1e-3)


def test_layers_keep_their_share_of_communication() -> None:
    layer = {"forward": 10, "backward_input": 10, "backward_weight": 10, "repeat": 8}
    hidden = {"forward": 2, "backward_input": 3, "backward": 4}
    document = {
        **{"pp_degree": 2, "microbatches": 4, "placement": "v", "units": {"time": "us"}},
        "layers": [{"name": "block", **layer, "communication": hidden}],
    }
    problem = parse_any_problem(document)
    cut = search(problem, SearchOptions(effort="quick")).problem
    scaled = with_stage_costs(cut, slower(cut).costs)
    shares = [
        each.arrays.hidden(*at) / each.arrays.durations(*at)
        for each in (cut, scaled)
        for at in [np.array([(stage, letter, 0) for stage in range(4) for letter in (F, I, B)]).T]
    ]
    assert shares[0] == pytest.approx(np.tile([0.2, 0.3, 0.2], 4))
    assert shares[1] == pytest.approx(shares[0])


def test_too_few_kinds_scale_the_planned_coefficients() -> None:
    """A B that only one microbatch ran says nothing about single features."""
    amounts = np.array([[1.0, 0.0], [1.0, 2.0]])  # microbatches that take no time do not hide the others
    measured = refitting.fitted(amounts, np.array([[0.0], [1.0]]), np.array([[0.0, 800.0]]))
    assert measured.ravel() == pytest.approx([0, 400])
    problem = parse_problem(DIFFERING)
    found = refit(problem, traces_of(slower(problem, slope=0.0), [5]))
    assert largest_change(problem, found) == pytest.approx(1.0, rel=1e-3)
    assert found.arrays.duration[B] == pytest.approx(2 * problem.arrays.duration[B], rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_coefficients_fit_better(seed: int) -> None:
    """The best fit over every choice of the coefficients that are not 0."""
    random = np.random.default_rng(seed)
    design, target = random.normal(size=(7, 4)), random.normal(size=7)
    found = refitting.non_negative_least_squares(design, target)
    distances = [np.linalg.norm(target)]
    for chosen in (list(some) for count in range(1, 5) for some in combinations(range(4), count)):
        fit = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
        distances += [np.linalg.norm(design[:, chosen] @ fit - target)] if (fit >= 0).all() else []
    assert (found >= 0).all()
    assert np.linalg.norm(design @ found - target) == pytest.approx(min(distances), rel=1e-9)


def test_the_command_says_how_well_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = parse_problem(DIFFERING)
    orders, out = mixed_orders(problem, bool), tmp_path / "measured.json"
    plan = write_plan(tmp_path / "plan.json", problem, orders)
    paths = [tmp_path / "trace-0.json", tmp_path / "trace-1.json"]
    plan_id = json.loads(plan.read_text())["plan_id"]
    for path, document in zip(paths, trace_documents(slower(problem), orders, plan_id=plan_id), strict=True):
        path.write_text(json.dumps(document))
    assert main(["refit", str(plan), *map(str, paths), "-o", str(out)]) == 0
    assert re.search(r"2 ranks measured(.|\n)*relative residual 0\.0\u202f%", capsys.readouterr().err)
    measured = refit(problem, traces_of(slower(problem), range(1, 9)))
    assert json.loads(out.read_text()) == problem_json(measured)


def test_slow_steps_of_a_rank_are_not_taken_for_slow_actions() -> None:
    problem = planned(pp_degree=2, microbatches=6)
    documents = documents_of(problem, steps=4)
    for record in documents[1]["steps"][2]["actions"]:  # rank 1 is twice as slow in one step
        lengthen(record, 2)
    lengthen(next(record for record in documents[0]["steps"][0]["actions"] if record[0] == "0F3"), 3)
    found = jitter_of_traces(problem, list(map(parse_rank_trace, documents)))
    assert sorted(found.rank[0].samples) == [1.0] * 7 + [2.0]
    assert sorted(found.actions[F].samples)[-2:] == [1.0, 3.0]


def lengthen(record: list[Any], factor: float) -> None:
    record[3] = record[2] + round(factor * (record[3] - record[2]))


def test_many_factors_become_quantiles() -> None:
    problem, noise = planned(pp_degree=2, microbatches=6), np.random.default_rng(1)
    documents = documents_of(problem, steps=60)
    for record in (row for document in documents for step in document["steps"] for row in step["actions"]):
        lengthen(record, noise.lognormal(0, 0.1))
    samples = jitter_of_traces(problem, list(map(parse_rank_trace, documents))).actions[F].samples
    assert len(samples) == 1000
    assert np.std(np.log(samples)) == pytest.approx(0.1, rel=0.1)


PARTITION = [["embedding", "block.0"], ["block.1", "block.2"], ["block.3", "block.4"], ["block.5", "head"]]
FLAGS = [False, True, True, False]
CUT: Any = parse_any_problem({**RECOMPUTED, "partition": PARTITION, "recompute": FLAGS})
MEASURED = Costs((5.0, 30.0, 40.0, 50.0), (3.0, 31.0, 41.0, 51.0), (2.0, 32.0, 42.0, 52.0), (7.0, 8.0, 9.0))


@pytest.mark.parametrize("fused", [None, (4.0, 50.0, 60.0, 70.0)])
def test_scaled_layers_keep_cut_and_shares_and_sum_to_the_costs_of_stages(fused: Any) -> None:
    costs = replace(MEASURED, backward=fused)
    found: Any = with_stage_costs(CUT, costs)
    for name, values in vars(costs).items():
        assert getattr(found.costs, name) == (values and pytest.approx(values)), name
    assert (found.model.cut, found.model.partition) == (CUT.model.cut, CUT.model.partition)
    assert (found.memory, found.placement, found.units) == (CUT.memory, CUT.placement, CUT.units)
    assert parse_problem(problem_json(found)) == found
    again: Any = refit(CUT, traces_of(found))
    assert again.costs.forward == pytest.approx(MEASURED.forward, rel=1e-5)
    assert again.model.partition == found.model.partition
    plain = replace(CUT, model=None)
    assert with_stage_costs(plain, costs) == replace(plain, costs=costs)
    # Stages 1 and 2 are recomputed: there, I is the recomputed one, and the plain I is scaled with it.
    stage_of = np.searchsorted(CUT.model.cut.bounds, range(CUT.model.model.n_layers), side="right") - 1
    for stage, layer, before in zip(stage_of, found.model.model.each, CUT.model.model.each, strict=True):
        for is_recomputed in (False, True):
            own, known = (one.costs_when(is_recomputed, None) for one in (layer, before))
            factor = MEASURED.backward_input[stage] / CUT.costs.backward_input[stage]
            assert own.backward_input == pytest.approx(factor * known.backward_input)
            assert own.memory == known.memory


def test_layers_planned_at_zero_share_evenly_and_an_empty_stage_costs_nothing() -> None:
    known = cut_problem(["a", "b", "c", "d"], [2, 1, 0, 1])
    free = replace(known.costs, backward_weight=(0.0,) * 4)
    found: Any = with_stage_costs(with_stage_costs(known, free), MEASURED)
    assert found.costs.backward_weight == pytest.approx((2.0, 32.0, 0.0, 52.0))
    assert found.costs.forward == pytest.approx((5.0, 30.0, 0.0, 50.0))
    assert [layer.costs.backward_weight for layer in found.model.model.each[:2]] == [1.0, 1.0]
