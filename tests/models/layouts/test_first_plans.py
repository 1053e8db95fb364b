"""Plans of pipelines in other processes: the same, whatever happens to these."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import pytest
from support.processes import is_alive
from zbv_models.layouts import first_plans, search
from zbv_models.layouts.cluster import equal_cluster
from zbv_models.layouts.first_plans import SMALL, FirstPlans
from zbv_models.layouts.request import parse_request
from zbv_models.layouts.search import Ranking, Waiting, best_layouts
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.layered import first_plan

MODEL = {
    **{"hidden": 1024, "layers": 8, "heads": 8, "kv_heads": 4, "vocabulary": 32_000, "sequence": 2048},
    **{"positions": "rotary", "norm": "rmsnorm", "gated": True},
}
PATIENCE = 60.0
ORPHAN = """
import multiprocessing, time
from zbv_models.layouts.first_plans import SMALL, FirstPlans

if __name__ == "__main__":
    with FirstPlans(processes=2) as plans:
        plans.begin(SMALL)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(600)
"""


def of_microbatches(count: int) -> LayeredProblem:
    return LayeredProblem(
        SMALL.model, SMALL.pp_degree, count, SMALL.static, SMALL.limit, placement=SMALL.placement
    )


def found(ranking: Ranking) -> list[tuple[object, float, float]]:
    return [(each.layout, each.step_time, each.lower_bound) for each in ranking.every]


def others(waiting: Sequence[Waiting]) -> list[tuple[int, float, bool]]:
    return sorted((each.number, each.bound, each.is_tight) for each in waiting)


def refuse(*_: object) -> NoReturn:
    raise AssertionError("planned in this process")


def test_a_search_with_other_processes_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"achieved_tflops": 300, "memory_bandwidth": 1500}
    links = {name: {"latency": 20, "bandwidth": 25} for name in ("in_node", "between_nodes")}
    cluster = equal_cluster({"nodes": 2, "gpus_per_node": 4, "device": device, "links": links, "memory": 3e9})
    request = parse_request({"model": MODEL, "global_batch": 16}, cluster)
    monkeypatch.setattr(search, "MANY_LAYOUTS", 1)
    alone = best_layouts(request.layouts, request.setting, 3)
    with_others = best_layouts(request.layouts, request.setting, 3, processes=2)
    assert len(alone.every) > 3
    assert found(with_others) == found(alone)
    assert with_others.no_layout_below == alone.no_layout_below
    assert others(with_others.waiting) == others(alone.waiting)
    assert others(with_others.too_large) == others(alone.too_large)
    assert not multiprocessing.active_children()


def test_another_process_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = first_plan(SMALL)
    monkeypatch.setattr(first_plans, "first_plan", refuse)
    with FirstPlans(processes=2) as plans:
        plans.begin(SMALL)
        assert plans.plan(SMALL).orders == expected.orders


def test_plans_survive_the_processes_that_make_them() -> None:
    with FirstPlans(processes=2) as plans:
        problems = [of_microbatches(count) for count in (4, 5, 6)]
        plans.begin(problems[0])
        expected = first_plan(problems[0])
        assert plans.plan(problems[0]).orders == expected.orders
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        for problem in problems[1:]:
            plans.begin(problem)
            assert plans.plan(problem).orders == first_plan(problem).orders
        assert not plans.can_begin  # a search would look ahead for nothing


def test_a_pipeline_that_does_not_fit_fails_alone() -> None:
    too_large = LayeredProblem(SMALL.model, 2, 4, SMALL.static, (3.0, 3.0), placement="v")
    with FirstPlans(processes=2) as plans:
        plans.begin(too_large)
        assert plans.plan(SMALL).problem.microbatches == SMALL.microbatches
        with pytest.raises(InfeasibleMemory) as caught:
            plans.plan(too_large)
        assert caught.value.is_proved


def test_after_a_cancellation_nobody_waits_for_another_process() -> None:
    with FirstPlans(processes=2) as plans:
        plans.begin(SMALL)
        assert plans.plan(SMALL, lambda: True).problem.microbatches == SMALL.microbatches
    assert not multiprocessing.active_children()


def test_processes_end_with_a_killed_search() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        children = [int(each) for each in running.stdout.readline().split()]
        running.kill()
    assert len(children) == 2
    deadline = time.monotonic() + PATIENCE
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
