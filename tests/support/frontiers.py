"""Asks a service for the frontier of a plan, without its pages."""

from __future__ import annotations

from typing import Any

from zbv_service.frontier.problems import Frontier

from support.serving import Service

SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


async def planned(service: Service, problem: dict[str, Any], **options: Any) -> str:
    """The id of the plan of a quick search."""
    found = await service.ended((await service.submit(problem, effort="quick", **options)).json()["id"])
    assert found["state"] == "done", found
    return str(found["plan_id"])


async def frontier(service: Service, plan_id: str) -> Frontier:
    """The frontier of a plan, with all bounds."""
    application = service.app.state.application
    while True:
        found: Frontier = await application.frontiers.of(plan_id)
        if all(point.bound is not None for point in found.points):
            return found


async def ask(service: Service, plan_id: str, **form: str) -> Any:
    """Press the button that searches missing points."""
    return await service.http.post(f"/plans/{plan_id}/frontier", data=form, headers=SAME_ORIGIN)
