"""Searches for layouts: they end as the solver says, and survive what other searches do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.executor_layouts import LONE
from support.executor_layouts import MODEL as DENSE
from support.fake_kinds import BOUND, COUNTS, ranking
from support.fake_searches import Listener
from support.measured_profiles import as_estimated
from support.serving import Service, Serving
from zbv_models.layouts import executor_search
from zbv_models.layouts.answer import ranking_json
from zbv_models.layouts.search import best_layouts
from zbv_service.documents import layouts as layout_documents
from zbv_service.documents.layouts import LayoutRequest, count_layouts, new_layout_search, read_layouts
from zbv_service.documents.problems import unpack
from zbv_service.records.searches import Claim, Outcome
from zbv_service.searches.kinds import rank_layouts
from zbv_service.settings import Settings
from zbv_solver.errors import InvalidInput
from zbv_solver.search.options import SearchOptions

SMALL: dict[str, Any] = {
    "model": {"presets": ["llama-3.1-8b"]},
    "cluster": {"nodes": 1, "gpus_per_node": 8, "device": "h100"},
    "global_batch": 8,
    "fixed": {"zero_stage": 1, "context_parallel": 1},
    "top": 2,
}
TINY = {
    **{**SMALL, "fixed": {"pipeline_parallel": 2}, "global_batch": 4, "top": 1},
    "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h200"},
}
LONG = {**SMALL, "fixed": {}, "top": 20}
"""Plans many layouts after the first one."""


async def submitted(service: Service, body: dict[str, Any] = SMALL) -> str:
    answer = await service.http.post("/v1/layouts", json=body)
    assert answer.status_code == 202, answer.text
    search_id: str = answer.json()["id"]
    assert answer.headers["Location"] == f"/v1/searches/{search_id}"
    return search_id


def has_layout(search: dict[str, Any]) -> bool:
    return search["state"] == "running" and search["objective"] is not None


async def test_a_search_ends_with_answer_plans_and_events(serving: Serving, any_database_url: str) -> None:
    async with serving("honest", database=any_database_url) as service:
        search_id = await submitted(service)
        found = await service.ended(search_id)
        events = await service.events_of_search(search_id)
        plans = [await service.get(f"/v1/plans/{each['plan_id']}") for each in found["answer"]["layouts"]]
        again = await service.http.post("/v1/layouts", json=SMALL)
        assert (again.status_code, again.json()["id"]) == (200, search_id)
        other = await service.http.post("/v1/layouts", json={**SMALL, "top": 1})
        assert other.json()["id"] != search_id
        asked = LayoutRequest.model_validate(await service.get(f"/v1/searches/{search_id}/problem"))
    assert asked == LayoutRequest.model_validate(SMALL)
    ids = [plan["plan_id"] for plan in plans]
    assert found["answer"] == unpack(ranking(2).answer or b"")
    assert [layout["plan_id"] for layout in found["answer"]["layouts"]] == ids
    assert (found["kind"], found["plan_id"], found["objective"]) == ("layouts", ids[0], 8.0)
    assert (found["lower_bound"], found["progress"]) == (BOUND, COUNTS)
    assert found["summary"] == {
        **{"model": "llama-3.1-8b", "device": "h100", "devices": 8, "global_batch": 8},
        **{"sequence_length": 8192, "layouts": len(read_layouts(asked).layouts)},
    }
    assert [event["event"] for event in events] == ["state", "state", "improvement", "end"]
    end = {"event": "end", "state": "done", "plan_id": ids[0], "progress": COUNTS}
    assert {key: events[-1][key] for key in end} == end


async def test_a_killed_process_and_a_restart_begin_the_search_again_and_cancelling_keeps_what_it_planned(
    serving: Serving,
) -> None:
    async with serving("held") as service:
        search_id = await submitted(service, LONG)
        await service.until(search_id, has_layout)
        (attempt,) = service.app.state.application.runner._attempts
        attempt.computation.kill()
        await service.until(search_id, lambda found: found["attempts"] == 2 and has_layout(found))
    async with serving("held") as service:
        before = await service.until(search_id, has_layout)
        assert (await service.cancel(search_id)).status_code == 202
        found = await service.ended(search_id)
    assert (before["objective"], before["progress"]["planned"]) == (9.0, 1)
    assert (found["state"], found["attempts"], found["lower_bound"]) == ("cancelled", 3, BOUND)
    assert found["answer"] == unpack(ranking(1).answer or b"")


def ranked(body: dict[str, Any], listener: Listener | None = None) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a request in this process, and its answer."""
    new = new_layout_search(Settings(), body)
    claim = Claim("a", 1, new.problem, {**new.options, "workers": 1}, None, 1, False, "layouts")
    outcome = rank_layouts(claim, listener or Listener())
    return outcome, unpack(outcome.answer or b"")


