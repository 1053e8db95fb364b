"""Plans over HTTP: immutable, verified when imported, served to each rank; their thumbnails."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.drawn_plans import one_by_one
from support.serving import PLAN, PROBLEM, Service, Serving
from support.tokens import add
from zbv_service import app
from zbv_service.pages import assets
from zbv_service.plans import plans
from zbv_service.plans.thumbnail import HEIGHT, WIDTH, thumbnail
from zbv_solver.export.palette import KIND_FILLS, rgb
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan, make_plan
from zbv_solver.search.jitter import simulate
from zbv_solver.verify.verifier import verify

RANKS = PLAN["ranks"]


async def test_the_metrics_of_an_imported_plan_are_computed_and_it_is_stored_once(service: Service) -> None:
    plan_id = await service.import_plan()
    again = await service.http.post("/v1/plans", json=PLAN)
    assert (again.status_code, again.headers["location"]) == (200, f"/v1/plans/{plan_id}")
    stored = (await service.http.get(again.headers["location"])).json()
    plan = parse_plan(stored)
    verify(plan)
    assert plan.plan_id == stored["plan_id"] == plan_id
    assert plan.metrics.makespan == 4 * 12  # 4 forwards of 1 and 4 fused backwards of 2, one by one
    assert stored["ranks"] == RANKS
    assert {row["name"] for row in stored["baselines"]} >= {"1f1b", "interleaved-1f1b"}


async def test_a_wrong_plan_is_refused_and_not_stored(service: Service) -> None:
    metrics = {"makespan": 1, "span": 1, "bubble_rate": 0, "peak_memory": [2, 2]}
    wrong: dict[str, dict[str, Any]] = {
        "incomplete": {"ranks": [RANKS[0][:-1], RANKS[1]]},
        "junk": {"ranks": [["0F0xyz", *RANKS[0][1:]], RANKS[1]]},
        "huge numbers": {"ranks": [["999999999F999999999", *RANKS[0][1:]], RANKS[1]]},
        "too little memory": {"problem": {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}},
        "stated metrics": {"metrics": metrics},
        "stated id": {"plan_id": "0" * 64},
        "wrong problem": {"problem": {**PROBLEM, "pp_degree": "two"}},
    }
    for name, change in wrong.items():
        answer = await service.http.post("/v1/plans", json={**PLAN, **change})
        body = answer.json()
        assert answer.status_code == 422, (name, body)
        assert body["type"] in ("/errors/invalid-plan", "/errors/invalid-body"), name
        assert body["errors"], name
    assert await service.listed("plans") == []


async def test_a_plan_is_immutable_and_has_an_etag(service: Service) -> None:
    plan_id = await service.import_plan()
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
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = {}
    async with serving("immediate") as service:
        plan_id = await service.import_plan()
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


async def test_a_rank_gets_its_actions_and_channels(service: Service) -> None:
    plan_id = await service.import_plan()
    answer = await service.get(f"/v1/plans/{plan_id}/ranks/1")
    assert answer["actions"] == RANKS[1]
    assert (answer["plan_id"], answer["rank"], answer["pp_degree"]) == (plan_id, 1, 2)
    assert (answer["placement"], answer["chunks"], answer["stages"]) == ("v", 2, [1, 2])
    assert (answer["microbatches"], answer["peers"]) == (4, [0])
    expected = (("receive", ("A0", "G2")), ("send", ("A2", "G0")))
    for channel, (direction, kinds) in zip(answer["channels"], expected, strict=True):
        transfers = [f"{kind}:{j}" for j in range(4) for kind in kinds]
        assert channel == {"peer": 0, "direction": direction, "transfers": transfers}


async def test_exports_are_files_of_the_format(service: Service) -> None:
    address = f"/v1/plans/{await service.import_plan()}/export"
    answer = await service.http.get(f"{address}/torch-csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"].endswith('.csv"')
    assert len(answer.text.strip().splitlines()) == 2
    unknown = await service.http.get(f"{address}/none")
    assert (unknown.status_code, "torch-csv" in unknown.json()["detail"]) == (404, True)


async def test_an_import_lists_which_claims_it_verified(service: Service) -> None:
    problem = parse_problem(PROBLEM)
    stated = json.loads(json.dumps(plan_json(baseline_plan("1f1b", problem))))
    best = {"lower_bound": stated["metrics"]["span"], "gap": 0, "status": "optimal"}
    false = stated | {"metrics": stated["metrics"] | best}
    answer = (await service.http.post("/v1/plans", json=false)).json()
    stored = await service.get(f"/v1/plans/{answer['plan_id']}")
    unverified = {claim["pointer"] for claim in answer["claims"] if not claim["is_verified"]}
    assert unverified == {"/metrics/lower_bound", "/provenance"}
    assert answer["lower_bound"] == stored["metrics"]["lower_bound"] < best["lower_bound"]
    assert stored["metrics"]["status"] == "feasible"


async def test_a_plan_is_simulated_with_durations_that_vary(service: Service) -> None:
    address = f"/v1/plans/{await service.import_plan()}/simulation"
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


async def test_a_wrong_simulation_is_refused(service: Service) -> None:
    address = f"/v1/plans/{await service.import_plan()}/simulation"
    for asked, status, said in (
        ({"jitter": "much"}, 422, "jitter: found 'much'"),
        ({"jitter": '{"rank": [0, 0, 0]}'}, 422, "/rank: found 3 values"),
        ({"jitter": '{"rank"'}, 400, "not JSON"),
        ({"scenarios": 0}, 422, "scenarios: found '0'"),
        ({"scenarios": 5000}, 422, "scenarios: found '5000'"),
        ({"seed": -1}, 422, "seed: found '-1'"),
    ):
        answer = await service.http.get(address, params=asked)
        assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


async def test_an_imported_simulation_is_repeated_and_kept(service: Service) -> None:
    problem = parse_problem(PROBLEM)
    plan = make_plan(problem, Orders.from_text(RANKS), method="by hand")
    simulation = simulate(plan, Jitter.of(action=0.05), scenarios=16)
    document = plan_json(replace(plan, simulation=simulation))
    imported = await service.http.post("/v1/plans", json=document)
    stored = await service.get(imported.headers["location"])
    assert stored["simulation"] == document["simulation"]


NO_TIME = {"forward": 0, "backward_input": 0, "backward_weight": 0}


def pixels(plan: Plan) -> NDArray[np.uint8]:
    picture = Image.open(io.BytesIO(thumbnail(plan)))
    assert (picture.format, picture.mode, picture.size) == ("PNG", "RGBA", (WIDTH, HEIGHT))
    return np.asarray(picture)


def test_every_rank_has_a_row_with_the_colours_of_its_actions() -> None:
    found = pixels(one_by_one(2, 1))
    # Twelve actions on two ranks: rank 0 begins with 0F0 and rank 1 waits for it.
    first, second = found[HEIGHT // 8], found[HEIGHT // 2 + HEIGHT // 8]
    assert tuple(first[20]) == (*rgb(KIND_FILLS[0]), 255)
    assert second[20, 3] == 0
    assert (first[:, 3] > 0).mean() < 0.8
    assert set(map(tuple, found[found[..., 3] == 255].reshape(-1, 4)[:, :3])) <= set(map(rgb, KIND_FILLS))
    assert not found[HEIGHT // 2 - 1, :, 3].any(), "rows are apart"


@pytest.mark.parametrize("ranks", [HEIGHT // 2 + 1, HEIGHT, HEIGHT + 1, 2 * HEIGHT + 7])
def test_many_ranks_fill_the_picture(ranks: int) -> None:
    found = pixels(one_by_one(ranks, 1))
    assert found[..., 3].any(axis=1).all()


def test_a_plan_without_duration_is_an_empty_picture() -> None:
    assert not pixels(one_by_one(2, 1, costs=NO_TIME)).any()


SCOPES = ("search", "read", "agent", "launch")
OWN = {"x-request-id", "date"}


def fast_fetches(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that are served from memory; the list grows with the requests."""
    plans, found = service.app.state.application.plans, []
    known_rank = plans.known_rank

    def watched(plan_id: str, rank: int) -> Any:
        answer = known_rank(plan_id, rank)
        if answer is not None:
            found.append(rank)
        return answer

    monkeypatch.setattr(plans, "known_rank", watched)
    return found


