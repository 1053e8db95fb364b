"""The page of a run in every state, and the actions that a browser may take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.fake_searches import orders_of
from support.rank_traces import trace_documents
from support.runs_over_http import (
    beat,
    end,
    events,
    import_plan,
    page_of,
    run_of,
    started,
    submit,
    words,
    work,
)
from support.serving import PROBLEM, Service, Serving
from zbv_service.pages import run as pages
from zbv_service.pages.run import SHOWN_RANKS, run_values
from zbv_service.pages.shell import Shell, render
from zbv_service.runs.measurements import most_shared
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.problem.reading import parse_problem

pytestmark = pytest.mark.anyio

TIMED = {**PROBLEM, "units": {"time": "us"}}
SLOW = {**TIMED, "costs": {"forward": 3, "backward_input": 1, "backward_weight": 1}}
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


def traces(document: dict[str, Any], plan_id: str, **how: Any) -> list[dict[str, Any]]:
    problem = parse_problem(document)
    made = trace_documents(problem, orders_of(problem), plan_id=plan_id, **how)
    for entry in made[0]["steps"]:
        entry["loss"] = 4.0 - entry["step"]
    return made


async def send(
    service: Service, agent: str, run_id: str, rank: int, what: Any, kind: str = "trace", generation: int = 0
) -> None:
    address = f"/v1/agents/{agent}/runs/{run_id}/generations/{generation}/ranks/{rank}/{kind}"
    content = what.encode() if isinstance(what, str) else json.dumps(what).encode()
    answer = await service.http.put(address, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 204, answer.text


async def test_a_waiting_run_shows_the_reason(serving: Serving) -> None:
    async with serving("held") as service:
        run_id = (await submit(service)).json()["id"]
        seen = await words(service, f"/runs/{run_id}")
        assert "waiting Waiting for 2 agents" in seen
        assert "Ranks send measurements a few seconds after their first steps" in seen
        assert "Cancel run" in seen
        assert 'data-live="state" data-open' in await page_of(service, f"/runs/{run_id}")
        body = {"problem": TIMED, "plan_id": None}
        planning = (await submit(service, **body)).json()
        assert "Searching for a plan" in await words(service, f"/runs/{planning['id']}")
        nothing = await words(service, f"/runs/{run_id}/measured")
        assert "Nothing measured yet" in nothing
        assert "http-equiv" in await page_of(service, f"/runs/{run_id}/measured")
        assert (await service.http.get(f"/runs/{'e' * 32}")).status_code == 404
        assert (await service.http.get(f"/runs/{'e' * 32}/measured")).status_code == 404


async def test_a_running_run_shows_its_ranks_steps_and_losses(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service, TIMED)
        run_id, first, second = await started(service, plan_id=plan_id)
        for agent in (first, second):
            await beat(service, agent, run_id, 3)
        made = traces(SLOW, plan_id, steps=3)
        await send(service, first, run_id, 0, made[0])
        await send(service, second, run_id, 1, made[1])
        await send(service, second, run_id, 1, "a log", "log")
        seen = await words(service, f"/runs/{run_id}")
        assert "All ranks have reported step 3 of 5" in seen
        assert re.search(r"Step time [\d.]+ µs median|Step time [\d.]+ µs planned", seen)
        assert "Loss 2 of step 2" in seen
        assert "rank 1 host-b node 1 running" in seen
        text = await page_of(service, f"/runs/{run_id}")
        assert f'href="/v1/runs/{run_id}/ranks/1/log?generation=0"' in text
        assert f'href="/runs/{run_id}/measured"' in text
        assert text.count('class="step"') == 3
        assert text.count('class="dot"') == 3

        measured = await words(service, f"/runs/{run_id}/measured")
        assert "F took 3.00 × what was planned, over all ranks" in measured
        assert "Step 1, the median of the 3 newest steps by length, generation 0." in measured
        for step in (0, 2):
            assert f"Step {step}, generation 0." in await words(
                service, f"/runs/{run_id}/measured?step={step}"
            )
        for query in ("step=9", "generation=4", "replica=2"):
            assert "Not found" in await words(service, f"/runs/{run_id}/measured?{query}")
        assert (await service.http.get(f"/runs/{run_id}/measured?step=x")).status_code == 422
        assert (await service.http.get(f"/runs/{run_id}/measured?generation=-1")).status_code == 422


async def test_a_loss_belongs_to_its_step_and_the_newest_events_are_shown(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "EVENTS", 1)
    async with serving("immediate") as service:
        plan_id = await import_plan(service, TIMED)
        run_id, first, second = await started(service, plan_id=plan_id)
        made = traces(TIMED, plan_id, steps=3)
        made[0]["steps"][2]["loss"] = None
        for rank, agent in enumerate((first, second)):
            await send(service, agent, run_id, rank, made[rank])
        assert "Loss 3 of step 1" in await words(service, f"/runs/{run_id}")
        told = [event["kind"] for event in await events(service, run_id)]
        shown = re.findall(r'class="kind">([^<]+)<', await page_of(service, f"/runs/{run_id}"))
        assert len(told) > 1
        assert shown == told[-1:]


async def test_missing_ranks_and_unusable_traces_are_reported(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service, TIMED)
        run_id, first, second = await started(service, plan_id=plan_id)
        made = traces(TIMED, plan_id, steps=2)
        await send(service, second, run_id, 1, made[1])
        seen = await words(service, f"/runs/{run_id}/measured")
        assert "Rank 0 has not sent this step" in seen
        shifted = traces(TIMED, plan_id, steps=2)[0]
        for entry in shifted["steps"]:
            entry["actions"] = [
                [row[0], *(at + 50_000 for at in row[1:4]), row[4]] for row in entry["actions"]
            ]
        await send(service, first, run_id, 0, shifted)
        seen = await words(service, f"/runs/{run_id}/measured")
        assert "has not sent" not in seen
        assert "The clocks of the ranks disagree" in seen
        for rank, agent in enumerate((first, second)):
            other = traces(TIMED, plan_id, first_step=7)[rank]
            other["steps"][0]["actions"] = [
                [row[0], 0, 0, 0, 0] for row in other["steps"][0]["actions"][::-1]
            ]
            await send(service, agent, run_id, rank, other)
        seen = await words(service, f"/runs/{run_id}/measured?step=7")
        assert "These traces cannot be used" in seen
        assert "not its list of plan" in seen


async def test_a_failed_run_shows_the_reason_and_links_to_its_logs(serving: Serving) -> None:
    async with serving("immediate") as service:
        run_id, first, second = await started(service)
        failure = {"kind": "error", "rank": 0, "step": 3, "action": "0F1", "detail": "<b>boom</b>"}
        await end(service, first, run_id, "failed", failure)
        await end(service, second, run_id, "stopped")
        seen = await words(service, f"/runs/{run_id}")
        assert "failed <b>boom</b>" in seen
        assert "Rank 0 on host-a error step 3, at 0F1" in seen
        assert "Cancel run" not in seen
        text = await page_of(service, f"/runs/{run_id}")
        assert "<b>boom" not in text
        assert "data-open" not in text
        assert "The ranks sent no measurements" in seen
        assert "The run ended before its ranks had sent a trace" in await words(
            service, f"/runs/{run_id}/measured"
        )


async def test_a_browser_cancels_a_run_and_takes_an_offer(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service, TIMED)
        run_id, first, second = await started(service, plan_id=plan_id, replan="ask")
        for agent in (first, second):
            await beat(service, agent, run_id, 0)
        for rank, agent in enumerate((first, second)):
            await send(service, agent, run_id, rank, traces(SLOW, plan_id, steps=3)[rank])
        await service.app.state.application.dispatcher.replanner.step()
        for _ in range(200):
            if (await run_of(service, run_id))["offer"]:
                break
            await service.app.state.application.dispatcher.replanner.step()
        offer = (await run_of(service, run_id))["offer"]["plan_id"]
        seen = await page_of(service, f"/runs/{run_id}")
        assert f'name="plan_id" value="{offer}"' in seen
        assert f"/plans/{plan_id}/compare?with={offer}" in seen
        change = f"/runs/{run_id}/plan"
        wrong = await service.http.post(change, data={"plan_id": "0" * 64}, headers=SAME_ORIGIN)
        assert wrong.status_code == 422
        answer = await service.http.post(change, data={"plan_id": offer}, headers=SAME_ORIGIN)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run_id}")
        assert (await run_of(service, run_id))["target_plan_id"] == offer
        assert "switch to it between two steps" in await words(service, f"/runs/{run_id}")

        answer = await service.http.post(f"/runs/{run_id}/cancel", headers=SAME_ORIGIN)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run_id}")
        assert (await run_of(service, run_id))["cancel_requested"]
        assert "Cancelling: its ranks are stopping" in await words(service, f"/runs/{run_id}")
        unknown = await service.http.post(f"/runs/{'e' * 32}/cancel", headers=SAME_ORIGIN)
        assert unknown.status_code == 404


async def test_logs_and_traces_of_earlier_generations_are_kept(serving: Serving) -> None:
    async with serving("immediate") as service:
        plan_id = await import_plan(service, TIMED)
        run_id, first, second = await started(service, plan_id=plan_id, retries=1)
        for rank, agent in enumerate((first, second)):
            await send(service, agent, run_id, rank, traces(TIMED, plan_id, steps=2)[rank])
            await send(service, agent, run_id, rank, "the log", "log")
        await end(service, first, run_id, "failed", {"kind": "error", "rank": 0, "detail": "d"})
        await end(service, second, run_id, "stopped")
        for rank, agent in enumerate((first, second)):
            await work(service, agent)
            await send(service, agent, run_id, rank, traces(SLOW, plan_id, first_step=1)[rank], generation=1)
        seen = await words(service, f"/runs/{run_id}")
        assert "log of generation 0 , trace" in seen
        assert "restarted 1 time" in seen
        assert "Generations 0 , 1" in seen
        assert "generation 1." in await words(service, f"/runs/{run_id}/measured")
        assert "as long as planned" in await words(service, f"/runs/{run_id}/measured?generation=0")


async def test_cancelling_a_run_needs_the_scope_launch(serving: Serving) -> None:
    async with serving("immediate") as service:
        run_id = (await submit(service)).json()["id"]
        run = await service.app.state.application.runs.get(run_id)
        for may, expected in ((("read",), False), (("launch",), True), (("admin",), True)):
            values, shell = run_values(run, None, (), ()), Shell(may=frozenset(may))
            text = render("run.html.j2", shell, run=run, events=(), **values).decode()
            assert ("Cancel run" in text) == expected


def test_steps_measured_by_the_most_ranks_count() -> None:
    problem = parse_problem(TIMED)
    documents = trace_documents(problem, orders_of(problem), steps=4)
    for document, kept in zip(documents, ((0, 1, 2), (1, 2, 3)), strict=True):
        document["steps"] = [entry for entry in document["steps"] if entry["step"] in kept]
    assert most_shared([*map(parse_rank_trace, documents)]) == (1, 2)
    assert most_shared([parse_rank_trace(documents[0])]) == (0, 1, 2)
    assert most_shared([]) == ()


async def test_a_run_of_many_ranks_shows_some_of_them_at_a_time(serving: Serving) -> None:
    async with serving("immediate") as service:
        run_id = (await submit(service)).json()["id"]
        run = await service.app.state.application.runs.get(run_id)
    many = run.model_copy(update={"nodes": 1, "ranks_per_node": 2 * SHOWN_RANKS + 1})
    seen = [run_values(many, None, (), (), first) for first in (None, SHOWN_RANKS, 2 * SHOWN_RANKS)]
    shown = [[row["rank"] for row in values["ranks"]] for values in seen]
    assert shown[1:] == [[*range(SHOWN_RANKS, 2 * SHOWN_RANKS)], [2 * SHOWN_RANKS]]
    around = [(values["earlier_ranks"], values["later_ranks"]) for values in seen]
    assert around == [(None, SHOWN_RANKS), (0, 2 * SHOWN_RANKS), (SHOWN_RANKS, None)]
    text = render("run.html.j2", Shell(), run=many, events=(), **seen[1]).decode()
    assert f"{2 * SHOWN_RANKS + 1} ranks" in text
    assert 'href="?ranks=0#ranks"' in text
    assert f'href="?ranks={2 * SHOWN_RANKS}#ranks"' in text
