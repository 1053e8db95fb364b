"""What `zbv check` says of a plan's claims: false ones are refused, and unproved ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.problems import uniform_document
from zbv_solver.bounds import lower_bound
from zbv_solver.commands.cli import main
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.assemble import compare, make_plan
from zbv_solver.search.claims import CheckedPlan, check_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

Document = dict[str, Any]

PROBLEM = uniform_document(2, 4, limit=4)
TIGHT = {
    "pp_degree": 2,
    "microbatches": 3,
    "costs": {"forward": [3, 1, 2, 5], "backward_input": 2, "backward_weight": [1, 4, 2, 2]},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 6},
}
"""Its bound without CP-SAT is 46; CP-SAT proves that 47 is optimal."""
TOO_LARGE = uniform_document(4, 40, limit=4) | {
    "costs": {"forward": [20, 19, 23, 17, 22, 21, 17, 26], "backward_input": 21, "backward_weight": 14}
}
"""More actions than CP-SAT is given, and far from its bound."""
LAYERS = {
    "pp_degree": 3,
    "microbatches": 2,
    "placement": "v",
    "objective": "makespan",
    "layers": [{"name": "block", "repeat": 9, "forward": 1, "backward_input": 1, "backward_weight": 1}],
    "costs": {"p2p": 2},
}
"""A plan of its best cut takes 38; the bound over all cuts is 18."""


def planned(problem: Document, effort: str = "standard") -> Document:
    return plan_json(search(parse_any_problem(problem), SearchOptions(effort=effort)))  # type: ignore[arg-type]  # a literal


@pytest.fixture(scope="module")
def best() -> Document:
    return planned(PROBLEM)


@pytest.fixture(scope="module")
def serial_plan() -> Document:
    """A valid plan that is far from the best, with a bound and baselines that are true."""
    problem = parse_any_problem(PROBLEM)
    assert isinstance(problem, Problem)
    plan = make_plan(problem, serial(problem).orders, method="serial")
    return plan_json(replace(plan, baselines=compare(problem)))


def pointers(checked: CheckedPlan, *, verified: bool) -> set[str]:
    return {claim.pointer for claim in checked.claims if claim.is_verified == verified}


def claiming_optimal(document: Document) -> Document:
    """The plan with its own objective as its lower bound."""
    metrics = document["metrics"] | {"gap": 0, "status": "optimal"}
    return document | {"metrics": metrics | {"lower_bound": metrics["span"]}}


def test_what_follows_from_the_orders_is_verified_and_a_bound_is_not(best: Document) -> None:
    checked = check_plan(best, parse_any_problem(PROBLEM))
    assert pointers(checked, verified=True) >= {
        "/ranks",
        "/plan_id",
        *(f"/metrics/{name}" for name in ("makespan", "span", "bubble_rate", "peak_memory", "gap")),
        *(f"/baselines/{index}" for index in range(5)),
    }
    assert pointers(checked, verified=False) == {"/metrics/lower_bound", "/provenance"}


def test_a_true_bound_is_proved_on_request(best: Document) -> None:
    checked = check_plan(best, parse_any_problem(PROBLEM), prove=True)
    assert pointers(checked, verified=False) == {"/provenance"}


def test_the_bound_of_a_standard_search_is_proved_where_memory_is_tight() -> None:
    document = uniform_document(4, 40, limit=4) | {
        "costs": {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1}
    }
    problem = parse_any_problem(document)
    assert isinstance(problem, Problem)
    best = lower_bound(problem, "thorough").value
    assert best > lower_bound(problem).value * 1.05
    plan = make_plan(problem, serial(problem).orders, method="serial", lower_bound=best, source="bounds")
    checked = check_plan(plan_json(replace(plan, baselines=compare(problem))), prove=True)
    assert "/metrics/lower_bound" in pointers(checked, verified=True)


def test_a_bound_of_cp_sat_is_proved_by_cp_sat() -> None:
    document = planned(TIGHT)
    assert document["metrics"]["status"] == "optimal"
    (bound,) = [
        claim for claim in check_plan(document, prove=True).claims if claim.pointer == "/metrics/lower_bound"
    ]
    assert bound.is_verified
    assert "by CP-SAT" in bound.reason


def test_a_bound_of_cp_sat_is_proved_again_where_costs_have_no_common_unit() -> None:
    costs = {
        "forward": [
            3.519278955482875e-41,
            3.938923725132901e-40,
            3.579970746043914e-40,
            1.1816771175398703e-39,
        ],
        "backward_input": [
            3.340380979062773e-40,
            1.5755694900531602e-39,
            1.5755694900531602e-39,
            7.877847450265801e-40,
        ],
        "backward_weight": [
            3.938923725132901e-40,
            1.5755694900531602e-39,
            1.1816771175398703e-39,
            1.5755694900531602e-39,
        ],
        "p2p": 2.760707816914212e-40,
    }
    document = planned({**TIGHT, "placement": "loop", "objective": "makespan", "costs": costs})
    check_plan(document, prove=True)


def test_a_serial_plan_that_claims_to_be_optimal_is_refused_with_a_proof(serial_plan: Document) -> None:
    false = claiming_optimal(serial_plan)
    (bound,) = [claim for claim in check_plan(false).unverified if claim.pointer == "/metrics/lower_bound"]
    assert "so the plan is optimal" in bound.text
    with pytest.raises(InvalidPlan, match=r"lower_bound .* is false: an order reaches 24"):
        check_plan(false, prove=True)


def test_a_bound_beyond_what_zbv_can_prove_is_refused() -> None:
    document = claiming_optimal(planned(TOO_LARGE, "quick"))
    with pytest.raises(InvalidPlan, match="is not supported: zbv proves"):
        check_plan(document, prove=True)


NEARLY_TIED = {
    "pp_degree": 2,
    "microbatches": 2,
    "objective": "makespan",
    "placement": "single",
    "costs": {"forward": [1e8, 1], "backward_input": [1e8, 1], "backward_weight": [1e8, 1]},
}
"""Its optimum is 6e8, and an order that waits for one action of the second rank takes 2 or more longer."""


def nearly_optimal() -> tuple[Document, float]:
    """A plan that misses the optimum by less than the rounding of metrics, and the optimum."""
    problem = parse_any_problem(NEARLY_TIED)
    assert isinstance(problem, Problem)
    orders = Orders.from_text(
        [["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]
    )
    document = plan_json(make_plan(problem, orders, method="by hand"))
    return document, document["metrics"]["lower_bound"]


@pytest.mark.parametrize("stated", ["bound of the plan", "proved bound", "rounded makespan"])
def test_optimal_is_proved_to_the_last_unit_of_time(stated: str) -> None:
    document, optimum = nearly_optimal()
    makespan = document["metrics"]["makespan"]
    assert 2e-9 < makespan / optimum - 1 < 5e-8
    document["metrics"] |= {"gap": 0, "status": "optimal"}
    document["metrics"]["lower_bound"] = makespan if stated == "bound of the plan" else optimum
    document["metrics"]["makespan"] = optimum if stated == "rounded makespan" else makespan
    with pytest.raises(InvalidPlan, match=r"is false: an order reaches 6|but the orders reach 6"):
        check_plan(document, prove=True)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "path", ["baselines/0/span", "baselines/1/peak_memory/0", "cut/lower_bound", "cut/gap", "metrics/gap"]
)
def test_a_number_that_cannot_be_compared_is_refused(serial_plan: Document, path: str, number: float) -> None:
    stated = serial_plan | {"cut": {"method": "even-cut", "lower_bound": 1.0, "gap": 23.0}}
    with pytest.raises(InvalidInput, match=f"/{path}.*finite"):
        check_plan(changed(path, lambda _: number)(stated))


def test_a_bound_over_all_cuts_without_metrics_is_refused(serial_plan: Document) -> None:
    stated = {key: value for key, value in serial_plan.items() if key != "metrics"}
    with pytest.raises(InvalidInput, match=r"/cut.*metrics"):
        check_plan(stated | {"cut": {"method": "even-cut", "lower_bound": 1e9, "gap": 0}})


def changed(path: str, change: Callable[[Any], Any]) -> Callable[[Document], Document]:
    """A plan with one claim changed; the path's parts are separated by slashes."""

    def apply(document: Document) -> Document:
        copy: Document = json.loads(json.dumps(document))
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        at: Any = copy
        for part in parents:
            at = at[part]
        at[last] = change(at[last])
        return copy

    return apply


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (changed("baselines/1/span", lambda span: 2 * span), "stated span of baseline 1f1b"),
        (changed("baselines/1/makespan", lambda span: span + 1), "stated makespan of baseline 1f1b"),
        (changed("baselines/4/bubble_rate", lambda rate: rate / 2), "stated bubble_rate of baseline zb-h1"),
        (changed("baselines/0/peak_memory/1", lambda peak: peak + 1), "baseline gpipe on rank 1"),
        (changed("baselines/0/peak_memory", lambda peaks: peaks[:1]), "has 1 values, not 2"),
        (changed("baselines/0/fits", lambda fits: not fits), "stated fits of baseline gpipe"),
        (changed("metrics/gap", lambda _: 0.5), "the stated gap 0.5"),
        (changed("metrics/lower_bound", lambda bound: 3 * bound), "is above the objective"),
        (changed("metrics/span", lambda span: 2 * span), "is too large"),
        (changed("plan_id", lambda _: "0" * 64), "The plan was altered"),
    ],
    ids=range(10),
)
def test_false_claims_are_refused(
    lie: Callable[[Document], Document], says: str, serial_plan: Document
) -> None:
    check_plan(serial_plan)
    with pytest.raises((InvalidPlan, InvalidInput), match=says):
        check_plan(lie(serial_plan))


