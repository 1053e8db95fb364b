"""Running searches: processes die, services stop, leases expire, and no accepted search is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes import is_alive
from support.served import start_services
from support.serving import DEADLINE, PROBLEM, Service, Serving, until
from support.stored import next_of
from support.tokens import add
from zbv_service.database import Database, PlanTable, SearchTable
from zbv_service.documents.problems import new_search
from zbv_service.searches.attempts import Attempt
from zbv_service.searches.executors.local import LocalExecutor
from zbv_service.searches.runner import POLL_SECONDS, new_owner
from zbv_service.settings import Settings

FIRST_ACTIONS = "0F0\n3F0\n3B0\n0B0"


async def appeared(directory: Path, pattern: str, count: int = 1) -> Path:
    def files() -> list[Path]:
        return list(directory.glob(pattern))

    await until(lambda: len(files()) >= count, f"{count} of {pattern}")
    return files()[0]


def started_in(directory: Path) -> list[int]:
    """Ids of the processes that started a search."""
    return [int(path.name.removeprefix("started-")) for path in directory.glob("started-*")]


def workers_in(directory: Path) -> list[str]:
    """The thread counts of the processes that started a search."""
    return sorted(path.read_text() for path in directory.glob("started-*"))


async def test_a_search_that_always_crashes_fails(serving: Serving, directory: Path) -> None:
    for attempt in range(9):
        (directory / f"die-4-{attempt}").touch()
    async with serving("dying", max_crashes=2) as service:
        ended = await service.done()
        assert (ended["state"], ended["attempts"]) == ("failed", 2)
        assert ended["error"]["type"] == "/errors/search-crashed"
        assert "died 2 times" in ended["error"]["detail"]


async def test_a_crashed_search_runs_again_and_the_others_continue(held: Service, directory: Path) -> None:
    ids = [(await held.submit(seed=seed)).json()["id"] for seed in range(2)]
    for search_id in ids:
        await held.until(search_id, lambda found: found["objective"] is not None)
    victim = int((await appeared(directory, "started-*")).name.removeprefix("started-"))
    os.kill(victim, signal.SIGKILL)
    await appeared(directory, "started-*", 3)  # the search of the killed process starts again
    (directory / "release").touch()
    ended = [await held.ended(search_id) for search_id in ids]
    assert [found["state"] for found in ended] == ["done", "done"]
    assert sorted(found["attempts"] for found in ended) == [1, 2]
    (again,) = (found["id"] for found in ended if found["attempts"] == 2)
    states = [event for event in await held.events_of_search(again) if event["event"] == "state"]
    assert [(event["reason"], event["attempts"]) for event in states] == [
        ("submitted", 0),
        ("started", 1),
        ("process-died", 1),
        ("started", 2),
    ]


async def test_a_stopping_service_requeues_searches_and_incumbents(serving: Serving, directory: Path) -> None:
    async with serving("held") as service:
        search_id = await service.begun()
    async with serving("held") as service:
        resumed = await appeared(directory, "resumed")
        (directory / "release").touch()
        ended = await service.ended(search_id)
        assert (ended["state"], ended["attempts"]) == ("done", 2)
        assert resumed.read_text().startswith(FIRST_ACTIONS)


async def test_a_cancelled_search_of_a_stopping_service_ends(serving: Serving, directory: Path) -> None:
    async with serving("held") as service:
        search_id = await service.begun()
        table = SearchTable(service.app.state.application.database)
        await table.request_cancel(search_id)  # as another service does
    async with serving("held") as service:
        ended = await service.search(search_id)
        assert (ended["state"], ended["attempts"]) == ("cancelled", 1)


async def test_a_search_that_ignores_the_request_to_stop_is_killed_with_its_service(
    serving: Serving, directory: Path
) -> None:
    async with serving("deaf", shutdown_seconds=0.5) as service:
        search_id = await service.begun()
        process_id = int((await appeared(directory, "started-*")).name.removeprefix("started-"))
    await until(lambda: not is_alive(process_id), "the end of the search process")
    async with serving("immediate") as service:
        ended = await service.ended(search_id)
        assert (ended["state"], ended["attempts"]) == ("done", 2)


@pytest.fixture
def table(elsewhere: Database) -> SearchTable:
    """Searches in the database of the services, where another one may claim them."""
    return SearchTable(elsewhere)


async def test_the_leases_of_a_process_on_this_machine_end_with_it(
    serving: Serving, table: SearchTable, settings: Settings
) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    await table.add(new_search(settings, {"problem": PROBLEM}))
    claim = await next_of(table, new_owner(process.pid), 3600)
    async with serving("immediate") as service:
        assert (await service.done(seed=5))["state"] == "done"
        assert (await service.search(claim.id))["state"] == "running"
    process.kill()
    await process.wait()
    async with serving("immediate") as service:
        assert (await service.ended(claim.id))["state"] == "done"


async def test_a_search_that_was_requeued_and_claimed_again_runs_once(
    serving: Serving, table: SearchTable, directory: Path
) -> None:
    """Its first attempt may still be stopping when the same service claims it again."""
    async with serving("deaf", searches=2) as service:
        search_id = await service.begun()
        assert await table.requeue_lost(await table.owners()) == 1
        await appeared(directory, "started-*", 2)
        other = (await service.submit(seed=1)).json()["id"]  # there is no slot for it
        (directory / "release").touch()
        ended = [await service.ended(each) for each in (search_id, other)]
        assert [(found["state"], found["attempts"]) for found in ended] == [("done", 2), ("done", 1)]
        runner = service.app.state.application.runner
        await until(lambda: not runner._attempts, "the end of every attempt")


async def test_a_search_past_its_time_limit_that_does_not_stop_is_killed_and_its_plan_kept(
    serving: Serving, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry = Attempt.hurry

    def hurry_started(attempt: Attempt, patience: float, longest: float) -> None:
        """Nothing before the search does what the test expects of it; a process may start late."""
        seed = attempt.claim.options["seed"]
        if len(started_in(directory)) > seed and (attempt.latest is not None or seed == 1):
            hurry(attempt, patience, longest)

    monkeypatch.setattr(Attempt, "hurry", hurry_started)
    async with serving("deaf", stop_seconds=0.2) as service:
        ended = await service.done(time_limit=0.1)
        assert (ended["state"], ended["attempts"], ended["error"]) == ("done", 1, None)
        plan = await service.get(f"/v1/plans/{ended['plan_id']}")
        assert "\n".join(plan["ranks"][0]).startswith(FIRST_ACTIONS)
    await until(lambda: not any(map(is_alive, started_in(directory))), "the end of its processes")
    async with serving("mute", stop_seconds=0.2) as service:
        ended = await service.done(time_limit=0.1, seed=1)
        assert (ended["state"], ended["attempts"], ended["plan_id"]) == ("failed", 1, None)
        assert ended["error"]["type"] == "/errors/time-limit"
        assert "time limit of 0.1 s" in ended["error"]["detail"]
    assert len(started_in(directory)) == 2
    async with serving("held", max_time_limit=0.3) as service:
        ended = await service.done(seed=2)
        assert (ended["state"], ended["method"], ended["attempts"]) == ("done", "cancelled", 1)


@pytest.mark.parametrize("search", ["deaf", "mute"])
async def test_a_cancelled_search_that_does_not_stop_is_cancelled_and_not_started_again(
    serving: Serving, directory: Path, search: str
) -> None:
    async with serving(search, stop_seconds=0.2) as service:
        search_id = (await service.submit()).json()["id"]
        await appeared(directory, "started-*")
        if search == "deaf":
            await service.until(search_id, lambda found: found["objective"] is not None)
        await service.cancel(search_id)
        ended = await service.ended(search_id)
        assert (ended["state"], ended["attempts"], ended["error"]) == ("cancelled", 1, None)
        assert (ended["plan_id"] is None) == (search == "mute"), "the best plan is kept"
    assert len(started_in(directory)) == 1


async def test_a_search_that_needs_too_much_memory_is_ended(serving: Serving, directory: Path) -> None:
    async with serving("greedy", search_memory=64) as service:
        ended = await service.done()
        assert (ended["state"], ended["attempts"]) == ("failed", 1), "another attempt would need as much"
        assert ended["error"]["type"] == "/errors/too-much-memory"
        assert "64 MiB" in ended["error"]["detail"]
    assert os.listdir(directory / "starts") == ["0"]


async def running_of(service: Service, token: str, *seeds: int, until: int) -> int:
    """Submit searches with a token, wait until so many run, and count them after more looks at the queue."""
    service.http.headers.update(await add(service, "search", "read", name=token))
    asked = [(await service.submit(seed=seed)).json()["id"] for seed in seeds]
    for each in asked[:until]:
        await service.until(each, lambda found: found["state"] == "running")
    await asyncio.sleep(4 * POLL_SECONDS)
    return [(await service.search(each))["state"] for each in asked].count("running")


async def test_while_one_token_has_all_slots_another_gets_one(serving: Serving, directory: Path) -> None:
    """A search cannot be moved away once another token needs its slot."""
    async with serving("held", auth="tokens", searches=2) as service:
        assert await running_of(service, "one", 0, 1, 2, until=2) == 2
        assert await running_of(service, "other", 8, 9, until=1) == 1
        assert len((await service.get("/v1/searches", state="running"))["searches"]) == 3, "none has ended"
        (directory / "release").touch()


async def test_one_token_leaves_a_slot_that_several_services_share(
    serving: Serving, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the threads of a Dask cluster: each service alone would leave one of its slots."""
    monkeypatch.setattr(LocalExecutor, "shared_slots", 3)
    async with serving("held", auth="tokens", searches=3) as service, serving("held", auth="tokens"):
        assert await running_of(service, "one", 0, 1, 2, 3, until=2) == 2
        assert await running_of(service, "other", 9, until=1) == 1
        (directory / "release").touch()


