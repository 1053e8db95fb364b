"""Plans over HTTP: immutable, verified when imported, and served to each rank."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.serving import PROBLEM, Service, Serving
from zbv_service import app
from zbv_service.pages import assets
from zbv_service.plans import plans
from zbv_solver.documents.files import plain
from zbv_solver.plans.channels import Channel, Transfer, channels
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan, compare, make_plan
from zbv_solver.search.jitter import simulate
from zbv_solver.verify.verifier import verify


@pytest.fixture(scope="module")
def ranks() -> list[list[str]]:
    """A valid order of the problem, one microbatch at a time."""
    down = [f"{s}F{{j}}" for s in range(4)]
    up = [f"{s}B{{j}}" for s in reversed(range(4))]
    hosts = [{0, 3}, {1, 2}]
    return [
        [text.format(j=j) for j in range(4) for text in (*down, *up) if int(text[0]) in stages]
        for stages in hosts
    ]


async def imported(service: Service, document: Any) -> str:
    answer = await service.http.post("/v1/plans", json=document)
    assert answer.status_code == 201, answer.text
    plan_id: str = answer.json()["plan_id"]
    return plan_id


async def test_the_metrics_of_an_imported_plan_are_computed_and_it_is_stored_once(
    serving: Serving, ranks: list[list[str]]
) -> None:
    document = {"problem": PROBLEM, "ranks": ranks}
    async with serving("immediate") as service:
        plan_id = await imported(service, document)
        again = await service.http.post("/v1/plans", json=document)
        assert (again.status_code, again.headers["location"]) == (200, f"/v1/plans/{plan_id}")
        stored = (await service.http.get(again.headers["location"])).json()
    plan = parse_plan(stored)
    verify(plan)
    assert plan.plan_id == stored["plan_id"] == plan_id
    assert plan.metrics.makespan == 4 * 12  # 4 forwards of 1 and 4 fused backwards of 2, one by one
    assert stored["ranks"] == ranks
    assert {row["name"] for row in stored["baselines"]} >= {"1f1b", "interleaved-1f1b"}


def swapped(ranks: list[list[str]]) -> list[list[str]]:
    """A deadlock: the last stage's backward before its forward."""
    return [["3B0" if text == "3F0" else "3F0" if text == "3B0" else text for text in ranks[0]], ranks[1]]


async def test_a_wrong_plan_is_refused_and_not_stored(serving: Serving, ranks: list[list[str]]) -> None:
    metrics = {"makespan": 1, "span": 1, "bubble_rate": 0, "peak_memory": [2, 2]}
    wrong: dict[str, dict[str, Any]] = {
        "incomplete": {"ranks": [ranks[0][:-1], ranks[1]]},
        "twice": {"ranks": [[*ranks[0], ranks[0][-1]], ranks[1]]},
        "misplaced": {"ranks": ranks[::-1]},
        "deadlock": {"ranks": swapped(ranks)},
        "junk": {"ranks": [["0F0xyz", *ranks[0][1:]], ranks[1]]},
        "too few ranks": {"ranks": ranks[:1]},
        "huge numbers": {"ranks": [["999999999F999999999", *ranks[0][1:]], ranks[1]]},
        "too little memory": {"problem": {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}},
        "stated metrics": {"metrics": metrics},
        "stated id": {"plan_id": "0" * 64},
        "wrong problem": {"problem": {**PROBLEM, "pp_degree": "two"}},
    }
    async with serving("immediate") as service:
        for name, change in wrong.items():
            answer = await service.http.post("/v1/plans", json={"problem": PROBLEM, "ranks": ranks, **change})
            body = answer.json()
            assert answer.status_code == 422, (name, body)
            assert body["type"] in ("/errors/invalid-plan", "/errors/invalid-body"), name
            assert body["errors"], name
        assert await service.app.state.application.plans.newest(10) == []


async def test_a_plan_is_immutable_and_has_an_etag(service: Service, ranks: list[list[str]]) -> None:
    plan_id = await imported(service, {"problem": PROBLEM, "ranks": ranks})
    path = f"/v1/plans/{plan_id}"
    answer = await service.http.get(path)
    assert answer.headers["etag"] == f'"{plan_id}"'
    assert "immutable" in answer.headers["cache-control"]
    for known in (f'"{plan_id}"', f'W/"{plan_id}"', f'"other", "{plan_id}"', "*"):
        unchanged = await service.http.get(path, headers={"if-none-match": known})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
    other = await service.http.get(path, headers={"if-none-match": '"other"'})
    assert (other.status_code, other.content) == (200, answer.content)


