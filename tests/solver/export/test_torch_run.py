"""Exported schedules on PyTorch's own pipelining runtime compute the gradients of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from support.forked_ranks import fork_process
from support.gradients import relative_error
from support.plans import unit_problem, write_plan
from support.selfcheck import Gradients, hard_model, random_orders, reference_gradients
from zbv_solver.construct.baselines import baseline
from zbv_solver.export import export
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_worker.host import local_ranks
from zbv_worker.host.local_ranks import LocalRanks, python_command

TOLERANCE = 1e-5
MICROBATCHES = 5


def cases() -> Iterator[tuple[str, Problem, Orders]]:
    """Plans of two ranks: split, fused, both, other placements, and microbatches in any order."""
    v, loop = unit_problem(2, MICROBATCHES), unit_problem(2, MICROBATCHES, "loop")
    plan = search(v, SearchOptions(effort="quick"))
    yield "searched-v", plan.problem, plan.orders
    yield ("1f1b", *baseline("1f1b", v))
    yield ("interleaved-1f1b", *baseline("interleaved-1f1b", v))
    yield "v-fused", v, random_orders(v, Random(1), 1.0)
    yield "v-any-order", v, random_orders(v, Random(4), 0.2)
    yield "loop-mixed", loop, random_orders(loop, Random(2), 0.4)


NAMES = ["searched-v", "1f1b", "interleaved-1f1b", "v-fused", "v-any-order", "loop-mixed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients of every case from both exported files."""
    folder = tmp_path_factory.mktemp("torch")
    for name, problem, orders in cases():
        write_plan(folder / f"{name}.plan.json", problem, orders)
        plan = make_plan(problem, orders, method="test")
        (folder / f"{name}.compute_only.csv").write_text(export(plan, "torch-csv"))
        (folder / f"{name}.compute_comms.csv").write_text(export(plan, "torch-comms-csv"))
    command = python_command("support.run_csv", str(folder))
    with pytest.MonkeyPatch.context() as patch:  # torch is imported once
        patch.setattr(local_ranks, "start_process", fork_process)
        with LocalRanks([command] * 2, folder / "logs") as ranks:
            ranks.wait(timeout=120)
    return folder


@pytest.fixture(scope="module")
def reference() -> Gradients:
    return reference_gradients(hard_model(), MICROBATCHES)[0]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", NAMES)
def test_exported_files_compute_the_gradients_of_one_process(
    folder: Path, reference: Gradients, name: str, form: str
) -> None:
    gradients: Gradients = {}
    for rank in range(2):
        gradients |= torch.load(folder / f"{name}.{form}.{rank}.pt")
    assert relative_error(gradients, reference) <= TOLERANCE
