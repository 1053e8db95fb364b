"""Runs of a user's script: what is accepted, which agents get them, and what they show."""

from __future__ import annotations

from typing import Any

from support.serving import Service

SCRIPT = {"path": "/shared/train.py", "arguments": ["--lr", "0.1"]}


async def submit_script(service: Service, **more: Any) -> Any:
    body = {"plan_id": await service.import_plan(), "script": SCRIPT, "nodes": 2, "options": {"retries": 0}}
    return await service.http.post("/v1/runs", json={**body, **more})


async def beat(service: Service, agent: str, run_id: str) -> None:
    """The script has begun, and reports no step."""
    body = {"run_id": run_id, "ranks": [{"rank": 0}]}
    answer = await service.http.post(f"/v1/agents/{agent}/heartbeat", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_script_runs_on_agents_that_allow_it_and_reports_its_end(service: Service) -> None:
    answer = await submit_script(service)
    assert answer.status_code == 202, answer.text
    run_id = answer.json()["id"]
    for digit, scripts in (("a", ["/other/*"]), ("b", ["/shared/*"])):
        await service.register(digit, allows={"models": ["*"], "scripts": scripts})
    waiting = await service.until_run(run_id, lambda run: "1 of 2 agents" in (run["waits_for"] or ""))
    assert "each that allow script /shared/train.py" in waiting["waits_for"]
    assert "1 not allowing the script" in waiting["waits_for"]
    await service.register("c", allows={"models": [], "scripts": ["/shared/train.py"]})
    found = await service.work("b" * 32)
    assert (found["script"], found["model"], found["steps"]) == (SCRIPT, None, None)
    for agent in ("b" * 32, "c" * 32):
        await beat(service, agent, run_id)
    run = await service.run(run_id)
    assert (run["state"], run["script"], run["model"], run["steps"]) == ("running", SCRIPT, None, None)
    assert (await service.events_of_run(run_id))[-1]["detail"] == "every node has begun its script"
    seen = await service.words(f"/runs/{run_id}")
    assert "/shared/train.py, submitted" in seen
    assert "All ranks run the script." in seen
    assert "Scripts send losses if they make a Pipeline of the run's plan." in seen
    assert "Arguments --lr 0.1" in seen
    assert "Backend" not in seen
    for agent in ("b" * 32, "c" * 32):
        await service.end_node(agent, run_id, "succeeded")
    assert "The script ended without an error on all ranks." in await service.words(f"/runs/{run_id}")
    listed = await service.words("/runs?q=shared")
    assert "/shared/train.py" in listed
    assert "/shared/train.py" in await service.words("/agents")


WRONG: list[tuple[dict[str, Any], list[str], str]] = [
    ({"script": None}, ["/model"], "found neither; give exactly one of model and script"),
    ({"model": {"factory": "a.b:c"}}, ["/script"], "found both"),
    ({"script": {"path": "train.py"}}, ["/script/path"], ""),
    ({"script": {"path": "/a/../b.py"}}, ["/script/path"], "found '..'"),
    ({"script": {"path": "/b.py", "arguments": ["\0"]}}, ["/script/arguments/0"], "NUL"),
    ({"script": {"path": "/b.py", "arguments": ["x" * 17_000]}}, ["/script/arguments"], "must be at most"),
    ({"steps": 5}, ["/steps"], "found 5; it has no effect on a script"),
    (
        {"options": {"replan": "auto", "checkpoint": {"directory": "/c", "every": 1}, "threads": 2}},
        ["/options/checkpoint", "/options/replan"],
        "has no effect on a script, which decides that by itself",
    ),
]


async def test_a_wrong_run_of_a_script_is_refused_with_a_pointer(service: Service) -> None:
    for changes, pointers, detail in WRONG:
        answer = await submit_script(service, **changes)
        assert answer.status_code == 422, answer.text
        assert [entry["pointer"] for entry in answer.json()["errors"]] == pointers
        assert detail in answer.json()["errors"][0]["detail"]
    without_steps = await service.submit_run(steps=None)
    assert without_steps.json()["errors"][0]["pointer"] == "/steps"


async def test_a_script_keeps_its_plan(service: Service) -> None:
    run = (await submit_script(service)).json()
    answer = await service.http.post(f"/v1/runs/{run['id']}/plan", json={"plan_id": run["plan_id"]})
    assert answer.status_code == 409
    assert "runs a script, which keeps its plan" in answer.json()["detail"]


async def test_a_failed_script_starts_again_as_often_as_asked(service: Service) -> None:
    for digit in "ab":
        await service.register(digit, allows={"scripts": ["*"]})
    run_id = (await submit_script(service, options={"retries": 1})).json()["id"]
    failure = {"kind": "error", "rank": 1, "detail": "rank 1: train.py ended with exit status 3."}
    for generation in range(2):
        for agent in ("a" * 32, "b" * 32):
            assert (await service.work(agent))["generation"] == generation
        await service.end_node("b" * 32, run_id, "failed", failure, generation=generation)
        await service.end_node("a" * 32, run_id, "stopped", generation=generation)
    run = await service.run(run_id)
    assert (run["state"], run["generation"]) == ("failed", 1)
    assert "ended with exit status 3" in run["error"]["detail"]
    assert "ended with exit status 3" in await service.words(f"/runs/{run_id}")


async def test_runs_of_models_have_no_script(service: Service) -> None:
    run_id, agent, _ = await service.started_run()
    assert (await service.work(agent))["script"] is None
    assert (await service.run(run_id))["script"] is None
