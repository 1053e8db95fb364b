"""The memory that a rank holds follows the plan's account, action by action."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.selfcheck import random_orders
from support.thread_transport import ThreadHub
from torch import Tensor
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Costs, Memory, Placement
from zbv_solver.timing.start_times import memory_profile
from zbv_worker.execution.binding import Bound
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.models.gpt import gpt
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
MICROBATCHES = 5
TOLERANCE = 0.02


def problem_of(memory: Memory | None = None) -> Problem:
    placement = Placement.of("v", 1)
    ones = (1.0, 1.0)
    memory = memory or Memory.unlimited(placement)
    return Problem(placement, MICROBATCHES, Costs(ones, ones, ones, ones[1:]), memory)


def deltas(stages: dict[int, Stage], inputs: dict[int, Tensor], target: Tensor) -> Memory:
    """The plan's account of these stages, measured one microbatch at a time."""
    forward, backward_input, backward_weight = [], [], []
    for index, stage in stages.items():
        is_last = index == len(stages) - 1
        for _ in range(2):  # the second time, parameters have their gradients
            with LiveBytes() as live:
                output = stage.forward(0, inputs[index].clone(), target if is_last else None, split=True)
                gradient = None if is_last else torch.zeros_like(output)
                del output
                held = live.bytes - (0 if gradient is None else gradient.untyped_storage().nbytes())
                stage.backward_input(0, gradient)
                del gradient
                kept = live.bytes
                stage.backward_weight(0)
        forward.append(float(held))
        backward_input.append(float(kept - held))
        backward_weight.append(float(-kept))
    return Memory(tuple(forward), tuple(backward_input), tuple(backward_weight), (0.0,))


@pytest.mark.parametrize("seed", range(4))
def test_live_bytes_after_every_action_follow_the_plan(seed: int) -> None:
    model = gpt(layers=4, width=32, heads=2, length=32, sequences=2, characters=20_000)
    orders = random_orders(problem_of(), Random(seed))
    plan = RankPlan.of("plan", problem_of(), orders, 0)
    stages = build_stages(model, plan, CPU)
    words, target = model.microbatch(0, 0)
    hidden = stages[0].module(words).detach()
    account = problem_of(deltas(stages, {0: words, 1: hidden}, target))
    _, expected = memory_profile(account, orders)

    transport = ThreadHub(1).transport(0)
    executor = Executor(plan, stages, model, transport, device=CPU, timeout=5)
    with LiveBytes() as live:
        seen = watch(executor, live)
        executor.step(0)
    largest = max(expected)
    assert largest > 1e5
    for found, right in zip(seen, expected.tolist(), strict=True):
        assert abs(found - right) <= TOLERANCE * largest
    assert seen[-1] <= TOLERANCE * largest


@pytest.mark.parametrize("p", [1, 2])
def test_the_memory_of_microbatches_of_different_lengths_follows_the_plan(p: int, tmp_path: Path) -> None:
    """The account is a fixed part and one per token."""
    with LocalRanks([python_command("support.memory_rank", str(tmp_path))] * p, tmp_path / "logs") as ranks:
        ranks.wait(100)
    for rank in range(p):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        largest = max(found["expected"])
        assert largest > 1e6
        for seen, expected in zip(found["seen"], found["expected"], strict=True):
            assert abs(seen - expected) <= 0.05 * largest
        assert max(found["seen"]) == pytest.approx(largest, rel=0.05)


def watch(executor: Executor, live: LiveBytes) -> list[int]:
    """The live bytes after every later action, without tensors that are passed between the stages."""
    seen: list[int] = []

    def watched(bound: Bound) -> Bound:
        def run(*value: Any) -> Any:
            output = bound.run(*value)
            passing = [*executor._binding.state.local.values(), *([] if output is None else [output])]
            seen.append(live.bytes - sum(tensor.untyped_storage().nbytes() for tensor in passing))
            return output

        return bound._replace(run=run)

    executor._program = tuple(map(watched, executor._program))
    return seen


def test_the_peak_is_the_largest_number_of_live_bytes_since_the_restart() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        dropped = torch.zeros(2000)
        del dropped
        later = torch.zeros(500)
        assert (live.bytes, live.peak) == (6000, 12000)
        live.restart()
        assert live.peak == live.bytes == 6000
        del kept, later
        assert (live.bytes, live.peak) == (0, 6000)