def test_a_bound_of_zero_proves_nothing_and_needs_no_proof(serial_plan: Document) -> None:
    metrics = serial_plan["metrics"] | {"lower_bound": 0, "gap": None, "status": "feasible"}
    checked = check_plan(serial_plan | {"metrics": metrics}, prove=True)
    assert "/metrics/lower_bound" in pointers(checked, verified=True)
    with pytest.raises(InvalidPlan, match="the stated gap 0 is inf"):
        check_plan(serial_plan | {"metrics": metrics | {"gap": 0}})


def test_unknown_baselines_are_named_as_not_verified(serial_plan: Document) -> None:
    invented = serial_plan["baselines"][0] | {"name": "ours-before", "span": 1.0}
    checked = check_plan(serial_plan | {"baselines": [invented]})
    assert "/baselines/0" in pointers(checked, verified=False)


def test_a_plan_without_metrics_claims_only_its_orders(serial_plan: Document) -> None:
    bare = {key: serial_plan[key] for key in ("problem", "ranks")}
    checked = check_plan(bare)
    assert pointers(checked, verified=True) == {"/ranks"}
    assert not checked.unverified


def test_the_bound_over_all_cuts_is_proved_from_the_layers() -> None:
    document, asked = planned(LAYERS), parse_any_problem(LAYERS)
    assert "/cut/lower_bound" in pointers(check_plan(document, asked), verified=False)
    assert "/cut/lower_bound" in pointers(check_plan(document, asked, prove=True), verified=True)
    with pytest.raises(InvalidPlan, match="for a problem with a given cut"):
        check_plan(document, prove=True)


