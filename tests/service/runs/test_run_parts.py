"""Traces and logs: permissions, limits of size, and the merged trace."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from support.serving import PROBLEM, Service, Serving
from support.two_ranks import PACKED, TwoRanks
from zbv_service.database import PartTable
from zbv_service.runs.parts import MAX_LOG_BYTES, parse_traces
from zbv_solver.measure.rank_trace import RankTrace


class Ranks(TwoRanks):
    """The run, and what the service stores of it."""

    @property
    def trace(self) -> str:
        """The address of the merged trace."""
        return f"/v1/runs/{self.id}/trace"

    async def steps(self, **query: int) -> Any:
        """The steps of the merged trace."""
        return (await self.service.get(self.trace, **query))["otherData"]["steps"]

    async def noted(self, *kinds: str) -> list[str]:
        """The details of the run's events of these kinds."""
        events = await self.service.events_of_run(self.id)
        return [event["detail"] for event in events if event["kind"] in kinds]

    async def stored(self) -> RankTrace:
        """The stored trace of rank 0."""
        table = PartTable(self.service.app.state.application.database)
        parts = await table.read(self.id, 0, "trace", [0])
        (trace,) = parse_traces([part.body for part in parts])
        return trace


@pytest.fixture
async def ranks(service: Service) -> Ranks:
    return await Ranks.begin(service)


async def test_the_newest_common_step_is_one_trace_on_the_clock_of_rank_0(ranks: Ranks) -> None:
    http = ranks.service.http
    assert "agents send it" in (await http.get(ranks.trace)).json()["detail"]
    ahead = [0, 987_654_321]
    assert (await ranks.put(0, ranks.traces(steps=3, ahead=ahead)[0])).status_code == 204
    answer = await http.get(ranks.trace)
    assert (answer.status_code, answer.json()["detail"][:7]) == (404, "ranks 1")
    assert (await ranks.put(1, ranks.traces(steps=2, ahead=ahead)[1])).status_code == 204
    found = await ranks.service.get(ranks.trace)
    assert found["otherData"]["steps"] == [1]
    assert found["otherData"]["clock_uncertainty_us"] == 0.05
    actions = {event["name"]: event for event in found["traceEvents"] if event["ph"] == "X"}
    (one,) = ranks.traces(steps=1)[1]["steps"]
    begin = min(row[1] for trace in ranks.traces(steps=1) for row in trace["steps"][0]["actions"])
    for text, wait, start, ended, _ in one["actions"]:
        assert actions[text]["tid"] == 1
        assert actions[text]["ts"] == pytest.approx((start - begin) / 1e3)
        assert actions[text]["dur"] == pytest.approx((ended - start) / 1e3)
        assert (f"wait for the input of {text}" in actions) == (start > wait)


def not_finite(*steps: int, **more: Any) -> dict[str, Any]:
    events = [{"kind": "non_finite", "step": step, "what": "loss", "value": "nan"} for step in steps]
    return {"rank": 1, "events": events, **more}


async def test_what_a_rank_notes_becomes_one_event_each(ranks: Ranks) -> None:
    for steps in ((7,), (7, 8), (8, 9)):
        answer = await ranks.put(1, not_finite(*steps), "events")
        assert answer.status_code == 204, answer.text
    place = "generation 0, rank 1, step"
    assert await ranks.noted("non_finite") == [f"{place} {step}: the loss is nan" for step in (7, 8, 9)]
    skipped = {"kind": "checkpoint_skipped", "step": 30, "reason": "checkpoints in /c: No space left."}
    for _ in range(2):
        body = {"rank": 1, "events": [skipped, *not_finite(31)["events"]]}
        assert (await ranks.put(1, body, "events")).status_code == 204
    assert (await ranks.noted("checkpoint_skipped", "non_finite"))[3:] == [
        f"{place} 30: the checkpoint is skipped: checkpoints in /c: No space left.",
        f"{place} 31: the loss is nan",
    ]
    wrong: tuple[tuple[str, Any, dict[str, Any], int], ...] = (
        ("other rank", not_finite(1, rank=0), {}, 422),
        ("other kind", {"rank": 1, "events": [{"kind": "failed", "step": 1}]}, {}, 422),
        ("too many", not_finite(*range(101)), {}, 422),
        ("other agent", not_finite(1), {"agent": ranks.agents[0]}, 404),
    )
    for name, body, other, status in wrong:
        assert (await ranks.put(1, body, "events", **other)).status_code == status, name


