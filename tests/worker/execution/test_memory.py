"""The memory that a rank holds follows the plan's account, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.orders import copied_at_random
from support.plans import unit_problem
from support.rank_files import found_by
from support.selfcheck import random_orders
from torch import Tensor
from zbv_solver.construct.pairs import joined
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Communication, Costs, Deltas, Feature, Memory
from zbv_solver.timing.start_times import memory_profile
from zbv_worker.execution.binding import Bound, BoundPair
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.copies import Copies
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import HostTimeline
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.models.gpt import gpt
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.channels import Transport, key_of
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import World
from zbv_worker.values.structure import tensors_of

CPU = torch.device("cpu")
TIMEOUT = 60.0
LOOK_AHEAD, STEPS = 1, 4
WARM_UP = 4
"""Steps until the buffers of the host are as large as they will be."""
WIDTH = 32
LENGTHS = (16, 64, 16, 32, 128, 16, 48, 80)


class OfLengths:
    """A GPT whose microbatches have different lengths."""

    def __init__(self, layers: int) -> None:
        self._whole = whole = gpt(
            layers=layers, width=WIDTH, heads=2, length=max(LENGTHS), sequences=1, characters=20_000
        )
        self.build_stage, self.optimizer, self.loss = whole.build_stage, whole.optimizer, whole.loss

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Characters and their successors."""
        words, target = self._whole.microbatch(step, index)
        return words[:, : LENGTHS[index]], target[:, : LENGTHS[index]]


def deltas(stage: Stage, length: int, *, is_first: bool, is_last: bool) -> Tensor:
    """Changes of memory at F, I and W of one microbatch, and at the R of its copy."""
    words = torch.zeros(1, length, dtype=torch.int64)
    for _ in range(2):  # the second time, parameters have their gradients
        copies = Copies({stage.index: stage}, CPU, HostTimeline())
        forward = copies.keeping(stage.index, 0, partial(stage.forward, 0, split=True))
        with LiveBytes() as live:
            given = words.clone() if is_first else torch.randn(1, length, WIDTH)
            output = forward(given, words if is_last else None)
            gradient = None if is_last else torch.zeros_like(output)
            del output, given
            held = live.bytes - (0 if gradient is None else gradient.nbytes)
            copies.run(Action(stage.index, "O", 0))
            before = live.bytes
            copies.run(Action(stage.index, "D", 0))
            moved = before - live.bytes
            for letter in "RI":
                copies.run(Action(stage.index, letter, 0))
            stage.backward_input(0, gradient)
            del gradient
            kept = live.bytes - copies.host_bytes
            stage.backward_weight(0)
        copies.close()
    return torch.tensor([held, kept - held, -kept, moved], dtype=torch.float64)


def account(problem: Problem, stages: dict[int, Stage]) -> tuple[Problem, Tensor]:
    """The problem with the memory of this rank's stages, and what copies of their microbatches move.

    Memory has a fixed part, and one per token.
    """
    last = problem.n_stages - 1
    fixed, slope = torch.zeros(2, 4, problem.n_stages, dtype=torch.float64)
    for index, stage in stages.items():
        short, long = (deltas(stage, n, is_first=index == 0, is_last=index == last) for n in (32, 96))
        slope[:, index] = (long - short) / 64
        fixed[:, index] = short - 32 * slope[:, index]
        stage.module.zero_grad()
    at_once: list[tuple[float, ...]] = [tuple(row.tolist()) for row in fixed[:3]]
    none = (0.0,) * problem.n_stages
    per_token = Deltas(*(tuple(row.tolist()) for row in slope[:3]))
    hidden = None if problem.communication is None else Communication(none, none, none)
    costs = Costs(none, none, none, none[1:])
    tokens = Feature("tokens", tuple(map(float, LENGTHS)), costs, per_token, hidden)
    memory = Memory(at_once[0], at_once[1], at_once[2], (0.0,) * problem.pp_degree)
    moved = fixed[3, :, None] + slope[3, :, None] * torch.tensor(LENGTHS)
    return replace(problem, memory=memory, features=(tokens,)), moved


