"""A search on a cluster from the service's side: its reports, and the errors that can end it."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from distributed.scheduler import KilledWorker
from support.fake_searches import orders_of, plan_of, stages_of
from support.serving import PROBLEM
from zbv_service.documents.problems import pack, question_json
from zbv_service.records.plans import NewPlan
from zbv_service.records.searches import Claim, Update
from zbv_service.searches.executors.cluster import worker
from zbv_service.searches.executors.cluster.computation import DaskComputation
from zbv_service.searches.executors.cluster.worker import Abandoned, Evicted, Found, OutOfMemory, Wanted
from zbv_service.searches.executors.executor import SearchCrashed, SearchEvicted, SearchLost
from zbv_service.searches.executors.task import search_plan
from zbv_solver.errors import ContradictedBound
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.incumbent import Progress


def a_computation(updates: list[Update] | None = None) -> DaskComputation:
    async def never(_computation: DaskComputation) -> object:
        raise AssertionError("nothing is computed here")

    taken = [] if updates is None else updates
    task = Claim("a", 1, b"", {}, None, 1, False)
    return DaskComputation(task, search_plan, taken.append, lambda: None, never)  # type: ignore[arg-type]


def found(number: int, objective: float) -> Found:
    return Found(number, Update(objective, 1.0, objective - 1, "m", b""))


async def test_each_report_is_taken_once_even_if_another_process_restarts_the_numbers() -> None:
    updates: list[Update] = []
    computation = a_computation(updates)
    assert not computation.is_under_way
    for number, objective in ((3, 9.0), (3, 9.0), (5, 8.0)):
        computation.found("first", found(number, objective))
    # Dask moved it to another process, which resumes from the same incumbent.
    computation.found("second", found(1, 7.0))
    assert [update.objective for update in updates] == [9, 8, 7]
    assert (computation.wanted.seen, computation.is_under_way) == (1, True)


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (KilledWorker("task", None, 3), SearchCrashed, "each worker that computed it died"),  # type: ignore[arg-type]
        (OutOfMemory(), SearchCrashed, "ran out of memory"),
        (Evicted("its worker was stopped."), SearchEvicted, "was stopped"),
        (Abandoned("its service was silent."), SearchLost, "silent"),
        (ZeroDivisionError("of the search"), ZeroDivisionError, "of the search"),
        (ContradictedBound({}, 7.0, 8.0, "cp-sat"), ContradictedBound, "below the lower bound 8 (cp-sat)"),
    ],
)
async def test_the_error_of_a_dask_task_is_translated(
    raised: Exception, kind: type[Exception], says: str
) -> None:
    computation = a_computation()
    submitted: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    submitted.set_exception(raised)
    computation.take_outcome(submitted)  # type: ignore[arg-type]
    error = computation.outcome.exception()
    assert type(error) is kind
    assert says in str(error)


async def test_a_search_that_does_not_stop_is_given_up_as_a_crash() -> None:
    computation = a_computation()
    computation.place = "a worker"
    computation.kill()
    with pytest.raises(SearchCrashed, match="did not stop"):
        await computation.outcome


async def test_a_search_that_no_worker_has_begun_did_not_crash() -> None:
    computation = a_computation()
    computation.kill()
    with pytest.raises(SearchLost, match="no worker has begun"):
        await computation.outcome


async def test_a_worker_says_that_it_refused_an_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "get_worker", lambda: SimpleNamespace(status=Status.running))
    seen: list[Update | None] = []

    def search(problem: Any, options: Any, on_progress: Any, cancelled: Any, incumbent: Any) -> Any:
        assert incumbent is None
        stages = stages_of(problem)
        on_progress(Progress(9.0, 4.0, 1.25, "m", 0.0, orders_of(stages), stages))
        held = asyncio.run(worker.exchange("service", {"token": Wanted(stop=False, seen=0)}))
        seen.append(held.searches["token"].update)
        return plan_of(stages)

    task = Claim("a", 1, pack(question_json(parse_any_problem(PROBLEM))), {}, pack([["0F0"], []]), 1, False)
    compute = partial(search_plan, search=search)
    plan = await asyncio.to_thread(worker.run_on_worker, task, compute, "token", "service", 60.0)
    (update,) = seen
    assert update is not None
    assert isinstance(plan, NewPlan)
    assert plan.refusal is not None
    assert plan.refusal == update.refusal
    assert "InvalidPlan" in plan.refusal.reason
