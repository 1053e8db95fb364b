"""Evaluation runs only a plan's forwards, changes nothing, and completes for every plan."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import unit_problem
from support.selfcheck import hard_model, random_orders
from support.thread_transport import ThreadHub, ThreadTransport
from torch import Tensor, nn
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.measure.rehearse.sleeping_stage import NoBatches, SleepingDevice, SleepingStage
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.channels import key_of

CPU = torch.device("cpu")
MICROBATCHES = 3


class Pipeline:
    """All ranks of a plan, as threads."""

    def __init__(self, problem: Problem, orders: Orders, *, startup_steps: int = 1):
        self.hub = ThreadHub(problem.pp_degree)
        self.model = hard_model()
        self.stages: list[dict[int, Stage]] = []
        self.executors = []
        options = ExecutorOptions(look_ahead=2, startup_steps=startup_steps)
        for rank in range(problem.pp_degree):
            plan, transport = RankPlan.of("plan", problem, orders, rank), self.hub.transport(rank)
            transport.open([key_of(channel) for channel in plan.channels], 20)
            stages = build_stages(self.model, plan, CPU)
            self.stages.append(stages)
            self.executors.append(
                Executor(plan, stages, self.model, transport, device=CPU, timeout=60, options=options)
            )

    def all(self, work: Callable[[Executor], Any]) -> list[Any]:
        return self.hub.run(lambda transport: work(self.executors[transport.rank]))

    def evaluate(self, step: int) -> dict[int, float]:
        found = self.all(lambda executor: executor.evaluate(step))
        having = [losses for losses in found if losses]
        assert len(having) == 1  # the rank with the last stage
        return dict(having[0])

    @property
    def modules(self) -> list[nn.Module]:
        return [stage.module for stages in self.stages for stage in stages.values()]

    @property
    def transports(self) -> list[ThreadTransport]:
        return [self.hub.transport(rank) for rank in range(len(self.executors))]


def random_pipeline(p: int = 1, microbatches: int = MICROBATCHES, **options: int) -> Pipeline:
    problem = unit_problem(p, microbatches)
    return Pipeline(problem, random_orders(problem, Random(1), 0.5), **options)


def plain_losses(step: int) -> list[float]:
    """Losses of the uncut model in evaluation mode."""
    model = hard_model()
    module = model.build_stage(0, 1, CPU).eval()
    with torch.no_grad():
        data = [model.microbatch(step, index) for index in range(MICROBATCHES)]
        return [float(model.loss(module(input), target)) for input, target in data]


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(["v", "loop", "single"]),
    p=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    fused=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_valid_plan_evaluates_as_one_process_before_and_after_a_step(
    kind: str, p: int, seed: int, fused: float
) -> None:
    problem = unit_problem(p, MICROBATCHES, kind)
    pipeline = Pipeline(problem, random_orders(problem, Random(seed), fused))
    expected = plain_losses(3)
    for turn in range(2):
        losses = pipeline.evaluate(3)
        assert [losses[j] for j in range(MICROBATCHES)] == pytest.approx(expected, rel=1e-5)
        for stages in pipeline.stages:
            assert [stage.held for stage in stages.values()] == [(set(), set())] * len(stages)
        if turn == 0:
            assert all(parameter.grad is None for m in pipeline.modules for parameter in m.parameters())
            pipeline.all(lambda executor: executor.step(0))
    for transport in pipeline.transports:
        transport.flush(1.0)  # every sent tensor was received


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where rank 0's tensors pass: changes to and from the host."""
    found: list[str] = []

    def through_host(self: ThreadTransport, is_on: bool, timeout: float) -> None:
        if self.rank == 0:
            found.append("host" if is_on else "direct")

    monkeypatch.setattr(ThreadTransport, "through_host", through_host)
    return found


def test_what_may_be_new_to_a_gpu_passes_through_the_host(ways: list[str]) -> None:
    """The first step, the first evaluation, and the first with other shapes."""
    pipeline = random_pipeline(2)

    def is_first(*, evaluation: bool, shape: int) -> bool:
        def run(executor: Executor) -> None:
            executor.expect([shape] * MICROBATCHES, evaluation=evaluation)
            _ = executor.evaluate(0) if evaluation else executor.step(0)

        ways.clear()
        pipeline.all(run)
        assert ways in ([], ["host", "direct"])
        return bool(ways)

    assert is_first(evaluation=False, shape=0)
    assert not is_first(evaluation=False, shape=0)
    assert is_first(evaluation=True, shape=0)
    assert not is_first(evaluation=True, shape=0)
    assert is_first(evaluation=False, shape=5)
    assert is_first(evaluation=True, shape=5)
    assert not is_first(evaluation=False, shape=0)
    assert not is_first(evaluation=False, shape=5)


def test_steps_that_compile_pass_through_the_host(ways: list[str]) -> None:
    pipeline = random_pipeline(startup_steps=2)
    for _ in range(4):
        pipeline.executors[0].step(0)
    assert ways == ["host", "direct"] * 2


def test_batches_with_ever_new_shapes_soon_pass_between_the_gpus(ways: list[str]) -> None:
    pipeline, firsts = random_pipeline(microbatches=1), []
    for step in range(40):
        ways.clear()
        pipeline.executors[0].expect([step])
        pipeline.executors[0].step(0)
        firsts.append(bool(ways))
    assert firsts == sorted(firsts, reverse=True)
    assert 1 < sum(firsts) < 20


class ModeRecorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(2).eval()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append((self.training, self.inner.training, torch.is_grad_enabled()))
        return self.inner(x)


def test_modules_are_evaluated_in_evaluation_mode_and_then_return_to_their_own_mode() -> None:
    module = ModeRecorder()
    stage = Stage(0, 2, module, 1)
    input = torch.ones(2, 2, requires_grad=True)
    with stage.evaluating():
        output = stage.evaluate(input)
    assert module.seen == [(False, False, False)]
    assert torch.equal(output, torch.ones(2, 2))
    assert not output.requires_grad
    assert (module.training, module.inner.training, module.frozen.training) == (True, True, False)


def test_an_evaluation_that_fails_leaves_the_modules_in_training() -> None:
    pipeline = random_pipeline()
    pipeline.modules[1].register_forward_hook(Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError) as found:
        pipeline.evaluate(9)
    assert found.value.__notes__[0].startswith("rank 0, step 9, action 1F")
    assert all(module.training for module in pipeline.modules)


def test_stages_without_a_model_cannot_be_evaluated() -> None:
    problem = unit_problem(1, MICROBATCHES)
    plan = RankPlan.of("plan", problem, random_orders(problem, Random(1), 0.5), 0)
    nothing = {letter: [0] * MICROBATCHES for letter in "FIWB"}
    stages = {index: SleepingStage(nothing, None, None, SleepingDevice()) for index in plan.stages}
    executor = Executor(plan, stages, NoBatches(), ThreadHub(1).transport(0), device=CPU, timeout=1)
    with pytest.raises(InvalidRun, match="a SleepingStage has no model and cannot be evaluated"):
        executor.evaluate(0)
