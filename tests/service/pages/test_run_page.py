"""The page of a run in every state, its planned against measured times, and the actions of a browser."""

from __future__ import annotations

import re
import time
from math import inf
from typing import Any

import pytest
from support.fake_searches import orders_of
from support.rank_traces import trace_documents
from support.serving import DEADLINE, PROBLEM, Service, Serving
from support.two_ranks import TwoRanks
from zbv_service.pages import run as pages
from zbv_service.pages.charts import MOST_DRAWN
from zbv_service.pages.measured import measured_timeline, measured_values
from zbv_service.pages.run import SHOWN_RANKS, run_values
from zbv_service.pages.shell import Shell, render
from zbv_service.pages.words import tone
from zbv_service.records.runs import StepDocument
from zbv_service.runs.measured.step import first_halves, lay_out
from zbv_service.runs.measurements import Measured, TraceSource, measure, most_shared
from zbv_solver.export.timeline import timeline
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Objective
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan

TIMED = {**PROBLEM, "units": {"time": "us"}}
SLOW = {**TIMED, "costs": {"forward": 3, "backward_input": 1, "backward_weight": 1}}
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


class Run(TwoRanks):
    """A run and its pages."""

    @property
    def url(self) -> str:
        return f"/runs/{self.id}"

    def traces(self, document: Any = TIMED, **how: Any) -> list[dict[str, Any]]:
        """With losses, which rank 0 sends."""
        made = super().traces(document, **how)
        for entry in made[0]["steps"]:
            entry["loss"] = 4.0 - entry["step"]
        return made

    async def words(self, path: str = "") -> str:
        return await self.service.words(self.url + path)

    async def post(self, path: str, **data: str) -> tuple[int, str | None]:
        answer = await self.service.http.post(self.url + path, data=data, headers=SAME_ORIGIN)
        return answer.status_code, answer.headers.get("location")


async def test_a_waiting_run_shows_the_reason(serving: Serving) -> None:
    async with serving("held") as service:
        run_id = (await service.submit_run()).json()["id"]
        seen = await service.words(f"/runs/{run_id}")
        assert "waiting Waiting for 2 agents" in seen
        planning = (await service.submit_run(problem=TIMED, plan_id=None)).json()
        assert "Searching for a plan" in await service.words(f"/runs/{planning['id']}")
        assert "Nothing measured yet" in await service.words(f"/runs/{run_id}/measured")
        assert "http-equiv" in await service.page(f"/runs/{run_id}/measured")
        for path in ("", "/measured"):
            assert (await service.http.get(f"/runs/{'e' * 32}{path}")).status_code == 404
        run = await service.app.state.application.runs.get(run_id)
    for may, expected in ((("read",), False), (("launch",), True), (("admin",), True)):
        shell, values = Shell(may=frozenset(may)), run_values(run, None, (), ())
        text = render("run.html.j2", shell, run=run, events=(), **values).decode()
        assert ("Cancel run" in text) == expected
    many = run.model_copy(update={"nodes": 1, "ranks_per_node": 2 * SHOWN_RANKS + 1})
    shown = [run_values(many, None, (), (), first) for first in (None, SHOWN_RANKS, 2 * SHOWN_RANKS)]
    ranks = [[row["rank"] for row in values["ranks"]] for values in shown]
    assert ranks[1:] == [[*range(SHOWN_RANKS, 2 * SHOWN_RANKS)], [2 * SHOWN_RANKS]]
    around = [(values["earlier_ranks"], values["later_ranks"]) for values in shown]
    assert around == [(None, SHOWN_RANKS), (0, 2 * SHOWN_RANKS), (SHOWN_RANKS, None)]
    text = render("run.html.j2", Shell(), run=many, events=(), **shown[1]).decode()
    for part in (f"{2 * SHOWN_RANKS + 1} ranks", 'href="?ranks=0#ranks"', f"?ranks={2 * SHOWN_RANKS}#ranks"):
        assert part in text


