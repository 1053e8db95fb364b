"""What one rank measures: its stages' F, I, W and B, their memory, and transfers to its neighbour.

Run as ``python -m zbv_worker.profile_rank REQUEST`` with torchrun's environment; writes ``profile-RANK.json``
beside the request. The stages are measured on real activations and gradients: one microbatch is trained
through the whole pipeline first, and every stage keeps what it was given.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from zbv_solver.channels import channels
from zbv_solver.orders import Action, Orders
from zbv_solver.placement import Placement
from zbv_solver.problem import Costs, Memory, Problem

from zbv_worker.channels import ChannelKey, TensorSpec, Transport, key_of
from zbv_worker.distributed import DistributedTransport, World, select_device
from zbv_worker.executor import DEFAULT_LOOK_AHEAD, Executor
from zbv_worker.launch import keep_freed_memory, pin_to_core
from zbv_worker.memory import LiveBytes
from zbv_worker.model import ModelSpec, PipelineModel
from zbv_worker.profile import PROGRESS_MARK, ProfileOptions, RankProfile, StageProfile
from zbv_worker.rank_plan import RankPlan
from zbv_worker.run import build_stages
from zbv_worker.stage import Stage

_WARM_UP = 3
_IN_FLIGHT = 2
_PING_PONGS = 20


class RankProfiler:
    """One rank of the measurement."""

    def __init__(self, options: ProfileOptions, transport: Transport, device: torch.device):
        self._options = options
        self._transport = transport
        self._device = device
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
        optimizer_bytes = self._optimizer_bytes(model, stages)
        times = self._times(seen)
        latencies = {
            boundary: latency
            for boundary in range(self._problem.n_stages - 1)
            if (latency := self._ping_pong(boundary, seen)) is not None
        }
        profiles = tuple(
            StageProfile(index, *times[index], *self._held_bytes(given)) for index, given in seen.items()
        )
        static = optimizer_bytes + DEFAULT_LOOK_AHEAD * self._received_bytes(seen)
        return RankProfile(transport.rank, profiles, static, latencies)

    def _times(self, seen: dict[int, _Seen]) -> dict[int, tuple[float, float, float, float]]:
        """Medians of F, I, W and B by stage, in seconds."""
        measured: dict[tuple[int, str], list[float]] = {
            (index, letter): [] for index in seen for letter in "FIWB"
        }
        gc.collect()
        for turn in range(_WARM_UP + self._options.repeats):
            # Ranks begin every round together, so that each is measured while the others are busy.
            self._transport.barrier(self._options.timeout)
            found = self._round(seen)
            if turn >= _WARM_UP:
                for key, seconds in found:
                    measured[key].append(seconds)
            sys.stdout.write(f"{PROGRESS_MARK} {turn}\n")
            sys.stdout.flush()
        middle = {key: median(values) for key, values in measured.items()}
        return {i: (middle[i, "F"], middle[i, "I"], middle[i, "W"], middle[i, "B"]) for i in seen}

    def _round(self, seen: dict[int, _Seen]) -> list[tuple[tuple[int, str], float]]:
        """Times of some actions, in an order as plans have it.

        All stages and several microbatches take turns: a stage that runs again and again finds its weights
        and activations in the cache, which in a pipeline it never does.
        """
        found = []
        for split, letters in ((True, "FIW"), (False, "FB")):
            for letter in letters:
                for j in range(_IN_FLIGHT):
                    for index, given in seen.items():
                        seconds = self._timed(_action(given, letter, j, split=split))
                        found.append(((index, letter), seconds))
        return found

    def _timed(self, work: Callable[[], object]) -> float:
        self._synchronise()
        start = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - start

    def _held_bytes(self, given: _Seen) -> tuple[int, int]:
        """Bytes held after F and after I. Inputs and gradients count: a rank receives new ones each time."""
        stage = given.stage
        with _allocated(self._device) as held:
            stage.forward(0, given.input.clone(), given.target, split=True)
            after_forward = held()
            stage.backward_input(0, None if given.gradient is None else given.gradient.clone())
            after_input = held()
            stage.backward_weight(0)
        return max(0, after_forward), max(0, after_input)

    def _ping_pong(self, boundary: int, seen: dict[int, _Seen]) -> float | None:
        """One-way latency of a boundary's activation; None on ranks that do not time it."""
        rank_of = self._problem.placement.rank_of
        near, far = rank_of[boundary], rank_of[boundary + 1]
        self._transport.barrier(self._options.timeout)
        if near == far or self._transport.rank not in (near, far):
            return None
        there, back = ChannelKey(near, far, "activation"), ChannelKey(far, near, "gradient")
        if self._transport.rank == far:
            spec = TensorSpec.of(seen[boundary + 1].input)
            for _ in range(_PING_PONGS):
                arrived = self._transport.irecv(there, spec).wait(self._options.timeout)
                self._transport.isend(back, arrived, "ping-pong")
            return None
        output = seen[boundary].output
        spec, seconds = TensorSpec.of(output), []
        for _ in range(_PING_PONGS):
            pending = self._transport.irecv(back, spec)
            start = time.perf_counter()
            self._transport.isend(there, output, "ping-pong")
            pending.wait(self._options.timeout)
            seconds.append((time.perf_counter() - start) / 2)
        return median(seconds)

    def _optimizer_bytes(self, model: PipelineModel, stages: dict[int, Stage]) -> int:
        """Parameters, gradients and optimizer state, which one step brings into being."""
        parameters = list(chain.from_iterable(stage.module.parameters() for stage in stages.values()))
        if not parameters:
            return 0
        optimizer = model.optimizer(parameters)
        optimizer.step()
        state = (value for entry in optimizer.state.values() for value in entry.values())
        gradients = [parameter.grad for parameter in parameters]
        return _bytes(chain(parameters, gradients, state))

    def _received_bytes(self, seen: dict[int, _Seen]) -> int:
        """One tensor of every channel that this rank receives on, the largest where boundaries differ."""
        placement, mine = self._problem.placement, self._transport.rank
        largest: dict[ChannelKey, int] = {}
        for index, given in seen.items():
            for kind, peer_stage, tensor in (
                ("activation", index - 1, given.input),
                ("gradient", index + 1, given.gradient),
            ):
                if 0 <= peer_stage < placement.n_stages and placement.rank_of[peer_stage] != mine:
                    key = ChannelKey(placement.rank_of[peer_stage], mine, kind)  # type: ignore[arg-type]  # of str
                    largest[key] = max(largest.get(key, 0), _bytes([tensor]))
        return sum(largest.values())

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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


class _allocated:
    """``with _allocated(device) as held``: ``held()`` is how many bytes were allocated since, less freed."""

    def __init__(self, device: torch.device):
        self._device = device
        self._live = LiveBytes()

    def __enter__(self) -> Callable[[], int]:
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            return lambda: torch.cuda.memory_allocated(self._device) - before
        live = self._live.__enter__()
        return lambda: live.bytes

    def __exit__(self, *raised: Any) -> None:
        if self._device.type != "cuda":
            self._live.__exit__(*raised)


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


def _bytes(tensors: Iterable[object]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


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
    (request.parent / f"profile-{world.rank}.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
