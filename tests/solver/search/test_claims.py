"""What `zbv check` says of a plan's claims: false ones are refused, and unproved ones are named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zbv_solver as zbv
from support.changed import changed
from support.problems import uniform, uniform_document
from zbv_solver.bounds import lower_bound
from zbv_solver.commands.cli import main
from zbv_solver.construct.dispatch import serial
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import compare, make_plan
from zbv_solver.search.claims import CheckedPlan, check_plan

Document = dict[str, Any]
PROBLEM = uniform_document(2, 4, limit=4)
LAYERS = {
    **{"pp_degree": 3, "microbatches": 2, "placement": "v", "objective": "makespan", "costs": {"p2p": 2}},
    "layers": [{"name": "block", "repeat": 9, "forward": 1, "backward_input": 1, "backward_weight": 1}],
}
"""A plan of its best cut takes 38; the bound over all cuts is 18."""


def planned(problem: Document, effort: Any = "standard") -> Document:
    return plan_json(zbv.plan(zbv.parse(problem), effort))


@pytest.fixture(scope="module")
def serial_plan() -> Document:
    """A valid plan that is far from the best, with a bound and baselines that are true."""
    problem = parse_problem(PROBLEM)
    plan = make_plan(problem, serial(problem).orders, method="serial")
    return plan_json(replace(plan, baselines=compare(problem)))


def pointers(checked: CheckedPlan, *, verified: bool) -> set[str]:
    return {claim.pointer for claim in checked.claims if claim.is_verified == verified}


def test_the_bound_of_a_standard_search_is_proved_where_memory_is_tight() -> None:
    costs = {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1}
    problem = uniform(4, 40, limit=4, costs=costs)
    best = lower_bound(problem, "thorough").value
    assert best > lower_bound(problem).value * 1.05
    document = plan_json(make_plan(problem, serial(problem).orders, method="serial", lower_bound=best))
    assert "/metrics/lower_bound" in pointers(check_plan(document, prove=True), verified=True)
    # It is larger than what CP-SAT is given, and far from its bound.
    with pytest.raises(zbv.InvalidPlan, match="is not supported: zbv proves"):
        check_plan(claiming_optimal(document), prove=True)


def test_what_follows_from_the_orders_is_verified_and_a_bound_is_proved_on_request() -> None:
    document, asked = planned(PROBLEM), zbv.parse(PROBLEM)
    checked = check_plan(document, asked)
    names = ("makespan", "span", "bubble_rate", "peak_memory", "gap")
    stated = {*(f"/metrics/{name}" for name in names), *(f"/baselines/{row}" for row in range(5))}
    assert pointers(checked, verified=True) >= {"/ranks", "/plan_id"} | stated
    assert pointers(checked, verified=False) == {"/metrics/lower_bound", "/provenance"}
    assert pointers(check_plan(document, asked, prove=True), verified=False) == {"/provenance"}
    with pytest.raises(zbv.InvalidInput, match="they differ in memory"):
        check_plan(document, zbv.parse(uniform_document(2, 4, limit=5)))


SMALL = uniform_document(2, 3, limit=3)
SMALL["costs"] = {"forward": [3, 1, 2, 5], "backward_input": 2, "backward_weight": [1, 4, 2, 2]}
"""Its bound without CP-SAT is 46; CP-SAT proves that 47 is optimal."""
UNIT = 3.938923725132901e-40
WITHOUT_UNIT = {
    "forward": [3.519278955482875e-41, UNIT, 3.579970746043914e-40, 1.1816771175398703e-39],
    "backward_input": [3.340380979062773e-40, 4 * UNIT, 4 * UNIT, 2 * UNIT],
    "backward_weight": [UNIT, 4 * UNIT, 1.1816771175398703e-39, 4 * UNIT],
    "p2p": 2.760707816914212e-40,
}


def test_a_bound_of_cp_sat_is_proved_by_cp_sat() -> None:
    without_unit = {"placement": "loop", "objective": "makespan", "costs": WITHOUT_UNIT}
    for problem, how in (SMALL, "by CP-SAT"), (SMALL | without_unit, "proved again"):
        claims = check_plan(planned(problem), prove=True).verified
        assert how in {claim.pointer: claim.reason for claim in claims}["/metrics/lower_bound"]


def claiming_optimal(document: Document) -> Document:
    """The plan with its own objective as its lower bound."""
    metrics = document["metrics"] | {"gap": 0, "status": "optimal"}
    return document | {"metrics": metrics | {"lower_bound": metrics["span"]}}


def test_a_bound_that_is_false_is_refused(serial_plan: Document) -> None:
    false = claiming_optimal(serial_plan)
    texts = {claim.pointer: claim.text for claim in check_plan(false).unverified}
    assert "so the plan is optimal" in texts["/metrics/lower_bound"]
    with pytest.raises(zbv.InvalidPlan, match=r"lower_bound .* is false: an order reaches 24"):
        check_plan(false, prove=True)


@pytest.mark.parametrize("stated", ["bound of the plan", "proved bound", "rounded makespan"])
def test_optimal_is_proved_to_the_last_unit_of_time(stated: str) -> None:
    """The optimum is 6e8; this order waits for one action of the second rank, less than metrics round."""
    costs = {name: [1e8, 1] for name in ("forward", "backward_input", "backward_weight")}
    problem = uniform(2, 2, objective="makespan", placement="single", costs=costs)
    rows = ["0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    document = plan_json(make_plan(problem, zbv.Orders.from_text([*map(str.split, rows)]), method="by hand"))
    makespan, optimum = (document["metrics"][name] for name in ("makespan", "lower_bound"))
    assert 2e-9 < makespan / optimum - 1 < 5e-8
    document["metrics"] |= {"gap": 0, "status": "optimal"}
    document["metrics"]["lower_bound"] = makespan if stated == "bound of the plan" else optimum
    document["metrics"]["makespan"] = optimum if stated == "rounded makespan" else makespan
    with pytest.raises(zbv.InvalidPlan, match=r"is false: an order reaches 6|but the orders reach 6"):
        check_plan(document, prove=True)


NUMBERS = ("baselines.0.span", "baselines.1.peak_memory.0", "cut.lower_bound", "cut.gap", "metrics.gap")
NOT_FINITE = (math.nan, math.inf, -math.inf)
LIES: list[tuple[str, Any, str]] = [
    ("baselines.1.span", lambda span: 2 * span, "stated span of baseline 1f1b"),
    ("baselines.1.makespan", lambda span: span + 1, "stated makespan of baseline 1f1b"),
    ("baselines.4.bubble_rate", lambda rate: rate / 2, "stated bubble_rate of baseline zb-h1"),
    ("baselines.0.peak_memory.1", lambda peak: peak + 1, "baseline gpipe on rank 1"),
    ("baselines.0.peak_memory", lambda peaks: peaks[:1], "has 1 values, not 2"),
    ("baselines.0.fits", lambda fits: not fits, "stated fits of baseline gpipe"),
    ("metrics.gap", 0.5, "the stated gap 0.5"),
    ("metrics.lower_bound", lambda bound: 3 * bound, "is above the objective"),
    ("plan_id", "0" * 64, "The plan was altered"),
    ("metrics", None, r"/cut.*metrics"),
    *((path, number, path.replace(".", "/") + ".*finite") for path in NUMBERS for number in NOT_FINITE),
]


@pytest.mark.parametrize(("path", "value", "says"), LIES, ids=range(len(LIES)))
def test_false_claims_are_refused(path: str, value: Any, says: str, serial_plan: Document) -> None:
    document = serial_plan | {"cut": {"method": "even-cut", "lower_bound": 1.0, "gap": 47.0}}
    check_plan(document)
    with pytest.raises((zbv.InvalidPlan, zbv.InvalidInput), match=says):
        check_plan(changed(document, {path: value}))


def test_what_a_plan_does_not_state_is_not_claimed(serial_plan: Document) -> None:
    checked = check_plan({key: serial_plan[key] for key in ("problem", "ranks")})
    assert (pointers(checked, verified=True), checked.unverified) == ({"/ranks"}, ())
    invented = changed(serial_plan, {"baselines.0.name": "ours-before", "baselines.0.span": 1.0})
    assert "/baselines/0" in pointers(check_plan(invented), verified=False)
    metrics = serial_plan["metrics"] | {"lower_bound": 0, "gap": None, "status": "feasible"}
    checked = check_plan(serial_plan | {"metrics": metrics}, prove=True)
    assert "/metrics/lower_bound" in pointers(checked, verified=True)  # needs no proof
    with pytest.raises(zbv.InvalidPlan, match="the stated gap 0 is ∞"):
        check_plan(serial_plan | {"metrics": metrics | {"gap": 0}})


def test_the_bound_over_all_cuts_is_proved_from_the_layers() -> None:
    document, asked = planned(LAYERS, "quick"), zbv.parse(LAYERS)
    assert "/cut/lower_bound" in pointers(check_plan(document, asked), verified=False)
    assert "/cut/lower_bound" in pointers(check_plan(document, asked, prove=True), verified=True)
    with pytest.raises(zbv.InvalidPlan, match="for a problem with a given cut"):
        check_plan(document, prove=True)
    makespan = document["metrics"]["makespan"]
    unproved = {"lower_bound": makespan, "gap": 0}
    assert "/cut/lower_bound" in pointers(check_plan(document | {"cut": unproved}, asked), verified=False)
    for cut, says in (
        (document["cut"] | {"gap": 7.0}, "gap of the cut"),
        ({"lower_bound": 2 * makespan, "gap": -0.5}, "over all cuts is above the objective"),
        (unproved, "over all cuts is not supported"),
    ):
        with pytest.raises(zbv.InvalidPlan, match=says):
            check_plan(document | {"cut": cut}, asked, prove=True)


def test_the_command_lists_claims(serial_plan: Document, tmp_path: Path, capsys: Any) -> None:
    problem, plan = str(tmp_path / "problem.json"), str(tmp_path / "plan.json")
    Path(problem).write_text(json.dumps(PROBLEM))
    Path(plan).write_text(json.dumps(claiming_optimal(serial_plan)))
    assert main(["check", problem, plan]) == 0
    text = capsys.readouterr().out
    assert (text[:6], "  lower bound" in text.partition("not verified:")[2]) == ("valid\n", True)
    assert main(["check", problem, plan, "--json"]) == 0
    claims = json.loads(capsys.readouterr().out)["claims"]
    unverified = {claim["pointer"] for claim in claims if not claim["is_verified"]}
    assert unverified == {"/metrics/lower_bound", "/provenance"}
    assert main(["check", problem, plan, "--prove"]) == 2
    assert "is false" in capsys.readouterr().err
