"""Requests for runs and agents: each mistake is named at its place, and nothing is stored."""

from __future__ import annotations

import re
from typing import Any

from support.serving import MODEL, PROBLEM, Service, Serving
from support.tokens import add

SCRIPT = {"path": "/shared/train.py", "arguments": ["--lr", "0.1"]}
OF_MODEL: dict[str, Any] = {"model": MODEL, "nodes": 2, "steps": 5}
OF_PROBLEM: dict[str, Any] = {**OF_MODEL, "plan_id": None, "problem": PROBLEM}
OF_SCRIPT: dict[str, Any] = {"model": None, "script": SCRIPT, "nodes": 2, "steps": None, "options": {}}
DIRECTORY = "/options/checkpoint/directory"


def in_directory(directory: str) -> dict[str, Any]:
    return {"options": {"checkpoint": {"directory": directory, "every": 1}}}


Wrong = tuple[dict[str, Any], dict[str, Any], str]
# The OpenAPI document, which a test compares, states most limits of single fields; here are the other rules.
WRONG: list[Wrong] = [
    (OF_MODEL, {"plan_id": "0" * 64}, "/plan_id"),
    (OF_MODEL, {"steps": None}, "/steps"),
    (OF_MODEL, {"extra": 1}, "/extra"),
    (OF_MODEL, {"problem": PROBLEM}, "/plan_id"),
    (OF_MODEL, {"options": {"backend": "mpi"}}, "/options/backend"),
    (OF_MODEL, {"options": {"replicas": 2}}, "/options/replicas"),
    (OF_MODEL, {"options": {"checkpoint": {"directory": "/a"}}}, "/options/checkpoint/every"),
    (OF_MODEL, in_directory("ck"), f"{DIRECTORY}: .*must be an absolute path, .* such as /shared/ck"),
    (OF_MODEL, in_directory("/shared/../etc"), rf"{DIRECTORY}: .*must not contain '\.\.'"),
    (OF_PROBLEM, {"problem": None}, "/plan_id"),
    (OF_PROBLEM, {"problem": {**PROBLEM, "microbatches": 0}}, "/problem/microbatches"),
    (OF_PROBLEM, {"problem": {**PROBLEM, "costs": {**PROBLEM["costs"], "p2p": [1]}}}, "/problem/costs/p2p"),
    (OF_PROBLEM, {"search_options": {"time_limit": 1e9}}, "/search_options/time_limit"),
    (OF_PROBLEM, {"nodes": 3}, "/nodes"),
    (OF_SCRIPT, {"script": None}, "/model: found neither; give exactly one of model and script"),
    (OF_SCRIPT, {"model": MODEL}, "/script: found both"),
    (OF_SCRIPT, {"script": {"path": "train.py"}}, "/script/path"),
    (OF_SCRIPT, {"script": {"path": "/a/../b.py"}}, "/script/path: found '..'"),
    (OF_SCRIPT, {"script": {"path": "/b.py", "arguments": ["\0"]}}, "/script/arguments/0: .*NUL"),
    (
        OF_SCRIPT,
        {"script": {"path": "/b.py", "arguments": ["x" * 17_000]}},
        "/script/arguments: .*be at most",
    ),
    (OF_SCRIPT, {"steps": 5}, "/steps: found 5; it has no effect on a script"),
    (OF_SCRIPT, in_directory("/a"), "/options/checkpoint: .*which decides that by itself"),
    (OF_SCRIPT, {"options": {"replan": "auto"}}, "/options/replan: .*has no effect on a script"),
]


async def test_a_wrong_run_is_refused_with_a_pointer_and_stores_nothing(service: Service) -> None:
    plan_id = await service.import_plan()
    for base, changes, expected in WRONG:
        answer = await service.submit_run(**{"plan_id": plan_id, **base, **changes})
        assert answer.status_code == 422, (changes, answer.text)
        (issue,) = answer.json()["errors"]
        pointer, _, detail = expected.partition(": ")
        assert issue["pointer"] == pointer, changes
        assert re.match(detail, issue["detail"]), issue
    assert [await service.listed(kind) for kind in ("runs", "searches")] == [[], []]


async def test_arguments_that_responses_cannot_contain_are_refused(service: Service) -> None:
    plan_id = await service.import_plan()
    start = f'{{"plan_id": "{plan_id}", "nodes": 1, "steps": 1, "model": {{"factory": "a:b", '
    nested = "[" * 32 + "]" * 32
    for argument in ("1e999", '"\\ud800"', '"\\u0000"', '{"\\udfff": 1}', '{"\\\\\\u0000": 1}', nested):
        content = f'{start}"arguments": {{"x": {argument}}}}}}}'
        headers = {"content-type": "application/json"}
        answer = await service.http.post("/v1/runs", content=content, headers=headers)
        assert answer.status_code == 422, argument
        assert answer.json()["errors"][0]["pointer"].startswith("/model/arguments"), argument