DERIVED = (
    "/v1/plans/{}/ranks/1",
    "/v1/plans/{}/export/torch-csv",
    "/plans/{}/thumbnail.png",
    "/plans/{}/actions",
    "/plans/{}/baselines/1f1b/actions",
)
"""What a version of the service derives from a plan."""


async def test_derived_content_is_not_reused_after_an_upgrade(
    serving: Serving, ranks: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = {}
    async with serving("immediate") as service:
        plan_id = await imported(service, {"problem": PROBLEM, "ranks": ranks})
        old = {"v": assets.assets()}
        for path in (below.format(plan_id) for below in DERIVED):
            for _ in range(2):  # RankFetches answers the second request for a rank
                answer = await service.http.get(path)
                assert (answer.status_code, answer.headers["cache-control"]) == (200, "private, no-cache")
                tags[path] = answer.headers["etag"]
                again = await service.http.get(path, headers={"if-none-match": tags[path]})
                assert (again.status_code, again.content) == (304, b"")
            if path.startswith("/plans"):  # pages put the version into addresses
                assert "immutable" in (await service.http.get(path, params=old)).headers["cache-control"]
    monkeypatch.setattr(plans, "__version__", "99.0.0")
    monkeypatch.setattr(assets, "__version__", "99.0.0")
    monkeypatch.setattr(app, "assets", assets.assets.__wrapped__)
    async with serving("immediate") as service:
        for path, tag in tags.items():
            upgraded = await service.http.get(path, headers={"if-none-match": tag})
            assert (upgraded.status_code, upgraded.headers["etag"] == tag) == (200, False), path
            later = await service.http.get(path, params=old)
            assert "immutable" not in later.headers["cache-control"], path


async def test_a_rank_gets_its_actions_and_channels(serving: Serving, ranks: list[list[str]]) -> None:
    async with serving("immediate") as service:
        plan_id = await imported(service, {"problem": PROBLEM, "ranks": ranks})
        answer = await service.get(f"/v1/plans/{plan_id}/ranks/1")
        missing = await service.http.get(f"/v1/plans/{plan_id}/ranks/2")
        negative = await service.http.get(f"/v1/plans/{plan_id}/ranks/-1")
    assert answer["actions"] == ranks[1]
    assert (answer["plan_id"], answer["rank"], answer["pp_degree"]) == (plan_id, 1, 2)
    assert (answer["placement"], answer["chunks"], answer["stages"]) == ("v", 2, [1, 2])
    assert (answer["microbatches"], answer["peers"]) == (4, [0])
    assert answer["channels"] == [
        {
            "peer": 0,
            "direction": "receive",
            "transfers": [f"{t}:{j}" for j in range(4) for t in ("A0", "G2")],
        },
        {"peer": 0, "direction": "send", "transfers": [f"{t}:{j}" for j in range(4) for t in ("A2", "G0")]},
    ]
    assert (missing.status_code, negative.status_code) == (404, 404)
    assert "ranks 0 to 1" in missing.json()["detail"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
async def test_with_other_placements_the_ranks_agree_on_their_channels(serving: Serving, name: str) -> None:
    problem = parse_problem({**PROBLEM, "pp_degree": 3, "memory": None})
    plan = baseline_plan(name, problem)
    async with serving("immediate") as service:
        plan_id = await imported(service, json.loads(json.dumps(plan_json(plan))))
        assert plan_id == plan.plan_id
        sent: set[Channel] = set()
        received: set[Channel] = set()
        for rank in range(3):
            document = await service.get(f"/v1/plans/{plan_id}/ranks/{rank}")
            assert document["actions"] == plan.orders.text(rank)
            for entry in document["channels"]:
                is_sender = entry["direction"] == "send"
                sender, receiver = (rank, entry["peer"]) if is_sender else (entry["peer"], rank)
                transfers = tuple(map(Transfer.parse, entry["transfers"]))
                (sent if is_sender else received).add(Channel(sender, receiver, transfers))
    assert sent == received == set(channels(plan.problem, plan.orders))


async def test_exports_are_files_of_the_format(service: Service, ranks: list[list[str]]) -> None:
    plan_id = await imported(service, {"problem": PROBLEM, "ranks": ranks})
    answer = await service.http.get(f"/v1/plans/{plan_id}/export/torch-csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"].endswith('.csv"')
    assert len(answer.text.strip().splitlines()) == 2
    unknown = await service.http.get(f"/v1/plans/{plan_id}/export/none")
    assert unknown.status_code == 404
    assert "torch-csv" in unknown.json()["detail"]


async def test_pages_show_the_plan_and_the_list(service: Service, ranks: list[list[str]]) -> None:
    plan_id = await imported(service, {"problem": PROBLEM, "ranks": ranks})
    search_id = (await service.submit()).json()["id"]
    await service.ended(search_id)
    for path in ("/", f"/plans/{plan_id}"):
        page = await service.http.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert plan_id[:8] in page.text
    missing = await service.http.get("/plans/nothing", headers={"accept": "text/html"})
    assert (missing.status_code, missing.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert (await service.http.get("/static/zbv.css")).status_code == 200
    assert (await service.http.get("/static/plan.js")).status_code == 200


async def test_an_import_lists_which_claims_it_verified(serving: Serving) -> None:
    problem = parse_problem(PROBLEM)
    stated = json.loads(json.dumps(plan_json(baseline_plan("1f1b", problem))))
    best = {"lower_bound": stated["metrics"]["span"], "gap": 0, "status": "optimal"}
    false = stated | {"metrics": stated["metrics"] | best}
    async with serving("immediate") as service:
        answer = (await service.http.post("/v1/plans", json=false)).json()
        stored = await service.get(f"/v1/plans/{answer['plan_id']}")
        refused = await service.http.post("/v1/plans", json=false | {"baselines": [false_baseline(stated)]})
    assert {claim["pointer"] for claim in answer["claims"] if not claim["is_verified"]} == {
        "/metrics/lower_bound",
        "/provenance",
    }
    assert answer["lower_bound"] == stored["metrics"]["lower_bound"] < best["lower_bound"]
    assert stored["metrics"]["status"] == "feasible"
    assert refused.status_code == 422
    assert "stated span of baseline gpipe" in refused.json()["detail"]


def false_baseline(plan: dict[str, Any]) -> dict[str, Any]:
    """A baseline with a span that is too large by 1."""
    (gpipe, *_) = compare(parse_problem(plan["problem"]))
    return {**plain(gpipe), "span": gpipe.span + 1}


async def test_a_plan_is_simulated_with_durations_that_vary(service: Service, ranks: list[list[str]]) -> None:
    address = f"/v1/plans/{await imported(service, {'problem': PROBLEM, 'ranks': ranks})}/simulation"
    answer = await service.http.get(address, params={"jitter": "5%", "scenarios": 32})
    found = answer.json()
    assert found["jitter"] == {"action": 0.05, "rank": 0, "transfer": 0.05}
    assert 48 < found["expected_makespan"] < found["p95_makespan"]
    assert {row["name"] for row in found["baselines"]} >= {"1f1b", "interleaved-1f1b"}
    same = {"if-none-match": answer.headers["etag"]}
    again = await service.http.get(address, params={"jitter": "5%", "scenarios": 32}, headers=same)
    assert again.status_code == 304
    other = await service.http.get(address, params={"jitter": "6%", "scenarios": 32}, headers=same)
    assert other.status_code == 200
    document = await service.http.get(address, params={"jitter": '{"rank": 0.1}', "scenarios": 32})
    assert document.json()["jitter"] == {"action": 0, "rank": 0.1, "transfer": 0}


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"jitter": "much"}, 422, "jitter: found 'much'"),
        ({"jitter": '{"rank": [0, 0, 0]}'}, 422, "/rank: found 3 values"),
        ({"jitter": '{"rank"'}, 400, "not JSON"),
        ({"scenarios": 0}, 422, "scenarios: found '0'"),
        ({"scenarios": 5000}, 422, "scenarios: found '5000'"),
        ({"seed": -1}, 422, "seed: found '-1'"),
    ],
)
async def test_a_wrong_simulation_is_refused(
    serving: Serving, ranks: list[list[str]], asked: dict[str, Any], status: int, said: str
) -> None:
    async with serving("immediate") as service:
        plan_id = await imported(service, {"problem": PROBLEM, "ranks": ranks})
        answer = await service.http.get(f"/v1/plans/{plan_id}/simulation", params=asked)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["detail"]


async def test_an_imported_simulation_is_repeated_and_kept(serving: Serving, ranks: list[list[str]]) -> None:
    problem = parse_problem(PROBLEM)
    plan = make_plan(problem, Orders.from_text(ranks), method="by hand")
    simulation = simulate(plan, Jitter.of(action=0.05), scenarios=16)
    document = plan_json(replace(plan, simulation=simulation))
    async with serving("immediate") as service:
        plan_id = await imported(service, document)
        stored = await service.get(f"/v1/plans/{plan_id}")
    assert stored["simulation"] == document["simulation"]