async def test_the_fast_path_gives_the_same_answer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/v1/plans/{await service.import_plan()}/ranks/1"
    short = fast_fetches(service, monkeypatch)
    first, second = [await service.http.get(path) for _ in range(2)]
    assert (await service.http.post(path)).status_code == 405
    assert short == [1]  # only the second one
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.content == second.content
    assert "public" not in first.headers["cache-control"]
    headers = [{*answer.headers.multi_items()} for answer in (first, second)]
    assert {item for item in headers[0] ^ headers[1] if item[0] not in OWN} == set()


async def test_a_rank_that_the_plan_does_not_have_is_not_found(service: Service) -> None:
    plan_id = await service.import_plan()
    assert (await service.http.get(f"/v1/plans/{plan_id}/ranks/1")).status_code == 200, "now it is cached"
    for wrong in ("2", "-1", "01", "x", "1/"):
        answer = await service.http.get(f"/v1/plans/{plan_id}/ranks/{wrong}")
        assert answer.status_code == (422 if wrong == "x" else 200 if wrong == "01" else 404), wrong
        assert wrong != "2" or "ranks 0 to 1" in answer.json()["detail"]


async def test_the_fast_path_requires_a_token(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("immediate", auth="tokens") as service:
        tokens = {scope: await add(service, scope, name=scope) for scope in SCOPES}
        plan = await service.http.post("/v1/plans", json=PLAN, headers=tokens["search"])
        path = f"/v1/plans/{plan.json()['plan_id']}/ranks/0"
        assert (await service.http.get(path, headers=tokens["read"])).status_code == 200
        short = fast_fetches(service, monkeypatch)
        for scope in ("read", "agent"):
            assert (await service.http.get(path, headers=tokens[scope])).status_code == 200
        refused = await service.http.get(path, headers=tokens["launch"])
        assert (refused.status_code, refused.json()["type"]) == (403, "/errors/insufficient-scope")
        unknown = await service.http.get(path)
        assert (unknown.status_code, unknown.json()["type"]) == (401, "/errors/unauthenticated")
        assert unknown.headers["www-authenticate"].startswith("Bearer")
        assert unknown.json()["request_id"] == unknown.headers["x-request-id"]
        assert short == [0] * 4
