"""A run goes on with another plan: on every rank from the same step on, and the training stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import zbv_worker.training.swap
from support.trained import Remembering, Trained, train_alone, train_in_threads
from zbv_solver.orders import Orders
from zbv_solver.placement import Placement
from zbv_solver.plan import identity
from zbv_solver.problem import Costs, Memory, Problem
from zbv_solver.schema import problem_json
from zbv_worker.selfcheck import random_orders, relative_error
from zbv_worker.training.training import TrainingOptions

STEPS = 40


def problem_of(microbatches: int = 3) -> Problem:
    placement = Placement.of("v", 2)
    ones = (1.0,) * placement.n_stages
    return Problem(placement, microbatches, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))


def write_plan(path: Path, problem: Problem, orders: Orders) -> str:
    path.write_text(json.dumps({"problem": problem_json(problem), "ranks": orders.all_text()}))
    return identity(problem_json(problem), orders.all_text())


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zbv_worker.training.swap, "_LOOK_SECONDS", 0.01)


class Arriving(Remembering):
    """A model during whose step 3 the next plan arrives."""

    next_plan: Path
    text: str

    def microbatch(self, step: int, index: int):  # type: ignore[no-untyped-def]
        if step == 3 and index == 0 and not self.next_plan.exists():
            self.next_plan.write_text(self.text)
        return super().microbatch(step, index)


def train_with(path: Path, text: str, replicas: int = 1) -> Trained:
    problem = problem_of()
    Arriving.next_plan, Arriving.text = path, text
    options = TrainingOptions(replicas=replicas, next_plan=path)
    return train_in_threads(problem, random_orders(problem, Random(0)), options, STEPS, model=Arriving)


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_ranks_change_at_the_same_step_and_train_on_as_if_nothing_had_happened(
    replicas: int, tmp_path: Path
) -> None:
    problem = problem_of()
    plan_id = write_plan(tmp_path / "other.json", problem, random_orders(problem, Random(1)))
    found = train_with(tmp_path / "next.json", (tmp_path / "other.json").read_text(), replicas)
    plans = [[line.plan_id for line in report.lines] for report in found.reports]
    changed = plans[0].index(plan_id)
    assert changed > 3
    assert all(p == [plans[0][0]] * changed + [plan_id] * (STEPS - changed) for p in plans)
    expected, losses, _ = train_alone(3 * replicas, STEPS)
    assert relative_error(found.parameters[0], expected) < 1e-4
    assert found.losses == pytest.approx(losses, rel=1e-4)
    # The records are those of the plan that ran: its first action comes first.
    newest = found.reports[0].newest()
    assert len(newest) == STEPS - changed
    assert {str(r.action) for r in newest[0].records} == {str(r.action) for r in newest[-1].records}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the plan stays as it is"),
        (json.dumps({"problem": {}, "ranks": []}), "the plan stays as it is"),
        ("OTHER", "can only be changed for one of 2 ranks, placement v, 3 microbatches"),
    ],
)
def test_what_cannot_take_its_place_is_refused_and_the_run_goes_on(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text == "OTHER":
        larger = problem_of(microbatches=4)
        write_plan(tmp_path / "larger.json", larger, random_orders(larger, Random(0)))
        text = (tmp_path / "larger.json").read_text()
    found = train_with(tmp_path / "next.json", text)
    assert len({line.plan_id for report in found.reports for line in report.lines}) == 1
    assert message in capsys.readouterr().err


def test_the_same_plan_again_changes_nothing(tmp_path: Path) -> None:
    problem = problem_of()
    write_plan(tmp_path / "same.json", problem, random_orders(problem, Random(0)))
    found = train_with(tmp_path / "next.json", (tmp_path / "same.json").read_text())
    assert len({line.plan_id for report in found.reports for line in report.lines}) == 1
