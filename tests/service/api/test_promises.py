"""Promises in responses are true: that nothing was stored, and which requests may be repeated."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from support.serving import MODEL, PROBLEM, Service, Serving
from zbv_service.api.error_advice import ADVICE
from zbv_service.database import Database, DatabaseAway
from zbv_service.database.models import Base

KEY = {"Idempotency-Key": "one"}
PROMISES = {"invalid-body": "Nothing was stored.", "other-origin": "so it is refused."}
"""Promises in the advice, by type; the tests below check them."""


def test_advice_promises_only_tested_behaviour() -> None:
    for name, advice in ADVICE.items():
        text = f"{advice.meaning} {advice.remedy}"
        if name in PROMISES:
            assert PROMISES[name] in text
            text = text.replace(PROMISES[name], "")
        assert not re.search(r"nothing (of|was|is|change)|\bsafe", text, re.IGNORECASE), f"{name}: {text}"


async def rows(database: Database) -> dict[str, int]:
    """The number of rows of every table, except the one that running services update by themselves."""
    async with database.reading() as session:
        tables = [table for table in Base.metadata.sorted_tables if table.name != "listeners"]
        return {t.name: await session.scalar(select(func.count()).select_from(t)) or 0 for t in tables}


async def submit_run(service: Service, plan_id: str) -> Any:
    body = {"plan_id": plan_id, "model": MODEL, "nodes": 2, "steps": 5}
    return await service.http.post("/v1/runs", json=body, headers=KEY)


def lose_the_answers_to_commits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Cut the connection after a commit, this number of times."""
    real, left = Database.writing, count

    @asynccontextmanager
    async def writing(self: Database) -> AsyncIterator[AsyncSession]:
        nonlocal left
        async with real(self) as session:
            yield session
        left -= 1
        if left >= 0:
            raise DatabaseAway("cut off after COMMIT")

    monkeypatch.setattr(Database, "writing", writing)


async def test_a_lost_answer_to_a_commit_is_not_reported_as_a_failure(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving("immediate", preload="at-first-search") as service:
        await service.app.state.application.runner.stop()
        await service.app.state.application.dispatcher.stop()
        plan_id = await service.import_plan()
        for send, listed in (
            (lambda: submit_run(service, plan_id), "runs"),
            (lambda: service.http.post("/v1/searches", json={"problem": PROBLEM}), "searches"),
        ):
            with monkeypatch.context() as patch:
                lose_the_answers_to_commits(patch, 1)
                answer = await send()
            assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
            assert "may still have been carried out" in answer.json()["detail"]
            (stored,) = (await service.get(f"/v1/{listed}"))[listed]
            again = await send()
            assert (again.status_code, again.json()["id"]) == (202, stored["id"])


async def test_a_crash_after_a_commit_says_that_the_request_may_have_succeeded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_id = await service.import_plan()

    def failing() -> None:
        raise RuntimeError("after the run was stored")

    with monkeypatch.context() as patch:
        patch.setattr(service.app.state.application.dispatcher, "wake", failing)
        answer = await submit_run(service, plan_id)
    assert (answer.status_code, answer.json()["type"]) == (500, "/errors/internal-error")
    assert "may still have been carried out" in answer.json()["detail"]
    (stored,) = await service.listed("runs")
    assert (await submit_run(service, plan_id)).json()["id"] == stored["id"]


async def test_a_failed_get_may_be_repeated(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise DatabaseAway("away")

    async with serving("immediate") as service:
        monkeypatch.setattr(service.app.state.application.searches, "get", away)
        detail = (await service.http.get("/v1/searches/x")).json()["detail"]
    assert detail == "The database does not answer now. Repeat the request in a moment."


WRONG_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/searches", {"problem": {**PROBLEM, "pp_degree": 0}}),
    ("/v1/searches", {"problem": PROBLEM, "options": {"effort": "none"}}),
    ("/v1/runs", {"problem": PROBLEM, "model": MODEL, "nodes": 3, "steps": 5}),
    (
        "/v1/runs",
        {"problem": PROBLEM, "model": MODEL, "nodes": 2, "steps": 5, "search_options": {"seed": -1}},
    ),
    ("/v1/runs", {"plan_id": "0" * 64, "model": MODEL, "nodes": 2, "steps": 5}),
    ("/v1/plans", {"problem": PROBLEM, "ranks": []}),
    ("/v1/agents", {"id": "a" * 32, "name": "h", "address": "h", "port": 0, "slots": 1}),
]


async def test_a_body_that_breaks_a_rule_stores_nothing(service: Service) -> None:
    before = await rows(service.app.state.application.database)
    for path, body in WRONG_BODIES:
        answer = await service.http.post(path, json=body, headers=KEY)
        assert (answer.status_code, answer.json()["type"]) == (422, "/errors/invalid-body"), answer.text
        assert await rows(service.app.state.application.database) == before, body


async def test_requests_from_another_site_change_nothing(service: Service) -> None:
    before = await rows(service.app.state.application.database)
    for path in ("/v1/searches", "/example", "/v1/plans", "/v1/runs", "/v1/agents", "/v1/sign-in-links"):
        answer = await service.http.post(path, json={"problem": PROBLEM}, headers={"Origin": "http://evil"})
        assert (answer.status_code, answer.json()["type"]) == (403, "/errors/other-origin"), path
    assert await rows(service.app.state.application.database) == before
