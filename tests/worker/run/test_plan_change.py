"""A run changes to another plan at the same step on every rank, and the training stays the same."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
import torch
import zbv_worker.run.plan_change
from support.gradients import relative_error
from support.plans import random_plan, unit_problem, write_plan
from support.processes import wait_until
from support.selfcheck import random_orders
from support.thread_transport import ThreadHub
from support.trained import CPU, Remembering, Trained, train_alone, train_in_threads
from torch import nn
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.spec import ModelSpec
from zbv_worker.run.loop import Loop
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.run.plan_change import NextPlan, PlanFile, Swaps

STEPS = 9


def plan_file(path: Path, problem: Problem, orders: Orders) -> str:
    """Write a plan; returns its id."""
    plan_id: str = json.loads(write_plan(path, problem, orders).read_text())["plan_id"]
    return plan_id


def id_of(plan: NextPlan | None) -> str | None:
    return None if plan is None else plan.plan_id


@pytest.fixture
def looking_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for a plan whenever one is taken, so that it does not depend on how long steps take."""
    take = PlanFile.take

    def look_and_take(self: PlanFile) -> NextPlan | None:
        self.look()
        return take(self)

    monkeypatch.setattr(zbv_worker.run.plan_change, "_LOOK_SECONDS", 600.0)
    monkeypatch.setattr(PlanFile, "take", look_and_take)


class Arriving(Remembering):
    """A model that writes the next plan during step 3."""

    next_plan: Path
    text: str

    def microbatch(self, step: int, index: int):  # type: ignore[no-untyped-def]
        if step == 3 and index == 0 and not self.next_plan.exists():
            self.next_plan.write_text(self.text)
        return super().microbatch(step, index)


class Unsplit(nn.Linear):
    """A Linear that W does not compute."""


