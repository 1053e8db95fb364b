"""The client with a real service over a real socket."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.layered import LAYERED, NAMES
from support.malformed import PLAN
from support.processes import wait_until
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, InvalidRequest, NotFound, Search
from zbv_solver.verify.verifier import verify


def test_a_search_is_followed_from_start_to_plan(client: Client, folder: Path) -> None:
    release = folder / "release"
    search: Search = client.submit(PROBLEM, {"seed": 7})
    seen: list[Search] = []

    def watch(found: Search) -> None:
        seen.append(found)
        if found.objective is not None:
            release.touch()

    ended = client.wait(search.id, watch, timeout=DEADLINE)
    release.unlink()
    assert (ended.state, ended.method) == ("done", "released")
    assert 9.0 in [found.objective for found in seen if found.state == "running"]
    assert seen[-1] == ended
    events = list(client.events(search.id))
    assert {"improvement", "end"} <= {event.kind for event in events}
    assert list(client.events(search.id, events[-2].id)) == events[-1:]

    assert ended.plan_id is not None
    document = client.plan_document(ended.plan_id)
    assert document["plan_id"] == ended.plan_id
    rank = client.rank(ended.plan_id, 1)
    assert [str(action) for action in rank.actions] == document["ranks"][1]


def test_searches_are_cancelled_listed_and_deleted(client: Client, folder: Path) -> None:
    (folder / "release").unlink(missing_ok=True)
    ids = [client.submit(PROBLEM, {"seed": seed}).id for seed in range(3)]
    for search_id in ids:
        client.cancel(search_id)
    wait_until(lambda: all(client.search(search_id).is_finished for search_id in ids), "the end of searches")
    cancelled = [search.id for search in client.all_searches(2, state="cancelled")]
    assert [search_id for search_id in cancelled if search_id in ids] == ids[::-1]
    assert not {search.id for search in client.all_searches(2, state="failed")} & {*ids}
    client.delete(ids[1])
    with pytest.raises(NotFound):
        client.search(ids[1])


def test_a_problem_with_layers_is_checked_searched_and_fetched(client: Client, folder: Path) -> None:
    (folder / "release").touch()
    checked = client.check(LAYERED)
    assert checked.layers is not None
    assert (checked.is_valid, checked.facts, checked.layers["layers"]) == (True, None, 8)
    measured = {"device": "H200", "precision": "bfloat16"}
    search = client.submit(LAYERED | {"measured": measured})
    ended = client.wait(search.id, timeout=DEADLINE)
    assert ended.plan_id is not None
    plan = client.plan(ended.plan_id)
    assert plan.problem.model is not None
    assert [name for names in plan.problem.model.partition for name in names] == NAMES
    rank = client.rank(ended.plan_id, 0)
    assert (rank.partition, rank.recompute) == (plan.problem.model.partition, None)
    assert rank.measured == dict(plan.problem.measured) == measured
    assert rank.features == {}


def test_plans_are_imported_read_exported_and_compared(client: Client) -> None:
    plan_id = client.import_plan(PLAN)
    verify(client.plan(plan_id))
    assert client.export(plan_id, "torch-csv").count("\n") >= 1
    assert client.simulation(plan_id, "5%", scenarios=9, seed=1)["scenarios"] == 9
    assert client.runs(5) == []
    with pytest.raises(NotFound):
        client.export(plan_id, "none")
    unplanned = {**PROBLEM, "microbatches": 3}  # the service's fake plans state made-up metrics
    assert {row["name"] for row in client.compare(unplanned)["baselines"]} >= {"1f1b", "interleaved-1f1b"}
    with pytest.raises(InvalidRequest) as caught:
        client.submit({**PROBLEM, "costs": {**PROBLEM["costs"], "forward": -1}})
    assert [issue.pointer for issue in caught.value.issues] == ["/problem/costs/forward"]
    assert (caught.value.status, bool(caught.value.request_id)) == (422, True)


def test_a_problem_is_checked_and_estimated_before_it_is_searched(client: Client) -> None:
    unlimited = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}
    found = client.check(unlimited, {"effort": "quick"}, limit_fraction=1.0)
    assert found.facts is not None
    assert (found.is_valid, found.facts["limit_fraction"]) == (True, 1)
    wrong = client.check({**PROBLEM, "microbatches": 0})
    assert (wrong.is_valid, wrong.facts) == (False, None)
    assert [issue.pointer for issue in wrong.issues] == ["/problem/microbatches"]
    estimate = client.estimate(PROBLEM)
    assert estimate.plan is not None
    assert 0 < estimate.lower_bound <= estimate.plan["span"]
