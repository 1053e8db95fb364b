"""What one rank measures: its stages' F, I, W and B, their memory, and transfers to its neighbour.

Run as ``python -m zbv_worker.profiling.rank REQUEST`` with torchrun's environment; writes
``profile-RANK.json`` beside the request. The stages are measured on real activations and gradients: one
microbatch is trained through the whole pipeline first, and every stage keeps what it was given.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor
from zbv_solver.channels import channels
from zbv_solver.orders import Action, Orders
from zbv_solver.placement import Placement
from zbv_solver.problem import Costs, Memory, Problem

from zbv_worker.errors import WorkerError, said
from zbv_worker.execution.executor import Executor
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.stage import Stage
from zbv_worker.execution.stages import build_stages
from zbv_worker.launch import keep_freed_memory, pin_to_core
from zbv_worker.model import ModelSpec
from zbv_worker.profiling.held_memory import received_bytes, stage_memory, static_bytes
from zbv_worker.profiling.links import LinkProfiler
from zbv_worker.profiling.profile import (
    PROGRESS_MARK,
    LinkProfile,
    ProfileOptions,
    RankProfile,
    Spread,
    StageProfile,
    rank_json,
)
from zbv_worker.profiling.stopwatch import Seconds, stopwatch
from zbv_worker.transport.channels import Transport, key_of
from zbv_worker.transport.distributed import DistributedTransport, World, select_device

_WARM_UP = 3
_IN_FLIGHT = 2


class RankProfiler:
    """One rank of the measurement."""

    def __init__(self, options: ProfileOptions, transport: Transport, device: torch.device):
        self._options = options
        self._transport = transport
        self._device = device
        self._stopwatch = stopwatch(device)
        self._link_profiler = LinkProfiler(transport, device, options.timeout, self._stopwatch.settle)
        self._problem = _one_microbatch(options.pp_degree)
        orders = _there_and_back(self._problem)
        self._plan = RankPlan.of("profile", self._problem, orders, transport.rank)
        self._keys = [key_of(channel) for channel in channels(self._problem, orders)]

    def measure(self) -> RankProfile:
        """Train one microbatch, then measure; every rank does the same at the same time."""
        transport, timeout = self._transport, self._options.timeout
        transport.open(self._keys, timeout)
        model = self._options.model.build()
        # m = 1 here: a microbatch costs the same whatever its gradients are scaled by.
        stages = build_stages(model, self._plan, self._device)
        seen = {index: _Seen(stage) for index, stage in stages.items()}
        Executor(
            self._plan, stages, model, transport, device=self._device, timeout=timeout, look_ahead=1
        ).step(0)
        for given in seen.values():
            given.release()
        placement, mine = self._problem.placement, transport.rank
        receives = received_bytes(
            placement,
            mine,
            {index: given.input for index, given in seen.items()},
            {index: given.gradient for index, given in seen.items()},
        )
        held = {
            index: stage_memory(given.stage, given.input, given.target, given.gradient, self._device)
            for index, given in seen.items()
        }
        static = static_bytes(model, stages, receives, max(m.workspace for m in held.values()))
        times = self._times(seen)
        profiles = tuple(StageProfile(index, *times[index], *astuple(held[index])) for index in seen)
        return RankProfile(mine, profiles, static, self._p2p(seen), self._links(seen))

    def _times(self, seen: dict[int, _Seen]) -> dict[int, tuple[Spread, Spread, Spread, Spread]]:
        """F, I, W and B by stage."""
        measured: dict[tuple[int, str], list[float]] = {
            (index, letter): [] for index in seen for letter in "FIWB"
        }
        gc.collect()
        for turn in range(_WARM_UP + self._options.repeats):
            # Ranks begin every round together, so that each is measured while the others are busy.
            self._transport.barrier(self._options.timeout)
            found = self._round(seen)
            self._stopwatch.settle()
            if turn >= _WARM_UP:
                for key, seconds in found:
                    measured[key].append(seconds())
            sys.stdout.write(f"{PROGRESS_MARK} {turn}\n")
            sys.stdout.flush()
        of = {key: Spread.of(values) for key, values in measured.items()}
        return {i: (of[i, "F"], of[i, "I"], of[i, "W"], of[i, "B"]) for i in seen}

    def _round(self, seen: dict[int, _Seen]) -> list[tuple[tuple[int, str], Seconds]]:
        """Times of some actions, in an order as plans have it.

        All stages and several microbatches take turns: a stage that runs again and again finds its weights
        and activations in the cache, which in a pipeline it never does.
        """
        found = []
        for split, letters in ((True, "FIW"), (False, "FB")):
            for letter in letters:
                for j in range(_IN_FLIGHT):
                    for index, given in seen.items():
                        seconds = self._stopwatch.time(_action(given, letter, j, split=split))
                        found.append(((index, letter), seconds))
        return found

    def _p2p(self, seen: dict[int, _Seen]) -> dict[int, Spread]:
        """One way of what crosses a boundary, there and back alike; on the rank that times it."""
        found = {}
        for boundary, (near, far) in self._crossings():
            self._transport.barrier(self._options.timeout)
            if self._transport.rank not in (near, far):
                continue
            tensor = seen[boundary].output if self._transport.rank == near else seen[boundary + 1].input
            trips = self._link_profiler.round_trips(near, far, tensor.nbytes, tensor.nbytes)
            if trips:
                found[boundary] = Spread.of([trip / 2 for trip in trips])
        return found

    def _links(self, seen: dict[int, _Seen]) -> tuple[LinkProfile, ...]:
        """Both directions of every pair of neighbours that this rank is the first of."""
        found: list[LinkProfile] = []
        pairs = {tuple(sorted(ranks)): boundary for boundary, ranks in self._crossings()}
        for (near, far), boundary in sorted(pairs.items()):
            self._transport.barrier(self._options.timeout)
            mine = [given for index, given in seen.items() if index in (boundary, boundary + 1)]
            if self._transport.rank in (near, far):
                tensor = mine[0].output if mine[0].stage.index == boundary else mine[0].input
                found += self._link_profiler.links(near, far, tensor.nbytes)
        return tuple(found)

    def _crossings(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """The boundaries between ranks, and the ranks on both sides."""
        rank_of = self._problem.placement.rank_of
        for boundary in range(self._problem.n_stages - 1):
            near, far = rank_of[boundary], rank_of[boundary + 1]
            if near != far:
                yield boundary, (near, far)


class _Seen:
    """Watches a stage during the training of one microbatch and keeps what it was given."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.input = self.output = torch.empty(0)
        self.target: Tensor | None = None
        self.gradient: Tensor | None = None
        self._forward, self._backward = stage.forward, stage.backward
        stage.forward = self._see_forward  # type: ignore[method-assign]  # until release
        stage.backward = self._see_backward  # type: ignore[method-assign]  # until release

    def release(self) -> None:
        """Let the stage be as it was."""
        self.stage.forward = self._forward  # type: ignore[method-assign]
        self.stage.backward = self._backward  # type: ignore[method-assign]

    def _see_forward(
        self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool
    ) -> Tensor:
        self.input, self.target = input.clone(), target
        self.output = self._forward(microbatch, input, target, split=split)
        return self.output

    def _see_backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        self.gradient = None if grad_output is None else grad_output.clone()
        return self._backward(microbatch, grad_output)