def test_a_false_bound_over_all_cuts_is_refused() -> None:
    document, asked = planned(LAYERS, "quick"), parse_any_problem(LAYERS)
    span = document["metrics"]["makespan"]
    with pytest.raises(InvalidPlan, match="gap of the cut"):
        check_plan(document | {"cut": document["cut"] | {"gap": 7.0}}, asked)
    with pytest.raises(InvalidPlan, match="over all cuts is above the objective"):
        check_plan(document | {"cut": {"lower_bound": 2 * span, "gap": -0.5}}, asked)
    unproved = {"lower_bound": span, "gap": 0}
    assert "/cut/lower_bound" in pointers(check_plan(document | {"cut": unproved}, asked), verified=False)
    with pytest.raises(InvalidPlan, match="over all cuts is not supported"):
        check_plan(document | {"cut": unproved}, asked, prove=True)


def test_a_plan_of_another_problem_is_refused(best: Document) -> None:
    with pytest.raises(InvalidInput, match="they differ in memory"):
        check_plan(best, parse_any_problem(uniform_document(2, 4, limit=5)))


def test_the_command_lists_claims_as_text_and_as_json(
    serial_plan: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    problem.write_text(json.dumps(PROBLEM))
    plan.write_text(json.dumps(claiming_optimal(serial_plan)))
    assert main(["check", str(problem), str(plan)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "valid"
    bound = next(line for line in lines if "  lower bound" in line)
    assert lines.index("not verified:") < lines.index(bound)
    assert main(["check", str(problem), str(plan), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {claim["pointer"] for claim in answer["claims"] if not claim["is_verified"]} == {
        "/metrics/lower_bound",
        "/provenance",
    }
    assert main(["check", str(problem), str(plan), "--prove"]) == 2
    assert "is false" in capsys.readouterr().err
    assert main(["check", str(problem), str(problem)]) == 2
    assert f"{problem}: this is a problem" in capsys.readouterr().err
