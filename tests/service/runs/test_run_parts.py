"""Traces and logs: permissions, limits of size, and the merged trace."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from support.fake_searches import orders_of
from support.rank_traces import trace_documents
from support.serving import PROBLEM, Service, Serving
from zbv_service.database import PartTable
from zbv_service.runs.parts import MAX_LOG_BYTES, parse_traces
from zbv_solver.measure.rank_trace import RankTrace
from zbv_solver.problem.reading import parse_problem

PACKED = {"content-type": "application/json", "content-encoding": "gzip"}


def traces(steps: int = 1, **how: Any) -> list[dict[str, Any]]:
    problem = parse_problem(PROBLEM)
    return trace_documents(problem, orders_of(problem), steps=steps, **how)


async def put(
    service: Service, agent: str, run_id: str, rank: int, body: Any, kind: str = "trace", generation: int = 0
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    address = f"/v1/agents/{agent}/runs/{run_id}/generations/{generation}/ranks/{rank}/{kind}"
    return await service.http.put(address, content=gzip.compress(content), headers=PACKED)


async def test_the_newest_common_step_is_one_trace_on_the_clock_of_rank_0(service: Service) -> None:
    run_id, first, second = await service.started_run()
    shown = f"/v1/runs/{run_id}/trace"
    assert "agents send it" in (await service.http.get(shown)).json()["detail"]
    ahead = [0, 987_654_321]
    assert (await put(service, first, run_id, 0, traces(3, ahead=ahead)[0])).status_code == 204
    answer = await service.http.get(shown)
    assert (answer.status_code, answer.json()["detail"][:7]) == (404, "ranks 1")
    assert (await put(service, second, run_id, 1, traces(2, ahead=ahead)[1])).status_code == 204
    found = (await service.http.get(shown)).json()
    assert found["otherData"]["steps"] == [1]
    assert found["otherData"]["clock_uncertainty_us"] == 0.05
    actions = {event["name"]: event for event in found["traceEvents"] if event["ph"] == "X"}
    (one,) = traces(1)[1]["steps"]
    begin = min(row[1] for trace in traces(1) for row in trace["steps"][0]["actions"])
    for text, wait, start, ended, _ in one["actions"]:
        assert actions[text]["tid"] == 1
        assert actions[text]["ts"] == pytest.approx((start - begin) / 1e3)
        assert actions[text]["dur"] == pytest.approx((ended - start) / 1e3)
        assert (f"wait for the input of {text}" in actions) == (start > wait)


def not_finite(*steps: int, **more: Any) -> dict[str, Any]:
    events = [{"kind": "non_finite", "step": step, "what": "loss", "value": "nan"} for step in steps]
    return {"rank": 1, "events": events, **more}


async def test_each_non_finite_value_becomes_one_event(service: Service) -> None:
    run_id, first, second = await service.started_run()
    for steps in ((7,), (7, 8), (8, 9)):
        answer = await put(service, second, run_id, 1, not_finite(*steps), "events")
        assert answer.status_code == 204, answer.text
    found = (await service.get(f"/v1/runs/{run_id}/events"))["events"]
    noted = [event["detail"] for event in found if event["kind"] == "non_finite"]
    assert noted == [f"generation 0, rank 1, step {step}: the loss is nan" for step in (7, 8, 9)]
    wrong = {
        "other rank": (second, not_finite(1, rank=0), 422),
        "other kind": (second, {"rank": 1, "events": [{"kind": "failed", "step": 1}]}, 422),
        "too many": (second, not_finite(*range(101)), 422),
        "other agent": (first, not_finite(1), 404),
    }
    for name, (agent, body, status) in wrong.items():
        assert (await put(service, agent, run_id, 1, body, "events")).status_code == status, name


async def test_a_skipped_checkpoint_becomes_an_event(serving: Serving) -> None:
    skipped = {
        "kind": "checkpoint_skipped",
        "step": 30,
        "reason": "checkpoints in /c: No space left on device.",
    }
    async with serving("immediate") as service:
        run_id, _, second = await service.started_run()
        body = {"rank": 1, "events": [skipped, *not_finite(31)["events"]]}
        for _ in range(2):
            assert (await put(service, second, run_id, 1, body, "events")).status_code == 204
        found = (await service.get(f"/v1/runs/{run_id}/events"))["events"]
        noted = [(event["kind"], event["detail"]) for event in found if event["kind"] in SENT]
        place = "generation 0, rank 1"
        assert noted == [
            ("checkpoint_skipped", f"{place}, step 30: the checkpoint is skipped: {skipped['reason']}"),
            ("non_finite", f"{place}, step 31: the loss is nan"),
        ]


SENT = ("checkpoint_skipped", "non_finite")


async def test_each_generation_keeps_the_latest_trace_of_a_rank(service: Service) -> None:
    run_id, first, second = await service.started_run(retries=1)
    for rank, agent in enumerate((first, second)):
        await put(service, agent, run_id, rank, traces(1)[rank])
        await put(service, agent, run_id, rank, traces(5)[rank])
    shown = await service.http.get(f"/v1/runs/{run_id}/trace")
    assert shown.json()["otherData"]["steps"] == [4]
    await service.end_node(first, run_id, "failed", {"kind": "error", "rank": 0, "detail": "d"})
    await service.end_node(second, run_id, "stopped")
    for rank, agent in enumerate((first, second)):
        await service.work(agent)
        await put(service, agent, run_id, rank, traces(1, first_step=2)[rank], generation=1)
    for query, step in (({}, 2), ({"generation": 1}, 2), ({"generation": 0}, 4)):
        shown = await service.http.get(f"/v1/runs/{run_id}/trace", params=query)
        assert shown.json()["otherData"]["steps"] == [step]


async def stored_trace(service: Service, run_id: str) -> RankTrace:
    """The stored trace of rank 0."""
    parts = await PartTable(service.app.state.application.database).read(run_id, 0, "trace", [0])
    (trace,) = parse_traces([part.body for part in parts])
    return trace


async def test_earlier_steps_are_kept_because_ranks_write_at_different_times(service: Service) -> None:
    run_id, first, second = await service.started_run()
    for step in (0, 5, 10, 15):
        await put(service, first, run_id, 0, traces(5, first_step=step)[0])
    shown = f"/v1/runs/{run_id}/trace"
    for sent, expected in ((traces(5, first_step=4), 8), (traces(5, first_step=0), 8)):
        await put(service, second, run_id, 1, sent[1])
        assert (await service.http.get(shown)).json()["otherData"]["steps"] == [expected]
    kept = await stored_trace(service, run_id)
    assert kept.numbers == frozenset(range(5, 20))
    await put(service, first, run_id, 0, traces(2, first_step=20, ahead=[5, 5])[0])
    kept = await stored_trace(service, run_id)
    assert kept.numbers == {20, 21}  # the earlier steps were measured with another clock


async def test_ranks_without_a_common_step_of_one_plan_have_no_trace(service: Service) -> None:
    run_id, first, second = await service.started_run()
    await put(service, first, run_id, 0, traces(2)[0])
    for other in (traces(2, first_step=5), traces(2, plan_id="b" * 64)):
        await put(service, second, run_id, 1, other[1])
        answer = await service.http.get(f"/v1/runs/{run_id}/trace")
        assert (answer.status_code, "no step in common" in answer.text) == (404, True)


async def test_a_trace_with_a_nan_loss_is_accepted(service: Service) -> None:
    run_id, first, _ = await service.started_run()
    text = json.dumps(traces()[0]).replace('"loss": null', '"loss": NaN')
    assert "NaN" in text
    assert (await put(service, first, run_id, 0, text.encode())).status_code == 204


async def test_only_the_agent_of_a_rank_may_send_its_trace(service: Service) -> None:
    run_id, first, second = await service.started_run()
    for agent, run, rank, generation in (
        (second, run_id, 0, 0),
        (first, run_id, 1, 0),
        (first, run_id, 0, 1),
        (first, "e" * 32, 0, 0),
        ("f" * 32, run_id, 0, 0),
    ):
        answer = await put(service, agent, run, rank, traces()[0], generation=generation)
        assert answer.status_code == 404, answer.text
    await service.http.delete(f"/v1/agents/{first}")
    assert (await put(service, first, run_id, 0, traces()[0])).status_code == 410


async def test_large_or_invalid_traces_are_refused(serving: Serving) -> None:
    async with serving("immediate", max_trace_bytes=5000) as service:
        run_id, first, _ = await service.started_run()
        bomb = b" " * 50_000
        infinite = json.dumps({**traces()[0], "more": 7}).replace("7}", "1e999}").encode()
        for body, status in (
            (bomb, 413),
            (b"{", 400),
            (infinite, 400),
            ({"rank": 0}, 422),
            (traces()[1], 422),
        ):
            answer = await put(service, first, run_id, 0, body)
            assert (answer.status_code, answer.headers["content-type"]) == (
                status,
                "application/problem+json",
            )
        address = f"/v1/agents/{first}/runs/{run_id}/generations/0/ranks/0/trace"
        whole = gzip.compress(json.dumps(traces()[0]).encode())
        for content in (b"not gzip", whole[:-9], whole + b"more"):
            answer = await service.http.put(address, content=content, headers=PACKED)
            assert answer.status_code == 400, answer.text
        brotli = await service.http.put(address, content=b"x", headers={"content-encoding": "br"})
        assert brotli.status_code == 415
        assert (await service.http.get(f"/v1/runs/{run_id}/trace")).status_code == 404


async def test_the_end_of_a_log_is_stored_per_rank_and_generation(service: Service) -> None:
    run_id, first, second = await service.started_run()
    shown = f"/v1/runs/{run_id}/ranks/1/log"
    assert (await service.http.get(shown)).status_code == 404
    assert (await put(service, second, run_id, 1, b"old", "log")).status_code == 204
    assert (
        await put(service, second, run_id, 1, "Größe \udcff".encode(errors="surrogateescape"), "log")
    ).status_code == 204
    answer = await service.http.get(shown)
    assert (answer.headers["content-type"], answer.text) == ("text/plain; charset=utf-8", "Größe \ufffd")
    assert (await service.http.get(shown, params={"generation": 1})).status_code == 404
    assert (await put(service, first, run_id, 0, b"x" * MAX_LOG_BYTES, "log")).status_code == 204
    assert (await put(service, first, run_id, 0, b"x" * (MAX_LOG_BYTES + 1), "log")).status_code == 413