def held_on_device(plan: RankPlan, expected: Sequence[float], moved: Tensor) -> list[float]:
    """The account after each action, without what is on the host."""
    found, away = [], 0.0
    for place, held in enumerate(expected):
        for _, (stage, letter, j) in (each for each in plan.copies if each[0] == place):
            away += {"O": 0.0, "D": 1.0, "R": -1.0}[letter] * float(moved[stage, j])
        found.append(held - away)
    return found


def watch(executor: Executor, live: LiveBytes) -> list[int]:
    """The live bytes after every later action, without what it passes on."""
    seen: list[int] = []

    def watched(bound: Any) -> Any:
        if isinstance(bound, BoundPair):
            return BoundPair(*map(watched, bound))
        if not isinstance(bound, Bound):
            return bound

        def run(*value: Any) -> Any:
            output = bound.run(*value)
            passing = [*executor._binding.state.local.values(), output]
            seen.append(live.bytes - sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(passing)))
            return output

        return bound._replace(run=run)

    executor._program = tuple(map(watched, executor._program))
    return seen


def followed(seed: int, transport: Transport) -> dict[str, list[float]]:
    """The bytes that this rank has after each action of a random plan, and those of the account.

    Every second plan has copies to the host, and every fifth one pairs.
    """
    problem = unit_problem(transport.world_size, len(LENGTHS))
    orders: Orders = random_orders(problem, Random(seed), 0.0)
    if seed % 2:
        orders = copied_at_random(orders, Random(seed))
    if seed % 5 == 0:
        half = (0.5,) * problem.n_stages
        problem = replace(problem, communication=Communication(half, half, half))
        orders = joined(problem, orders)
        assert orders.pairs(transport.rank)
    model = OfLengths(layers=4 * transport.world_size)
    plan = RankPlan.of("plan", problem, orders, transport.rank)
    with_features, moved = account(problem, build_stages(model, plan, CPU))
    plan = RankPlan.of("plan", with_features, orders, transport.rank)
    _, expected = memory_profile(with_features, orders.without_copies())
    transport.open([key_of(channel) for channel in plan.channels], TIMEOUT)
    stages = build_stages(model, plan, CPU)
    options = ExecutorOptions(look_ahead=LOOK_AHEAD)
    executor = Executor(plan, stages, model, transport, device=CPU, timeout=TIMEOUT, options=options)
    for _ in range(WARM_UP):
        executor.step(0)
    with LiveBytes() as live:
        seen = watch(executor, live)
        for _ in range(STEPS):
            executor.step(0)
            transport.flush(TIMEOUT)
    # A tensor that the other rank has not taken yet is alive, too; on a busy machine some are at any time.
    of_steps = [seen[begin :: len(seen) // STEPS] for begin in range(len(seen) // STEPS)]
    of_rank = expected[orders.slice_of(transport.rank)].tolist()
    executor.close()
    return {"seen": list(map(min, of_steps)), "expected": held_on_device(plan, of_rank, moved)}


def of_rank(folder: Path, *seeds: str) -> dict[str, dict[str, list[float]]]:
    """What :func:`followed` returns, by seed of a plan."""
    transport = connect(World.from_environment(), "gloo", CPU, TIMEOUT)
    found = {seed: followed(int(seed), transport) for seed in seeds}
    transport.barrier(TIMEOUT)
    transport.close()
    return found


@pytest.mark.parametrize(("p", "tolerance", "seeds"), [(1, 0.005, "34"), (2, 0.05, "3"), (2, 0.05, "10")])
def test_the_memory_of_microbatches_of_different_lengths_follows_the_plan(
    p: int, tolerance: float, seeds: str, tmp_path: Path
) -> None:
    """The account is a fixed part and one per token. Seeds are those of :func:`followed`."""
    for of_rank in found_by("worker.execution.test_memory", p, tmp_path, *seeds):
        for found in of_rank.values():
            largest = max(found["expected"])
            assert largest > 1e6
            differences = [abs(a - b) for a, b in zip(found["seen"], found["expected"], strict=True)]
            assert max(differences) <= tolerance * largest
            assert max(found["seen"]) == pytest.approx(largest, rel=tolerance)


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
