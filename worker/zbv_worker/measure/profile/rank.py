"""One rank's measurement: F, I, W and B of its stages, their memory, and transfers to its neighbours.

:func:`zbv_worker.measure.profile.profile.measure_ranks` runs this module. Stages are measured on real
activations and gradients: the ranks first train one microbatch through the whole pipeline and capture every
stage's tensors. On a CPU, an action's time includes sending its output, because that occupies the same core.

Layers are measured as if each were a stage. Every rank gets an equal share of them, as one stage.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Placement

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.build_stages import build_stages, note_training
from zbv_worker.execution.copies import Copies
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import PlannedCut, RankPlan, require_layered
from zbv_worker.execution.timeline import CudaTimeline, HostTimeline
from zbv_worker.measure.live_bytes import watching
from zbv_worker.measure.profile.captured import Captured, action_of, capture, split_into_layers
from zbv_worker.measure.profile.links import LinkProfiler
from zbv_worker.measure.profile.pairs import pair_profiles
from zbv_worker.measure.profile.per_step import measure_reductions, update_times
from zbv_worker.measure.profile.profile import (
    PROGRESS_MARK,
    CopyProfile,
    LayerProfile,
    LinkProfile,
    PairProfile,
    ProfileOptions,
    RankProfile,
    Spread,
    StageProfile,
    rank_json,
)
from zbv_worker.measure.profile.stopwatch import Seconds, stopwatch
from zbv_worker.measure.profile.traffic import Traffic
from zbv_worker.measure.ranks import answer, connected, equal_stages, use_one_core
from zbv_worker.measure.stage_memory import (
    StageMemory,
    received_bytes,
    stage_memory,
    static_bytes,
)
from zbv_worker.model.checks import layer_names
from zbv_worker.model.layer_list import even_partition
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.model.spec import ModelSpec
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.program import Program
from zbv_worker.transport.channels import Transport, key_of
from zbv_worker.transport.world import World, select_device
from zbv_worker.values.packing import copied
from zbv_worker.values.structure import bytes_of

_WARM_UP = 3
_IN_FLIGHT = 2
_ROUND = ((True, "FIW"), (False, "FB"))
"""The letters of a round with a split backward and of one without."""


class RankProfiler:
    """One rank of the measurement.

    Parameters
    ----------
    model
        The model to measure; by default the options' model.
    is_silent
        Whether to print no progress.

    Raises
    ------
    InvalidRun
        If layers are to be measured, but the model has none, or fewer than there are ranks.
    """

    def __init__(
        self,
        options: ProfileOptions,
        transport: Transport,
        device: torch.device,
        model: PipelineModel | None = None,
        *,
        is_silent: bool = False,
    ):
        self._options = options
        self._transport = transport
        self._device = device
        self._model = options.model.build() if model is None else model
        self._is_silent = is_silent
        self._names = _layer_names(self._model, options) if options.by_layer else ()
        self._stopwatch = stopwatch(device)
        self._traffic: Traffic | None = None
        self._link_profiler = LinkProfiler(transport, device, options.timeout, self._stopwatch.settle)
        p = options.pp_degree
        self._problem = equal_stages(Placement.of("single" if options.by_layer else "v", p), 1)
        orders = _there_and_back(self._problem)
        self._plan = RankPlan.of("profile", self._problem, orders, transport.pp_rank)
        if options.by_layer:
            self._plan = replace(self._plan, cut=PlannedCut(even_partition(self._names, p)))
        self._keys = [key_of(channel) for channel in channels(self._problem, orders)]

    def capture(self) -> dict[int, Captured]:
        """Train one microbatch through the pipeline; returns this rank's stages with their tensors.

        Collective over all ranks.
        """
        transport, timeout = self._transport, self._options.timeout
        transport.open(self._keys, timeout)
        # With m = 1: the scale of gradients does not affect a microbatch's costs.
        program = self._options.program
        stages = build_stages(self._model, self._plan, self._device, program=program)
        for stage in stages.values() if program.has_main_gradients else ():
            use_main_gradients(stage.module.parameters())  # as in training
        note_training(stages.values(), self._problem.placement.n_stages, transport, timeout)
        releases = {index: capture(stage) for index, stage in stages.items()}
        options = ExecutorOptions(look_ahead=1)
        executor = Executor(
            self._plan, stages, self._model, transport, device=self._device, timeout=timeout, options=options
        )
        executor.step(0)
        executor.close()
        captured = {index: release() for index, release in releases.items()}
        if self._device.type == "cpu" and not self._options.by_layer:
            self._traffic = Traffic(transport, self._problem.placement, captured)
        return captured

    def measure(self) -> RankProfile:
        """Train one microbatch, then measure; collective over all ranks."""
        transport, program = self._transport, self._options.program
        captured = self.capture()
        stages = {index: each.stage for index, each in captured.items()}
        sizes = {index: (bytes_of(each.input), bytes_of(each.gradient)) for index, each in captured.items()}
        receives = received_bytes(self._problem.placement, transport.pp_rank, sizes)
        layers: tuple[LayerProfile, ...] = ()
        profiles: tuple[StageProfile, ...] = ()
        if self._options.by_layer:
            layers = self._layers(captured[transport.pp_rank])
            workspace = max(layer.kept.workspace for layer in layers)
        else:
            profiles = tuple(self._profiles([captured])[0].values())
            if self._options.copies:
                copies = self._copies(captured)
                profiles = tuple(replace(each, copies=copies[each.stage]) for each in profiles)
            workspace = max(profile.workspace for profile in profiles)
        static = replace(
            static_bytes(self._model, stages, receives, workspace),
            communicators=transport.communicator_bytes,
        )
        p2p, links = self._p2p(captured), self._links(captured)
        described = program.described(self._device)
        first = captured[transport.pp_rank].input if transport.pp_rank == 0 else None
        shape = tuple(first.shape) if isinstance(first, torch.Tensor) else ()
        return RankProfile(transport.pp_rank, profiles, static, p2p, links, layers, described, shape)

    def _layers(self, captured: Captured) -> tuple[LayerProfile, ...]:
        """Measure the layers of this rank's stage."""
        first = sum(map(len, (self._plan.cut.partition or ())[: self._transport.pp_rank]))
        variants = [
            split_into_layers(
                captured,
                self._model,
                first,
                len(self._names),
                program=self._options.program,
                is_recomputed=is_recomputed,
            )
            for is_recomputed in ((False, True) if self._options.recompute else (False,))
        ]
        kept, *recomputed = self._profiles(variants)
        stages = {at: each.stage for at, each in variants[0].items()}
        timeout = self._options.timeout
        updates = update_times(self._model, stages, self._device, lambda: self._transport.barrier(timeout))
        return tuple(
            LayerProfile(
                self._names[at],
                kept[at],
                recomputed[0][at] if recomputed else None,
                static_bytes(self._model, {at: each.stage}, receives=0, workspace=0),
                bytes_of(each.output),
                updates.get(at),
            )
            for at, each in variants[0].items()
        )

    def _profiles(self, variants: Sequence[Mapping[int, Captured]]) -> list[dict[int, StageProfile]]:
        """Measure memory and times of stages, or of layers, by index and for each variant."""
        memory: list[dict[int, tuple[int, int, int, int]]] = [
            {index: astuple(self._memory(each)) for index, each in variant.items()} for variant in variants
        ]
        times = {key: Spread.of(seconds) for key, seconds in self._times(variants).items()}
        pairs = [self._pairs(variant) if self._options.pairs else {} for variant in variants]
        return [
            {
                index: StageProfile(
                    index,
                    times[number, index, "F"],
                    times[number, index, "I"],
                    times[number, index, "W"],
                    times[number, index, "B"],
                    *memory[number][index],
                    each.stage.split_share,
                    pairs=pairs[number].get(index),
                )
                for index, each in variant.items()
            }
            for number, variant in enumerate(variants)
        ]

    def _memory(self, captured: Captured) -> StageMemory:
        """The memory of a stage's actions; on a CPU uncompiled, because only CUDA counts compiled code's."""
        stage = captured.stage
        tensors = (captured.input, captured.target, captured.gradient)
        if self._device.type == "cuda" and self._options.program.is_compiled:
            # The first microbatch runs uncompiled.
            stage_memory(stage, *tensors, self._device, captured.keywords)
        with nullcontext() if self._device.type == "cuda" else stage.uncompiled():
            return stage_memory(stage, *tensors, self._device, captured.keywords)

    def _pairs(self, captured: Mapping[int, Captured]) -> dict[int, PairProfile]:
        timeout = self._options.timeout
        meet = partial(self._transport.barrier, timeout)
        return pair_profiles(captured, self._device, self._options.repeats, timeout, meet)

    def _copies(self, captured: Mapping[int, Captured]) -> dict[int, CopyProfile]:
        """Measure copies of what every stage keeps; all ranks at once, because they may share the host."""
        found, is_gpu = {}, self._device.type == "cuda"
        timeline = CudaTimeline(self._device) if is_gpu else HostTimeline()
        for index, each in captured.items():
            copies, times = Copies({index: each.stage}, self._device, timeline), []
            forward = copies.keeping(
                index, 0, partial(each.stage.forward, 0, split=False, keywords=each.keywords)
            )

            def run(letters: str, copies: Copies = copies, stage: int = index) -> None:
                for letter in letters:
                    copies.run(Action(stage, letter, 0))

            for turn in range(_WARM_UP + self._options.repeats):
                self._transport.barrier(self._options.timeout)
                copies.begin()
                forward(copied(each.input), each.target)
                round_trip = [self._stopwatch.time(partial(run, letters)) for letters in ("OD", "RB")]
                action_of(each, "B", 0, split=False)()
                self._stopwatch.settle()
                if turn >= _WARM_UP:
                    times.append([seconds() for seconds in round_trip])
            with watching(self._device) as held:
                forward(copied(each.input), each.target)
                run("O")
                before = held.bytes
                run("D")
                moved = before - held.bytes
                run("RB")
                action_of(each, "B", 0, split=False)()
            copies.close()
            offload, reload = map(Spread.of, zip(*times, strict=True))
            found[index] = CopyProfile(offload, reload, max(0, moved))
        return found

    def _times(self, variants: Sequence[Mapping[int, Captured]]) -> dict[tuple[int, int, str], list[float]]:
        """Seconds of F, I, W and B in every round, by variant, stage and letter."""
        measured: dict[tuple[int, int, str], list[float]] = defaultdict(list)
        gc.collect()
        for turn in range(_WARM_UP + self._options.repeats):
            for number, variant in enumerate(variants):
                # Ranks begin every round together, so that each is measured while the others are busy.
                self._transport.barrier(self._options.timeout)
                found = self.round(variant)
                if turn >= _WARM_UP:
                    for (index, letter), seconds in found:
                        measured[number, index, letter].append(seconds())
            if not self._is_silent:
                print(PROGRESS_MARK, turn, flush=True)  # noqa: T201 - the rank's log
        return measured

    def round(self, captured: Mapping[int, Captured]) -> list[tuple[tuple[int, str], Seconds]]:
        """Time some actions, in an order as in plans; returns stage and letter with the time of each.

        Collective over all ranks: each is measured while the others are busy.

        All stages and several microbatches take turns: a stage that runs repeatedly would find its weights
        and activations in the cache, which never happens in a pipeline.
        """
        found, traffic = [], self._traffic
        if traffic is not None:
            traffic.begin([letter for _, letters in _ROUND for letter in letters for _ in range(_IN_FLIGHT)])
        for split, letters in _ROUND:
            for letter in letters:
                for j in range(_IN_FLIGHT):
                    for index, each in captured.items():
                        action = action_of(each, letter, j, split=split)
                        work = action if traffic is None else traffic.sending(index, letter, action)
                        found.append(((index, letter), self._stopwatch.time(work)))
        if traffic is not None:
            traffic.end(self._options.timeout)
        self._stopwatch.settle()
        return found

    def _p2p(self, captured: Mapping[int, Captured]) -> dict[int, Spread]:
        """One-way times of the tensors at each boundary, half of a round trip, if this rank times it."""
        found = {}
        for boundary, (near, far) in self._crossings():
            self._transport.barrier(self._options.timeout)
            if self._transport.pp_rank not in (near, far):
                continue
            output = captured.get(boundary)
            size = bytes_of(output.output if output is not None else captured[boundary + 1].input)
            trips = self._link_profiler.round_trips(
                near, far, size, size, without_sends=self._traffic is not None
            )
            if trips:
                found[boundary] = Spread.of([trip / 2 for trip in trips])
        return found

    def _links(self, captured: Mapping[int, Captured]) -> tuple[LinkProfile, ...]:
        """Both directions of every pair of neighbours, if this rank is the first of the pair."""
        found: list[LinkProfile] = []
        pairs = {tuple(sorted(ranks)): boundary for boundary, ranks in self._crossings()}
        for (near, far), boundary in sorted(pairs.items()):
            self._transport.barrier(self._options.timeout)
            mine = [each for index, each in captured.items() if index in (boundary, boundary + 1)]
            if self._transport.pp_rank in (near, far):
                value = mine[0].output if mine[0].stage.index == boundary else mine[0].input
                found += self._link_profiler.links(near, far, bytes_of(value))
        return tuple(found)

    def _crossings(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """The boundaries between ranks, with the ranks on both sides."""
        rank_of = self._problem.placement.rank_of
        for boundary in range(self._problem.n_stages - 1):
            near, far = rank_of[boundary], rank_of[boundary + 1]
            if near != far:
                yield boundary, (near, far)


def _layer_names(model: PipelineModel, options: ProfileOptions) -> tuple[str, ...]:
    names = layer_names(require_layered(model))
    if len(names) < options.pp_degree:
        raise InvalidRun(
            f"found {len(names)} layers and {options.pp_degree} ranks; every rank needs at least one layer. "
            f"Use fewer ranks, or measure stages instead of layers."
        )
    return names


def _there_and_back(problem: Problem) -> Orders:
    """One microbatch through all stages and back, with fused backwards."""
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    stages = range(problem.n_stages)
    for letter, order in (("F", stages), ("B", reversed(stages))):
        for stage in order:
            ranks[problem.placement.rank_of[stage]].append(Action(stage, letter, 0))
    return Orders.from_actions(ranks)


def main(request: dict[str, Any], world: World) -> Any:
    """Measure as one rank; returns the measurements as JSON."""
    parts = {"model": ModelSpec(**request["model"]), "program": Program(**request["program"])}
    options = ProfileOptions(**{**request, **parts})
    device = select_device(options.backend, world.local_rank)
    if device.type == "cpu":
        use_one_core(world)
    model = options.model.build()  # before the ranks meet, because it may initialise torch.distributed
    with connected(world, options.backend, device, options.timeout, options.ranks_per_stage) as transport:
        found = RankProfiler(options, transport, device, model).measure()
    if options.by_layer and options.ranks_per_stage == 1:
        reductions = measure_reductions(world, options.backend, device, options.timeout)
        found = replace(found, reductions=reductions)
    return rank_json(found)


if __name__ == "__main__":
    answer(main)
