"""The texts that name an executor, and the owners of leases."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from zbv_service.compute.executor_choice import ExecutorChoice, parse_choice
from zbv_service.records.searches import Claim
from zbv_service.searches.executors.executor import SearchLost
from zbv_service.searches.executors.local import LocalExecutor
from zbv_service.searches.executors.task import search_plan
from zbv_service.searches.runner import is_dead, make_executor, new_owner
from zbv_service.settings import Settings


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("processes", ExecutorChoice()),
        ("processes:3", ExecutorChoice(processes=3)),
        ("dask://scheduler:8786", ExecutorChoice(scheduler="tcp://scheduler:8786")),
        ("dask://[::1]:8786/", ExecutorChoice(scheduler="tcp://[::1]:8786")),
        ("tls://scheduler.example:8786", ExecutorChoice(scheduler="tls://scheduler.example:8786")),
    ],
)
def test_a_setting_names_an_executor(text: str, choice: ExecutorChoice) -> None:
    assert parse_choice(text) == choice
    assert Settings(executor=text).executor == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "threads",
        "processes:0",
        "processes:1025",
        "processes:two",
        "processes:²",
        "dask://",
        "dask://host",
        "dask://host:0",
        "dask://host:65536",
        "dask://user@host:1",
        "dask://a b:1",
        "tcp://host:1",
        "dask://host:1\n",
    ],
)
def test_any_other_text_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="processes"):
        parse_choice(text)
    with pytest.raises(ValidationError, match="executor"):
        Settings(executor=text)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        (Settings(searches=3), 3),
        (Settings(executor="processes:2"), 2),
        (Settings(searches=3, executor="processes:2"), 2),
    ],
)
def test_the_number_of_slots_is_the_number_of_processes(settings: Settings, slots: int) -> None:
    executor = make_executor(settings)
    assert isinstance(executor, LocalExecutor)
    assert (executor.slots, executor.trouble) == (slots, None)


def test_only_owners_on_this_machine_are_known_to_be_dead() -> None:
    mine, living = new_owner(), new_owner(1)
    reborn, elsewhere = new_owner(), mine.replace("/", "-else/", 1)
    assert not is_dead(mine, mine)
    assert not is_dead(living, mine)
    assert is_dead(reborn, mine), "another runner with our process id was before us"
    assert not is_dead(elsewhere, mine)
    for rubbish in ("", ":", "a:b", f"{mine.rsplit(':', 2)[0]}:x:y"):
        assert not is_dead(rubbish, mine)


async def test_a_search_whose_process_was_not_started_when_the_service_stopped_is_lost_not_failed() -> None:
    executor = LocalExecutor(1, preload=False)
    await executor.start()
    claim = Claim("a", 1, b"", {}, None, 1, False)
    computation = executor.expect(claim, search_plan, lambda update: None)
    executor.kill()
    with pytest.raises(SearchLost, match="the service stopped before"):
        await computation.plan()
    await executor.stop()
