"""Measures what a step costs once: the optimizer's step of every layer, and all-reduces between ranks.

Both are measured on all ranks at the same time, as they happen in a run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from zbv_worker.measure.profile.links import fit
from zbv_worker.measure.profile.profile import LinkSample, ReductionProfile, Spread
from zbv_worker.measure.profile.stopwatch import Seconds, stopwatch
from zbv_worker.measure.ranks import connected
from zbv_worker.model.optimizers import optimizer_of
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.main_gradients import round_main_gradients
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import gradient_of
from zbv_worker.transport.world import Backend, World

SIZES = (1 << 16, 1 << 20, 1 << 23)
"""Bytes of the measured all-reduces."""
_WARM_UP = 2
_ROUNDS = 7
_FLOAT_BYTES = 4


def update_times(
    model: PipelineModel, stages: Mapping[int, Stage], device: torch.device, meet: Callable[[], None]
) -> dict[int, Spread]:
    """Times of an optimizer's step by layer, with the norm of its gradients, as a run computes it.

    Parameters
    ----------
    stages
        Layers that have gradients.
    meet
        Waits for all ranks.
    """
    watch = stopwatch(device)
    updates = {at: update for at, stage in stages.items() if (update := _update(model, stage)) is not None}
    found: defaultdict[int, list[Seconds]] = defaultdict(list)
    for turn in range(_WARM_UP + _ROUNDS):
        meet()
        for at, update in updates.items():
            seconds = watch.time(update)
            if turn >= _WARM_UP:
                found[at].append(seconds)
        watch.settle()
    return {at: Spread.of([each() for each in some]) for at, some in found.items()}


def _update(model: PipelineModel, stage: Stage) -> Callable[[], None] | None:
    parameters = [each for each in stage.module.parameters() if each.requires_grad]
    if not parameters:
        return None
    round_main_gradients(parameters, keep=True)
    optimizer = optimizer_of(model, [("", each) for each in parameters])
    gradients = [found for each in parameters if (found := gradient_of(each)) is not None]

    def update() -> None:
        torch.nn.utils.get_total_norm(gradients)
        optimizer.step()

    return update


def measure_reductions(
    world: World, backend: Backend, device: torch.device, timeout: float
) -> tuple[ReductionProfile, ...]:
    """Collectives of every number of ranks that divides the world; the times of this rank. Collective."""
    sizes = [n for n in range(2, world.world_size + 1) if world.world_size % n == 0]
    return tuple(each for n in sizes for each in _reductions(world, backend, device, timeout, n))


def _reductions(
    world: World, backend: Backend, device: torch.device, timeout: float, ranks: int
) -> Iterator[ReductionProfile]:
    """All-reduces; and what replicas with shards do instead, a reduce-scatter and an all-gather."""
    watch = stopwatch(device)

    def timed(exchange: Callable[[], None]) -> Spread:
        seconds = []
        for turn in range(_WARM_UP + _ROUNDS):
            transport.barrier(timeout)
            watch.settle()
            begun = time.perf_counter()
            exchange()
            watch.settle()
            if turn >= _WARM_UP:
                seconds.append(time.perf_counter() - begun)
        return Spread.of(seconds)

    with connected(world, backend, device, timeout, ranks) as transport:
        for is_sharded in (False, True):
            samples = []
            for size in SIZES:
                part = torch.zeros(size // _FLOAT_BYTES // ranks, device=device)
                whole = torch.zeros(part.numel() * ranks, device=device)

                def exchange(
                    part: Tensor = part, whole: Tensor = whole, *, shares: bool = is_sharded
                ) -> None:
                    if shares:
                        transport.sum_parts_over_replicas(whole, part).wait(timeout)
                        transport.gather_over_replicas(part, whole).wait(timeout)
                    else:
                        transport.sum_over_replicas(whole).wait(timeout)

                samples.append(LinkSample(whole.numel() * _FLOAT_BYTES, timed(exchange)))
            yield _of_samples(ranks, tuple(samples), is_sharded=is_sharded)


def _of_samples(ranks: int, samples: tuple[LinkSample, ...], *, is_sharded: bool) -> ReductionProfile:
    sent = [2 * (ranks - 1) / ranks * each.bytes for each in samples]
    latency, per_byte = fit(sent, [each.seconds.median for each in samples])
    bandwidth = 1 / per_byte if per_byte > 0 else None
    return ReductionProfile(ranks, is_sharded, samples, latency, bandwidth)
