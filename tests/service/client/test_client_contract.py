"""Both clients with a real service over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import fake_searches
from support.clients import KINDS, Driver, driving
from support.layered import LAYERED, NAMES
from support.live import Live, listening
from support.serving import DEADLINE, PROBLEM
from zbv_service.app import create_app
from zbv_service.client import Client, InvalidRequest, LayoutSearch, NotFound, Search
from zbv_service.settings import Settings
from zbv_solver.verify.verifier import verify

from benchmarks.service.malformed import PLAN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    search = fake_searches.InDirectory(fake_searches.held, folder)
    settings = Settings(auth="none", database=f"sqlite:///{folder}/zbv.db", searches=1)
    with listening(create_app(settings, search=search)) as found:
        yield found


@pytest.fixture(scope="module", params=KINDS)
def driver(request: pytest.FixtureRequest, live: Live) -> Iterator[Driver]:
    with driving(request.param, live.address, timeout=DEADLINE) as made:
        yield made


def test_a_search_is_followed_from_start_to_plan(driver: Driver, folder: Path) -> None:
    release = folder / "release"
    release.unlink(missing_ok=True)
    search: Search = driver.do(lambda made: made.submit(PROBLEM, {"seed": hash(driver.client) % 2**31}))
    seen: list[Search] = []

    def watch(found: Search) -> None:
        seen.append(found)
        if found.objective is not None:
            release.touch()

    ended = driver.do(lambda made: made.wait(search.id, watch, timeout=DEADLINE))
    assert (ended.state, ended.method) == ("done", "released")
    assert 9.0 in [found.objective for found in seen if found.state == "running"]
    assert seen[-1] == ended
    events = driver.do(lambda made: made.events(search.id))
    kinds = [event.kind for event in events]
    assert kinds[-1] == "end"
    assert "improvement" in kinds
    rest = driver.do(lambda made: made.events(search.id, events[-2].id))
    assert [event.id for event in rest] == [events[-1].id]

    document = driver.do(lambda made: made.plan_document(ended.plan_id))
    assert document["plan_id"] == ended.plan_id
    rank = driver.do(lambda made: made.rank(ended.plan_id, 1))
    assert [str(action) for action in rank.actions] == document["ranks"][1]


def test_searches_are_cancelled_listed_and_deleted(driver: Driver, folder: Path) -> None:
    (folder / "release").unlink(missing_ok=True)
    seeds = [hash((driver.client, number)) % 2**31 for number in range(3)]
    ids = [driver.do(partial(_submit, seed)).id for seed in seeds]
    assert {search.id for search in driver.do(lambda made: made.searches(state="queued"))} >= set(ids[1:])
    for search_id in ids:
        driver.do(partial(_cancel, search_id))
    assert driver.do(lambda made: made.wait(ids[0], timeout=DEADLINE)).state == "cancelled"
    listed = [search.id for search in driver.do(lambda made: made.all_searches(2))]
    assert listed[:3] == ids[::-1]
    assert len(listed) == len(set(listed))
    driver.do(lambda made: made.delete(ids[1]))
    with pytest.raises(NotFound):
        driver.do(lambda made: made.search(ids[1]))


def test_a_problem_with_layers_is_checked_searched_and_fetched(driver: Driver, folder: Path) -> None:
    (folder / "release").touch()
    checked = driver.do(lambda made: made.check(LAYERED))
    assert (checked.is_valid, checked.facts, checked.layers["layers"]) == (True, None, 8)
    measured = {"device": "H200", "precision": "bfloat16"}
    search = driver.do(
        lambda made: made.submit(LAYERED | {"measured": measured}, {"seed": hash(driver.client) % 2**31})
    )
    ended = driver.do(lambda made: made.wait(search.id, timeout=DEADLINE))
    plan = driver.do(lambda made: made.plan(ended.plan_id))
    assert [name for names in plan.problem.model.partition for name in names] == NAMES
    rank = driver.do(lambda made: made.rank(ended.plan_id, 0))
    assert (rank.partition, rank.recompute) == (plan.problem.model.partition, None)
    assert rank.measured == dict(plan.problem.measured) == measured
    assert rank.features == {}


def _submit(seed: int, made: Any) -> Any:
    return made.submit(PROBLEM, {"seed": seed})


def _cancel(search_id: str, made: Any) -> Any:
    return made.cancel(search_id)


def test_submissions_with_the_same_key_are_one(driver: Driver, folder: Path) -> None:
    (folder / "release").touch()
    key = f"key-{id(driver)}"
    first = driver.do(lambda made: made.submit(PROBLEM, key=key))
    assert driver.do(lambda made: made.submit(PROBLEM, key=key)).id == first.id
    with pytest.raises(InvalidRequest) as caught:
        driver.do(lambda made: made.submit(PROBLEM, {"seed": 9}, key=key))
    assert caught.value.kind == "/problems/idempotency-key-reused"


def test_plans_are_imported_read_and_exported(driver: Driver) -> None:
    plan_id = driver.do(lambda made: made.import_plan(PLAN))
    verify(driver.do(lambda made: made.plan(plan_id)))
    assert driver.do(lambda made: made.export(plan_id, "torch-csv")).count("\n") >= 1
    with pytest.raises(NotFound):
        driver.do(lambda made: made.export(plan_id, "none"))


def test_compare_returns_the_baselines(driver: Driver) -> None:
    unplanned = {**PROBLEM, "microbatches": 3}  # the service's fake plans state made-up metrics
    found: dict[str, Any] = driver.do(lambda made: made.compare(unplanned))
    assert {row["name"] for row in found["baselines"]} >= {"1f1b", "interleaved-1f1b"}


def test_a_batch_is_packed_into_problems_of_replicas(driver: Driver) -> None:
    problem = {key: value for key, value in PROBLEM.items() if key != "microbatches"}
    batch = {"sequences": [5, 3, 4], "max_tokens": 8, "replicas": 2, "problem": problem}
    found: dict[str, Any] = driver.do(lambda made: made.pack(batch))
    assert sorted(found["replicas"][0]["problem"]["features"]) == ["tokens", "tokens_squared"]
    with pytest.raises(InvalidRequest):
        driver.do(lambda made: made.pack({**batch, "max_tokens": 4}))


def test_a_problem_is_checked_and_estimated_before_it_is_searched(driver: Driver) -> None:
    unlimited = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}
    found = driver.do(lambda made: made.check(unlimited, {"effort": "quick"}, limit_fraction=1.0))
    assert found.is_valid
    assert found.facts["limit_fraction"] == 1
    wrong = driver.do(lambda made: made.check({**PROBLEM, "microbatches": 0}, {"effort": "most"}))
    assert (wrong.is_valid, wrong.facts) == (False, None)
    assert "/problem/microbatches" in [issue.pointer for issue in wrong.issues]

    estimate = driver.do(lambda made: made.estimate(PROBLEM))
    assert 0 < estimate.lower_bound <= estimate.plan["span"]
    assert "1f1b" in [row["name"] for row in estimate.baselines]
    with pytest.raises(InvalidRequest):
        driver.do(lambda made: made.estimate({**PROBLEM, "microbatches": 0}))


def test_a_wrong_problem_raises_its_issues(driver: Driver) -> None:
    wrong = json.loads(json.dumps(PROBLEM))
    wrong["costs"]["forward"] = -1
    with pytest.raises(InvalidRequest) as caught:
        driver.do(lambda made: made.submit(wrong))
    assert [issue.pointer for issue in caught.value.issues] == ["/problem/costs/forward"]
    assert caught.value.request_id


def test_layouts_are_searched_followed_listed_and_deleted(driver: Driver) -> None:
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "h200"}
    body = {
        "model": {"presets": ["llama-3.1-8b"]},
        "cluster": cluster,
        "global_batch": 4 if isinstance(driver.client, Client) else 8,
    }
    seen: list[LayoutSearch] = []
    search = driver.do(lambda made: made.submit_layouts(body))
    ended = driver.do(lambda made: made.wait_layouts(search.id, seen.append, timeout=DEADLINE))
    assert (ended.state, ended.error) == ("done", None)
    assert seen[-1] == ended
    assert ended.answer["layouts"][0]["plan_id"] == ended.plan_id
    assert ended.answer["considered"] == ended.progress["considered"] == ended.summary["layouts"]
    assert driver.do(lambda made: made.plan(ended.plan_id)).plan_id == ended.plan_id
    events = driver.do(lambda made: made.layout_events(search.id))
    assert [event.kind for event in events if event.kind != "progress"][-2:] == ["improvement", "end"]
    assert driver.do(lambda made: made.cancel_layouts(search.id)) == ended, "it has ended"
    (listed,) = driver.do(lambda made: made.layout_searches(limit=1, state="done"))
    assert (listed.id, listed.answer) == (search.id, None)
    driver.do(lambda made: made.delete_layouts(search.id))
    with pytest.raises(NotFound):
        driver.do(lambda made: made.layouts(search.id))
    with pytest.raises(InvalidRequest) as refused:
        driver.do(lambda made: made.submit_layouts({**body, "top": 0}))
    assert [issue.pointer for issue in refused.value.issues] == ["/top"]