async def test_a_running_run_shows_its_ranks_steps_and_losses(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await Run.begin(service, TIMED)
    for agent in run.agents:
        await service.beat(agent, run.id, 3)
    traces = run.traces(SLOW, steps=3)
    await run.send(1, traces[1])
    assert "Rank 0 has not sent this step" in await run.words("/measured")
    traces[0]["steps"][2]["loss"] = None
    await run.send(0, traces[0])
    seen, text = await run.words(), await service.page(run.url)
    assert "Loss 3 of step 1, from 4" in seen, "a loss belongs to its step"
    assert (text.count('class="step"'), text.count('class="dot"')) == (3, 2)
    monkeypatch.setattr(pages, "EVENTS", 1)
    told = [event["kind"] for event in await service.events_of_run(run.id)]
    assert len(told) > 1
    assert re.findall(r'class="kind">([^<]+)<', await service.page(run.url)) == told[-1:]

    measured = await run.words("/measured")
    assert "F took 3.00 × what was planned, over all ranks" in measured
    assert "Step 1, the median of the 3 newest steps by length, generation 0." in measured
    assert "Step 2, generation 0." in await run.words("/measured?step=2")
    for query in ("step=9", "generation=4", "replica=2"):
        assert "Not found" in await run.words(f"/measured?{query}")
    for query in ("step=x", "generation=-1"):
        assert (await service.http.get(f"{run.url}/measured?{query}")).status_code == 422
    download: Any = re.search(r'href="([^"]+)" download="[^"]+-trace.json"', text)
    assert (await service.http.get(download[1])).status_code == 200

    for entry in traces[0]["steps"]:
        entry["actions"] = [[row[0], *(at + 50_000 for at in row[1:4]), row[4]] for row in entry["actions"]]
    await run.send(0, traces[0])
    assert "The clocks of the ranks disagree" in await run.words("/measured")
    for rank, other in enumerate(run.traces(TIMED, first_step=7)):
        actions = other["steps"][0]["actions"]
        other["steps"][0]["actions"] = [[row[0], 0, 0, 0, 0] for row in actions[::-1]]
        await run.send(rank, other)
    seen = await run.words("/measured?step=7")
    assert "These traces cannot be used" in seen
    assert "not its list of plan" in seen


async def test_a_run_shows_its_whole_curve_and_steps_that_ran_again_once(service: Service) -> None:
    run = await Run.begin(service, TIMED, retries=1)
    everything = [[step, 1.0 + step % 2, 9.0 - step / 100] for step in range(0, 400)]
    for rank, trace in enumerate(run.traces(TIMED, first_step=399)):
        trace["curve"] = [[step, seconds, None if rank else loss] for step, seconds, loss in everything]
        trace["curve"][7][1] += 4.0 * rank
        await run.send(rank, trace)
    steps = (await service.get(f"/v1{run.url}/steps"))["steps"]
    assert [step["step"] for step in steps] == [*range(400)]
    assert steps[7] == {"step": 7, "seconds": 6.0, "loss": 8.93}, "the time of the slowest rank"
    await run.restart()
    for rank, trace in enumerate(run.traces(TIMED, first_step=601)):
        curve = [[300, 1.5, None if rank else 5.0], *([step, 1.5, None] for step in range(302, 601, 2))]
        await run.send(rank, {**trace, "curve": curve})
    steps = (await service.get(f"/v1{run.url}/steps"))["steps"]
    assert [step["step"] for step in steps][298:303] == [298, 299, 300, 302, 304]
    assert steps[300] == {"step": 300, "seconds": 1.5, "loss": 5.0}, "of the generation that ran it last"
    seen = await run.words()
    assert "400 of 602 steps, evenly spread, with the first and the newest." in seen
    assert (await service.http.get(f"/v1/runs/{'e' * 32}/steps")).status_code == 404
    for point in ([1, -1.0, None], [1, 1.0], ["1", 1.0, None]):
        with pytest.raises(AssertionError, match="/curve/0"):
            await run.send(0, {**run.traces(TIMED)[0], "curve": [point]})


def test_charts_of_steps_have_the_number_of_the_step_on_their_axis() -> None:
    steps = [StepDocument(step=step, seconds=0.5, loss=2.0) for step in (0, 1, 2, 3, 8, 9)]
    times, losses = pages.step_chart(steps, 0.4), pages.loss_chart(steps)
    assert losses is not None
    middles = [x + times["width"] / 2 for x, _, _ in times["bars"]]
    assert middles == pytest.approx([5.0, 15.0, 25.0, 35.0, 85.0, 95.0], abs=0.01)
    dots = [100 * step / 9 for step in (0, 1, 2, 3, 8, 9)]
    assert [x for x, _ in losses["dots"]] == pytest.approx(dots, abs=0.01)
    long = [StepDocument(step=step, seconds=0.5, loss=float(step)) for step in range(5000)]
    shown = pages.step_chart(long, None)["bars"]
    assert len(shown) == MOST_DRAWN
    assert (shown[0][2].split(":")[0], shown[-1][2].split(":")[0]) == ("step 0", "step 4999")


async def test_a_failed_run_shows_the_reason_and_earlier_generations_are_kept(service: Service) -> None:
    run = await Run.begin(service, TIMED, retries=1)
    await run.measured(TIMED, steps=2)
    for rank in (0, 1):
        await run.send(rank, b"the log", "log")
    await run.restart()
    await run.measured(SLOW, first_step=1)
    seen = await run.words()
    for text in ("log of generation 0 , trace", "restarted 1 time", "Generations 0 , 1"):
        assert text in seen
    assert "generation 1." in await run.words("/measured")
    assert "as long as planned" in await run.words("/measured?generation=0")
    failure = {"kind": "error", "rank": 0, "step": 3, "action": "0F1", "detail": "<b>boom</b>"}
    await service.end_node(run.agents[0], run.id, "failed", failure, generation=1)
    await service.end_node(run.agents[1], run.id, "stopped", generation=1)
    seen, text = await run.words(), await service.page(run.url)
    assert "failed <b>boom</b>" in seen
    assert "Rank 0 on host-a error step 3, at 0F1" in seen
    for absent in ("<b>boom", "data-open", "Cancel run"):
        assert absent not in text


async def test_a_browser_takes_an_offer(service: Service) -> None:
    run = await Run.begin(service, TIMED, replan="ask")
    for agent in run.agents:
        await service.beat(agent, run.id, 0)
    await run.measured(SLOW, steps=3)
    replanner = service.app.state.application.dispatcher.replanner
    until = time.monotonic() + DEADLINE
    while (offered := (await service.run(run.id))["offer"]) is None and time.monotonic() < until:
        await replanner.step()
    offer, seen = offered["plan_id"], await service.page(run.url)
    for wanted in (f'name="plan_id" value="{offer}"', f"/plans/{run.plan_id}/compare?with={offer}"):
        assert wanted in seen
    assert (await run.post("/plan", plan_id="0" * 64))[0] == 422
    assert await run.post("/plan", plan_id=offer) == (303, run.url)
    assert (await service.run(run.id))["target_plan_id"] == offer
    assert "switch to it between two steps" in await run.words()


async def test_an_ended_run_starts_again_with_the_same_plan_program_and_options(service: Service) -> None:
    run = await Run.begin(service, TIMED, replan="ask", clip_norm=2.5)
    assert "Start again" not in await run.words()
    assert await run.post("/cancel") == (303, run.url)
    for agent in run.agents:
        await service.end_node(agent, run.id, "stopped")
    assert "Start again" in await run.words()
    status, address = await run.post("/again")
    assert (status, address != run.url) == (303, True)
    old, new = await service.run(run.id), await service.run(str(address).rpartition("/")[2])
    for name in ("plan_id", "model", "script", "nodes", "steps", "options"):
        assert new[name] == old[name], name
    assert (old["state"], new["options"]["clip_norm"]) == ("cancelled", 2.5)
    of_script = {"name": "a <b> run", "script": {"path": "/a/train.py", "arguments": ["--x", "1"]}}
    asked = await service.submit_run(plan_id=run.plan_id, model=None, steps=None, **of_script)
    other = Run(service, run.plan_id, asked.json()["id"])
    _, address = await other.post("/again")
    again = await service.run(str(address).rpartition("/")[2])
    assert again["name"] == "a <b> run"
    for page in (f"/runs/{again['id']}", "/runs"):
        assert "a <b> run" in await service.words(page)
    assert (again["script"], again["steps"]) == (of_script["script"], None)


def test_steps_measured_by_the_most_ranks_count() -> None:
    problem = parse_problem(TIMED)
    documents = trace_documents(problem, orders_of(problem), steps=4)
    for document, kept in zip(documents, ((0, 1, 2), (1, 2, 3)), strict=True):
        document["steps"] = [entry for entry in document["steps"] if entry["step"] in kept]
    traces = [*map(parse_rank_trace, documents)]
    assert [most_shared(traces), most_shared(traces[:1]), most_shared([])] == [(1, 2), (0, 1, 2), ()]


# --- planned and measured values refer to the same quantity

LISTS = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
COSTS = {"forward": [1, 2], "backward_input": 1, "backward_weight": [1, 10]}


def planned(objective: Objective, **changes: Any) -> Plan:
    """Rank 1 begins late and ends last: the makespan, 14, is more than the span, 13."""
    shape = {"pp_degree": 2, "microbatches": 1, "placement": "single", "units": {"time": "us"}}
    problem = parse_problem({**shape, "objective": objective, "costs": COSTS | changes})
    return make_plan(problem, Orders.from_text(LISTS), method="by hand")


def view_of(plan: Plan, actual: Plan, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """The view of a plan if its actions took as long as another plan's."""
    documents = trace_documents(actual.problem, actual.orders, plan_id=plan.plan_id)
    found = measure(plan, [parse_rank_trace(documents[rank]) for rank in ranks], None, TraceSource())
    assert isinstance(found, Measured)
    return measured_values(found, "")


@pytest.mark.parametrize(("objective", "length"), [("span", 13), ("makespan", 14)])
def test_a_step_that_went_as_planned_is_as_idle_as_planned(objective: Objective, length: int) -> None:
    plan = planned(objective)
    view = view_of(plan, plan)
    cards = {card.label: card for card in view["cards"]}
    share = f"{100 * (1 - 16 / (2 * length)):.1f}\u202f%"
    assert cards["Planned"].value == cards["Measured"].value == f"{length} µs"
    assert (cards["Idle"].value, cards["Idle"].note) == (share, f"of the step; planned {share}")
    idle = [canvas.idle.replace("\u202f", "").split(" ") for canvas in view["lanes"]["canvases"]]
    assert idle[0] == idle[1] == [f"{100 * (1 - busy / length):.1f}%" for busy in (3, 13)]


def test_a_pair_is_drawn_as_planned_and_occupies_its_rank_once() -> None:
    hidden = {"forward": 1, "backward_input": 1, "backward": 1}
    document = {"pp_degree": 1, "microbatches": 3, "placement": "single", "units": {"time": "us"}}
    costs = {"forward": 2, "backward_input": 2, "backward_weight": 1, "communication": hidden}
    orders = Orders.from_text([["0F0", "0F1+0I0", "0W0", "0F2+0I1", "0W1", "0I2", "0W2"]])
    plan = make_plan(parse_problem({**document, "costs": costs}), orders, method="by hand")
    (trace,) = map(parse_rank_trace, trace_documents(plan.problem, orders, plan_id=plan.plan_id))
    drawn, step = timeline(plan), lay_out(plan, [trace], 0, 1000.0)
    measured = measured_timeline(drawn, step, first_halves(plan))
    assert measured.start == pytest.approx(drawn.start, abs=1e-3)
    assert measured.end == pytest.approx(drawn.end, abs=1e-3)
    view = view_of(plan, plan, ranks=(0,))
    assert [canvas.idle for canvas in view["lanes"]["canvases"]] == ["0.0\u202f%"] * 2
    assert view["letters"] == ["F", "I", "W", "pair"]


def test_planned_values_of_a_rank_are_its_own_and_the_parts_add_up_to_the_total() -> None:
    plan = planned("makespan")
    view = view_of(plan, plan, ranks=(1,))
    (idle,) = [card for card in view["cards"] if card.label == "Idle"]
    assert "planned 7.1" in idle.note, "13 of 14"
    view = view_of(plan, planned("makespan", forward=[4, 2]))
    for row, bar in view["accounts"]:
        shown = [getattr(row.difference, name) for name, _, _ in view["parts"]]
        assert sum(shown) == pytest.approx(row.difference.total) == 3
        assert sum(width for _, _, width in bar) == pytest.approx(100 * sum(map(abs, shown)) / 3, abs=0.1)


def test_an_action_planned_to_take_no_time_has_no_ratio() -> None:
    view = view_of(planned("span", backward_input=0), planned("span"))
    assert {letter: view["kinds"][0, letter].ratio for letter in "FI"} == {"F": 1.0, "I": inf}
    assert [tone(ratio) for ratio in (inf, 1.06, 1.0, 0.94)] == ["slow", "slow", "", "fast"]