async def test_each_generation_keeps_the_latest_trace_of_a_rank(service: Service) -> None:
    ranks = await Ranks.begin(service, retries=1)
    for rank in (0, 1):
        await ranks.put(rank, ranks.traces(steps=1)[rank])
        await ranks.put(rank, ranks.traces(steps=5)[rank])
    assert await ranks.steps() == [4]
    await ranks.restart()
    await ranks.measured(PROBLEM, first_step=2)
    of_each = [await ranks.steps(generation=generation) for generation in (0, 1)]
    assert (await ranks.steps(), of_each) == ([2], [[4], [2]])


async def test_earlier_steps_are_kept_because_ranks_write_at_different_times(ranks: Ranks) -> None:
    for step in (0, 5, 10, 15):
        await ranks.put(0, ranks.traces(steps=5, first_step=step)[0])
    for first_step in (4, 0):
        await ranks.put(1, ranks.traces(steps=5, first_step=first_step)[1])
        assert await ranks.steps() == [8]
    assert (await ranks.stored()).numbers == frozenset(range(5, 20))
    await ranks.put(0, ranks.traces(steps=2, first_step=20, ahead=[5, 5])[0])
    assert (await ranks.stored()).numbers == {20, 21}, "the earlier steps were measured with another clock"
    for other in (ranks.traces(steps=2, first_step=25), ranks.traces(steps=22, plan_id="b" * 64)):
        await ranks.put(1, other[1])
        answer = await ranks.service.http.get(ranks.trace)
        assert (answer.status_code, "no step in common" in answer.text) == (404, True)


async def test_only_the_agent_of_a_rank_may_send_its_trace(ranks: Ranks) -> None:
    first, second = ranks.agents
    text = json.dumps(ranks.traces()[0]).replace('"loss": null', '"loss": NaN')
    assert "NaN" in text
    assert (await ranks.put(0, text.encode())).status_code == 204
    for other in ({"agent": second}, {"generation": 1}, {"run_id": "e" * 32}, {"agent": "f" * 32}):
        answer = await ranks.put(0, ranks.traces()[0], **other)
        assert answer.status_code == 404, answer.text
    assert (await ranks.put(1, ranks.traces()[1], agent=first)).status_code == 404
    await ranks.service.http.delete(f"/v1/agents/{first}")
    assert (await ranks.put(0, ranks.traces()[0])).status_code == 410


async def test_large_or_invalid_traces_are_refused(serving: Serving) -> None:
    async with serving("immediate", max_trace_bytes=5000) as service:
        ranks = await Ranks.begin(service)
        infinite = json.dumps({**ranks.traces()[0], "more": 7}).replace("7}", "1e999}").encode()
        for body, status in (
            (b" " * 50_000, 413),
            (b"{", 400),
            (infinite, 400),
            ({"rank": 0}, 422),
            (ranks.traces()[1], 422),
        ):
            answer = await ranks.put(0, body)
            kind = answer.headers["content-type"]
            assert (answer.status_code, kind) == (status, "application/problem+json")
        address = f"/v1/agents/{ranks.agents[0]}/runs/{ranks.id}/generations/0/ranks/0/trace"
        whole = gzip.compress(json.dumps(ranks.traces()[0]).encode())
        for content in (b"not gzip", whole[:-9], whole + b"more"):
            answer = await service.http.put(address, content=content, headers=PACKED)
            assert answer.status_code == 400, answer.text
        brotli = await service.http.put(address, content=b"x", headers={"content-encoding": "br"})
        assert brotli.status_code == 415
        assert (await service.http.get(ranks.trace)).status_code == 404


async def test_the_end_of_a_log_is_stored_per_rank_and_generation(ranks: Ranks) -> None:
    http, shown = ranks.service.http, f"/v1/runs/{ranks.id}/ranks/1/log"
    assert (await http.get(shown)).status_code == 404
    for text in (b"old", "Größe \udcff".encode(errors="surrogateescape")):
        await ranks.put(1, text, "log")
    answer = await http.get(shown)
    assert (answer.headers["content-type"], answer.text) == ("text/plain; charset=utf-8", "Größe \ufffd")
    assert (await http.get(shown, params={"generation": 1})).status_code == 404
    assert (await ranks.put(0, b"x" * MAX_LOG_BYTES, "log")).status_code == 204
    assert (await ranks.put(0, b"x" * (MAX_LOG_BYTES + 1), "log")).status_code == 413