def _action(given: _Seen, letter: str, microbatch: int, *, split: bool) -> Callable[[], object]:
    """An action of a stage on what the stage was given."""
    stage, gradient = given.stage, given.gradient
    actions: dict[str, Callable[[], object]] = {
        "F": lambda: stage.forward(microbatch, given.input, given.target, split=split),
        "I": lambda: stage.backward_input(microbatch, gradient),
        "W": lambda: stage.backward_weight(microbatch),
        "B": lambda: stage.backward(microbatch, gradient),
    }
    return actions[letter]


def _one_microbatch(p: int) -> Problem:
    placement = Placement.of("v", p)
    ones = (1.0,) * placement.n_stages
    return Problem(placement, 1, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))


def _there_and_back(problem: Problem) -> Orders:
    """One microbatch down the V and back, with fused backwards."""
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    stages = range(problem.n_stages)
    for letter, order in (("F", stages), ("B", reversed(stages))):
        for stage in order:
            ranks[problem.placement.rank_of[stage]].append(Action(stage, letter, 0))
    return Orders.from_actions(ranks)


def main(request: Path) -> None:
    """Measure as one rank."""
    document = json.loads(request.read_text())
    options = ProfileOptions(**{**document, "model": ModelSpec(**document["model"])})
    world = World.from_environment()
    device = select_device(options.backend, world.local_rank)
    if device.type == "cpu":
        pin_to_core(world.local_rank)
        keep_freed_memory()
        torch.set_num_threads(1)
    transport = DistributedTransport(world, options.backend, device, options.timeout)
    try:
        found = RankProfiler(options, transport, device).measure()
        transport.flush(options.timeout)
        transport.barrier(options.timeout)
    finally:
        transport.close()
    (request.parent / f"profile-{world.rank}.json").write_text(rank_json(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except WorkerError as error:  # its message says it all
        sys.exit(said(error))
