"""A failed run is retried with any free agents, a limited number of times, unless it would fail again."""

from __future__ import annotations

from support.serving import Service

KILLED = {"kind": "killed", "rank": 1, "detail": "rank 1 was killed"}


async def kinds(service: Service, run_id: str) -> list[str]:
    return [event["kind"] for event in await service.events_of_run(run_id)]


async def fail(service: Service, run_id: str, first: str, second: str, generation: int) -> None:
    await service.end_node(second, run_id, "failed", KILLED, generation=generation)
    assert (await service.beat(first, run_id))["cause"] == "failed"
    await service.end_node(first, run_id, "stopped", generation=generation)


async def test_a_failed_generation_is_retried_until_retries_are_used_up(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=2)
    for generation in range(2):
        await fail(service, run_id, first, second, generation)
        for agent in (first, second):
            found = await service.work(agent)
            assert (found["run_id"], found["generation"]) == (run_id, generation + 1)
        assert not (await service.beat(first, run_id))["stop"]
    await fail(service, run_id, first, second, 2)
    ended = await service.run(run_id)
    assert (ended["state"], ended["generation"]) == ("failed", 2)
    assert ended["error"]["detail"] == "rank 1 was killed"
    once = ["starting", "failure"]
    assert await kinds(service, run_id) == ["waiting", *once, "retry", *once, "retry", *once, "failed"]
    retries = [event["detail"] for event in await service.events_of_run(run_id) if event["kind"] == "retry"]
    assert retries == [f"retry {n} of 2 after: rank 1 was killed" for n in (1, 2)]


async def test_a_late_report_of_an_earlier_generation_is_ignored(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=1)
    await fail(service, run_id, first, second, 0)
    for agent in (first, second):
        await service.work(agent)
    await service.end_node(second, run_id, "failed", KILLED, generation=0)
    found = await service.run(run_id)
    assert (found["state"], found["generation"]) == ("starting", 1)
    assert [node["state"] for node in found["members"]] == ["assigned", "assigned"]


async def test_invalid_input_is_not_retried(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=5)
    gone = {"kind": "peer", "rank": 0, "action": "3F1", "peer": 1, "detail": "rank 1 is gone"}
    await service.end_node(first, run_id, "failed", gone)
    assert (await service.run(run_id))["state"] == "starting", "the other node may report the cause"
    await service.end_node(second, run_id, "failed", {"kind": "invalid", "rank": 1, "detail": "wrong"})
    found = await service.run(run_id)
    assert (found["state"], found["generation"], found["error"]["detail"]) == ("failed", 0, "wrong")
    assert found["error"]["type"] == "/errors/run-failed"
    causes = [(failure["agent"], failure["peer"]) for failure in found["error"]["failures"]]
    assert causes == [("host-b", None), ("host-a", 1)]


async def test_a_refused_run_waits_for_another_agent_without_using_a_retry(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=0)
    refusal = {"kind": "refused", "detail": "agent host-b does not load model a.b:c."}
    await service.end_node(second, run_id, "failed", refusal)
    assert (await service.beat(first, run_id))["cause"] == "failed"
    await service.end_node(first, run_id, "stopped")
    found = await service.until_run(run_id, lambda run: run["waits_for"])
    assert (found["state"], found["generation"], found["failures"]) == ("waiting", 1, [])
    assert [(each["agent"], each["message"]) for each in found["refusals"]] == [("host-b", refusal["detail"])]
    assert "1 of 2 agents can take it, 1 having refused it" in found["waits_for"]
    third = await service.register("c")
    assert {(await service.work(agent))["generation"] for agent in (first, third)} == {1}
    # The refusal did not count as a retry; this run has none.
    await service.end_node(first, run_id, "failed", KILLED, generation=1)
    await service.end_node(third, run_id, "stopped", generation=1)
    found = await service.run(run_id)
    assert (found["state"], found["waits_for"], len(found["failures"])) == ("failed", None, 1)


async def test_a_run_is_assigned_only_to_agents_that_allow_it(service: Service) -> None:
    closed = [await service.register(digit, allows={}, slots=2) for digit in "ab"]
    allows = {"models": ["a.*"], "checkpoint_directories": ["/elsewhere"]}
    await service.register("c", allows=allows, slots=2)
    checkpoint = {"directory": "/data/run", "every": 5}
    run_id = (await service.submit_run(nodes=1, options={"checkpoint": checkpoint})).json()["id"]
    found = await service.until_run(run_id, lambda run: run["waits_for"])
    assert "0 of 3 agents can take it, 2 not allowing the model, 1 not" in found["waits_for"]
    fitting = await service.register("d", allows={**allows, "checkpoint_directories": ["/data"]}, slots=2)
    assert (await service.work(fitting))["run_id"] == run_id
    for agent in closed:
        assert (await service.get(f"/v1/agents/{agent}"))["run_id"] is None
    shown = await service.get(f"/v1/agents/{fitting}")
    assert (shown["allowed_models"], shown["checkpoint_directories"]) == (["a.*"], ["/data"])


async def test_the_cause_of_each_failed_generation_is_kept(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=3)
    await service.beat(second, run_id, 7)
    hang = {"rank": 0, "peer": 1, "detail": "no answer for 20 s"}
    await service.end_node(second, run_id, "failed", {"kind": "peer", **hang})
    await service.end_node(first, run_id, "failed", {"kind": "peer", "rank": 1, "detail": "d"})
    for agent in (first, second):
        await service.work(agent)
    without_step = {"kind": "error", "rank": 0, "detail": "rank 0: a thread ended"}
    error = {"kind": "error", "rank": 1, "step": 9, "action": "1B2", "detail": "out of memory"}
    await service.end_node(first, run_id, "failed", without_step, error, generation=1)
    await service.end_node(second, run_id, "stopped", generation=1)
    for agent in (first, second):
        await service.work(agent)
        await service.end_node(agent, run_id, "succeeded", generation=2)
    found = await service.run(run_id)
    assert (found["state"], found["error"]) == ("succeeded", None)
    named = ("generation", "kind", "agent", "rank", "step", "action", "peer", "last_step", "message")
    assert [tuple(cause[name] for name in named) for cause in found["failures"]] == [
        (0, "peer", "host-a", 1, None, None, None, None, "d"),
        (1, "error", "host-a", 1, 9, "1B2", None, None, "out of memory"),
    ]
    told = [event["detail"] for event in await service.events_of_run(run_id) if event["kind"] == "failure"]
    assert told == [
        "node 1 (host-b), rank 0, last reported step 7, at 3F1, waiting for rank 1: no answer for 20 s",
        "node 0 (host-a), rank 1: d",
        "node 0 (host-a), rank 0: a thread ended",
        "node 0 (host-a), rank 1, step 9, at 1B2: out of memory",
    ]


async def test_a_cancelled_run_is_not_retried(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=5)
    await service.http.post(f"/v1/runs/{run_id}/cancel")
    await service.end_node(first, run_id, "failed", KILLED)
    await service.end_node(second, run_id, "stopped")
    assert (await service.run(run_id))["state"] == "cancelled"
    told = [event["kind"] for event in await service.events_of_run(run_id)]
    assert "failure" not in told, "ranks that are stopped may lose their peers"