@pytest.mark.parametrize("executor", ["zbv", "any"])
def test_a_time_limit_counts_from_the_start_also_before_the_first_layout(executor: str) -> None:
    """The large cluster has a million layouts, whose bounds take a minute."""
    large = {
        "model": {"presets": ["deepseek-v3" if executor == "zbv" else "llama-3.1-405b"]},
        "cluster": {"nodes": 256, "gpus_per_node": 8, "device": "h100"},
        **{"global_batch": 15360 if executor == "zbv" else 2048, "sequence_length": 4096},
        **{"executor": executor, "top": 20},
    }
    for options, listener in (({"time_limit": 0.3}, Listener()), ({}, Listener(stops=True))):
        outcome, answer = ranked({**large, "options": options}, listener)
        assert (outcome.plans, outcome.objective, answer["layouts"]) == ((), None, [])
        assert outcome.lower_bound == 0, "nothing is known about layouts that were not enumerated"


async def test_a_search_that_planned_nothing_in_its_time_fails(serving: Serving, directory: Path) -> None:
    (directory / "unplanned").touch()
    async with serving("held") as service:
        search_id = await submitted(service, {**SMALL, "options": {"time_limit": 0.3}})
        found = await service.ended(search_id)
    assert (found["attempts"], found["cancel_requested"], found["objective"]) == (1, False, None)
    assert found["error"]["type"] == "/errors/time-limit"
    assert "0.3 s" in found["error"]["detail"]