class ArrivingUnsplit(Arriving):
    """Without split modules in its last layers."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        module = super().build_stage(stage, n_stages, device)
        for child in module.modules():
            if stage == n_stages - 1 and type(child) is nn.Linear:
                child.__class__ = Unsplit
        return module


def train_with(path: Path, text: str, replicas: int = 1, model: type[Arriving] = Arriving) -> Trained:
    Arriving.next_plan, Arriving.text = path, text
    options = TrainingOptions(replicas=replicas, next_plan=path)
    return train_in_threads(*random_plan(), options, STEPS, model=model)


@pytest.mark.usefixtures("looking_at_every_step")
def test_all_ranks_change_plan_at_the_same_step_without_changing_the_training(tmp_path: Path) -> None:
    replicas = 2
    plan_id = plan_file(tmp_path / "other.json", *random_plan(seed=1))
    found = train_with(tmp_path / "next.json", (tmp_path / "other.json").read_text(), replicas)
    plans = [[line.plan_id for line in report.lines] for report in found.reports]
    changed = plans[0].index(plan_id)
    assert changed > 3
    assert all(p == [plans[0][0]] * changed + [plan_id] * (STEPS - changed) for p in plans)
    expected, losses, _ = train_alone(3 * replicas, STEPS)
    assert relative_error(found.parameters[0], expected) < 1e-4
    assert found.losses == pytest.approx(losses, rel=1e-4)
    # The records are those of the new plan only.
    newest = found.reports[0].newest()
    assert len(newest) == STEPS - changed
    assert {str(r.action) for r in newest[0].records} == {str(r.action) for r in newest[-1].records}


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_plan_that_recomputes_other_stages_trains_alike(is_changed: bool) -> None:
    orders = Orders.from_text([["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]])
    plan = RankPlan.of("plan", unit_problem(1, 2), orders, 0)
    run = RunOptions((), ModelSpec("tests:model"), 2)
    loop = Loop(run, plan, Remembering(), ThreadHub(1).transport(0), CPU)
    loop.step(0)
    if is_changed:
        loop._stages.change(replace(plan, cut=replace(plan.cut, recompute=(True, False))), ())
    loop.step(1)
    loop.end()
    loop.close()
    assert [stage.is_recomputed for stage in loop._stages.stages.values()] == [is_changed, False]
    assert [line.loss for line in loop.report.lines] == pytest.approx(train_alone(2, 2)[1], rel=1e-5)


@pytest.mark.usefixtures("looking_at_every_step")
def test_the_warnings_about_a_plan_are_repeated_for_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = replace(unit_problem(2, 3), measured=(("precision", "bfloat16"),))
    plan_id = plan_file(tmp_path / "other.json", problem, random_orders(problem, Random(1), 0.0))
    found = train_with(tmp_path / "next.json", (tmp_path / "other.json").read_text(), model=ArrivingUnsplit)
    said = capsys.readouterr().err
    measured = f"plan {plan_id[:12]}: its costs were measured with"
    assert said.count(measured) == 1
    assert "precision bfloat16 (here: float32)" in said
    changed = [line.plan_id for line in found.reports[0].lines].index(plan_id)
    steps = [event["step"] for report in found.reports for event in report.events if event["stage"] == 3]
    assert steps[-1] == changed
    assert said.count("stage 3: W computes") == len(steps)


@pytest.mark.usefixtures("looking_at_every_step")
def test_an_incompatible_plan_does_not_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    larger = write_plan(tmp_path / "larger.json", *random_plan(2, 4))
    found = train_with(tmp_path / "next.json", larger.read_text())
    assert len({line.plan_id for report in found.reports for line in report.lines}) == 1
    message = "can only change to a plan with 2 ranks, placement v and 3 microbatches"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "found no JSON ("), (json.dumps({"problem": {}, "ranks": []}), "/problem")]
)
def test_a_file_without_a_plan_is_reported_and_ignored(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "next.json"
    path.write_text(text)
    watched = PlanFile(path, RankPlan.of("0" * 64, *random_plan(), 0))
    watched.look()
    watched.close()
    assert watched.take() is None
    assert f"{path}: the plan is unchanged: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("is_late", [False, True])
def test_where_hosts_run_ahead_a_plan_is_announced_one_step_earlier(is_late: bool, tmp_path: Path) -> None:
    hub = ThreadHub(2)
    path = write_plan(tmp_path / "next.json", *random_plan(seed=1))
    current = RankPlan.of("0" * 64, *random_plan(), 0)
    first, second = (Swaps(hub.transport(rank), path, current, is_late=is_late) for rank in range(2))
    assert first._file is not None
    first._file.look()
    changes = 6 if is_late else 5
    found = [(first.before(step), second.before(step)) for step in range(4, 8)]
    for swaps in (first, second):
        swaps.close()
    assert [[plan is not None for plan in plans] for plans in found] == [
        [step == changes] * 2 for step in range(4, 8)
    ]


@pytest.mark.usefixtures("looking_at_every_step")
def test_the_same_plan_again_changes_nothing(tmp_path: Path) -> None:
    same = write_plan(tmp_path / "same.json", *random_plan())
    found = train_with(tmp_path / "next.json", same.read_text())
    assert len({line.plan_id for report in found.reports for line in report.lines}) == 1


class Changing(PlanFile):
    """A plan file that finds the next of some plans whenever it looks."""

    def __init__(self, plans: Iterator[str], versions: Iterator[int] | None = None):
        super().__init__(Path("absent"), RankPlan.of("first", *random_plan(), 0))
        self.close()  # the tests call look()
        self._plans = plans
        self._path = Mock()
        # By default the file changes with every look.
        times = itertools.count() if versions is None else versions
        self._path.stat = lambda: os.stat_result((0, next(times), *([0] * 8)))

    def _read(self) -> NextPlan:
        plan = next(self._plans)
        if plan == "busy":
            raise OSError("stale file handle")
        return NextPlan(plan, ())


def test_a_thread_looks_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zbv_worker.run.plan_change, "_LOOK_SECONDS", 0.01)
    watched = PlanFile(tmp_path / "next.json", RankPlan.of("0" * 64, *random_plan(), 0))
    plan_id = plan_file(tmp_path / "next.json", *random_plan(seed=1))
    wait_until(lambda: watched._found is not None, "the plan is found")
    watched.close()
    assert id_of(watched.take()) == plan_id


def test_a_plan_that_arrives_while_another_is_taken_is_not_dropped() -> None:
    """Forces the interleaving: the finder runs in the middle of a take."""

    class Interrupted(Changing):
        _finder: threading.Thread
        _is_armed = False

        def __setattr__(self, name: str, value: object) -> None:
            # Between reading and clearing, if that is not atomic.
            if name == "_found" and value is None and self._is_armed:
                self._is_armed = False
                finder = threading.Thread(target=self.look)
                finder.start()
                finder.join(0.2)  # it cannot end while the take holds the lock
                self._finder = finder
            super().__setattr__(name, value)

    watched = Interrupted(iter(["a", "b"]))
    watched.look()
    watched._is_armed = True
    first = watched.take()
    watched._finder.join(60)
    second = watched.take()
    assert [id_of(first), id_of(second)] == ["a", "b"]


def test_the_previous_plan_may_return_before_the_next_one_starts() -> None:
    watched = Changing(iter(["other", "first", "first"]))
    found = []
    for _ in range(3):
        watched.look()
        found.append(id_of(watched.take()))
    assert found == ["other", "first", None]


def test_an_unreadable_file_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Although it does not change."""
    watched = Changing(iter(["busy", "next"]), itertools.repeat(1))
    watched.look()
    assert "stale file handle" in capsys.readouterr().err
    watched.look()
    assert id_of(watched.take()) == "next"


def test_an_unreadable_file_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "next.json").mkdir()
    watched = PlanFile(tmp_path / "next.json", RankPlan.of("0" * 64, *random_plan(), 0))
    for _ in range(3):
        watched.look()
    watched.close()
    assert capsys.readouterr().err.count("the plan is unchanged") == 1
    (tmp_path / "next.json").rmdir()
    plan_id = plan_file(tmp_path / "next.json", *random_plan())
    watched.look()
    assert id_of(watched.take()) == plan_id
