"""What an agent does with the answer to its sign of life."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from zbv_service.client_runs import Orders
from zbv_worker.agent.daemon import Agent, AgentOptions


class Told:
    """An agent's generation and courier, which note what they are told."""

    def __init__(self, node_rank: int = 0):
        self.work = SimpleNamespace(run_id="r", node_rank=node_rank)
        self.stops: list[bool] = []
        self.plans: list[str | None] = []

    def places(self) -> list[Any]:
        return []

    def stop(self, *, failed_elsewhere: bool) -> None:
        self.stops.append(failed_elsewhere)

    def fetch_plan(self, plan_id: str | None) -> None:
        self.plans.append(plan_id)


def beat(orders: Orders, told: Told, folder: Path) -> Told:
    agent = Agent(AgentOptions("http://zbv", "n", "127.0.0.1", 1, folder))
    agent._client = cast(Any, SimpleNamespace(heartbeat=lambda *_: orders))
    agent._beat(cast(Any, told), cast(Any, told))
    return told


@pytest.mark.parametrize(
    ("cause", "failed_elsewhere"), [("cancelled", False), ("failed", True), ("unknown-run", True)]
)
def test_only_after_a_failure_do_ranks_get_time_to_say_what_they_know(
    tmp_path: Path, cause: str, failed_elsewhere: bool
) -> None:
    # The reason is for people: what it says decides nothing.
    told = beat(Orders(True, cause, "the run was cancelled"), Told(), tmp_path)
    assert (told.stops, told.plans) == ([failed_elsewhere], [])


@pytest.mark.parametrize(("node_rank", "plans"), [(0, ["p"]), (1, [])])
def test_the_first_node_fetches_the_plan_to_change_over_to(
    tmp_path: Path, node_rank: int, plans: list[str]
) -> None:
    told = beat(Orders(False, plan_id="p"), Told(node_rank), tmp_path)
    assert (told.stops, told.plans) == ([], plans)