async def test_too_many_layouts_are_refused_with_the_ways_to_have_fewer(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = LayoutRequest.model_validate(SMALL)
    counted, listed = read_layouts(asked).layouts, asked.model_copy(update={"points": True})
    for name, request in (("MOST_LAYOUTS", asked), ("MOST_LISTED", listed)):
        with monkeypatch.context() as changed:
            changed.setattr(layout_documents, name, len(counted) - 1)
            with pytest.raises(InvalidInput) as caught:
                count_layouts(request, read_layouts(request))
        detail = caught.value.issues[0].detail
        assert f"more than {len(counted) - 1} layouts" in detail
        assert "tensor_parallel" in detail
        assert "zero_stage" not in detail, "it is fixed already"
        assert count_layouts(request, read_layouts(request)) == len(counted)


def test_the_answer_is_that_of_the_solver() -> None:
    outcome, answer = ranked(TINY)
    request = read_layouts(LayoutRequest.model_validate(TINY))
    best = best_layouts(request.layouts, request.setting, 1)
    expected = ranking_json(best, request, with_plans=False)
    for layout, planned in zip(expected["layouts"], best.best, strict=True):
        layout["plan_id"] = planned.plan.plan_id
    assert answer == expected
    assert (outcome.objective, outcome.lower_bound) == (best.best[0].step_time, best.no_layout_below)
    counts = {"considered": len(request.layouts), "ruled_out": best.pruned, "planned": best.planned}
    assert outcome.progress == counts
    names = [baseline["name"] for baseline in unpack(outcome.plans[0].document)["baselines"]]
    assert "even-cut" not in names, "without an effort, orders are constructed alone"


def test_an_executor_and_an_effort_reach_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def known(layouts: Any, setting: Any, *more: Any, **named: Any) -> Any:
        given.extend([*more, named["workers"]])
        return best_layouts(read_layouts(LayoutRequest.model_validate(TINY)).layouts, setting, 1)

    monkeypatch.setattr(executor_search, "executor_layouts", known)
    ranked({**TINY, "executor": "torch", "options": {"effort": "quick"}})
    executor, top, options, _ends, _report, workers = given
    assert (executor, top, options, workers) == ("torch", 1, SearchOptions("quick", workers=1), 1)


async def test_a_model_that_fits_nowhere_is_infeasible(honest: Service) -> None:
    body = {**SMALL, "cluster": {**SMALL["cluster"], "memory": 2e9}}
    found = await honest.ended(await submitted(honest, body))
    assert "no layout fits" in found["error"]["detail"]
    assert (found["answer"], found["lower_bound"], found["progress"]) == (None, None, None)


async def test_searches_of_all_kinds_are_one_list(serving: Serving) -> None:
    async with serving("honest", searches=1) as service:
        layouts, plan = await submitted(service), (await service.submit()).json()["id"]
        for query, expected in (
            ("", [plan, layouts]),
            ("?kind=layouts", [layouts]),
            ("?kind=plan", [plan]),
            ("?pp_degree=2", [plan]),
            (f"?q={layouts[:12]}", [layouts]),
        ):
            listed = (await service.get(f"/v1/searches{query}"))["searches"]
            assert [each["id"] for each in listed] == expected, query
        assert [each["kind"] for each in await service.listed("searches")] == ["plan", "layouts"]
        for page, other in (("searches", layouts), ("layouts", plan)):
            assert (await service.http.get(f"/{page}/{other}")).status_code == 404
            listed_page = await service.http.get(f"/{page}")
            assert listed_page.status_code == 200
            assert other not in listed_page.text
        assert (await service.http.delete(f"/v1/searches/{layouts}")).status_code == 204
        assert (await service.http.get(f"/v1/searches/{layouts}")).status_code == 404


CLUSTER, MODEL = SMALL["cluster"], SMALL["model"]
SELECTIVE = {**SMALL, "executor": "megatron", "fixed": {"recompute": "selective"}}
PROFILE = as_estimated()
RENAMED = [*PROFILE["layers"]]
RENAMED[1] = {**RENAMED[1], "name": "none"}
# Each from another place; the OpenAPI document, which a test compares, has the limits of single fields.
WRONG: list[tuple[Any, str]] = [
    ([], ""),
    ({**SMALL, "model": {}}, "/model/model"),
    ({**SMALL, "model": {**MODEL, "global_batch": 0}, "global_batch": None}, "/model/global_batch"),
    ({**SMALL, "model": {**MODEL, "global_batch": 10**9}, "global_batch": None}, "/model/global_batch"),
    ({**SMALL, "global_batch": None}, "/global_batch"),
    ({**SMALL, "sequence_length": 10**12}, "/sequence_length"),
    ({**SMALL, "cluster": {**CLUSTER, "nodes": 10**5}}, "/cluster"),
    ({**SMALL, "cluster": {**CLUSTER, "nodes": 10**6}}, "/cluster/nodes"),
    ({**SMALL, "fixed": {"tensor_parallel": 3}}, "/fixed"),
    ({**SMALL, "model": {"model_type": "llama"}, "sequence_length": None}, "/sequence_length"),
    ({**SMALL, "frozen": ["all"]}, "/frozen"),
    ({**SMALL, "executor": "torchtitan", "optimizer": "muon"}, "/executor"),
    ({**SMALL, "executor": "torch", "cluster": {"groups": [SMALL["cluster"]] * 2}}, "/executor"),
    ({**SMALL, "executor": "any", "sensitivity": True}, "/sensitivity"),
    ({**SMALL, "options": {"time_limit": 1e9}}, "/options/time_limit"),
    ({**SELECTIVE, "recompute_modules": ["moe"]}, "/recompute_modules"),
    ({**SELECTIVE, "model": {**MODEL, "parallel": {"recompute_modules": ["moe"]}}},
     "/model/parallel/recompute_modules"),
    ({**SMALL, "profiles": [{"layouts": []}]}, "/profiles/0"),
    ({**SMALL, "profiles": [{**PROFILE, "layers": RENAMED}]}, "/profiles/0/layers/1/name"),
    ({**SMALL, "profiles": [PROFILE] * 2}, "/profiles/1/profile"),
]  # fmt: skip


async def test_a_wrong_request_is_refused_at_the_place_of_the_mistake(honest: Service) -> None:
    for body, pointer in WRONG:
        answer = await honest.http.post("/v1/layouts", json=body)
        assert answer.status_code == 422, (body, answer.text)
        pointers = [each["pointer"] for each in answer.json()["errors"]]
        assert pointer in pointers, (body, answer.text)
    headers = {"Content-Type": "application/json"}
    assert (await honest.http.post("/v1/layouts", content=b"{", headers=headers)).status_code == 400
    assert (await honest.get("/v1/searches"))["searches"] == []


async def test_the_page_says_what_copies_save(serving: Serving) -> None:
    nodes = {"nodes": 1, "gpus_per_node": 4, "memory": 1.9e9, "allocator_share": 1, "host_memory": 8e9}
    rates = {"achieved_tflops": 300, "memory_bandwidth": 1500, "host_bandwidth": 200}
    links = {"in_node": {"latency": 10, "bandwidth": 300}, "between_nodes": {"latency": 20, "bandwidth": 25}}
    body = {
        "model": {"model": {**DENSE, "layers": 16, "vocabulary": 1000}},
        "cluster": {**nodes, "device": rates, "links": links},
        "global_batch": 32,
        "copies": "activations",
        "fixed": {**LONE, "pipeline_parallel": 4, "recompute": "none"},
    }
    async with serving("solver") as service:
        search_id = await submitted(service, body)
        (layout,) = (await service.ended(search_id))["answer"]["layouts"]
        page = (await service.http.get(f"/layouts/{search_id}", headers={"Accept": "text/html"})).text
    copies = layout["copies"]
    assert copies["step_time_without"] > layout["step_time"]
    assert f"{copies['copied']} of {copies['forwards']} forwards are copied to the host" in page
    assert "Without copies its step takes" in page


async def test_the_page_says_what_the_answer_leaves_out(serving: Serving) -> None:
    """Quantized weights of the file have no effect, and settings do not add adapters."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1024}
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    body = {
        **{**TINY, "sequence_length": 256, "executor": "megatron", "lora_rank": 4},
        "model": {"model_type": "llama", **sizes, "num_hidden_layers": 4, **quantized},
        "fixed": {"pipeline_parallel": 2, "microbatch_size": 1},
    }
    async with serving("solver") as service:
        search_id = await submitted(service, body)
        (layout,) = (await service.ended(search_id))["answer"]["layouts"]
        page = (await service.http.get(f"/layouts/{search_id}", headers={"Accept": "text/html"})).text
    assert "weights in fp8, which has no effect" in page
    assert "--pipeline-model-parallel-size 2" in layout["settings"]
    assert layout["remark"] in page
    assert "Megatron-Bridge" in layout["remark"]
