"""Malformed bodies: every response must name the error, and none may be a 5xx."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

import httpx
from zbv_service.client.credentials import Bearer

from benchmarks.findings import Finding, at_least, at_most
from benchmarks.service.malformed import AGENT, ID, PLAN, RUN, RUN_ID, Malformed, malformed
from benchmarks.service.served import serving

AT_ONCE = 8
TIMEOUT = 60.0
SHOWN = 5
NO_ANSWER = 599
CLOSED = 0
"""Stands for the status if the service closed the connection while a refused body was still being sent."""
WORK_SECONDS = 30.0


def measure(count: int, seed: int) -> list[Finding]:
    """Send this number of bodies to a new service."""
    with serving("--searches", "1", ZBV_AGENT_TIMEOUT_SECONDS="3600") as served:
        answers = asyncio.run(_send(served.address, requests(count, seed)))
        log = (served.folder / "log").read_text()
    crashes = [text for status, text in answers if status >= 500]
    for text in crashes[:SHOWN]:
        print(text[:2000])
    return [
        Finding("malformed bodies answered", len(answers), "", at_least(count)),
        Finding("  with 5xx", len(crashes), "", at_most(0)),
        Finding(
            "  errors that are not problem documents",
            sum(is_unshaped(answer) for answer in answers),
            "",
            at_most(0),
        ),
        Finding("tracebacks in the log", log.count("Traceback"), "", at_most(0)),
        *(
            Finding(f"  with {status}", number, "")
            for status, number in sorted(Counter(status for status, _ in answers).items())
        ),
    ]


def requests(count: int, seed: int) -> Iterator[Malformed]:
    """Return the requests of a seed."""
    random = Random(seed)
    return (malformed(random) for _ in range(count))


async def prepare(http: httpx.AsyncClient) -> str:
    """Create a run with a plan and an agent, so that bodies about them are read; returns its id."""
    plan_id = (await http.post("/v1/plans", json=PLAN)).raise_for_status().json()["plan_id"]
    (await http.post("/v1/agents", json=AGENT)).raise_for_status()
    run = (await http.post("/v1/runs", json={**RUN, "plan_id": plan_id})).raise_for_status().json()
    work = await http.get(f"/v1/agents/{ID}/work", params={"wait": WORK_SECONDS})
    if work.status_code != 200:
        raise RuntimeError(f"the run got no agent: {work.status_code} {work.text}")
    return str(run["id"])


async def send(http: httpx.AsyncClient, request: Malformed, run_id: str) -> tuple[int, str]:
    """Send a request; returns status and text of the response, or :data:`NO_ANSWER`."""
    route = request.route
    path, content = (
        route.path.replace(RUN_ID, run_id),
        request.content.replace(RUN_ID.encode(), run_id.encode()),
    )
    try:
        answer = await http.request(route.method, path, content=content, headers=request.headers)
    except httpx.TransportError as error:
        # The service may close a connection instead of reading a refused body to its end.
        return (CLOSED, f"{error!r}") if len(request.content) > 2**20 else (NO_ANSWER, f"{route}: {error!r}")
    return answer.status_code, answer.text


async def _send(address: str, made: Iterable[Malformed]) -> list[tuple[int, str]]:
    answers: list[tuple[int, str]] = []
    left = iter(made)

    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT, auth=Bearer(None, address)) as http:
        run_id = await prepare(http)

        async def drive() -> None:
            for request in left:
                answers.append(await send(http, request, run_id))

        await asyncio.gather(*(drive() for _ in range(AT_ONCE)))
    return answers


def is_unshaped(answer: tuple[int, str]) -> bool:
    """Whether a response is an error but not a problem document."""
    status, text = answer
    if not 400 <= status < NO_ANSWER:
        return False
    try:
        document = json.loads(text)
    except ValueError:
        return True
    return not isinstance(document, dict) or not {"type", "title", "status", "detail"} <= document.keys()
