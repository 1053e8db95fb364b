"""The client with a real service over a real socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.layered import LAYERED, NAMES
from support.serving import DEADLINE, PLAN, PROBLEM
from zbv_service.client import Client, InvalidRequest, NotFound, Search
from zbv_solver.verify.verifier import verify


def test_a_search_is_followed_from_start_to_plan_listed_and_deleted(client: Client, folder: Path) -> None:
    release = folder / "release"
    search: Search = client.submit(PROBLEM, {"seed": 7})
    seen: list[Search] = []

    def watch(found: Search) -> None:
        seen.append(found)
        if found.objective is not None:
            release.touch()

    ended: Any = client.wait(search.id, watch, timeout=DEADLINE)
    release.unlink()
    assert (ended.state, ended.method) == ("done", "released")
    assert 9.0 in [found.objective for found in seen if found.state == "running"]
    assert seen[-1] == ended
    events = list(client.events(search.id))
    assert {"improvement", "end"} <= {event.kind for event in events}
    assert list(client.events(search.id, events[-2].id)) == events[-1:]

    document = client.plan_document(ended.plan_id)
    assert document["plan_id"] == ended.plan_id
    rank = client.rank(ended.plan_id, 1)
    assert [str(action) for action in rank.actions] == document["ranks"][1]

    newest = [found.id for found in client.all_searches(2, state="done")][:1]
    assert (newest, [*client.all_searches(2, state="failed")]) == ([search.id], [])
    client.delete(search.id)
    with pytest.raises(NotFound):
        client.search(search.id)


def test_a_problem_with_layers_is_checked_searched_and_fetched(client: Client, folder: Path) -> None:
    (folder / "release").touch()
    checked: Any = client.check(LAYERED)
    assert (checked.is_valid, checked.facts, checked.layers["layers"]) == (True, None, 8)
    measured = {"device": "H200", "precision": "bfloat16"}
    search = client.submit(LAYERED | {"measured": measured})
    ended: Any = client.wait(search.id, timeout=DEADLINE)
    plan: Any = client.plan(ended.plan_id)
    assert [name for names in plan.problem.model.partition for name in names] == NAMES
    rank = client.rank(ended.plan_id, 0)
    assert (rank.partition, rank.recompute) == (plan.problem.model.partition, None)
    assert rank.measured == dict(plan.problem.measured) == measured
    assert rank.features == {}
    (folder / "release").unlink()


def test_plans_are_imported_read_exported_and_compared(client: Client) -> None:
    timed = {**PROBLEM, "units": {"time": "us"}}  # plans of the fake searches state made-up metrics
    plan_id = client.import_plan({**PLAN, "problem": timed})
    verify(client.plan(plan_id))
    assert client.export(plan_id, "torch-csv").count("\n") >= 1
    assert client.simulation(plan_id, "5%", scenarios=9, seed=1)["scenarios"] == 9
    assert client.runs(5) == []
    with pytest.raises(NotFound):
        client.export(plan_id, "none")
    assert {row["name"] for row in client.compare(timed)["baselines"]} >= {"1f1b", "interleaved-1f1b"}
    with pytest.raises(InvalidRequest) as caught:
        client.submit({**PROBLEM, "costs": {**PROBLEM["costs"], "forward": -1}})
    assert [issue.pointer for issue in caught.value.issues] == ["/problem/costs/forward"]
    assert (caught.value.status, bool(caught.value.request_id)) == (422, True)


def test_a_problem_is_checked_and_estimated_before_it_is_searched(client: Client) -> None:
    unlimited = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}
    found: Any = client.check(unlimited, {"effort": "quick"}, limit_fraction=1.0)
    assert (found.is_valid, found.facts["limit_fraction"]) == (True, 1)
    wrong = client.check({**PROBLEM, "microbatches": 0})
    assert (wrong.is_valid, wrong.facts) == (False, None)
    assert [issue.pointer for issue in wrong.issues] == ["/problem/microbatches"]
    estimate: Any = client.estimate(PROBLEM)
    assert 0 < estimate.lower_bound <= estimate.plan["span"]
