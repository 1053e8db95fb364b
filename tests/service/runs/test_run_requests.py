"""Requests for runs and agents: each mistake is named at its place, and nothing is stored."""

from __future__ import annotations

import re
from typing import Any

from support.serving import MODEL, PROBLEM, Service

SCRIPT = {"path": "/shared/train.py", "arguments": ["--lr", "0.1"]}
OF_MODEL: dict[str, Any] = {"model": MODEL, "nodes": 2, "steps": 5}
OF_PROBLEM: dict[str, Any] = {**OF_MODEL, "plan_id": None, "problem": PROBLEM}
OF_SCRIPT: dict[str, Any] = {"model": None, "script": SCRIPT, "nodes": 2, "steps": None, "options": {}}
CHECKPOINT = {"directory": "/a", "every": 1}
Wrong = tuple[dict[str, Any], dict[str, Any], str]
WRONG: list[Wrong] = [
    *(
        (OF_MODEL, changes, pointer)
        for changes, pointer in (
            ({"plan_id": "0" * 64}, "/plan_id"),
            ({"plan_id": "x"}, "/plan_id"),
            ({"nodes": 3}, "/nodes"),
            ({"nodes": 0}, "/nodes"),
            ({"steps": 2**40}, "/steps"),
            ({"steps": None}, "/steps"),
            ({"model": {"factory": "no colon"}}, "/model/factory"),
            ({"model": {"factory": "a:b", "seed": -1}}, "/model/seed"),
            ({"extra": 1}, "/extra"),
            ({"problem": PROBLEM}, "/plan_id"),
        )
    ),
    *(
        (OF_PROBLEM, changes, pointer)
        for changes, pointer in (
            ({"problem": None}, "/plan_id"),
            ({"problem": {**PROBLEM, "microbatches": 0}}, "/problem/microbatches"),
            ({"problem": {**PROBLEM, "costs": {**PROBLEM["costs"], "p2p": [1]}}}, "/problem/costs/p2p"),
            ({"search_options": {"effort": "lazy"}}, "/search_options/effort"),
            ({"search_options": {"time_limit": 1e9}}, "/search_options/time_limit"),
            ({"nodes": 3}, "/nodes"),
        )
    ),
    *(
        (OF_SCRIPT, changes, pointer)
        for changes, pointer in (
            ({"script": None}, "/model: found neither; give exactly one of model and script"),
            ({"model": MODEL}, "/script: found both"),
            ({"script": {"path": "train.py"}}, "/script/path"),
            ({"script": {"path": "/a/../b.py"}}, "/script/path: found '..'"),
            ({"script": {"path": "/b.py", "arguments": ["\0"]}}, "/script/arguments/0: .*NUL"),
            (
                {"script": {"path": "/b.py", "arguments": ["x" * 17_000]}},
                "/script/arguments: .*must be at most",
            ),
            ({"steps": 5}, "/steps: found 5; it has no effect on a script"),
            ({"options": {"checkpoint": CHECKPOINT}}, "/options/checkpoint: .*which decides that by itself"),
            ({"options": {"replan": "auto"}}, "/options/replan: .*has no effect on a script"),
        )
    ),
    *(
        (OF_MODEL, {"options": options}, f"/options/{pointer}")
        for options, pointer in (
            ({"backend": "mpi"}, "backend"),
            ({"data_parallel": 0}, "data_parallel"),
            ({"startup_timeout": 0}, "startup_timeout"),
            ({"compile": "yes"}, "compile"),
            ({"precision": "float8"}, "precision"),
            ({"clip_norm": 0}, "clip_norm"),
            ({"accumulate": 0}, "accumulate"),
            ({"evaluate_every": 0}, "evaluate_every"),
            ({"checkpoint": {"directory": "/a"}}, "checkpoint/every"),
            ({"checkpoint": {**CHECKPOINT, "keep": 2}}, "checkpoint/keep"),
            (
                {"checkpoint": {**CHECKPOINT, "directory": "ck"}},
                "checkpoint/directory: .*must be an absolute path, .* such as /shared/ck",
            ),
            (
                {"checkpoint": {**CHECKPOINT, "directory": "/shared/../etc"}},
                r"checkpoint/directory: .*must not contain '\.\.'",
            ),
            ({"retries": 101}, "retries"),
            ({"retries": -1}, "retries"),
            ({"replan": "yes"}, "replan"),
            ({"replan_threshold": 0}, "replan_threshold"),
            ({"replicas": 2}, "replicas"),
        )
    ),
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
    for argument in (
        *("1e999", '"\\ud800"', '"\\u0000"', '{"\\udfff": 1}', '{"\\\\\\u0000": 1}'),
        "[" * 32 + "]" * 32,
    ):
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