async def test_searches_get_the_cores_that_no_other_search_uses(
    serving: Serving, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbv_service.searches.runner.cores", lambda: 3)
    async with serving("held", searches=3) as service:
        for seed, counts in enumerate(([2], [1, 2], [1, 1, 2])):  # at least one each
            await service.begun(seed=seed)
            await appeared(directory, "started-*", seed + 1)
            assert workers_in(directory) == [f"workers {count}" for count in counts]
        (directory / "release").touch()


async def test_a_search_runs_again_if_the_service_is_killed_before_storing_its_result(
    serving: Serving, elsewhere: Database, directory: Path
) -> None:
    """The kill comes at the end of the transaction: the plan is written but not committed."""
    dying = {"ZBV_AUTH": "none", "ZBV_TEST_DIES_IN": "zbv_service.database.search_leases._end"}
    with ExitStack() as stack:
        (killed,) = start_services(stack, directory, 1, variables=dying)
        search = killed.client.submit(PROBLEM, {"seed": 1})
        assert await asyncio.to_thread(killed.process.wait, DEADLINE) == -signal.SIGKILL
    assert await PlanTable(elsewhere).newest(1) == []
    async with serving("honest") as service:
        ended = await service.ended(search.id)
        assert (ended["state"], ended["attempts"]) == ("done", 2)
        assert (await service.http.get(f"/v1/plans/{ended['plan_id']}")).status_code == 200
        events = await service.events_of_search(ended["id"])
        assert [event["event"] for event in events].count("end") == 1