async def test_arguments_at_every_limit_are_shown_everywhere(service: Service) -> None:
    nested: Any = "\\u0000 é 😀 " + "x" * 16_000
    for _ in range(32):
        nested = {"a": nested}
    answer = await service.submit_run(model={"factory": "a.b:c", "arguments": nested})
    assert answer.status_code == 202, answer.text
    for path in ("/v1/runs", "/runs", f"/runs/{answer.json()['id']}"):
        assert (await service.http.get(path)).status_code == 200, path


async def test_an_agent_says_little_because_every_look_for_agents_reads_it(service: Service) -> None:
    body = {"id": "a" * 32, "name": "host", "address": "10.0.0.1", "port": 29500, "slots": 1}
    directories = ["/" + "x" * 3999] * 3
    for more, said in (
        ({"allows": {"models": ["x" * 199] * 50}}, "patterns and directories have 9950 characters"),
        ({"allows": {"checkpoint_directories": directories}}, "have 12000 characters"),
        ({"devices": ["x" * 200] * 200}, "devices and versions have 40000 characters"),
    ):
        answer = await service.http.post("/v1/agents", json={**body, **more})
        assert answer.status_code == 422
        assert said in answer.json()["errors"][0]["detail"]


async def test_replicas_multiply_the_ranks(service: Service) -> None:
    answer = await service.submit_run(nodes=3, options={"data_parallel": 3})
    assert (answer.status_code, answer.json()["ranks_per_node"]) == (202, 2)
    refused = await service.submit_run(nodes=4, options={"data_parallel": 3})
    assert refused.json()["errors"][0]["pointer"] == "/nodes"
    assert "2 ranks of a pipeline times 3 replicas" in refused.json()["errors"][0]["detail"]


async def test_options_reach_agents_with_their_defaults(service: Service) -> None:
    options = {
        **{"precision": "bfloat16", "clip_norm": 1.0, "evaluate_every": 10, "compile": True, "shard": True},
        **{"startup_timeout": 900.0, "replan": "ask"},
        "checkpoint": {"directory": "/shared/run", "every": 5, "timeout": 60.0, "sync": True},
    }
    defaults = {
        **{"backend": "gloo", "timeout": 120.0, "threads": None, "data_parallel": 1, "accumulate": 1},
        **{"main_gradients": True, "non_finite": "fail", "retries": 3, "replan_threshold": 0.05},
    }
    agent = await service.register("a", slots=2)
    await service.submit_run(nodes=1, options=options)
    assert (await service.work(agent))["options"] == {**options, **defaults}


# --- the header Idempotency-Key

KEY = "8e03978e-40d5-43dd-bc93-6894a57f9324"


async def keyed(service: Service, key: str | None = KEY, **more: Any) -> tuple[int, str, str]:
    """Submit a run with a key: the status, the id of the run, and the type of the error."""
    body = {"plan_id": await service.import_plan(), "model": MODEL, "nodes": 2, "steps": 5, **more}
    headers = [] if key is None else [(b"Idempotency-Key", key.encode())]
    answer = await service.http.post("/v1/runs", json=body, headers=headers)
    found = answer.json()
    return answer.status_code, found.get("id", ""), found.get("type", "").removeprefix("/errors/")


async def test_a_repeated_request_does_not_start_a_second_run(serving: Serving) -> None:
    async with serving("immediate") as service:
        status, run_id, _ = await keyed(service)
        await service.http.post(f"/v1/runs/{run_id}/cancel")
        assert await keyed(service, f'"{KEY}"') == (status, run_id, "") == (202, run_id, "")
        assert await keyed(service, steps=6) == (422, "", "invalid-parameter")
        assert [run["id"] for run in await service.listed("runs")] == [run_id]
        assert await keyed(service, None, id="d" * 32) == (422, "", "invalid-body"), "the service chooses it"
        assert (await keyed(service, None))[1] != run_id, "without a key, it is another run"
    async with serving("immediate") as service:
        assert (await keyed(service))[1] == run_id, "the key survives a restart"


async def test_a_key_is_visible_text_of_up_to_255_characters_and_a_refused_run_does_not_use_it_up(
    service: Service,
) -> None:
    assert (await keyed(service, "a" * 255))[0] == 202
    for key in ("", "two words", "a" * 256, "\u00e9"):
        assert await keyed(service, key) == (422, "", "invalid-parameter"), key
    assert await keyed(service, nodes=3) == (422, "", "invalid-body")
    assert (await keyed(service))[0] == 202


async def test_each_token_has_its_own_keys(serving: Serving) -> None:
    async with serving("immediate", auth="tokens") as service:
        ids = []
        for name in ("one", "two"):
            service.http.headers.update(await add(service, "admin", name=name))
            ids += [(await keyed(service))[1] for _ in range(2)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
